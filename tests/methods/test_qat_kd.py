"""GPTQ start and distillation: the first codes are GPTQ's, the student approaches its teacher, runs report flips."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.api import Part, Plan, Rollout, Site, Step, weight_format
from harness.config.load import load
from harness.engines.embedded.engine import EmbeddedEngine
from harness.fitting.distill import divergence, texts_of, weighted_mean
from harness.fitting.fake_quant import FakeQuantLinear
from harness.foundation.seeds import generator
from harness.models.adapters import named_weights
from harness.models.checkpoint import load_decoder
from harness.models.decoder import Decoder
from harness.numerics.formats import format_named
from harness.numerics.quantize import code_flips, fake_quantize, quantize
from harness.run.checks import check
from harness.run.loop import evaluate, grpo_step
from harness.run.run import Run
from methods.gptq_start import GPTQStart
from methods.qat_kd import KD
from tests.engines.engine_cases import EOS, PAD, QWEN3, decoder, loaded
from tests.toy import SMALL, site_of, small_run, take_steps

INT3 = Plan(rollout_weights=format_named("int3_g32"))
INT2 = Plan(rollout_weights=format_named("int2_g16_asym"))
CONFIG = replace(QWEN3, num_layers=2)
PROMPTS = tuple(tuple(torch.randint(3, 24, (6,), generator=generator("cpu", 0, i)).tolist()) for i in range(24))
STEP = Step(index=0, total=2, seed=0)


@cache
def base() -> Decoder:
    """The base of every start here; not to be changed."""
    return decoder(CONFIG, std=0.15)


def site(**values: Any) -> Site:
    """One random decoder as base, checkpoint and sampler."""

    def sample(model: nn.Module, prompts: Sequence[Sequence[int]], seed: int) -> Rollout:
        assert isinstance(model, Decoder)
        return loaded(model).generate(prompts, num_samples=1, max_new_tokens=8, temperature=1.0, seed=seed)

    return site_of(base(), **({"calibration": PROMPTS, "sample": sample} | values))


prepared = cache(lambda part, plan: part.prepare(site(), plan))


def started(part: GPTQStart, plan: Plan) -> tuple[nn.Module, dict[str, Tensor], nn.Module]:
    """(prepared model, fixed tensors, the wrapped trainer)."""
    model, fixed = prepared(part, plan)
    assert model is not None
    return model, fixed, part.wrap(copy.deepcopy(model), plan, fixed)


def layers(model: nn.Module) -> dict[str, FakeQuantLinear]:
    """The wrapped layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, FakeQuantLinear)}


@pytest.mark.parametrize("plan", [INT3, INT2], ids=["int3", "int2"])
def test_first_codes_are_gptqs_wherever_the_latents_start(plan: Plan) -> None:
    values = {name: m.values() for name, m in layers(started(GPTQStart(latent="dequant"), plan)[2]).items()}
    assert len(values) == 14
    for scale in ("frozen", "learned"):
        for latent in ("preround", "dequant"):
            wrapped = layers(started(GPTQStart(latent=latent, scale=scale), plan)[2])
            assert all(torch.equal(wrapped[name].values(), one) for name, one in values.items())
            on_grid = [torch.equal(m.weight, values[name]) for name, m in wrapped.items()]
            assert all(on_grid) == any(on_grid) == (latent == "dequant")
    fmt = plan.rollout_weights
    plain = layers(started(GPTQStart(latent="orig"), plan)[2])
    for name, layer in plain.items():  # the base's weights under GPTQ's scales are rounding to nearest
        assert torch.equal(layer.values(), fake_quantize(base().get_submodule(name).weight, fmt))
    dynamic = layers(started(GPTQStart(scale="dynamic", latent="dequant"), plan)[2])
    moved = [not torch.equal(dynamic[name].values(), one) for name, one in values.items()]
    assert sum(moved) > 6  # a group that lost its extreme code gets another scale


@pytest.mark.parametrize("scale", ["frozen", "learned", "dynamic"])
def test_what_is_shipped_is_what_is_trained(scale: Any) -> None:
    part = GPTQStart(scale=scale)
    _, fixed, wrapped = started(part, INT2)
    engine = EmbeddedEngine(CONFIG, INT2, eos_id=EOS, pad_id=PAD)
    for _ in range(2):
        with torch.no_grad():
            for parameter in wrapped.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator("cpu", 0, "move")), alpha=0.01)
        stream = ((name, tensor.detach()) for name, tensor in named_weights(wrapped))
        engine.load_weights(part.sync(stream, STEP, INT2, fixed, {}))
        engine.realized_plan()
        for name, layer in layers(wrapped).items():
            if name.endswith(("o_proj", "down_proj")):
                kind = "out" if name.endswith("o_proj") else "down"
                live = engine.weights.linears[f"{name.split('.')[2]}.{kind}"].weight
                assert torch.equal(live, layer.values())
    assert 0 < engine.sync_metrics()["code_flip_rate"] < 0.5


def test_options_change_the_start() -> None:
    codes = {}
    options = {
        "default": GPTQStart(), "order": GPTQStart(act_order="static"), "damping": GPTQStart(damping=0.3),
        "inputs": GPTQStart(sequential_inputs=False), "domain": GPTQStart(calibration="off_domain"),
        "fewer": GPTQStart(num_sequences=4), "rtn": GPTQStart(start="rtn"),
    }  # fmt: skip
    for name, part in options.items():
        codes[name] = layers(started(part, INT3)[2])["model.layers.1.mlp.down_proj"].values()
    assert len({tuple(one.flatten().tolist()) for one in codes.values()}) == len(options)
    anew = GPTQStart().prepare(site(), INT3)
    again = layers(GPTQStart().wrap(*anew[:1], INT3, anew[1]))["model.layers.1.mlp.down_proj"].values()
    assert torch.equal(again, codes["default"])
    rtn = GPTQStart(start="rtn", latent="orig")
    assert torch.equal(layers(started(rtn, INT3)[2])["model.layers.1.mlp.down_proj"].values(), codes["rtn"])


def test_plans_and_refusals() -> None:
    assert GPTQStart().plan(INT3) == Plan() == GPTQStart(grid="asymmetric").plan(INT2)
    for name, asym in (("int3_g32", "int3_g32_asym"), ("int4_g32_qat", "int4_g32_asym_qat")):
        plan = GPTQStart(grid="asymmetric").plan(Plan(rollout_weights=format_named(name)))
        assert {fmt.name for _, fmt in plan.exceptions if fmt} == {asym} and len(plan.exceptions) == 7
        assert weight_format(plan, "model.layers.0.mlp.up_proj.weight") == format_named(asym)
    for name in ("nvfp4", "e4m3_block", "bf16"):
        with pytest.raises(ValueError, match=f"GPTQStart: weights={name} is no integer grid"):
            GPTQStart().plan(Plan(rollout_weights=format_named(name)))
    with pytest.raises(ValueError, match="int8_channel has no groups"):
        GPTQStart(grid="asymmetric").plan(Plan(rollout_weights=format_named("int8_channel")))
    for bad in ({"alpha": 1.0}, {"temperature": 0.0}, {"steps": 0}):
        with pytest.raises(ValueError, match="KD"):
            KD(**bad)
    assert KD(objective="none").prepare(site(), INT3) == (None, {})


def test_a_task_without_demonstrations_is_refused_when_planned() -> None:
    for choice, task in (("gsm8k", "gsm8k"), ("reasoning_gym", "reasoning_gym:chain_sum")):
        words = ["method=qat_kd", "precision=int4", "knobs.KD.data=dataset", f"task={choice}"]
        with pytest.raises(ValueError) as error:
            check(load([*SMALL, *words]))
        assert str(error.value) == (
            f"knobs.KD.data=dataset: task={task} has no demonstrations; valid: knobs.KD.data=teacher, or a task with "
            "some: sort, chain, wordmath"
        )
        check(load([*SMALL, *words, "knobs.KD.objective=none"]))
        check(load([*SMALL, *words, "knobs.KD.data=teacher"]))
    for task in ("chain", "sort", "wordmath"):
        check(load([*SMALL, *words, f"task={task}"]))


def distilled(scale: Any, kd: Part, plan: Plan = INT2) -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    """(student before, student after, what the stage fixed)."""
    start = GPTQStart(scale=scale)
    model, fixed, before = started(start, plan)
    at = site(
        build=lambda folder: copy.deepcopy(base() if folder.name == "original" else model),
        wrap=lambda plain: start.wrap(plain, plan, fixed),
        fixed=fixed,
    )
    after, changed = kd.prepare(at, plan)
    assert after is not None
    return before, start.wrap(after, plan, fixed | changed), changed


@pytest.mark.parametrize("scale", ["frozen", "learned"])
def test_distillation_flips_codes_and_approaches_the_teacher(scale: Any) -> None:
    before, after, changed = distilled(scale, KD(steps=15, batch_size=24, num_responses=2, lr=3e-3))
    assert (len(changed) == 14) == (scale == "learned")
    texts = texts_of([(prompt, ()) for prompt in PROMPTS])
    gaps = []
    with torch.no_grad():
        for model in (before, after):
            found = divergence(model(texts.ids), base()(texts.ids))
            gaps.append(float(weighted_mean(found, texts.keep(), torch.ones_like(found))))
    assert gaps[1] < 0.8 * gaps[0]
    flips = [
        code_flips(*(quantize(m.weight, m.fmt, scale=m.weight_scale, zero_point=m.weight_zero_point) for m in pair))
        for pair in zip(layers(before).values(), layers(after).values(), strict=True)
    ]
    assert all(0 < flip < 0.5 for flip in flips)


def test_teacher_and_data_are_chosen() -> None:
    seen: list[int] = []

    def demonstrations(count: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        seen.append(count)
        return [(prompt[:3], prompt[3:]) for prompt in PROMPTS]

    kd = KD(steps=2, batch_size=8, num_responses=1)
    plain = site(demonstrations=demonstrations)
    weights = []
    for part in (kd, replace(kd, data="dataset"), replace(kd, objective="sft"), replace(kd, kl="reverse"),
                 replace(kd, kl="skew"), replace(kd, tokens="all"), replace(kd, temperature=2.0),
                 replace(kd, weighting="teacher_confidence")):  # fmt: skip
        start = GPTQStart()
        model, fixed, _ = started(start, INT2)
        at = replace(
            plain,
            wrap=lambda m, f=fixed: GPTQStart().wrap(m, INT2, f),
            build=lambda folder, m=model: copy.deepcopy(base() if folder.name == "original" else m),
        )
        after, _ = part.prepare(at, INT2)
        weights.append(after.get_parameter("model.layers.1.mlp.down_proj.weight"))
    assert seen == [24]
    for i, one in enumerate(weights):
        assert not any(torch.equal(one, other) for other in weights[:i])


def kl_to_base(run: Run, folder: Path) -> float:
    """Mean KL of the base against the run's trainer on demonstrations, nats."""
    teacher = load_decoder(next((folder / "bases").glob("xs-chain8-b0*")))
    texts = texts_of(run.task.demonstrations(range(64), 5))
    with torch.no_grad():
        found = divergence(run.trainer.model(texts.ids)[:, :-1], teacher(texts.ids)[:, :-1])
    return float(found[texts.predicted("response")].mean())


def test_real_run(tmp_path: Path) -> None:
    gaps: dict[str, float] = {}
    for name in ("qat_rtn", "qat_no_kd", "qat_kd"):
        fewer = ["knobs.KD.steps=30", "knobs.KD.num_responses=2"] if name == "qat_kd" else []
        run = small_run(tmp_path, [f"method={name}", "precision=int2", *fewer])
        gaps[name] = kl_to_base(run, tmp_path)
    assert gaps["qat_kd"] < gaps["qat_no_kd"] / 2 < gaps["qat_rtn"] / 2
    rows = take_steps(run, 2)
    evaluate(run)
    formats = {record.name: record.format for record in run.passport.weights}
    assert formats["model.layers.1.mlp.down_proj.weight"] == "int2_g16_asym"
    assert rows[0]["mismatch/kl_k3"] < 1e-3 and rows[1]["mismatch/kl_k3"] < 1e-3
    assert rows[1]["sync/code_flip_rate"] > 0 and rows[1]["sync/saturated_frac"] >= 0
    assert any("prepared" in str(path) for path in (tmp_path / "work").iterdir())
    again = small_run(tmp_path, ["method=qat_kd", "precision=int2", *fewer])  # from the cache: the same start
    assert kl_to_base(again, tmp_path) == gaps["qat_kd"]


def test_asymmetric_grid_of_a_symmetric_precision(tmp_path: Path) -> None:
    run = small_run(tmp_path, ["method=qat_no_kd", "precision=int3", "knobs.GPTQStart.grid=asymmetric"])
    row = grpo_step(run)
    formats = {record.name: record.format for record in run.passport.weights}
    assert formats["model.layers.0.self_attn.q_proj.weight"] == "int3_g32_asym"
    assert row["mismatch/kl_k3"] < 1e-3


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    words = ["method=qat_kd", "precision=int3", "knobs.KD.steps=5", "knobs.KD.num_responses=1",
             "knobs.GPTQStart.scale=learned"]  # fmt: skip
    gpu, cpu = (small_run(tmp_path, [*words, f"trainer.device={device}"]) for device in ("cuda", "cpu"))
    assert grpo_step(gpu)["mismatch/kl_k3"] < 1e-3
    grpo_step(cpu)
    assert [record.hash for record in gpu.passport.weights] == [record.hash for record in cpu.passport.weights]
    assert grpo_step(gpu)["mismatch/kl_k3"] < 1e-3


def test_the_reference_evaluates_the_weights_on_their_grid(tmp_path: Path) -> None:
    words = ["method=qat_kd", "precision=int3", "knobs.KD.steps=2", "knobs.KD.num_responses=1"]
    run = small_run(tmp_path, words)
    name = "model.layers.0.mlp.up_proj"
    held, latents = dict(run.trainer.policy_weights()), dict(run.trainer.weights())
    layer = run.trainer.model.get_submodule(name)
    assert torch.equal(held[f"{name}.weight"], layer.values())
    assert not torch.equal(held[f"{name}.weight"], latents[f"{name}.weight"])
    assert set(held) == {n for n in latents if not n.endswith(("scale", "zero_point"))}
