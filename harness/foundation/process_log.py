"""The log of a process that ended: its last lines, and the line that names an error."""

from __future__ import annotations

import os
import re
from pathlib import Path

LONGEST = 600
"""Characters of a reason."""
TAIL = 65536
"""Bytes of a log's end that are looked through."""
CLAIM = re.compile(
    r"\b(?:[A-Z]\w*(?:Error|Exception|Interrupt|Exit)|Exception)\b:?|Check failed:|Unable to |Failed to "
)
"""Pattern of a line that tells why a process ended: the end of a traceback, a check of Ray's native processes."""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def tail(path: Path, start: int = 0, limit: int = TAIL) -> str:
    """The end of what was written to a file behind byte `start`, as text; empty where the file cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - limit))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def last_words(log: str, otherwise: str = "") -> str:
    """The last line that names an error and only warns of none, else the last line of all, else `otherwise`."""
    lines = [line for raw in log.splitlines() if (line := COLOURS.sub("", raw).strip())]
    claims = [line for line in lines if CLAIM.search(line) and "Warning" not in line]
    return one_line((claims or lines or [otherwise])[-1])


def one_line(text: str) -> str:
    """The last line of a text with a traceback, else the text on one line; the traceback itself is in the log."""
    lines = text.strip().splitlines()
    if any(line.startswith("Traceback (most recent call last)") for line in lines):
        lines = lines[-1:]
    line = " ".join(" ".join(lines).split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."
