"""Partial rollouts: responses that a step leaves unfinished go on with the weights of the next one.

    step t: as long as fewer than num_prompts groups are complete: admit what is missing as new groups, then at most K
            more tokens of every open response, by weights t -> the oldest num_prompts complete groups are the batch;
            complete ones beyond that wait, and what is open goes on at step t + 1, by weights t + 1

K is `algo.partial_rollouts`, the unit in which asynchronous systems' time is cut here: verl's fully asynchronous
trainer, AReaL and Kimi k1.5 stop their engines at a sync and go on with the kept tokens. A token keeps the log-prob of
the weights that sampled it, so the behaviour policy is a mixture inside a response, and every ratio of a token is
against its own version (`TokenBatch.version`); nothing is weighed again where the version changes. The cache of the
kept tokens is computed again by the new weights, as AReaL does. Short responses come first, as they do there. A
response that needs n times K tokens has n versions, but for the first step, which samples until a batch is there; no
token is older than 2 ceil(limit / K) steps, and with K at the limit a run is the synchronous one, bit for bit.
Left out: dynamic sampling, several samplers, and what engines keep beside tokens (experts, distributions).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from harness.api import Rollout, Step, TokenBatch
from harness.foundation.clock import Clock
from harness.foundation.seeds import stable_seed
from harness.run.collect import sequences
from harness.run.run import Collected, Group, Response, Run
from harness.trainers.stopping import stopped


def collect_partial(run: Run, step: Step, clock: Clock) -> Collected:
    """Sample until enough groups are complete, score the oldest of them, and keep the rest for the next step."""
    algo, groups = run.config.algo, run.in_flight
    num_tokens, num_slices = 0, 0
    while sum(group.is_complete for group in groups) < algo.num_prompts:
        groups = [*groups, *admitted(run, algo.num_prompts - sum(group.is_complete for group in groups))]
        with clock("generate"):
            before = sum(group.num_tokens for group in groups)
            groups = continued(run, groups, step.index, stable_seed(run.config.seed, "rollout", step.index, num_slices))
            num_tokens, num_slices = num_tokens + sum(group.num_tokens for group in groups) - before, num_slices + 1
    complete = [group for group in groups if group.is_complete][: algo.num_prompts]
    run.in_flight = [group for group in groups if all(group is not taken for taken in complete)]
    with clock("reward"):
        items = [group.item for group in complete for _ in group.responses]
        rollout = joined([response for group in complete for response in group.responses], run.task.pad_id)
        scores = run.task.score(items, rollout.responses())
        seqs = sequences(items, rollout, run.task.pad_id, run.trainer.parameters[0].device)
    return Collected(
        seqs=seqs, rollout=rollout, items=items, scores=scores, num_tokens=num_tokens, num_batches=num_slices
    )


def admitted(run: Run, count: int) -> list[Group]:
    """The next prompts of the run's order, without a token each."""
    positions = range(run.next_prompt, run.next_prompt + count)
    run.next_prompt += len(positions)
    empty = (Response(tokens=(), logp=(), version=()),) * run.config.algo.group_size
    return [
        Group(position=at, item=item, responses=empty)
        for at, item in zip(positions, run.items_at(positions), strict=True)
    ]


def continued(run: Run, groups: Sequence[Group], version: int, seed: int) -> list[Group]:
    """Groups after at most K more tokens of every open response, by the weights that the engine has."""
    limit, size = run.max_new_tokens, run.config.algo.partial_rollouts
    places = [(g, i) for g, group in enumerate(groups) for i, r in enumerate(group.responses) if not r.is_ended]
    found = {g: list(group.responses) for g, group in enumerate(groups)}
    rooms = {place: min(size, limit - len(found[place[0]][place[1]].tokens)) for place in places}
    for room in sorted(set(rooms.values()), reverse=True):
        asked = [place for place in places if rooms[place] == room]
        rollout = run.engine.generate(
            [(*groups[g].item.prompt, *found[g][i].tokens) for g, i in asked], num_samples=1, max_new_tokens=room,
            temperature=run.config.engine.temperature, top_p=run.config.engine.top_p,
            seed=seed if room == size or size >= limit else stable_seed(seed, "room", room),
        )  # fmt: skip
        longer = [extended(found[g][i], rollout, row, version, limit) for row, (g, i) in enumerate(asked)]
        for (g, i), response in zip(asked, as_stopped(run, longer), strict=True):
            found[g][i] = response
    return [replace(group, responses=tuple(found[g])) for g, group in enumerate(groups)]


def extended(response: Response, rollout: Rollout, row: int, version: int, limit: int) -> Response:
    """A response with the tokens of one row of a rollout behind its own."""
    count = int(rollout.lengths[row])
    tokens = (*response.tokens, *(int(x) for x in rollout.token_ids[row, :count]))
    is_cut, is_full = bool(rollout.truncated[row]), len(tokens) >= limit
    return Response(
        tokens=tokens, logp=(*response.logp, *(float(x) for x in rollout.logp[row, :count])),
        version=(*response.version, *(version,) * count), is_ended=is_full or not is_cut,
        is_truncated=is_full and is_cut,
    )  # fmt: skip


def as_stopped(run: Run, responses: list[Response]) -> list[Response]:
    """Responses cut where the task says that they end (`Stopping`)."""
    kept = stopped(joined(responses, run.task.pad_id), run.task).lengths.tolist()
    return [
        response if count == len(response.tokens)
        else Response(
            tokens=response.tokens[:count], logp=response.logp[:count], version=response.version[:count], is_ended=True
        )
        for response, count in zip(responses, kept, strict=True)
    ]  # fmt: skip


def joined(responses: Sequence[Response], pad_id: int) -> Rollout:
    """Responses as a rollout, as wide as the longest."""
    width = max(len(response.tokens) for response in responses)

    def padded(name: str, fill: float, dtype: torch.dtype) -> Tensor:
        rows = [[*getattr(response, name)] for response in responses]
        return torch.tensor([row + [fill] * (width - len(row)) for row in rows], dtype=dtype)

    return Rollout(
        token_ids=padded("tokens", pad_id, torch.int64), logp=padded("logp", 0.0, torch.float32),
        lengths=torch.tensor([len(response.tokens) for response in responses]),
        truncated=torch.tensor([response.is_truncated for response in responses]),
        version=padded("version", 0, torch.int64),
    )  # fmt: skip


def age_metrics(run: Run, batch: TokenBatch) -> dict[str, float]:
    """Columns of a step with partial rollouts: how old its tokens are, and how many responses mix versions."""
    if not run.config.algo.partial_rollouts:
        return {}
    assert batch.version is not None
    age = (batch.step.index - batch.version)[batch.mask].double()
    age = age if len(age) else torch.tensor([math.nan])  # every response was filtered
    newest = batch.version.masked_fill(~batch.mask, -1).amax(1)
    oldest = batch.version.masked_fill(~batch.mask, batch.step.index + 1).amin(1)
    is_some = batch.mask.any(1)
    return {
        "staleness/age_mean": float(age.mean()),
        "staleness/age_std": float(age.std(correction=0)),
        "staleness/age_max": float(age.max()),
        "staleness/mixed_frac": float((newest > oldest)[is_some].double().mean()),
        "rollout/in_flight": float(len(run.in_flight)),
    }
