"""Frozen parameters in bfloat16: which, by whose word, and to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from harness.trainers.verl.at_rest import frozen_in_bf16, is_bf16


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of one rank."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_value_is_held_where_a_cast_there_and_back_gives_it() -> None:
    draws = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 10 ** torch.linspace(-41, 37, 4096)
    rounded = draws.to(torch.bfloat16).to(torch.float32)
    back = [bool((one.to(torch.bfloat16).to(torch.float32) == one).all()) for one in draws.split(1)]
    assert [is_bf16(one) for one in draws.split(1)] == back
    assert sum(back) == 0
    assert all(is_bf16(one) for one in rounded.split(1))
    assert is_bf16(rounded)
    assert is_bf16(torch.tensor([[1.0, -0.0], [torch.inf, 2.0**-133]]).T)
    rounded[-1] = 1.0 + 2.0**-8
    assert not is_bf16(rounded)


def model() -> nn.ModuleDict:
    """A trained layer, one that bfloat16 holds but for its bias, and one that reads its weight."""
    layers = {name: nn.Linear(3, 2) for name in ("trained", "frozen", "tied")}
    tied = layers["tied"].weight = layers["frozen"].weight
    with torch.no_grad():
        tied.copy_(tied.to(torch.bfloat16))
    for name in ("frozen", "tied"):
        layers[name].requires_grad_(False)
    return nn.ModuleDict(layers)


@pytest.mark.usefixtures("alone")
def test_frozen_parameters_rest_in_the_bits_that_hold_them() -> None:
    held = model()
    before = {name: parameter.detach().clone() for name, parameter in held.named_parameters()}
    frozen_in_bf16(held)
    assert [name for name, p in held.named_parameters() if p.dtype == torch.bfloat16] == ["frozen.weight"]
    assert held.get_parameter("tied.weight") is held.get_parameter("frozen.weight")
    assert all(torch.equal(p.detach().to(torch.float32), before[name]) for name, p in held.named_parameters())


def test_rank_0_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank has a model without values, in which everything would fit."""
    asked: list[object] = []

    def told(found: list[object], src: int) -> None:
        asked.append((list(found), src))
        found[0] = ["frozen.weight"]

    monkeypatch.setattr(torch.distributed, "broadcast_object_list", told)
    held = model().to("meta")
    frozen_in_bf16(held)
    assert asked == [([[name for name, _ in held.named_parameters() if not name.startswith("trained")]], 0)]
    assert [name for name, p in held.named_parameters() if p.dtype == torch.bfloat16] == ["frozen.weight"]
