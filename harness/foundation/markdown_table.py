"""The Markdown table of every page of results; its twin for a terminal is `text_table`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

BARE = re.compile(r"(?<!\\)\|")
"""A bar that nobody escaped: it would end its cell."""


def markdown_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    align: str = "l",
    is_escaped: bool = False,
) -> str:
    """Lines of a table. `align` has a letter per column, l (text) or r (numbers); its last one counts for the rest.

    Bars within cells are escaped, also in code, as GitHub needs it; `is_escaped`: the caller did that for another
    reader. Raises ValueError for a row that is not as wide as the header.
    """
    marks = {"l": "---", "r": "---:"}
    letters = align.ljust(len(header), align[-1])[: len(header)]
    lines = [_line(header, is_escaped), "|" + "".join(f"{marks[one]}|" for one in letters)]
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"table: a row of {len(row)} cells under a header of {len(header)}: {list(row)}")
        lines.append(_line(row, is_escaped))
    return "\n".join(lines)


def _line(cells: Sequence[str], is_escaped: bool) -> str:
    return "| " + " | ".join(cells if is_escaped else (BARE.sub(r"\|", cell) for cell in cells)) + " |"
