"""Tables of plain text for the terminal."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Columns aligned by width, header underlined."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in (header, *rows)]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])
