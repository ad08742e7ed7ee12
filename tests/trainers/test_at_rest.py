"""Frozen parameters in bfloat16: which, by whose word, and to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from harness.models.decoder import Decoder
from harness.run.loop import grpo_step
from harness.run.run import Run
from harness.trainers.at_rest import frozen_in_bf16, is_bf16, linears_in_bf16
from harness.trainers.local import trainer
from tests.toy import small_run

WORDS = ("method=bf16_lora", "precision=bf16", "knobs.LoRA.lr_scale=1", "trainer.compute=bf16")


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


def none(model: Decoder) -> int:
    """In place of `linears_in_bf16`: nothing rests."""
    return 0


@pytest.mark.parametrize("is_native", [True, False])
def test_a_run_with_a_frozen_base_is_the_same_to_the_bit(
    is_native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps, a state written and read, and one more step, with a base at rest and without."""

    def run(name: str, rest: Callable[[Decoder], int]) -> Run:
        monkeypatch.setattr(trainer, "linears_in_bf16", rest)
        return small_run(tmp_path / name, WORDS, native_16bit=is_native)

    rests = linears_in_bf16
    plain, resting, again = (run(name, rest) for name, rest in (("a", none), ("b", rests), ("c", rests)))
    linear = [n for n, p in resting.trainer.model.named_parameters() if p.dtype == torch.bfloat16]
    assert len(linear) == 7 * len(resting.trainer.model.model.layers)
    assert all(name.endswith("_proj.base_layer.weight") for name in linear)
    assert {tensor.dtype for _, tensor in resting.trainer.weights()} == {torch.float32}
    for one in (plain, resting):
        one.series += [grpo_step(one) for _ in range(2)]
    again.trainer.restore(resting.trainer.state())
    found = [dict(one.trainer.weights()) for one in (plain, resting, again)]
    assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in found[0])
    policies = [dict(one.trainer.policy_weights()) for one in (plain, resting)]
    assert all(torch.equal(policies[0][name], policies[1][name]) for name in policies[0])
    timeless = [
        str([{key: value for key, value in row.items() if not key.endswith(("_s", "_gib"))} for row in rows])
        for rows in (plain.series, resting.series)
    ]
    assert timeless[0] == timeless[1]


def test_weights_that_are_trained_or_lose_a_bit_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = small_run(tmp_path / "full", ("method=bf16", "trainer.compute=bf16")).trainer.model
    assert {parameter.dtype for parameter in full.parameters()} == {torch.float32}
    monkeypatch.setattr(trainer, "linears_in_bf16", none)
    held = small_run(tmp_path / "lora", WORDS).trainer.model
    with torch.no_grad():
        held.model.layers[0].get_parameter("mlp.up_proj.base_layer.weight")[0, 0] = 1.0 + 2.0**-8
    assert linears_in_bf16(held) == 7 * len(held.model.layers) - 1
