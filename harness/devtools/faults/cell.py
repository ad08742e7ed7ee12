"""`python -m harness.devtools.faults.cell CELL.json`: `harness.run.cell` with faults at chosen moments.

Everything heavy is imported late, so that a cell can be killed before. What is patched are names that
`harness.run.cell` looks up at its moments: built, step done, state written, record written.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.devtools.faults.journal import VARIABLE, Fault, claim, has_struck, note, orders


class Striker:
    """Owns the orders of one cell's process: strikes at most once each, in their order."""

    def __init__(self, cell: Path) -> None:
        self.cell, self.control = cell, Path(os.environ[VARIABLE])
        self.id, self.parent = cell.parent.name, os.getppid()
        self.orders, self.step = orders(self.control, self.id), 0

    def note(self, what: str, **values: object) -> None:
        """Write to the journal."""
        note(self.control, what, self.id, pid=os.getpid(), parent=self.parent, step=self.step, **values)

    def due(self, kinds: Iterable[str], forms: Iterable[str]) -> Fault | None:
        """The fault that strikes now, taken and noted; none behind one that will end this process first."""
        for fault in self.orders:
            if has_struck(self.control, fault.id):
                continue
            if fault.kind in kinds and fault.form in forms and self.step >= fault.step:
                if claim(self.control, fault.id):
                    self.note("strike", fault=fault.id)
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


def main(path: str) -> int:
    """Run the cell that a JSON file describes, with its faults."""
    striker = Striker(Path(path))
    striker.note("begin")
    striker.at("import")
    from harness.devtools.faults import strikes
    from harness.run import cell

    strikes.damage_state(striker)
    strikes.arm(striker)
    run: Any = cell.main
    return run(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
