"""Writing a figure to a file: whole or not at all, and without a date, so that equal results give equal files."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from harness.foundation.whole_file import write_atomic
from harness.report.plots.style import STYLE

DATELESS: dict[str, dict[str, Any]] = {"png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
"""Kind of file -> what its metadata leave out."""


def image(
    figure: Figure, kind: str = "png", dpi: float | None = None, metadata: Mapping[str, Any] | None = None
) -> bytes:
    """The figure as a file of `kind` ("png", "pdf", "svg") at `dpi` dots per inch, by default the style's; `metadata`
    of the file beyond matplotlib's own. Afterwards the figure keeps its layout, which a second pass would move."""
    data = io.BytesIO()
    dpi = dpi or mpl.rcParams["savefig.dpi"]
    figure.savefig(data, format=kind, dpi=dpi, metadata=DATELESS[kind] | dict(metadata or {}))
    figure.set_layout_engine("none")
    return data.getvalue()


def save(figure: Figure, path: Path) -> Path:
    """Write the figure, in the kind that the path ends with. Raises ValueError where the file cannot be written."""
    write_atomic(path, image(figure, path.suffix[1:]))
    return path


def save_png(draw: Callable[[], Figure | None], path: Path) -> list[Path]:
    """Draw in the house style and write: the path, or nothing where there is nothing to draw."""
    with mpl.rc_context(fname=STYLE):
        figure = draw()
        return [] if figure is None else [save(figure, path)]
