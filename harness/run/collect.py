"""One rollout batch: choose prompts, sample, score, filter, and lay tokens out for the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from harness.api import Correction, Rollout, Sequences, Step, TokenBatch
from harness.foundation.clock import Clock
from harness.foundation.seeds import generator, stable_seed
from harness.objective.advantage import informative_groups, shaped
from harness.run.run import Collected, Run
from harness.tasks import Item, Score, Stopping, Task
from harness.tasks.prompt_order import prompt_indices


def collect(run: Run, step: Step, clock: Clock) -> Collected:
    """Sample and score one rollout batch.

    With dynamic sampling (DAPO), prompts whose samples all earn the same raw reward are dropped and more are sampled
    until the batch is full. Raises ValueError after `max_gen_batches`.
    """
    algo, device = run.config.algo, run.trainer.parameters[0].device
    items: list[Item] = []
    rollouts: list[Rollout] = []
    scores: list[Score] = []
    num_batches = num_tokens = 0
    while len(items) < algo.num_prompts * algo.group_size:
        if algo.max_gen_batches and num_batches >= algo.max_gen_batches:
            raise ValueError(
                f"algo.max_gen_batches={algo.max_gen_batches}: only {len(items) // algo.group_size} of "
                f"{algo.num_prompts} prompts had samples that differ in reward"
            )
        drawn = next_items(run)
        with clock("generate"):
            rollout = run.engine.generate(
                [item.prompt for item in drawn],
                num_samples=algo.group_size,
                max_new_tokens=run.max_new_tokens,
                temperature=run.config.engine.temperature,
                seed=stable_seed(run.config.seed, "rollout", step.index, num_batches),
            )
            rollout = stopped(rollout, run.task)
        with clock("reward"):
            repeated = [item for item in drawn for _ in range(algo.group_size)]
            found = run.task.score(repeated, rollout.responses())
            num_batches, num_tokens = num_batches + 1, num_tokens + int(rollout.lengths.sum())
            room = algo.num_prompts - len(items) // algo.group_size
            kept = chosen_rows(found, algo.group_size, room) if algo.dynamic_sampling else list(range(len(repeated)))
            rollouts.append(take_rollout(rollout, kept))
            items += [repeated[i] for i in kept]
            scores += [found[i] for i in kept]
    with clock("reward"):
        rollout = join_rollouts(rollouts, run.task.pad_id)
        seqs = sequences(items, rollout, run.task.pad_id, device)
    return Collected(
        seqs=seqs, rollout=rollout, items=items, scores=scores, num_tokens=num_tokens, num_batches=num_batches
    )


def next_items(run: Run) -> list[Item]:
    """The next prompts of the run's own order: hashed indices, or a shuffled epoch where the data is finite."""
    count = run.config.algo.gen_prompts or run.config.algo.num_prompts
    positions = range(run.next_prompt, run.next_prompt + count)
    run.next_prompt += count
    return run.task.sample("train", prompt_indices(run.config.seed, positions, run.task.num_train))


def chosen_rows(scores: Sequence[Score], group_size: int, room: int) -> list[int]:
    """Rows of the first `room` groups whose raw rewards differ."""
    group = torch.arange(len(scores)) // group_size
    is_kept = informative_groups(torch.tensor([s.reward for s in scores]), group)
    groups = is_kept.nonzero().flatten()[:room].tolist()
    return [g * group_size + i for g in groups for i in range(group_size)]


def take_rollout(rollout: Rollout, rows: list[int]) -> Rollout:
    """Some rows of a rollout; all rows are the rollout itself."""
    if len(rows) == len(rollout.lengths):
        return rollout
    index = torch.tensor(rows, dtype=torch.int64, device=rollout.lengths.device)
    return Rollout(
        token_ids=rollout.token_ids[index],
        logp=rollout.logp[index],
        lengths=rollout.lengths[index],
        truncated=rollout.truncated[index],
        log_probs=None if rollout.log_probs is None else rollout.log_probs[index],
    )


def stopped(rollout: Rollout, task: Task) -> Rollout:
    """A rollout whose responses end where the task says (`Stopping`). What came before was sampled as it would have
    been by an engine that stops there."""
    if not isinstance(task, Stopping):
        return rollout
    kept = torch.tensor([task.num_kept(response) for response in rollout.responses()]).to(rollout.lengths)
    is_cut = kept < rollout.lengths
    if not is_cut.any():
        return rollout
    places = torch.arange(rollout.token_ids.shape[1], device=kept.device)
    is_left = (places >= kept[:, None]) & (places < rollout.lengths[:, None])
    return replace(
        rollout, lengths=kept, truncated=rollout.truncated & ~is_cut, logp=rollout.logp.masked_fill(is_left, 0.0),
        token_ids=rollout.token_ids.masked_fill(is_left, task.pad_id),
    )  # fmt: skip


def join_rollouts(rollouts: Sequence[Rollout], pad_id: int) -> Rollout:
    """Several rollouts joined into one, padded to the longest."""
    if len(rollouts) == 1:
        return rollouts[0]
    width = max(r.token_ids.shape[1] for r in rollouts)
    pad = torch.nn.functional.pad
    wide = [(r.log_probs, width - r.token_ids.shape[1]) for r in rollouts if r.log_probs is not None]
    return Rollout(
        token_ids=torch.cat([pad(r.token_ids, (0, width - r.token_ids.shape[1]), value=pad_id) for r in rollouts]),
        logp=torch.cat([pad(r.logp, (0, width - r.logp.shape[1])) for r in rollouts]),
        lengths=torch.cat([r.lengths for r in rollouts]),
        truncated=torch.cat([r.truncated for r in rollouts]),
        log_probs=torch.cat([pad(x, (0, 0, 0, more)) for x, more in wide]) if wide else None,
    )


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


def advantages(
    run: Run, scores: Sequence[Score], rollout: Rollout, sampled: Tensor
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """(mask [B, T], adv [B, T], metrics) of a batch: its rewards shaped and compared within the groups of a prompt.

    sampled [B, T] bool; the samples of a prompt are adjacent.
    """
    device = sampled.device
    group = torch.arange(len(scores), device=device) // run.config.algo.group_size
    mask, adv, metrics = shaped(
        run.config.algo, run.max_new_tokens, [score.reward for score in scores], rollout.lengths.to(device),
        rollout.truncated.to(device), sampled, group,
    )  # fmt: skip
    metrics["reward/unparsable_frac"] = sum(not score.is_parsable for score in scores) / len(scores)
    return mask, adv, metrics


def take_batch(b: TokenBatch, rows: Tensor) -> TokenBatch:
    """Some rows of a batch."""
    fields = {name: getattr(b, name)[rows] for name in ("token_ids", "mask", "adv", "rollout_logp", "old_logp")}
    dicts = {name: {k: v[rows] for k, v in getattr(b, name).items()} for name in ("shadow", "extras")}
    return replace(b, **fields, **dicts)


def take_correction(c: Correction, rows: Tensor) -> Correction:
    """Some rows of a correction."""
    return Correction(weight=c.weight[rows], keep=c.keep[rows], clip_low=c.clip_low[rows], clip_high=c.clip_high[rows])


def minibatches(run: Run, step: Step) -> list[Tensor]:
    """Row indices of every update, in order; the samples of one prompt stay together."""
    algo = run.config.algo
    if algo.num_minibatches == 1:
        return [torch.arange(algo.num_prompts * algo.group_size)] * algo.num_epochs
    members = torch.arange(algo.group_size)
    batches: list[Tensor] = []
    for epoch in range(algo.num_epochs):
        order = torch.randperm(algo.num_prompts, generator=generator("cpu", step.seed, "minibatch", step.index, epoch))
        for prompts in order.tensor_split(algo.num_minibatches):
            batches.append((prompts[:, None] * algo.group_size + members).flatten())
    return batches
