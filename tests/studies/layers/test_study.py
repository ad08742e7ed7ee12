"""Layers one by one: against the same rounding by hand, on a small decoder with sharp distributions."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness.api import Plan
from harness.numerics.formats import format_named
from harness.numerics.quantize import fake_quantize
from harness.studies.fp8_cache.answers import divergence, log_probs, prompts_of
from harness.studies.layers.study import Rounding, places, replaced, roundings
from harness.tasks import build_task
from tests.engines.engine_cases import QWEN3, decoder
from tests.studies.fp8_cache.made import answers, sharp

INT8 = Plan(rollout_weights=format_named("int8_channel"), rollout_acts=format_named("int8_token"))
INT4 = Plan(rollout_weights=format_named("int4_g32"))


def kept(seen: list[torch.Tensor], module: nn.Module, args: tuple[torch.Tensor]) -> None:
    seen.append(args[0][0])


def test_one_place_in_int8_is_its_weights_and_inputs_rounded_by_hand() -> None:
    model, given = sharp(), answers()
    exact = log_probs(model, given)
    chosen = next(place for place in places(model, INT8) if place.name == "1 down_proj")
    with replaced(model, [chosen]):
        found = divergence(log_probs(model, given), exact)
    linear = model.get_submodule("model.layers.1.mlp.down_proj")
    weight = model.get_parameter("model.layers.1.mlp.down_proj.weight")
    held = weight.data.clone()
    low = held.bfloat16().float()  # an engine gets weights in BF16
    step = low.abs().amax(1, keepdim=True) / 127

    def round_inputs(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        own = args[0].abs().amax(-1, keepdim=True) / 127
        return ((args[0] / own).round() * own,)

    hook = linear.register_forward_pre_hook(round_inputs)
    weight.data = (low / step).round() * step
    by_hand = divergence(log_probs(model, given), exact)
    hook.remove()
    weight.data = held
    assert float(found.mean()) > 1e-6
    torch.testing.assert_close(found, by_hand, rtol=0.05, atol=2e-6)  # the engine holds int8 scales in float32


def test_the_places_are_all_fused_matrices_and_come_back_when_something_fails() -> None:
    model, given = sharp(), answers()
    before, exact = dict(model.named_modules()), log_probs(model, given)
    chosen = places(model, INT8)
    groups = ("q_proj, k_proj, v_proj", "o_proj", "gate_proj, up_proj", "down_proj")
    assert [place.name for place in chosen] == [f"{layer} {group}" for layer in range(3) for group in groups]
    with pytest.raises(KeyError), replaced(model, chosen):
        assert float(divergence(log_probs(model, given), exact).mean()) > 1e-5
        raise KeyError
    assert dict(model.named_modules()) == before
    assert torch.equal(log_probs(model, given), exact)


def test_what_rounding_does_to_inputs() -> None:
    rounding = Rounding(acts=format_named("int8_token"), weight=torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]))
    rounding.add(torch.tensor([[127.0, 0.4, 0.0], [127.0, 0.4, 10.2]]))
    found = rounding.shares()
    assert found["lost"] == pytest.approx(2 / 5)  # both 0.4, of five values that are not 0
    assert found["error_in"] == pytest.approx(((2 * 0.4**2 + 0.2**2) / (2 * 127**2 + 2 * 0.4**2 + 10.2**2)) ** 0.5)
    assert found["error_out"] == pytest.approx((2 * 0.4**2 / (2 * 127**2 + 2 * 0.4**2)) ** 0.5)


def test_sums_are_over_real_tokens_of_every_place() -> None:
    """Independent: row by row, without padding; the last layer over the positions that predict an answer's token."""
    model, given = sharp(), answers()
    found = roundings(model, places(model, INT8), given)
    for name, module, is_last in (("0 down_proj", "model.layers.0.mlp.down_proj", False),
                                  ("2 down_proj", "model.layers.2.mlp.down_proj", True)):  # fmt: skip
        seen: list[torch.Tensor] = []
        linear, weight = model.get_submodule(module), model.get_parameter(f"{module}.weight")
        hook = linear.register_forward_pre_hook(partial(kept, seen))
        for ids, start, length in zip(given.ids, given.prompt_lens.tolist(), given.lens.tolist(), strict=True):
            model(ids[None, : start + length])
            seen[-1] = seen[-1][start - 1 : start + length - 1] if is_last else seen[-1]
        hook.remove()
        x = torch.cat(seen).detach()
        low = fake_quantize(x, format_named("int8_token"))
        own = found[name]
        assert own["lost"] == pytest.approx(float(((low == 0) & (x != 0)).sum() / (x != 0).sum()), abs=2e-3)
        assert own["error_in"] == pytest.approx(float((low - x).norm() / x.norm()), rel=1e-3)
        error, size = (F.linear(y, weight).norm().detach() for y in (low - x, x))
        # A batch of rows sums in another order than single rows: one of 2,000 codes that flips is 0.4 % of the error.
        assert own["error_out"] == pytest.approx(float(error / size), rel=1e-2)


def test_formats_of_weights_alone_say_nothing_of_inputs() -> None:
    model = sharp()
    assert roundings(model, places(model, INT4), answers()) == {}


def test_what_it_does_not_take() -> None:
    with pytest.raises(ValueError, match=r"precision.weights=bf16: quantizes no linear layer"):
        places(decoder(QWEN3), Plan(rollout_weights=format_named("bf16")))


def test_fewer_answers_than_an_interval_takes_and_more_than_there_are_questions_are_refused() -> None:
    task = build_task("sort", {})
    assert len(prompts_of(task, 3)) == 3
    object.__setattr__(task, "num_eval", 16)
    with pytest.raises(ValueError, match=r"^--answers=32: task sort has 16 held-out questions; valid: 3 to 16$"):
        prompts_of(task, 32)
    with pytest.raises(ValueError, match=r"^--answers=2: an interval takes at least 3 questions$"):
        prompts_of(task, 2)
