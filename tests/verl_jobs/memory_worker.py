"""Memory of ranks while verl's worker builds a policy and writes the final one, and two updates between:
`... STORE RANK RANKS FOLDER ...`.

As `worker.py`; a folder's `memory<RANK>.pt` gets peaks of bytes in CPU storages, the whole weights after the build and
after the updates, their losses, and the order of what was moved.
"""

from __future__ import annotations

import os
import sys
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.models.adapters import checkpoint_name
from harness.models.shards import write_shards
from tests.verl_jobs.worker import held, make_worker, meet, metrics_of, tensordict

LARGEST = 4 * 128 * 64
"""Bytes of the deep model's largest tensor, the embedding."""
FILE = 6 * LARGEST
"""Bytes of a file of the final model here."""


class Counted(TorchDispatchMode):
    """Bytes of the CPU storages that operations made while the mode was on and that are still there; their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak, self.known = 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu":
                self._count(tensor.untyped_storage())
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def watched(worker: Any, events: list[str]) -> None:
    """Note the order in which weights and moments move, passes run and steps are taken; while they rest on the host,
    moments are out of reach."""
    from harness.trainers.verl import engine as ours

    engine, kept = worker.engine, dict[tuple[int, str], torch.Tensor]()
    moved, run, step = engine.to, engine.forward_step, engine.optimizer.step

    def to(device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        events.append(f"{device} {'params' * model}{' moments' * optimizer}")
        moved(device, model=model, optimizer=optimizer, grad=grad)

    def of(optimizer: Any) -> list[tuple[dict[str, Any], int, str]]:
        return [(state, number, name) for number, state in enumerate(optimizer.state.values())
                for name, value in state.items() if isinstance(value, torch.Tensor)]  # fmt: skip

    def away(optimizer: Any) -> None:
        events.append("moments away")
        for state, number, name in of(optimizer):
            kept[number, name], state[name] = state[name], torch.full_like(state[name], torch.nan)

    def back(optimizer: Any, device: Any) -> None:
        events.append("moments back")
        for state, number, name in of(optimizer):
            state[name] = kept.pop((number, name))

    ours.offload_fsdp_optimizer, ours.load_fsdp_optimizer = away, back
    engine.to = to
    engine.forward_step = lambda *args, **values: (events.append("pass"), run(*args, **values))[1]
    engine.optimizer.step = lambda *args, **values: (events.append("step"), step(*args, **values))[1]


def rests(worker: Any) -> dict[str, str]:
    """Dtypes of the parameters between passes, by checkpoint name."""
    named = worker.engine.module.get_submodule("decoder").named_parameters()
    return {checkpoint_name(name): str(parameter.dtype) for name, parameter in named}


def one(folder: Path, rank: int, ranks: int) -> None:
    """The batch of one job's folder, twice."""
    from harness.models import checkpoint
    from harness.trainers.verl import engine as engines
    from harness.trainers.verl import job as jobs

    os.environ[jobs.JOB] = str(folder / "job.json")
    jobs.current_job.cache_clear()
    jobs.current_method.cache_clear()
    job, reads, events, losses = jobs.current_job(), list[str](), list[str](), list[float]()
    read = checkpoint.read_tensors
    checkpoint.read_tensors = lambda place: (reads.append(str(place)), read(place))[1]
    with Counted() as counted:
        worker = make_worker(job)
    checkpoint.read_tensors = read
    built = held(worker)
    reference = rests(make_worker(job, "ref")) if job.algo.kl_coef else {}
    watched(worker, events)
    saved = {name: t[rank::ranks] for name, t in torch.load(folder / "batch.pt", weights_only=True).items()}
    numbers = {"temperature": job.config.engine.temperature, "calculate_entropy": True, "compute_loss": False,
               "global_token_num": [int(n) for n in saved["prompt_lens"] + saved["lengths"]]}  # fmt: skip
    for _ in range(2):
        worker.infer_batch(tensordict(saved, **numbers))
        done = worker.train_batch(tensordict(saved, **numbers, global_batch_size=len(saved["ids"])))
        losses += [metrics_of(done)["lowbit_loss"]] if rank == 0 else []
    engines.write_shards = partial(write_shards, shard_bytes=FILE)
    with Counted() as last:
        worker.engine.save_final()
    found = {"reads": len(reads), "peak": counted.peak, "last_peak": last.peak, "final_folder": str(job.final_folder)}
    found |= {"built": built, "after": held(worker), "losses": losses, "events": events}
    found |= {"rests": rests(worker), "reference": reference}
    torch.save(found, folder / f"memory{rank}.pt")


def main(store: str, rank: str, ranks: str, *folders: str) -> None:
    from harness.trainers.verl.job import read_job
    from harness.trainers.verl.settings import environment

    os.environ.update(environment(read_job(Path(folders[0]) / "job.json")))
    meet(store, rank, ranks)
    for folder in folders:
        one(Path(folder), int(rank), int(ranks))


if __name__ == "__main__":
    main(*sys.argv[1:])
