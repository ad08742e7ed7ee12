"""Names of logged numbers: the meaning of each, and its name in other frameworks.

One row per name of the per-step series. `direction` says where better lies. Other frameworks' names were read in
verl 0.9.1, TRL 1.16.0, and the public repositories of NeMo-RL, slime (with its mismatch helper's `mis_` prefix) and
prime-rl; a name stands beside ours only where the definition is the same or differs by a stated detail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Direction = Literal["up", "down", "none"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One logged number."""

    name: str
    unit: str
    direction: Direction
    definition: str


_MISMATCH = """
kl_k1 | nats | none | mean of -d over tokens, d as in kl_k2: KL(rollout || train), may be negative
kl_k2 | nats | down | mean of d^2 / 2, d = old - rollout log-prob, clamped to +-20 here and below
kl_k3 | nats | down | mean of exp(d) - d - 1: KL(rollout || train), never negative
kl_k3_reverse | nats | down | mean of exp(-d) + d - 1: nominally KL(train || rollout), tail dominated
js | nats | down | mean of log cosh(d / 2): both policies' k3 against their average
logp_absdiff_mean | nats | down | mean of |d|
logp_absdiff_p99 | nats | down | |d| that 99 % of the tokens do not exceed
logp_absdiff_p999 | nats | down | |d| that 99.9 % of the tokens do not exceed
logp_absdiff_max | nats | down | largest |d|
prob_absdiff_mean | probability | down | mean of |exp(old) - exp(rollout)|
prob_absdiff_max | probability | down | largest |exp(old) - exp(rollout)|
prob_absdiff_std | probability | down | standard deviation (ddof 1) of |exp(old) - exp(rollout)|
prob_pearson | 1 | up | Pearson correlation of exp(old) and exp(rollout); NaN without variance
mult_prob_error | 1 | down | mean of exp|d|, 1 at best; NeMo-RL alerts above 1.05
train_ppl | 1 | none | mean over responses of exp(-mean old log-prob)
rollout_ppl | 1 | none | the same with the rollout's log-probs
train_log_ppl | nats | none | mean over responses of -mean old log-prob
rollout_log_ppl | nats | none | the same with the rollout's log-probs
log_ppl_diff | nats | none | mean over responses of -mean d; positive: the trainer is less confident
log_ppl_absdiff | nats | down | mean over responses of |mean d|
log_ppl_diff_max | nats | none | largest -mean d of a response
log_ppl_diff_min | nats | none | smallest -mean d of a response
ppl_ratio | 1 | none | mean over responses of exp(-mean d)
chi2_token | 1 | down | mean of rho^2 minus 1, rho = exp(d)
chi2_seq | 1 | down | the same with the product of rho over a response
m2 | nats^2 | down | mean of d^2 (M2PO)
ess_token | 1 | up | effective sample size over n of token weights min(rho, cap); verl's habit
ess_token_raw | 1 | up | the same of raw rho: truncated weights look healthier than they are
ess_seq | 1 | up | effective sample size over B of min(product of rho, cap)
ess_seq_raw | 1 | up | the same of raw products
is_mean | 1 | none | mean of min(rho, cap): below 1 is the shrinkage of truncation
is_std | 1 | down | population standard deviation of min(rho, cap)
is_min | 1 | none | smallest min(rho, cap)
is_max | 1 | none | largest min(rho, cap)
is_raw_mean | 1 | none | mean rho
is_raw_max | 1 | down | largest rho
frac_high | fraction | down | tokens with rho > cap
frac_low | fraction | down | tokens with rho < 1 / cap
oob | fraction | down | frac_high + frac_low
invalid_frac | fraction | down | tokens of the mask without two finite log-probs
entropy_corr | 1 | none | Pearson correlation of |d| and the trainer's entropy
"""
_OTHER = """
correction/weight_mean | 1 | none | mean weight of the tokens of the mask, rejected ones counted
correction/weight_std | 1 | none | its population standard deviation
correction/weight_min | 1 | none | smallest weight of a token of an update, mean over the updates
correction/weight_max | 1 | none | largest weight of a token of an update, mean over the updates
correction/ess | 1 | up | effective sample size over n of the weights, rejected tokens counted
correction/kept_weight_mean | 1 | none | mean weight of the tokens that no rejection dropped
correction/kept_ess | 1 | up | effective sample size of their weights over their number
correction/zero_frac | fraction | none | tokens of weight 0 (IcePop)
correction/token_kept_frac | fraction | up | tokens that no rejection dropped
correction/seq_kept_frac | fraction | up | responses with a kept token
correction/clip_high_max | 1 | none | largest upper clip of the policy ratio in an update, mean over the updates
train/loss | 1 | none | the minimised scalar of an update
train/grad_norm | 1 | none | global norm of the unscaled gradient before clipping
train/entropy | nats | none | mean token entropy of the trainer at the run's temperature
train/ppo_kl | nats | none | mean of old - current log-prob
train/kl_ref | nats | none | mean KL to the reference policy by the algorithm's estimator
train/clip_frac | fraction | none | tokens whose clipped branch is the larger one
train/clip_low_frac | fraction | none | ratio below the lower clip and A < 0
train/clip_high_frac | fraction | none | ratio above the upper clip and A > 0
train/clip_dual_frac | fraction | none | ratio above the dual clip and A < 0
train/ratio_mean | 1 | none | mean current / old ratio R
train/ess_ppo | 1 | up | effective sample size over n of R: policy drift, not precision
train/skew | 1 | none | mean of -(R - 1) A
train/skew_up | 1 | none | its part with A > 0
train/skew_down | 1 | none | its part with A < 0
train/skew_total | 1 | none | skew with current / rollout in place of R
train/skew_total_up | 1 | none | its part with A > 0
train/skew_total_down | 1 | none | its part with A < 0
train/lr | 1 | none | learning rate of the updates, by the schedule and the method's factor
train/lr_factor | 1 | none | the method's factor on the learning rate, where it has one
train/router_shift | nats | none | shift of a mixture's routers since before the updates, where a part reads it
train/loss_scale | 1 | none | FP16 loss scale that the updates used, their mean; 1 without scaling
train/skipped | 1 | down | 1 where an overflow skipped the update
reward/mean | 1 | up | mean shaped reward of the sampler's responses
reward/accuracy | fraction | up | mean raw task metric of the sampler's responses
reward/best_of_group | fraction | up | mean over prompts of the best response's raw metric: pass@group_size
reward/informative_frac | fraction | none | groups whose raw metric is not constant
reward/unparsable_frac | fraction | down | responses without a readable answer
rollout/length_mean | tokens | none | mean response length
staleness/age_mean | steps | none | age of the weights that sampled a token, with partial rollouts
staleness/age_std | steps | none | its standard deviation over the tokens of the batch
staleness/age_max | steps | none | age of the oldest token
staleness/mixed_frac | fraction | none | responses whose tokens come from several versions of the policy
rollout/in_flight | groups | none | prompts whose responses go on with the next step's weights
rollout/truncated_frac | fraction | none | responses stopped by the length limit
rollout/tokens | tokens | none | response tokens generated, dropped groups included
rollout/gen_batches | 1 | down | generation rounds that filled the batch, by dynamic sampling or partial rollouts
rollout/tokens_per_s | tokens/s | up | response tokens over generation time
staleness/steps | steps | none | age of the sampler's weights
staleness/kl_k3 | nats | down | k3 with old - stale log-prob: steps of the trainer since then, every fifth step
staleness/format_kl_k3 | nats | down | k3 with stale - rollout log-prob: format and engine at equal weights
sync/code_flip_rate | fraction | none | quantized codes that changed since the sync before, NaN at a process's first
sync/saturated_frac | fraction | down | weights clipped by their scale
sync/num_replicas | 1 | none | engines under trainer=verl, one per GPU, whose passports agreed
time/generate_s | s | down | generation
time/reward_s | s | down | rewards and batching
time/sync_s | s | down | weights through the parts and the quantizer into the engine
time/sleep_s | s | down | the engine's memory to the trainer and back
time/old_logp_s | s | down | the trainer's log-probs before the updates
time/update_s | s | down | corrections, forward, backward, optimizer
time/eval_s | s | down | evaluation
time/other_s | s | down | the rest of the step
memory/generate_gib | GiB | down | peak of allocated GPU memory during generation, by torch's count
memory/sync_gib | GiB | down | the same during the push of weights
memory/old_logp_gib | GiB | down | the same while the trainer scores
memory/update_gib | GiB | down | the same during the updates
memory/reserved_gib | GiB | down | peak of what torch's allocator reserved since the step before
memory/host_gib | GiB | down | under verl: the host's memory that all processes use after an update
memory/rest_gib | GiB | down | under verl: what the trainer keeps of its GPU's memory while the engine samples
"""
_CURVES = """
by_position/position | tokens | none | first position of each bucket, at most 64 of equal width
by_position/k3 | nats | down | kl_k3 of the bucket
by_position/absdiff | nats | down | mean |d| of the bucket
by_position/count | tokens | none | tokens of the bucket
by_entropy/entropy | nats | none | lower edge of each bucket of the trainer's entropy
by_entropy/k3 | nats | down | kl_k3 of the bucket
by_entropy/absdiff | nats | down | mean |d| of the bucket
by_entropy/count | tokens | none | tokens of the bucket
"""


def _table() -> dict[str, Metric]:
    rows = [f"mismatch/{line}" for line in _MISMATCH.strip().splitlines()]
    rows += [*_OTHER.strip().splitlines(), *_CURVES.strip().splitlines()]
    found: dict[str, Metric] = {}
    for row in rows:
        name, unit, direction, definition = row.split(" | ", 3)
        assert name not in found, name
        assert direction in ("up", "down", "none"), row
        found[name] = Metric(name=name, unit=unit, direction=direction, definition=definition)
    return found


METRICS: dict[str, Metric] = _table()
"""Every name of the per-step series. `part/*` is what parts keep in memory, named by the parts;
`sampler/<name>/*` the mismatch and raw reward of each of several samplers (`harness.run.samplers`)."""

FRAMEWORKS = ("verl", "TRL", "NeMo-RL", "slime", "prime-rl")
_CORR, _DEBUG, _SAMPLING = "rollout_corr/", "training/rollout_probs_diff_", "sampling/sampling_logp_difference/"
_RATIO, _PROFILE = "sampling/importance_sampling_ratio/", "profiling/Time taken: GRPOTrainer."
_TRANSLATION: dict[str, tuple[str, str, str, str, str]] = {
    "mismatch/kl_k1": (f"{_CORR}kl", "", "", "train/mis_kl", ""),
    "mismatch/kl_k3": (f"{_CORR}k3_kl", "", "train/gen_kl_error", "train/mis_k3_kl", "mismatch_kl/mean"),
    "mismatch/kl_k3_reverse": ("", "", "train/policy_kl_error", "", ""),
    "mismatch/js": ("", "", "train/js_divergence_error", "", ""),
    "mismatch/logp_absdiff_mean": ("", f"{_SAMPLING}mean", "", "train/train_rollout_logprob_abs_diff", ""),
    "mismatch/logp_absdiff_max": ("", f"{_SAMPLING}max", "", "", ""),
    "mismatch/prob_absdiff_mean": (f"{_DEBUG}mean", "", "", "", ""),
    "mismatch/prob_absdiff_max": (f"{_DEBUG}max", "", "", "", ""),
    "mismatch/prob_absdiff_std": (f"{_DEBUG}std", "", "", "", ""),
    "mismatch/prob_pearson": ("training/rollout_actor_probs_pearson_corr", "", "", "", ""),
    "mismatch/mult_prob_error": ("", "", "train/token_mult_prob_error", "", ""),
    "mismatch/train_ppl": (f"{_CORR}training_ppl", "", "", "train/mis_training_ppl", ""),
    "mismatch/rollout_ppl": (f"{_CORR}rollout_ppl", "", "", "train/mis_rollout_ppl", ""),
    "mismatch/train_log_ppl": (f"{_CORR}training_log_ppl", "", "", "train/mis_training_log_ppl", ""),
    "mismatch/rollout_log_ppl": (f"{_CORR}rollout_log_ppl", "", "", "train/mis_rollout_log_ppl", ""),
    "mismatch/log_ppl_diff": (f"{_CORR}log_ppl_diff", "", "", "train/mis_log_ppl_diff", ""),
    "mismatch/log_ppl_absdiff": (f"{_CORR}log_ppl_abs_diff", "", "", "train/mis_log_ppl_abs_diff", ""),
    "mismatch/log_ppl_diff_max": (f"{_CORR}log_ppl_diff_max", "", "", "", ""),
    "mismatch/log_ppl_diff_min": (f"{_CORR}log_ppl_diff_min", "", "", "", ""),
    "mismatch/ppl_ratio": (f"{_CORR}ppl_ratio", "", "", "train/mis_ppl_ratio", ""),
    "mismatch/chi2_token": (f"{_CORR}chi2_token", "", "", "", ""),
    "mismatch/chi2_seq": (f"{_CORR}chi2_seq", "", "", "", ""),
    "mismatch/frac_high": (f"{_CORR}rollout_is_ratio_fraction_high", "", "", "train/mis_truncate_fraction", ""),
    "mismatch/frac_low": (f"{_CORR}rollout_is_ratio_fraction_low", "", "", "", ""),
    "mismatch/is_raw_mean": ("", "", "train/sampling_importance_ratio", "train/tis", ""),
    "correction/weight_mean": (f"{_CORR}rollout_is_mean", f"{_RATIO}mean", "", "train/mis_ratio_mean_after_mis", ""),
    "correction/weight_std": (f"{_CORR}rollout_is_std", "", "", "", ""),
    "correction/weight_min": (f"{_CORR}rollout_is_min", f"{_RATIO}min", "", "", ""),
    "correction/weight_max": (f"{_CORR}rollout_is_max", f"{_RATIO}max", "", "", ""),
    "correction/ess": (f"{_CORR}rollout_is_eff_sample_size", "", "", "", ""),
    "correction/zero_frac": (f"{_CORR}rollout_is_oob_ratio", "", "", "", ""),
    "correction/token_kept_frac": (f"1 - {_CORR}rollout_rs_masked_fraction", "", "", "", ""),
    "train/loss": ("actor/pg_loss", "loss", "train/loss", "train/loss", "loss/mean"),
    "train/grad_norm": ("actor/grad_norm", "grad_norm", "train/grad_norm", "train/grad_norm", "optim/grad_norm"),
    "train/entropy": ("actor/entropy", "entropy", "train/approx_entropy", "train/entropy_loss", "entropy/mean"),
    "train/ppo_kl": ("actor/ppo_kl", "", "", "train/ppo_kl", ""),
    "train/kl_ref": ("actor/kl_loss", "kl", "train/kl_penalty", "train/kl_loss", ""),
    "train/clip_frac": ("actor/pg_clipfrac", "clip_ratio/region_mean", "", "train/pg_clipfrac", ""),
    "train/clip_low_frac": ("", "clip_ratio/low_mean", "", "", ""),
    "train/clip_high_frac": ("", "clip_ratio/high_mean", "", "", ""),
    "train/clip_dual_frac": ("actor/pg_clipfrac_lower", "", "", "", ""),
    "train/ratio_mean": ("", "", "train/probs_ratio", "", ""),
    "reward/mean": ("critic/score/mean", "reward", "train/reward", "rollout/raw_reward", "reward/mean"),
    "reward/informative_frac": ("", "1 - frac_reward_zero_std", "", "", ""),
    "rollout/length_mean": (
        "response_length/mean", "completions/mean_length", "train/mean_gen_tokens_per_sample",
        "rollout/response_len/mean", "completion_len/mean",
    ),
    "rollout/truncated_frac": (
        "response_length/clip_ratio", "completions/clipped_ratio", "", "rollout/truncated_ratio", "is_truncated/mean",
    ),
    "rollout/tokens_per_s": ("", "", "performance/generation_tokens_per_sec", "perf/tokens_per_gpu_per_sec", ""),
    "time/generate_s": (
        "timing_s/gen", f"{_PROFILE}transformers.generate", "timing/train/generation", "perf/rollout_time",
        "time/generate_completions",
    ),
    "time/reward_s": ("timing_s/reward", "", "timing/train/reward_calculation", "", ""),
    "time/sync_s": (
        "timing_s/update_weights", f"{_PROFILE}sync_weights",
        "timing/train/prepare_for_generation/transfer_and_update_weights", "perf/update_weights_time",
        "time/broadcast_weights",
    ),
    "time/old_logp_s": (
        "timing_s/old_log_prob", "", "timing/train/policy_and_reference_logprobs", "perf/log_probs_time", "",
    ),
    "time/update_s": (
        "timing_s/update_actor", "", "timing/train/policy_training", "perf/actor_train_time", "time/forward_backward",
    ),
    "time/eval_s": ("timing_s/testing", "", "timing/validation/total_validation_time", "", ""),
}  # fmt: skip


def translate() -> list[dict[str, str]]:
    """One row per name of ours that others have too: "ours" and each of `FRAMEWORKS`, empty where it has none.

    slime's rollout speed is per GPU; NeMo-RL's and slime's entropies are estimates or may be off by default.
    """
    return [
        {"ours": name, **dict(zip(FRAMEWORKS, others, strict=True))}
        for name in METRICS
        if (others := _TRANSLATION.get(name)) is not None
    ]
