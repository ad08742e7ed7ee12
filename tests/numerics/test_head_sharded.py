"""A head that FSDP shards over two processes whose batches make other numbers of chunks, as verl's ranks have them."""

from __future__ import annotations

import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes

from harness.foundation.seeds import generator
from harness.numerics.head_logp import head_logp
from tests.numerics.test_head_logp import VOCABULARY, WIDTH, case

ROWS = (4, 10)
"""Rows of the two ranks: 2 and 4 chunks of 3."""
KINDS = ("linear", "wrapped", "bf16")
LIMIT_S = 180


class Model(nn.Module):
    """A layer and the head: the least that FSDP gathers one by one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        rng = generator("cpu", "head_sharded")
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        with torch.no_grad():
            self.layer.weight.copy_(torch.randn(WIDTH, WIDTH, generator=rng))
        self.head = case(torch.float32, kind=kind)[0]

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return head_logp(self.head, self.layer(x), ids, 0.7, chunk=3, entropy_grad=True)


def batch(rank: int) -> tuple[Tensor, Tensor]:
    rng = generator("cpu", "rows", rank)
    return torch.randn(ROWS[rank], WIDTH, generator=rng), torch.randint(0, VOCABULARY, (ROWS[rank],), generator=rng)


def learned(model: nn.Module, rank: int) -> tuple[Tensor, Tensor]:
    logp, entropy = model(*batch(rank))
    (2 * logp - 0.3 * entropy).sum().backward()
    return logp.detach(), entropy.detach()


def work(rank: int, folder: str) -> None:
    """One of the two processes: every kind of head, its outputs and the whole gradients."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=len(ROWS))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (len(ROWS),))
    found: dict[str, Any] = {}
    for kind in KINDS:
        model = Model(kind)
        for part in (model.head, model):
            fully_shard(part, mesh=mesh)
        calls = list[int]()
        model.head.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        outputs = learned(model, rank)
        grads = {name: cast(DTensor, p.grad).full_tensor() for name, p in model.named_parameters()}
        found[kind] = {"outputs": outputs, "gradients": grads, "calls": len(calls),
                       "is_sharded": isinstance(model.head, FSDPModule)}  # fmt: skip
    torch.save(found, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Answers of both processes. Fails where they wait for each other."""
    folder = tmp_path_factory.mktemp("sharded")
    running = start_processes(work, (str(folder),), nprocs=len(ROWS), join=False, start_method="spawn")
    assert running is not None
    began = time.monotonic()
    try:
        while not running.join(timeout=1):
            assert time.monotonic() - began < LIMIT_S, "the ranks wait for each other"
    finally:
        for process in running.processes:
            cast(BaseProcess, process).kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(len(ROWS))]


@pytest.mark.parametrize("kind", KINDS)
def test_both_ranks_have_what_the_whole_head_gives(found: list[dict[str, Any]], kind: str) -> None:
    gradients: dict[str, Tensor] = {}
    for rank in range(len(ROWS)):
        model = Model(kind)
        for own, theirs in zip(learned(model, rank), found[rank][kind]["outputs"], strict=True):
            torch.testing.assert_close(theirs, own, atol=0, rtol=0)
        for name, p in model.named_parameters():
            gradients[name] = gradients.get(name, torch.zeros(())) + cast(Tensor, p.grad) / len(ROWS)
    for one in found:
        assert one[kind]["gradients"].keys() == gradients.keys()
        for name, own in gradients.items():
            torch.testing.assert_close(one[kind]["gradients"][name], own, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_is_called_once(found: list[dict[str, Any]], kind: str) -> None:
    """FSDP gathers around a call: once a pass on every rank."""
    assert [one[kind]["is_sharded"] for one in found] == [True, True]
    assert [one[kind]["calls"] for one in found] == [1, 1]
