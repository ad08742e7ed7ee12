"""One rollout batch: choose prompts, sample, score, filter, shape rewards, and lay tokens out for the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from harness.api import Correction, Rollout, Sequences, Step, TokenBatch
from harness.config.schema import AlgoConfig
from harness.foundation.clock import Clock
from harness.foundation.seeds import generator, stable_seed
from harness.objective.advantage import group_advantage, informative_groups, overlong_penalty
from harness.run.run import Run
from harness.tasks import Item, Score


def collect(run: Run, step: Step, clock: Clock) -> tuple[Sequences, Tensor, Tensor, Rollout, dict[str, float]]:
    """Sample, score and shape one rollout batch: (sequences, mask, adv, rollout, metrics).

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
        with clock("reward"):
            repeated = [item for item in drawn for _ in range(algo.group_size)]
            found = run.task.score(repeated, responses(rollout))
            num_batches, num_tokens = num_batches + 1, num_tokens + int(rollout.lengths.sum())
            room = algo.num_prompts - len(items) // algo.group_size
            kept = chosen_rows(found, algo.group_size, room) if algo.dynamic_sampling else list(range(len(repeated)))
            rollouts.append(take_rollout(rollout, kept))
            items += [repeated[i] for i in kept]
            scores += [found[i] for i in kept]
    with clock("reward"):
        rollout = join_rollouts(rollouts, run.task.pad_id)
        seqs = sequences(items, rollout, run.task.pad_id, device)
        mask, adv, metrics = shape_rewards(run, scores, rollout, seqs.sampled)
    metrics |= {"rollout/tokens": float(num_tokens), "rollout/gen_batches": float(num_batches)}
    return seqs, mask, adv, rollout, metrics


def next_items(run: Run) -> list[Item]:
    """The next prompts of the run's own order: hashed indices, or a shuffled epoch where the data is finite."""
    count = run.config.algo.num_prompts
    positions = range(run.next_prompt, run.next_prompt + count)
    run.next_prompt += count
    return run.task.sample("train", prompt_indices(run.config.seed, positions, run.task.num_train))


def prompt_indices(seed: int, positions: range, num_train: int | None) -> list[int]:
    """The items at positions of a run's own order. `num_train`: items that there are; None: any index is one."""
    if num_train is None:
        return [stable_seed(seed, "prompt", i) % 2**31 for i in positions]
    size = num_train
    orders = {
        e: torch.randperm(size, generator=generator("cpu", seed, "epoch", e)) for e in {i // size for i in positions}
    }
    return [int(orders[i // size][i % size]) for i in positions]


def responses(rollout: Rollout) -> list[list[int]]:
    """Token ids without padding."""
    return [ids[:n] for ids, n in zip(rollout.token_ids.tolist(), rollout.lengths.tolist(), strict=True)]


def chosen_rows(scores: Sequence[Score], group_size: int, room: int) -> list[int]:
    """Rows of the first `room` groups whose raw rewards differ."""
    group = torch.arange(len(scores)) // group_size
    is_kept = informative_groups(torch.tensor([s.reward for s in scores]), group)
    groups = is_kept.nonzero().flatten()[:room].tolist()
    return [g * group_size + i for g in groups for i in range(group_size)]


def take_rollout(rollout: Rollout, rows: list[int]) -> Rollout:
    """Some rows of a rollout; all of them cost nothing."""
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


def join_rollouts(rollouts: Sequence[Rollout], pad_id: int) -> Rollout:
    """One rollout of several, padded to the longest."""
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


def shape_rewards(
    run: Run, scores: Sequence[Score], rollout: Rollout, sampled: Tensor
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """`shaped` of a rollout, whose groups lie one after another."""
    device = sampled.device
    group = torch.arange(len(scores), device=device) // run.config.algo.group_size
    lengths, truncated = rollout.lengths.to(device), rollout.truncated.to(device)
    return shaped(run.config.algo, run.max_new_tokens, scores, lengths, truncated, sampled, group)


def shaped(
    algo: AlgoConfig, limit: int, scores: Sequence[Score], lengths: Tensor, truncated: Tensor, sampled: Tensor,
    group: Tensor,
) -> tuple[Tensor, Tensor, dict[str, float]]:  # fmt: skip
    """(mask [B, T], adv [B, T], metrics): overlong penalty and filter, then group advantages over all members.

    lengths [B] int64, tokens; truncated [B] bool; sampled [B, T] bool; group [B] int64, any ids; `limit`: tokens.
    """
    raw = torch.tensor([s.reward for s in scores], dtype=torch.float32, device=sampled.device)
    total = raw
    if algo.overlong_buffer:
        total = raw + overlong_penalty(lengths, limit, algo.overlong_buffer, algo.overlong_factor)
    adv = group_advantage(total, group, algo.advantage, algo.adv_eps)
    mask = sampled & ~truncated[:, None] if algo.overlong_filter else sampled
    informative = informative_groups(raw, group).float().mean()
    values = torch.stack(
        [total.mean(), raw.mean(), lengths.float().mean(), truncated.float().mean(), informative]
    ).tolist()
    names = (
        "reward/mean",
        "reward/accuracy",
        "rollout/length_mean",
        "rollout/truncated_frac",
        "reward/informative_frac",
    )
    unparsable = sum(not s.is_parsable for s in scores) / len(scores)
    metrics = dict(zip(names, values, strict=True)) | {"reward/unparsable_frac": unparsable}
    return mask, adv[:, None].expand(mask.shape), metrics


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
