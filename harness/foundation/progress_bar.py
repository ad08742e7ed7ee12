"""A progress bar on the terminal, for what takes seconds before it says anything."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")
PATIENCE_S = 1.0
"""Seconds without a bar: what is done by then shows none."""


def progress_bar(items: Iterable[T], unit: str) -> Iterable[T]:
    """The same items, with a bar on stderr where that is a terminal, which goes when they end."""
    return tqdm(items, unit=f" {unit}", leave=False, delay=PATIENCE_S, disable=not sys.stderr.isatty())
