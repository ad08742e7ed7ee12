"""Starts of a sweep under faults from outside: the damage before, what the sweep must say of it, the repair after.

Somebody who is told of a damaged file moves it away or restores it and starts again; so do these starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from harness.config.load import run_id
from harness.config.schema import RunConfig
from harness.devtools.faults.damage import damage
from harness.devtools.faults.journal import Fault
from harness.devtools.faults.open_round import OpenRound
from harness.devtools.faults.outside import damage_base, mlflow, put_record, restore, snapshot
from harness.records.paths import bases_folder, runs_folder, work_folder
from harness.records.run_result import read_result, verify

AT_WORK = "a sweep is at work"
OFF = "MLflow is off"
SERIES = ("series", "lost series")
NEEDS_FINISHED = (*SERIES, "truncated")
MAX_FILES = 4
"""Damaged files at a time."""


@dataclass(kw_only=True, frozen=True)
class SweepStart:
    """One start of the sweep."""

    cells: Sequence[RunConfig]
    twins: int = 1
    needs_quiet: bool = False
    before: Callable[[OpenRound, ExitStack], str | None] = lambda opened, stack: None
    """Does the damage; returns the address of MLflow where the sweep shall log."""
    after: Callable[[OpenRound, list[int], list[str]], None] = lambda opened, codes, said: None
    """Checks what the sweep did (exit codes, what it said) and puts things right."""


@dataclass(frozen=True, kw_only=True)
class Damage:
    """Damage before a start, and what was there before."""

    before: dict[Path, bytes] = field(default_factory=dict[Path, bytes])
    hit: dict[str, Path] = field(default_factory=dict[str, Path])
    """Fault id -> file."""
    after: dict[Path, bytes | None] = field(default_factory=dict[Path, bytes | None])
    """The damaged files' bytes; None where the damage was to remove it."""


def next_start(outside: list[Fault], opened: OpenRound, missing: list[RunConfig]) -> SweepStart:
    """The next start: takes from `outside` what it brings about."""
    num_finished = len(opened.configs) - len(missing)
    records = [f for f in outside if f.kind == "record" and (num_finished or f.form not in NEEDS_FINISHED)]
    is_turn = bool(opened.starts) and len(opened.starts) % 3 == 0
    if records and (not missing or is_turn):
        chosen = records[:MAX_FILES]
        for fault in chosen:
            outside.remove(fault)
        return _record_start(chosen, opened)
    left_out = ("record",) if _prepared(opened) else ("record", "prepared")
    other = next((fault for fault in outside if fault.kind not in left_out), None)
    if other is None or not missing:
        return SweepStart(cells=opened.configs)
    outside.remove(other)
    make = {"base": _base_start, "prepared": _prepared_start, "mlflow": _mlflow_start, "twin": _twin_start}
    return make[other.kind](other, opened, missing)


def _prepared(opened: OpenRound) -> list[Path]:
    found = work_folder(opened.results, "prepared").glob("*/fixed.safetensors")
    return sorted(path for path in found if "." not in path.parent.name)


def _record_start(faults: Sequence[Fault], opened: OpenRound) -> SweepStart:
    """Files among the records: the sweep must refuse, name each, and change none."""
    done = Damage()

    def before(opened: OpenRound, stack: ExitStack) -> None:
        missing = [run_id(cell) for cell in opened.unfinished()]
        known = [i for i in map(run_id, opened.configs) if i not in missing and _is_ok(opened.records / f"{i}.json")]
        missing = [i for i in missing if not (opened.records / f"{i}.json").exists()]
        done.before.update(snapshot(opened.records))
        for fault in faults:
            reference = runs_folder(opened.reference, opened.records.name)
            path = put_record(fault, opened.records, _renamed(reference, opened), known, missing)
            if path is not None:
                done.hit[fault.id] = path
                opened.injected(fault.id)
        done.after.update({path: path.read_bytes() if path.exists() else None for path in done.hit.values()})

    def after(opened: OpenRound, codes: list[int], said: list[str]) -> None:
        lines = said[0] + "\n".join(verify(opened.records)) if opened.records.exists() else said[0]
        if any(path.suffix == ".json" for path in done.hit.values()) and codes != [2]:
            opened.found_wrong("unreported", f"not refused: exit {codes}")
        for fault, path in done.hit.items():
            if path.name not in lines:
                opened.found_wrong("unreported", "nobody said so", path)
            _check_same(opened, path, done.after[path])
            opened.told(fault, "reported")
        restore(done.before, done.hit.values())

    return SweepStart(cells=opened.configs, needs_quiet=True, before=before, after=after)


def _is_ok(path: Path) -> bool:
    return read_result(path).status == "ok"


def _renamed(reference: Path, opened: OpenRound) -> Path:
    """Sound records of the same cells in a sweep of another name."""
    folder = opened.control / "other"
    folder.mkdir(exist_ok=True)
    for path in reference.glob("*.json"):
        text = read_result(path).model_copy(update={"sweep": "another"}).model_dump_json()
        (folder / path.name).write_text(text, encoding="utf-8")
    return folder


def _check_same(opened: OpenRound, path: Path, data: bytes | None) -> None:
    if (path.read_bytes() if path.exists() else None) != data:
        opened.found_wrong("altered", "a damaged file was changed", path)


def _base_start(fault: Fault, opened: OpenRound, missing: Sequence[RunConfig]) -> SweepStart:
    """A damaged base: cells must fail and name it."""
    cells, done = missing[:2], Damage()

    def before(opened: OpenRound, stack: ExitStack) -> None:
        done.before.update(snapshot(bases_folder(opened.results)))
        done.hit[fault.id] = path = damage_base(fault, opened.results)
        done.after[path] = path.read_bytes()
        opened.injected(fault.id)

    def after(opened: OpenRound, codes: list[int], said: list[str]) -> None:
        path = done.hit[fault.id]
        if any(line.split()[1] == "ok:" for line in said[0].splitlines() if len(line.split()) > 1):
            opened.found_wrong("mislabelled", f"ok from a damaged {path}")
        _check_same(opened, path, done.after[path])
        if f"base folder {path.parent} is damaged" in said[0]:
            opened.told(fault.id, "reported")
        elif codes == [1]:
            opened.found_wrong("unreported", "cells failed and none named the damaged base", path)
        restore(done.before, done.hit.values())

    return SweepStart(cells=cells, needs_quiet=True, before=before, after=after)


def _prepared_start(fault: Fault, opened: OpenRound, missing: Sequence[RunConfig]) -> SweepStart:
    """Damage to what a part prepared: it is made again, once a cell asks for it."""

    def before(opened: OpenRound, stack: ExitStack) -> None:
        damage(_prepared(opened)[0], fault.form)
        opened.injected(fault.id)

    def after(opened: OpenRound, codes: list[int], said: list[str]) -> None:
        if any(work_folder(opened.results, "prepared").glob("*.corrupt-*")):
            opened.told(fault.id, "went on")

    return SweepStart(cells=opened.configs, needs_quiet=True, before=before, after=after)


def _mlflow_start(fault: Fault, opened: OpenRound, missing: Sequence[RunConfig]) -> SweepStart:
    """A tracking server that is down: one warning, and the sweep goes on."""

    def before(opened: OpenRound, stack: ExitStack) -> str:
        opened.injected(fault.id)
        return stack.enter_context(mlflow(fault.form))

    def after(opened: OpenRound, codes: list[int], said: list[str]) -> None:
        if OFF in said[0]:
            opened.told(fault.id, "went on")

    return SweepStart(cells=opened.configs, before=before, after=after)


def _twin_start(fault: Fault, opened: OpenRound, missing: Sequence[RunConfig]) -> SweepStart:
    """Two sweeps at once: one runs, the other is refused."""

    def before(opened: OpenRound, stack: ExitStack) -> None:
        opened.injected(fault.id)

    def after(opened: OpenRound, codes: list[int], said: list[str]) -> None:
        refused = sum(AT_WORK in one for one in said)
        if refused == 1:
            opened.told(fault.id, "reported")
        elif refused > 1:
            opened.found_wrong("lost", "both sweeps refused to start")

    return SweepStart(cells=opened.configs, twins=2, before=before, after=after)
