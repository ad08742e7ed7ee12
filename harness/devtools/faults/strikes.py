"""What faults do inside a cell's process: memory, numbers, disk, hangs, and states damaged while it was down."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from harness.config.schema import Launch, RunConfig
from harness.devtools.faults.journal import VOLUME, has_struck
from harness.foundation.state_files import save_state
from harness.records import run_result
from harness.records.run_result import Row, RunResult
from harness.run import cell, loop
from harness.run.run import Run

if TYPE_CHECKING:
    from harness.devtools.faults.cell import Striker

HALF = 200
"""Bytes of a file that a kill in the middle of writing leaves."""
LATE_S = 45.0
"""How long an orphan that finishes late waits for its successor."""
BALLAST = "ballast"
"""File that fills a volume."""


def arm(striker: Striker) -> None:
    """Put the striker at the moments of `harness.run.cell`."""
    real_build, real_train, real_save, real_write = cell.build, cell.train, cell.save_state, cell.write_result
    real_atomic, real_step = run_result.write_atomic, loop.grpo_step

    def build(config: RunConfig, launch: Launch) -> tuple[Run, dict[str, str | None]]:
        built = real_build(config, launch)
        strike(striker, "build")
        return built

    def train(run: Run, after_step: Callable[[Run], None]) -> None:
        def struck(run: Run) -> None:
            striker.step = run.step
            striker.note("step")
            strike(striker, "step")
            after_step(run)
            strike(striker, "saved")

        striker.step = run.step
        real_train(run, struck)

    def save(path: Path, state: dict[str, Any]) -> None:
        if striker.due(("kill",), ("saving",)):
            path.with_suffix(".part").write_bytes(b"\x50\x4b" * HALF)
            os.kill(os.getpid(), signal.SIGKILL)
        with full_disk(striker, "state", path.parent):
            real_save(path, state)

    def write(folder: Path, result: RunResult, series: Sequence[Row] | None) -> Path:
        with full_disk(striker, "record", folder):
            path = real_write(folder, result, series)
        striker.note("end", status=result.status)
        strike(striker, "recorded")
        return path

    def atomic(path: Path, data: bytes) -> None:
        if path.suffix == ".json" and path.stem == striker.id:
            strike(striker, "series")
            finish_late(striker)
            if striker.due(("kill",), ("half",)):
                path.with_name(path.name + ".tmp").write_bytes(data[:HALF])
                os.kill(os.getpid(), signal.SIGKILL)
        real_atomic(path, data)

    cell.build, cell.train, cell.save_state, cell.write_result = build, train, save, write
    run_result.write_atomic = atomic
    loop.grpo_step = lambda run: poisoned(striker, run, real_step)


def strike(striker: Striker, moment: str) -> None:
    """Every fault that may be due at a moment without a file in the making."""
    striker.at(moment)
    if moment == "step" and (fault := striker.due(("memory",), ("MemoryError", "OutOfMemoryError", "allocator"))):
        if fault.form == "MemoryError":
            raise MemoryError
        if fault.form == "OutOfMemoryError":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (a fault on purpose)")
        torch.empty(1 << 58, dtype=torch.uint8)  # torch's own words, whatever they are in this version
    if moment == "step" and striker.due(("memory",), ("limit",)):
        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))
        torch.empty(1 << 28, dtype=torch.uint8)
    if moment in ("build", "step") and (fault := striker.due(("hang",), ("stop", "sleep"))):
        if fault.form == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        while True:
            time.sleep(1.0)


def finish_late(striker: Striker) -> None:
    """Kill the sweep as the record is about to be written, and write it only once the next sweep starts the cell."""
    if not striker.due(("kill_sweep",), ("late",)):
        return
    before, deadline = striker.cell.stat().st_mtime_ns, time.monotonic() + LATE_S
    os.kill(striker.parent, signal.SIGKILL)
    while striker.cell.stat().st_mtime_ns == before and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)  # the successor now waits for this process to end


def poisoned(striker: Striker, run: Run, step: Callable[[Run], dict[str, Any]]) -> dict[str, Any]:
    """A step whose numbers are not finite where that is ordered: from then on always, as bad numbers come again."""
    order = next((fault for fault in striker.orders if fault.kind == "nan"), None)
    striker.step = run.step
    if order is None or run.step < order.step:
        return step(run)
    if not has_struck(striker.control, order.id) and not striker.due(("nan",), (order.form,)):
        return step(run)
    trainer: Any = run.trainer
    real_score, real_accumulate, real_update = trainer.score, trainer.accumulate, trainer.step
    if order.form == "loss":
        trainer.accumulate = lambda seqs, loss_of, *rest, **named: real_accumulate(
            seqs, lambda rows, found: (loss_of(rows, found)[0] * torch.nan, {}), *rest, **named
        )
    if order.form == "gradient":

        def update() -> dict[str, float]:
            next(p.grad for p in trainer.parameters if p.grad is not None).view(-1)[0] = torch.inf
            return real_update()

        trainer.step = update
    if order.form == "logp":
        trainer.score = lambda *a, **k: (found := real_score(*a, **k)) and replace(found, logp=found.logp * torch.nan)
    row = step(run)
    if order.form in ("weight", "last"):
        with torch.no_grad():
            trainer.parameters[0].view(-1)[:] = torch.nan
    return row


@contextmanager
def full_disk(striker: Striker, what: str, folder: Path) -> Iterator[None]:
    """No room while a file is written, where that is ordered: the kernel refuses every write, or the volume is full."""
    fault = striker.due(("disk",), (f"{what} limit", f"{what} volume"))
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


def damage_state(striker: Striker) -> None:
    """Damage the saved state, as if while the cell was down."""
    path = striker.cell.with_name("state.pt")
    if not path.exists():
        return
    fault = striker.due(("state",), ("truncated", "flipped", "empty", "foreign"))
    if fault is None:
        return
    if fault.form == "foreign":
        save_state(path, {"run_id": "another", "step": 3})
    else:
        damage(path, fault.form)


def damage(path: Path, form: str) -> None:
    """Cut a file, flip a bit in its middle, or empty it."""
    data = bytearray(path.read_bytes())
    if form == "flipped":
        data[len(data) // 2] ^= 4
    path.write_bytes({"truncated": bytes(data[: len(data) * 2 // 3]), "flipped": bytes(data)}.get(form, b""))
