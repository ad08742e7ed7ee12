"""The error at the bottom of a chain of errors, for a message or a record of one line."""

from __future__ import annotations

LINES = 3
LONGEST = 400
"""Characters of what the error says."""


def root_cause(error: BaseException) -> str:
    """The first error of a chain in one line: its type, and the first lines of what it says."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {'; '.join(lines[:LINES])[:LONGEST]}"
