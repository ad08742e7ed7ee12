"""Cells as processes of this machine: one process per cell, one thread per process.

The queue belongs to the sweep. A cell that crashes, runs out of memory or is killed leaves a `failed` record and the
sweep goes on; Ctrl-C asks the running cells to save their state and stop.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import torch

from harness.cell import CANCELLED, record, work_folder
from harness.config import run_id, to_json
from harness.launchers.job import Event, Job
from harness.results import RunResult, read_result, write_result
from harness.run_config import Launch, RunConfig

ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
    "MALLOC_TOP_PAD_": "268435456",
}
"""glibc keeps freed memory: removes 97 % of the page faults of a small training step (embedded_default, section 3)."""
POLL_S = 0.2
GRACE_S = 60.0
"""How long a cell may take to save its state after Ctrl-C."""


def run_cells(jobs: Sequence[Job], workers: int) -> Generator[Event, None, None]:
    """Run every cell, `workers` at a time, in order; CUDA cells on the GPU with the fewest of them.

    Closing the iterator stops the running cells cleanly.
    """
    waiting = list(jobs)
    running: dict[str, tuple[Job, subprocess.Popen[bytes]]] = {}
    places: dict[str, str] = {}
    gpus = visible_gpus() if any(job.config.trainer.device == "cuda" for job in jobs) else []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.pop(0)
                taken = [places[cell_id] for cell_id in running if cell_id in places]
                place = min(gpus, key=taken.count) if gpus and job.config.trainer.device == "cuda" else None
                process = _spawn(job.config, job.launch, place)
                running[run_id(job.config)] = (job, process)
                if place is not None:
                    places[run_id(job.config)] = place
                yield Event(kind="started", config=job.config, pid=process.pid)
            time.sleep(POLL_S)
            for cell_id, (job, process) in list(running.items()):
                if process.poll() is None:
                    yield Event(kind="progress", config=job.config, step=_progress(job.launch, cell_id))
                    continue
                del running[cell_id]
                result = _collect(job.config, job.launch, process.returncode)
                yield Event(kind="finished", config=job.config, result=result)
    finally:
        _stop([process for _, process in running.values()])


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may name: the GPUs that this process sees."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(i) for i in range(torch.cuda.device_count())] if named is None else [n for n in named.split(",") if n]


def _spawn(config: RunConfig, launch: Launch, gpu: str | None) -> subprocess.Popen[bytes]:
    work = work_folder(launch, run_id(config))
    work.mkdir(parents=True, exist_ok=True)
    cell = work / "cell.json"
    cell.write_text(json.dumps({"config": to_json(config), "launch": to_json(launch)}), encoding="utf-8")
    with (work / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "harness.cell", str(cell)],
            env=os.environ
            | ENVIRONMENT
            | {"OMP_NUM_THREADS": str(launch.threads)}
            | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches the sweep alone, which then asks its cells
        )


def _progress(launch: Launch, cell_id: str) -> int:
    path = work_folder(launch, cell_id) / "progress.json"
    return int(json.loads(path.read_text(encoding="utf-8"))["step"]) if path.exists() else 0


def _collect(config: RunConfig, launch: Launch, code: int) -> RunResult:
    """The record of a cell whose process ended; written here where the process could not."""
    cell_id = run_id(config)
    work = work_folder(launch, cell_id)
    path = Path(launch.results) / "runs" / launch.sweep / f"{cell_id}.json"
    if code == 0:
        result = read_result(path)
        if result.status == "ok":
            for leftover in ("state.pt", "progress.json", "cell.json", "log.txt"):
                (work / leftover).unlink(missing_ok=True)
            work.rmdir()
        return result
    status, reason = "failed", f"the process ended with exit code {code}"
    if code == CANCELLED:
        status, reason = "cancelled", "stopped on request; run the sweep again to go on"
    elif code < 0:
        reason = f"the process was killed by {signal.Signals(-code).name}"
    log = work / "log.txt"
    tail = log.read_text(encoding="utf-8", errors="replace")[-2000:] if log.exists() else ""
    result = record(config, launch, None, {}, status, reason, tail or None)
    if code != CANCELLED:
        write_result(path.parent, result, None)
    return result


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
