"""MXFP4 RL against the golden block of its specification, its identities, and what a run really computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.api import Passport, Plan, Step
from harness.config.compose import check_passport, compose
from harness.engines.embedded.engine import EmbeddedEngine
from harness.foundation.seeds import generator
from harness.numerics.formats import format_named
from harness.numerics.linear import EmulatedLinear
from harness.numerics.packing import pack
from harness.numerics.quantize import fake_quantize, quantize
from harness.numerics.scales import macro_factors
from harness.run.checks import check
from harness.run.loop import grpo_step
from harness.run.run import Run
from methods.mxfp4_rl import METHOD, MXErrors, OutlierFallback, error_terms
from methods.qerl import AQN
from tests.engines.engine_cases import EOS, PAD, QWEN3
from tests.toy import small_config, small_run

UP, MBS = format_named("mxfp4_rceil"), format_named("mxfp4_mbs")
W4A4 = Plan(rollout_weights=MBS, rollout_acts=MBS)


def golden() -> Tensor:
    """The block of the specification, [1, 32]."""
    return F.pad(torch.tensor([[5.0, 2.2, 0.2, -1.3]]), (0, 28))


def matrix(rows: int = 64, columns: int = 256) -> Tensor:
    return torch.randn(rows, columns, generator=generator("cpu", "mxfp4"))


def near(x: Tensor, values: list[float], atol: float = 1e-6) -> None:
    """The first elements are these numbers, and the rest of the row is 0."""
    torch.testing.assert_close(x, F.pad(torch.tensor([values]), (0, x.shape[1] - len(values))), rtol=0, atol=atol)


def second_pass(x: Tensor, acts: str, alpha: float) -> Tensor:
    """Operand of a product under outlier fallback, by the engine's own module."""
    linear = EmulatedLinear(torch.eye(x.shape[1]), None, acts=format_named(acts), base=None)
    linear.residual, linear.residual_alpha = torch.arange(x.shape[1]), alpha
    return linear(x)


def test_the_golden_block_by_its_error_terms() -> None:
    x = golden()
    near(fake_quantize(x, UP), [4, 2, 0, -1.5], 0)
    stored = quantize(x, UP).scale
    assert stored is not None and stored.view(torch.uint8).tolist() == [[127]]  # 2^0; s* = 5 / 6
    scale, dead, grid = error_terms(x)  # the dead zone ends at 5 / 24
    near(scale, [-1, -0.5, 0, -0.25])
    near(dead, [0, 0, -0.2, 0])
    near(grid, [0, 0.3, 0, 0.05])
    near(scale + dead + grid, [-1, -0.2, -0.2, -0.2])


def test_scales_are_rounded_up_where_the_ocp_rule_saturates() -> None:
    x = F.pad(torch.tensor([[7.0]]), (0, 31))
    near(fake_quantize(x, UP), [8.0], 0)  # s = 2: 3.5 ties to 4
    near(fake_quantize(x, format_named("mxfp4_floor")), [6.0], 0)


def test_macro_block_scaling_of_the_golden_block() -> None:
    power, factor = macro_factors(torch.tensor([[5.0, 1.0, 0.5, 0.0]]), MBS)
    assert factor.item() == 1 + 51 / 256 and power[0, 0] == 1.0
    near(fake_quantize(golden(), MBS), [5.003257, 2.501629, 0, -1.250814])


def test_the_mantissa_is_the_nearest_and_shared_by_128_columns() -> None:
    """By brute force over the 256 mantissas, block by block in numbers of Python."""
    x = matrix(8, 384) * torch.exp(2 * matrix(8, 384 // 32)).repeat_interleave(32, 1)
    found = fake_quantize(x, MBS)
    for row in range(8):
        for start in range(0, 384, 128):
            blocks = [x[row, start + 32 * b : start + 32 * b + 32].double() for b in range(4)]
            top = max(float(block.abs().max()) for block in blocks)
            s = 2.0 ** torch.log2(torch.tensor(top / 6, dtype=torch.float64)).ceil().item()
            mm = min(range(256), key=lambda i: abs(i / 256 - (s / (top / 6) - 1)))
            for b, block in enumerate(blocks):
                scaled = block * (1 + mm / 256)
                own = min(float(scaled.abs().max()), 6 * s)
                step = 2.0 ** torch.log2(torch.tensor(own / 6, dtype=torch.float64)).ceil().item()
                codes = (scaled / step).clamp(-6, 6).float()
                expected = fake_quantize(F.pad(codes, (0, 1), value=6.0)[None], UP)[0, :-1] * step / (1 + mm / 256)
                place = slice(start + 32 * b, start + 32 * b + 32)
                torch.testing.assert_close(found[row, place].double(), expected.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("columns", [16, 32, 96, 200, 256])
def test_a_mantissa_of_zero_gives_plain_mxfp4(columns: int) -> None:
    """So it is where s* of the largest block is a power of two; elsewhere the two differ."""
    x = matrix(64, columns).clamp(-5.9, 5.9)
    other = fake_quantize(x, MBS)
    assert not torch.equal(other, fake_quantize(x, UP))
    x[:, ::128] = 6.0
    assert torch.equal(fake_quantize(x, MBS), fake_quantize(x, UP))
    assert (error_terms(x)[0][:, :16] == 0).all() and (error_terms(0.7 * x)[0] != 0).any()


def test_the_largest_value_of_a_macro_block_saturates_by_a_512th_at_most_and_zeros_stay() -> None:
    top = torch.linspace(3.0, 6.0, 1000)[:, None]
    x = F.pad(top, (0, 127))
    error = (fake_quantize(x, MBS)[:, 0] / top[:, 0] - 1).abs()
    assert float(error.max()) < 1 / 512 + 1e-6 and float((fake_quantize(x, UP)[:, 0] / top[:, 0] - 1).abs().max()) > 0.1
    assert not fake_quantize(torch.zeros(2, 256), MBS).any()
    assert torch.isfinite(fake_quantize(torch.full((1, 128), 1e-40), MBS)).all()


def test_macro_blocks_have_less_error_on_weights() -> None:
    x = matrix(256, 512)
    plain, better = (float((fake_quantize(x, fmt) - x).square().sum()) for fmt in (UP, MBS))
    assert better < 0.92 * plain


def test_outlier_fallback_of_the_golden_block() -> None:
    x = golden()
    half = second_pass(x, "mxfp4_rceil", 0.5)
    near(half, [4.5, 2.125, 0.125, -1.375], 0)
    squares = [float((second_pass(x, "mxfp4_rceil", a) - x).square().sum()) for a in (0.5, 1.0)]
    assert squares == pytest.approx([0.266875, 0.0075], abs=1e-6)
    assert float((fake_quantize(x, UP) - x).square().sum()) == pytest.approx(1.12, abs=1e-6)
    near(second_pass(x, "mxfp4_rceil", 0.0), [4, 2, 0, -1.5], 0)


def test_error_terms_sum_to_the_error_and_have_the_published_shares() -> None:
    x = matrix(256, 512)
    scale, dead, grid = error_terms(x)
    error = fake_quantize(x, UP) - x
    torch.testing.assert_close(scale + dead + grid, error, rtol=0, atol=2e-6)
    assert float((dead * grid).abs().max()) == float((dead * scale).abs().max()) == 0.0
    shares = [float(part.square().sum() / error.square().sum()) for part in (scale, dead, grid)]
    assert shares == pytest.approx([1.725, 0.026, 0.703], abs=0.07)  # notes: weights of a model; here normal ones
    assert float(F.cosine_similarity(scale.flatten(), grid.flatten(), 0)) == pytest.approx(-0.66, abs=0.02)
    ragged = error_terms(x[:, :70])
    torch.testing.assert_close(sum(ragged), fake_quantize(x[:, :70], UP) - x[:, :70], rtol=0, atol=2e-6)


def stepped(folder: Path, *words: str) -> tuple[Run, Passport, dict[str, float]]:
    """A run after its first step, its passport and its row."""
    run = small_run(folder, words)
    row = grpo_step(run)
    assert run.passport is not None
    return run, run.passport, row


def test_each_repair_narrows_the_gap_of_the_engine(tmp_path: Path) -> None:
    def gap(*words: str) -> float:
        return stepped(tmp_path, *words)[2]["mismatch/kl_k3"]

    still = ("method=mxfp4_rl", "knobs.AQN.sigma_start=0")
    plain = gap("method=naive", "precision=mxfp4_up_w4a4")
    assert gap(*still, "precision=mxfp4_up_w4a4", "knobs.OutlierFallback.alpha=0") == plain
    mbs = gap(*still, "precision=mxfp4_mbs_w4a4", "knobs.OutlierFallback.alpha=0")
    both = gap(*still, "precision=mxfp4_mbs_w4a4")
    assert both < mbs < plain and both < 0.7 * plain


def test_a_run_has_the_formats_the_pass_and_the_metrics(tmp_path: Path) -> None:
    run, passport, row = stepped(tmp_path, "method=mxfp4_rl")
    formats = {r.format for r in passport.weights if r.name.endswith("_proj.weight")}
    assert formats == {"mxfp4_mbs"} == set(passport.acts.values())
    channels = {r.scale_shape for r in passport.weights if r.name.endswith("down_proj.residual_channels")}
    assert channels == {(run.trainer.model.get_submodule("model.layers.0.mlp.down_proj").in_features,)}
    assert passport.state["residual_alpha"] == [0.5]
    with pytest.raises(RuntimeError, match=r"the second pass counts \[0\.5\], planned 0\.25"):
        check_passport(replace(run.composed.plan, residual_alpha=0.25), passport)
    shares = [row[f"part/MXErrors.{term}_share"] for term in ("scale", "dead_zone", "grid")]
    assert 1.2 < shares[0] < 2.2 and 0.005 < shares[1] < 0.05 and 0.5 < shares[2] < 1.0
    assert 1e-3 < row["part/AQN.sigma"] == pytest.approx(row["part/AQN.sigma_realized"], rel=0.2)


def test_metrics_are_those_of_the_quantized_weights_at_rollout_pushes() -> None:
    w, norm = matrix(8, 64), torch.ones(64)
    name, step = "model.layers.0.mlp.up_proj.weight", Step(index=0, total=2, seed=0)
    memory: dict[str, float] = {}
    sent = list(MXErrors().sync(iter([(name, w), ("model.norm.weight", norm)]), step, W4A4, {}, memory))
    assert sent[0][1] is w and sent[1][1] is norm
    error = fake_quantize(w, UP) - w
    expected = [float(e.square().sum() / error.square().sum()) for e in error_terms(w)]
    assert list(memory.values()) == pytest.approx(expected, rel=1e-4)
    memory.clear()
    list(MXErrors().sync(iter([(name, w)]), replace(step, purpose="eval"), W4A4, {}, memory))
    assert memory == {}


def test_another_4_bit_format_has_no_such_terms() -> None:
    """NVFP4 has the same elements, but blocks of 16 with scales that are no powers of two."""
    name, step = "model.layers.0.mlp.up_proj.weight", Step(index=0, total=2, seed=0)
    for fmt, terms in (("nvfp4", set()), ("mxfp4_rceil", {"scale_share", "dead_zone_share", "grid_share"})):
        memory: dict[str, float] = {}
        plan = Plan(rollout_weights=format_named(fmt))
        list(MXErrors().sync(iter([(name, matrix(8, 64))]), step, plan, {}, memory))
        assert set(memory) == terms


def test_noise_falls_from_a_hundredth_to_a_thousandth() -> None:
    noise = next(part for part in METHOD.parts if isinstance(part, AQN))
    sigmas = [noise.sigma(Step(index=i, total=100, seed=0)) for i in (0, 9, 99)]
    assert sigmas == pytest.approx([0.0, 1e-2, 1e-3])


def test_what_must_be_refused() -> None:
    for alpha in (-0.1, 1.5):
        with pytest.raises(ValueError, match=r"OutlierFallback\.alpha"):
            OutlierFallback(alpha=alpha)
    assert OutlierFallback(alpha=0.0).plan(Plan()) == Plan()
    assert OutlierFallback().plan(W4A4) == Plan(residual=1.0, residual_alpha=0.5)
    with pytest.raises(ValueError, match="OutlierFallback: the inputs are not rounded"):
        OutlierFallback().plan(Plan(rollout_weights=MBS))
    with pytest.raises(ValueError, match=r"residual_alpha: 0\.0 is no factor"):
        EmbeddedEngine(QWEN3, replace(W4A4, residual=1.0, residual_alpha=0.0), eos_id=EOS, pad_id=PAD)
    with pytest.raises(ValueError, match="format mxfp4_mbs has no checkpoint layout"):
        pack(quantize(golden(), MBS))
    with pytest.raises(ValueError, match=r"precision=int4: method mxfp4_rl cannot use it"):
        compose(small_config("method=mxfp4_rl", "precision=int4"))
    with pytest.raises(ValueError, match="engine=vllm"):
        check(small_config("method=mxfp4_rl", "engine=vllm", "model=xs128"))
