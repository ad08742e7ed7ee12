"""One cell in one process: build, resume, train, and leave a result whatever happens.

    python -m harness.run.cell CELL.json      (written by the launcher: {"config": ..., "launch": ...})

Exit codes: 0 a result was written, whatever its status; 3 cancelled, a state to resume from was written; 4 the result
could not be written, the last line of the log says why. This is a process edge, so here alone any exception becomes a
record. A cell holds a lock on its work folder, so that one which outlives a killed launcher and its successor take
turns.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.config.load import parse, run_id
from harness.config.schema import Launch, RunConfig
from harness.foundation import life, provenance
from harness.foundation.state_files import load_or_set_aside, save_state, set_aside
from harness.foundation.time_stamp import now
from harness.records import paths
from harness.records.cell_progress import tell
from harness.records.run_result import Row, RunResult, read_result, write_result
from harness.records.statuses import FINISHED
from harness.run.build import build
from harness.run.checks import check
from harness.run.dump import dump
from harness.run.loop import train
from harness.run.policies import is_due, save_policy
from harness.run.record import record
from harness.run.run import Run
from harness.start.base_training import Unfinished
from harness.trainers.checkpoint_clock import CheckpointClock
from harness.trainers.local.trainer import Diverged
from harness.trainers.verl.parent import Watched, watch

CANCELLED = 3
UNWRITTEN = 4
UNSAVED = "the state could not be saved"
"""Beginning of the note of a run that has nothing to resume from."""
ORPHAN_S = 60.0
"""Seconds that a cell whose launcher is gone has until its next step."""
Builder = Callable[[RunConfig, Launch, Callable[[], bool]], tuple[Run, dict[str, str | None]]]
"""`harness.run.build.build`."""


class Cancelled(Exception):  # noqa: N818 - a request, not a defect
    """The launcher asked the cell to stop, or is gone."""


def work_folder(launch: Launch, cell_id: str) -> Path:
    """Folder of a cell's state, progress and log until it has a result."""
    return paths.work_folder(launch.results, cell_id)


def record_path(launch: Launch, cell_id: str) -> Path:
    """Path of a cell's record."""
    return paths.record_path(launch.results, launch.sweep, cell_id)


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Functions that a cell calls at its stages; the fault campaign gives functions that fail on purpose."""

    build: Builder = build
    train: Callable[[Run, Callable[[Run], None]], None] = train
    save_state: Callable[[Path, dict[str, Any]], None] = save_state
    write_result: Callable[[Path, RunResult, Sequence[Row] | None], Path] = write_result


def run_cell(
    config: RunConfig, launch: Launch, should_stop: Callable[[], bool] = lambda: False, stages: Stages = Stages()
) -> RunResult:
    """Train one cell to its end and write its result; resumes from the cell's own state. Raises Cancelled, and
    ValueError where the results folder cannot be written."""
    started, began = now(), time.perf_counter()
    work = work_folder(launch, run_id(config))
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"results={launch.results}: cannot be written: {error.strerror}") from error
    run: Run | Watched | None = None
    hashes: dict[str, str | None] = {}
    notes: list[str] = []
    status, reason, error = "ok", None, None
    try:
        if config.trainer.name == "verl":
            run, hashes = watch(config, launch, check(config), work, should_stop)
            run.train(lambda step, reward: tell(work, step, config.trainer.steps, reward), should_stop, Cancelled)
            hashes["final"] = run.final_hash()
            if launch.save != "none":
                _keep_policy(run, launch, notes)
            run.compare()
            if run.evaluation_errors and launch.save == "none":  # lowbit eval goes on with it
                _keep_policy(run, launch, notes)
        else:
            run, hashes = _resume(config, launch, work / "state.pt", notes, should_stop, stages.build)
            run.on_batch = dump(launch, run)
            stages.train(run, _after_step(work, launch, should_stop, notes, stages.save_state))
            if run.evaluation_errors and launch.save == "none":  # lowbit eval goes on with it
                _keep_policy(run, launch, notes)
            hashes["final"] = provenance.tensors_hash(run.trainer.weights())
        _check_trained(run)
    except Cancelled:
        raise
    except Unfinished as stop:  # its base is, whose state is saved
        raise Cancelled from stop
    except Diverged as divergence:
        status, reason = "diverged", f"step {run.step if run else 0}: {divergence}"
    except Exception as failure:  # process edge: the record must tell what happened, and the sweep must go on
        status, reason, error = "failed", f"{type(failure).__name__}: {failure}", traceback.format_exc()
    finally:
        if run is not None:
            _close(run, notes)
    result = record(config, launch, run, hashes, status, reason, error)
    total = sum(v or 0.0 for name, v in result.time_s.items() if name != "total")
    result = result.model_copy(
        update={
            "started_at": started,
            "ended_at": now(),
            "time_s": result.time_s | {"total": max(total, time.perf_counter() - began)},
            "retries": [*result.retries, *notes],
        }
    )
    write(launch, result, run.series if run else None, stages)
    return result


def _check_trained(run: Run | Watched) -> None:
    """Raises RuntimeError where FP16's loss scaling skipped every update of the run: its policy is the base."""
    if run.series and all(row.get("train/skipped") == 1.0 for row in run.series):
        raise RuntimeError(
            f"nothing was trained: gradients overflowed in each of the {len(run.series)} steps, at loss scales of "
            f"{run.series[0]['train/loss_scale']:g} to {run.series[-1]['train/loss_scale']:g}; give a smaller "
            "trainer.loss_scale, or more steps: each overflow halves it"
        )


def is_finished(launch: Launch, cell_id: str) -> bool:
    """Has the cell run to its end? Raises ValueError where a file that is no result stands in its record's place."""
    path = record_path(launch, cell_id)
    return path.exists() and read_result(path).status in FINISHED


def write(launch: Launch, result: RunResult, series: Sequence[Row] | None, stages: Stages = Stages()) -> None:
    """Write a cell's record. Raises ValueError where it cannot be written, or where a file that is no result of the
    cell stands in its place: that one is left alone."""
    path = record_path(launch, result.run_id)
    if path.exists():
        read_result(path)
    stages.write_result(path.parent, result, series)


def _resume(
    config: RunConfig, launch: Launch, state: Path, notes: list[str], should_stop: Callable[[], bool], build: Builder
) -> tuple[Run, dict[str, str | None]]:
    """Build the run with `build` and restore the cell's saved state, where there is one.

    A state that is damaged or another cell's is set aside by name and noted; the run then starts from step 0.
    """
    run, hashes = build(config, launch, should_stop)
    saved = load_or_set_aside(state, notes.append) if state.exists() else None
    if saved is None:
        return run, hashes
    try:
        if saved.get("run_id") != run_id(config):
            raise ValueError(f"{state}: the state of another cell")
        run.restore(saved)
    except (ValueError, KeyError, TypeError) as error:
        notes.append(set_aside(state, error))
    else:
        notes += saved["notes"]
        return run, hashes
    _close(run, notes)
    del run, saved  # there is room for one, and none in the block above, whose error holds it
    return build(config, launch, should_stop)


def _close(run: Run | Watched, notes: list[str]) -> None:
    """Free what the run holds. A failure is told in the log and the record; what happened before it counts."""
    try:
        run.close()
    except Exception as failure:  # process edge: the record is still to be written
        notes.append(f"the run could not be closed: {type(failure).__name__}: {failure}")
        print(notes[-1], file=sys.stderr)


def _after_step(
    work: Path, launch: Launch, should_stop: Callable[[], bool], notes: list[str], save_state: Callable[..., None]
) -> Callable[[Run], None]:
    """Save the state now and then, tell the launcher how far it is, stop when asked. A full disk costs the point to
    resume from, not the run."""
    clock, told = CheckpointClock(launch), [0.0]

    def after_step(run: Run) -> None:
        now = time.perf_counter()
        is_stopping = should_stop()
        if is_due(launch, run.step, run.config.trainer.steps):
            _keep_policy(run, launch, notes)
        if is_stopping or clock.is_due(run.step):
            try:
                with clock.saving():
                    save_state(work / "state.pt", run.state() | {"run_id": run_id(run.config), "notes": list(notes)})
            except ValueError as error:
                if not any(note.startswith(UNSAVED) for note in notes):
                    notes.append(f"{UNSAVED} at step {run.step}: {error}")
        if now - told[0] >= 0.5:
            tell(work, run.step, run.config.trainer.steps, run.series[-1]["reward/accuracy"])
            told[0] = now
        if is_stopping:
            raise Cancelled

    return after_step


def _keep_policy(run: Run | Watched, launch: Launch, notes: list[str]) -> None:
    """Save the policy. A full disk costs the policy, not the run."""
    try:
        notes += save_policy(run, launch, run_id(run.config))
    except OSError as error:
        notes.append(f"the policy of step {run.step} could not be saved: {error}")


def _leave_when_orphaned(parent: int) -> None:
    """End a cell that does not reach its next step after its launcher is gone."""
    while os.getppid() == parent:
        time.sleep(2.0)
    time.sleep(ORPHAN_S)
    os._exit(CANCELLED)


def main(path: str, stages: Stages = Stages()) -> int:
    """Run the cell that a JSON file describes."""
    cell = json.loads(Path(path).read_text(encoding="utf-8"))
    config, launch = parse(RunConfig, cell["config"]), parse(Launch, cell["launch"])
    torch.set_num_threads(launch.threads)
    # The launcher writes its own number: it may be gone before this line is reached.
    parent, stops = cell.get("parent", os.getppid()), list[int]()
    fcntl.flock(os.open(Path(path).parent, os.O_RDONLY), fcntl.LOCK_EX)
    faulthandler.register(signal.SIGUSR1)  # asked where it hangs, before it is killed
    life.LIFE.file = Path(path).with_name(life.NAME)
    threading.Thread(target=_leave_when_orphaned, args=(parent,), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda number, frame: stops.append(number))
    signal.signal(signal.SIGINT, lambda number, frame: stops.append(number))
    try:
        if is_finished(launch, run_id(config)):  # by a process of a killed launcher, while this one waited for the lock
            return 0
        run_cell(config, launch, lambda: bool(stops) or os.getppid() != parent, stages)
    except Cancelled:
        return CANCELLED
    except ValueError as error:
        print(error, file=sys.stderr)
        return UNWRITTEN
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
