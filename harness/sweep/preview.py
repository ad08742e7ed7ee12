"""Preview of a sweep: what it will do, what it will take, and how far to trust that."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from harness.config.compose import compose
from harness.config.decoder_config import decoder_config
from harness.config.load import run_id, to_json
from harness.config.schema import Launch, RunConfig
from harness.engines.vllm.memory import kv_bytes_per_token, num_parameters, weight_bytes
from harness.foundation.duration import duration
from harness.foundation.text_table import text_table
from harness.foundation.visible_gpus import visible_gpus
from harness.models.checkpoint import UNREAD, lacks_weights
from harness.records.arms import arms_of, label
from harness.records.run_result import RunResult
from harness.records.statuses import FINISHED
from harness.start.base_model import read_record
from harness.start.prepare import base_folder, base_seconds, missing_bases
from harness.sweep.folder_time import (
    HERE,
    PRODUCTS,
    PROMPT,
    STREAMS,
    Machine,
    check_named,
    device_name,
    memory_gib,
    response_tokens,
)
from harness.sweep.forecast import LEVELS, CostModel, Level, TimeForecast, fit, read_samples
from harness.sweep.launchers.local import vllm_share
from harness.sweep.planning import Planned, names_of
from harness.sweep.retry import Limit
from harness.sweep.timetable import Demand, timetable

STATE_BYTES = 16
"""Per parameter: float32 master, gradient and two moments of AdamW."""
FROZEN_BYTES = 4
"""Per parameter of a base below adapters, in float32."""


def dry_run(
    planned: Planned,
    todo: Sequence[RunConfig],
    results: Path,
    workers: int,
    taken: Collection[str] = (),
    machine: Machine = HERE,
    bases: Sequence[str] = (),
    is_listed: bool = False,
) -> int:
    """Print cells by arm, what is left out and why, predicted time and device-hours with the past error. Exit code 0.

    `taken`: ids of cells that another sweep has finished, whose records will be copied. `machine`: the GPUs of each
    cell. `bases`: the `base_lines`. `is_listed`: every cell in place of the arms, by its run's name and what sets its
    arm apart.
    Raises ValueError as `check_named`.
    """
    check_named(planned.cells, machine)
    todo = [cell for cell in todo if run_id(cell) not in taken]
    model = fit(read_samples(results))
    waiting = {run_id(cell): model.estimate(cell, machine=machine) for cell in todo}
    if is_listed:
        for cell_id, name in names_of(planned.cells).items():
            done = "elsewhere" if cell_id in taken else "finished"
            print(f"{_time_words([waiting[cell_id]]) if cell_id in waiting else done:>9}  {cell_id}  {name}")
    else:
        print(f"{arm_tables(planned.cells, waiting)}\n")
    if any(found.level != "like" for found in waiting.values()):
        print("?: no run of the same arm has finished; the time is predicted from other cells, or from sizes alone")
    tell_left_out(planned)
    if unread := sorted({f"{c.model.name} ({c.model.path})" for c in planned.cells
                         if (c.model.content_hash or "").startswith(UNREAD)}):  # fmt: skip
        print(f"ids: stand-ins, for no run has read the weights of {', '.join(unread)} yet; finished cells do not show")
    print(
        f"{planned.sweep.name}: {count_words(len(todo), len(planned.cells), len(taken))}, {len(planned.impossible)} "
        f"skipped as impossible, {len(planned.excluded)} arm{'s' * (len(planned.excluded) != 1)} excluded"
    )
    print("".join(f"{line}\n" for line in bases), end="")
    if todo:
        print("\n".join(forecast_lines(todo, list(waiting.values()), model, workers, machine)))
        print("".join(f"{line}\n" for line in folder_lines(todo, machine)), end="")
    return 0


def arm_tables(cells: Sequence[RunConfig], waiting: Mapping[str, TimeForecast]) -> str:
    """Cells, finished ones, those to run and their time one after another: by arm over all settings, and by setting
    (such as model and length) where there are several. `waiting`: forecasts of the cells to run, by run id."""
    arms = arms_of([to_json(cell) for cell in cells])
    tables = list[str]()
    for head, names in (
        ("arm", [" ".join(filter(None, (arm.method, arm.precision, arm.variant))) for arm in arms]),
        ("setting", [label(arm.context) or "-" for arm in arms]),
    ):
        groups = dict[str, list[str]]()
        for name, cell in zip(names, cells, strict=True):
            groups.setdefault(name, []).append(run_id(cell))
        rows = list[tuple[str, ...]]()
        for name, ids in groups.items():
            left = [waiting[i] for i in ids if i in waiting]
            counts = (len(ids), len(ids) - len(left), len(left))
            rows.append((name, *map(str, counts), _time_words(left) if left else "-"))
        if head == "arm" or len(rows) > 1:
            tables.append(text_table((head, "cells", "finished", "to run", "time, one by one"), rows))
    return "\n\n".join(tables)


def _time_words(found: Sequence[TimeForecast]) -> str:
    """The time of cells one after another, with a question mark where one of a new arm is among them."""
    return duration(sum(one.seconds for one in found)) + "?" * any(one.level != "like" for one in found)


def forecast_of(cell: RunConfig, results: Path, machine: Machine) -> dict[str, Any]:
    """ "forecast" of a Hugging Face model's run as JSON: seconds with their range, memory, assumptions; of a model made
    here nothing."""
    if cell.model.path is None:
        return {}
    folders = [sample for sample in read_samples(results) if sample.config["model"].get("path") is not None]
    found = fit(folders).estimate(cell, machine=machine)  # a fit to runs of models made here too takes seconds
    seconds = {"seconds": round(found.seconds), "low": round(found.low), "high": round(found.high)}
    return {"forecast": seconds | {"rests_on": LEVELS[found.level], "notes": folder_lines([cell], machine)}}


def folder_lines(todo: Sequence[RunConfig], machine: Machine) -> list[str]:
    """Memory of every Hugging Face model and rollout format, and what its predicted time rests on; no weights are
    read."""
    folders = [cell for cell in todo if cell.model.path is not None]
    lines = dict.fromkeys(memory_line(cell, machine) for cell in folders)
    if not folders:
        return []
    bare = sorted({str(cell.model.path) for cell in folders if lacks_weights(str(cell.model.path))})
    lines |= {f"missing: the weights of {path}; a plan needs none, a run does": None for path in bare}
    names = ", ".join(dict.fromkeys(device_name(cell, machine.gpu) for cell in folders))
    return [*lines, (
        f"assumed: {machine.gpus} x {names}, {PRODUCTS:.0%} of its peak operations and {STREAMS:.0%} of its bandwidth, "
        f"prompts of {PROMPT} tokens, every response as long as it may be: an upper bound")]  # fmt: skip


def memory_line(cell: RunConfig, machine: Machine) -> str:
    """GiB of a cell: what the trainer keeps over all its GPUs, an engine's weights and cache of one response, and what
    both leave of a GPU's memory, where that is known; the trainer alone, where the engine sleeps meanwhile, as it does
    under verl (`NAP_BYTES` of `harness.trainers.verl.settings`)."""
    shape, plan = decoder_config(cell.model), compose(cell).plan
    count, row = num_parameters(shape), PROMPT + response_tokens(cell)
    is_frozen, gpus = plan.adapters is not None, machine.gpus
    state = (FROZEN_BYTES if is_frozen else STATE_BYTES) * count / 2**30
    held, cache = weight_bytes(shape, plan) / 2**30, kv_bytes_per_token(shape, plan) * row / 2**30
    engine = f"engine {held:.1f} GiB" + (f" over {machine.engine_gpus}" if machine.engine_gpus > 1 else "")
    what = "frozen base, at most" if is_frozen else "masters, gradients and moments"
    line = (
        f"memory: {cell.model.name} ({_parameters(count)} parameters) at {cell.precision.name}: trainer "
        f"{state:.1f} GiB of {what} over {gpus} GPU{'s' * (gpus > 1)}; {engine}, and {cache:.3f} GiB of "
        f"cache for a response of {row} tokens with its prompt"
    )
    if (room := memory_gib(cell, machine)) is None:
        return line
    is_asleep = cell.engine.sleep or cell.trainer.name == "verl"
    left = room - state / gpus - (0.0 if is_asleep else (held + cache) / machine.engine_gpus)
    if left > 0:
        return f"{line}; leaves {left:.1f} of {room:g} GiB a GPU for activations and further responses"
    return f"{line}; does not fit {room:g} GiB a GPU, {-left:.1f} GiB too much before any activation"


def _parameters(count: int) -> str:
    """A number of parameters in words; a toy's is no 0.00 billion."""
    return f"{count / 1e9:.2f} billion" if count >= 5e6 else f"{count / 1e6:.2f} million"


def count_words(to_run: int, in_all: int, taken: int) -> str:
    """The numbers of cells that will run and that another sweep has finished, in words."""
    return f"{to_run} of {in_all} cells to run" + (f", {taken} taken over from other sweeps" if taken else "")


def base_lines(
    todo: Sequence[RunConfig], cells: Sequence[RunConfig], known: Mapping[str, RunResult], launch: Launch,
    taken: Collection[str] = (),
) -> list[str]:  # fmt: skip
    """Lines that name the bases which the cells to run train first, and those which finished cells did not start from.

    A difference is taken on one base, so cells on the two sides of such a change are not compared. `cells`: all of the
    sweep; `known`: its records by run id; `taken`: ids of those of `todo` whose records will be copied. Raises
    ValueError for a damaged base.
    """
    todo = [cell for cell in todo if run_id(cell) not in taken]
    missing = missing_bases(todo, launch)
    on_gpu = {folder for folder, cell in missing.items() if cell.trainer.device == "cuda"}
    by_time = dict[str, list[str]]()
    for folder, cell in missing.items():
        by_time.setdefault(_base_words(base_seconds(cell, launch)), []).append(folder.name)
    lines = [f"bases to train first ({words}): {', '.join(names)}" for words, names in by_time.items()]
    used = {folder: Counter[str | None]() for cell in todo if (folder := base_folder(cell, launch)) is not None}
    for cell in cells:
        record = known.get(run_id(cell))
        if record is not None and record.status in FINISHED and (folder := base_folder(cell, launch)) in used:
            used[folder][record.hashes.get("model")] += 1
    for folder, digests in used.items():
        words = f"{digests.total()} finished cell{'s' * (digests.total() != 1)} started from"
        if digests and folder in on_gpu:
            lines.append(f"note: {words} {folder.name}, which is gone. Trained again on a GPU it can have other "
                         "weights, and cells that start from them are compared with none of these: bring the folder "
                         "back if you can")  # fmt: skip
        elif digests and folder not in missing and read_record(folder)["content_hash"] not in digests:
            lines.append(f"note: {words} other weights of {folder.name} than are there now: the cells to run will be "
                         "compared with none of them")  # fmt: skip
    return lines


def _base_words(seconds: Sequence[float]) -> str:
    """The time of a base's training in words, from those of bases like it."""
    if not seconds:
        return "their time is not predicted"
    middle = duration(median(seconds))
    return f"about {middle} each, the median of {len(seconds)} of the same recipe; no forecast counts it"


def tell_left_out(planned: Planned) -> None:
    """Print what the plan leaves out and remarks on."""
    for head, lines in (("skipped", planned.skipped), ("excluded", planned.excluded), ("note", planned.notes)):
        for words, line in lines:
            print(f"{head:<9}{words}: {line}")


def forecast_lines(
    todo: Sequence[RunConfig],
    estimates: Sequence[TimeForecast],
    model: CostModel,
    workers: int,
    machine: Machine = HERE,
) -> list[str]:
    """Wall time, device-hours and what they count, and the past error of such predictions."""
    is_gpu = [cell.trainer.device == "cuda" for cell in todo]
    visible, cores = len(visible_gpus()) if any(is_gpu) else 0, os.cpu_count() or workers
    is_elsewhere = machine.is_cluster or (any(is_gpu) and not visible)
    limit = workers if is_elsewhere else min(workers, cores)
    num_gpus = workers * machine.gpus if machine.is_cluster else max(visible, machine.gpus)
    tables = [
        timetable(
            [_demand(*found, machine.gpus) for found in zip(todo, estimates, times, strict=True)], limit, num_gpus
        )
        for times in _times(estimates)
    ]
    lines = [f"time: about {_span([table.wall_s for table in tables])}, {tables[0].at_once} at a time"]
    if tables[0].at_once < (asked := min(workers, len(todo))):
        there = f"there are {cores} cores" if cores > 1 else "there is 1 core"
        lines[0] += f", {asked} were asked for" + f": {there}" * (tables[0].at_once == limit)
    on_cpu = [e for e, is_on_gpu in zip(estimates, is_gpu, strict=True) if not is_on_gpu]
    if on_cpu:
        lines.append(f"cost: {_hours([sum(times) for times in _times(on_cpu)])} CPU core-hours")
    if any(is_gpu):
        used = tables[0].gpus
        lines.append(f"cost: {_hours([table.gpu_s for table in tables])} GPU-hours of {used} GPU{'s' * (used > 1)}")
        lines.append(_gpus_line(num_gpus, visible, machine))
    counts = Counter(e.level for e in estimates)
    return lines + [_error_line(counts[level], level, model) for level in LEVELS if counts[level]]


def _demand(cell: RunConfig, estimate: TimeForecast, seconds: float, gpus: int) -> Demand:
    """Demand of a cell. A folder's time is that of GPUs which it has to itself; others count as they ran, beside cells
    with which the launcher lets them share a GPU."""
    share = 1.0 if estimate.level == "folder" else vllm_share(cell)
    return Demand(seconds=seconds, gpus=gpus if cell.trainer.device == "cuda" else 0, share=share)


def _gpus_line(num_gpus: int, visible: int, machine: Machine) -> str:
    where = "here" if visible >= machine.gpus else "assumed, as many as a cell needs"
    count = "those of a cluster" if machine.is_cluster else f"{num_gpus} {where}"
    return (
        f"GPUs: {count}; cells share one as far as engine.gpu_memory allows, models known by their config.json alone "
        "have theirs to themselves; a GPU costs while it has a cell"
    )


def _error_line(count: int, level: Level, model: CostModel) -> str:
    what, error = f"forecast: {count} cell{'s' * (count > 1)} ({LEVELS[level]})", model.errors.get(level)
    if error is None:
        return f"{what}: a guess, for no such cell has finished; taken as right within a factor of 3"
    return (
        f"{what}: past predictions of such cells were off by {100 * error.median:.0f} % in the median, "
        f"{100 * error.p90:.0f} % at the 90th percentile ({error.count} cells)"
    )


def time_limit(
    todo: Sequence[RunConfig], results: Path, max_hours: float | None, machine: Machine = HERE
) -> Limit | None:
    """The end of a sweep that may run for so many hours from now. `machine`: the GPUs of each cell."""
    if max_hours is None:
        return None
    model = fit(read_samples(results))
    seconds = {run_id(cell): model.estimate(cell, machine=machine).seconds for cell in todo}
    by_object = {id(cell): seconds[run_id(cell)] for cell in todo}
    return Limit(
        end=time.monotonic() + 3600 * max_hours,
        predict=lambda cell: by_object.get(id(cell)) or seconds[run_id(cell)],
    )


def _times(estimates: Sequence[TimeForecast]) -> tuple[list[float], list[float], list[float]]:
    """Seconds of every cell as predicted, and at either end of the range that held 80 % of past ones."""
    return [e.seconds for e in estimates], [e.low for e in estimates], [e.high for e in estimates]


def _span(seconds: Sequence[float]) -> str:
    middle, low, high = map(duration, seconds)
    return f"{middle} ({low} to {high})"


def _hours(seconds: Sequence[float]) -> str:
    middle, low, high = (f"{value / 3600:.2g}" if value < 36000 else f"{value / 3600:.0f}" for value in seconds)
    return f"{middle} ({low} to {high})"
