"""The GRPO/DAPO step from start to end, in one file.

    push weights -> generate -> reward -> advantage -> score -> correct -> update (mini-batches) -> refit -> metrics
    (an engine that shares the trainer's GPU may sleep from after `generate` to the next push: `gpu_sharing`)

`train` is the whole experiment, `harness.run.run.Run` what is alive in it. All randomness is a hash of (run seed,
purpose, index), so a run resumed from `Run.state` goes on bit for bit. Left out: how a rollout batch is made
(`harness.run.collect`, `harness.run.partial`), the weights that sample it (`harness.run.staleness`), and how processes
start and end (`harness.run.cell`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.api import Correction, Sequences, Step, TokenBatch
from harness.config.compose import has_hook
from harness.foundation.clock import Clock
from harness.objective.loss import count_totals
from harness.objective.mismatch import batch_mismatch, correction_metrics
from harness.run.collect import advantages, collect, groups
from harness.run.gpu_sharing import lend, reclaim, release, rest
from harness.run.partial import age_metrics, collect_partial
from harness.run.run import Collected, Run
from harness.run.samplers import by_sampler, push, push_others
from harness.run.staleness import keep, sampling, stale_logp, versions
from harness.trainers.corrected_step import (
    batch_correction,
    method_loss,
    minibatches,
    needs_current_policy,
    take_batch,
    take_correction,
    update_correction,
    update_lr_factor,
    update_metrics,
)
from harness.trainers.engine_logp import check_engine_logp
from harness.trainers.evaluation import REFERENCE, evaluation
from harness.trainers.local.forward import Routers
from harness.trainers.local.trainer import DIVERGENCES, Diverged, Scores
from harness.trainers.staleness import is_scored, measured
from harness.trainers.task_evaluation import FAILURES, task_evaluation


def train(run: Run, after_step: Callable[[Run], None]) -> None:
    """Evaluate, then step and evaluate to the end. Raises Diverged; `run.series` keeps what was measured."""
    trainer = run.config.trainer
    while run.step < trainer.steps:
        if run.step % trainer.eval_every == 0 and not _is_evaluated(run):
            evaluate(run)
        run.series.append(grpo_step(run))
        run.step += 1
        after_step(run)
    if not _is_evaluated(run):
        try:
            evaluate(run)
        except Diverged:
            raise
        except FAILURES as failure:  # the run is finished, and `lowbit eval` can ask its saved policy again
            run.evaluation_errors.append(f"step {run.step}: {type(failure).__name__}: {failure}")


def grpo_step(run: Run) -> dict[str, Any]:
    """One rollout batch and its updates. Returns the step's metrics."""
    algo, trainer, composed = run.config.algo, run.trainer, run.composed
    clock = Clock(run.config.trainer.device, lambda: run.lent_gib)
    step = Step(index=run.step, total=run.config.trainer.steps, seed=run.config.seed)
    with clock("sleep"):
        reclaim(run)
    with clock("sync"):
        keep(run, step)
    with sampling(run):
        with clock("sync"):
            row: dict[str, Any] = {**push_weights(run, step), **run.evaluated_sync}
            run.evaluated_sync = {}
        collecting = collect_partial if algo.partial_rollouts else collect
        sampled = collecting(run, step, clock)  # prompts -> answers -> raw rewards
    seqs = sampled.seqs
    with clock("reward"):
        mask, adv, rewarded = advantages(run, sampled.scores, sampled.rollout, seqs.sampled)
    if run.on_batch is not None:
        run.on_batch(run.step, sampled)
    row |= rewarded | {
        "rollout/tokens": float(sampled.num_tokens),
        "rollout/gen_batches": float(sampled.num_batches),
    }
    with clock("sleep"):
        lend(run)

    is_one_update = algo.num_updates == 1  # which then takes the graph of the scores
    with clock("old_logp"):
        stale = stale_logp(run, seqs, step)
        scores, batch = scored(run, sampled, mask, adv, step, keep_graph=is_one_update, stale=stale)
        seqs = seqs if scores.experts is None else replace(seqs, experts=scores.experts)
        routers = trainer.routers(seqs) if "router_shift" in composed.needs(step) else None
    row |= batch_mismatch(batch, scores.entropy.detach()) | by_sampler(run, batch) | age_metrics(run, batch)
    row |= measured(batch, algo.staleness, stale if is_scored(step) else None)

    with clock("update"):
        correction = batch_correction(composed, batch, algo)
        updates = [
            update(run, seqs, batch, correction, rows, scores if is_one_update else None, number, routers)
            for number, rows in enumerate(minibatches(algo, step))
        ]
        with trainer.eagerly():
            composed.refit(trainer.model, seqs, batch, replace(step, index=step.index + 1))
    row |= update_metrics(updates) | composed.memory_row()
    seconds = clock.stop()
    row |= {f"time/{stage}_s": value for stage, value in seconds.items()} | clock.memory()
    run.keep_peaks(clock.peaks)
    return row | {"rollout/tokens_per_s": row["rollout/tokens"] / max(seconds["generate"], 1e-9)}


def scored(
    run: Run,
    sampled: Collected,
    mask: Tensor,
    adv: Tensor,
    step: Step,
    *,
    keep_graph: bool,
    stale: Tensor | None = None,
) -> tuple[Scores, TokenBatch]:
    """Score a rollout batch with the trainer before any update, and gather all that the parts need.

    `stale` [B, T]: the trainer's log-probs with the weights that sampled, where those are older than its own. Raises
    Diverged, and RuntimeError where the trainer has a log-prob and the engine has none: that engine's tokens are worth
    nothing.
    """
    seqs, rollout = sampled.seqs, sampled.rollout
    trainer, needs, device = run.trainer, run.composed.needs(step), seqs.ids.device
    scores = trainer.score(seqs, keep_graph=keep_graph, keeps_experts="own_routing" in needs)
    if not torch.isfinite(scores.logp.detach()[seqs.sampled]).all():
        raise Diverged("a log-probability of the trainer is not finite")
    check_engine_logp(rollout.logp.to(device), seqs.sampled, ", the trainer's not")
    if run.composed.plan.sampler == "trainer":
        check_exact(scores.logp.detach() if stale is None else stale, rollout.logp.to(device), seqs.sampled)
    extras = {"ref_logp": trainer.reference_logp(seqs)} if trainer.reference is not None else {}
    if divergent := needs & DIVERGENCES:
        assert rollout.log_probs is not None
        found = trainer.divergences(seqs, rollout.log_probs.to(device))
        extras |= {name: found[name] for name in divergent}
    batch = TokenBatch(
        token_ids=seqs.token_ids, mask=mask, adv=adv, rollout_logp=rollout.logp.to(device),
        old_logp=scores.logp.detach(), step=step, extras=extras, group=groups(run, len(mask)).to(device),
        reward=torch.tensor([score.reward for score in sampled.scores], dtype=torch.float32, device=device),
        sampler=None if rollout.sampler is None else rollout.sampler.to(device), version=versions(run, rollout, step),
        shadow={"old": trainer.shadow_logp(seqs)} if "shadow" in needs else {},
    )  # fmt: skip
    return scores, batch


def check_exact(train_logp: Tensor, rollout_logp: Tensor, sampled: Tensor) -> None:
    """The zero-mismatch control is worth nothing unless it is exact: RuntimeError where any log-ratio is not 0."""
    gap = float(torch.where(sampled, train_logp - rollout_logp, 0.0).abs().max())
    if gap != 0.0:
        raise RuntimeError(f"sampler=trainer: sampler and trainer differ by up to {gap:.2g} nats, 0 was planned")


def push_weights(run: Run, step: Step) -> dict[str, float]:
    """Weights through every part into the engine, and for rollouts into the other samplers. The run keeps the passport
    of its last push for rollouts: parts may send something else to an evaluation."""
    passport = push(run, run.engine, step, run.composed)
    if step.purpose != "eval":
        passport = push_others(run, step, passport)
    if step.purpose != "eval" or run.passport is None:
        run.passport = passport
    return {f"sync/{name}": value for name, value in run.engine.sync_metrics().items()}


def update(
    run: Run,
    seqs: Sequences,
    batch: TokenBatch,
    correction: Correction,
    rows: Tensor,
    scores: Scores | None,
    number: int,
    routers: Routers | None = None,
) -> tuple[dict[str, float], dict[str, float]]:
    """One optimizer update on some rows of the batch: (its metrics, its sums over tokens).

    `scores` may carry the graph of exactly these rows; `number` counts the updates of the step; `routers` are those of
    the batch before any update, where a part reads their shift.
    """
    algo, trainer, composed = run.config.algo, run.trainer, run.composed
    rows = rows.to(seqs.ids.device)
    if len(rows) < len(seqs.ids) or scores is None:
        seqs, batch, correction = seqs.take(rows), take_batch(batch, rows), take_correction(correction, rows)
    shifted: dict[str, float] = {}
    if routers is not None:
        shift = trainer.router_shift(seqs, routers.take(rows))
        batch = replace(batch, extras={**batch.extras, "router_shift": shift})
        shifted = {"train/router_shift": float(shift[batch.mask].mean())}
    if needs_current_policy(composed, algo):
        scores = scores or trainer.score(seqs, keep_graph=True)
        if batch.shadow:
            batch = replace(batch, shadow={**batch.shadow, "current": trainer.shadow_logp(seqs)})
        correction = update_correction(composed, correction, batch, scores.logp.detach(), algo)
    factor = update_lr_factor(composed, batch, None if scores is None else scores.logp.detach(), algo)
    totals = count_totals(batch.mask, correction.keep, run.max_new_tokens)

    def loss_of(some: Tensor, found: Scores) -> tuple[Tensor, dict[str, Tensor]]:
        b, c = (batch, correction)
        if len(some) < len(rows):
            b, c = take_batch(batch, some), take_correction(correction, some)
        return method_loss(composed, found.logp, b, c, totals, algo, found.entropy)

    if any(has_hook(part, "during_update") for part in composed.parts):
        with trainer.eagerly(), composed.during_update(trainer.model, batch.step, number):
            loss, sums = trainer.accumulate(seqs, loss_of)
    else:
        loss, sums = trainer.accumulate(seqs, loss_of, scores)
    row = {"train/loss": loss} | (trainer.step() if factor is None else trainer.step(factor))
    row |= shifted | ({} if factor is None else {"train/lr_factor": factor})
    return row | correction_metrics(correction, batch.mask), sums


def evaluate(run: Run) -> None:
    """Sampled accuracy on fixed held-out questions, one fixed seed, then the run's `evaluations`: in the reference
    precision, then in the run's own rollout. On vLLM `evaluations` are asked as rolled alone; `lowbit eval` asks the
    saved policy in BF16.

    Raises Diverged where a weight or a log-prob of the policy is not finite, and RuntimeError where the rollout engine
    has log-probs of NaN: the answers would be those of no policy.
    """
    clock = Clock(run.config.trainer.device, lambda: run.lent_gib)
    ask = partial(
        evaluation, config=run.config, task=run.task, items=run.eval_items, max_new_tokens=run.max_new_tokens,
        step=run.step,
    )  # fmt: skip
    step = Step(index=run.step, total=run.config.trainer.steps, seed=run.config.seed, purpose="eval")
    # The engine sleeps meanwhile: a float32 model and its cache may have no room beside it. A stage for each of its
    # states, because a peak is told without what it has lent.
    with clock("eval"):
        if not all(bool(torch.isfinite(tensor).all()) for _, tensor in run.trainer.weights()):
            raise Diverged("a weight is not finite")
        lend(run)
        release(run.config.trainer.device)
    with clock("eval"):
        run.reference.wake()
        run.reference.load_weights(run.trainer.policy_weights())
        run.evals.append(ask(run.reference, "reference"))
        if run.config.engine.name != "vllm":  # many long answers are too much for it there; `lowbit eval` has BF16
            run.evaluations += [
                task_evaluation(run.reference, one, site="reference", precision=REFERENCE, step=run.step)
                for one in run.asked
            ]
        rest(run)
        release(run.config.trainer.device)
    with clock("eval"):
        reclaim(run)
    with clock("eval"):
        pushed = push_weights(run, step)
        run.evaluated_sync = {} if run.config.algo.staleness else pushed  # the next push is of other weights then
        run.evals.append(ask(run.engine, "rollout"))
        run.evaluations += [
            task_evaluation(run.engine, one, site="rollout", precision=run.config.precision.name, step=run.step)
            for one in run.asked
        ]
    run.eval_s += clock.seconds["eval"]
    run.keep_peaks(clock.peaks)


def _is_evaluated(run: Run) -> bool:
    return any(record.step == run.step for record in run.evals)
