"""QeRL: noise on the right gains, at the right time, of the planned size, and a base that both sites share."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.api import Memory, Plan, Step, weight_format
from harness.config.compose import compose
from harness.engines.embedded.engine import EmbeddedEngine
from harness.foundation.seeds import generator
from harness.models.decoder import Decoder, tensor_shapes
from harness.numerics.formats import format_named
from harness.numerics.invariant_scaling import scaled
from harness.numerics.noise_schedule import survival
from harness.run.checks import check
from harness.run.loop import evaluate
from methods.qerl import AQN, AQN_BF16, METHOD, QERL_NO_AQN, held_dtype
from methods.qlora import BF16_LORA, NORMS
from methods.qlora import METHOD as QLORA
from tests.engines.engine_cases import EOS, PAD, QWEN3, UNEVEN, decoder, weights
from tests.toy import small_config, small_run, take_steps

OWN = (METHOD, QERL_NO_AQN, AQN_BF16, QLORA, BF16_LORA)
NOISY = Step(index=9, total=100, seed=3)
"""The first step of stage 1: sigma 1e-2."""
FP32, BF16, NVFP4 = (Plan(rollout_weights=format_named(name)) for name in ("fp32", "bf16", "nvfp4"))
IDS = torch.arange(24).view(2, 12)


def synced(
    part: AQN, model: Decoder, step: Step = NOISY, plan: Plan = FP32, memory: Memory | None = None
) -> dict[str, Tensor]:
    """Tensors that arrive at the engine."""
    return dict(part.sync(weights(model), step, plan, {}, {} if memory is None else memory))


def noise(part: AQN, model: Decoder, step: Step = NOISY) -> Tensor:
    """All that was added, one vector."""
    after, before = synced(part, model, step), dict(weights(model))
    return torch.cat([after[n] - before[n] for n in after if n.endswith(NORMS)])


def test_two_gains_per_block_and_nothing_else() -> None:
    model = decoder()
    before = {name: tensor.clone() for name, tensor in weights(model)}
    after = synced(AQN(), model)
    assert list(after) == list(before)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert len(changed) == 2 * QWEN3.num_layers
    assert changed == {f"model.layers.{i}{norm}" for i in range(QWEN3.num_layers) for norm in NORMS}
    for name, tensor in model.named_parameters():  # the trainer's own stay clean
        assert torch.equal(tensor, before[name])


def test_no_noise_in_stage_0_in_evaluation_and_at_sigma_0() -> None:
    model = decoder()
    quiet = [(AQN(), replace(NOISY, index=8)), (AQN(), replace(NOISY, purpose="eval")), (AQN(sigma_start=0.0), NOISY)]
    for part, step in quiet:
        memory: Memory = {}
        for name, tensor in synced(part, model, step, memory=memory).items():
            assert torch.equal(tensor, model.get_parameter(name))
        assert memory == ({} if step.purpose == "eval" else {"sigma": 0.0, "sigma_realized": 0.0})
    with pytest.raises(ValueError, match=r"AQN: no weight of the model ends in .input_layernorm.weight or"):
        dict(AQN().sync(iter([("model.norm.weight", torch.ones(4))]), NOISY, FP32, {}, {}))


def test_ranks_and_restarts_agree_and_everything_else_differs() -> None:
    model, part = decoder(), AQN()
    first = noise(part, model)
    torch.randn(5)
    reversed_stream = reversed([*weights(model)])
    other = dict(pickle.loads(pickle.dumps(part)).sync(reversed_stream, NOISY, FP32, {}, {}))
    for name, tensor in synced(part, model).items():
        assert torch.equal(other[name], tensor)
    for change in ({"seed": 4}, {"index": 11}):
        apart = noise(part, model, replace(NOISY, **change))
        assert abs(float(torch.corrcoef(torch.stack((first, apart)))[0, 1])) < 0.25
    pieces = first.split(QWEN3.hidden_size)
    assert len(pieces) == 6 and not any(torch.allclose(a, b) for i, a in enumerate(pieces) for b in pieces[:i])


def test_a_thousand_pushes_do_not_drift() -> None:
    """Deviations from the clean gains stay within six sigmas, average out, and have the planned size."""
    model, part = decoder(replace(QWEN3, num_layers=1)), AQN(decay="linear", sigma_end=1e-2)
    clean = {name: tensor.clone() for name, tensor in weights(model)}
    steps = range(100, 1100)
    z = torch.stack([noise(part, model, Step(index=i, total=1100, seed=0)) for i in steps])
    assert all(part.sigma(Step(index=i, total=1100, seed=0)) == pytest.approx(0.0 if i < 109 else 1e-2) for i in steps)
    z = z[9:]
    assert z.abs().max() <= 6e-2 and z[-100:].std() / z[:100].std() == pytest.approx(1.0, abs=0.03)
    assert float(z.std()) == pytest.approx(1e-2, rel=0.02) and abs(float(z.mean())) < 1e-4
    assert z.mean(0).abs().max() < 6 * 1e-2 / math.sqrt(991)
    assert abs(float(torch.corrcoef(torch.stack((z[:-1].flatten(), z[1:].flatten())))[0, 1])) < 0.02
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, clean[name])


@pytest.mark.parametrize("index", [10, 50, 95])
def test_the_realized_sigma_is_that_of_the_engine(index: int) -> None:
    config = replace(QWEN3, num_layers=2, hidden_size=2048)
    shapes = {n: s for n, s in tensor_shapes(config).items() if n.endswith(NORMS)}
    gains = {n: (1 + torch.rand(s, generator=generator("cpu", n))).bfloat16().float() for n, s in shapes.items()}
    step = replace(NOISY, index=index)
    found: dict[str, Memory] = {"fp32": {}, "fp16": {}, "bf16": {}}
    arrived: dict[str, Tensor] = {}
    for name, memory in found.items():
        plan = Plan(rollout_weights=format_named("nvfp4" if name == "bf16" else name))
        out = dict(AQN().sync(iter(gains.items()), step, plan, {}, memory))
        dtype = held_dtype(plan, next(iter(gains)))
        arrived[name] = torch.cat([out[n].to(dtype).float() - gains[n] for n in gains])
        assert memory["sigma"] == AQN().sigma(step)
        assert memory["sigma_realized"] == pytest.approx(float(arrived[name].std(correction=0)), rel=1e-5)
    sigma = AQN().sigma(step)
    assert found["fp32"]["sigma_realized"] == pytest.approx(sigma, rel=0.05)
    kept = float((arrived["bf16"] != 0).double().mean())
    assert kept == pytest.approx(float(survival(torch.tensor([1.5]), sigma, torch.bfloat16)), abs=0.02)
    if index == 95:
        assert found["bf16"]["sigma_realized"] < 1e-4 and sigma == pytest.approx(5e-4)
    plan = replace(NVFP4, exceptions=AQN().plan(NVFP4).exceptions)
    assert held_dtype(plan, "model.layers.0.input_layernorm.weight") == torch.float32
    assert held_dtype(plan, "model.norm.weight") == torch.bfloat16


def test_noise_is_multiplicative_on_the_readers_columns() -> None:
    """Appendix G: w + Z equals 1 + Z / w on every column of what reads the norm."""
    model, moved = decoder(), decoder()
    arriving = synced(AQN(sigma_start=5e-2), model)
    with torch.no_grad():
        for i, layer in enumerate(moved.model.layers):
            for norm, readers in (
                ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
            ):
                clean = layer.get_parameter(f"{norm}.weight")
                for reader in readers:
                    layer.get_parameter(f"{reader}.weight").mul_(arriving[f"model.layers.{i}.{norm}.weight"] / clean)
    noised = copy.deepcopy(model)
    noised.load_state_dict(arriving, strict=False)
    torch.testing.assert_close(noised(IDS), moved(IDS), atol=1e-4, rtol=1e-4)
    assert (noised(IDS) - model(IDS)).abs().max() > 0.05


def test_scaled_gains_keep_the_relative_noise() -> None:
    """With UAQ's s in `gain_scale` the noised function is the same one."""
    model = decoder()
    wide = copy.deepcopy(model)
    wide.load_state_dict(scaled(dict(model.state_dict()), 2.0))
    outputs: list[Tensor] = []
    for one, part in ((model, AQN()), (wide, AQN(gain_scale=2.0)), (wide, AQN())):
        noised = copy.deepcopy(one)
        noised.load_state_dict(synced(part, one), strict=False)
        outputs.append(noised(IDS).detach())
    assert torch.equal(outputs[0], outputs[1])
    assert (outputs[2] - outputs[0]).abs().max() > 1e-3


def test_noise_reaches_the_logits() -> None:
    model = decoder()
    divergence = dict[float, float]()
    for sigma in (0.0, 1e-2, 5e-2):
        part, plan, distributions = AQN(sigma_start=sigma), replace(BF16, exceptions=AQN().plan(BF16).exceptions), []
        for purpose in ("rollout", "eval"):
            engine = EmbeddedEngine(QWEN3, plan, eos_id=EOS, pad_id=PAD, keeps_log_probs=True)
            engine.load_weights(iter(synced(part, model, replace(NOISY, purpose=purpose), plan).items()))  # type: ignore[arg-type]
            out = engine.generate(UNEVEN, num_samples=1, max_new_tokens=1, temperature=1.0, seed=0)
            assert out.log_probs is not None
            distributions.append(out.log_probs.double())
        noised, clean = distributions
        divergence[sigma] = float((noised.exp() * (noised - clean)).sum(-1).mean())
    assert divergence[0.0] == 0.0 < 1e-6 < divergence[1e-2] < divergence[5e-2]


def test_schedules_that_rounding_swallows_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^knobs\.AQN\.fp32_gains=false: a gain of 1 in bfloat16 keeps only 0\.0% of"
    ) as e:
        check(small_config("method=qerl", "knobs.AQN.fp32_gains=false"))
    assert str(e.value).endswith("the draws of sigma 0.0005; valid: true, a larger knobs.AQN.sigma_end, or knobs.AQN."
                                 "allow_rounded_noise=true")  # fmt: skip
    fine = [
        (AQN(), NVFP4),
        (AQN(fp32_gains=False, allow_rounded_noise=True), NVFP4),
        (AQN(fp32_gains=False, sigma_start=5e-2, sigma_end=1e-2), NVFP4),
        (AQN(fp32_gains=False), FP32),
        (AQN(fp32_gains=False, sigma_start=0.0), NVFP4),
        (AQN(fp32_gains=False), Plan(rollout_weights=format_named("fp16"))),
        (AQN(fp32_gains=False, decay="linear", sigma_start=5e-2, sigma_end=0.0, num_stages=3), NVFP4),
    ]
    for part, plan in fine:
        part.check(plan, (), None)
    # half a step of BF16 above 1 is 2^-8: a sigma of that size is beyond it in 31.73% of the draws
    for scale in (1.0, 8.0):  # UAQ's gains, their noise and their grid grow alike
        AQN(fp32_gains=False, sigma_end=0.00391, gain_scale=scale).check(NVFP4, (), None)
        with pytest.raises(ValueError, match=rf"a gain of {scale:g} in bfloat16 keeps only 31\.7% of the draws"):
            AQN(fp32_gains=False, sigma_end=0.0039, gain_scale=scale).check(NVFP4, (), None)


def test_knobs() -> None:
    for bad, message in (
        ({"num_stages": 1}, "num_stages: 1"), ({"sigma_end": 0.0}, "above 0"), ({"sigma_start": -1.0}, "sigma_start"),
        ({"sigma_start": math.nan}, "sigma_start"), ({"gain_scale": 0.0}, "gain_scale: 0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"AQN.*{message}"):
            AQN(**bad)  # type: ignore[arg-type]
    assert AQN(schedule="paper").sigma(replace(NOISY, index=99)) == pytest.approx(6.975e-4, rel=1e-3)
    assert AQN().sigma(replace(NOISY, index=99)) == pytest.approx(5e-4)


def test_methods() -> None:
    for method, precision in ((METHOD, "nvfp4"), (QERL_NO_AQN, "bf16"), (BF16_LORA, "bf16")):
        composed = compose(small_config(f"method={method.name}", f"precision={precision}"))
        gains = weight_format(composed.plan, "model.layers.1.post_attention_layernorm.weight")
        assert gains == (None if method is BF16_LORA else format_named("fp32"))
        assert weight_format(composed.plan, "model.norm.weight") is None
        assert (composed.plan.train_weights is None) == (precision == "bf16")
    assert [m.is_control for m in OWN] == [False, False, True, True, True]
    assert METHOD.precisions == ("nvfp4", "mxfp4", "nf4", "int4") and QLORA.precisions == ("nf4",)
    assert not any(part.sets_weight for m in OWN for part in m.parts)
    with pytest.raises(ValueError, match="precision=int8"):
        compose(small_config("method=qerl", "precision=int8"))


def test_a_run(tmp_path: Path) -> None:
    """Base frozen and shared; the noise is the gap, and only while rolling out."""
    words = ["method=qerl", "trainer.steps=10", "knobs.AQN.sigma_start=0.1", "knobs.AQN.sigma_end=0.05"]
    run = small_run(tmp_path, words)
    base = {name: t.clone() for name, t in run.trainer.weights()}
    rows = take_steps(run, 3)
    assert [row["part/AQN.sigma"] for row in rows] == pytest.approx([0.1, 0.1 * 0.5**0.125, 0.1 * 0.5**0.25])
    assert rows[0]["part/AQN.sigma_realized"] == pytest.approx(0.1, rel=0.1)
    (quiet,) = take_steps(small_run(tmp_path, [*words, "knobs.AQN.schedule=repo"]), 1)  # begins in stage 0
    assert quiet["part/AQN.sigma"] == 0.0 and rows[0]["mismatch/kl_k3"] > 20 * quiet["mismatch/kl_k3"]
    moved = {name for name, t in run.trainer.weights() if not torch.equal(t, base[name])}
    assert moved == {name for name in base if ".lora_" in name}
    assert run.passport is not None
    held = {r.name: r.format for r in run.passport.weights}
    assert held["model.layers.0.input_layernorm.weight"] == "fp32" and held["model.norm.weight"] == "bf16"
    assert held["model.layers.0.mlp.up_proj.weight"] == "nvfp4"
    assert {group["lr"] for group in run.trainer.optimizer.param_groups} == {10 * run.config.trainer.lr}  # type: ignore[operator]
    evaluate(run)
    noisy = {r.name: r.hash for r in run.passport.weights}
    take_steps(run, 1)
    assert run.passport is not None
    differs = {r.name for r in run.passport.weights if r.hash != noisy[r.name] and ".lora_" not in r.name}
    assert len(differs) == 2 * run.engine.config.num_layers and all(name.endswith(NORMS) for name in differs)  # type: ignore[attr-defined]


def test_norms_train_and_a_resume_repeats_the_noise(tmp_path: Path) -> None:
    words = ["method=aqn_bf16", "trainer.steps=10", "knobs.LoRA.train_norms=true", "knobs.LoRA.rank=4"]
    straight = small_run(tmp_path, words)
    base = {name: t.clone() for name, t in straight.trainer.weights()}
    take_steps(straight, 2)
    second = small_run(tmp_path, words)
    second.restore(copy.deepcopy(straight.state()))
    rows = take_steps(straight, 2), take_steps(second, 2)
    assert rows[0][1]["part/AQN.sigma_realized"] == rows[1][1]["part/AQN.sigma_realized"] > 0
    assert rows[0][1]["train/loss"] == rows[1][1]["train/loss"]
    for (name, one), (same, two) in zip(straight.trainer.weights(), second.trainer.weights(), strict=True):
        assert name == same and torch.equal(one, two)
        assert torch.equal(one, base[name]) != (".lora_" in name or name.endswith(NORMS))


def test_qerl_without_noise_is_qerl_at_sigma_0(tmp_path: Path) -> None:
    words = ["trainer.steps=12", "algo.num_minibatches=2"]
    rows = [
        take_steps(small_run(tmp_path, [*words, *more]), 2)
        for more in (["method=qerl_no_aqn"], ["method=qerl", "knobs.AQN.sigma_start=0.0"], ["method=qerl"])
    ]
    keys = ("train/loss", "mismatch/kl_k3", "reward/accuracy")
    assert [[row[k] for k in keys] for row in rows[0]] == [[row[k] for k in keys] for row in rows[1]]
    assert [rows[2][0][k] for k in keys] == [rows[0][0][k] for k in keys]  # stage 0
    assert rows[2][1]["mismatch/kl_k3"] != rows[0][1]["mismatch/kl_k3"]
