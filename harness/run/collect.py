"""One rollout batch: choose prompts, sample, score, filter, and lay tokens out for the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from harness.api import Rollout, Sequences, Step, sample_counts
from harness.foundation.clock import Clock
from harness.foundation.seeds import stable_seed
from harness.numerics.experts import OWN
from harness.objective.advantage import shaped
from harness.run.run import Collected, Run
from harness.tasks import Item, Score
from harness.trainers.dynamic_sampling import filled, num_drawn
from harness.trainers.stopping import stopped


def collect(run: Run, step: Step, clock: Clock) -> Collected:
    """Sample and score one rollout batch.

    With dynamic sampling (DAPO), prompts whose samples all earn the same raw reward are dropped and more are sampled
    until the batch is full. Raises ValueError after `max_gen_batches`.
    """
    algo, device = run.config.algo, run.trainer.parameters[0].device
    drawn: list[tuple[list[Item], Rollout, list[Score]]] = []

    def sample() -> list[float]:
        prompts = next_items(run)
        with clock("generate"):
            seed = stable_seed(run.config.seed, "rollout", step.index, len(drawn))
            rollout = stopped(generate(run, [item.prompt for item in prompts], seed), run.task)
        with clock("reward"):
            repeated = [item for item in prompts for _ in range(algo.group_size)]
            drawn.append((repeated, rollout, run.task.score(repeated, rollout.responses())))
        return [score.reward for score in drawn[-1][2]]

    kept = filled(algo, sample)
    with clock("reward"):
        batches = list(zip(drawn, kept, strict=True))
        items = [repeated[i] for (repeated, _, _), rows in batches for i in rows]
        scores = [found[i] for (_, _, found), rows in batches for i in rows]
        rollout = join_rollouts([take_rollout(each, rows) for (_, each, _), rows in batches], run.task.pad_id)
        seqs = sequences(items, rollout, run.task.pad_id, device)
        if "allowed_ids" in run.composed.needs(step):
            assert rollout.log_probs is not None
            seqs = replace(seqs, allowed=(rollout.log_probs > -torch.inf).to(device))
        if "routing" in run.composed.needs(step):
            assert rollout.experts is not None
            seqs = replace(seqs, experts=fitted(rollout.experts, seqs.ids.shape[1]).to(device))
    num_tokens = sum(int(each.lengths.sum()) for _, each, _ in drawn)
    return Collected(
        seqs=seqs, rollout=rollout, items=items, scores=scores, num_tokens=num_tokens, num_batches=len(drawn)
    )


def generate(run: Run, prompts: Sequence[Sequence[int]], seed: int) -> Rollout:
    """`group_size` responses to each prompt, adjacent: from the plan's own sampler, or by shares from several, in their
    order."""
    counts = sample_counts(run.composed.plan, run.config.algo.group_size)
    names = [other.name for other in run.others]
    seeds = [seed, *(stable_seed(seed, "sampler", name) for name in names)]
    rollouts = [
        engine.generate(
            prompts, num_samples=count, max_new_tokens=run.max_new_tokens,
            temperature=run.config.engine.temperature,
            top_p=run.config.engine.top_p, seed=each,
        )
        for engine, count, each in zip(run.engines, counts, seeds, strict=True)
    ]  # fmt: skip
    if len(rollouts) == 1:
        return rollouts[0]
    sampler = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts) * len(prompts))
    prompt = torch.cat([torch.arange(len(prompts)).repeat_interleave(count) for count in counts])
    order = (prompt * len(counts) + sampler).argsort(stable=True)
    joined = join_rollouts(rollouts, run.task.pad_id)
    sampler = sampler.to(joined.lengths.device)
    return take_rollout(replace(joined, sampler=sampler), order.tolist())


def next_items(run: Run) -> list[Item]:
    """The next prompts of the run's own order."""
    count = num_drawn(run.config.algo)
    positions = range(run.next_prompt, run.next_prompt + count)
    run.next_prompt += count
    return run.items_at(positions)


def take_rollout(rollout: Rollout, rows: list[int]) -> Rollout:
    """Some rows of a rollout; all rows are the rollout itself."""
    if rows == list(range(len(rollout.lengths))):
        return rollout
    index = torch.tensor(rows, dtype=torch.int64, device=rollout.lengths.device)
    every: dict[str, Any] = {field.name: getattr(rollout, field.name) for field in fields(rollout)}
    return replace(rollout, **{name: value[index] for name, value in every.items() if value is not None})


def join_rollouts(rollouts: Sequence[Rollout], pad_id: int) -> Rollout:
    """Several rollouts joined into one, padded to the longest."""
    if len(rollouts) == 1:
        return rollouts[0]
    width = max(r.token_ids.shape[1] for r in rollouts)
    pad = torch.nn.functional.pad
    experts = [r.experts for r in rollouts if r.experts is not None]
    samplers = [r.sampler for r in rollouts if r.sampler is not None]
    versions = [pad(r.version, (0, width - r.version.shape[1])) for r in rollouts if r.version is not None]
    wide = [(r.log_probs, width - r.token_ids.shape[1]) for r in rollouts if r.log_probs is not None]
    return Rollout(
        token_ids=torch.cat([pad(r.token_ids, (0, width - r.token_ids.shape[1]), value=pad_id) for r in rollouts]),
        logp=torch.cat([pad(r.logp, (0, width - r.logp.shape[1])) for r in rollouts]),
        lengths=torch.cat([r.lengths for r in rollouts]),
        truncated=torch.cat([r.truncated for r in rollouts]),
        log_probs=torch.cat([pad(x, (0, 0, 0, more)) for x, more in wide]) if wide else None,
        sampler=torch.cat(samplers) if samplers else None,
        version=torch.cat(versions) if versions else None,
        experts=torch.cat([fitted(x, max(x.shape[1] for x in experts)) for x in experts]) if experts else None,
    )


def fitted(experts: Tensor, width: int) -> Tensor:
    """Experts [B, P, layers, k] of `width` positions: without those past the longest response, or with none given."""
    more = max(0, width - experts.shape[1])
    return torch.nn.functional.pad(experts[:, :width], (0, 0, 0, 0, 0, more), value=OWN)


def sequences(items: Sequence[Item], rollout: Rollout, pad_id: int, device: torch.device) -> Sequences:
    """Prompt and response side by side, right padded."""
    tokens = rollout.token_ids.to(device)
    lens = [len(item.prompt) for item in items]
    sampled = torch.arange(tokens.shape[1], device=device) < rollout.lengths.to(device)[:, None]
    longest = max(lens)
    distinct = {id(item): item.prompt for item in items}  # samples of one prompt share their item
    place = {key: i for i, key in enumerate(distinct)}
    padded = [(*prompt, *[pad_id] * (longest - len(prompt))) for prompt in distinct.values()]
    prompts = torch.tensor(padded, device=device)[[place[id(item)] for item in items]]
    if min(lens) == longest:
        return Sequences(ids=torch.cat((prompts, tokens), 1), prompt_lens=longest, token_ids=tokens, sampled=sampled)
    prompt_lens = torch.tensor(lens, device=device)
    ids = torch.cat((prompts, torch.full_like(tokens, pad_id)), 1)
    ids.scatter_(1, prompt_lens[:, None] + torch.arange(tokens.shape[1], device=device), tokens)
    return Sequences(ids=ids, prompt_lens=prompt_lens, token_ids=tokens, sampled=sampled)


def groups(run: Run, count: int) -> Tensor:
    """[count] int64: the prompt of each row of a batch, the samples of a prompt adjacent."""
    return torch.arange(count) // run.config.algo.group_size


def advantages(
    run: Run, scores: Sequence[Score], rollout: Rollout, sampled: Tensor
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """(mask [B, T], adv [B, T], metrics) of a batch: its rewards shaped and compared within the groups of a prompt.

    sampled [B, T] bool; the samples of a prompt are adjacent.
    """
    device = sampled.device
    group = groups(run, len(scores)).to(device)
    mask, adv, metrics = shaped(
        run.config.algo, run.max_new_tokens, [score.reward for score in scores], rollout.lengths.to(device),
        rollout.truncated.to(device), sampled, group,
    )  # fmt: skip
    metrics["reward/unparsable_frac"] = sum(not score.is_parsable for score in scores) / len(scores)
    return mask, adv, metrics
