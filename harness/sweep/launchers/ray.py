"""Cells on a Ray cluster: an existing one (`address`), else one of this machine that starts and ends with the sweep.

    driver (this module)                         node
    queue, records, states   --- job, bases -->  actor (harness.sweep.launchers.ray_cell)
                       <-- step, state, base --    local launcher, scratch folder
                             <-- record ------       python -m harness.run.cell

The driver alone writes results, so a cluster needs no shared folder; models and task data that a config names by path
have to be on every node. Ray restarts nothing: a lost worker or node is a `lost: ...` record, and the sweep runs such
cells again. Left out: autoscaling, cells over several nodes, and trainer=verl, whose checkpoints would stay on their
node.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from harness.foundation.own_process import code_path
from harness.foundation.provenance import ROOT
from harness.foundation.visible_gpus import visible_gpus
from harness.records.run_result import RunResult
from harness.sweep.launchers.bases import untrained
from harness.sweep.launchers.job import Admit, Event, Job, always
from harness.sweep.launchers.local import failed, refuse_foreign
from harness.sweep.launchers.ray_cell import RayCell
from harness.sweep.launchers.ray_files import files_for, keep, write_base, write_state
from harness.sweep.launchers.remote import run_remote

if TYPE_CHECKING:
    from ray.exceptions import RayError

STATE_EVERY_S = 300.0
"""Seconds between two copies of a cell's state to this machine, for the case that its node is lost."""
SILENCE_S = 60.0
"""Seconds that a worker may be silent beyond the limit of its cell (`Launch.stall_s`)."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else a warning for every cell without a GPU
}
ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Environment of a cluster of this machine alone: Ray then listens on the loopback address only."""
OBJECT_STORE_BYTES = 256 * 2**20
GONE_S = 60.0
"""Seconds to wait for the processes of a cluster of this machine before the folder that they write into is deleted."""


class RayJob:
    """A cell on the cluster, and what was last heard of it."""

    def __init__(self, job: Job, base: Path | None, scratch: str | None, num_gpus: float) -> None:
        """Start it. Raises ValueError or OSError where its files cannot be read."""
        import ray

        refuse_foreign(job)
        files = files_for(job, base)
        self.job, self.pid, self.step = job, 0, 0
        self.trains = untrained(base)
        options: dict[str, Any] = {"num_cpus": job.launch.threads, "num_gpus": num_gpus, "max_concurrency": 2}
        self.actor: Any = ray.remote(max_restarts=0, max_task_retries=0)(RayCell).options(**options).remote()
        self.end = self.actor.run.remote(job, files, scratch, None if scratch is None else str(Path.cwd()))
        self.look = self.actor.look.remote(False, False)
        self.heard_s: float | None = None
        self.state_s = time.monotonic()

    def news(self) -> Iterator[Event]:
        """Events that the worker reported since the last time."""
        import ray
        from ray.exceptions import RayError

        if not ray.wait([self.look], timeout=0)[0]:
            return
        with suppress(RayError):  # `outcome` tells what it means
            pid, self.step, note, state, base = ray.get(self.look)
            now = time.monotonic()
            self.heard_s = now
            if state is not None:
                write_state(self.job, state)
            write_base(self.job, base)
            wants_state = now - self.state_s >= STATE_EVERY_S
            self.state_s = now if wants_state else self.state_s
            self.look = self.actor.look.remote(wants_state, untrained(self.trains) is not None)
            if pid and not self.pid:
                self.pid = pid
                yield Event(kind="started", config=self.job.config, pid=pid)
            elif self.pid:
                yield Event(kind="progress", config=self.job.config, step=self.step, note=note)

    def outcome(self) -> RunResult | None:
        """The record of the cell, once there is one."""
        import ray
        from ray.exceptions import RayError

        if not ray.wait([self.end], timeout=0)[0]:
            patience_s = self.job.launch.stall_s + SILENCE_S
            if self.heard_s is None or time.monotonic() - self.heard_s < patience_s:
                return None
            self.kill()
            return failed(self.job, f"hung: its Ray worker did not answer for {patience_s:g} s; killed")
        try:
            return keep(self.job, ray.get(self.end))
        except RayError as error:
            return failed(self.job, _reason(error), str(error))
        finally:
            self.kill()

    def ask_to_stop(self) -> None:
        """Ask the cell to save its state and end, and do not wait for it."""
        self.actor.stop.remote()

    def stop(self, deadline: float) -> None:
        """End the cell, its state brought home where that is possible in time."""
        import ray
        from ray.exceptions import RayError

        if self.heard_s is not None:
            with suppress(RayError):
                keep(self.job, ray.get(self.end, timeout=max(0.1, deadline - time.monotonic())))
        self.kill()

    def kill(self) -> None:
        """Kill the cell's actor, which frees its place."""
        import ray

        ray.kill(self.actor, no_restart=True)


def run_cells(
    jobs: Sequence[Job], workers: int, address: str | None = None, admit: Admit = always
) -> Generator[Event, None, None]:
    """Run every job that `admit` lets start as an actor of a Ray cluster, `workers` at a time, in order. A cell has its
    `launch.gpus` GPUs; of those with one, `workers` share the GPUs that there are.

    Every such job ends in one `finished` event with its record. Closing the iterator stops the running cells and brings
    their states home. A Ray that this process has started before is used and left running. Raises ValueError, one
    line, where Ray is not installed, the cluster does not answer, or no node of it can hold a cell.
    """
    with _cluster(jobs, workers, address) as scratch:
        share = _gpu_share(jobs, workers)

        def start(job: Job, base: Path | None) -> RayJob:
            return RayJob(job, base, scratch, gpus_asked(job, share))

        yield from run_remote(jobs, workers, admit, start)


@contextmanager
def _cluster(jobs: Sequence[Job], workers: int, address: str | None) -> Iterator[str | None]:
    """Context with a Ray cluster that answers; yields the folder for scratch files where the cluster is ours, which
    goes with it.

    Ray starts in a folder of no modules: it puts the working directory first on the module path of its workers.
    """
    if importlib.util.find_spec("ray") is None:
        raise ValueError("launcher=ray: Ray is not installed; pip install 'lowbit-rl-bench[ray]'")
    for name, value in (QUIET if address is not None else QUIET | ALONE).items():
        os.environ.setdefault(name, value)
    os.environ.update(code_path())
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if ray.is_initialized():
        yield None
    elif address is not None:
        code = {"py_modules": [str(ROOT / "harness"), str(ROOT / "methods")]}
        try:
            _knock(address)
            with tempfile.TemporaryDirectory(prefix="lowbit-") as empty, chdir(empty):
                ray.init(address=address, runtime_env=code, **quiet)
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            if "AuthenticationError" in f"{error.__cause__}":
                reason += "; it asks for a token: set RAY_AUTH_MODE=token"
            raise ValueError(f"address={address}: no Ray cluster answers there: {reason}") from error
        try:
            yield None
        finally:
            ray.shutdown()
    else:
        # Paths of sockets are short: a temporary folder of the user's choice may be too deep.
        with tempfile.TemporaryDirectory(prefix="lowbit-", dir="/tmp", ignore_cleanup_errors=True) as folder:
            others = set(psutil.Process().children(recursive=True))
            with chdir(folder):
                ray.init(
                    num_cpus=workers * max((job.launch.threads for job in jobs), default=1),
                    num_gpus=len(visible_gpus()), include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES,
                    _temp_dir=folder,
                    # The monitor would kill the worker, not the cell. Cells are as urgent as what else runs here.
                    _system_config={"memory_monitor_refresh_ms": 0, "worker_niceness": 0},
                    **quiet,
                )  # fmt: skip
            try:
                yield folder
            finally:
                family = set(psutil.Process().children(recursive=True)) - others
                ray.shutdown()
                psutil.wait_procs(family, timeout=GONE_S)


def _knock(address: str) -> None:
    """Raises OSError or ValueError where nobody listens at host:port, which Ray takes minutes to find out."""
    host, _, port = address.rpartition(":")
    if host and "//" not in host:
        socket.create_connection((host, int(port)), timeout=5.0).close()


def gpus_asked(job: Job, share: float) -> float:
    """GPUs of a cell: `launch.gpus` whole ones of one node where it wants several, else a share of one."""
    if job.config.trainer.device != "cuda":
        return 0.0
    return share if job.launch.gpus == 1 else float(job.launch.gpus)


def _gpu_share(jobs: Sequence[Job], workers: int) -> float:
    """Share of a GPU that a CUDA cell with one GPU takes, so that `workers` of them fit. Raises ValueError where no
    node fits a cell."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    threads, cpus = max((job.launch.threads for job in jobs), default=1), max(n.get("CPU", 0) for n in nodes)
    if threads > cpus:
        raise ValueError(f"threads={threads}: the largest node of the Ray cluster has {cpus:g} CPUs")
    num_gpus = int(sum(node.get("GPU", 0) for node in nodes))
    if num_gpus == 0 and any(job.config.trainer.device == "cuda" for job in jobs):
        raise ValueError("trainer.device=cuda: the Ray cluster has no GPU; valid: trainer.device=cpu")
    wanted = max((job.launch.gpus for job in jobs if job.config.trainer.device == "cuda"), default=0)
    largest = int(max(node.get("GPU", 0) for node in nodes))
    if wanted > largest:
        raise ValueError(f"launch.gpus={wanted}: the largest node of the Ray cluster has {largest} GPUs")
    per_gpu = -(-workers // max(num_gpus, 1))
    return 10_000 // per_gpu / 10_000  # what Ray resolves


def _reason(error: RayError) -> str:
    """Meaning of Ray's error for a cell, in one line."""
    from ray.exceptions import ActorUnschedulableError, OutOfMemoryError, RayTaskError, RuntimeEnvSetupError

    words = " ".join(str(error).split()).partition(" Some common causes")[0]
    words = words.partition("The actor is dead because ")[2] or words
    if isinstance(error, RayTaskError):
        return f"not started: {type(error.cause).__name__}: {error.cause}"
    if isinstance(error, (ActorUnschedulableError, RuntimeEnvSetupError)):
        return f"not started: {words}"
    if isinstance(error, OutOfMemoryError):
        return f"MemoryError: {words}"
    return f"lost: the Ray worker died: {words}"
