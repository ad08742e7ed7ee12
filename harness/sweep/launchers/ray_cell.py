"""The side of the Ray launcher that runs on a node: one cell, run by the local launcher in a scratch folder.

Nothing is shared with the driver but values: the files a cell needs come as bytes, what it made goes back as bytes.
So a cell that outlives its lost driver or worker can overwrite nobody's result.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from harness.config.load import run_id
from harness.foundation.whole_file import write_atomic
from harness.records.paths import bases_folder, rollouts_path
from harness.records.run_result import RunResult
from harness.run.cell import record_path, work_folder
from harness.sweep.launchers.job import Job
from harness.sweep.launchers.local import run_cells

Files = dict[str, bytes]
"""Path relative to a results folder -> content."""
STATES = ("state.pt", "state.pt.corrupt")


@dataclass(frozen=True, kw_only=True)
class CellFiles:
    """End of a cell on a node, with its files."""

    result: RunResult | None
    """Record of the cell; None where it was stopped before it ended."""
    files: Files
    """The cell's record and series, its state where there is something to resume, the base that it trained,
    its responses where they are asked for."""


class RayCell:
    """The owner of one cell on a node; the launcher makes an actor of it."""

    def __init__(self) -> None:
        self.pid, self.step, self.is_stopping = 0, 0, False
        self.note: str | None = None
        self.root: Path | None = None
        self.state: Path | None = None

    def run(self, job: Job, given: Files, scratch: str | None, directory: str | None) -> CellFiles:
        """Run the cell to its end, or until `stop`. Raises ValueError or OSError where the node's disk is full.

        Paths that the cell's config names are relative to `directory`, where that is given.
        """
        if directory is not None:
            os.chdir(directory)
        with tempfile.TemporaryDirectory(prefix="lowbit-cell-", dir=scratch, ignore_cleanup_errors=True) as folder:
            here = Job(config=job.config, launch=replace(job.launch, results=folder))
            root, work = Path(folder), work_folder(here.launch, run_id(job.config))
            for name, data in given.items():
                write_atomic(root / name, data)
            self.root, self.state, result = root, work / "state.pt", None
            with closing(run_cells([here], 1)) as events:
                for event in events:
                    self.pid, self.step = event.pid or self.pid, max(self.step, event.step)
                    result, self.note = event.result, event.note
                    if self.is_stopping:
                        break
            path = record_path(here.launch, run_id(job.config))
            wanted = [path, path.with_suffix(".parquet"), *(work / name for name in STATES)]
            wanted.append(rollouts_path(folder, here.launch.sweep, run_id(job.config)))
            made = {str(file.relative_to(root)): file.read_bytes() for file in wanted if file.is_file()}
            made |= {name: data for name, data in _bases(root).items() if name not in given}
            return CellFiles(result=result, files=made)

    def look(self, wants_state: bool, wants_base: bool) -> tuple[int, int, str | None, bytes | None, Files]:
        """(process id of the cell, 0 before it runs; steps done; line about what it does before; its saved state, where
        wanted and there; the files of the base that it trained, likewise)."""
        state, base = None, Files()
        with suppress(OSError):
            state = self.state.read_bytes() if wants_state and self.state is not None else None
        with suppress(OSError):
            base = _bases(self.root) if wants_base and self.root is not None else base
        return self.pid, self.step, self.note, state, base

    def stop(self) -> None:
        """Ask the cell to save its state and end; `run` then returns."""
        self.is_stopping = True


def _bases(root: Path) -> Files:
    """Files of the whole bases in a results folder."""
    return {str(file.relative_to(root)): file.read_bytes() for file in bases_folder(root).glob("[!.]*/*")}
