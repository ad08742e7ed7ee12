"""`lowbit sweep | run | report`: long commands, with progress and a resumable state."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from harness.cli.commands.forecasting import dry_run, tell_left_out, time_limit
from harness.cli.commands.reporting import present
from harness.config.compose import advice
from harness.config.load import launch_of, load, run_id, run_name, split_launch, to_json
from harness.config.resolve import resolve
from harness.config.schema import RunConfig
from harness.models.checkpoint import content_hash
from harness.records.packed import make_available
from harness.records.run_result import RunResult
from harness.run.checks import check, check_place
from harness.start.prepare import task_of
from harness.sweep import (
    FINISHED,
    Planned,
    Sweep,
    finished,
    plan,
    read_sweep,
    run_sweep,
    stored,
    with_default_precision,
)
from harness.sweep.launchers import local
from harness.sweep.launchers.job import Event
from harness.sweep.retry import Runner


class Progress:
    """One bar over the steps to go of a sweep on a terminal; a line per finished cell everywhere."""

    def __init__(self, todo: Sequence[RunConfig], num_all: int) -> None:
        self.total, self.num_before = num_all, num_all - len(todo)
        self.ids = {id(config): run_id(config) for config in todo}
        self.steps = dict.fromkeys(self.ids.values(), 0)
        self.ended: set[str] = set()
        total = sum(config.trainer.steps for config in todo)
        self.bar = tqdm(total=total, unit="step", disable=not sys.stderr.isatty(), smoothing=0.05)
        self.num_steps, self.started = total, time.perf_counter()

    def __call__(self, event: Event) -> None:
        cell = self.ids.get(id(event.config)) or run_id(event.config)
        if event.kind == "started" and cell in self.ended:
            self._write(f"again  {run_name(event.config)}")
        step = event.config.trainer.steps if event.kind == "finished" else event.step
        if event.kind != "started" and step > self.steps[cell]:
            self.bar.update(step - self.steps[cell])
            self.steps[cell] = step
        if event.result is not None:
            self.ended.add(cell)
            done, seconds = sum(self.steps.values()), time.perf_counter() - self.started
            left = seconds * (self.num_steps - done) / max(1, done)
            head = f"[{self.num_before + len(self.ended)}/{self.total}] {seconds / 60:5.1f} min, {left / 60:.0f} left"
            self._write(f"{head}  {summary_line(event.result)}")

    def _write(self, line: str) -> None:
        self.bar.write(line, file=sys.stdout)
        sys.stdout.flush()

    def close(self) -> None:
        """End the bar."""
        self.bar.close()


def summary_line(result: RunResult) -> str:
    """One finished cell: status, name, scores."""
    if result.status != "ok":
        return f"{result.status}  {result.name}: {result.reason}"
    s = result.summary
    scores = ", ".join(
        f"{name} {value:.3f}"
        for name, key in (("accuracy", "final_accuracy"), ("in rollout format", "final_accuracy_rollout"))
        if (value := s.get(key)) is not None
    )
    again = f" (attempt {len(result.retries) + 1})" if result.retries else ""
    return f"ok  {result.name}{again}: {scores}, {result.time_s.get('total') or 0:.0f} s"


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a sweep runs."""

    workers: int
    launcher: Literal["local", "ray"] = "local"
    ray_address: str | None = None
    """An existing cluster; null starts one on this machine."""
    max_hours: float | None = None
    is_tracked: bool = True

    def runner(self) -> Runner:
        """The launcher. Raises ValueError where it is not installed."""
        if self.ray_address is not None and self.launcher != "ray":
            raise ValueError(f"ray-address={self.ray_address}: only with --launcher ray")
        if self.launcher == "local":
            return partial(local.run_cells, workers=self.workers)
        if find_spec("ray") is None:
            raise ValueError("launcher=ray: ray is not installed; make setup EXTRAS=dev,ray; valid: local")
        cluster = import_module("harness.sweep.launchers.ray")
        return partial(cluster.run_cells, workers=self.workers, address=self.ray_address)


def sweep(
    name: str, overrides: Sequence[str], *, results: Path, way: Way, seeds: tuple[int, ...] | None, is_dry: bool
) -> int:
    """Plan, run what is missing, then tables, figures and MLflow. Exit code 0 too where the time limit left cells; 1 if
    a cell failed, 130 if interrupted."""
    found = read_sweep(name)
    found = found if seeds is None else replace(found, seeds=seeds)
    overrides, given = split_launch(overrides)
    planned = plan(found, overrides)
    make_available(results, found.name)
    launch = launch_of(split_launch(found.overrides)[1] | given, results=str(results), sweep=found.name)
    known = stored(launch, planned.cells)
    todo = [c for c in planned.cells if (held := known.get(run_id(c))) is None or held.status not in FINISHED]
    if is_dry:
        return dry_run(planned, todo, results, way.workers)
    runner = way.runner()
    tell_left_out(planned)
    if not todo:
        print(f"{found.name}: all {len(planned.cells)} cells are finished, nothing to run")
        if planned.impossible:
            run_sweep(planned, launch, way.workers, lambda event: None)
        return present(found, results, way.is_tracked)
    for cell in todo:
        if way.launcher == "local":
            check_place(cell, launch)
        elif cell.trainer.name == "verl":
            raise ValueError("launcher=ray: a cell with trainer=verl has a Ray of its own; valid: local")
    print(f"{found.name}: {found.question}")
    print(f"{len(todo)} of {len(planned.cells)} cells to run, {way.workers} at a time", flush=True)
    limit = time_limit(todo, results, way.max_hours)
    progress = Progress(todo, len(planned.cells))
    try:
        with _live(results, found.name, way.is_tracked) as live:
            listeners = (progress, *live)
            records, is_interrupted = run_sweep(
                planned, launch, way.workers, lambda event: tell(listeners, event), run=runner, limit=limit
            )
    finally:
        progress.close()
    if is_interrupted:
        print("\ninterrupted; the same command goes on from here")
        return 130
    left = {run_id(cell) for cell in planned.cells} - {record.run_id for record in records}
    code = present(found, results, way.is_tracked) if any(r.status != "skipped" for r in records) else 0
    failed = [r for r in records if r.status == "failed"]
    for r in failed:
        print(f"failed  {r.name} ({r.run_id}): {r.reason}", file=sys.stderr)
    if left:
        print(f"time limit: {len(left)} of {len(planned.cells)} cells are left; the same command goes on from here")
    return 1 if failed else code


def tell(listeners: Iterable[Callable[[Event], None]], event: Event) -> None:
    """Pass an event on."""
    for listener in listeners:
        listener(event)


@contextmanager
def _live(results: Path, name: str, is_tracked: bool) -> Iterator[tuple[Callable[[Event], None], ...]]:
    """What logs cells to MLflow while the sweep runs, in a thread of its own."""
    if not is_tracked:
        yield ()
        return
    from harness.viewers.mlflow import Live

    with Live(results, name) as live:
        yield (live,)


def run(overrides: Sequence[str], *, results: Path, is_dry: bool) -> int:
    """One cell, as a sweep of one. Exit code 1 if it did not end well."""
    overrides, given = split_launch(overrides)
    config = resolve(load(with_default_precision(overrides)), lambda path: content_hash(Path(path)))
    notes = advice(config, check(config))
    task_of(config)
    if is_dry:
        print(json.dumps({"run_id": run_id(config), "name": run_name(config), "config": to_json(config)}, indent=2))
        return 0
    launch = launch_of(given, results=str(results), sweep="runs")
    one = Sweep(name="runs", question="", arms=({},), seeds=(config.seed,))
    planned = Planned(sweep=one, cells=(config,), skipped=())
    if (found := finished(config, launch)) is not None:
        print(f"finished before ({found.run_id}): {summary_line(found)}")
        return 0
    for line in notes:
        print(f"note: {line}")
    check_place(config, launch)
    progress = Progress(planned.cells, 1)
    try:
        records, is_interrupted = run_sweep(planned, launch, 1, progress)
    finally:
        progress.close()
    if is_interrupted:
        print("\ninterrupted; the same command goes on from here")
        return 130
    print(f"result: {results}/runs/runs/{run_id(config)}.json")
    return 0 if records[0].status == "ok" else 1
