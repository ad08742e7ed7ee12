"""Parts of a batch that belong to an update: its rows, its correction, and the means over updates."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import log, nan

import pytest
import torch

from harness.api import Correction, Memory, Method, Part, Plan, Step, TokenBatch
from harness.config.compose import Composed, compose
from harness.config.schema import AlgoConfig
from harness.objective.loss import count_totals
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
from tests.toy import small_config

STEP = Step(index=3, total=9, seed=5)


def numbered(offset: int) -> torch.Tensor:
    """[4, 3], every row told by its first digit."""
    return torch.arange(4.0)[:, None] * 10 + torch.arange(3.0) + 100 * offset


def batch(**values: object) -> TokenBatch:
    tensors = {name: numbered(i) for i, name in enumerate(("adv", "rollout_logp", "old_logp"))}
    return TokenBatch(token_ids=numbered(7).long(), mask=numbered(0) > 11, step=STEP, **tensors, **values)  # type: ignore[arg-type]


def test_rows_of_a_batch_take_everything_with_them() -> None:
    rows = torch.tensor([2, 0])
    whole = batch(
        group=torch.tensor([0, 0, 1, 1]), reward=torch.tensor([0.0, 1.0, 2.0, 3.0]),
        sampler=torch.tensor([0, 1, 0, 1]), version=torch.arange(12).view(4, 3), shadow={"old": numbered(3)},
        extras={"ref_logp": numbered(4)},
    )  # fmt: skip
    some = take_batch(whole, rows)
    for name in ("token_ids", "mask", "adv", "rollout_logp", "old_logp", "group", "reward", "sampler"):
        assert torch.equal(getattr(some, name), getattr(whole, name)[rows]), name
    assert torch.equal(some.shadow["old"], numbered(3)[rows]) and torch.equal(
        some.extras["ref_logp"], numbered(4)[rows]
    )
    assert some.step == STEP
    named = {field.name for field in fields(TokenBatch)} - {"step", "shadow", "extras"}
    assert {name for name in named if len(getattr(some, name)) == 2} == named  # a field that is new is cut, too
    bare = take_batch(batch(), rows)
    assert (bare.group, bare.reward, bare.sampler) == (None, None, None)


def test_rows_of_a_correction_take_everything_with_them() -> None:
    rows = torch.tensor([3, 1, 1])
    values = {"weight": numbered(0), "keep": numbered(0) > 11, "clip_low": numbered(1), "clip_high": numbered(2)}
    assert take_correction(Correction(**values), rows).adv_shift is None
    shifted = take_correction(Correction(**values, adv_shift=numbered(3)), rows)
    for field in fields(Correction):
        assert torch.equal(getattr(shifted, field.name), (values | {"adv_shift": numbered(3)})[field.name][rows])


@pytest.mark.parametrize("mode", ["decoupled", "bypass_pg"])
@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [1.5 / 1.25, 0.5 / 1.25, 1.75 / 1.25]),  # (1.5 + 0.5 + 1.75) / 3
        ("sequence", [1.5 / 1.375, 0.5 / 1.375, 1.75 / 1.375]),  # (1 + 1.75) / 2
    ],
)
def test_normalized_weights_average_one_over_tokens_that_have_a_samplers_log_prob(
    mode: str, level: str, expected: list[float]
) -> None:
    """Two tokens of the first row have none, and the third row has one token, without: none has a ratio."""
    ratios = torch.tensor([[1.5, 0.5, 1.0, 1.0], [1.75, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    given = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0]]).bool()
    rollout_logp = torch.full((3, 4), log(0.25))
    logp = ratios.log() + rollout_logp
    found = TokenBatch(
        token_ids=torch.zeros(3, 4).long(), mask=mask, adv=torch.ones(3, 4), old_logp=logp, step=STEP,
        rollout_logp=torch.where(given, rollout_logp, nan),
    )  # fmt: skip
    config = small_config("method=flashrl", "precision=int8", f"algo.mode={mode}", f"algo.batch_normalize={level}")
    composed = compose(config)
    c = batch_correction(composed, found, config.algo)
    if mode != "decoupled":
        c = update_correction(composed, c, found, logp, config.algo)
    torch.testing.assert_close(c.weight[given], torch.tensor(expected))


def test_one_minibatch_is_the_batch_in_order() -> None:
    found = minibatches(AlgoConfig(name="grpo", num_prompts=3, group_size=2, num_epochs=2), STEP)
    assert [rows.tolist() for rows in found] == [[0, 1, 2, 3, 4, 5]] * 2


def test_minibatches_hold_every_group_once_an_epoch() -> None:
    algo = AlgoConfig(name="grpo", num_prompts=7, group_size=3, num_minibatches=3, num_epochs=4)
    found = minibatches(algo, STEP)
    assert [len(rows) for rows in found] == [9, 6, 6] * 4
    orders: list[list[int]] = []
    for epoch in range(4):
        rows = torch.cat(found[3 * epoch : 3 * epoch + 3]).view(-1, 3)
        assert torch.equal(rows, rows[:, :1] + torch.arange(3))  # the samples of a prompt stay together, in order
        orders.append((rows[:, 0] // 3).tolist())
        assert sorted(orders[-1]) == list(range(7))
    assert len(set(map(tuple, orders))) == 4
    again = minibatches(algo, STEP)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    for other in (Step(index=4, total=9, seed=5), Step(index=3, total=9, seed=6)):
        assert not torch.equal(torch.cat(minibatches(algo, other)), torch.cat(found))


@pytest.mark.parametrize(
    ("words", "mode", "expected"),
    [
        (("method=flashrl", "precision=int8"), "decoupled", False),
        (("method=flashrl", "precision=int8"), "bypass_pg", True),  # its weights follow the policy of now
        (("method=dppo_tv",), "decoupled", True),
        (("method=bf16",), "bypass_ppo", False),  # no part: nothing to tell it to
        (("method=vcpo",), "decoupled", False),
        (("method=bf16", "parts=[vcpo.ESSStep]"), "bypass_pg", True),
    ],
)
def test_which_updates_need_the_policy_of_now(words: tuple[str, ...], mode: str, expected: bool) -> None:
    composed = compose(small_config(*words))
    assert needs_current_policy(composed, AlgoConfig(name="grpo", mode=mode)) is expected  # type: ignore[arg-type]


def test_only_a_part_that_says_so_changes_the_learning_rate() -> None:
    assert update_lr_factor(compose(small_config("method=bf16")), batch(), None, AlgoConfig(name="grpo")) is None


@dataclass(frozen=True, kw_only=True)
class Seeing(Part):
    """Notes whose old log-probs every hook finds: 1 the trainer's before the batch, 2 those of now, 3 the sampler's."""

    seen: dict[str, float]

    def correct(self, c: Correction, b: TokenBatch, memory: Memory) -> Correction:
        self.seen["correct"] = float(b.old_logp[0, 0])
        return c

    def correct_update(self, c: Correction, logp: torch.Tensor, b: TokenBatch, memory: Memory) -> Correction:
        self.seen["correct_update"] = float(b.old_logp[0, 0])
        return c

    def update_lr_factor(self, b: TokenBatch, memory: Memory) -> float:
        self.seen["update_lr_factor"] = float(b.old_logp[0, 0])
        return 1.0

    def token_loss(self, logp: torch.Tensor, c: Correction, b: TokenBatch) -> torch.Tensor:
        self.seen["token_loss"] = float(b.old_logp[0, 0])
        return -logp


@pytest.mark.parametrize(
    ("mode", "correct", "factor", "loss"),
    [("decoupled", 1, 1, 1), ("bypass_ppo", 2, 2, 3), ("bypass_pg", 2, 2, 1)],
)
def test_whose_old_log_probs_each_hook_finds(mode: str, correct: int, factor: int, loss: int) -> None:
    """As `TokenBatch.old_logp` says it."""
    part = Seeing(seen={})
    method = Method(name="seeing", parts=(part,), precisions=("bf16",))
    composed = Composed(method=method, plan=Plan(), parts=(part,), fixed={}, memory=[{}])
    algo, ones = AlgoConfig(name="test", mode=mode), torch.ones(1, 2)  # type: ignore[arg-type]
    b = TokenBatch(token_ids=ones.long(), mask=ones.bool(), adv=ones, rollout_logp=3 * ones, old_logp=ones, step=STEP)
    c = update_correction(composed, batch_correction(composed, b, algo), b, 2 * ones, algo)
    update_lr_factor(composed, b, 2 * ones, algo)
    method_loss(composed, 2 * ones, b, c, count_totals(b.mask, c.keep, 2), algo, None)
    assert part.seen == {"correct": correct, "correct_update": 1, "update_lr_factor": factor, "token_loss": loss}


def test_means_over_updates_and_fractions_over_their_tokens() -> None:
    """An update of few tokens counts as much in a loss, and as little in what is per token."""
    zero = dict.fromkeys(
        ("ppo_kl", "ratio", "ratio_sq", "skew_up", "skew_down", "skew_total_up", "skew_total_down"), 0.0
    )
    sums = [
        zero | {"tokens": tokens, "entropy": entropy, "ratio_sq": 1.0}
        for tokens, entropy in ((30.0, 60.0), (10.0, 0.0))
    ]
    rows = [{"train/loss": 1.0, "train/lr_factor": 0.5}, {"train/loss": 3.0}]
    found = update_metrics(list(zip(rows, sums, strict=True)))
    assert (found["train/loss"], found["train/entropy"]) == (2.0, 1.5)
    assert "train/lr_factor" not in found  # not of every update
