"""`lowbit sweep | run | base | report`: long commands, with progress and a resumable state."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from harness.cell import check, check_device
from harness.chosen import resolve
from harness.commands.reporting import present
from harness.compose import advice
from harness.config import load, run_id, run_name, to_json
from harness.launchers.local import Event
from harness.models.checkpoint import content_hash
from harness.packed import make_available
from harness.prepare import start_of, task_of
from harness.results import RunResult
from harness.run_config import Launch, RunConfig
from harness.sweep import (
    SWEEPS,
    Planned,
    Sweep,
    estimate_s,
    finished,
    known_results,
    plan,
    read_sweep,
    run_sweep,
    with_default_precision,
)


class Progress:
    """One bar over all steps of a sweep on a terminal; a line per finished cell everywhere."""

    def __init__(self, cells: Sequence[RunConfig], num_done: int) -> None:
        self.total, self.done = len(cells), num_done
        steps = {run_id(c): c.trainer.steps for c in cells}
        self.steps = dict.fromkeys(steps, 0)
        self.bar = tqdm(total=sum(steps.values()), unit="step", disable=not sys.stderr.isatty(), smoothing=0.05)
        self.started = time.perf_counter()

    def __call__(self, event: Event) -> None:
        cell = run_id(event.config)
        step = event.config.trainer.steps if event.kind == "finished" else event.step
        if event.kind != "started" and step > self.steps[cell]:
            self.bar.update(step - self.steps[cell])
            self.steps[cell] = step
        if event.result is not None:
            self.done += 1
            minutes = (time.perf_counter() - self.started) / 60
            line = f"[{self.done}/{self.total}] {minutes:5.1f} min  {summary_line(event.result)}"
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
    return f"ok  {result.name}: {scores}, {result.time_s['total'] or 0:.0f} s"


def sweep(
    name: str,
    overrides: Sequence[str],
    *,
    results: Path,
    workers: int,
    is_dry: bool,
    seeds: tuple[int, ...] | None,
    is_tracked: bool,
) -> int:
    """Plan, run what is missing, then tables, figures and MLflow. Exit code 1 if a cell failed, 130 if interrupted."""
    found = read_sweep(name)
    found = found if seeds is None else replace(found, seeds=seeds)
    planned = plan(found, overrides)
    make_available(results, found.name)
    launch = Launch(results=str(results), sweep=found.name)
    todo = [cell for cell in planned.cells if finished(cell, launch) is None]
    if is_dry:
        return _dry_run(planned, todo, launch, workers)
    for words, reason in planned.skipped:
        print(f"skipped  {words}: {reason}")
    for words, line in planned.notes:
        print(f"note     {words}: {line}")
    if not todo:
        print(f"{found.name}: all {len(planned.cells)} cells are finished, nothing to run")
        return present(found, results, is_tracked)
    for cell in todo:
        check_device(cell)
    print(f"{found.name}: {found.question}")
    print(f"{len(todo)} of {len(planned.cells)} cells to run, {workers} at a time")
    progress = Progress(planned.cells, len(planned.cells) - len(todo))
    try:
        records, is_interrupted = run_sweep(planned, launch, workers, progress)
    finally:
        progress.close()
    if is_interrupted:
        print("\ninterrupted; the same command goes on from here")
        return 130
    code = present(found, results, is_tracked)
    failed = [r for r in records if r.status == "failed"]
    for r in failed:
        print(f"failed  {r.name} ({r.run_id}): {r.reason}", file=sys.stderr)
    return 1 if failed else code


def _dry_run(planned: Planned, todo: Sequence[RunConfig], launch: Launch, workers: int) -> int:
    known = known_results(launch)
    total = 0.0
    waiting = {run_id(cell) for cell in todo}
    for cell in planned.cells:
        seconds, is_measured = estimate_s(cell, known)
        total += seconds if run_id(cell) in waiting else 0.0
        state = f"{seconds:5.0f} s{' ' if is_measured else '?'}" if run_id(cell) in waiting else "finished"
        print(f"{state:>9}  {run_id(cell)}  {run_name(cell)}")
    for words, reason in planned.skipped:
        print(f"  skipped  {words}: {reason}")
    print(
        f"{planned.sweep.name}: {len(todo)} of {len(planned.cells)} cells to run, {len(planned.skipped)} impossible; "
        f"about {total / workers / 60:.0f} min with {workers} at a time (? is a guess from the model's size)"
    )
    return 0


def run(overrides: Sequence[str], *, results: Path, is_dry: bool) -> int:
    """One cell, as a sweep of one. Exit code 1 if it did not end well."""
    config = resolve(load(with_default_precision(overrides)), lambda path: content_hash(Path(path)))
    notes = advice(config, check(config))
    task_of(config)
    if is_dry:
        print(json.dumps({"run_id": run_id(config), "name": run_name(config), "config": to_json(config)}, indent=2))
        return 0
    launch = Launch(results=str(results), sweep="runs")
    one = Sweep(name="runs", question="", arms=({},), seeds=(config.seed,))
    planned = Planned(sweep=one, cells=(config,), skipped=())
    if (found := finished(config, launch)) is not None:
        print(f"finished before ({found.run_id}): {summary_line(found)}")
        return 0
    for line in notes:
        print(f"note: {line}")
    check_device(config)
    progress = Progress(planned.cells, 0)
    try:
        records, is_interrupted = run_sweep(planned, launch, 1, progress)
    finally:
        progress.close()
    if is_interrupted:
        print("\ninterrupted; the same command goes on from here")
        return 130
    print(f"result: {results}/runs/runs/{run_id(config)}.json")
    return 0 if records[0].status == "ok" else 1


def base(names: Sequence[str], *, results: Path, workers: int) -> int:
    """Train every base that the named sweeps (default: all) start from, in parallel processes."""
    chosen = list(names) or sorted(path.stem for path in SWEEPS.glob("*.yaml"))
    wanted: dict[tuple[object, ...], RunConfig] = {}
    for name in chosen:
        for cell in plan(read_sweep(name)).cells:
            if cell.model.path is None:
                key = (cell.model.name, cell.task.name, cell.task.n, cell.base_seed, str(cell.base))
                wanted.setdefault(key, cell)
    waiting, running = list(wanted.values()), list[tuple[RunConfig, subprocess.Popen[str]]]()
    print(f"{len(waiting)} bases of {', '.join(chosen)}")
    code = 0
    while waiting or running:
        while waiting and len(running) < workers:
            cell = waiting.pop(0)
            running.append((cell, _spawn_base(cell, results)))
        time.sleep(0.1)
        for cell, process in list(running):
            if process.poll() is None:
                continue
            running.remove((cell, process))
            out, err = process.communicate()
            print(out.strip() or f"failed: {err.strip().splitlines()[-1]}", flush=True)
            code = code or process.returncode
    return 1 if code else 0


def _spawn_base(cell: RunConfig, results: Path) -> subprocess.Popen[str]:
    words = json.dumps({"config": to_json(cell), "launch": to_json(Launch(results=str(results)))})
    code = "import sys; from harness.commands.sweeping import base_line; print(base_line(sys.argv[1]))"
    return subprocess.Popen(
        [sys.executable, "-c", code, words], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def base_line(words: str) -> str:
    """Train one base (in a process of its own) and say what became of it."""
    import torch

    from harness.base import read_record
    from harness.config import parse

    torch.set_num_threads(1)
    values = json.loads(words)
    started = time.process_time()
    start = start_of(parse(RunConfig, values["config"]), parse(Launch, values["launch"]))
    record = read_record(start.folder)
    return (
        f"{start.folder.name}: {record['steps']} steps, accuracy {record['accuracy']:.3f}, "
        f"greedy {record['greedy_accuracy']:.3f}, {time.process_time() - started:.0f} s"
    )
