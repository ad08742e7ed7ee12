"""From log-probabilities to one scalar: surrogates, regularisers, aggregation with global denominators.

A surrogate is a [B, T] matrix to minimise, before the correction weight; `policy_loss` multiplies the weight once,
after the clip and the dual clip, drops what the correction rejected and aggregates. Denominators are arguments,
counted over the whole optimizer batch, so the split into micro-batches or ranks cannot change the sum. Padding is
removed by selection, never by multiplication, so it may hold NaN. Left out: the weights and masks themselves, which are
`Part`s of methods.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from harness.api import Correction, Part, TokenBatch

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +-20 before exp, as in verl; GSPO's is only capped."""
GSPO_LOG_RATIO_MAX = 10.0
LOSSES = ("ppo", "gspo", "cispo", "reinforce")
MODES = ("decoupled", "bypass_ppo", "bypass_pg")
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
KL_KINDS = ("k1", "k2", "k3", "k3_is")


class Algorithm(Protocol):
    """Fields of the algorithm's configuration that `policy_loss` reads."""

    @property
    def loss(self) -> str: ...
    @property
    def mode(self) -> str: ...
    @property
    def dual_clip(self) -> float | None: ...
    @property
    def agg(self) -> str: ...
    @property
    def denom(self) -> str: ...
    @property
    def kl_coef(self) -> float: ...
    @property
    def kl_type(self) -> str: ...
    @property
    def entropy_coef(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Denominators of one whole optimizer batch, over all micro-batches and ranks."""

    num_tokens: int
    """Tokens of the mask."""
    num_sequences: int
    """Sequences with at least one token of the mask."""
    num_kept_tokens: int
    num_kept_sequences: int
    max_len: int
    """The constant L of Dr.GRPO: the maximum response length, not the padded width."""
    dp_size: int = 1
    """Ranks whose gradients are averaged; multiplies the loss to cancel that."""


def count_totals(mask: Tensor, keep: Tensor, max_len: int) -> Totals:
    """Count `Totals` of one rank over a whole optimizer batch. mask, keep [B, T] bool; `max_len` tokens."""
    kept = mask & keep
    counts = torch.stack([mask.sum(), mask.any(-1).sum(), kept.sum(), kept.any(-1).sum()]).tolist()
    names = ("num_tokens", "num_sequences", "num_kept_tokens", "num_kept_sequences")
    return Totals(**dict(zip(names, counts, strict=True)), max_len=max_len)


def start(batch: TokenBatch, eps_low: float, eps_high: float) -> Correction:
    """The correction that changes nothing: weight 1, keep = mask, fixed clips; every field [B, T], no gradient.

    A valid token without a finite sampler log-prob is not kept (AReaL and NeMo-RL set its ratio to 0).
    """
    ones = torch.ones_like(batch.rollout_logp)
    keep = batch.mask & torch.isfinite(batch.rollout_logp)
    return Correction(weight=ones, keep=keep, clip_low=ones * (1.0 - eps_low), clip_high=ones * (1.0 + eps_high))


def cleaned(logp: Tensor, batch: TokenBatch, c: Correction) -> tuple[Tensor, TokenBatch, Correction]:
    """Inputs with 0 where a token does not count; a token counts if it is in the mask and has a finite sampler
    log-prob. `mask` and `keep` shrink to those tokens. Only `logp` keeps its gradient, exactly 0 where replaced. The
    advantage comes back with its shift, which the correction then no longer holds.
    """
    usable = batch.mask & torch.isfinite(batch.rollout_logp)

    def select(x: Tensor) -> Tensor:
        return torch.where(usable, x.detach(), 0.0)

    old, rollout, adv = select(batch.old_logp), select(batch.rollout_logp), select(batch.adv)
    if c.adv_shift is not None:
        adv = adv + select(c.adv_shift)
    clean = replace(batch, mask=usable, adv=adv, rollout_logp=rollout, old_logp=old)
    low, high = select(c.clip_low), select(c.clip_high)
    correction = Correction(weight=select(c.weight), keep=usable & c.keep, clip_low=low, clip_high=high)
    return torch.where(usable, logp, 0.0), clean, correction


def bounded(log_ratio: Tensor) -> Tensor:
    """Log-ratios of any shape, clamped to +-20; sums are clamped after summing (verl)."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def log_ratio(logp: Tensor, other: Tensor) -> Tensor:
    """logp - other, clamped to +-20. Shapes and gradients as the arguments."""
    return bounded(logp - other)


def clipped_surrogate(logp: Tensor, old_logp: Tensor, adv: Tensor, c: Correction, *, dual_clip: float | None) -> Tensor:
    """PPO's pessimistic clip with optional dual clip, before the weight (verl compute_policy_loss_vanilla).

    logp [B, T] with gradient; old_logp, adv [B, T] and c's clips constants -> [B, T]. With R = exp(logp - old_logp):
    max(-A R, -A clip(R, low, high)), and for A < 0 at most -A * dual_clip.
    """
    return _pessimistic(log_ratio(logp, old_logp).exp(), adv, c, dual_clip)


def _pessimistic(ratio: Tensor, adv: Tensor, c: Correction, dual_clip: float | None) -> Tensor:
    loss = torch.maximum(-adv * ratio, -adv * torch.clamp(ratio, c.clip_low, c.clip_high))
    if dual_clip is None:
        return loss
    return torch.where(adv < 0, torch.minimum(loss, -adv * dual_clip), loss)


def _sequence_carrier(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """Log-ratio of GSPO (arXiv 2507.18071), [B, T]: all tokens of a sequence carry its length-normalised ratio s and
    clip together: logp - sg[logp] + sg[log s], at most 10 (verl). The paper's clips: 3e-4 and 4e-4."""
    held = logp.detach()
    return (logp - held + mean_log_ratio(held, old_logp, mask)).clamp(max=GSPO_LOG_RATIO_MAX)


def mean_log_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """[B, 1] nats: mean of logp - old_logp over the mask, 0 for an empty row."""
    return (torch.where(mask, logp - old_logp, 0.0).sum(-1) / mask.sum(-1).clamp(min=1))[:, None]


def cispo(logp: Tensor, old_logp: Tensor, adv: Tensor, c: Correction) -> Tensor:
    """-sg[clip(R, low, high)] A logp (CISPO, arXiv 2506.13585), before the weight; [B, T]. No gradient is ever cut."""
    ratio = log_ratio(logp.detach(), old_logp).exp()
    return -torch.clamp(ratio, c.clip_low, c.clip_high) * adv * logp


def reinforce(logp: Tensor, adv: Tensor) -> Tensor:
    """-A logp, [B, T], before the weight. Only its gradient means something; the value is not for monitoring."""
    return -adv * logp


def kl_penalty(logp: Tensor, ref_logp: Tensor, kind: str, log_ratio: Tensor | None = None) -> Tensor:
    """KL to the reference per token, [B, T] nats, with x = logp - ref_logp (verl kl_penalty).

    k1 x; k2 x^2/2; k3 exp(-x) + x - 1 with x clamped to +-20 and the result to +-10; k3_is the policy ratio times k3
    without the second clamp, with gradient through both (DeepSeek-V3.2, arXiv 2512.02556 eq. 7): its gradient is ratio
    times x, whose mean under the old policy is that of the KL itself.

    log_ratio, for k3_is alone: [B, T] or [B, 1] nats with gradient, current over old policy. Raises ValueError for
    another kind, and for k3_is without it.
    """
    x = logp - ref_logp
    if kind == "k1":
        return x
    if kind == "k2":
        return 0.5 * x.square()
    if kind not in KL_KINDS:
        raise ValueError(f"kl_type: unknown {kind!r} (choose {', '.join(KL_KINDS)})")
    near = bounded(x)
    k3 = torch.exp(-near) + near - 1.0
    if kind == "k3":
        return k3.clamp(-10.0, 10.0)
    if log_ratio is None:
        raise ValueError("kl_type: k3_is needs the log-ratio of the current to the old policy")
    return log_ratio.exp() * k3


def aggregate(
    ell: Tensor, mask: Tensor, keep: Tensor, totals: Totals, *, agg: str, denom: str = "original",
    summed: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Sum of a token matrix, as its share of the optimizer batch's loss (verl agg_loss, with every denominator global).

    ell [b, T] float with gradient, mask and keep [b, T] bool -> scalar. The numerator is the kept tokens, or those of
    `summed` [b, T] bool; `denom` says what denominators count: "original" the mask (rejection shrinks the update),
    "kept" the kept tokens. A sequence without a counted token does not count. Raises ValueError for another `agg` or
    `denom`.
    """
    if denom not in ("original", "kept"):
        raise ValueError(f"denom: unknown {denom!r} (choose original, kept)")
    effective = mask & keep
    x = torch.where(effective if summed is None else summed, ell, 0.0)
    counted, num_tokens, num_sequences = mask, totals.num_tokens, max(totals.num_sequences, 1)
    if denom == "kept":
        counted, num_tokens, num_sequences = effective, totals.num_kept_tokens, max(totals.num_kept_sequences, 1)
    if agg == "token-mean":
        return x.sum() * (totals.dp_size / max(num_tokens, 1))
    if agg == "token-sum":
        return x.sum() * totals.dp_size
    if agg == "seq-mean-token-sum":
        return x.sum() * (totals.dp_size / num_sequences)
    if agg == "seq-mean-token-sum-norm":
        return x.sum() * (totals.dp_size / num_sequences / totals.max_len)
    if agg == "seq-mean-token-mean":
        return (x.sum(-1) / counted.sum(-1).clamp(min=1)).sum() * (totals.dp_size / num_sequences)
    raise ValueError(f"agg: unknown {agg!r} (choose {', '.join(AGGREGATIONS)})")


def batch_normalize(weight: Tensor, mask: Tensor, level: Literal["token", "sequence"]) -> Tensor:
    """Divide weights by their mean over the whole batch, after truncation (verl, slime). weight [B, T] -> [B, T].

    token: mean over the tokens of the mask; sequence: every non-empty sequence counts once, with its mean weight.
    Non-finite entries do not count. Nothing changes where the mean is at most 1e-8. Never call it on a micro-batch.
    Raises ValueError for another level.
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"batch normalization level: unknown {level!r} (choose token, sequence)")
    counted = mask & torch.isfinite(weight)
    total = torch.where(counted, weight, 0.0)
    if level == "token":
        mean = total.sum() / counted.sum().clamp(min=1)
    else:
        lengths = counted.sum(-1)
        mean = (total.sum(-1) / lengths.clamp(min=1)).sum() / (lengths > 0).sum().clamp(min=1)
    return torch.where(mean > 1e-8, weight / mean, weight)


def policy_loss(
    logp: Tensor,
    batch: TokenBatch,
    c: Correction,
    totals: Totals,
    algo: Algorithm,
    *,
    part_loss: Tensor | None = None,
    owns_objective: bool = False,
    entropy: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """One micro-batch's share of the loss, and sums for the clip metrics.

    logp [b, T] float32 with gradient; batch and c of the same rows -> (scalar, {name: detached 0-d sum}). Summed over
    the micro-batches of an optimizer batch it is the full loss. bypass_pg takes -A logp weight whatever `algo.loss` is;
    bypass_ppo is the same surrogate, the trainer having put the sampler's log-probs in `old_logp`. GSPO aggregates by
    seq-mean-token-mean. `part_loss` [b, T] (from `cleaned` inputs) replaces the surrogate; where `owns_objective`, it
    has weight and keep in it. The KL term (extras["ref_logp"]) and the entropy bonus run over the whole mask.
    Raises ValueError for an unknown mode, loss, aggregation, denominator or KL, and for a KL term without the
    reference's log-probs or an entropy bonus without an entropy that has a gradient.
    """
    if algo.mode not in MODES:
        raise ValueError(f"mode: unknown {algo.mode!r} (choose {', '.join(MODES)})")
    mask = batch.mask
    logp, batch, clean = cleaned(logp, batch, c)
    ell, log_r = _surrogate(logp, batch, clean, algo)
    is_clipped = part_loss is None and algo.loss in ("ppo", "gspo") and algo.mode != "bypass_pg"
    dual_clip = algo.dual_clip if algo.loss == "ppo" else None  # GSPO has none
    sums = _update_sums(log_r.detach(), logp.detach(), batch, clean, dual_clip, is_clipped)
    if part_loss is not None:
        ell = part_loss
    agg = "seq-mean-token-mean" if is_clipped and algo.loss == "gspo" else algo.agg
    if owns_objective:
        loss = aggregate(ell, mask, clean.keep, totals, agg=agg, denom=algo.denom, summed=batch.mask)
    else:
        loss = aggregate(ell * clean.weight, mask, clean.keep, totals, agg=agg, denom=algo.denom)
    if algo.kl_coef:
        if "ref_logp" not in batch.extras:
            raise ValueError(f"kl_coef: {algo.kl_coef} needs the reference's log-probs, extras['ref_logp']")
        ref_logp = torch.where(batch.mask, batch.extras["ref_logp"], 0.0)
        kl = kl_penalty(logp, ref_logp, algo.kl_type, kl_log_ratio(logp, batch, algo))
        sums["kl_ref"] = torch.where(batch.mask, kl.detach(), 0.0).sum()
        loss = loss + algo.kl_coef * aggregate(kl, mask, batch.mask, totals, agg=agg)
    if entropy is not None:
        sums["entropy"] = torch.where(batch.mask, entropy.detach(), 0.0).sum()
    if algo.entropy_coef:
        if entropy is None or not entropy.requires_grad:
            raise ValueError(f"entropy_coef: {algo.entropy_coef} needs an entropy with gradient")
        loss = loss - algo.entropy_coef * aggregate(entropy, mask, batch.mask, totals, agg=agg)
    return loss, sums


def kl_log_ratio(logp: Tensor, batch: TokenBatch, algo: Algorithm) -> Tensor:
    """Log of the ratio that k3_is multiplies by, nats with gradient: of the current policy to `batch.old_logp`, per
    token [b, T], under GSPO the length-normalised one of the sequence, [b, 1] (TRL's use_bias_correction_kl)."""
    if algo.loss == "gspo" and algo.mode != "bypass_pg":
        return mean_log_ratio(logp, batch.old_logp, batch.mask).clamp(max=GSPO_LOG_RATIO_MAX)
    return log_ratio(logp, batch.old_logp)


def part_loss(part: Part, logp: Tensor, b: TokenBatch, c: Correction) -> Tensor | None:
    """The part's own objective [b, T] on inputs whose padding is neutral. Raises ValueError for another shape."""
    logp, b, c = cleaned(logp, b, c)
    loss = part.token_loss(logp, c, b)
    if loss is not None and loss.shape != b.mask.shape:
        raise ValueError(
            f"{type(part).__name__}.token_loss returned shape {[*loss.shape]}; "
            f"expected {[*b.mask.shape]} (responses, tokens)"
        )
    return loss


def normalized(c: Correction, b: TokenBatch, level: Literal["none", "token", "sequence"]) -> Correction:
    """The correction with weights over their mean of the valid tokens, last of all (losses.md section 6.9)."""
    return c if level == "none" else replace(c, weight=batch_normalize(c.weight, b.valid, level))


def _surrogate(logp: Tensor, b: TokenBatch, c: Correction, algo: Algorithm) -> tuple[Tensor, Tensor]:
    """(token loss before the weight, log-ratio that the clip sees) of cleaned inputs, [b, T] each."""
    log_r = log_ratio(logp, b.old_logp)
    if algo.mode == "bypass_pg" or algo.loss == "reinforce":
        return reinforce(logp, b.adv), log_r
    if algo.loss == "ppo":
        return clipped_surrogate(logp, b.old_logp, b.adv, c, dual_clip=algo.dual_clip), log_r
    if algo.loss == "gspo":
        log_r = _sequence_carrier(logp, b.old_logp, b.mask)
        return _pessimistic(log_r.exp(), b.adv, c, None), log_r
    if algo.loss == "cispo":
        return cispo(logp, b.old_logp, b.adv, c), log_r
    raise ValueError(f"loss: unknown {algo.loss!r} (choose {', '.join(LOSSES)})")


@torch.no_grad()
def _update_sums(
    log_r: Tensor, logp: Tensor, b: TokenBatch, c: Correction, dual_clip: float | None, is_clipped: bool
) -> dict[str, Tensor]:
    """Sums over the tokens of cleaned inputs, where every other entry has log-ratio and advantage 0."""
    ratio = log_r.exp()
    counted = torch.where(b.mask, ratio, 0.0)
    is_up, is_down = b.adv > 0, b.adv < 0
    skew = (1.0 - ratio) * b.adv
    skew_total = (1.0 - log_ratio(logp, b.rollout_logp).exp()) * b.adv
    sums = {
        "tokens": b.mask.sum(),
        "ppo_kl": (b.old_logp - logp).sum(),
        "ratio": counted.sum(),
        "ratio_sq": counted.square().sum(),
        "skew_up": torch.where(is_up, skew, 0.0).sum(),
        "skew_down": torch.where(is_down, skew, 0.0).sum(),
        "skew_total_up": torch.where(is_up, skew_total, 0.0).sum(),
        "skew_total_down": torch.where(is_down, skew_total, 0.0).sum(),
    }
    if is_clipped:
        sums["clip_low"] = (is_down & (ratio < c.clip_low)).sum()
        sums["clip_high"] = (is_up & (ratio > c.clip_high)).sum()
        sums["clip_dual"] = (is_down & (ratio > (dual_clip or torch.inf))).sum()
    return sums
