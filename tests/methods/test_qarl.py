"""QaRL: sampler and trainer agree but for the order of summation, under TBPO; in BF16 it is TBPO."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.fitting.fake_quant import FakeQuantLinear
from harness.run.loop import grpo_step
from harness.run.run import Run
from tests.toy import small_run


def after_a_step(folder: Path, *overrides: str) -> tuple[Run, float]:
    """(the run, the mismatch of its first step in nats)."""
    run = small_run(folder, overrides)
    return run, grpo_step(run)["mismatch/kl_k3"]


@pytest.mark.parametrize("precision", ["int4", "int8", "fp8_channel", "fp8_block", "nvfp4"])
def test_one_policy_at_both_sites(tmp_path: Path, precision: str) -> None:
    run, aligned = after_a_step(tmp_path, "method=qarl", f"precision={precision}")
    _, apart = after_a_step(tmp_path, "method=tbpo", f"precision={precision}")
    assert aligned < 1e-5 and apart > 3e-5 and apart > 20 * aligned
    layers = [m for m in run.trainer.model.modules() if isinstance(m, FakeQuantLinear)]
    acts = run.composed.plan.rollout_acts
    assert len(layers) == 14 and {m.acts for m in layers} == {acts} and {m.base.name for m in layers} == {"bf16"}


def test_without_a_quantizer_it_is_tbpo(tmp_path: Path) -> None:
    ours, other = (after_a_step(tmp_path, f"method={name}", "precision=bf16") for name in ("qarl", "tbpo"))
    assert ours[1] == other[1]
    for (name, a), (_, b) in zip(ours[0].trainer.named, other[0].trainer.named, strict=True):
        assert torch.equal(a, b), name


def test_masters_and_update_are_float32_and_the_gradient_is_straight_through(tmp_path: Path) -> None:
    run = small_run(tmp_path, ["method=qarl", "precision=int4"])
    before = {name: tensor.clone() for name, tensor in run.trainer.weights()}
    grpo_step(run)
    name = "model.layers.0.mlp.up_proj.weight"
    after = dict(run.trainer.weights())[name]
    assert after.dtype == torch.float32 and not torch.equal(after, after.bfloat16().float())
    assert ((after - before[name]) != 0).float().mean() > 0.9
