"""Processes that stand in for cells: a line of Python each, with the paths that a cell has."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from harness.config.load import run_id
from harness.config.schema import Launch
from harness.records.run_result import RunResult, write_result
from harness.run.record import record
from harness.sweep.launchers import local
from harness.sweep.launchers.job import Event, Job
from tests.toy import small_config, small_launch

PRELUDE = """
import faulthandler, json, os, pathlib, signal, sys, time
work = pathlib.Path(sys.argv[1]).parent
path = work.parent.parent / "runs" / "test" / f"{work.name}.json"
faulthandler.register(signal.SIGUSR1)
"""
"""First lines of every stand-in: its work folder and the place of its record."""
LEAVE_RECORD = """
path.parent.mkdir(parents=True, exist_ok=True)
os.replace(work / "made.json", path)
"""


def jobs_of(folder: Path, count: int = 1, **launch: object) -> list[Job]:
    """Cells that differ by their seed and that of their base, which none of them makes."""
    config = small_config()
    where = Launch(results=str(folder), sweep="test", **launch)  # type: ignore[arg-type]
    return [Job(config=replace(config, seed=seed, base_seed=seed), launch=where) for seed in range(count)]


def job_of(folder: Path, *overrides: str, **launch: object) -> Job:
    """A cell that really trains."""
    return Job(config=small_config("method=bf16", *overrides), launch=small_launch(folder, **launch))


def gone(pid: int) -> bool:
    """Did the process end within a while? An orphan looks up after its step."""
    for _ in range(300):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


def play(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """The next cells are played by these lines of Python, all further ones by the last."""
    left = list(lines)

    def spawn(cell: Path, log: int, threads: int, gpus: list[str], module: str) -> subprocess.Popen[bytes]:
        line = left.pop(0) if len(left) > 1 else left[0]
        code = [sys.executable, "-S", "-c", PRELUDE + line, str(cell)]
        return subprocess.Popen(code, stdout=log, stderr=log, start_new_session=True)

    monkeypatch.setattr(local, "start_cell", spawn)


def run(monkeypatch: pytest.MonkeyPatch, jobs: list[Job], *lines: str) -> list[Event]:
    """Every event of the jobs, played by the lines, all at once."""
    play(monkeypatch, *lines)
    return list(local.run_cells(jobs, workers=len(jobs)))


def results(events: list[Event]) -> list[RunResult]:
    """Their records, in the order of the seeds."""
    found = [event.result for event in events if event.result is not None]
    return sorted(found, key=lambda result: result.seed)


def made(job: Job, status: str = "ok") -> Path:
    """A record of the job, in its work folder, for a stand-in to put in place."""
    work = Path(job.launch.results) / "work" / run_id(job.config)
    result = record(job.config, job.launch, None, {}, status, None if status == "ok" else "made up", None)
    write_result(work, result, None)
    return (work / f"{result.run_id}.json").rename(work / "made.json")
