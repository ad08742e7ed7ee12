"""Starts of a sweep under faults from beside: what is damaged before, what the sweep must say, what is put right after.

Somebody who is told of a damaged file moves it away or restores it and starts again; so do these visits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config.load import run_id
from harness.config.schema import RunConfig
from harness.devtools.faults.audit import Case
from harness.devtools.faults.beside import damage_base, mlflow, put_record, restore, snapshot
from harness.devtools.faults.journal import Fault, note
from harness.devtools.faults.strikes import damage
from harness.records.run_result import read_result, verify

if TYPE_CHECKING:
    from harness.devtools.faults.rounds import Place

AT_WORK = "a sweep is at work"
OFF = "MLflow is off"
SERIES = ("series", "lost series")
NEEDS_FINISHED = (*SERIES, "truncated")
MAX_FILES = 4
"""Damaged files at a time."""


@dataclass(kw_only=True, frozen=True)
class Visit:
    """One start of the sweep."""

    cells: Sequence[RunConfig]
    twins: int = 1
    needs_quiet: bool = False
    before: Callable[[Place, ExitStack], str | None] = lambda place, stack: None
    """Does the damage; returns the address of MLflow where the sweep shall log."""
    after: Callable[[Place, list[int], list[str]], None] = lambda place, codes, said: None
    """Checks what the sweep did (exit codes, what it said) and puts things right."""


@dataclass(frozen=True, kw_only=True)
class Damage:
    """What a visit did and what was there before."""

    before: dict[Path, bytes] = field(default_factory=dict[Path, bytes])
    hit: dict[str, Path] = field(default_factory=dict[str, Path])
    """Fault id -> file."""
    after: dict[Path, bytes | None] = field(default_factory=dict[Path, bytes | None])
    """The damaged files' bytes; None where the damage was to remove it."""


def next_visit(beside: list[Fault], place: Place, missing: list[RunConfig]) -> Visit:
    """The next start: takes from `beside` what it brings about."""
    num_finished = len(place.configs) - len(missing)
    records = [f for f in beside if f.kind == "record" and (num_finished or f.form not in NEEDS_FINISHED)]
    is_turn = bool(place.starts) and len(place.starts) % 3 == 0
    if records and (not missing or is_turn):
        chosen = records[:MAX_FILES]
        for fault in chosen:
            beside.remove(fault)
        return _record_visit(chosen, place)
    other = next((fault for fault in beside if fault.kind != "record" and _can(fault, place)), None)
    if other is None or not missing:
        return Visit(cells=place.configs)
    beside.remove(other)
    make = {"base": _base_visit, "prepared": _prepared_visit, "mlflow": _mlflow_visit, "twin": _twin_visit}
    return make[other.kind](other, place, missing)


def _can(fault: Fault, place: Place) -> bool:
    return fault.kind != "prepared" or any(_prepared(place))


def _prepared(place: Place) -> list[Path]:
    found = (place.results / "work" / "prepared").glob("*/fixed.safetensors")
    return sorted(path for path in found if "." not in path.parent.name)


def _record_visit(faults: Sequence[Fault], place: Place) -> Visit:
    """Files among the records: the sweep must refuse, name each, and change none."""
    done = Damage()

    def before(place: Place, stack: ExitStack) -> None:
        missing = [run_id(cell) for cell in place.unfinished()]
        known = [i for i in map(run_id, place.configs) if i not in missing and _is_ok(place.records / f"{i}.json")]
        missing = [i for i in missing if not (place.records / f"{i}.json").exists()]
        done.before.update(snapshot(place.records))
        for fault in faults:
            reference = place.reference / "runs" / place.records.name
            path = put_record(fault, place.records, _renamed(reference, place), known, missing)
            if path is not None:
                done.hit[fault.id] = path
                note(place.control, "strike", "", fault=fault.id)
        done.after.update({path: path.read_bytes() if path.exists() else None for path in done.hit.values()})

    def after(place: Place, codes: list[int], said: list[str]) -> None:
        lines = said[0] + "\n".join(verify(place.records)) if place.records.exists() else said[0]
        if any(path.suffix == ".json" for path in done.hit.values()) and codes != [2]:
            place.cases.append(Case(wrong="unreported", where=place.folder.name, words=f"not refused: exit {codes}"))
        for fault, path in done.hit.items():
            if path.name not in lines:
                place.cases.append(Case(wrong="unreported", where=str(path), words="nobody said so"))
            _check_same(place, path, done.after[path])
            note(place.control, "told", "", fault=fault, status="reported")
        restore(done.before, done.hit.values())

    return Visit(cells=place.configs, needs_quiet=True, before=before, after=after)


def _is_ok(path: Path) -> bool:
    return read_result(path).status == "ok"


def _renamed(reference: Path, place: Place) -> Path:
    """Sound records of the same cells in a sweep of another name."""
    folder = place.control / "other"
    folder.mkdir(exist_ok=True)
    for path in reference.glob("*.json"):
        text = read_result(path).model_copy(update={"sweep": "another"}).model_dump_json()
        (folder / path.name).write_text(text, encoding="utf-8")
    return folder


def _check_same(place: Place, path: Path, data: bytes | None) -> None:
    if (path.read_bytes() if path.exists() else None) != data:
        place.cases.append(Case(wrong="altered", where=str(path), words="a damaged file was changed"))


def _base_visit(fault: Fault, place: Place, missing: Sequence[RunConfig]) -> Visit:
    """A damaged base: cells must fail and name it."""
    cells, bases, done = missing[:2], place.results / "bases", Damage()

    def before(place: Place, stack: ExitStack) -> None:
        done.before.update(snapshot(bases))
        done.hit[fault.id] = path = damage_base(fault, bases)
        done.after[path] = path.read_bytes()
        note(place.control, "strike", "", fault=fault.id)

    def after(place: Place, codes: list[int], said: list[str]) -> None:
        path = done.hit[fault.id]
        if any(line.split()[1] == "ok:" for line in said[0].splitlines() if len(line.split()) > 1):
            place.cases.append(Case(wrong="mislabelled", where=place.folder.name, words=f"ok from a damaged {path}"))
        _check_same(place, path, done.after[path])
        if f"base folder {path.parent} is damaged" in said[0]:
            note(place.control, "told", "", fault=fault.id, status="reported")
        restore(done.before, done.hit.values())

    return Visit(cells=cells, needs_quiet=True, before=before, after=after)


def _prepared_visit(fault: Fault, place: Place, missing: Sequence[RunConfig]) -> Visit:
    """Damage to what a part prepared: it is made again, once a cell asks for it."""

    def before(place: Place, stack: ExitStack) -> None:
        damage(_prepared(place)[0], fault.form)
        note(place.control, "strike", "", fault=fault.id)

    def after(place: Place, codes: list[int], said: list[str]) -> None:
        if any((place.results / "work" / "prepared").glob("*.corrupt-*")):
            note(place.control, "told", "", fault=fault.id, status="went on")

    return Visit(cells=place.configs, needs_quiet=True, before=before, after=after)


def _mlflow_visit(fault: Fault, place: Place, missing: Sequence[RunConfig]) -> Visit:
    """A tracking server that is down: one warning, and the sweep goes on."""

    def before(place: Place, stack: ExitStack) -> str:
        note(place.control, "strike", "", fault=fault.id)
        return stack.enter_context(mlflow(fault.form))

    def after(place: Place, codes: list[int], said: list[str]) -> None:
        if OFF in said[0]:
            note(place.control, "told", "", fault=fault.id, status="went on")

    return Visit(cells=place.configs, before=before, after=after)


def _twin_visit(fault: Fault, place: Place, missing: Sequence[RunConfig]) -> Visit:
    """Two sweeps at once: one runs, the other is refused."""

    def before(place: Place, stack: ExitStack) -> None:
        note(place.control, "strike", "", fault=fault.id)

    def after(place: Place, codes: list[int], said: list[str]) -> None:
        refused = sum(AT_WORK in one for one in said)
        if refused == 1:
            note(place.control, "told", "", fault=fault.id, status="reported")
        elif refused > 1:
            place.cases.append(Case(wrong="lost", where=place.folder.name, words="both sweeps refused to start"))

    return Visit(cells=place.configs, twins=2, before=before, after=after)
