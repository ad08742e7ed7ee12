"""Tables of plain text, drawn by rich: as wide as the terminal, long cells wrapped inside their column.

Where the output is no terminal (a pipe, a file) nothing is wrapped, so that a row stays a line. A terminal too narrow
for the first column and the longest words of the others gets a wider table, so that no column is lost.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Sequence
from typing import Any

UNBOUNDED = 100_000
"""Width of a table that nobody looks at through a window."""


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Columns aligned by width under an underlined header. `width` in columns; None: the terminal's."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    table = Table(box=_rule(), show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    whole = max(cell_len(row[0]) for row in (header, *rows))  # a name in the first column is kept in one piece
    for place, title in enumerate(header):
        table.add_column(Text(title), overflow="fold", no_wrap=place == 0, min_width=None if place else whole)
    for row in rows:
        table.add_row(*map(Text, row))
    drawn = io.StringIO()
    console = Console(file=drawn, width=width or _width(), color_system=None, legacy_windows=False)
    least = Measurement.get(console, console.options.update(max_width=UNBOUNDED), table).minimum
    console.width = max(console.width, least)
    console.print(table)
    return "\n".join(line.rstrip() for line in drawn.getvalue().splitlines())


def _width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else UNBOUNDED


def _rule() -> Any:
    """Rich's box of a single rule below the header."""
    from rich import box

    return box.Box("    \n    \n ── \n    \n    \n    \n    \n    \n")
