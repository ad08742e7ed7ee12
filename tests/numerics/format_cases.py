"""The formats of the code paths: those that differ in more than the width of their groups or in who uses them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.numerics.formats import FORMATS, Format


def path_of(fmt: Format) -> Format:
    """`fmt` without its name and with groups of one column: equal for formats that run through the same lines."""
    return replace(fmt, name="", tile=fmt.tile and (fmt.tile[0], min(fmt.tile[1], 1)))


PATHS = [*{path_of(fmt): fmt for fmt in reversed(FORMATS.values())}.values()][::-1]
"""The first format of each path: the narrowest groups, so that a row has several."""
SCALED = [fmt for fmt in PATHS if fmt.tile is not None]


def by_name(formats: list[Format]) -> pytest.MarkDecorator:
    """One case for each format."""
    return pytest.mark.parametrize("fmt", formats, ids=[fmt.name for fmt in formats])
