"""A sweep under faults: `python -m harness.devtools.faults.driver SWEEP.json` runs `run_sweep` on given cells.

Its cells run `harness.devtools.faults.cell` where the environment names a control folder, `harness.run.cell`
otherwise. Exit codes: 0 every cell has an ok or diverged record, 1 some have not, 2 refused (the reason is the last
line printed).
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config.load import parse
from harness.config.schema import Launch, RunConfig
from harness.devtools.faults.journal import VARIABLE
from harness.records.statuses import FINISHED
from harness.sweep import Planned, Sweep, run_sweep
from harness.sweep.launchers.job import Event
from harness.sweep.launchers.local import run_cells

if TYPE_CHECKING:
    from harness.viewers.tracking.live import Live


def main(path: str) -> int:
    """Run the cells that a JSON file lists; events go to standard output, one line each."""
    words = json.loads(Path(path).read_text(encoding="utf-8"))
    cells = tuple(parse(RunConfig, cell) for cell in words["cells"])
    launch = parse(Launch, words["launch"])
    module = "harness.devtools.faults.cell" if VARIABLE in os.environ else "harness.run.cell"
    run = partial(run_cells, workers=words["workers"], module=module)
    one = Sweep(name=launch.sweep, question="", arms=({},), seeds=(0,))
    live: Live | None = None
    if words["tracking"] is not None:
        from harness.viewers.mlflow import Tracker
        from harness.viewers.tracking.live import Live

        results, address = Path(launch.results), words["tracking"]
        live = Live(results, launch.sweep, [lambda: Tracker.open(address, results)])

    def tell(event: Event) -> None:
        if live is not None:
            live(event)
        if event.result is not None:
            print(f"{event.result.run_id} {event.result.status}: {event.result.reason}", flush=True)

    try:
        with live or nullcontext():
            planned = Planned(sweep=one, cells=cells, skipped=())
            records, _ = run_sweep(planned, launch, words["workers"], tell, run=run)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if len(records) == len(cells) and all(record.status in FINISHED for record in records) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
