"""Cells as jobs of a Slurm cluster, one job per cell, by submitit.

    this process                              node
    queue, records of lost jobs --- sbatch --> NodeCell: the local launcher with one cell
                                <-- files ----   python -m harness.run.cell

The results folder is one that all nodes see: a cell writes its state and record there, and this process reads them. So
jobs outlive it: what they finish counts when the same command runs again. A job whose time is up, or that is
preempted, saves its state and goes back into the queue. Left out: cells over several nodes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil

from harness.config.load import run_id
from harness.foundation.did_you_mean import nearest
from harness.foundation.own_process import code_path
from harness.records.cell_progress import told
from harness.records.paths import work_folder
from harness.records.run_result import RunResult
from harness.run.cell import work_folder as cell_folder
from harness.sweep.launchers.bases import untrained
from harness.sweep.launchers.deaths import REQUESTED
from harness.sweep.launchers.job import Admit, Event, Job, always
from harness.sweep.launchers.local import POLL_S, failed, refuse_foreign
from harness.sweep.launchers.local import run_cells as run_here
from harness.sweep.launchers.remote import run_remote

OPTIONS = {
    "cluster": "slurm, or local: jobs of this machine, to try it without Slurm (default: slurm)",
    "time": "minutes of a job before it goes back into the queue (default: 240)",
    "partition": "as sbatch takes it",
    "account": "as sbatch takes it",
    "qos": "as sbatch takes it",
    "constraint": "as sbatch takes it",
    "exclude": "as sbatch takes it",
    "memory": "GiB of a job",
}
"""Settings of `--slurm NAME=VALUE`. Processors and GPUs of a job are `launch.threads` and `launch.gpus`."""
CLUSTERS = ("slurm", "local")
MINUTES = 240
SIGNAL_S = 120
"""Seconds before the end of a job's time in which its cell saves its state."""
REQUEUES = 100
"""Times that a job may run out of time and go on."""


class NodeCell:
    """One cell on a node. submitit pickles it, calls it there, and pickles it again for a job that goes on later."""

    def __init__(self, job: Job) -> None:
        self.job, self.pid = job, 0

    def __call__(self) -> RunResult | None:
        """Run the cell to its end: its record; None where it was asked to stop before."""
        folder = job_folder(self.job)
        with closing(run_here([self.job], 1)) as events:
            for event in events:
                if event.pid:
                    self.pid = event.pid
                    said = {"pid": event.pid, "node": socket.gethostname()}
                    (folder / "started.json").write_text(json.dumps(said), encoding="utf-8")
                if event.result is not None:
                    return event.result
                if (folder / "stop").exists():
                    break
        return None

    def checkpoint(self) -> Any:
        """submitit, when the job's time is up or another takes its place: the cell saves its state and ends."""
        from submitit.helpers import DelayedSubmission

        if self.pid:
            with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
                process = psutil.Process(self.pid)
                process.terminate()
                process.wait(SIGNAL_S - 20)
        return DelayedSubmission(NodeCell(self.job))


class SlurmJob:
    """A cell's job, and what was last seen of it."""

    def __init__(self, job: Job, base: Path | None, options: Mapping[str, str]) -> None:
        """Submit it. Raises ValueError or OSError where that cannot be done."""
        from submitit import AutoExecutor
        from submitit.core.utils import FailedJobError

        refuse_foreign(job)
        self.job, self.trains = job, untrained(base)
        self.folder, self.is_running = job_folder(job), False
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        executor = AutoExecutor(self.folder / "%j", options.get("cluster", "slurm"), slurm_max_num_timeout=REQUEUES)
        executor.update_parameters(**parameters(job, options))
        try:
            self.submitted: Any = executor.submit(NodeCell(job))
        except FailedJobError as error:  # sbatch said no
            raise ValueError(f"sbatch: {' '.join(str(error).split())}") from error

    def news(self) -> Generator[Event, None, None]:
        """Events since the last time, read from the cell's files."""
        with suppress(OSError, ValueError, KeyError):  # not there yet, or half written
            if not self.is_running:
                pid = int(json.loads((self.folder / "started.json").read_text(encoding="utf-8"))["pid"])
                self.is_running = True
                yield Event(kind="started", config=self.job.config, pid=pid)
            step, note = told(cell_folder(self.job.launch, run_id(self.job.config)))
            yield Event(kind="progress", config=self.job.config, step=step, note=note)

    def outcome(self) -> RunResult | None:
        """The record of the cell, once its job ended."""
        if not self.submitted.done():
            return None
        from submitit.core.utils import FailedJobError, UncompletedJobError

        try:
            result: RunResult | None = self.submitted.result()
        except (FailedJobError, UncompletedJobError) as error:
            return failed(self.job, reason(self.submitted.job_id, self.submitted.state, str(error)), str(error))
        if result is None:
            return failed(self.job, f"lost: Slurm job {self.submitted.job_id} {REQUESTED}")
        if result.status == "ok":
            shutil.rmtree(self.folder, ignore_errors=True)
        return result

    def ask_to_stop(self) -> None:
        """Tell the job to stop; one that waits in the queue leaves it."""
        with suppress(OSError):
            (self.folder / "stop").touch()
        if not (self.folder / "started.json").exists():
            self.submitted.cancel(check=False)

    def stop(self, deadline: float) -> None:
        """Wait for the end of the job, and cancel it at the deadline."""
        while self.is_running and not self.submitted.done() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if not self.submitted.done():
            self.submitted.cancel(check=False)


def run_cells(
    jobs: Sequence[Job], workers: int, options: Mapping[str, str], admit: Admit = always
) -> Generator[Event, None, None]:
    """Run every job that `admit` lets start as a Slurm job, at most `workers` submitted at a time, in order.

    Every such job ends in one `finished` event with its record. Closing the iterator stops the running cells and takes
    the waiting ones out of the queue. Raises ValueError, one line, where submitit or sbatch is missing.
    """
    check(options)
    os.environ.update(code_path())  # sbatch and submitit pass the environment on
    yield from run_remote(jobs, workers, admit, lambda job, base: SlurmJob(job, base, options))


def options_of(words: Sequence[str]) -> dict[str, str]:
    """The options that NAME=VALUE words give. Raises ValueError for an unknown name, one that comes twice, or
    a value that cannot be."""
    found: dict[str, str] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or not value:
            raise ValueError(f"slurm={word}: valid: NAME=VALUE, such as partition=gpu")
        if name not in OPTIONS:
            raise ValueError(f"slurm={word}: no option {name!r}; {nearest(name, OPTIONS)}")
        if name in found:
            raise ValueError(f"slurm={word}: {name}={found[name]} is given, too; valid: one of them")
        if name in ("time", "memory") and not (value.isascii() and value.isdecimal() and int(value) > 0):
            raise ValueError(
                f"slurm={word}: valid: a whole number above 0, in {'minutes' if name == 'time' else 'GiB'}"
            )
        if name == "cluster" and value not in CLUSTERS:
            raise ValueError(f"slurm={word}: valid: {', '.join(CLUSTERS)}")
        found[name] = value
    least = SIGNAL_S // 60 + 1
    if found.get("cluster") != "local" and int(found.get("time", MINUTES)) < least:
        raise ValueError(
            f"slurm=time={found['time']}: a cell saves its state {least - 1} minutes before its job's time is up and "
            f"would never get further; valid: {least} or more"
        )
    return found


def check(options: Mapping[str, str]) -> None:
    """Raises ValueError, one line, where jobs cannot be submitted from here."""
    if importlib.util.find_spec("submitit") is None:
        raise ValueError("launcher=slurm: submitit is not installed; pip install 'lowbit-rl-bench[slurm]'")
    missing = [name for name in ("sbatch", "srun", "sacct") if shutil.which(name) is None]
    if options.get("cluster", "slurm") == "slurm" and missing:
        raise ValueError(
            f"launcher=slurm: no {missing[0]} on this machine; run it on a login node of the cluster, or with "
            "--slurm cluster=local; valid here: local, ray"
        )


def parameters(job: Job, options: Mapping[str, str]) -> dict[str, Any]:
    """Parameters of a cell's job, as submitit takes them."""
    own = {f"slurm_{name}": options[name] for name in ("partition", "account", "qos", "constraint", "exclude")
           if name in options}  # fmt: skip
    return own | {
        "name": f"lowbit-{job.launch.sweep}-{run_id(job.config)}",
        "timeout_min": int(options.get("time", MINUTES)),
        "mem_gb": int(options["memory"]) if "memory" in options else None,
        "nodes": 1,
        "tasks_per_node": 1,
        "cpus_per_task": job.launch.threads,
        "gpus_per_node": job.launch.gpus if job.config.trainer.device == "cuda" else 0,
        "slurm_signal_delay_s": SIGNAL_S,
    }


def job_folder(job: Job) -> Path:
    """Folder of a job's own files: what submitit writes, and what this process and the node tell each other."""
    return work_folder(job.launch.results, "slurm") / run_id(job.config)


def reason(number: str, state: str, error: str) -> str:
    """Meaning of a job's end without a record, in one line."""
    if state.startswith("OUT_OF_ME"):
        return f"MemoryError: Slurm job {number} was killed for its memory; --slurm memory=GIB asks for more"
    last = next((line for line in reversed(error.splitlines()) if "Error" in line), "")
    if "Traceback" in error and "UncompletedJobError" not in last:
        return f"not started: Slurm job {number}: {last.strip()}"
    why = f"its time was up {REQUEUES} times" if "too many times" in error else f"it ended as {state}"
    return f"lost: Slurm job {number}: {why}"
