"""Advantages: golden values, a loop as oracle, exact zeros, and the data rules of DAPO."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.foundation.seeds import generator
from harness.objective.advantage import (
    KINDS,
    AdvantageKind,
    group_advantage,
    group_range,
    informative_groups,
    overlong_penalty,
)
from harness.records.sample_scores import pass_at_k

ONE_RIGHT = torch.tensor([1.0, 0.0, 0.0])
SAME = torch.zeros(3, dtype=torch.int64)


def near(values: Tensor, expected: list[float], atol: float = 2e-6) -> None:
    """Equal to published digits."""
    torch.testing.assert_close(values, torch.tensor(expected), rtol=0, atol=atol)


def test_golden_values() -> None:
    near(group_advantage(ONE_RIGHT, SAME, "grpo", 1e-6), [1.1546985, -0.5773493, -0.5773493], atol=2e-7)
    near(group_advantage(ONE_RIGHT, SAME, "dr_grpo", 1e-6), [2 / 3, -1 / 3, -1 / 3])
    near(group_advantage(ONE_RIGHT, SAME, "loo", 1e-6), [1.0, -0.7071068, -0.7071068])
    near(group_advantage(ONE_RIGHT, SAME, "grpo", 1e-4), [1.1545006, -0.5772503, -0.5772503])


def naive(scores: list[float], groups: list[int], kind: AdvantageKind, eps: float) -> list[float]:
    """The rules in plain Python, one sample at a time."""

    def std(values: list[float]) -> float:
        if len(values) < 2:
            return 0.0
        mean = sum(values) / len(values)
        return (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5

    out: list[float] = []
    for i, (score, group) in enumerate(zip(scores, groups, strict=True)):
        members = [s for s, g in zip(scores, groups, strict=True) if g == group]
        others = [s for j, (s, g) in enumerate(zip(scores, groups, strict=True)) if g == group and j != i]
        mean = sum(members) / len(members)
        if kind in ("grpo", "dr_grpo"):
            centre, spread = (0.0, 1.0) if len(members) == 1 else (mean, std(members))
            out.append((score - centre) / (spread + eps) if kind == "grpo" else score - centre)
        elif kind == "batch":
            out.append((score - mean) / (std(scores) + eps))
        elif not others:
            out.append(0.0)
        else:
            centred = score - sum(others) / len(others)
            out.append(centred / (std(others) + eps) if std(others) > 1e-12 else centred)
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eps", [1e-6, 1e-4])
def test_equals_a_loop_over_scattered_unequal_groups(kind: AdvantageKind, eps: float) -> None:
    rng = generator("cpu", "advantage", kind)
    groups = torch.randint(-3, 4, (40,), generator=rng) * 1_000_003
    groups[7] = 99
    for scores in (torch.randn(40, generator=rng), torch.randint(0, 2, (40,), generator=rng).float()):
        expected = naive(scores.tolist(), groups.tolist(), kind, eps)
        near(group_advantage(scores, groups, kind, eps), expected, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0.1, -0.3, 1 / 3, 1e8 / 3])
def test_equal_scores_give_exactly_zero(kind: AdvantageKind, value: float) -> None:
    for size in (2, 3, 7, 11):
        scores, group = torch.full((size,), value), torch.zeros(size, dtype=torch.int64)
        for eps in (1e-6, 0.0):
            assert torch.equal(group_advantage(scores, group, kind, eps), torch.zeros(size))


@pytest.mark.parametrize("kind", KINDS)
def test_centred_shift_invariant_and_scale_invariant(kind: AdvantageKind) -> None:
    rng = generator("cpu", "invariance", kind)
    scores, group = torch.randn(24, generator=rng), torch.arange(24) // 4
    adv = group_advantage(scores, group, kind, 1e-6)
    shifted = group_advantage(scores + 8.0, group, kind, 1e-6)
    torch.testing.assert_close(shifted, adv, rtol=0, atol=2e-5)
    if kind != "loo":
        torch.testing.assert_close(adv.view(6, 4).sum(1), torch.zeros(6), rtol=0, atol=1e-5)
    scaled = group_advantage(scores * 4.0, group, kind, 1e-6)
    torch.testing.assert_close(scaled, adv * 4.0 if kind == "dr_grpo" else adv, rtol=0, atol=2e-5)
    order = torch.randperm(24, generator=rng)
    assert torch.equal(group_advantage(scores[order], group[order], kind, 1e-6), adv[order])


def test_leave_one_out_centring_is_the_rescaled_group_mean() -> None:
    scores, group = torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.int64)
    near(group_advantage(scores, group, "loo", 1e-6), [1.0, -1.0])
    near(2.0 * group_advantage(scores, group, "dr_grpo", 1e-6), [1.0, -1.0])


def test_a_group_of_one() -> None:
    scores, group = torch.tensor([0.5, 1.0, 0.0]), torch.tensor([5, 2, 2])
    expected = {"grpo": 0.5 / (1 + 1e-6), "dr_grpo": 0.5, "loo": 0.0, "batch": 0.0}
    for kind in KINDS:
        near(group_advantage(scores, group, kind, 1e-6)[:1], [expected[kind]], atol=1e-7)
    near(group_advantage(scores[:1], group[:1], "batch", 1e-6), [0.0])


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match=r"unknown .ppo. .choose grpo, dr_grpo, loo, batch"):
        group_advantage(ONE_RIGHT, SAME, "ppo", 1e-6)  # pyright: ignore[reportArgumentType]


def test_overlong_penalty() -> None:
    lengths = torch.tensor([1, 16384, 18432, 20480, 21000])
    near(overlong_penalty(lengths, 20480, 4096), [0.0, 0.0, -0.5, -1.0, -1.0])
    near(overlong_penalty(lengths, 20480, 4096, 0.5), [0.0, 0.0, -0.25, -0.5, -0.5])
    for buffer in (0, -1, 20481):
        with pytest.raises(ValueError, match=f"overlong buffer: {buffer} tokens"):
            overlong_penalty(lengths, 20480, buffer)


def test_dynamic_sampling_reads_the_raw_metric() -> None:
    group = torch.tensor([7, 3, 7, 3, 1, 1])
    accuracy = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    assert informative_groups(accuracy, group).tolist() == [False, True, False]
    shaped = accuracy + overlong_penalty(torch.tensor([8, 8, 10, 8, 8, 9]), 10, 4)
    assert informative_groups(shaped, group).tolist() == [True, True, True]


def test_the_best_of_a_group_is_pass_at_group_size() -> None:
    generator = torch.Generator().manual_seed(0)
    right = (torch.rand(40, 16, generator=generator) < 0.05).float()
    order = torch.randperm(640, generator=generator)
    low, best = group_range(right.flatten()[order], (torch.arange(640) // 16)[order])
    assert best.tolist() == pass_at_k(right.numpy(), 16).tolist() and 0.2 < float(best.mean()) < 0.8
    assert float(low.sum()) == 0.0
    partial = group_range(torch.tensor([0.25, 0.5, 0.0, -1.0]), torch.tensor([1, 1, 0, 0]))
    assert [x.tolist() for x in partial] == [[-1.0, 0.25], [0.0, 0.5]]
