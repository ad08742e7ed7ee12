"""Metrics: golden values, identities, an independent quantile, buckets against a loop, and the table of names."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.foundation.seeds import generator
from harness.objective.loss import count_totals, policy_loss, start
from harness.objective.mismatch import (
    ENTROPY_EDGES,
    by_entropy,
    by_position,
    clip_metrics,
    correction_metrics,
    mismatch_metrics,
)
from harness.records.metric_names import FRAMEWORKS, METRICS, translate
from tests.loss_cases import Algo, assert_exact, assert_published, golden_batch, golden_logp, random_batch

GOLDEN = {
    "kl_k1": -0.038889, "kl_k2": 0.132961, "kl_k3": 0.166194, "kl_k3_reverse": 0.126206, "mult_prob_error": 1.505314,
    "train_ppl": 2.477093, "rollout_ppl": 2.489210, "ppl_ratio": 1.006910, "log_ppl_diff": -0.011111,
    "log_ppl_absdiff": 0.155556, "log_ppl_diff_max": 0.216667, "log_ppl_diff_min": -0.25, "chi2_token": 1.061921,
    "chi2_seq": 1.887196, "m2": 0.265922, "ess_token": 0.874100, "ess_token_raw": 0.704307, "ess_seq_raw": 0.691959,
    "prob_absdiff_mean": 0.072177, "prob_absdiff_max": 0.212200, "prob_absdiff_std": 0.072931, "prob_pearson": 0.930083,
    "is_mean": 1.058404, "is_max": 2.0, "is_min": 0.406570, "is_raw_max": 3.320117, "frac_high": 1 / 9,
    "frac_low": 1 / 9, "oob": 2 / 9, "logp_absdiff_mean": 0.31, "logp_absdiff_max": 1.2, "invalid_frac": 0.0,
}  # fmt: skip


def measured(
    old: Tensor, rollout: Tensor, mask: Tensor, cap: float = 2.0, entropy: Tensor | None = None
) -> dict[str, float]:
    """`mismatch_metrics` without the prefix."""
    found = mismatch_metrics(old, rollout, mask, cap=cap, entropy=entropy)
    return {name.removeprefix("mismatch/"): value for name, value in found.items()}


def test_golden_mismatch() -> None:
    batch = golden_batch()
    found = measured(batch.old_logp, batch.rollout_logp, batch.mask)
    for name, value in GOLDEN.items():
        assert_published(found[name], value, msg=lambda text, n=name: f"{n}: {text}")


def test_equal_policies() -> None:
    _, batch = random_batch("equal")
    found = measured(batch.old_logp, batch.old_logp, batch.mask, entropy=torch.rand(batch.mask.shape))
    zeros = {
        n for n in found if n.startswith(("kl_", "js", "chi2", "m2", "logp_abs", "prob_abs", "frac_", "oob", "inv"))
    }
    zeros |= {"log_ppl_diff", "log_ppl_absdiff", "log_ppl_diff_max", "log_ppl_diff_min", "is_std"}
    for name in zeros:
        assert found[name] == 0.0, name
    for name in found.keys() - zeros - {"entropy_corr"}:
        if "log_ppl" not in name and name not in ("train_ppl", "rollout_ppl"):
            assert_exact(found[name], 1.0)
    assert found["train_ppl"] == found["rollout_ppl"] > 1 and math.isnan(found["entropy_corr"])


def test_identities() -> None:
    _, batch = random_batch("identities", size=(40, 9))
    mask, d = batch.mask, (batch.old_logp - batch.rollout_logp)[batch.mask]
    found = measured(batch.old_logp, batch.rollout_logp, mask, cap=1.5)
    rho = d.exp()
    assert_exact(found["ess_token_raw"], (1 / (1 + rho.var(correction=0) / rho.mean() ** 2)).item())
    assert_exact(found["chi2_token"], rho.mean().item() ** 2 / found["ess_token_raw"] - 1)
    assert_exact(found["m2"], 2 * found["kl_k2"])
    assert_exact(found["is_std"], rho.clamp(max=1.5).std(correction=0).item())
    assert found["kl_k3"] >= 0 and found["kl_k2"] >= 0 and found["js"] >= 0
    assert_exact(found["js"], (d / 2).cosh().log().mean().item())
    middle = (0.5 * (batch.old_logp.exp() + batch.rollout_logp.exp())).log()
    nemo = [(x - middle)[mask] for x in (batch.old_logp, batch.rollout_logp)]
    assert_exact(found["js"], sum((0.5 * (a.exp() - a - 1)).mean() for a in nemo).item())  # pyright: ignore
    rows = zip(batch.old_logp - batch.rollout_logp, mask, strict=True)
    geometric = torch.stack([(-x[m].mean()).exp() for x, m in rows if m.any()])
    assert_exact(found["ppl_ratio"], geometric.mean().item())
    scaled = measured(batch.old_logp + 0.3, batch.rollout_logp, mask)
    assert_exact(scaled["ess_token_raw"], found["ess_token_raw"])


@pytest.mark.parametrize("count", [1, 2, 99, 100, 101, 1000, 2503])
def test_quantiles_are_sample_values(count: int) -> None:
    rng = generator("cpu", "quantile", count)
    old = -torch.rand(1, count, generator=rng, dtype=torch.float64)
    rollout = old + torch.randn(1, count, generator=rng, dtype=torch.float64)
    found = measured(old, rollout, torch.ones(1, count, dtype=torch.bool))
    sizes = (old - rollout).abs().numpy().ravel()
    for name, p in (("logp_absdiff_p99", 0.99), ("logp_absdiff_p999", 0.999)):
        assert_exact(found[name], float(np.quantile(sizes, p, method="inverted_cdf")))
    expected = float(np.corrcoef(old.exp(), rollout.exp())[0, 1]) if count > 1 else math.nan
    assert_exact(found["prob_pearson"], expected, equal_nan=True)


def test_entropy_correlation() -> None:
    _, batch = random_batch("correlation", size=(30, 9))
    entropy = torch.rand(batch.mask.shape, generator=generator("cpu", "entropy"))
    found = measured(batch.old_logp, batch.rollout_logp, batch.mask, entropy=entropy)
    size = (batch.old_logp - batch.rollout_logp)[batch.mask].abs()
    expected = np.corrcoef(size.numpy(), entropy[batch.mask].numpy())[0, 1]
    torch.testing.assert_close(found["entropy_corr"], float(expected), rtol=0, atol=1e-9)


def test_invalid_and_padding_entries_are_left_out() -> None:
    _, batch = random_batch("invalid")
    rollout = torch.where(batch.mask, batch.rollout_logp, math.nan)
    old = torch.where(batch.mask, batch.old_logp, math.inf)
    expected = measured(batch.old_logp, batch.rollout_logp, batch.mask)
    assert measured(old, rollout, batch.mask) == expected
    rollout[0, :3] = torch.tensor([math.nan, -math.inf, math.inf])
    found = measured(old, rollout, batch.mask)
    assert_exact(found["invalid_frac"], 3 / int(batch.mask.sum()))
    reduced = batch.mask.clone()
    reduced[0, :3] = False
    expected = measured(batch.old_logp, batch.rollout_logp, reduced)
    assert {n: v for n, v in found.items() if n != "invalid_frac"} == {
        n: v for n, v in expected.items() if n != "invalid_frac"
    }


def test_no_token_gives_nan_and_no_error() -> None:
    _, batch = random_batch("none")
    nothing = torch.zeros_like(batch.mask)
    found = measured(batch.old_logp, batch.rollout_logp, nothing)
    assert all(math.isnan(value) for value in found.values())
    found = measured(batch.old_logp, torch.full_like(batch.old_logp, math.nan), batch.mask)
    assert found.pop("invalid_frac") == 1.0 and all(math.isnan(value) for value in found.values())


def test_a_single_wild_token_overflows_nothing() -> None:
    _, batch = random_batch("wild")
    rollout = batch.rollout_logp.clone()
    rollout[0, 0], rollout[1, 0] = -1e30, 1e30
    found = measured(batch.old_logp, rollout, batch.mask)
    assert all(math.isfinite(v) for n, v in found.items() if n not in ("prob_absdiff_mean", "prob_absdiff_max",
               "prob_absdiff_std", "prob_pearson", "rollout_ppl", "train_ppl"))  # fmt: skip
    assert found["is_raw_max"] == math.exp(20)


@pytest.mark.parametrize("width", [1, 5, 64, 65, 200])
def test_by_position_equals_a_loop(width: int) -> None:
    _, batch = random_batch("position", width, size=(5, width))
    found = by_position(batch.old_logp, batch.rollout_logp, batch.mask)
    d = batch.old_logp - batch.rollout_logp
    starts = [int(x) for x in found["by_position/position"]]
    assert len(starts) <= 64 and starts[0] == 0
    step = starts[1] if len(starts) > 1 else width
    for i, first in enumerate(starts):
        some = d[:, first : first + step][batch.mask[:, first : first + step]]
        assert found["by_position/count"][i] == some.numel()
        expected = (some.exp() - some - 1).mean().item()
        assert_exact(found["by_position/k3"][i], expected, equal_nan=True)
        assert_exact(found["by_position/absdiff"][i], some.abs().mean().item(), equal_nan=True)


def test_by_entropy_equals_a_loop() -> None:
    _, batch = random_batch("bucket", size=(20, 9))
    entropy = 6 * torch.rand(batch.mask.shape, generator=generator("cpu", "bucket")) ** 4
    entropy[0, :3] = torch.tensor([0.0, 0.5, 1.0])
    found = by_entropy(batch.old_logp, batch.rollout_logp, batch.mask, entropy)
    d, ends = batch.old_logp - batch.rollout_logp, (*ENTROPY_EDGES[1:], math.inf)
    for i, (low, high) in enumerate(zip(ENTROPY_EDGES, ends, strict=True)):
        some = d[batch.mask & (entropy >= low) & (entropy < high)]
        assert found["by_entropy/count"][i] == some.numel()
        assert_exact(found["by_entropy/absdiff"][i], some.abs().mean().item(), equal_nan=True)
    assert sum(found["by_entropy/count"]) == int(batch.mask.sum())


def test_golden_update_metrics() -> None:
    batch, logp = golden_batch(), golden_logp()
    c = start(batch, 0.2, 0.2)
    _, sums = policy_loss(logp, batch, c, count_totals(batch.mask, c.keep, 4), Algo(), entropy=-logp.detach())
    found = clip_metrics({name: float(value) for name, value in sums.items()})
    expected = {
        "train/skew": 0.005479, "train/skew_total": -0.317292, "train/clip_low_frac": 1 / 9,
        "train/clip_high_frac": 2 / 9, "train/clip_frac": 3 / 9, "train/clip_dual_frac": 0.0, "train/ppo_kl": -0.05,
        "train/entropy": -logp.detach()[batch.mask].mean().item(),
    }  # fmt: skip
    for name, value in expected.items():
        assert_published(found[name], value)
    ratio = (logp.detach() - batch.old_logp)[batch.mask].exp()
    assert_exact(found["train/ess_ppo"], (ratio.sum() ** 2 / (9 * (ratio**2).sum())).item())
    assert_exact(found["train/skew_up"] + found["train/skew_down"], found["train/skew"])
    assert clip_metrics({"tokens": 0.0}) == {}


def test_dual_clip_fraction() -> None:
    batch = golden_batch()
    logp = (batch.old_logp + 1.2).requires_grad_()
    c = start(batch, 0.2, 0.2)
    _, sums = policy_loss(logp, batch, c, count_totals(batch.mask, c.keep, 4), Algo())
    found = clip_metrics({name: float(value) for name, value in sums.items()})
    assert_exact(found["train/clip_dual_frac"], 3 / 9)
    assert_exact(found["train/clip_high_frac"], 6 / 9)


def test_gspo_has_no_dual_clip_to_count() -> None:
    """Every ratio is exp(1.2) = 3.32, above the dual clip of 3, which GSPO has not."""
    batch = golden_batch()
    logp = (batch.old_logp + 1.2).requires_grad_()
    c = start(batch, 0.2, 0.2)
    loss, sums = policy_loss(logp, batch, c, count_totals(batch.mask, c.keep, 4), Algo(loss="gspo"))
    found = clip_metrics({name: float(value) for name, value in sums.items()})
    assert found["train/clip_dual_frac"] == 0.0
    assert_exact(loss.item(), (-1.2 + math.exp(1.2) - 0.5 * 1.2) / 3)


def test_correction_metrics() -> None:
    batch = golden_batch()
    c = start(batch, 0.2, 0.2)
    keep = c.keep.clone()
    keep[2], keep[0, 0] = False, False
    weight = torch.where(batch.mask, (batch.old_logp - batch.rollout_logp).exp(), math.nan)
    weight = torch.where((weight >= 0.5) & (weight <= 2.0), weight, 0.0)
    found = correction_metrics(replace(c, weight=weight, keep=keep, clip_high=c.clip_high + 1), batch.mask)
    assert_published(found["correction/ess"], 0.764198)
    assert_exact(found["correction/zero_frac"], 2 / 9)
    assert_exact(found["correction/token_kept_frac"], 6 / 9)
    assert_exact(found["correction/seq_kept_frac"], 2 / 3)
    assert_exact(found["correction/clip_high_max"], 2.2)
    assert found["correction/weight_max"] == weight[batch.mask].max() and found["correction/weight_min"] == 0.0
    assert_exact(found["correction/weight_std"], weight[batch.mask].std(correction=0).item())


def test_every_name_is_in_the_table_and_back() -> None:
    batch, logp = golden_batch(), golden_logp()
    c = start(batch, 0.2, 0.2)
    batch = replace(batch, extras={"ref_logp": batch.old_logp})
    _, sums = policy_loss(logp, batch, c, count_totals(batch.mask, c.keep, 4), Algo(kl_coef=0.1), entropy=logp.detach())
    old, rollout = batch.old_logp, batch.rollout_logp
    produced = mismatch_metrics(old, rollout, batch.mask, cap=2.0, entropy=-rollout) | correction_metrics(c, batch.mask)
    produced |= clip_metrics({name: float(value) for name, value in sums.items()})
    names = {*produced, *by_position(old, rollout, batch.mask), *by_entropy(old, rollout, batch.mask, -rollout)}
    elsewhere = {
        "train/loss", "train/grad_norm", "train/loss_scale", "train/skipped", "train/lr", "train/lr_factor",
        "train/router_shift",
    }  # fmt: skip
    ours = ("mismatch/", "correction/", "train/", "by_position/", "by_entropy/")
    assert names == {name for name in METRICS if name.startswith(ours)} - elsewhere
    assert all(m.name == name and m.definition and m.unit for name, m in METRICS.items())


def test_translation() -> None:
    rows = {row["ours"]: row for row in translate()}
    assert set(rows) <= set(METRICS)
    assert rows["mismatch/kl_k3"] == {
        "ours": "mismatch/kl_k3", "verl": "rollout_corr/k3_kl", "TRL": "", "NeMo-RL": "train/gen_kl_error",
        "slime": "train/mis_k3_kl", "prime-rl": "mismatch_kl/mean",
    }  # fmt: skip
    for row in rows.values():
        assert tuple(row) == ("ours", *FRAMEWORKS) and any(row[name] for name in FRAMEWORKS)
