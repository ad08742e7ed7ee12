"""Aligned QAT and QUADS: the same codes as an unaligned run, a mismatch like that of BF16, channels that close it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.api import Method, Plan
from harness.fitting.fake_quant import FakeQuantLinear
from harness.numerics.formats import format_named
from harness.run.loop import grpo_step
from harness.run.run import Run
from methods.qat_aligned import METHOD, QUADS, AlignedQAT, ResidualPass
from tests.engines.engine_cases import decoder
from tests.toy import small_run

INT4 = Plan(rollout_weights=format_named("int4_g32"))
W4A4 = Plan(rollout_weights=format_named("nvfp4"), rollout_acts=format_named("nvfp4_act_token"))


def step(folder: Path, *overrides: str) -> tuple[Run, dict[str, Any]]:
    """A run after its first step, and what the step measured."""
    run = small_run(folder, overrides)
    return run, grpo_step(run)


def k3(folder: Path, *overrides: str) -> float:
    """Mismatch of the first step, nats."""
    return step(folder, *overrides)[1]["mismatch/kl_k3"]


@pytest.mark.parametrize("precision", ["int4", "int2", "nvfp4"])
def test_mismatch_falls_to_the_order_of_bf16(tmp_path: Path, precision: str) -> None:
    plain = k3(tmp_path, "method=bf16")
    naive, run = step(tmp_path, "method=naive", f"precision={precision}")[1], f"precision={precision}"
    aligned = k3(tmp_path, "method=qat_aligned", run)
    assert naive["mismatch/kl_k3"] > 50 * plain and aligned < 4 * plain
    assert k3(tmp_path, "method=qat_aligned", run, "knobs.AlignedQAT.compute=bf16") < aligned / 2


def test_codes_are_those_of_an_unaligned_run_and_only_training_differs(tmp_path: Path) -> None:
    (naive, a), (aligned, b) = (step(tmp_path, f"method={name}", "precision=nvfp4") for name in ("naive", METHOD.name))
    assert naive.passport == aligned.passport and a["rollout/tokens"] == b["rollout/tokens"]
    assert naive.trainer.named[1][0] == aligned.trainer.named[1][0]
    moved = [torch.equal(x, y) for (_, x), (_, y) in zip(naive.trainer.named, aligned.trainer.named, strict=True)]
    assert not any(moved)


def test_scope(tmp_path: Path) -> None:
    run, row = step(tmp_path, "method=qat_aligned", "precision=nvfp4_w4a4", "knobs.AlignedQAT.scope=ffn")
    wrapped = [name for name, m in run.trainer.model.named_modules() if isinstance(m, FakeQuantLinear)]
    assert len(wrapped) == 3 * 2 and all(".mlp." in name for name in wrapped)
    formats = {record.name: record.format for record in run.passport.weights}
    assert formats["model.layers.0.self_attn.q_proj.weight"] == "bf16"
    assert formats["model.layers.0.mlp.up_proj.weight"] == "nvfp4"
    acts = run.passport.acts
    assert acts["model.layers.0.self_attn.o_proj.weight"] == "bf16"
    assert acts["model.layers.0.mlp.down_proj.weight"] == "nvfp4_act_token"
    assert row["mismatch/kl_k3"] < 0.1


def test_plans() -> None:
    assert AlignedQAT().plan(INT4) == Plan() and ResidualPass().plan(W4A4) == Plan(residual=0.5)
    assert AlignedQAT(scope="ffn").plan(INT4) == Plan(exceptions=(("*.self_attn.*_proj.weight", None),))
    assert AlignedQAT(compute="bf16").plan(INT4) == Plan(train_compute=format_named("bf16"))
    for plain in (Plan(rollout_weights=format_named("bf16")), Plan()):
        assert AlignedQAT(scope="ffn", compute="bf16").plan(plain) == Plan()
        model = decoder()
        names = [type(m) for m in model.modules()]
        assert [type(m) for m in AlignedQAT().wrap(model, plain, {}).modules()] == names
    layers = [m for m in AlignedQAT(acts=True).wrap(decoder(), W4A4, {}).modules() if isinstance(m, FakeQuantLinear)]
    assert {m.acts for m in layers} == {W4A4.rollout_acts} and {m.base for m in layers} == {None}
    weight_only = [m for m in AlignedQAT().wrap(decoder(), W4A4, {}).modules() if isinstance(m, FakeQuantLinear)]
    assert {m.acts for m in weight_only} == {None}
    for ratio in (0.0, 1.5):
        with pytest.raises(ValueError, match=r"ResidualPass\.ratio"):
            ResidualPass(ratio=ratio)
    with pytest.raises(ValueError, match="ResidualPass: acts=None leaves no rounding error"):
        ResidualPass().plan(INT4)


def test_quads_closes_the_gap_channel_by_channel(tmp_path: Path) -> None:
    gaps = [k3(tmp_path, "method=qat_aligned", "precision=nvfp4_w4a4")]
    gaps += [k3(tmp_path, "method=quads", f"knobs.ResidualPass.ratio={ratio}") for ratio in (0.25, 0.5, 1.0)]
    assert gaps == sorted(gaps, reverse=True) and gaps[-1] < gaps[0] / 20
    assert k3(tmp_path, "method=naive", "precision=nvfp4_w4a4") > gaps[0]


def test_channels_are_chosen_at_every_push(tmp_path: Path) -> None:
    run, _ = step(tmp_path, "method=quads", "trainer.lr=0.01")
    before = {r.name: r for r in run.passport.weights if r.name.endswith(".residual_channels")}
    assert len(before) == 14 and before["model.layers.1.mlp.down_proj.residual_channels"].scale_shape == (96,)
    grpo_step(run)
    after = {r.name: r for r in run.passport.weights if r.name.endswith(".residual_channels")}
    assert after != before and run.composed.plan.residual == 0.5


@pytest.mark.parametrize("method", [METHOD, QUADS])
def test_every_precision_has_something_to_align(method: Method) -> None:
    assert len(set(method.precisions)) == len(method.precisions) and "bf16" not in method.precisions


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["qat_aligned", "quads"])
def test_on_a_gpu(tmp_path: Path, method: str) -> None:
    (gpu, row), (cpu, _) = (
        step(tmp_path, f"method={method}", "precision=nvfp4_w4a4", f"trainer.device={device}")
        for device in ("cuda", "cpu")
    )
    assert row["mismatch/kl_k3"] < 0.02
    formats, hashes = (
        [
            {r.name: getattr(r, what) for r in run.passport.weights if r.name.endswith("proj.weight")}
            for run in (gpu, cpu)
        ]
        for what in ("format", "hash")
    )
    assert formats[0] == formats[1] and hashes[0] == hashes[1]
