"""The faults of one cell's process: which of them is due, and the ones that only kill. Imports nothing heavy."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

from harness.devtools.faults.journal import VARIABLE, Fault, claim, note, read_faults, was_injected


class Injector:
    """Owns the faults of one cell's process: each is injected at most once, in their order."""

    def __init__(self, cell: Path) -> None:
        self.cell = cell
        self.control = Path(os.environ[VARIABLE])
        self.id = cell.parent.name
        self.parent = os.getppid()
        self.faults = read_faults(self.control, self.id)
        self.step = 0

    def note(self, what: str, **values: object) -> None:
        """Write to the journal."""
        note(self.control, what, self.id, pid=os.getpid(), parent=self.parent, step=self.step, **values)

    def due(self, kinds: Iterable[str], forms: Iterable[str]) -> Fault | None:
        """The fault that is injected now, taken and noted; none behind one that will end this process first."""
        for fault in self.faults:
            if was_injected(self.control, fault.id):
                continue
            if fault.kind in kinds and fault.form in forms and self.step >= fault.step:
                if claim(self.control, fault.id):
                    self.note("inject", fault=fault.id)
                    return fault
                continue
            if fault.is_ending:
                return None
        return None

    def at(self, moment: str) -> None:
        """Be killed, or kill the sweep, where that is due at this moment."""
        if self.due(("kill",), (moment,)):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.due(("kill_sweep",), (moment,)) and os.getppid() == self.parent:
            os.kill(self.parent, signal.SIGKILL)
