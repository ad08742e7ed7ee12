"""Runs a throughput sweep: one engine process per GPU at a time, the next one importing meanwhile.

    todo -> [GPU 0] measuring: worker(spec) | spare: worker (imports, waits for a spec)
            [GPU 1] ...

Each lane has cores of its own, and in it the spare has others than the process that measures.
A worker writes what it measures at once; killing it, or this process, loses the cell being measured and no more.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from harness.foundation.own_process import code_path, module_command
from harness.foundation.process_log import last_words, tail
from harness.foundation.visible_gpus import visible_gpus
from harness.records.paths import throughput_folder
from harness.studies.throughput import cores
from harness.studies.throughput.engine_arguments import environment, refusal
from harness.studies.throughput.plan import EngineSpec, Sweep, missing
from harness.studies.throughput.records import new_record, read_record, write_record

POLL_S = 0.1
GRACE_S = 2.0
"""After its deadline, in which a worker may end by itself."""
MOST_STARTS = 3
"""Engine processes that a spec gets in one call, as long as each measures something."""
Tell = Callable[[str], None]


class Child:
    """The live process of one engine."""

    def __init__(self, sweep: Sweep, gpu: str | None, folder: Path, number: int, share: cores.Share | None) -> None:
        self.share = share
        self.log = folder / "logs" / f"engine-{gpu or 'cpu'}-{number}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        env = os.environ | environment(sweep) | code_path() | {"PYTHONUNBUFFERED": "1"}
        if gpu is not None:
            env["CUDA_VISIBLE_DEVICES"] = gpu
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                module_command("harness.studies.throughput.worker"),
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True,
            )  # fmt: skip
        if share is not None:
            cores.pin(self.process.pid, share[1])
        self.spec: EngineSpec | None = None
        self.before: list[str] = []
        self.started_s = self.deadline_s = 0.0

    def give(self, sweep: Sweep, spec: EngineSpec, path: Path, deadline_s: float) -> None:
        """Hand over the engine's spec, which it waits for, and the cores of the process that measures."""
        if self.share is not None:
            cores.pin(self.process.pid, self.share[0])
        limit = sweep.engine_s if spec.check is None else spec.check.seconds
        self.spec, self.before, self.started_s = spec, missing(sweep, spec, read_record(path)), time.monotonic()
        self.deadline_s = min(deadline_s, self.started_s + limit)
        self.log = self.log.rename(self.log.with_name(f"{spec.stem}.log"))
        words = {
            "sweep": dataclasses.asdict(sweep), "size": spec.size, "precision": spec.precision, "path": str(path),
            "check": None if spec.check is None else sweep.checks.index(spec.check), "deadline": self.deadline_s,
        }  # fmt: skip
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has died: `collect` says how
            self.process.stdin.write(json.dumps(words).encode() + b"\n")
            self.process.stdin.close()

    def kill(self) -> None:
        """End it and what it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def last_words(self) -> str:
        """Cause of its end, from its log."""
        return last_words(tail(self.log), "no output")


class Lane:
    """One GPU (or the CPU): the process that measures, and the one that will be next."""

    def __init__(self, sweep: Sweep, gpu: str | None, folder: Path, share: cores.Share | None) -> None:
        self.sweep, self.gpu, self.folder, self.share = sweep, gpu, folder, share
        self.running: Child | None = None
        self.spare: Child | None = None
        self.number = 0

    def spawn(self) -> Child:
        """A process that imports and waits."""
        self.number += 1
        return Child(self.sweep, self.gpu, self.folder, self.number, self.share)

    def start(self, spec: EngineSpec, deadline_s: float, *, has_next: bool) -> None:
        """Hand a spec to the process that waits, and start the next one where there will be use for it."""
        self.running, self.spare = self.spare or self.spawn(), None
        self.running.give(self.sweep, spec, self.folder / f"{spec.stem}.json", deadline_s)
        if has_next and self.gpu is not None:  # on a CPU its imports would disturb the measurement
            self.spare = self.spawn()

    def close(self) -> None:
        """End both processes."""
        for child in (self.running, self.spare):
            if child is not None:
                child.kill()
        self.running = self.spare = None


def first_gpus(wanted: int) -> list[str]:
    """The first `wanted` GPUs that this process may use. Raises ValueError where there are fewer."""
    found = visible_gpus()
    if len(found) < wanted:
        raise ValueError(f"--gpus {wanted}: {len(found)} CUDA device{'s are' if len(found) != 1 else ' is'} visible")
    return found[:wanted]


def refuse(sweep: Sweep, queue: Sequence[EngineSpec], results: Path, tell: Tell) -> list[EngineSpec]:
    """The engines that the installed build can do; of the others a record that says why not."""
    possible: list[EngineSpec] = []
    for spec in queue:
        reason = refusal(sweep, spec.size, spec.precision)
        if reason is None:
            possible.append(spec)
            continue
        path = throughput_folder(results, sweep.name) / f"{spec.stem}.json"
        write_record(path, (read_record(path) or new_record(sweep, spec)) | {"skipped": reason})
        tell(f"{spec.stem:<22}skipped: {reason}")
    return possible


def drive(
    sweep: Sweep, queue: Sequence[EngineSpec], results: Path, gpus: Sequence[str | None], deadline_s: float, tell: Tell
) -> list[EngineSpec]:
    """Measure engines in order; returns those left when time (`time.monotonic`) ends. Ctrl-C ends all processes."""
    folder, waiting = throughput_folder(results, sweep.name), list(queue)
    # On a CPU nothing imports beside a measurement, which needs every core.
    split = cores.shares(cores.visible(), len(gpus)) if sweep.device == "cuda" else None
    lanes = [Lane(sweep, gpu, folder, split[at] if split else None) for at, gpu in enumerate(gpus)]
    starts: dict[str, int] = {}
    try:
        while waiting or any(lane.running for lane in lanes):
            for lane in lanes:
                if lane.running is not None:
                    waiting += _collect(lane, tell, starts, deadline_s)
                if lane.running is None and (spec := _next(sweep, waiting, deadline_s)) is not None:
                    starts[spec.stem] = starts.get(spec.stem, 0) + 1
                    lane.start(spec, deadline_s, has_next=_next(sweep, list(waiting), deadline_s) is not None)
            if not any(lane.running for lane in lanes):
                break  # too little time for any engine that is left
            time.sleep(POLL_S)
    finally:
        for lane in lanes:
            lane.close()
    return waiting


def _next(sweep: Sweep, waiting: list[EngineSpec], deadline_s: float) -> EngineSpec | None:
    """Take the first engine that the time left is enough to start."""
    left = deadline_s - time.monotonic()
    for at, spec in enumerate(waiting):
        if left >= (sweep.start_s if spec.check is None else spec.check.seconds):
            return waiting.pop(at)
    return None


def _collect(lane: Lane, tell: Tell, starts: Mapping[str, int], deadline_s: float) -> list[EngineSpec]:
    """See to the running process; its spec is returned where it ended with something measured and something missing."""
    child, sweep = lane.running, lane.sweep
    assert child is not None
    spec = child.spec
    assert spec is not None
    is_running = child.process.poll() is None
    is_late = is_running and time.monotonic() > child.deadline_s + GRACE_S
    if is_late:
        child.kill()
    elif is_running:
        return []
    lane.running = None
    path = lane.folder / f"{spec.stem}.json"
    record = read_record(path)
    left = missing(sweep, spec, record)
    code = child.process.returncode
    seconds = time.monotonic() - child.started_s
    is_hung = is_late and child.deadline_s < deadline_s
    if (is_hung or (code != 0 and not is_late)) and left == child.before and "failed" not in record:
        how = f"nothing measured in {seconds:.0f} s" if is_hung else f"exit code {code}"
        record = (record or new_record(sweep, spec)) | {"failed": f"{how}: {child.last_words()}"}
        write_record(path, record)
    words = record.get("failed") or record.get("skipped") or f"{len(child.before) - len(left)} measured"
    rest = f", {len(left)} missing" if left and "failed" not in record else ""
    tell(f"{spec.stem:<22}{seconds:6.1f} s  {words}{rest}")
    has_more = bool(left) and left != child.before and starts[spec.stem] < MOST_STARTS
    return [spec] if has_more and "failed" not in record else []
