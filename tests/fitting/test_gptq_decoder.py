"""GPTQ over a decoder: every layer is what GPTQ makes of it alone, on inputs of the model it was meant to see."""

from __future__ import annotations

import copy
from functools import partial
from itertools import chain

import pytest
import torch
from torch import Tensor, nn

from harness.api import Plan, weight_format
from harness.fitting.fake_quant import grid_values
from harness.fitting.gptq_decoder import ROWS, quantize_decoder, round_decoder, stages_of
from harness.foundation.seeds import generator
from harness.numerics.formats import format_named
from harness.numerics.gptq import accumulate, gptq
from harness.numerics.quantize import fake_quantize
from tests.engines.engine_cases import MOE, QWEN2, QWEN3, decoder

FORMAT = format_named("int3_g32")
FORMAT_OF = partial(weight_format, Plan(rollout_weights=FORMAT, exceptions=(("*.1.mlp.up_proj.weight", None),)))
IDS = torch.randint(24, (ROWS + 9, 12), generator=generator("cpu", 0, "ids"))
KEEP = torch.arange(12) < torch.randint(4, 13, (ROWS + 9, 1), generator=generator("cpu", 0, "lengths"))


def hessians(model: nn.Module) -> dict[str, Tensor]:
    """H of the inputs of every linear layer of the blocks, in one forward pass."""
    found: dict[str, Tensor] = {}
    names = [f"model.layers.{i}.{name}" for i in range(3) for name in chain(*chain(*stages_of(model.model.layers[i])))]

    def look(name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        found[name] = accumulate(None, 0, args[0], KEEP)[0]

    handles = [model.get_submodule(name).register_forward_pre_hook(partial(look, name)) for name in names]
    with torch.no_grad():
        model(IDS)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("config", [QWEN3, QWEN2], ids=["qwen3", "qwen2"])
def test_inputs_are_those_of_the_right_model(config, sequential: bool) -> None:
    model, original = decoder(config), decoder(config)
    found = quantize_decoder(model, IDS, KEEP, FORMAT_OF, sequential=sequential, act_order="static")
    assert len(found) == 7 * 3 - 1 and "model.layers.1.mlp.up_proj" not in found
    # What enters a layer depends only on layers before it, and those are final when it is quantized.
    seen, other = (hessians(m) for m in ((model, original) if sequential else (original, model)))
    differ = 0
    for name, one in found.items():
        weight = original.get_submodule(name).weight
        alone = gptq(weight, seen[name], FORMAT, act_order="static")
        assert (alone.values != one.values).float().mean() < 2e-3, name  # H differs in its last bits
        differ += not torch.allclose(gptq(weight, other[name], FORMAT, act_order="static").values, one.values)
        assert torch.equal(model.get_submodule(name).weight, one.values)
        assert torch.equal(grid_values(one.preround, FORMAT, one.scale, one.zero_point), one.values)
    assert differ >= 14  # all but the first block's q, k and v


def test_an_expert_is_calibrated_on_its_own_tokens_and_on_no_padding() -> None:
    model, original = decoder(MOE), decoder(MOE)
    with torch.no_grad():
        for each in (model, original):  # of four opposite scores two are above expert 4's, which is 0
            router = each.model.layers[0].mlp.gate.weight
            router[1], router[3], router[4] = -router[0], -router[2], 0.0
    entering: list[Tensor] = []
    handle = original.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: entering.append(args[0]))
    with torch.no_grad():
        original(IDS)
    handle.remove()
    (x,), mixture = entering, original.model.layers[0].mlp
    found = quantize_decoder(model, IDS, KEEP, FORMAT_OF, sequential=False)
    top = (x @ mixture.gate.weight.T).topk(2, -1).indices
    reached = {number: bool(((top == number).any(-1) & KEEP).any()) for number in range(5)}
    assert list(reached.values()) == [True, True, True, True, False]
    for number, is_reached in reached.items():
        name = f"model.layers.0.mlp.experts.{number}.gate_proj"
        assert found[name].is_fallback != is_reached
        weight = original.get_submodule(name).weight
        if not is_reached:
            assert torch.equal(found[name].values, fake_quantize(weight, FORMAT))
            continue
        kept = (top == number).any(-1) & KEEP
        alone = gptq(weight, accumulate(None, 0, x[kept])[0], FORMAT)
        padded = gptq(weight, accumulate(None, 0, x[(top == number).any(-1)])[0], FORMAT)
        assert (alone.values != found[name].values).float().mean() < 2e-3
        assert (padded.values != found[name].values).float().mean() > 2e-3
    assert sum(one.is_fallback for one in found.values()) == 3


def test_padding_does_not_count() -> None:
    found = []
    for fill in (0, 7):
        model = decoder()
        found.append(quantize_decoder(model, torch.where(KEEP, IDS, fill), KEEP, FORMAT_OF))
    for name, one in found[0].items():
        assert torch.equal(one.values, found[1][name].values)


def test_rounding_to_nearest_is_the_control() -> None:
    model, original = decoder(), decoder()
    found = round_decoder(model, FORMAT_OF)
    better = quantize_decoder(copy.deepcopy(original), IDS, KEEP, FORMAT_OF)
    assert found.keys() == better.keys()
    for name, one in found.items():
        weight = original.get_submodule(name).weight
        assert torch.equal(one.values, fake_quantize(weight, FORMAT)) and torch.equal(one.preround, weight)
        assert torch.equal(model.get_submodule(name).weight, one.values)
        assert torch.equal(better[name].scale, one.scale) and not torch.equal(better[name].values, one.values)
