"""One GPU for a trainer and an engine: the engine sleeps while the trainer updates (docs/rules/engines.md 4.5).

    wake -> push weights -> generate -> sleep -> score, update

Left out: what an engine gives back, which is its own business, and engines of other processes.
"""

from __future__ import annotations

import torch

from harness.engines.embedded.engine import EmbeddedEngine
from harness.foundation.clock import GIB
from harness.run.run import Run


def lend(run: Run) -> None:
    """Lend the engine's memory to the trainer until `reclaim`, where the run asks for it."""
    if not run.config.engine.sleep:
        return
    device = run.config.trainer.device
    before, cached = free_gib(device), reserved_gib(device)
    for engine in run.engines:
        engine.sleep()
    freed = free_gib(device) - before
    run.lent_gib += freed - (cached - reserved_gib(device))  # without what the trainer's allocator let go
    run.keep_peaks({"given_back": freed} if before else {})


def reclaim(run: Run) -> None:
    """Give the memory back to the engine, before a push. What the trainer's allocator keeps without using it is freed
    first."""
    if not run.config.engine.sleep:
        return
    release(run.config.trainer.device)
    for engine in run.engines:
        engine.wake()
    run.lent_gib = 0.0


def release(device: str) -> None:
    """Free what the trainer's allocator keeps without using it: another engine, or another process, may need it."""
    if device == "cuda":
        torch.cuda.empty_cache()


def rest(run: Run) -> None:
    """Let the engine of evaluations sleep until the next one; where a run shares a GPU, without its weights too, which
    are float32 and as large as the trainer's."""
    if run.config.engine.sleep and isinstance(run.reference, EmbeddedEngine):
        run.reference.discard()
    else:
        run.reference.sleep()


def reserved_gib(device: str) -> float:
    """GPU memory that this process' allocator holds; 0 on a CPU."""
    return torch.cuda.memory_reserved() / GIB if device == "cuda" else 0.0


def free_gib(device: str) -> float:
    """Free memory of the GPU; 0 on a CPU."""
    return torch.cuda.mem_get_info()[0] / GIB if device == "cuda" else 0.0


def used_gib(device: str) -> float:
    """GPU memory in use by all processes, this one's included; 0 on a CPU."""
    if device != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB
