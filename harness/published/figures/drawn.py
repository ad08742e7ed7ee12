"""A drawn paper figure: the figure itself, the numbers behind it, and sentences computed from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from harness.foundation.whole_file import write_atomic
from harness.published.figures.estimates import bracketed
from harness.report.plots.save import image
from harness.report.plots.style import STYLE

NOTEBOOK_DPI = 110
BOUNDS = ("_low", "_high")


@dataclass(frozen=True, kw_only=True, repr=False)
class Drawn:
    """One figure. Notebooks show it by its PNG."""

    figure: Figure
    numbers: pd.DataFrame
    """A row per arm; `x_low` and `x_high` bound the 95 % interval over seeds of column `x`."""
    says: tuple[str, ...]
    """Sentences computed from the numbers."""

    def __repr__(self) -> str:
        return f"figure with {len(self.numbers)} rows of numbers"

    def _repr_png_(self) -> bytes:
        return png(self.figure, NOTEBOOK_DPI)


def png(figure: Figure, dpi: int = 200) -> bytes:
    """The image without a date and a version: equal results give equal bytes."""
    with mpl.rc_context(fname=STYLE):
        return image(figure, dpi=dpi, metadata={"Software": None})


def save(drawn: Drawn, folder: Path, name: str) -> list[Path]:
    """Write `<name>.png`, and `<name>.csv` with the numbers. Raises ValueError where a file cannot be written."""
    files = {
        f"{name}.png": png(drawn.figure),
        f"{name}.csv": drawn.numbers.to_csv(index=False, float_format="%.5g").encode(),
    }
    for file, data in files.items():
        write_atomic(folder / file, data)
    return [folder / file for file in files]


def folded(numbers: pd.DataFrame) -> pd.DataFrame:
    """A figure's numbers for reading: value and interval in one column of text, three significant digits."""
    names = [name for name in numbers if not str(name).endswith(BOUNDS)]
    columns = {str(name): [_cell(row, str(name)) for row in numbers.to_dict("records")] for name in names}
    return pd.DataFrame(columns)


def _cell(row: dict[str, object], name: str) -> object:
    value, low, high = row[name], row.get(f"{name}_low", math.nan), row.get(f"{name}_high", math.nan)
    if not isinstance(value, float) or not isinstance(low, float) or not isinstance(high, float):
        return value
    return bracketed(value, low, high)
