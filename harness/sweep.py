"""Sweeps: a YAML file of values becomes cells; cells without a finished result run; every cell leaves a record.

`sweeps/<name>.yaml` holds overrides that all cells share, axes that multiply, arms (method, precision, knobs ...; a
list multiplies) and seeds. `plan` derives the cells; `run_sweep` is the queue.
"""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import ConfigDict

from harness.cell import check
from harness.chosen import resolve
from harness.compose import advice
from harness.config import load, parse, read_yaml, run_id
from harness.launchers.job import Event, Job
from harness.launchers.local import run_cells
from harness.models.checkpoint import content_hash
from harness.nearest import nearest
from harness.prepare import task_of
from harness.provenance import commit
from harness.results import RunResult, read_result, read_results
from harness.run_config import Launch, RunConfig
from methods import method_named

SWEEPS = Path("sweeps")
FINISHED = ("ok", "diverged", "skipped")
"""Statuses that a second start does not run again."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One YAML file of `sweeps/`."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: str
    question: str
    """Which question it answers."""
    control: str = "bf16"
    """Method of the reference arm."""
    overrides: tuple[str, ...] = ()
    axes: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    """Override key -> values; the product of all axes."""
    arms: tuple[dict[str, Any], ...]
    """Override key -> value or list of values (which multiply)."""
    seeds: tuple[int, ...]
    """Each seeds the base and the run together: base variance is as large as the effects."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What a sweep will do."""

    sweep: Sweep
    cells: tuple[RunConfig, ...]
    skipped: tuple[tuple[str, str], ...]
    """(cell in words, reason) of impossible combinations."""
    notes: tuple[tuple[str, str], ...] = ()
    """(cell in words, remark) of what is allowed and pointless."""


def read_sweep(name: str, folder: Path = SWEEPS) -> Sweep:
    """The sweep `name`, or a path to a YAML file. Raises ValueError, one line, for unknown names, keys or values."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not path.is_file():
        raise ValueError(f"sweep {name!r} not found; {nearest(name, [p.stem for p in folder.glob('*.yaml')])}")
    values = read_yaml(path)
    try:
        sweep = parse(Sweep, {"name": path.stem} | values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not sweep.arms or not sweep.seeds:
        raise ValueError(f"{path}: arms and seeds need at least one entry each")
    return sweep


def _settings(values: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Every combination of {key: value or list} as overrides."""
    lists = [v if isinstance(v, list) else [v] for v in values.values()]
    for combination in itertools.product(*lists):
        pairs = zip(values, combination, strict=True)
        yield tuple(f"{key}={'null' if value is None else value}" for key, value in pairs)


def plan(sweep: Sweep, extra: Sequence[str] = ()) -> Planned:
    """The cells of a sweep, seeds outermost so that whole comparisons finish early. `extra` overrides come last."""
    arms: list[RunConfig] = []
    tasks: set[tuple[str, str | None]] = set()
    skipped, notes = list[tuple[str, str]](), list[tuple[str, str]]()
    for axis in _settings(sweep.axes):
        for arm in sweep.arms:
            for setting in _settings(arm):
                words = [*sweep.overrides, *axis, *with_default_precision(setting), *extra]
                config = load(words)
                try:
                    composed = check(config)
                except ValueError as error:
                    skipped.append((" ".join([*axis, *setting]), str(error)))
                    continue
                notes += [(" ".join([*axis, *setting]), line) for line in advice(config, composed)]
                arms.append(resolve(config, lambda path: content_hash(Path(path))))
                if (data := (str(config.task), config.model.path)) not in tasks:
                    task_of(config)
                    tasks.add(data)
    cells = [replace(arm, seed=seed, base_seed=seed) for seed in sweep.seeds for arm in arms]
    unique = {run_id(cell): cell for cell in cells}
    return Planned(sweep=sweep, cells=tuple(unique.values()), skipped=tuple(skipped), notes=tuple(notes))


def with_default_precision(overrides: Sequence[str]) -> list[str]:
    """A method without a precision runs at its own default, the first it lists."""
    keys = {word.partition("=")[0]: word.partition("=")[2] for word in overrides}
    if "method" in keys and "precision" not in keys:
        return [*overrides, f"precision={method_named(keys['method']).precisions[0]}"]
    return list(overrides)


def finished(config: RunConfig, launch: Launch) -> RunResult | None:
    """The cell's record, where it has one that counts as finished."""
    path = Path(launch.results) / "runs" / launch.sweep / f"{run_id(config)}.json"
    result = read_result(path) if path.exists() else None
    return result if result is not None and result.status in FINISHED else None


def estimate_s(config: RunConfig, known: Sequence[RunResult]) -> tuple[float, bool]:
    """(seconds of one cell, whether it is measured): the median of finished like cells, else from the model's size."""
    like = [
        seconds / r.num_steps
        for r in known
        if r.status == "ok"
        and r.num_steps
        and (seconds := r.time_s.get("total"))
        and (r.config["model"]["name"], r.config["task"]["name"], r.config["task"]["n"])
        == (config.model.name, config.task.name, config.task.n)
    ]
    if like:
        return median(like) * config.trainer.steps, True
    width, layers = config.model.hidden_size or 1024, config.model.num_layers or 24
    tokens = config.algo.num_prompts * config.algo.group_size * 2.2 * (config.task.n or 256)
    flops = 10.0 * layers * width * (4 * width + 3 * (config.model.intermediate_size or 3 * width)) * tokens
    return 4.0 + config.trainer.steps * (0.06 + flops / 40e9), False


def run_sweep(
    planned: Planned, launch: Launch, workers: int, on_event: Callable[[Event], None]
) -> tuple[list[RunResult], bool]:
    """Run the cells that have no result yet. Returns (all records, whether it was interrupted).

    Raises ValueError where another sweep is at work in the same results folder, or the folder cannot be written.
    """
    sha, is_dirty = commit()
    launch = replace(launch, commit=sha, is_dirty=is_dirty)
    records = {run_id(c): found for c in planned.cells if (found := finished(c, launch)) is not None}
    todo = [cell for cell in planned.cells if run_id(cell) not in records]
    interrupted = False
    with _lock(Path(launch.results)):
        events = run_cells([Job(config=cell, launch=launch) for cell in todo], workers)
        try:
            for event in events:
                on_event(event)
                if event.result is not None:
                    records[event.result.run_id] = event.result
        except KeyboardInterrupt:
            interrupted = True
        finally:
            events.close()
    return list(records.values()), interrupted


def known_results(launch: Launch) -> list[RunResult]:
    """Every result of every sweep, for estimates."""
    return read_results(Path(launch.results) / "runs")


@contextmanager
def _lock(results: Path) -> Iterator[None]:
    """One sweep at a time in a results folder."""
    try:
        results.mkdir(parents=True, exist_ok=True)
        handle = (results / ".lock").open("a+")
    except OSError as error:
        raise ValueError(f"results={results}: cannot be written: {error.strerror}") from None
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            raise ValueError(f"results={results}: a sweep is at work there (process {handle.read().strip()})") from None
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        yield
