"""Progress of a running cell: a file of its work folder that its launcher reads."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

NAME = "progress.json"


def tell(work: Path, step: int, steps: int, reward: float | None = None, note: str | None = None) -> None:
    """Write the cell's step of `steps` and its reward; before the first step a line about what it does. Where the work
    folder is not there or the disk is full, nothing."""
    shown: dict[str, Any] = {"step": step, "steps": steps, "reward": reward, "note": note}
    temporary = work / "progress.part"
    with suppress(OSError):
        try:
            temporary.write_text(json.dumps(shown), encoding="utf-8")
            temporary.replace(work / NAME)
        finally:
            temporary.unlink(missing_ok=True)  # a full disk leaves an empty one


def told(work: Path) -> tuple[int, str | None]:
    """(step, line) that `tell` wrote. Raises OSError, ValueError, KeyError or TypeError where it wrote none, and for a
    damaged file."""
    shown = json.loads((work / NAME).read_text(encoding="utf-8"))
    return int(shown["step"]), shown.get("note")
