"""The second pass over rounding errors: against the formula, its share of channels, and when it must be refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.api import Plan, Rollout
from harness.engines.embedded.engine import EmbeddedEngine
from harness.foundation.seeds import generator
from harness.models.decoder import DecoderConfig
from harness.numerics.formats import format_named
from harness.numerics.linear import EmulatedLinear
from harness.numerics.quantize import fake_quantize
from tests.engines.engine_cases import EOS, PAD, UNEVEN, decoder, loaded, sample, trainer_logp, weights

CONFIG = DecoderConfig(
    vocab_size=24, num_layers=3, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=128
)
ACTS = format_named("nvfp4_act_token")
W4A4 = Plan(rollout_weights=format_named("nvfp4"), rollout_acts=ACTS)


def inputs(rows: int = 64, columns: int = 64) -> Tensor:
    """Activations with a few large channels."""
    x = torch.randn(rows, columns, generator=generator("cpu", 0, "inputs"))
    return x * torch.randn(columns, generator=generator("cpu", 0, "channels")).exp()


def test_second_pass_is_the_formula() -> None:
    x, w = inputs(), torch.randn(48, 64, generator=generator("cpu", 0, "w"))
    linear = EmulatedLinear(w, None, acts=ACTS, base=format_named("bf16"))
    once = linear(x)
    linear.residual = torch.tensor([1, 5, 6, 40])
    q = fake_quantize(x.bfloat16(), ACTS)
    error = fake_quantize((x.bfloat16().float() - q)[:, linear.residual], ACTS)
    expected = F.linear(q, w) + F.linear(error, w[:, linear.residual])
    assert (linear(x) - expected).abs().max() <= expected.abs().max() * 2**-8
    assert not torch.equal(linear(x), once)


def test_gap_shrinks_with_the_share_of_channels() -> None:
    x, w = inputs(256), torch.randn(48, 64, generator=generator("cpu", 0, "w"))
    linear, exact, gaps = EmulatedLinear(w, None, acts=ACTS, base=None), F.linear(x, w), []
    order = (x - fake_quantize(x, ACTS)).abs().mean(0).argsort(descending=True)
    for count in (0, 8, 16, 32, 48, 64):
        linear.residual = order[:count].sort().values if count else None
        gaps.append(float((linear(x) - exact).square().mean().sqrt()))
    assert gaps == sorted(gaps, reverse=True) and gaps[-1] < gaps[0] / 4
    linear.residual = order[32:].sort().values  # the other half helps less: the choice of channels matters
    assert float((linear(x) - exact).square().mean().sqrt()) > gaps[3]


def prepared(ratio: float | None) -> EmbeddedEngine:
    """An engine with channels chosen."""
    engine = loaded(decoder(CONFIG, std=0.1), replace(W4A4, residual=ratio))
    engine.calibrate_residual(UNEVEN)
    return engine


def gap(out: Rollout) -> float:
    """Mean |log-prob difference| to the trainer that has the engine's weights and exact activations."""
    model = decoder(CONFIG, std=0.1)
    reference = loaded(model, replace(W4A4, rollout_acts=None))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            found = [slab for slab, _ in reference.weights.loaded if name in slab.sources]
            for slab in found[:1]:
                rows = torch.cat([s.live.reshape(-1) for s in found[:1]])
                sizes = [model.get_parameter(source).numel() for source in slab.sources]
                parameter.copy_(rows.split(sizes)[slab.sources.index(name)].view_as(parameter))
    expected = trainer_logp(model, UNEVEN, out)
    return float((expected - out.logp).abs().sum() / out.lengths.sum())


def test_engine_comes_closer_with_more_channels() -> None:
    gaps = [gap(sample(prepared(ratio), UNEVEN, num_samples=8)) for ratio in (None, 0.25, 0.5, 1.0)]
    assert gaps == sorted(gaps, reverse=True) and gaps[-1] < gaps[0] / 2


def test_channels_are_the_largest_errors_and_depend_on_nothing_before() -> None:
    engine = prepared(0.5)
    residual = engine.weights.residual
    assert residual is not None
    first = {name: linear.residual.clone() for name, linear in residual.linears.items()}
    # The first layer's input is known: the normed embeddings of the prompts, token by token.
    layer, stack = engine.weights.linears["0.qkv"], engine.weights.stacks
    x = stack["embed"][
        torch.tensor([token for prompt in UNEVEN[:3] for token in prompt])
    ]  # the fourth repeats the second
    x = F.rms_norm(x, (64,), stack["input_gain"][0], CONFIG.rms_eps).bfloat16().float()
    errors = (x - fake_quantize(x, ACTS)).abs().sum(0)
    assert set(layer.residual.tolist()) == set(errors.topk(32).indices.tolist())
    assert {len(channels) for channels in first.values()} == {32, 64}
    engine.calibrate_residual([[3, 4, 5]])
    assert any(not torch.equal(first[name], linear.residual) for name, linear in residual.linears.items())
    engine.calibrate_residual(UNEVEN)
    assert all(torch.equal(first[name], linear.residual) for name, linear in residual.linears.items())
    assert not any(linear._forward_pre_hooks for linear in residual.linears.values())


def test_passport_names_the_channels() -> None:
    engine = prepared(0.5)
    lines = {r.name: r for r in engine.realized_plan().weights if r.name.endswith(".residual_channels")}
    assert len(lines) == 7 * CONFIG.num_layers
    down = lines["model.layers.0.mlp.down_proj.residual_channels"]
    assert (down.format, down.dtype, down.scale_shape) == ("nvfp4_act_token", "int64", (64,))
    engine.calibrate_residual([[3, 4, 5]])
    assert {r.hash for r in engine.realized_plan().weights} != {r.hash for r in prepared(0.5).realized_plan().weights}


def test_refusals() -> None:
    model = decoder(CONFIG)
    engine = loaded(model, replace(W4A4, residual=0.5))
    for call in (engine.realized_plan, lambda: sample(engine, UNEVEN)):
        with pytest.raises(RuntimeError, match="call calibrate_residual first"):
            call()
    with pytest.raises(ValueError, match="prompts"):
        engine.calibrate_residual([])
    engine.calibrate_residual(UNEVEN)
    engine.load_weights(weights(model))
    engine.realized_plan()  # a new push keeps the channels until they are chosen again
    with pytest.raises(ValueError, match=r"residual: 0.0 is no share"):
        EmbeddedEngine(CONFIG, replace(W4A4, residual=0.0), eos_id=EOS, pad_id=PAD)
    with pytest.raises(ValueError, match="residual: no input of a linear layer is quantized"):
        EmbeddedEngine(CONFIG, replace(W4A4, residual=0.5, rollout_acts=None), eos_id=EOS, pad_id=PAD)
    with pytest.raises(ValueError, match="residual: the trainer's own forward"):
        EmbeddedEngine(
            CONFIG, replace(W4A4, residual=0.5, sampler="trainer"), eos_id=EOS, pad_id=PAD, trainer_model=model
        )
    plain = loaded(model, W4A4)
    plain.calibrate_residual(UNEVEN)
    assert all(linear.residual is None for linear in plain.weights.linears.values())
