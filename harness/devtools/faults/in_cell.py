"""Faults inside a cell's process: memory, numbers, disk, hangs, and states damaged while it was down."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from harness.config.schema import Launch, RunConfig
from harness.devtools.faults.damage import BALLAST, damage
from harness.devtools.faults.injector import Injector
from harness.devtools.faults.journal import VOLUME, was_injected
from harness.foundation.state_files import save_state
from harness.foundation.whole_file import write_atomic
from harness.records import run_result
from harness.records.run_result import Row, RunResult
from harness.run.cell import Stages
from harness.run.run import Run

HALF = 200
"""Bytes of a file that a kill in the middle of writing leaves."""
LATE_S = 45.0
"""Seconds that an orphan that finishes late waits for its successor."""


def stages(injector: Injector) -> Stages:
    """The stages of `harness.run.cell`, each with the faults that belong to it."""
    usual = Stages()

    def build(config: RunConfig, launch: Launch, should_stop: Callable[[], bool]) -> tuple[Run, dict[str, str | None]]:
        built = usual.build(config, launch, should_stop)
        inject(injector, "build")
        return built

    def train(run: Run, after_step: Callable[[Run], None]) -> None:
        def after(run: Run) -> None:
            spoil_weights(injector, run)
            injector.step = run.step
            injector.note("step")
            inject(injector, "step")
            after_step(run)
            inject(injector, "saved")
            spoil_numbers(injector, run)

        injector.step = run.step
        spoil_numbers(injector, run)
        usual.train(run, after)

    def save_state(path: Path, state: dict[str, Any]) -> None:
        if injector.due(("kill",), ("saving",)):
            path.with_suffix(".part").write_bytes(b"\x50\x4b" * (HALF // 2))
            os.kill(os.getpid(), signal.SIGKILL)
        with full_disk(injector, "state"):
            usual.save_state(path, state)

    def write_result(folder: Path, result: RunResult, series: Sequence[Row] | None) -> Path:
        with full_disk(injector, "record"):
            path = run_result.write_result(folder, result, series, write_file)
        injector.note("end", status=result.status)
        inject(injector, "recorded")
        return path

    def write_file(path: Path, data: bytes) -> None:
        if path.suffix == ".json":
            inject(injector, "series")
            finish_late(injector)
            if injector.due(("kill",), ("half",)):
                path.with_name(f"{path.name}.0123abcd.tmp").write_bytes(data[:HALF])
                os.kill(os.getpid(), signal.SIGKILL)
        write_atomic(path, data)

    return Stages(build=build, train=train, save_state=save_state, write_result=write_result)


def inject(injector: Injector, moment: str) -> None:
    """Bring about the kill, lack of memory or hang that is due at a moment of the cell's life."""
    injector.at(moment)
    if moment == "step" and (fault := injector.due(("memory",), ("MemoryError", "OutOfMemoryError", "allocator"))):
        if fault.form == "MemoryError":
            raise MemoryError
        if fault.form == "OutOfMemoryError":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (a fault on purpose)")
        torch.empty(1 << 58, dtype=torch.uint8)  # torch's own words, whatever they are in this version
    if moment == "step" and injector.due(("memory",), ("limit",)):
        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))
        torch.empty(1 << 28, dtype=torch.uint8)
    if moment in ("build", "step") and (fault := injector.due(("hang",), ("stop", "sleep"))):
        if fault.form == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        while True:
            time.sleep(1.0)


def finish_late(injector: Injector) -> None:
    """Kill the sweep as the record is about to be written, and write it only once the next sweep starts the cell."""
    if not injector.due(("kill_sweep",), ("late",)):
        return
    before, deadline = injector.cell.stat().st_mtime_ns, time.monotonic() + LATE_S
    os.kill(injector.parent, signal.SIGKILL)
    while injector.cell.stat().st_mtime_ns == before and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)  # the successor now waits for this process to end


def spoil_numbers(injector: Injector, run: Run) -> None:
    """Make numbers of the next step not finite where that is due: from then on always, as bad numbers come again."""
    fault = next((fault for fault in injector.faults if fault.kind == "nan"), None)
    if fault is None or not fault.step <= run.step < run.config.trainer.steps:
        return
    if not was_injected(injector.control, fault.id) and not injector.due(("nan",), (fault.form,)):
        return
    trainer: Any = run.trainer
    real_score, real_accumulate, real_update = trainer.score, trainer.accumulate, trainer.step
    if fault.form == "loss":
        trainer.accumulate = lambda seqs, loss_of, *rest, **named: real_accumulate(
            seqs, lambda rows, found: (loss_of(rows, found)[0] * torch.nan, {}), *rest, **named
        )
    if fault.form == "gradient":

        def update() -> dict[str, float]:
            next(p.grad for p in trainer.parameters if p.grad is not None).view(-1)[0] = torch.inf
            return real_update()

        trainer.step = update
    if fault.form == "logp":
        trainer.score = lambda *a, **k: (found := real_score(*a, **k)) and replace(found, logp=found.logp * torch.nan)


def spoil_weights(injector: Injector, run: Run) -> None:
    """Make a weight not finite after a step for which that was due."""
    for fault in injector.faults:
        if fault.kind == "nan" and fault.form in ("weight", "last") and was_injected(injector.control, fault.id):
            with torch.no_grad():
                run.trainer.parameters[0].view(-1)[:] = torch.nan


@contextmanager
def full_disk(injector: Injector, what: str) -> Iterator[None]:
    """A full disk while a file is written, where that is due: the kernel refuses every write, or the volume is full."""
    fault = injector.due(("disk",), (f"{what} limit", f"{what} volume"))
    if fault is None:
        yield
        return
    volume = os.environ.get(VOLUME)
    ballast = Path(volume or ".") / BALLAST
    is_volume = fault.form.endswith("volume") and volume is not None
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if is_volume:
            fill(ballast)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        if is_volume:
            ballast.unlink(missing_ok=True)


def fill(ballast: Path) -> None:
    """Write until the volume of this file is full."""
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"\0" * 65536):
            pass


def damage_state(injector: Injector) -> None:
    """Damage the saved state, as if while the cell was down."""
    path = injector.cell.with_name("state.pt")
    if not path.exists():
        return
    fault = injector.due(("state",), ("truncated", "flipped", "empty", "foreign"))
    if fault is None:
        return
    if fault.form == "foreign":
        save_state(path, {"run_id": "another", "step": 3})
    else:
        damage(path, fault.form)
