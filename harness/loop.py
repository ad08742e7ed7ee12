"""The GRPO/DAPO step, start to end, in one file.

    push weights -> generate -> reward -> advantage -> score -> correct -> update (mini-batches) -> refit -> metrics
    (an engine that shares the trainer's GPU may sleep from after `generate` to the next push: `harness.colocation`)

`train` is the whole experiment, `harness.run.Run` what is alive in it. All randomness is a hash of (run seed, purpose,
index), so a run resumed from `Run.state` goes on bit for bit. Left out: how a rollout batch is made
(`harness.collect`) and how processes start and end (`harness.cell`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from harness import provenance
from harness.api import Correction, Part, Rollout, RolloutEngine, Sequences, Step, TokenBatch
from harness.clock import Clock
from harness.collect import collect, minibatches, responses, take_batch, take_correction
from harness.colocation import lend, reclaim
from harness.compose import check_passport, has_hook
from harness.loss import aggregate, batch_normalize, cleaned, count_totals, policy_loss, start
from harness.metrics import by_entropy, by_position, clip_metrics, correction_metrics, mismatch_metrics
from harness.results import EvalRecord
from harness.run import Run
from harness.run_config import RunConfig
from harness.seeds import stable_seed
from harness.tasks import Item, Task, failure_shares
from harness.trainers.local import Diverged, Scores

REFERENCE = "fp32"
"""The precision in which runs are compared."""
PROFILE_EVERY = 5
"""Steps between profiles of the mismatch over positions and entropies."""
NUM_AFTER_SYNC = 32
"""Prompts that `Part.after_sync` may calibrate on: held-out ones, the same at every push."""
METRIC_CAP = 2.0
"""Where the truncated metrics cut a ratio, whatever a method's own cap is, so that runs compare."""


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
        evaluate(run)


def grpo_step(run: Run) -> dict[str, Any]:
    """One rollout batch and its updates. Returns the step's metrics."""
    algo, trainer, composed = run.config.algo, run.trainer, run.composed
    clock = Clock(run.config.trainer.device)
    step = Step(index=run.step, total=run.config.trainer.steps, seed=run.config.seed)
    with clock("sleep"):
        reclaim(run)
    with clock("sync"):
        row: dict[str, Any] = {**push_weights(run, run.engine, step), **run.evaluated_sync}
        run.evaluated_sync = {}
    seqs, mask, adv, rollout, measured = collect(run, step, clock)
    row |= measured
    with clock("sleep"):
        lend(run)

    is_single = algo.num_minibatches * algo.num_epochs == 1
    with clock("old_logp"):
        scores, batch = scored(run, seqs, mask, adv, rollout, step, keep_graph=is_single)
    row |= mismatch(batch, scores.entropy.detach())

    with clock("update"):
        correction = start(batch, algo.eps_low, algo.eps_high)
        if algo.mode == "decoupled":
            correction = normalized(composed.correct(correction, batch), mask, algo.batch_normalize)
        updates = [
            update(run, seqs, batch, correction, rows, scores if is_single else None) for rows in minibatches(run, step)
        ]
        with trainer.eagerly():
            composed.refit(trainer.model, seqs, batch, replace(step, index=step.index + 1))
    row |= update_metrics(updates) | composed.memory_row()
    seconds = clock.stop()
    row |= {f"time/{stage}_s": value for stage, value in seconds.items()} | clock.memory()
    run.keep_peaks(clock.peaks)
    return row | {"rollout/tokens_per_s": row["rollout/tokens"] / max(seconds["generate"], 1e-9)}


def scored(
    run: Run, seqs: Sequences, mask: Tensor, adv: Tensor, rollout: Rollout, step: Step, *, keep_graph: bool
) -> tuple[Scores, TokenBatch]:
    """What the trainer says of a rollout batch before any update, and all that its parts need. Raises Diverged, and
    RuntimeError where the trainer has a log-prob and the engine has none: that engine's tokens are worth nothing."""
    trainer, needs, device = run.trainer, run.composed.needs(step), seqs.ids.device
    scores = trainer.score(seqs, keep_graph=keep_graph)
    if not torch.isfinite(scores.logp.detach()[seqs.sampled]).all():
        raise Diverged("a log-probability of the trainer is not finite")
    if num_nan := int((rollout.logp.to(device).isnan() & seqs.sampled).sum()):
        num = int(seqs.sampled.sum())
        raise RuntimeError(f"the engine's log-probs of {num_nan} of {num} tokens are NaN, the trainer's not")
    if run.composed.plan.sampler == "trainer":
        check_exact(scores.logp.detach(), rollout.logp.to(device), seqs.sampled)
    extras = {"ref_logp": trainer.reference_logp(seqs)} if trainer.reference is not None else {}
    if "rollout_kl" in needs:
        assert rollout.log_probs is not None
        extras["rollout_kl"] = trainer.rollout_kl(seqs, rollout.log_probs.to(device))
    batch = TokenBatch(
        token_ids=seqs.token_ids, mask=mask, adv=adv, rollout_logp=rollout.logp.to(device),
        old_logp=scores.logp.detach(), step=step, extras=extras,
        shadow={"old": trainer.shadow_logp(seqs)} if "shadow" in needs else {},
    )  # fmt: skip
    return scores, batch


def mismatch(batch: TokenBatch, entropy: Tensor) -> dict[str, Any]:
    """How far sampler and trainer are apart before any update; at some steps also its profiles.

    entropy [B, T] nats of the trainer, no gradient.
    """
    logps = (batch.old_logp, batch.rollout_logp, batch.mask)
    found: dict[str, Any] = mismatch_metrics(*logps, cap=METRIC_CAP, entropy=entropy)
    if batch.step.index % PROFILE_EVERY == 0:
        found |= by_position(*logps) | by_entropy(*logps, entropy)
    return found


def check_exact(train_logp: Tensor, rollout_logp: Tensor, sampled: Tensor) -> None:
    """The zero-mismatch control is worth nothing unless it is exact: RuntimeError where any log-ratio is not 0."""
    gap = float(torch.where(sampled, train_logp - rollout_logp, 0.0).abs().max())
    if gap != 0.0:
        raise RuntimeError(f"sampler=trainer: sampler and trainer differ by up to {gap:.2g} nats, 0 was planned")


def push_weights(run: Run, engine: RolloutEngine, step: Step) -> dict[str, float]:
    """Trainer weights through every part into the engine; the realized plan must then be the planned one."""
    engine.load_weights(run.composed.sync(run.trainer.weights(), step))
    if any(has_hook(part, "after_sync") for part in run.composed.parts):
        run.composed.after_sync(engine, [item.prompt for item in run.eval_items[:NUM_AFTER_SYNC]])
    run.passport = engine.realized_plan()
    check_passport(run.composed.plan, run.passport)
    return {f"sync/{name}": value for name, value in engine.sync_metrics().items()}


def update(
    run: Run, seqs: Sequences, batch: TokenBatch, correction: Correction, rows: Tensor, scores: Scores | None
) -> tuple[dict[str, float], dict[str, float]]:
    """One optimizer update on some rows of the batch: (its metrics, its sums over tokens).

    `scores` may carry the graph of exactly these rows.
    """
    algo, trainer, composed = run.config.algo, run.trainer, run.composed
    rows = rows.to(seqs.ids.device)
    if len(rows) < len(seqs.ids) or scores is None:
        seqs, batch, correction = seqs.take(rows), take_batch(batch, rows), take_correction(correction, rows)
    is_bypass = algo.mode != "decoupled"
    hooks = ("correct", "correct_update") if is_bypass else ("correct_update",)
    if any(has_hook(part, hook) for part in composed.parts for hook in hooks):
        scores = scores or trainer.score(seqs, keep_graph=True)
        if batch.shadow:
            batch = replace(batch, shadow={**batch.shadow, "current": trainer.shadow_logp(seqs)})
        live = replace(batch, old_logp=scores.logp.detach())
        if is_bypass:  # there is no policy before the update: rules see the live one, as a constant (losses.md 5)
            correction = composed.correct(start(live, algo.eps_low, algo.eps_high), live)
            correction = normalized(correction, batch.mask, algo.batch_normalize)
        correction = composed.correct_update(correction, live.old_logp, batch)
    if algo.mode == "bypass_ppo":
        batch = replace(batch, old_logp=batch.rollout_logp)
    totals = count_totals(batch.mask, correction.keep, run.max_new_tokens)
    objective = composed.token_loss()
    adds = [part for part in composed.parts if has_hook(part, "aux_loss")]

    def loss_of(some: Tensor, found: Scores) -> tuple[Tensor, dict[str, Tensor]]:
        b, c = (batch, correction)
        if len(some) < len(rows):
            b, c = take_batch(batch, some), take_correction(correction, some)
        loss, sums = policy_loss(
            found.logp, b, c, totals, algo,
            part_loss=None if objective is None else part_loss(objective, found.logp, b, c),
            owns_objective=objective is not None and objective.owns_objective,
            entropy=found.entropy,
        )  # fmt: skip
        for part in adds:
            assert found.logits is not None
            aux = part.aux_loss(found.logits, b)
            if aux is not None:
                loss = loss + aggregate(aux, b.mask, b.mask, totals, agg=algo.agg, denom="original")
        return loss, sums

    loss, sums = trainer.accumulate(seqs, loss_of, scores, wants_logits=bool(adds))
    return {"train/loss": loss} | trainer.step() | correction_metrics(correction, batch.mask), sums


def update_metrics(updates: list[tuple[dict[str, float], dict[str, float]]]) -> dict[str, float]:
    """Means over the updates of one batch, and clip fractions over all their tokens."""
    rows, sums = [row for row, _ in updates], [sums for _, sums in updates]
    shared = [name for name in rows[0] if all(name in row for row in rows)]
    means = {name: sum(row[name] for row in rows) / len(rows) for name in shared}
    return means | clip_metrics({name: sum(s[name] for s in sums) for name in sums[0]})


def part_loss(part: Part, logp: Tensor, b: TokenBatch, c: Correction) -> Tensor | None:
    """The part's own objective on inputs whose padding is neutral."""
    logp, b, c = cleaned(logp, b, c)
    return part.token_loss(logp, c, b)


def normalized(c: Correction, mask: Tensor, level: Literal["none", "token", "sequence"]) -> Correction:
    """Batch normalisation of weights, last and by the algorithm (losses.md section 6.9)."""
    return c if level == "none" else replace(c, weight=batch_normalize(c.weight, mask, level))


def evaluate(run: Run) -> None:
    """Sampled accuracy on fixed held-out questions, one fixed seed: reference precision, then the run's own rollout.

    Raises Diverged where a weight is not finite: its answers would be those of no policy.
    """
    clock = Clock(run.config.trainer.device)
    ask = partial(
        evaluation, config=run.config, task=run.task, items=run.eval_items, max_new_tokens=run.max_new_tokens,
        step=run.step,
    )  # fmt: skip
    with clock("eval"):
        if not all(bool(torch.isfinite(tensor).all()) for _, tensor in run.trainer.weights()):
            raise Diverged("a weight is not finite")
        step = Step(index=run.step, total=run.config.trainer.steps, seed=run.config.seed, purpose="eval")
        run.reference.wake()
        run.reference.load_weights(run.trainer.policy_weights())
        run.evals.append(ask(run.reference, "reference"))
        run.reference.sleep()  # its cache is of no use until the next evaluation
        reclaim(run)
        run.evaluated_sync = push_weights(run, run.engine, step)
        run.evals.append(ask(run.engine, "rollout"))
    run.eval_s += clock.seconds["eval"]
    run.keep_peaks(clock.peaks)


def evaluation(
    engine: RolloutEngine, site: Literal["reference", "rollout"], *, config: RunConfig, task: Task,
    items: Sequence[Item], max_new_tokens: int, step: int,
) -> EvalRecord:  # fmt: skip
    """One pass over the held-out questions by an engine that holds the policy after `step` steps."""
    rollout = engine.generate(
        [item.prompt for item in items],
        num_samples=1,
        max_new_tokens=max_new_tokens,
        temperature=config.engine.temperature,
        seed=stable_seed("eval"),
    )
    scores = task.score(items, responses(rollout))
    return EvalRecord.model_validate(
        {
            "step": step,
            "precision": REFERENCE if site == "reference" else config.precision.name,
            "site": site,
            "accuracy": sum(s.reward for s in scores) / len(scores),
            "correct": [int(s.reward >= 1.0) for s in scores],
            "question_hash": provenance.text_hash(item.key for item in items),
            "length_mean": float(rollout.lengths.float().mean()),
            "truncated_frac": float(rollout.truncated.float().mean()),
            "unparsable_frac": sum(not s.is_parsable for s in scores) / len(scores),
            "failures": failure_shares(scores),
        }
    )


def _is_evaluated(run: Run) -> bool:
    return any(record.step == run.step for record in run.evals)
