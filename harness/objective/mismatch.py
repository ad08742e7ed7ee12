"""Numbers logged at every step: how far the sampler is from the trainer, what a correction did, what an update did.

The mismatch set is computed from raw log-probs over the original mask, also when nothing is corrected. Everything runs
in float64 and leaves the device in one transfer. Names, units and other frameworks' names: `metric_names.py`.
Left out: full-vocabulary divergences, which need both logit tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from harness.api import Correction, TokenBatch
from harness.objective.loss import bounded, log_ratio

POSITION_BUCKETS = 64
ENTROPY_EDGES = (0.0, 0.001, 0.01, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Lower edges of the entropy buckets, nats; the last bucket is open."""
PROFILE_EVERY = 5
"""Steps between profiles of the mismatch over positions and entropies."""
METRIC_CAP = 2.0
"""Cap of the truncated metrics, whatever a method's own cap is, so that runs compare."""

_MEANS = ("kl_k1", "kl_k2", "kl_k3", "kl_k3_reverse", "js", "logp_absdiff_mean", "prob_absdiff_mean", "mult_prob_error")
_RATIOS = ("rho", "rho_sq", "weight", "weight_sq", "frac_high", "frac_low")
_EXTREMES = ("logp_absdiff_max", "logp_absdiff_p99", "logp_absdiff_p999", "prob_absdiff_max", "d_max", "d_min")
_SEQUENCES = ("train_ppl", "rollout_ppl", "train_log_ppl", "rollout_log_ppl", "log_ppl_diff", "log_ppl_absdiff")
_PRODUCTS = (
    "ppl_ratio",
    "seq_rho",
    "seq_rho_sq",
    "seq_weight",
    "seq_weight_sq",
    "log_ppl_diff_max",
    "log_ppl_diff_min",
)
_PAIRS = ("prob_var", "rollout_prob_var", "prob_cov", "prob_absdiff_var", "entropy_var", "absdiff_var", "entropy_cov")
_LOGGED = (*_MEANS, *_EXTREMES[:4], "frac_high", "frac_low", *_SEQUENCES, "ppl_ratio", *_PRODUCTS[5:])
_DERIVED = (
    "invalid_frac", "m2", "chi2_token", "chi2_seq", "ess_token_raw", "ess_token", "ess_seq_raw", "ess_seq", "is_mean",
    "is_std", "is_min", "is_max", "is_raw_mean", "is_raw_max", "oob", "prob_absdiff_std", "prob_pearson",
)  # fmt: skip


def batch_mismatch(batch: TokenBatch, entropy: Tensor) -> dict[str, Any]:
    """Mismatch metrics of a rollout batch before any update; at every `PROFILE_EVERY`th step also its profiles.

    entropy [B, T] nats of the trainer, no gradient.
    """
    logps = (batch.old_logp, batch.rollout_logp, batch.mask)
    found: dict[str, Any] = mismatch_metrics(*logps, cap=METRIC_CAP, entropy=entropy)
    if batch.step.index % PROFILE_EVERY == 0:
        found |= by_position(*logps) | by_entropy(*logps, entropy)
    return found


@torch.no_grad()
def staleness_metrics(batch: TokenBatch, stale_logp: Tensor) -> dict[str, float]:
    """k3 of a stale rollout batch in its two parts, over the valid tokens of its mask; NaN without one.

    stale_logp [B, T] nats: the weights that sampled, in the trainer's format. d = old - rollout is the sum of what
    steps did to the trainer (old - stale) and of what the format does at equal weights (stale - rollout). Responses
    come from the sampler, so the first part is an estimate of KL(stale || old) as far as the second is small.
    """
    valid = batch.valid & torch.isfinite(stale_logp)
    index = valid.flatten().nonzero().squeeze(-1)
    old, stale, rollout = (x.take(index).double() for x in (batch.old_logp, stale_logp, batch.rollout_logp))
    gaps = (log_ratio(old, stale), log_ratio(stale, rollout))
    values = torch.stack([(torch.expm1(d) - d).mean() for d in gaps]).tolist()
    return dict(zip(("staleness/kl_k3", "staleness/format_kl_k3"), values, strict=True))


@torch.no_grad()
def mismatch_metrics(
    old_logp: Tensor, rollout_logp: Tensor, mask: Tensor, *, cap: float, entropy: Tensor | None = None
) -> dict[str, float]:
    """The canonical mismatch set of one rollout batch, names prefixed `mismatch/`.

    old_logp, rollout_logp [B, T] float nats, mask [B, T] bool; cap > 1 truncates the weights and sets the tail
    thresholds cap and 1/cap; entropy [B, T] nats of the trainer adds its correlation with |d|, d = old - rollout.
    Tokens of the mask without two finite log-probs are left out and counted in `invalid_frac`; with no token left every
    other value is NaN. Quantiles of |d| are sample values: the smallest that p of the tokens do not exceed.
    Definitions and sources: `metric_names.METRICS`.
    """
    valid = mask & torch.isfinite(old_logp - rollout_logp)
    num_masked, num = torch.stack([mask.sum(), valid.sum()]).tolist()
    names = (*_LOGGED, *_DERIVED, *(("entropy_corr",) if entropy is not None else ()))
    if num == 0:
        empty = dict.fromkeys((f"mismatch/{name}" for name in names), math.nan)
        return empty | {"mismatch/invalid_frac": 1.0 if num_masked else math.nan}
    index = valid.flatten().nonzero().squeeze(-1)
    old, rollout = old_logp.take(index).double(), rollout_logp.take(index).double()
    token = _token_statistics(old, rollout, cap, None if entropy is None else entropy.take(index).double())
    sequence = _sequence_statistics(old_logp, rollout_logp, valid, cap)
    values = torch.cat([token, sequence]).tolist()
    keys: list[str] = [*_MEANS, *_RATIOS, *_EXTREMES, *_PAIRS, *_SEQUENCES, *_PRODUCTS]
    x = dict(zip(keys, values, strict=True))
    x["invalid_frac"] = 1.0 - num / num_masked
    x["m2"] = 2.0 * x["kl_k2"]
    x["chi2_token"] = x["rho_sq"] - 1.0
    x["chi2_seq"] = x["seq_rho_sq"] - 1.0
    x["ess_token_raw"] = x["rho"] ** 2 / x["rho_sq"]
    x["ess_token"] = x["weight"] ** 2 / x["weight_sq"]
    x["ess_seq_raw"] = x["seq_rho"] ** 2 / x["seq_rho_sq"]
    x["ess_seq"] = x["seq_weight"] ** 2 / x["seq_weight_sq"]
    x["is_mean"] = x["weight"]
    x["is_std"] = math.sqrt(max(x["weight_sq"] - x["weight"] ** 2, 0.0))
    x["is_raw_mean"], x["is_raw_max"] = x["rho"], math.exp(x["d_max"])
    x["is_min"], x["is_max"] = min(math.exp(x["d_min"]), cap), min(x["is_raw_max"], cap)
    x["oob"] = x["frac_high"] + x["frac_low"]
    x["prob_absdiff_std"] = math.sqrt(x["prob_absdiff_var"] * num / (num - 1)) if num > 1 else math.nan
    x["prob_pearson"] = _correlation(x["prob_cov"], x["prob_var"], x["rollout_prob_var"])
    x["entropy_corr"] = _correlation(x["entropy_cov"], x["entropy_var"], x["absdiff_var"])
    return {f"mismatch/{name}": x[name] for name in names}


def _correlation(covariance: float, variance: float, other: float) -> float:
    return covariance / math.sqrt(variance * other) if variance > 0 and other > 0 else math.nan


def _token_statistics(old: Tensor, rollout: Tensor, cap: float, entropy: Tensor | None) -> Tensor:
    """[N] float64 each -> the values named by _MEANS, _RATIOS, _EXTREMES and _PAIRS, in that order."""
    d = log_ratio(old, rollout)
    size = d.abs()
    growth, shrink = torch.expm1(d), torch.expm1(-d)
    rho = growth + 1.0
    weight = rho.clamp(max=cap)
    # NeMo-RL's k3 terms of both policies against their mean sum to log cosh(d / 2)
    js = torch.log1p(2.0 * torch.sinh(0.25 * d).square())
    p, p_rollout = old.exp(), rollout.exp()
    prob_diff = (p - p_rollout).abs()
    rows = [-d, 0.5 * d * d, growth - d, shrink + d, js, size, prob_diff, torch.maximum(growth, shrink) + 1.0]
    rows += [rho, rho * rho, weight, weight * weight, (rho > cap).double(), (rho < 1.0 / cap).double()]
    means = torch.stack(rows).mean(1)
    n = d.numel()
    tail = size.topk(n - math.ceil(0.99 * n) + 1).values
    extremes = torch.stack(
        [(old - rollout).abs().max(), tail[-1], tail[n - math.ceil(0.999 * n)], prob_diff.max(), d.max(), d.min()]
    )
    pairs = torch.stack([p, p_rollout, prob_diff, size, torch.zeros_like(d) if entropy is None else entropy])
    pairs = pairs - pairs.mean(1, keepdim=True)
    c = pairs @ pairs.T / n
    spread = torch.stack([c[0, 0], c[1, 1], c[0, 1], c[2, 2], c[4, 4], c[3, 3], c[3, 4]])
    return torch.cat([means, extremes, spread])


def _sequence_statistics(old_logp: Tensor, rollout_logp: Tensor, valid: Tensor, cap: float) -> Tensor:
    """Values named by _SEQUENCES and _PRODUCTS over the sequences with a valid token; sums of log-ratios clamped."""
    lengths = valid.sum(-1)
    used = lengths > 0
    n = lengths[used]
    old_sum = torch.where(valid, old_logp, 0.0).double().sum(-1)[used]
    rollout_sum = torch.where(valid, rollout_logp, 0.0).double().sum(-1)[used]
    product = torch.where(valid, old_logp.double() - rollout_logp.double(), 0.0).sum(-1)[used]
    log_train, log_rollout = -old_sum / n, -rollout_sum / n
    gap = -product / n
    rho = bounded(product).exp()
    weight = rho.clamp(max=cap)
    rows = [log_train.exp(), log_rollout.exp(), log_train, log_rollout, gap, gap.abs()]
    rows += [bounded(gap).exp(), rho, rho * rho, weight, weight * weight]
    return torch.cat([torch.stack(rows).mean(1), torch.stack([gap.max(), gap.min()])])


@torch.no_grad()
def by_position(old_logp: Tensor, rollout_logp: Tensor, mask: Tensor) -> dict[str, list[float]]:
    """Mismatch along the response. [B, T] each -> lists over at most 64 buckets of equal width, ceil(T / 64) positions.

    Names have the prefix `by_position/`. position: first position of the bucket, from 0; k3: mean exp(d) - d - 1;
    absdiff: mean |d|, nats; count: tokens. An empty bucket has NaN means. The column is the position.
    """
    width = -(-mask.shape[1] // POSITION_BUCKETS)
    index = torch.arange(mask.shape[1], device=mask.device) // width
    num = -(-mask.shape[1] // width)
    buckets = _bucketed(old_logp, rollout_logp, mask, index.expand(mask.shape), num)
    starts = [float(i * width) for i in range(num)]
    return {f"by_position/{name}": values for name, values in {"position": starts, **buckets}.items()}


@torch.no_grad()
def by_entropy(old_logp: Tensor, rollout_logp: Tensor, mask: Tensor, entropy: Tensor) -> dict[str, list[float]]:
    """Mismatch against the trainer's entropy [B, T], nats, in buckets with the lower edges `ENTROPY_EDGES`.

    Names have the prefix `by_entropy/`. entropy: lower edge of the bucket; k3, absdiff, count as in `by_position`.
    """
    edges = torch.tensor(ENTROPY_EDGES[1:], dtype=entropy.dtype, device=entropy.device)
    buckets = _bucketed(old_logp, rollout_logp, mask, torch.bucketize(entropy, edges, right=True), len(ENTROPY_EDGES))
    return {f"by_entropy/{name}": values for name, values in {"entropy": list(ENTROPY_EDGES), **buckets}.items()}


def _bucketed(old_logp: Tensor, rollout_logp: Tensor, mask: Tensor, index: Tensor, num: int) -> dict[str, list[float]]:
    valid = mask & torch.isfinite(old_logp - rollout_logp)
    d = log_ratio(old_logp[valid].double(), rollout_logp[valid].double())
    rows = torch.stack([torch.expm1(d) - d, d.abs(), torch.ones_like(d)])
    sums = torch.zeros(3, num, dtype=d.dtype, device=d.device).index_add(1, index[valid], rows)
    means = (sums[:2] / sums[2]).tolist()
    return {"k3": means[0], "absdiff": means[1], "count": sums[2].tolist()}


@torch.no_grad()
def correction_metrics(c: Correction, mask: Tensor) -> dict[str, float]:
    """Metrics of a correction's effect on a batch, over the original mask [B, T] bool; names prefixed `correction/`.

    Weights are those before rejection, a rejected token's counted with the rest, so `ess` is verl's
    rollout_is_eff_sample_size; `kept_weight_mean` and `kept_ess` are of the weights that reach the loss, NaN where
    nothing is kept. std is the population's.
    """
    weight = torch.where(torch.isfinite(c.weight), c.weight, 0.0)[mask].double()
    if weight.numel() == 0:
        return {}
    kept = c.keep & mask
    inside = kept[mask].double()
    rows = torch.stack([weight, weight * weight, (weight == 0).double(), weight * inside, weight * weight * inside])
    tokens, sequences = kept.double().sum() / mask.sum(), kept.any(-1).double().sum() / mask.any(-1).sum()
    ends = torch.stack([weight.min(), weight.max(), tokens, sequences, c.clip_high[mask].max().double()])
    moments = torch.cat([rows.mean(1), ends]).tolist()
    mean, square, zero, kept_mean, kept_square, low, high, token_frac, seq_frac, clip_high = moments
    return {
        "correction/weight_mean": mean,
        "correction/weight_std": math.sqrt(max(square - mean * mean, 0.0)),
        "correction/weight_min": low,
        "correction/weight_max": high,
        "correction/ess": mean * mean / square if square > 0 else math.nan,
        "correction/kept_weight_mean": kept_mean / token_frac if token_frac else math.nan,
        "correction/kept_ess": kept_mean * kept_mean / (kept_square * token_frac) if kept_square > 0 else math.nan,
        "correction/zero_frac": zero,
        "correction/token_kept_frac": token_frac,
        "correction/seq_kept_frac": seq_frac,
        "correction/clip_high_max": clip_high,
    }


def clip_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Means from the sums of `loss.policy_loss`, added over the micro-batches of an update, as floats; prefix `train/`.

    Fractions and means are per token of the mask. ess_ppo is the effective sample size of the policy ratio R: drift of
    the policy within the batch, not precision. skew is the mean of -(R - 1) A, split by the sign of A; skew_total takes
    current over sampler in place of R.
    """
    x = dict(sums)
    n = x.pop("tokens")
    if n == 0:
        return {}
    ratio, ratio_sq = x.pop("ratio"), x.pop("ratio_sq")
    mean = {name: value / n for name, value in x.items()}
    out = {"ratio_mean": ratio / n, "ess_ppo": ratio**2 / (n * ratio_sq)}
    out |= {name: mean[name] for name in ("ppo_kl", "kl_ref", "entropy") if name in mean}
    for name in ("skew", "skew_total"):
        out[name] = mean[f"{name}_up"] + mean[f"{name}_down"]
        out[f"{name}_up"], out[f"{name}_down"] = mean[f"{name}_up"], mean[f"{name}_down"]
    if "clip_low" in mean:
        out["clip_frac"] = mean["clip_low"] + mean["clip_high"]
        out |= {f"{name}_frac": mean[name] for name in ("clip_low", "clip_high", "clip_dual")}
    return {f"train/{name}": value for name, value in out.items()}
