"""Lines of the specification that no method's own test asserts, and what must be refused or warned of."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.api import Fixed, Plan, Step
from harness.cli import main as cli
from harness.engines.embedded.engine import EmbeddedEngine
from harness.fitting.fake_quant import FakeQuantLinear, fake_quantized
from harness.foundation.seeds import generator
from harness.foundation.state_files import load_state, save_state
from harness.models.adapters import named_weights
from harness.models.decoder import Decoder
from harness.numerics.formats import format_named
from harness.numerics.gptq import gptq
from harness.numerics.packing import pack
from harness.numerics.quantize import dequantize, quantize
from harness.numerics.rounding import CASTS
from harness.run.cell import run_cell
from harness.run.checks import check
from harness.run.loop import evaluate, push_weights
from harness.start.prepare import prepare, start_of
from methods.flashrl import Profile, is_profiled
from methods.gptq_start import GPTQStart
from methods.jet_rl import FP8Flow
from methods.qat_aligned import AlignedQAT
from methods.qat_kd import KD
from tests.engines.engine_cases import EOS, PAD, QWEN2, QWEN3, UNEVEN, decoder, loaded, sample, trainer_logp, weights
from tests.toy import site_of, small_config, small_launch, small_run, take_steps
from tests.unpacking import unpack_fp4, unpack_int32

INT8 = Plan(rollout_weights=format_named("int8_channel"), rollout_acts=format_named("int8_token"))
INT4 = Plan(rollout_weights=format_named("int4_g32"))
NVFP4 = Plan(rollout_weights=format_named("nvfp4"))
START = Step(index=0, total=4, seed=0)


# precision.md 2.2: FlashRL


def test_codes_under_frozen_scales_are_monotone_and_saturate_at_127_5_scales() -> None:
    fmt = format_named("int8_channel")
    w = (3 * torch.randn(16, 64, generator=generator("cpu", "monotone"))).sort(-1).values
    scale = w.abs().amax(1, keepdim=True) / 300
    codes = quantize(w, fmt, scale=scale).codes.int()
    assert (codes.diff(dim=-1) >= 0).all() and codes.max() == 127 and codes.min() <= -127
    edge = scale * torch.tensor([126.4, 126.6, 127.4, 200.0, 1e4])
    assert quantize(edge, fmt, scale=scale).codes.int().unique(dim=0).tolist() == [[126, 127, 127, 127, 127]]


def test_profile_leaves_head_norms_biases_and_embedding_alone() -> None:
    model = decoder(QWEN2)
    _, fixed = Profile().prepare(site_of(model), INT8)
    assert len(fixed) == 7 * QWEN2.num_layers and all(name.endswith("_proj.weight_scale") for name in fixed)
    engine = EmbeddedEngine(QWEN2, INT8, eos_id=EOS, pad_id=PAD)
    engine.load_weights(Profile().sync(weights(model), START, INT8, fixed, {}))
    online = loaded(model, INT8)
    for (slab, ours), (_, theirs) in zip(engine.weights.loaded, online.weights.loaded, strict=True):
        if is_profiled(slab.fmt):  # the scale is of the float32 weight, an engine's own of the bf16 tensor
            assert (ours.codes.int() - theirs.codes.int()).abs().max() <= 1
            assert (ours.codes != theirs.codes).float().mean() < 0.2
        else:
            assert torch.equal(ours.codes, theirs.codes)


def test_a_pattern_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    for pattern in ("model.layer.0.*", "model.layers.0.self_attn.q_proj", "model.layers.7.*"):
        with pytest.raises(ValueError, match=r"exceptions: .* matches no tensor"):
            EmbeddedEngine(QWEN3, replace(INT8, exceptions=((pattern, None),)), eos_id=EOS, pad_id=PAD)
    EmbeddedEngine(QWEN3, replace(INT8, exceptions=(("lm_head.weight", None),)), eos_id=EOS, pad_id=PAD)  # tied
    words = ["method=flashrl", "precision=int8", "knobs.Profile.keep_high=[model.layer.0.*]"]
    with pytest.raises(ValueError, match=r"exceptions: model.layer.0.\* matches no tensor"):
        check(small_config(*words))
    result = run_cell(small_config(*words), small_launch(tmp_path))
    assert result.status == "failed" and "model.layer.0.* matches no tensor" in str(result.reason)


# precision.md 5.2: one FP8 flow; UE8M0 scales are taken over by both sites


def test_power_of_two_scales_are_both_sites_own() -> None:
    plan = Plan(rollout_weights=format_named("e4m3_block_ue8m0"), rollout_acts=format_named("e4m3_1x128_ue8m0"))
    assert FP8Flow().plan(plan).train_compute == plan.rollout_weights
    gaps: list[float] = []
    for rollout in (plan, Plan(rollout_weights=format_named("e4m3_block"), rollout_acts=format_named("e4m3_1x128"))):
        model = decoder(QWEN3, std=0.1)
        out = sample(loaded(model, rollout), UNEVEN)
        flow = FP8Flow().wrap(copy.deepcopy(model), plan, {})
        assert isinstance(flow, Decoder)
        gaps.append(float((out.logp - trainer_logp(flow, UNEVEN, out)).abs().mean()))
    assert gaps[0] < 2e-3 and gaps[1] > 5 * gaps[0]  # fp32 scales at one site are a mismatch


# precision.md 7.2: FP16


def test_fp16_at_both_sites_and_a_resume_restores_the_scaler(tmp_path: Path) -> None:
    words = ["method=fp16", "trainer.loss_scale=1e30"]
    run = small_run(tmp_path, words)
    assert take_steps(run)[0]["train/skipped"] == 1.0
    formats = {record.format for record in run.passport.weights}  # type: ignore[union-attr]
    assert formats == {"fp16"} and set(run.passport.acts.values()) == {"fp16"}  # type: ignore[union-attr]
    compute = run.composed.plan.train_compute
    assert compute is not None and CASTS[compute.element] == torch.float16
    save_state(tmp_path / "state.pt", run.state())
    again = small_run(tmp_path, words)
    again.restore(load_state(tmp_path / "state.pt"))
    for one in (run, again):
        assert one.trainer.scaler.get_scale() == pytest.approx(5e29)
        assert (one.trainer.num_updates, one.trainer.num_skipped) == (0, 1)  # a skipped step moves no schedule


# precision.md 8: metrics of every step, and ambiguous configurations


def test_metrics_of_every_step(tmp_path: Path) -> None:
    run = small_run(tmp_path, ["method=fp8_rl", "precision=fp8_block+kv8"])
    row = take_steps(run)[0]
    wanted = {"mismatch/kl_k1", "mismatch/kl_k3", "sync/code_flip_rate", "sync/saturated_frac", "train/loss_scale"}
    wanted |= {f"part/RecalibratedKV.{kind}_scale_{end}" for kind in "kv" for end in ("min", "max")}
    assert wanted <= row.keys() and row["mismatch/mult_prob_error"] >= 1.0


def test_unequal_tensor_scales_of_a_fused_matrix_are_refused() -> None:
    model = decoder()
    level = {name: torch.tensor([1.0 + name.count("q_proj")]) for name, _ in weights(model) if "_proj.weight" in name}
    given = [(f"{name}_scale", scale) for name, scale in level.items()]
    engine = EmbeddedEngine(QWEN3, NVFP4, eos_id=EOS, pad_id=PAD)
    with pytest.raises(ValueError, match=r"q_proj.*are one fused matrix and must share their scale"):
        engine.load_weights(iter([*weights(model), *given]))


# compensation.md 1.6 and 1.7: packed codes are the trainer's


@pytest.mark.parametrize("name", ["int4_g32", "int4_g32_qat", "int3_g32", "nvfp4"])
def test_packed_codes_stand_for_the_fake_quantized_weight(name: str) -> None:
    fmt, model = format_named(name), decoder()
    plan = Plan(rollout_weights=fmt)
    wrapped = fake_quantized(model, plan)
    layer = wrapped.get_submodule("model.layers.0.mlp.down_proj")
    assert isinstance(layer, FakeQuantLinear)
    q = quantize(layer.weight.detach().bfloat16(), fmt)
    packed, shape = pack(q)["weight_packed"], (q.codes.shape[0], q.codes.shape[1])
    codes = unpack_fp4(packed) if name == "nvfp4" else unpack_int32(packed, int(name[3]), shape)
    assert torch.equal(dequantize(replace(q, codes=codes.view(q.codes.dtype))), layer.values().detach())


def test_hessians_without_information_are_named() -> None:
    w, h = torch.randn(8, 32, generator=generator("cpu", "w")), torch.eye(32)
    spoilt = h.clone()
    spoilt[3, 4] = torch.nan
    fmt = format_named("int4_g32")
    for bad, words in ((spoilt, "not finite"), (h * torch.inf, "not finite"), (torch.zeros_like(h), "is zero")):
        with pytest.raises(ValueError, match=words) as caught:
            gptq(w, bad, fmt, name="model.layers.0.mlp.up_proj")
        assert "\n" not in str(caught.value) and "up_proj" in str(caught.value)


# What would silently do nothing, or quantize twice


def refusal(*overrides: str) -> str:
    """The line in which a run is refused before anything starts."""
    with pytest.raises(ValueError) as caught:
        check(small_config(*overrides))
    return str(caught.value)


def test_a_frozen_base_is_not_quantized_again() -> None:
    plan = replace(INT4, train_weights=format_named("int4_g32"))
    with pytest.raises(ValueError, match=r"q_proj is frozen in int4_g32; leave out the adapters' part$"):
        AlignedQAT().wrap(decoder(), plan, {})


@pytest.mark.parametrize(
    ("precision", "parts", "names"),
    [
        ("nf4", "qlora.LoRA,qat_aligned.AlignedQAT", "LoRA and AlignedQAT"),
        ("int4", "qlora.LoRA,qat_kd.GPTQStart", "LoRA and GPTQStart"),
        ("int4", "qat_kd.GPTQStart,qat_aligned.AlignedQAT", "GPTQStart and AlignedQAT"),
        ("fp8_block", "qat_aligned.AlignedQAT,jet_rl.FP8Flow", "AlignedQAT and FP8Flow"),
    ],
)
def test_two_parts_that_set_the_linear_layers_are_refused_before_the_run(
    precision: str, parts: str, names: str
) -> None:
    at = ("method=naive", f"precision={precision}")
    assert refusal(*at, f"parts=[{parts}]") == f"parts {names} both set the trainer's linear layers; choose one"
    for part in parts.split(","):
        check(small_config(*at, f"parts=[{part}]"))


def test_a_part_whose_wrap_is_idle_goes_with_another() -> None:
    check(small_config("method=bf16_lora", "precision=bf16", "parts=[qlora.LoRA,qarl.AlignedQAT]"))


def test_frozen_int8_scales_and_those_of_the_trainer_are_refused_before_the_run() -> None:
    for part in ("qat_aligned.AlignedQAT", "qat_kd.GPTQStart"):
        for parts in (f"flashrl.Profile,{part}", f"{part},flashrl.Profile"):
            assert refusal("method=naive", "precision=int8", f"parts=[{parts}]") == (
                f"Profile: {part.split('.')[1]} has INT8 scales of its own, which frozen ones would replace; choose one"
            )
            check(small_config("method=naive", "precision=int4", f"parts=[{parts}]"))  # nothing is profiled


def test_groups_that_do_not_divide_a_layer_are_refused_before_the_run() -> None:
    wide = ("method=qat_no_kd", "precision=int4", "model.intermediate_size=144")
    told = "GPTQStart: model.layers.0.mlp.down_proj.weight has 144 input channels, and {} to int4_g32 needs whole "
    told += "groups of 32; choose another model or precision, or start=rtn with scale=frozen"
    assert refusal(*wide) == told.format("GPTQ")
    rtn = (*wide, "knobs.GPTQStart.start=rtn")
    assert refusal(*rtn, "knobs.GPTQStart.scale=learned") == told.format("a learned scale")
    check(small_config(*rtn))
    check(small_config(*wide[:2], "model.intermediate_size=160"))


def test_what_the_trainers_own_sampler_cannot_be_sent_is_refused_before_the_run() -> None:
    own = ("method=zero_mismatch", "precision=fp32")
    for part in ("qlora.LoRA", "qerl.AQN", "rilq.RILQ"):
        name = part.split(".")[1]
        assert refusal(*own, f"parts=[zero_mismatch.TrainerSampler,{part}]") == (
            f"TrainerSampler: the trainer's own module samples, to which {name} cannot send other weights; leave out "
            f"{name}"
        )
    check(small_config(*own, "parts=[zero_mismatch.TrainerSampler,flashrl.Profile]"))  # which is idle here
    low = refusal("method=naive", "precision=int8", "parts=[zero_mismatch.TrainerSampler]")
    assert low == "TrainerSampler: weights=int8_channel, but the trainer's own are float32; choose fp32"


def test_adapters_that_nobody_plans_or_two_parts_send_are_refused_before_the_run() -> None:
    at = ("method=naive", "precision=int4")
    alone = refusal(*at, "parts=[rilq_init.RILQInit]")
    assert alone == "RILQInit: no part plans trained adapters at both sites; add qlora.LoRA"
    twice = refusal(*at, "parts=[rilq.RILQ,rilq_refresh.RILQRefresh]")
    assert twice == "parts RILQ and RILQRefresh both send adapters; choose one"
    after = refusal(*at, "parts=[rilq.RILQ,qurl.UAQ]")
    assert after == "UAQ: RILQ before it fits adapters to weights that UAQ then changes; put UAQ first"
    check(small_config(*at, "parts=[qurl.UAQ,rilq.RILQ]"))


def test_dynamic_scales_together_with_given_ones_are_refused() -> None:
    model = decoder()
    _, fixed = Profile().prepare(site_of(model), INT8)
    for part in (AlignedQAT(), GPTQStart(scale="dynamic")):
        with pytest.raises(ValueError, match=r"q_proj: another part gives the rollout's scales"):
            part.wrap(copy.deepcopy(model), INT8, fixed)


def test_distillation_without_a_student_is_refused() -> None:
    model = decoder()
    same = Path("base")
    at = site_of(model, checkpoint=same, original=same)
    for before in ("", "flashrl.TIS,", "qarl.AlignedQAT,"):  # the last is idle at BF16
        words = ["method=qarl", "precision=bf16", f"parts=[{before}qat_kd.KD]"]
        with pytest.raises(ValueError, match=r"^knobs\.KD\.objective=kd: no part before KD quantizes the student, so"):
            check(small_config(*words))
        check(small_config(*words, "knobs.KD.objective=none"))
    check(small_config("method=qarl", "precision=int8", "parts=[qarl.AlignedQAT,qat_kd.KD]"))
    other = decoder(replace(QWEN3, vocab_size=26))
    folders = {"base": other, "student": model}
    texts = lambda count: [((3, 4), (5, 6))] * 4  # noqa: E731
    at = site_of(model, checkpoint=Path("student"), original=same, build=lambda folder: folders[folder.name],
                 demonstrations=texts, calibration=((3, 4),))  # fmt: skip
    with pytest.raises(ValueError, match=r"the teacher has 26 tokens, the student 24; one vocabulary"):
        KD(data="dataset", steps=1).prepare(at, INT4)


def test_a_quantized_head_leaves_a_tied_embedding_alone() -> None:
    model = decoder()
    assert QWEN3.tie_embeddings
    engine = loaded(model, replace(INT4, lm_head=format_named("int8_channel")))
    embedding = model.get_parameter("model.embed_tokens.weight").detach()
    assert torch.equal(engine.weights.stacks["embed"], embedding.bfloat16().float())
    assert not torch.equal(engine.weights.head.weight, engine.weights.stacks["embed"])
    for part in (AlignedQAT(), GPTQStart(scale="dynamic")):
        wrapped = part.wrap(decoder(), INT4, {})
        assert isinstance(wrapped, Decoder) and wrapped.lm_head.weight is wrapped.model.embed_tokens.weight
        assert type(wrapped.lm_head) is torch.nn.Linear


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("method=qat_no_kd knobs.GPTQStart.damping=-1", "knobs.GPTQStart.damping, num_sequences: -1.0, 128; choose"),
        ("method=qat_kd knobs.KD.lr=0", "knobs.KD.lr: 0.0 is no learning rate (choose a positive one)"),
        ("method=quads knobs.ResidualPass.ratio=2", "knobs.ResidualPass.ratio: 2.0 is no share"),
        ("method=qerl knobs.AQN.num_stages=1", "knobs.AQN.num_stages: 1 has no stage"),
        ("method=qurl_acr precision=mxfp4 parts=[qurl.UAQ]", "UAQ.s: 1.5 with mxfp4_even"),
    ],
)
def test_what_is_known_before_start_is_exit_code_2(
    words: str, expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["run", *words.split(), "--results", str(tmp_path)]) == 2
    out = capsys.readouterr().err
    assert expected in out and out.count("\n") == 1 and not [*tmp_path.iterdir()]


# Preparation, state and evaluation


def test_sampling_settings_prepare_anew(tmp_path: Path) -> None:
    """A preparation may rest on samples of the base: other sampling settings are another preparation."""
    fast = ["method=qat_kd", "precision=int3", "knobs.KD.steps=1", "knobs.KD.num_responses=1"]
    found: list[Fixed] = []
    for more in ([], ["engine.temperature=0.5"], []):
        config, launch = small_config(*fast, *more), small_launch(tmp_path)
        run = small_run(tmp_path, [*fast, *more])
        found.append(dict(run.composed.fixed))
        assert prepare(run.composed, config, start_of(config, launch), launch) is not None
    name = "model.layers.1.mlp.down_proj.weight_scale"
    assert name in found[0] and all(torch.equal(found[0][n], t) for n, t in found[2].items())
    assert len([*(tmp_path / "work" / "prepared").iterdir()]) == 4  # two parts, two temperatures


def test_resume_restores_what_a_refit_replaced(tmp_path: Path) -> None:
    words = ["method=flashrl", "precision=int8", "knobs.Profile.refit_above=-1.0", "trainer.lr=0.01"]
    run = small_run(tmp_path, words)
    before = dict(run.composed.fixed)
    take_steps(run, 2)
    assert any(not torch.equal(t, before[name]) for name, t in run.composed.fixed.items())
    save_state(tmp_path / "state.pt", run.state())
    again = small_run(tmp_path, words)
    again.restore(load_state(tmp_path / "state.pt"))
    assert again.composed.memory == run.composed.memory and again.composed.memory[0]["profile_refits"] == 2.0
    assert again.composed.fixed.keys() == run.composed.fixed.keys()
    for one in (run, again):
        push_weights(one, replace(START, index=2))
    assert again.passport == run.passport


def test_evaluation_around_noise_sees_clean_weights(tmp_path: Path) -> None:
    words = ["method=qerl", "trainer.steps=10", "knobs.AQN.sigma_start=0.1", "knobs.AQN.sigma_end=0.05"]
    run = small_run(tmp_path, words)
    take_steps(run, 2)
    noisy = run.passport
    evaluate(run)
    clean = EmbeddedEngine(run.trainer.model.config, run.composed.plan, eos_id=EOS, pad_id=PAD)
    clean.load_weights((name, t.detach()) for name, t in named_weights(run.trainer.model))
    assert noisy is not None and run.passport is noisy  # the record keeps that of the rollouts
    assert run.engine.realized_plan().weights == clean.realized_plan().weights != noisy.weights
    plain = Plan(rollout_weights=format_named("fp32"))
    merged = EmbeddedEngine(run.trainer.model.config, plain, eos_id=EOS, pad_id=PAD)
    merged.load_weights(run.trainer.policy_weights())  # refuses adapters of their own
    assert isinstance(run.reference, EmbeddedEngine)
    for name, stack in merged.weights.stacks.items():
        assert torch.equal(run.reference.weights.stacks[name], stack), name


def test_a_fitted_start_has_the_mismatch_of_bf16_adapters(tmp_path: Path) -> None:
    """compensation.md 3.5: with a shared base the spread of rho is that of the BF16 arm."""
    fit = [f"knobs.RILQInit.{k}" for k in ("updates=4", "sequences=16", "validate_every=2")]
    arms = (["method=rilq_init", "precision=int3", *fit], ["method=bf16_lora", "precision=bf16"])
    shared, bf16 = (take_steps(small_run(tmp_path, [*words]), 1)[0]["mismatch/kl_k3"] for words in arms)
    naive = take_steps(small_run(tmp_path, ["method=naive", "precision=int3"]), 1)[0]["mismatch/kl_k3"]
    assert shared < 5 * bf16 and naive > 20 * shared
