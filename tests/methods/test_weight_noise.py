"""Weight noise: its size, where and when it is drawn, and what it is refused beside."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.api import QUANTIZED, Memory, Plan, Step
from harness.foundation.seeds import generator
from harness.models.decoder import Decoder
from harness.numerics.formats import format_named
from harness.run.loop import grpo_step
from methods.weight_noise import WeightNoise, row_noise
from tests.engines.engine_cases import QWEN3, decoder, weights
from tests.toy import small_run

BF16 = Plan(rollout_weights=format_named("bf16"))
FP32 = Plan(rollout_weights=format_named("fp32"))


def added(part: WeightNoise, model: Decoder, step: int = 0, seed: int = 3, purpose: str = "rollout") -> Tensor:
    """Everything that was added, one vector; a float32 engine."""
    at = Step(index=step, total=10, seed=seed, purpose=purpose)  # pyright: ignore[reportArgumentType]
    before, after = dict(weights(model)), dict(part.sync(weights(model), at, FP32, {}, {}))
    return torch.cat([(after[name] - before[name]).flatten() for name in before])


def test_the_noise_is_sigma_times_the_root_mean_square_of_its_row() -> None:
    weight = torch.randn(3, 40_000) * torch.tensor([[0.1], [1.0], [10.0]])
    weight[:, :20_000] *= 5
    found = row_noise(weight, 0.2, generator("cpu", 1, "a"))
    size = weight.square().mean(1).sqrt()
    assert found.std(1).tolist() == pytest.approx((0.2 * size).tolist(), rel=0.02)
    left, right = found[:, :20_000].std(1), found[:, 20_000:].std(1)
    assert left.tolist() == pytest.approx(right.tolist(), rel=0.03), "one size along a row, as with one scale"
    assert abs(float(torch.corrcoef(found)[0, 1])) < 0.03


def test_only_what_formats_round_is_noised_and_the_columns_tell() -> None:
    model, memory = decoder(QWEN3), Memory()
    before = dict(weights(model))
    after = dict(WeightNoise(sigma=0.1).sync(weights(model), Step(index=0, total=10, seed=3), BF16, {}, memory))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if any(fnmatchcase(name, one) for one in QUANTIZED)} and changed
    assert memory["sigma"] == 0.1 and memory["sigma_realized"] == pytest.approx(0.1, rel=0.05)


def test_a_fixed_draw_lasts_and_a_fresh_one_does_not() -> None:
    model = decoder(QWEN3)
    fixed, fresh = WeightNoise(sigma=0.1), WeightNoise(sigma=0.1, draw="fresh")
    assert torch.equal(added(fixed, model), added(fixed, model, step=7))
    assert torch.equal(added(fresh, model, step=7), added(fresh, model, step=7, purpose="eval")), (
        "evaluated as it samples"
    )
    for one, other in (
        (added(fresh, model), added(fresh, model, step=7)),
        (added(fixed, model), added(fixed, model, seed=4)),
    ):
        assert not torch.equal(one, other) and abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.1
    twice = added(WeightNoise(sigma=0.2), model)
    assert torch.allclose(twice, 2 * added(fixed, model), atol=1e-6), "one direction, of any size"


def test_noise_that_does_not_arrive_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("methods.weight_noise.held_dtype", lambda plan, name: torch.float8_e5m2)
    with pytest.raises(RuntimeError, match=r"WeightNoise.sigma: 0.02 planned, 0\.\d+ arrived"):
        added(WeightNoise(sigma=0.02), decoder(QWEN3))


def test_two_doses_and_wrong_sizes_are_refused() -> None:
    for plan in (Plan(), BF16, Plan(rollout_weights=format_named("fp32"))):
        assert WeightNoise().plan(plan) == Plan()
    with pytest.raises(ValueError, match="precision: int4_g32 beside WeightNoise are two doses; valid: bf16, fp32"):
        WeightNoise().plan(Plan(rollout_weights=format_named("int4_g32")))
    for sigma in (0.0, 0.009, 11.0, float("nan")):
        with pytest.raises(ValueError, match=r"WeightNoise.sigma: .* is not from 0.01 to 10"):
            WeightNoise(sigma=sigma)


def test_runs(tmp_path: Path) -> None:
    """k3 grows as the square of a small sigma; the passport says BF16, the columns say the noise."""
    words = ["method=weight_noise", "precision=bf16", "trainer.steps=10"]
    k3 = dict[float, float]()
    for sigma in (0.02, 0.04):
        run = small_run(tmp_path, [*words, f"knobs.WeightNoise.sigma={sigma}"])
        row = grpo_step(run)
        k3[sigma] = row["mismatch/kl_k3"]
        assert row["part/WeightNoise.sigma_realized"] == pytest.approx(sigma, rel=0.05)
        assert run.passport is not None and {record.format for record in run.passport.weights} == {"bf16"}
    assert 2 < k3[0.04] / k3[0.02] < 8
    corrected = [
        "method=bf16_tis",
        "precision=bf16",
        "parts=[bf16_tis.TIS,weight_noise.WeightNoise]",
        "trainer.steps=10",
    ]
    same = grpo_step(small_run(tmp_path, [*corrected, "knobs.WeightNoise.sigma=0.04"]))
    assert same["mismatch/kl_k3"] == k3[0.04], "a correction changes nothing before the first update"
