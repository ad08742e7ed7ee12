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
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from pathlib import Path

from harness.config.load import run_id, to_json
from harness.config.schema import RunConfig
from harness.foundation import life
from harness.foundation.own_process import code_path, module_command
from harness.foundation.process_log import tail
from harness.foundation.visible_gpus import visible_gpus
from harness.foundation.whole_file import write_atomic
from harness.records import cell_progress
from harness.records.run_result import RunResult, read_result
from harness.records.statuses import FINISHED
from harness.run.cell import record, record_path, work_folder, write
from harness.sweep.launchers.bases import bases_of, next_job, untrained
from harness.sweep.launchers.deaths import OUT_OF_MEMORY, ending, oom_kills
from harness.sweep.launchers.job import Admit, Event, Job, always

ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
    "MALLOC_TOP_PAD_": "268435456",
}
"""glibc keeps freed memory: removes 97 % of the page faults of a small training step."""
POLL_S = 0.2
LOG_BYTES = 2000
"""Bytes of a cell's last output that its record keeps."""
GRACE_S = 60.0
"""Seconds that a cell has to save its state after Ctrl-C."""
LAST_WORDS_S = 1.0
"""Seconds that a hung cell has to print where it hangs."""
SIGNS = (cell_progress.NAME, "state.pt", "log.txt", life.NAME)
"""Files of a cell's work folder that change while it makes progress."""
Stamp = tuple[int, int, int] | None


class Running:
    """The live process of a cell, and what was last seen of it."""

    def __init__(self, job: Job, base: Path | None, gpus: Sequence[str], module: str) -> None:
        """Start it; `base`: the folder of its base. Raises OSError or ValueError where the machine is too full for
        another process or file."""
        self.job, self.gpus, self.step, self.note = job, gpus, 0, None
        self.id, self.trains = run_id(job.config), untrained(base)
        self.work, self.record = work_folder(job.launch, self.id), record_path(job.launch, self.id)
        description = {"config": to_json(job.config), "launch": to_json(job.launch), "parent": os.getpid()}
        write_atomic(self.work / "cell.json", json.dumps(description).encode())
        with (self.work / "log.txt").open("ab") as log:
            self.log_start = log.tell()  # behind what earlier attempts printed
            self.before, self.num_ooms = _stamp(self.record), oom_kills()
            self.process = start_cell(self.work / "cell.json", log.fileno(), job.launch.threads, gpus, module)
        self.signs, self.sign_s = list[Stamp](), time.monotonic()

    def is_hung(self) -> bool:
        """Has the cell shown no sign of progress for too long?"""
        signs = [_stamp(self.work / name) for name in SIGNS]
        if signs != self.signs:
            self.signs, self.sign_s = signs, time.monotonic()
            with suppress(OSError, ValueError, KeyError, TypeError):  # a damaged file tells nothing
                self.step, self.note = cell_progress.told(self.work)
        return time.monotonic() - self.sign_s >= self.job.launch.stall_s

    def kill(self) -> None:
        """Kill a cell that does not stop, after it had the time to print where it hangs."""
        self.process.send_signal(signal.SIGUSR1)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(LAST_WORDS_S)
        self.process.kill()
        self.process.wait()

    def collect(self, is_hung: bool) -> RunResult:
        """The record of the cell once its process ended: its own, else one that says how it ended."""
        result, unreadable = None, ""
        for half in self.record.parent.glob(f"{self.id}.*.tmp"):  # of a write that a kill ended
            half.unlink(missing_ok=True)
        try:
            result = read_result(self.record) if self.record.exists() else None
        except ValueError as error:
            unreadable = f": {error}"
        # A finished record may be older than this process: one whose launcher was killed wrote it at the end.
        if result is not None and (result.status in FINISHED or _stamp(self.record) != self.before):
            if result.status == "ok":
                clean(self.job)
            return result
        log = tail(self.work / "log.txt", self.log_start, LOG_BYTES)
        status, reason = ending(self.process.returncode, log, is_oom=oom_kills() > self.num_ooms)
        if is_hung:
            steps = f"{self.step} of {self.job.config.trainer.steps}"
            status, reason = "failed", f"hung: no progress for {self.job.launch.stall_s:g} s after step {steps}; killed"
        if status == "cancelled":
            return record(self.job.config, self.job.launch, None, {}, status, reason, log or None)
        return failed(self.job, reason + unreadable, log or None)


def start_cell(cell: Path, log: int, threads: int, gpus: Sequence[str], module: str) -> subprocess.Popen[bytes]:
    """Start an interpreter that runs `module` on the cell's file and prints to the open file `log`."""
    return subprocess.Popen(
        module_command(module, str(cell)),
        env=os.environ
        | ENVIRONMENT
        | {"OMP_NUM_THREADS": str(threads)}
        | code_path()
        | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,  # Ctrl-C reaches the sweep alone, which then asks its cells
    )


def run_cells(
    jobs: Sequence[Job], workers: int, admit: Admit = always, module: str = "harness.run.cell"
) -> Generator[Event, None, None]:
    """Run every job that `admit` lets start, at most `workers` at a time, in order; CUDA cells on the GPUs with the
    fewest of them, where the shares of their memory that vLLM engines take leave room.

    `module` runs a cell in a process of its own. Every such job ends in one `finished` event with its record, also
    where that could not be written. Closing the iterator stops the running cells cleanly.
    """
    bases, waiting, running = bases_of(jobs), list(jobs), list[Running]()
    gpus = visible_gpus() if any(map(is_placed, jobs)) else []
    try:
        while True:
            while len(running) < workers:
                if (job := next_job(waiting, admit, bases, [cell.trains for cell in running])) is None:
                    break
                taken = [(cell.gpus, vllm_share(cell.job.config)) for cell in running]
                on_gpu = bool(gpus) and is_placed(job)
                own = gpus_for(job.launch.gpus, vllm_share(job.config), taken, gpus) if on_gpu else []
                if on_gpu and not own:
                    break
                waiting.remove(job)
                try:
                    refuse_foreign(job)
                    cell = Running(job, bases[run_id(job.config)], own, module)
                except (OSError, ValueError) as error:
                    yield Event(kind="finished", config=job.config, result=failed(job, f"not started: {error}"))
                    continue
                running.append(cell)
                yield Event(kind="started", config=job.config, pid=cell.process.pid)
            if not running:
                return
            time.sleep(POLL_S)
            for cell in list(running):
                is_hung = cell.process.poll() is None and cell.is_hung()
                if cell.process.returncode is None and not is_hung:
                    yield Event(kind="progress", config=cell.job.config, step=cell.step, note=cell.note)
                    continue
                if is_hung:
                    cell.kill()
                running.remove(cell)
                result = cell.collect(is_hung)
                for other in running if (result.reason or "").startswith(OUT_OF_MEMORY) else ():
                    other.num_ooms += 1  # one count of the kernel explains one death
                yield Event(kind="finished", config=cell.job.config, result=result)
    finally:
        _stop([cell.process for cell in running])


def is_placed(job: Job) -> bool:
    """Does the cell compute on GPUs of this machine that a launcher chooses? A cluster chooses its own."""
    return job.config.trainer.device == "cuda" and job.launch.ray_address is None


def gpus_for(count: int, share: float, taken: Sequence[tuple[Sequence[str], float]], gpus: Sequence[str]) -> list[str]:
    """The `count` GPUs for a cell that reserves `share` of the memory of each: those with the fewest cells of those
    that have room; none where too few have. An empty GPU always has. `taken`: (GPUs, share) of the running cells."""

    def shares(gpu: str) -> list[float]:
        return [other for own, other in taken if gpu in own]

    free = [gpu for gpu in gpus if not shares(gpu) or sum([*shares(gpu), share]) <= 1.0]
    found = sorted(free, key=lambda gpu: len(shares(gpu)))[:count]
    return sorted(found, key=gpus.index) if len(found) == count else []


def vllm_share(config: RunConfig) -> float:
    """The share of a GPU's memory that a cell's vLLM engine reserves."""
    return config.engine.gpu_memory if config.engine.name == "vllm" else 0.0


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


def _stamp(path: Path) -> Stamp:
    """Stamp of a file that changes when the file is replaced or grows."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


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
