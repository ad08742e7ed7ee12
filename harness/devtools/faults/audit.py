"""Records after the faults against the undisturbed ones: what is lost, duplicated, mislabelled, or left behind.

A cell that was given numbers that are not finite must have diverged, with all that it measured before equal; every
other must be ok and equal in weights, evaluations and series, times left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from harness.config.load import run_id, to_json
from harness.config.schema import RunConfig
from harness.devtools.faults.damage import BALLAST
from harness.devtools.faults.journal import Fault, Mark
from harness.records.paths import runs_folder
from harness.records.run_result import RunResult, read_result, read_series, verify
from harness.records.statuses import FINISHED

Wrong = Literal["lost", "duplicated", "mislabelled", "altered", "unreported", "leaked"]
WRONGS: tuple[Wrong, ...] = ("lost", "duplicated", "mislabelled", "altered", "unreported", "leaked")
TIMED = ("memory/", "time/", "rollout/tokens_per_s")
"""Columns that no two runs share."""
UNMEASURED = ("sync/code_flip_rate",)
"""Columns that a resumed run leaves empty (NaN) at its first step, having nothing to compare with; counted apart."""


Series = Mapping[str, Sequence[Any]]
"""Column -> a value per step."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Something that is wrong."""

    wrong: Wrong
    where: str
    """Round and cell, or file."""
    words: str


def audit_cells(
    cells: Sequence[RunConfig], reference: Path, records: Path, marks: Sequence[Mark], diverging: Mapping[str, Fault]
) -> list[Case]:
    """List what is wrong with the records of the planned cells.

    `reference` and `records` are folders of records, `diverging` has the `nan` fault of a cell.
    """
    ends = Counter(mark.cell for mark in marks if mark.what == "end" and mark.status in FINISHED)
    cases: list[Case] = []
    for config in cells:
        cell = run_id(config)
        where = f"{records.parent.parent.parent.name} {cell}"
        path = records / f"{cell}.json"
        try:
            found = read_result(path)
            series = read_series(records, cell) if found.num_steps else {}
        except ValueError as error:
            cases.append(Case(wrong="lost", where=where, words=str(error)))
            continue
        if found.status not in FINISHED:
            cases.append(Case(wrong="lost", where=where, words=f"{found.status}: {found.reason}"))
            continue
        others = [other for other in records.rglob("*.json") if other != path and cell in other.read_text("utf-8")]
        if others or ends[cell] > 1:
            words = f"ran to its end {ends[cell]} times; other records: {', '.join(map(str, others)) or 'none'}"
            cases.append(Case(wrong="duplicated", where=where, words=words))
        true = read_result(reference / path.name), read_series(reference, cell)
        if words := mislabelled(found, series, config, *true, diverging.get(cell)):
            cases.append(Case(wrong="mislabelled", where=where, words=words))
    planned = {run_id(config) for config in cells}
    for path in records.glob("*.json"):
        if path.stem not in planned:
            cases.append(Case(wrong="mislabelled", where=str(path), words="a record of no planned cell"))
    return cases + [Case(wrong="mislabelled", where=records.name, words=line) for line in verify(records)]


def mislabelled(
    found: RunResult, series: Series, config: RunConfig, true: RunResult, true_series: Series, fault: Fault | None
) -> str:
    """Difference between a finished record and what it should say; empty where it is right. `fault`: by which it must
    have diverged."""
    expected = "ok" if fault is None else "diverged"
    if found.status != expected:
        return f"{found.status} where it should be {expected}: {found.reason}"
    if found.config != true.config or found.run_id != true.run_id or to_json(config)["seed"] != found.seed:
        return "the configuration of another cell"
    last = true.num_steps if fault is None else fault.step
    if fault is None and (found.hashes != true.hashes or found.num_steps != true.num_steps):
        return f"hashes {found.hashes} after {found.num_steps} steps, undisturbed {true.hashes}"
    evals, right = ([e for e in one.evals if e.step <= last] for one in (found, true))
    if evals != right[: len(evals)] or (fault is None and len(evals) != len(right)):
        return "evaluations differ from the undisturbed run"
    if found.num_steps < last:
        return f"{found.num_steps} steps recorded, {last} done"
    if name := differing(series, true_series, last):
        return f"series {name} differs from the undisturbed run"
    return ""


def differing(found: Series, true: Series, steps: int) -> str:
    """The first column that differs within so many steps, NaN equal to NaN; empty where none does."""
    for name in [name for name in true if not name.startswith(TIMED)]:
        left, right = found.get(name, ())[:steps], true[name][:steps]
        may_lack = name in UNMEASURED
        same = (_equal(a, b) or (may_lack and _is_nan(a)) for a, b in zip(left, right, strict=False))
        if len(left) != len(right) or not all(same):
            return name
    return ""


def unmeasured(records: Path, reference: Path) -> int:
    """Number of values of UNMEASURED that the undisturbed records have and these lack; series that cannot be read are
    cases of the audit."""
    count = 0
    for path in records.glob("*.parquet"):
        try:
            found, true = read_series(records, path.stem), read_series(reference, path.stem)
        except ValueError:
            continue
        for name in [name for name in UNMEASURED if name in found]:
            pairs = zip(found[name], true[name], strict=False)
            count += sum(_is_nan(a) and not _is_nan(b) for a, b in pairs)
    return count


def _is_nan(a: Any) -> bool:
    return isinstance(a, float) and math.isnan(a)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b or (_is_nan(a) and _is_nan(b))


def alive(control: Path) -> list[int]:
    """Processes of a round that still live: all of them work in its control folder."""
    found: list[int] = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(control) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def end_stopped(control: Path) -> list[int]:
    """End the cells of a killed sweep that are stopped (SIGSTOP) and so cannot notice, as somebody would by hand."""
    stopped: list[int] = []
    for pid in alive(control):
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_STOPPED:
                process.kill()
                stopped.append(pid)
    return stopped


def audit_leftovers(results: Path, control: Path) -> list[Case]:
    """Processes and half-written files that a round leaves behind."""
    cases = [Case(wrong="leaked", where=control.name, words=f"process {pid} is alive") for pid in alive(control)]
    for path in sorted(results.rglob("*")):
        is_half = path.name.endswith((".tmp", ".part")) or path.name == BALLAST
        if is_half or (path.name == "state.pt" and _is_ok(results, path.parent.name)):
            cases.append(Case(wrong="leaked", where=results.parent.name, words=str(path.relative_to(results))))
    return cases


def _is_ok(results: Path, cell: str) -> bool:
    """Has the cell an ok record? One that cannot be read is none."""
    for path in runs_folder(results).rglob(f"{cell}.json"):
        with suppress(ValueError):
            if read_result(path).status == "ok":
                return True
    return False
