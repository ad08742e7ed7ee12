"""One rollout format of one model: a batch of answers scored by the trainer, and everything measured on it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.api import Correction, Step, TokenBatch
from harness.config.schema import Launch, RunConfig
from harness.engines.vllm.memory import kv_bytes_per_token, num_parameters, weight_bytes
from harness.foundation.clock import GIB, Clock
from harness.foundation.digits import significant
from harness.objective.loss import bounded, log_ratio
from harness.objective.mismatch import METRIC_CAP, by_entropy, by_position, correction_metrics, mismatch_metrics
from harness.records.effective_bits import bits_of_plan
from harness.records.sample_scores import over_questions
from harness.records.stats import Floats, mean_interval
from harness.run.build import build
from harness.run.collect import advantages, collect
from harness.run.gpu_sharing import reserved_gib, used_gib
from harness.run.loop import push_weights, scored
from harness.run.run import Collected, Run
from harness.studies.replay.arms import NONE, YARDSTICKS, arms_of, composed_of
from harness.trainers.corrected_step import batch_correction, needs_current_policy
from harness.trainers.local.trainer import Diverged

SAME = 1e-4
"""Relative difference up to which a weight is the plain ratio, or 1."""
DIGITS = 7
"""Significant digits of a number in a record."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One format."""

    row: dict[str, Any]
    """Everything that is kept, as plain JSON."""
    tensors: dict[str, Tensor]
    """Origin of these numbers, [B, T] each: rollout_logp and old_logp (float32 nats), entropy (nats), mask (bool)."""
    hashes: dict[str, str | None]


@dataclass(frozen=True, kw_only=True)
class _Sampled:
    """One batch of answers, scored."""

    collected: Collected
    batch: TokenBatch
    entropy: Tensor
    push_s: float
    clock: Clock
    seconds: dict[str, float]


def _sampled(run: Run) -> _Sampled:
    """Push the weights, sample one batch and score it. Raises ValueError as `measure` does."""
    config = run.config
    step = Step(index=0, total=config.trainer.steps, seed=config.seed)
    try:
        start = time.perf_counter()
        push_weights(run, step)
        push_s = time.perf_counter() - start
        _warm_up(run)
        clock = Clock(config.trainer.device)
        collected = collect(run, step, clock)
        seconds = clock.stop()
        mask, adv, _ = advantages(run, collected.scores, collected.rollout, collected.seqs.sampled)
        scores, batch = scored(run, collected, mask, adv, step, keep_graph=False)
    except Diverged as error:
        raise ValueError(f"{config.model.path} in {config.precision.name}: {error}") from error
    return _Sampled(
        collected=collected, batch=batch, entropy=scores.entropy.detach(), push_s=push_s, clock=clock, seconds=seconds,
    )  # fmt: skip


def k3_and_length(run: Run) -> tuple[float, float]:
    """(mean k3 of a token, nats; mean tokens of an answer) of the next batch of a run, and nothing else. Raises
    ValueError as `measure` does."""
    batch = _sampled(run).batch
    found = mismatch_metrics(batch.old_logp, batch.rollout_logp, batch.mask, cap=METRIC_CAP)
    return found["mismatch/kl_k3"], float(batch.mask.sum(1).double().mean())


def measure(config: RunConfig, launch: Launch) -> Measured:
    """Sample one batch (`algo.num_prompts` x `algo.group_size` answers) and measure it. Raises ValueError for what the
    engine or the trainer cannot do, and where the trainer's own log-probs are not finite."""
    others_gib = used_gib(config.trainer.device) - reserved_gib(config.trainer.device)
    run, hashes = build(config, launch)
    try:
        found = _sampled(run)
    finally:
        run.close()
    sampled, batch, clock, seconds = found.collected, found.batch, found.clock, found.seconds
    mask, push_s = batch.mask, found.push_s
    run.keep_peaks(clock.peaks)
    entropy, logps = found.entropy, (batch.old_logp, batch.rollout_logp, batch.mask)
    k3 = _k3_interval(batch, config.algo.group_size)
    right = over_questions(np.array([s.reward for s in sampled.scores]).reshape(-1, config.algo.group_size).mean(1))
    row = {
        "precision": config.precision.name,
        "seed": config.seed,
        "mismatch": {
            name.removeprefix("mismatch/"): value
            for name, value in mismatch_metrics(*logps, cap=METRIC_CAP, entropy=entropy).items()
        },
        "k3_low": k3[0], "k3_high": k3[1],
        "by_position": _short(by_position(*logps)),
        "by_entropy": _short(by_entropy(*logps, entropy)),
        "ess_by_length": ess_by_length(*logps),
        "corrections": corrections(batch, config),
        "accuracy": right.mean, "accuracy_low": right.low, "accuracy_high": right.high,
        "num_prompts": config.algo.num_prompts, "num_answers": len(sampled.items), "num_tokens": int(mask.sum()),
        "length_mean": float(mask.sum(1).double().mean()),
        "tokens_per_s": sampled.num_tokens / max(seconds["generate"], 1e-9),
        "push_s": push_s,
        "others_gib": others_gib,
        **_memory(run),
        "passport": _passport(run),
    }  # fmt: skip
    tensors = {"old_logp": batch.old_logp, "rollout_logp": batch.rollout_logp, "entropy": entropy, "mask": batch.mask}
    kept = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    return Measured(row=significant(row, DIGITS), tensors=kept, hashes=hashes)


def _warm_up(run: Run) -> None:
    """Generate a few tokens that nobody counts: first calls compile kernels and fill caches."""
    prompts = [item.prompt for item in run.eval_items[:1]]
    run.engine.generate(
        prompts, num_samples=1, max_new_tokens=min(2, run.max_new_tokens),
        temperature=run.config.engine.temperature, seed=0,
    )  # fmt: skip


def _k3_interval(batch: TokenBatch, group_size: int) -> tuple[float, float]:
    """95 % interval of the mean k3 of a token, prompts as clusters."""
    rows, _ = batch.mask.nonzero(as_tuple=True)
    d = log_ratio(batch.old_logp[batch.mask].double(), batch.rollout_logp[batch.mask].double())
    values: Floats = (torch.expm1(d) - d).cpu().numpy()
    return mean_interval(values, [str(row // group_size) for row in rows.tolist()])


def _memory(run: Run) -> dict[str, Any]:
    """Bits a weight, GiB of all weights and KiB of cache a token as vLLM would hold them, from the shape; on a GPU also
    what was allocated at most, and the tokens of cache that fit beside the weights into the engine's share of it."""
    plan, shape = run.composed.plan, run.trainer.model.config
    weights, token = weight_bytes(shape, plan), kv_bytes_per_token(shape, plan)
    found: dict[str, Any] = {
        "num_parameters": num_parameters(shape),
        "effective_bits": bits_of_plan(plan, shape),
        "weights_gib": weights / GIB,
        "cache_kib_per_token": token / 1024,
        "memory_gib": dict(run.memory_gib),
        "cache_tokens": None,
    }
    if run.config.trainer.device == "cuda":
        share = run.config.engine.gpu_memory * torch.cuda.get_device_properties(0).total_memory
        found["cache_tokens"] = max(0, int((share - weights) // token))
    return found


def _passport(run: Run) -> dict[str, Any]:
    """Formats read back from the engine, with the number of tensors of each."""
    assert run.passport is not None
    acts = Counter(name for name in run.passport.acts.values() if name)
    weights = Counter(tensor.format for tensor in run.passport.weights)
    return {"engine": run.passport.engine, "weights": dict(weights), "acts": dict(acts), "kv": run.passport.kv}


def _short(profile: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name.rpartition("/")[2]: values for name, values in profile.items()}


def ess_by_length(old_logp: Tensor, rollout_logp: Tensor, mask: Tensor) -> dict[str, list[float]]:
    """Effective sample size over n of whole answers' weights, were they cut after so many tokens.

    [B, T] each -> lengths 1, 2, 4 ... and the longest; ess: (mean rho)^2 / mean rho^2 of the products of the first
    tokens' ratios, over the answers that are so long; count: how many are.
    """
    lengths = mask.sum(1)
    longest = int(lengths.max())
    total = bounded(torch.where(mask, old_logp.double() - rollout_logp.double(), 0.0).cumsum(1))
    at = sorted({2**k for k in range(longest.bit_length()) if 2**k <= longest} | {longest})
    found: dict[str, list[float]] = {"length": [], "ess": [], "count": []}
    for n in at:
        rho = total[lengths >= n, n - 1].exp()
        for name, value in (("length", n), ("ess", rho.mean() ** 2 / rho.square().mean()), ("count", len(rho))):
            found[name].append(float(value))
    return found


def corrections(batch: TokenBatch, config: RunConfig) -> dict[str, dict[str, float]]:
    """Method -> what its `correct` does to this batch: `correction_metrics`, and `beyond_frac`, the share of tokens
    beyond its threshold.

    Only methods that need no more than the two log-probs, in the decoupled mode; each starts with an empty memory.
    """
    found: dict[str, dict[str, float]] = {}
    left_out = (NONE, *(method.name for method in YARDSTICKS))
    for arm in arms_of(config.algo)[0]:
        composed = composed_of(arm.method)
        if arm.name in left_out or arm.algo.mode != "decoupled" or composed.needs(batch.step):
            continue
        if needs_current_policy(composed, arm.algo) or composed.token_loss() is not None:
            continue
        c = batch_correction(composed, batch, arm.algo)
        metrics = correction_metrics(c, batch.mask)
        found[arm.name] = {name.removeprefix("correction/"): value for name, value in metrics.items()}
        found[arm.name]["beyond_frac"] = beyond(c, batch)
    return found


def beyond(c: Correction, batch: TokenBatch) -> float:
    """Share of the mask's tokens that are rejected, or whose weight is neither 1 nor a plain ratio: of the token, or of
    its whole answer. A weight that is normalized or tempered is beyond by this count, too."""
    d = torch.where(batch.mask, batch.old_logp - batch.rollout_logp, 0.0)
    weight = torch.where(torch.isfinite(c.weight), c.weight, 0.0).expand_as(d)
    plain_ratios = (torch.zeros_like(d), d, d.sum(1, keepdim=True).expand_as(d))
    usual = torch.zeros_like(batch.mask)
    for ratio in (bounded(x).exp() for x in plain_ratios):
        usual |= (weight - ratio).abs() <= SAME * ratio
    return float((~usual | ~c.keep)[batch.mask].double().mean())
