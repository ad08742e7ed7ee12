"""One round: the starts of its sweep with faults from outside, and the audit at its end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from harness.config.load import run_id, to_json
from harness.config.schema import Launch, RunConfig
from harness.devtools.faults.audit import Case, alive, audit_cells, audit_leftovers, end_stopped, unmeasured
from harness.devtools.faults.journal import VARIABLE, VOLUME, read, write_faults
from harness.devtools.faults.open_round import SWEEP, OpenRound, Settings
from harness.devtools.faults.outcome import FaultOutcome, outcome
from harness.devtools.faults.schedule import Round
from harness.devtools.faults.sweep_starts import SweepStart, next_start
from harness.foundation.own_process import code_path, module_command
from harness.records.paths import bases_folder, runs_folder

MAX_STARTS = 60
"""Starts of the sweep in one round, after which its cells count as lost."""
STUCK_S = 900.0
"""A start of the sweep that takes longer is taken to hang."""
VOLUME_BYTES = 48 << 20


@dataclass(frozen=True, kw_only=True)
class Done:
    """A round and what came of it."""

    opened: OpenRound
    outcomes: list[FaultOutcome]
    cases: list[Case]
    unmeasured: int


def run_round(opened: OpenRound, planned: Round) -> Done:
    """One round to its end and its audit."""
    for config, faults in zip(opened.configs, planned.cells, strict=True):
        write_faults(opened.control, run_id(config), faults)
    outside = list(planned.outside)
    while len(opened.starts) < MAX_STARTS:
        missing = opened.unfinished()
        if not missing and not any(fault.kind == "record" for fault in outside):
            break
        run_start(opened, next_start(outside, opened, missing))
    wait_quiet(opened)
    # Everything is finished: this start must run nothing and change nothing.
    wait(opened, start(opened, opened.configs, opened.launch)[0])
    marks = read(opened.control)
    faults = [fault for of_cell in planned.cells for fault in of_cell] + list(planned.outside)
    found = [one for fault in faults if (one := outcome(fault, marks)) is not None]
    diverging = {
        run_id(config): one.fault
        for config, of_cell in zip(opened.configs, planned.cells, strict=True)
        for one in found
        if one.fault.kind == "nan" and one.fault in of_cell
    }
    reference = runs_folder(opened.reference, SWEEP)
    cases = audit_cells(opened.configs, reference, opened.records, marks, diverging)
    cases = [*opened.cases, *cases, *audit_leftovers(opened.results, opened.control)]
    return Done(opened=opened, outcomes=found, cases=cases, unmeasured=unmeasured(opened.records, reference))


def run_start(opened: OpenRound, now: SweepStart) -> None:
    """One start of the sweep, with its faults from outside."""
    with ExitStack() as stack:
        opened.ended.extend(end_stopped(opened.control))
        if now.needs_quiet:
            wait_quiet(opened)
        tracking = now.before(opened, stack)
        started = [start(opened, now.cells, opened.launch, tracking=tracking) for _ in range(now.twins)]
        codes = [wait(opened, process) for process, _ in started]
        if now.needs_quiet:
            wait_quiet(opened)
        now.after(opened, codes, [log.read_text(encoding="utf-8", errors="replace") for _, log in started])


def start(
    opened: OpenRound,
    cells: Sequence[RunConfig],
    launch: Launch,
    *,
    tracking: str | None = None,
    has_faults: bool = True,
) -> tuple[subprocess.Popen[bytes], Path]:
    """Start the sweep of some cells: its process, and the file of the control folder to which it speaks."""
    words = {
        "cells": [to_json(cell) for cell in cells],
        "launch": to_json(launch),
        "workers": opened.settings.workers,
        "tracking": tracking,
    }
    path = opened.control / f"sweep-{time.monotonic_ns()}.json"
    path.write_text(json.dumps(words), encoding="utf-8")
    environment = {"OMP_NUM_THREADS": "1"}
    if has_faults:
        environment |= {VARIABLE: str(opened.control)}
        environment |= {} if opened.volume is None else {VOLUME: str(opened.volume)}
    log = path.with_suffix(".log")
    with log.open("wb") as told:
        process = subprocess.Popen(
            module_command("harness.devtools.faults.driver", str(path)), cwd=path.parent, stdin=subprocess.DEVNULL,
            env=os.environ | environment | code_path(), stdout=told, stderr=told, start_new_session=True,
        )  # fmt: skip
    return process, log


def wait(opened: OpenRound, process: subprocess.Popen[bytes]) -> int:
    """The exit code of a sweep; one that hangs is killed and is a case."""
    try:
        code = process.wait(STUCK_S)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
        opened.found_wrong("lost", f"the sweep hung for {STUCK_S:g} s")
    opened.starts.append(code)
    return code


def wait_quiet(opened: OpenRound) -> None:
    """Wait until cells whose sweep was killed have saved their state and gone."""
    deadline = time.monotonic() + 120.0
    while alive(opened.control) and time.monotonic() < deadline:
        time.sleep(0.2)


def open_round(
    folder: Path, reference: Path, configs: tuple[RunConfig, ...], settings: Settings, stack: ExitStack
) -> OpenRound:
    """The folders of a round, its results on a small volume of their own where that is allowed."""
    results = folder / "results"
    results.mkdir(parents=True)
    (folder / "control").mkdir()
    volume = results if "disk" in settings.kinds and _mount(results) else None
    if volume is not None:
        stack.callback(_unmount, volume, folder)
    shutil.copytree(bases_folder(reference), bases_folder(results))
    return OpenRound(folder=folder, reference=reference, configs=configs, settings=settings, volume=volume)


def _mount(folder: Path) -> bool:
    """A file system in memory of VOLUME_BYTES; only an administrator may, others get limits on file sizes instead."""
    if os.name != "posix" or os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={VOLUME_BYTES}", "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _unmount(volume: Path, folder: Path) -> None:
    """Keep what was on the volume, next to it, then remove it."""
    shutil.copytree(volume, folder / "kept")
    subprocess.run(["umount", str(volume)], check=False, capture_output=True)
