"""A fault, and what happened, line by line: begins, steps, injected faults and ends of cells. Standard library only.

The control folder of a round holds `journal.jsonl`, the faults of every cell and a marker per fault that was injected.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

VARIABLE = "LOWBIT_FAULTS"
"""Environment variable that names the control folder."""
VOLUME = "LOWBIT_FAULTS_VOLUME"
"""Environment variable that names the folder of a small volume of its own, which may be filled."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of the plan."""

    id: str
    kind: str
    form: str
    step: int = 0
    """Steps done when it is injected, at the earliest."""

    @property
    def is_ending(self) -> bool:
        """Does the cell's process end by it?"""
        return self.kind not in ("state", "nan") and not self.form.startswith("state ")


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One line of the journal."""

    what: Literal["begin", "step", "inject", "end", "told"]
    cell: str
    """Run id; empty for what concerns the sweep."""
    at_s: float
    """Seconds since the epoch."""
    pid: int = 0
    parent: int = 0
    """Process of the sweep that started the cell."""
    step: int = 0
    fault: str = ""
    status: str = ""


def note(control: Path, what: str, cell: str, **values: object) -> None:
    """Append a mark of now; one write of a short line is not torn by others."""
    mark = Mark(**({"what": what, "cell": cell, "at_s": time.time()} | values))  # type: ignore[arg-type]
    handle = os.open(control / "journal.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, (json.dumps(asdict(mark)) + "\n").encode())
    finally:
        os.close(handle)


def read(control: Path) -> list[Mark]:
    """Every mark, in the order of time."""
    path = control / "journal.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return sorted((Mark(**json.loads(line)) for line in lines), key=lambda mark: mark.at_s)


def claim(control: Path, fault: str) -> bool:
    """Take a fault for this process; False where it was injected before."""
    try:
        os.close(os.open(control / f"injected-{fault}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def was_injected(control: Path, fault: str) -> bool:
    """Was the fault claimed?"""
    return (control / f"injected-{fault}").exists()


def write_faults(control: Path, cell: str, faults: Sequence[Fault]) -> None:
    """Write the faults of a cell, in order."""
    (control / f"faults-{cell}.json").write_text(json.dumps([asdict(fault) for fault in faults]), encoding="utf-8")


def read_faults(control: Path, cell: str) -> list[Fault]:
    """The faults of a cell; none where none were written."""
    path = control / f"faults-{cell}.json"
    return [Fault(**one) for one in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []
