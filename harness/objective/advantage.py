"""Advantages of groups of samples, and the data rules of DAPO. Pure functions of scores, groups and lengths.

A group is what one prompt produced, named by an id, wherever its members stand in the batch. Statistics run over all
members, also those that a correction rejects later. Left out: value models, token-level rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

AdvantageKind = Literal["grpo", "dr_grpo", "loo", "batch"]
KINDS: tuple[AdvantageKind, ...] = ("grpo", "dr_grpo", "loo", "batch")


RewardScale = Literal["zero_one", "plus_minus"]
"""Rewards of a wrong and a right answer: 0 and 1, or -1 and +1."""


class Shaping(Protocol):
    """Fields of the algorithm's configuration that `shaped` reads."""

    @property
    def advantage(self) -> AdvantageKind: ...
    @property
    def adv_eps(self) -> float: ...
    @property
    def overlong_buffer(self) -> int: ...
    @property
    def overlong_factor(self) -> float: ...
    @property
    def reward_scale(self) -> RewardScale: ...
    @property
    def overlong_filter(self) -> bool: ...


def shaped(
    algo: Shaping, limit: int, rewards: Sequence[float], lengths: Tensor, truncated: Tensor, sampled: Tensor,
    group: Tensor,
) -> tuple[Tensor, Tensor, dict[str, float]]:  # fmt: skip
    """(mask [B, T], adv [B, T], metrics): scale, overlong penalty and filter, then group advantages over all members.

    rewards: B raw rewards, 0 to 1; lengths [B] int64, tokens; truncated [B] bool; sampled [B, T] bool; group [B] int64,
    any ids; `limit`: tokens.
    """
    raw = torch.tensor(rewards, dtype=torch.float32, device=sampled.device)
    total = raw if algo.reward_scale == "zero_one" else 2 * raw - 1
    if algo.overlong_buffer:
        total = total + overlong_penalty(lengths, limit, algo.overlong_buffer, algo.overlong_factor)
    adv = group_advantage(total, group, algo.advantage, algo.adv_eps)
    mask = sampled & ~truncated[:, None] if algo.overlong_filter else sampled
    worst, best = group_range(raw, group)
    means = {
        "reward/mean": total,
        "reward/accuracy": raw,
        "reward/best_of_group": best,
        "rollout/length_mean": lengths.float(),
        "rollout/truncated_frac": truncated.float(),
        "reward/informative_frac": (best > worst).float(),
    }
    values = torch.stack([value.mean() for value in means.values()]).tolist()
    return mask, adv[:, None].expand(mask.shape), dict(zip(means, values, strict=True))


def group_advantage(scores: Tensor, group: Tensor, kind: AdvantageKind = "grpo", eps: float = 1e-6) -> Tensor:
    """Advantage of every sample against its group.

    scores [B] float, group [B] int64 (any ids) -> [B] float32, constants. With mean and std (ddof 1) of the group:
    grpo     (s - mean) / (std + eps)                  arXiv 2402.03300; eps 1e-6 in verl, 1e-4 in TRL
    dr_grpo  s - mean                                  arXiv 2503.20783
    loo      s - mean of the others, divided by their std + eps where that std > 0    NeMo-RL's default
    batch    (s - mean) / (std of the whole batch + eps)    TRL, scale_rewards="batch"
    A group of one keeps its score, with mean 0 and std 1, in grpo and dr_grpo (verl) and gets 0 in loo and batch
    (NeMo-RL, TRL). Two-pass and in float64: equal scores give exactly 0, where 1/eps would blow up float32 rounding.
    Raises ValueError for another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"advantage kind: unknown {kind!r} (choose {', '.join(KINDS)})")
    s = scores.float().double()
    _, index, counts = torch.unique(group, return_inverse=True, return_counts=True)
    size = counts.double()[index]
    is_lone = size == 1
    others = (size - 1).clamp(min=1)
    centred = s - _group_sum(s, index, counts) / size
    if kind == "batch":
        spread = s.std() if s.numel() > 1 else s.new_ones(())
        return _scaled(centred, spread, eps)
    squares = _group_sum(centred.square(), index, counts)
    if kind != "loo":
        centred = torch.where(is_lone, s, centred)
        std = torch.where(is_lone, 1.0, (squares / others).sqrt())
        return centred.float() if kind == "dr_grpo" else _scaled(centred, std, eps)
    # Leaving s_i out of n values moves the mean by centred / (n - 1) and the squares by centred^2 * n / (n - 1).
    left_out = centred * size / others
    rest = squares - centred.square() * size / others
    std = (rest.clamp(min=0) / (size - 2).clamp(min=1)).sqrt()
    has_spread = (size > 2) & (rest > 1e-12 * squares)
    return torch.where(has_spread, left_out / (std + eps), left_out).float()


def _scaled(centred: Tensor, spread: Tensor, eps: float) -> Tensor:
    """[B] float32: centred / (spread + eps), and 0 without a spread, where eps may be 0, too."""
    return torch.where(spread > 0, centred / (spread + eps), 0.0).float()


def _group_sum(values: Tensor, index: Tensor, counts: Tensor) -> Tensor:
    """[B] float64 -> [B], each entry the sum over its group."""
    return torch.zeros(counts.shape[0], dtype=values.dtype, device=values.device).index_add(0, index, values)[index]


def overlong_penalty(lengths: Tensor, max_len: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Soft penalty added to the score of long responses (DAPO, arXiv 2503.14476 eq. 13).

    lengths [B] int, tokens -> [B] float32: 0 up to max_len - buffer, then linear, -factor from max_len on. Raises
    ValueError for a buffer that is not from 1 to max_len.
    """
    if not 0 < buffer <= max_len:
        raise ValueError(f"overlong buffer: {buffer} tokens (choose 1 to the maximum length, {max_len})")
    return ((max_len - buffer - lengths).float() / buffer).clamp(-1.0, 0.0) * factor


def informative_groups(raw_metric: Tensor, group: Tensor) -> Tensor:
    """Groups that dynamic sampling keeps: those whose raw task metric is not constant (DAPO, arXiv 2503.14476).

    raw_metric [B] float, the accuracy and never the shaped reward: a length penalty would make every group look
    informative. group [B] int64 -> [num_groups] bool in ascending order of the group id.
    """
    low, high = group_range(raw_metric, group)
    return high > low


def group_range(values: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """(lowest, highest) value of every group; of right and wrong answers the highest, averaged, is pass@group_size.

    values [B] float, group [B] int64 -> twice [num_groups] float32, in ascending order of the group id.
    """
    ids, index = torch.unique(group, return_inverse=True)
    empty, values = torch.full((ids.shape[0],), torch.inf, device=values.device), values.float()
    return empty.scatter_reduce(0, index, values, "amin"), (-empty).scatter_reduce(0, index, values, "amax")
