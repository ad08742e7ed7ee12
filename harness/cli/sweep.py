"""`lowbit sweep`: run what a sweep lacks, with progress and a resumable state, then its table and figures."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from harness.cli.options import (
    OVERRIDES,
    add_again,
    add_machine,
    add_results,
    add_tracking,
    add_workers,
    check_machine,
    check_trackers,
    hours,
    minutes,
    number_list,
)

if TYPE_CHECKING:
    from harness.config.schema import Launch, RunConfig
    from harness.records.run_result import RunResult
    from harness.sweep import Planned, Sweep
    from harness.sweep.folder_time import Machine
    from harness.sweep.launchers.job import Event
    from harness.sweep.retry import Limit, Runner

LAUNCHERS = ("local", "ray", "slurm")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("name", help="a file of sweeps/ without its ending, or a path to a YAML file")
    parser.add_argument("overrides", nargs="*", default=[], help=f"{OVERRIDES}; they apply to every cell and come last")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="count cells by arm, list what is left out, predict the time and its error; run nothing",
    )
    parser.add_argument("--list", action="store_true", dest="is_listed", help="with --dry-run: list every cell")
    parser.add_argument(
        "--until-decided",
        action="store_true",
        dest="is_until_decided",
        help="look at the verdicts while seeds arrive and give further seeds to the arms that need them, by the file's "
        "`until`; with --dry-run: what would run next",
    )
    parser.add_argument("--where", action="append", default=[], metavar="KEY=VALUES",
                        help="take only cells with one of these values, such as task.n=16,64 or base_seed=2; may be "
                             "repeated, then all must hold")  # fmt: skip
    add_again(parser, "finished cells")
    add_machine(parser)
    add_workers(parser, "cells")
    parser.add_argument("--seeds", type=number_list, help="comma-separated run seeds in place of the file's")
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--max-hours", type=hours, metavar="H",
                       help="start no new cell that is not predicted to end within so many hours; what still runs "
                            "then saves its state")  # fmt: skip
    limit.add_argument("--minutes", type=minutes, dest="max_minutes", metavar="M", help="the same in minutes")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="local",
                        help="processes of this machine, tasks of a Ray cluster, or jobs of Slurm "
                             "(default: local)")  # fmt: skip
    parser.add_argument("--ray-address", metavar="ADDRESS", help="of a running Ray cluster (default: one started here)")
    parser.add_argument("--slurm", action="append", default=[], metavar="NAME=VALUE",
                        help="a setting of Slurm's jobs, may be repeated: partition, time in minutes, memory in GiB, "
                             "account, qos, constraint, exclude, cluster=local to try it on this machine")  # fmt: skip
    add_tracking(parser)
    add_results(parser, check=_check)


def _check(a: argparse.Namespace) -> None:
    check_start(_sweep(a), a.overrides, a.results, _way(a), is_every=a.is_until_decided)


def check_start(found: Sweep, overrides: Sequence[str], results: Path, way: Way, *, is_every: bool = False) -> None:
    """Raises ValueError for a wrong word, and where the launcher is not here or what the cells to run want (`is_every`:
    all cells)."""
    from harness.config.load import run_id
    from harness.sweep import stored

    planned, launch = _planned(found, overrides, results, is_preview=True)
    cells = _chosen(planned, way).cells
    _check_launch(cells, launch, way)
    way.runner()
    todo, taken = _left(cells, stored(launch, planned.cells), launch, way)
    _check_places(cells if is_every else [cell for cell in todo if run_id(cell) not in taken], launch, way)


def _sweep(a: argparse.Namespace) -> Sweep:
    """The sweep of a call, with its seeds. Raises ValueError for a wrong word."""
    from harness.config.load import check_overrides

    check_overrides(a.overrides)  # refuses wrong words before torch is imported
    from harness.sweep import read_sweep, with_seeds

    found = read_sweep(a.name)
    if a.is_until_decided:
        from harness.studies.until_decided import with_all_seeds

        return with_all_seeds(found)
    return found if a.seeds is None else with_seeds(found, a.seeds)


def _way(a: argparse.Namespace) -> Way:
    """The options of a call. Raises ValueError for those that do not go together."""
    check_machine(a)
    if a.is_listed and not a.dry_run:
        raise ValueError("list: only with --dry-run")
    way = Way(
        workers=a.workers,
        launcher=a.launcher,
        ray_address=a.ray_address,
        slurm=tuple(a.slurm),
        max_hours=a.max_hours if a.max_minutes is None else a.max_minutes / 60,
        trackers=a.trackers,
        is_again=a.is_again,
        where=tuple(a.where),
        is_listed=a.is_listed,
        gpu=a.gpu,
        memory_gib=a.memory,
    )
    check_trackers(a.trackers)
    if not a.is_until_decided:
        return way
    if a.where:
        raise ValueError(f"where={a.where[0]}: not with --until-decided, which judges every arm")
    if a.is_again:
        raise ValueError("again: not with --until-decided, whose looks rest on the records that are there")
    if a.seeds is not None:
        raise ValueError("seeds: not with --until-decided, where the file's `until` says how many")
    return way


def run(a: argparse.Namespace) -> int:
    """Run the sweep."""
    way, found = _way(a), _sweep(a)
    run_it = sweep_until_decided if a.is_until_decided else sweep_of
    return run_it(found, a.overrides, results=a.results, way=way, is_dry=a.dry_run)


@dataclass(frozen=True, kw_only=True)
class Way:
    """Options of a sweep's run."""

    workers: int
    launcher: Literal["local", "ray", "slurm"] = "local"
    ray_address: str | None = None
    """An existing cluster; null starts one on this machine."""
    slurm: tuple[str, ...] = ()
    """Settings of Slurm's jobs, as NAME=VALUE."""
    max_hours: float | None = None
    trackers: tuple[str, ...] = ("mlflow",)
    """Names of the trackers that cells are logged to."""
    is_again: bool = False
    """Finished cells run once more."""
    where: tuple[str, ...] = ()
    """Words KEY=VALUES, all of which a cell must agree with."""
    is_listed: bool = False
    """A dry run lists every cell."""
    gpu: str | None = None
    """GPU that a dry run predicts for; null takes this machine's."""
    memory_gib: float | None = None
    """Memory of each, likewise."""

    def __post_init__(self) -> None:
        if self.ray_address is not None and self.launcher != "ray":
            raise ValueError(f"ray-address={self.ray_address}: only with --launcher ray")
        if self.slurm and self.launcher != "slurm":
            raise ValueError(f"slurm={self.slurm[0]}: only with --launcher slurm")
        if self.launcher == "slurm":
            from harness.sweep.launchers.slurm import options_of

            options_of(self.slurm)

    def machine(self, launch: Launch) -> Machine:
        """GPUs of a cell that a forecast is for."""
        from harness.sweep.folder_time import machine_of

        is_cluster = self.launcher == "slurm" or self.ray_address is not None
        return machine_of(launch, self.gpu, self.memory_gib, is_cluster=is_cluster)

    def runner(self) -> Runner:
        """The launcher. Raises ValueError where it is not installed."""
        if self.launcher == "local":
            from harness.sweep.launchers import local

            return partial(local.run_cells, workers=self.workers)
        if self.launcher == "slurm":
            from harness.sweep.launchers import slurm

            options = slurm.options_of(self.slurm)
            slurm.check(options)
            return partial(slurm.run_cells, workers=self.workers, options=options)
        if find_spec("ray") is None:
            raise ValueError("launcher=ray: ray is not installed; make setup EXTRAS=dev,ray; valid: local")
        cluster = import_module("harness.sweep.launchers.ray")
        return partial(cluster.run_cells, workers=self.workers, address=self.ray_address)


def sweep_of(
    found: Sweep, overrides: Sequence[str], *, results: Path, way: Way, is_dry: bool, is_shown: bool = True
) -> int:
    """Run what a sweep lacks, then write tables and figures where `is_shown`. Exit code 0 too where the time limit left
    cells; 1 if a cell failed or was stopped from outside, 130 if interrupted."""
    from harness.cli.report import present
    from harness.config.load import run_id
    from harness.records.packed import make_available
    from harness.sweep import run_sweep, stored
    from harness.sweep.preview import base_lines, dry_run, tell_left_out, time_limit
    from harness.sweep.queue import put_aside

    planned, launch = _planned(found, overrides, results, is_preview=is_dry)
    every = planned.cells
    planned = _chosen(planned, way)
    if not is_dry:
        make_available(results, found.name)
    known = stored(launch, every)
    todo, taken = _left(planned.cells, known, launch, way)
    bases = base_lines(todo, every, known, launch, taken)
    if is_dry:
        _check_launch(todo, launch, way)
        return dry_run(planned, todo, results, way.workers, taken, way.machine(launch), bases, way.is_listed)
    runner = way.runner()
    tell_left_out(planned)
    waiting = {run_id(cell) for cell in todo}
    _tell_without_policy([known[i] for cell in planned.cells if (i := run_id(cell)) not in waiting], launch)
    if not todo:
        print(f"{found.name}: all {len(planned.cells)} cells are finished, nothing to run")
        if planned.impossible:
            run_sweep(planned, launch, way.workers, lambda event: None)
        return present(found, results, way.trackers) if is_shown else 0
    _check_places([cell for cell in todo if run_id(cell) not in taken], launch, way)
    _check_folder(results)
    limit = time_limit(todo, results, way.max_hours, way.machine(launch))
    if way.is_again:
        _check_time(todo, launch, limit)
    if way.is_again and (aside := put_aside(planned.cells, launch)) is not None:
        print(f"{found.name}: what was there before is in {aside}; after a stop, leave out --again to go on")
    print(f"{found.name}: {found.question}")
    for line in bases:
        print(line, flush=True)
    records, is_interrupted = _run_cells(planned, todo, len(taken), launch, way, runner, limit)
    if is_interrupted:
        return _interrupted(way)
    left = {run_id(cell) for cell in planned.cells} - {record.run_id for record in records}
    has_run = any(r.status not in ("skipped", "cancelled") for r in records)
    code = present(found, results, way.trackers) if is_shown and has_run else 0
    code = _tell_failed(records) or code
    if left:
        print(f"time limit: {len(left)} of {len(planned.cells)} cells are left; {_goes_on(way)}")
    return code


def _planned(found: Sweep, overrides: Sequence[str], results: Path, *, is_preview: bool) -> tuple[Planned, Launch]:
    """The plan of a sweep and how its cells run. Raises ValueError for a wrong word, and where no cell can run."""
    from harness.config.load import launch_of, split_launch
    from harness.sweep import check_possible, plan

    overrides, given = split_launch(overrides)
    launch = launch_of(split_launch(found.overrides)[1] | given, results=str(results), sweep=found.name)
    planned = plan(found, overrides, is_preview=is_preview)
    check_possible(planned)
    return planned, launch


def _chosen(planned: Planned, way: Way) -> Planned:
    """The part of a plan that `where` names."""
    from harness.sweep import narrowed, read_rule

    return narrowed(planned, read_rule(way.where, "where")) if way.where else planned


def _left(
    cells: Sequence[RunConfig], known: Mapping[str, RunResult], launch: Launch, way: Way
) -> tuple[list[RunConfig], set[str]]:
    """(cells that have no finished record among those `known` by run id, or all of them with `--again`; ids of those
    that another sweep has finished, whose records will be copied)."""
    from harness.config.load import run_id
    from harness.records.statuses import FINISHED
    from harness.sweep.queue import elsewhere

    if way.is_again:
        return list(cells), set()
    todo = [cell for cell in cells if (held := known.get(run_id(cell))) is None or held.status not in FINISHED]
    return todo, {run_id(cell) for cell, _ in elsewhere(todo, launch)}


def sweep_until_decided(found: Sweep, overrides: Sequence[str], *, results: Path, way: Way, is_dry: bool) -> int:
    """Run seeds look by look until no arm needs or may get another, then tables and figures. Exit codes as
    `sweep_of`."""
    from harness.cli.report import present
    from harness.records.packed import make_available
    from harness.studies.until_decided import preview, until_decided
    from harness.sweep import stored
    from harness.sweep.preview import base_lines, dry_run, tell_left_out, time_limit

    planned, launch = _planned(found, overrides, results, is_preview=is_dry)
    if is_dry:
        todo = preview(planned, launch)
        _check_launch(todo, launch, way)
        chosen = replace(planned, cells=tuple(todo))
        bases = base_lines(todo, planned.cells, stored(launch), launch)
        if not todo:
            return 0
        return dry_run(chosen, todo, results, way.workers, (), way.machine(launch), bases, way.is_listed)
    runner, started = way.runner(), time.monotonic()
    make_available(results, found.name)
    tell_left_out(planned)
    _check_places(planned.cells, launch, way)
    _check_folder(results)
    print(f"{found.name}: {found.question}")

    def run_next(part: Planned) -> tuple[list[RunResult], bool]:
        known = stored(launch, part.cells)
        todo, taken = _left(part.cells, known, launch, way)
        for line in base_lines(todo, planned.cells, known, launch, taken):
            print(line, flush=True)
        hours = None if way.max_hours is None else way.max_hours - (time.monotonic() - started) / 3600
        limit = time_limit(todo, results, hours, way.machine(launch))
        return _run_cells(part, todo, len(taken), launch, way, runner, limit)

    ending = until_decided(planned, launch, run_next)
    if ending.reason is None:
        return _interrupted(way)
    code = present(found, results, way.trackers) if stored(launch) else 0
    code = _tell_failed(ending.failed) or code
    print(f"{found.name}: {ending.reason}")
    return code


def _check_folder(results: Path) -> None:
    """Raises ValueError where the results folder cannot be written, or another sweep is at work there."""
    from harness.records.results_lock import results_lock

    with results_lock(results):
        pass


def _check_time(todo: Sequence[RunConfig], launch: Launch, limit: Limit | None) -> None:
    """Raises ValueError where no cell would start within the limit: then nothing is to be put aside either."""
    from harness.foundation.duration import duration
    from harness.sweep.launchers.job import Job

    if limit is None or any(limit.admits(set(), Job(config=cell, launch=launch)) for cell in todo):
        return
    shortest = duration(min(map(limit.predict, todo)))
    raise ValueError(f"again: the time limit is too short for any cell (the shortest is predicted to take {shortest}); "
                     "nothing was put aside; choose more --minutes or --max-hours")  # fmt: skip


def _check_places(cells: Sequence[RunConfig], launch: Launch, way: Way) -> None:
    """Raises ValueError where a cell cannot run here or under this launcher."""
    from harness.run.checks import check_place

    if way.launcher == "local":
        for cell in cells:
            check_place(cell, launch)
    else:
        _check_launch(cells, launch, way)


def _check_launch(cells: Sequence[RunConfig], launch: Launch, way: Way) -> None:
    """Raises ValueError where a cell cannot run so, or not under this launcher, on whatever machine."""
    from harness.run.checks import check_launch

    for cell in cells:
        check_launch(cell, launch)
        if way.launcher != "local":
            _check_node(cell, launch, way.launcher)


def _check_node(cell: RunConfig, launch: Launch, launcher: str) -> None:
    """Raises ValueError for a cell that needs more than the one node where Ray or Slurm runs it."""
    if launcher == "ray" and cell.trainer.name == "verl":
        raise ValueError(
            "trainer=verl: with --launcher ray its checkpoints would stay on their node; valid: trainer=local, or "
            "--launcher local or slurm"
        )
    if launcher == "ray" and launch.save != "none":
        raise ValueError(
            f"launch.save={launch.save}: with --launcher ray the policy would stay on its node; valid: none, or "
            "--launcher local or slurm"
        )
    if launch.nodes > 1:
        raise ValueError(
            f"launch.nodes={launch.nodes}: with --launcher {launcher} a cell runs on one node; "
            "valid: 1, or --launcher local"
        )
    if launcher == "ray" and launch.ray_address is not None:
        raise ValueError(
            f"launch.ray_address={launch.ray_address}: with --launcher ray a cell has a Ray of its own on its "
            "node; valid: null, or --launcher local"
        )


def _tell_without_policy(finished: Sequence[RunResult], launch: Launch) -> None:
    """Say how many finished cells lack the policy that this launch keeps."""
    from harness.records.policies import has_policy

    if count := sum(not has_policy(launch.results, record, launch.save) for record in finished):
        print(f"note: {count} finished cells kept no policy; --again trains every cell anew")


def _interrupted(way: Way) -> int:
    print(f"\ninterrupted; {_goes_on(way)}")
    return 130


def _goes_on(way: Way) -> str:
    return f"the same command {'without --again ' if way.is_again else ''}goes on from here"


def _tell_failed(records: Iterable[RunResult]) -> int:
    """Name the failed runs, and those that somebody else than this command stopped. Exit code 1 where there is one."""
    failed = [r for r in records if r.status in ("failed", "cancelled")]
    for r in failed:
        print(f"{r.status}  {r.name} ({r.run_id}): {r.reason}", file=sys.stderr)
    return 1 if failed else 0


def _run_cells(
    planned: Planned,
    todo: Sequence[RunConfig],
    taken: int,
    launch: Launch,
    way: Way,
    runner: Runner,
    limit: Limit | None,
) -> tuple[list[RunResult], bool]:
    """Run the cells that are left, of which `taken` are copied, with progress: (all records, whether it was
    interrupted)."""
    from harness.engines.vllm.warm import notes
    from harness.foundation.visible_gpus import turns_note
    from harness.sweep import run_sweep
    from harness.sweep.preview import count_words
    from harness.sweep.progress import Progress

    print(f"{count_words(len(todo) - taken, len(planned.cells), taken)}, {way.workers} at a time", flush=True)
    on_gpu = sum(cell.trainer.device == "cuda" for cell in todo) if way.launcher == "local" else 0
    for line in (*notes(todo), turns_note(min(way.workers, on_gpu))):
        if line is not None:
            print(f"note: {line}", flush=True)
    progress = Progress(todo, planned.cells)
    listeners: list[Callable[[Event], None]] = [progress]

    def tell(event: Event) -> None:
        for listener in listeners:
            listener(event)

    with ExitStack() as stack:
        stack.callback(progress.close)
        if way.trackers:  # which log the cells in a thread of their own
            from harness.viewers.trackers import follow

            listeners.append(stack.enter_context(follow(Path(launch.results), planned.sweep.name, way.trackers)))
        return run_sweep(planned, launch, way.workers, tell, run=runner, limit=limit)
