"""The owner of a connection to Weights & Biases, which logs cells one at a time.

W&B cannot be asked what it holds while it is offline, so the keys of logged cells are kept in
`<results>/wandb/logged.txt`. A record that changed is a new run; the old one is left to the user.
"""

# pyright: reportAttributeAccessIssue=false, reportUnknownMemberType=false
# Where wandb is not installed, pyright takes this folder for it.

from __future__ import annotations

import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from harness.records.arms import arm_labels
from harness.records.folder import readable
from harness.records.paths import runs_folder, wandb_folder
from harness.studies.search.tags import trial_tags
from harness.viewers.tracking import facts
from harness.viewers.tracking.facts import Point
from harness.viewers.tracking.tracker import Cell, log_cells, warn_off

if TYPE_CHECKING:
    from wandb import Run

PROJECT = "lowbit"
QUIET = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", "DO_NOT_TRACK": "true"}


class WandbTracker:
    """Owns what W&B runs beside us. After the first error it does nothing and says so once."""

    name = "W&B"
    max_points: int | None = None

    def __init__(self, results: Path) -> None:
        self.results, self.is_on = results, True
        self.ledger = wandb_folder(results) / "logged.txt"
        self.known = set[str]()
        try:
            self.ledger.parent.mkdir(parents=True, exist_ok=True)
            if self.ledger.exists():
                self.known = set(self.ledger.read_text(encoding="utf-8", errors="replace").split("\n"))
        except OSError as error:
            self.give_up(error)
        for name, value in (QUIET | {"WANDB_CACHE_DIR": str(self.ledger.parent / "cache")}).items():
            os.environ.setdefault(name, value)

    def start(self, cell: Cell) -> WandbRun | None:
        """Open a run for a cell; None where it is logged already."""
        if cell.key in self.known:
            return None
        import wandb

        settings = wandb.Settings(
            console="off", silent=True, x_disable_stats=True, disable_git=True, disable_code=True,
            x_disable_machine_info=True,
        )  # fmt: skip
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            entity=os.environ.get("WANDB_ENTITY"),
            mode="online" if os.environ.get("WANDB_MODE") == "online" else "offline",
            dir=str(self.results),
            id=f"{crc32(cell.sweep.encode()):08x}-{cell.key.rpartition('/')[2].replace('@', '-')}",
            name=f"{cell.arm}, seed {cell.result.seed}",
            group=f"{facts.plain_name(cell.result)} {facts.arm_key(cell.result)}",
            job_type=cell.sweep,
            tags=[cell.result.method.name, cell.result.status, cell.sweep[:64]],
            config={"tags": dict(cell.tags)},
            reinit="create_new",
            settings=settings,
        )
        return WandbRun(run, cell, self)

    def outages(self) -> tuple[type[Exception], ...]:
        """All errors: those of W&B have no kind in common, such as the one when the process beside us is gone."""
        return (Exception,)

    def give_up(self, error: BaseException) -> None:
        """Be silent from here on, after one warning."""
        self.is_on = False
        warn_off(self.name, error, " --tracking wandb")

    def close(self) -> None:
        """End the process that W&B runs beside us."""
        if "wandb" not in sys.modules:
            return
        try:
            sys.modules["wandb"].teardown()
        except self.outages() as error:
            if self.is_on:
                self.give_up(error)

    def remember(self, key: str) -> None:
        """Keep the key of a cell that is logged completely."""
        self.known.add(key)
        with self.ledger.open("a", encoding="utf-8") as file:
            file.write(f"{key}\n")


class WandbRun:
    """A run that is open in W&B."""

    def __init__(self, run: Run, cell: Cell, tracker: WandbTracker) -> None:
        self.run, self.cell, self.tracker = run, cell, tracker

    def params(self, values: Mapping[str, str]) -> None:
        """Set the config."""
        self.run.config.update(dict(values))

    def series(self, points: Sequence[Point], axis: str = "step") -> None:
        """Log a row per step, with the time at which it was measured; values of the whole run go to its summary."""
        curves = {point.name for point in points if point.step} if axis == "step" else {point.name for point in points}
        rows: dict[int, dict[str, Any]] = defaultdict(dict)
        times: dict[int, int] = {}
        for point in points:
            if point.name in curves:
                rows[point.step][point.name] = point.value
                times[point.step] = min(point.milliseconds, times.get(point.step, point.milliseconds))
        self.run.define_metric(axis)
        for name in sorted(curves):
            self.run.define_metric(name, step_metric=axis)
        latest = max(times.values(), default=0)
        for step in sorted(times, reverse=True):  # an evaluation has the time of the run's end, which is too late
            latest = rows[step]["_timestamp"] = min(latest, times[step])
        for step, row in sorted(rows.items()):
            self.run.log({axis: step, **row, "_timestamp": row["_timestamp"] / 1000})
        self.run.summary.update({point.name: point.value for point in points if point.name not in curves})

    def artifact(self, path: Path) -> None:
        """Copy a file into the run."""
        copy = shutil.copy(path, self.run.dir)
        self.run.save(copy, base_path=self.run.dir, policy="now")

    def end(self) -> None:
        """Close the run and remember it."""
        self.run.finish(exit_code=0 if self.cell.result.status == "ok" else 1)
        self.tracker.remember(self.cell.key)


def log_sweep(tracker: WandbTracker, results: Path, sweep: str) -> int:
    """Log what is missing of one sweep; files that are no results are left alone."""
    folder = runs_folder(results, sweep)
    runs, _ = readable(folder)
    return log_cells(tracker, sweep, runs, folder, arm_labels(runs), trial_tags(results, sweep))
