"""One round: the folders, the starts of its sweep with faults from beside, and the audit at its end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from harness.config.load import run_id, to_json
from harness.config.schema import Launch, RunConfig
from harness.devtools.faults.audit import Case, alive, audit_cells, audit_leftovers, end_stopped, unmeasured
from harness.devtools.faults.journal import VARIABLE, VOLUME, read, write_orders
from harness.devtools.faults.outcome import Outcome, outcome
from harness.devtools.faults.processes import Served, Spawned, Sweeping
from harness.devtools.faults.schedule import FORMS, Round
from harness.devtools.faults.visits import Visit, next_visit
from harness.sweep.queue import finished

SWEEP = "faults"
MAX_STARTS = 60
"""Starts of the sweep in one round, after which its cells count as lost."""
STUCK_S = 900.0
"""A start of the sweep that takes longer is taken to hang."""
VOLUME_BYTES = 48 << 20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a campaign does."""

    count: int = 200
    """Faults to inject, at least."""
    seed: int = 0
    kinds: tuple[str, ...] = tuple(FORMS)
    cells: int = 6
    """Per round."""
    size: int = 42
    """Faults planned per round."""
    abreast: int = 3
    """Rounds at a time: most of a round is waiting for one process to start."""
    workers: int = 3
    """Cells at a time in a round."""
    spawned_every: int = 5
    """Every so many rounds processes are started as users start them, in the others they are forked."""
    stall_s: float = 60.0
    """Longer than a cell needs to its first step on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a round is."""

    folder: Path
    reference: Path
    configs: tuple[RunConfig, ...]
    settings: Settings
    is_forked: bool = False
    """Are its processes forked (`harness.devtools.faults.processes`)?"""
    volume: Path | None = None
    starts: list[int] = field(default_factory=list[int])
    """Exit codes."""
    ended: list[int] = field(default_factory=list[int])
    """Stopped orphans that had to be ended by hand."""
    cases: list[Case] = field(default_factory=list[Case])

    @property
    def results(self) -> Path:
        return self.folder / "results"

    @property
    def control(self) -> Path:
        return self.folder / "control"

    @property
    def records(self) -> Path:
        return self.results / "runs" / SWEEP

    @property
    def launch(self) -> Launch:
        return Launch(
            results=str(self.results), sweep=SWEEP, checkpoint_every_s=0.0, stall_s=self.settings.stall_s, threads=1
        )

    def unfinished(self) -> list[RunConfig]:
        """Cells without a finished record."""
        return [config for config in self.configs if finished(config, self.launch) is None]


@dataclass(frozen=True, kw_only=True)
class Done:
    """A round and what came of it."""

    place: Place
    outcomes: list[Outcome]
    cases: list[Case]
    unmeasured: int


def run_round(place: Place, planned: Round) -> Done:
    """One round to its end and its audit."""
    for config, faults in zip(place.configs, planned.cells, strict=True):
        write_orders(place.control, run_id(config), faults)
    beside = list(planned.beside)
    while len(place.starts) < MAX_STARTS:
        missing = place.unfinished()
        if not missing and not any(fault.kind == "record" for fault in beside):
            break
        visit(place, next_visit(beside, place, missing))
    wait_quiet(place)
    wait(
        place, start(place, place.configs, place.launch)[0]
    )  # everything is finished: this must run nothing and change nothing
    marks = read(place.control)
    faults = [fault for hand in planned.cells for fault in hand] + list(planned.beside)
    found = [one for fault in faults if (one := outcome(fault, marks)) is not None]
    struck = {
        run_id(config): one.fault
        for config, hand in zip(place.configs, planned.cells, strict=True)
        for one in found
        if one.fault.kind == "nan" and one.fault in hand
    }
    reference = place.reference / "runs" / SWEEP
    cases = audit_cells(place.configs, reference, place.records, marks, struck)
    cases = [*place.cases, *cases, *audit_leftovers(place.results, place.control)]
    return Done(place=place, outcomes=found, cases=cases, unmeasured=unmeasured(place.records, reference))


def visit(place: Place, now: Visit) -> None:
    """One start of the sweep, with what is done to it from beside."""
    with ExitStack() as stack:
        place.ended.extend(end_stopped(place.control))
        if now.needs_quiet:
            wait_quiet(place)
        tracking = now.before(place, stack)
        started = [start(place, now.cells, place.launch, tracking=tracking) for _ in range(now.twins)]
        codes = [wait(place, process) for process, _ in started]
        if now.needs_quiet:
            wait_quiet(place)
        now.after(place, codes, [log.read_text(encoding="utf-8", errors="replace") for _, log in started])


def start(
    place: Place, cells: Sequence[RunConfig], launch: Launch, *, tracking: str | None = None, is_struck: bool = True
) -> tuple[Sweeping, Path]:
    """Start the sweep of some cells: its process, and the file of the control folder to which it speaks."""
    is_forked = place.is_forked and tracking is None and is_struck  # a tracker's thread must not be forked
    words = {
        "cells": [to_json(cell) for cell in cells], "launch": to_json(launch), "workers": place.settings.workers,
        "tracking": tracking, "is_forked": is_forked,
    }  # fmt: skip
    path = place.control / f"sweep-{time.monotonic_ns()}.json"
    path.write_text(json.dumps(words), encoding="utf-8")
    environment = {"OMP_NUM_THREADS": "1"}
    if is_struck:
        environment |= {VARIABLE: str(place.control)}
        environment |= {} if place.volume is None else {VOLUME: str(place.volume)}
    return (Served if is_forked else Spawned)(path, environment), path.with_suffix(".log")


def wait(place: Place, process: Sweeping) -> int:
    """The exit code of a sweep; one that hangs is killed and is a case."""
    code = process.ended(STUCK_S)
    if code is None:
        process.kill()
        code = -signal.SIGKILL
        place.cases.append(Case(wrong="lost", where=place.folder.name, words=f"the sweep hung for {STUCK_S:g} s"))
    place.starts.append(code)
    return code


def wait_quiet(place: Place) -> None:
    """Wait until cells whose sweep was killed have saved their state and gone."""
    deadline = time.monotonic() + 120.0
    while alive(place.control) and time.monotonic() < deadline:
        time.sleep(0.2)


def open_place(
    folder: Path, number: int, reference: Path, configs: tuple[RunConfig, ...], settings: Settings, stack: ExitStack
) -> Place:
    """The folders of a round, its results on a small volume of their own where that is allowed."""
    results = folder / "results"
    results.mkdir(parents=True)
    (folder / "control").mkdir()
    volume = results if "disk" in settings.kinds and _mount(results) else None
    if volume is not None:
        stack.callback(_unmount, volume, folder)
    shutil.copytree(reference / "bases", results / "bases")
    return Place(
        folder=folder, reference=reference, configs=configs, settings=settings, volume=volume,
        is_forked=is_forked(settings, number),
    )  # fmt: skip


def is_forked(settings: Settings, number: int) -> bool:
    """Rounds of whole interpreters are smaller: they take several times as long."""
    return number % settings.spawned_every != 0


def _mount(folder: Path) -> bool:
    """A file system in memory of VOLUME_BYTES; only an administrator may, others get limits on file sizes instead."""
    if os.name != "posix" or os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={VOLUME_BYTES}", "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _unmount(volume: Path, folder: Path) -> None:
    """Keep what was on the volume, beside it, then remove it."""
    shutil.copytree(volume, folder / "kept")
    subprocess.run(["umount", str(volume)], check=False, capture_output=True)
