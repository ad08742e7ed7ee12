"""Cells as processes of this machine: one process per cell, one thread per process.

The queue belongs to the sweep. A cell that crashes, hangs, runs out of memory or is killed leaves a `failed` record
and the others go on; closing the generator (Ctrl-C) asks the running cells to save their state and stop.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.cell import record, record_path, work_folder, write
from harness.config import run_id, to_json
from harness.launchers.deaths import OUT_OF_MEMORY, ending, oom_kills
from harness.launchers.job import Event, Job
from harness.results import RunResult, read_result, write_atomic

ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
    "MALLOC_TOP_PAD_": "268435456",
}
"""glibc keeps freed memory: removes 97 % of the page faults of a small training step (embedded_default, section 3)."""
POLL_S = 0.2
GRACE_S = 60.0
"""How long a cell may take to save its state after Ctrl-C."""
LAST_WORDS_S = 1.0
"""How long a hung cell may take to print where it hangs."""
SIGNS = ("progress.json", "state.pt", "log.txt")
"""Files of a cell's work folder that change while it makes progress."""
Stamp = tuple[int, int, int] | None


@dataclass(kw_only=True)
class Running:
    """A live process of a cell, and what was last seen of it."""

    job: Job
    process: subprocess.Popen[bytes]
    gpu: str | None
    record: Stamp
    """Of the record that stood there before it."""
    log_start: int
    """Bytes of the log that earlier attempts wrote."""
    num_ooms: int
    signs: list[Stamp]
    sign_s: float
    """When the signs last changed (monotonic)."""
    step: int = 0


def run_cells(jobs: Sequence[Job], workers: int) -> Generator[Event, None, None]:
    """Run every job, `workers` at a time, in order; CUDA cells on the GPU with the fewest of them.

    Every job ends in one `finished` event with its record, also where that could not be written. Closing the iterator
    stops the running cells cleanly.
    """
    waiting, running = list(jobs), list[Running]()
    gpus = visible_gpus() if any(job.config.trainer.device == "cuda" for job in jobs) else []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.pop(0)
                taken = [cell.gpu for cell in running]
                gpu = min(gpus, key=taken.count) if gpus and job.config.trainer.device == "cuda" else None
                try:
                    refuse_foreign(job)
                    cell = _start(job, gpu)
                except (OSError, ValueError) as error:
                    yield Event(kind="finished", config=job.config, result=failed(job, f"not started: {error}"))
                    continue
                running.append(cell)
                yield Event(kind="started", config=job.config, pid=cell.process.pid)
            time.sleep(POLL_S)
            for cell in list(running):
                is_hung = cell.process.poll() is None and _is_hung(cell)
                if cell.process.returncode is None and not is_hung:
                    yield Event(kind="progress", config=cell.job.config, step=cell.step)
                    continue
                if is_hung:
                    _kill(cell.process)
                running.remove(cell)
                result = _collect(cell, is_hung)
                for other in running if (result.reason or "").startswith(OUT_OF_MEMORY) else ():
                    other.num_ooms += 1  # one count of the kernel explains one death
                yield Event(kind="finished", config=cell.job.config, result=result)
    finally:
        _stop([cell.process for cell in running])


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may name: the GPUs that this process sees."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(i) for i in range(torch.cuda.device_count())] if named is None else [n for n in named.split(",") if n]


def refuse_foreign(job: Job) -> None:
    """Raises ValueError, one line, where a file that is no result stands in the place of the job's record."""
    path = record_path(job.launch, run_id(job.config))
    if path.exists():
        read_result(path)


def failed(job: Job, reason: str, error: str | None = None) -> RunResult:
    """The record of a job that could not write its own, written here where that can be done; the reason says so
    where not."""
    result = record(job.config, job.launch, None, {}, "failed", reason, error)
    try:
        write(job.launch, result, None)
    except ValueError as problem:
        is_told = str(problem) in reason
        return result if is_told else result.model_copy(update={"reason": f"{reason}; no record of that: {problem}"})
    return result


def clean(job: Job) -> None:
    """Remove what a finished cell no longer needs; what was set aside for being damaged stays."""
    work = work_folder(job.launch, run_id(job.config))
    if any(work.glob("*.corrupt")):
        for path in work.iterdir():
            if path.suffix != ".corrupt":
                path.unlink(missing_ok=True)
    else:
        shutil.rmtree(work, ignore_errors=True)


def _start(job: Job, gpu: str | None) -> Running:
    """Raises OSError or ValueError where the machine is too full for another cell."""
    cell_id = run_id(job.config)
    work = work_folder(job.launch, cell_id)
    description = {"config": to_json(job.config), "launch": to_json(job.launch), "parent": os.getpid()}
    write_atomic(work / "cell.json", json.dumps(description).encode())
    with (work / "log.txt").open("ab") as log:
        start = log.tell()
        before, num_ooms = _stamp(record_path(job.launch, cell_id)), oom_kills()
        process = _spawn(work / "cell.json", log.fileno(), job.launch.threads, gpu)
    return Running(
        job=job, process=process, gpu=gpu, record=before, log_start=start, num_ooms=num_ooms,
        signs=[], sign_s=time.monotonic(),
    )  # fmt: skip


def _spawn(cell: Path, log: int, threads: int, gpu: str | None) -> subprocess.Popen[bytes]:
    code = str(Path(__file__).resolve().parents[2])  # where a launcher runs need not be where its code is
    paths = [code, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-m", "harness.cell", str(cell)],
        env=os.environ
        | ENVIRONMENT
        | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(paths)}
        | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,  # Ctrl-C reaches the sweep alone, which then asks its cells
    )


def _stamp(path: Path) -> Stamp:
    """What changes when a file is replaced or grows."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _is_hung(cell: Running) -> bool:
    """Look for signs of progress; is the last one too long ago?"""
    work, now = work_folder(cell.job.launch, run_id(cell.job.config)), time.monotonic()
    signs = [_stamp(work / name) for name in SIGNS]
    if signs != cell.signs:
        cell.signs, cell.sign_s = signs, now
        with suppress(OSError, ValueError, KeyError, TypeError):  # a damaged file tells nothing
            cell.step = int(json.loads((work / "progress.json").read_text(encoding="utf-8"))["step"])
    return now - cell.sign_s >= cell.job.launch.stall_s


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a cell that does not listen, once it had the chance to print where it is."""
    process.send_signal(signal.SIGUSR1)
    with suppress(subprocess.TimeoutExpired):
        process.wait(LAST_WORDS_S)
    process.kill()
    process.wait()


def _collect(cell: Running, is_hung: bool) -> RunResult:
    """The record of a cell whose process ended: its own, else one that says how it ended."""
    job, path = cell.job, record_path(cell.job.launch, run_id(cell.job.config))
    unreadable = ""
    if _stamp(path) != cell.record:
        try:
            result = read_result(path)
        except ValueError as error:
            unreadable = f": {error}"
        else:
            if result.status == "ok":
                clean(job)
            return result
    log = _tail(work_folder(job.launch, run_id(job.config)) / "log.txt", cell.log_start)
    status, reason = ending(cell.process.returncode, log, is_oom=oom_kills() > cell.num_ooms)
    if is_hung:
        steps = f"{cell.step} of {job.config.trainer.steps}"
        status, reason = "failed", f"hung: no progress for {job.launch.stall_s:g} s after step {steps}; killed"
    if status == "cancelled":
        return record(job.config, job.launch, None, {}, status, reason, log or None)
    return failed(job, reason + unreadable, log or None)


def _tail(path: Path, start: int) -> str:
    """The last 2000 bytes that a process printed."""
    try:
        with path.open("rb") as file:
            file.seek(max(start, path.stat().st_size - 2000))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


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
