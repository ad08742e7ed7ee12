"""Partial rollouts: versions and log-probs token by token, the synchronous limit, ages, bit-exact resume, refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.api import Rollout, Sequences, Step, TokenBatch
from harness.config.load import run_id, to_json
from harness.foundation.provenance import tensors_hash
from harness.foundation.state_files import load_state, save_state
from harness.run import loop
from harness.run.checks import check
from harness.run.loop import grpo_step, train
from harness.run.partial import age_metrics, as_stopped, extended, joined
from harness.run.run import Collected, Response, Run
from tests.toy import small_config, small_run

EXACT = ("method=bf16", "precision=fp32", "trainer.steps=8", "trainer.eval_every=8", "trainer.lr=0.003")


def stepped(run: Run, steps: int) -> tuple[list[dict[str, float]], list[Collected], list[dict[str, torch.Tensor]]]:
    """(rows, batches, the trainer's weights before each step)."""
    rows, batches, weights = list[dict[str, float]](), list[Collected](), list[dict[str, torch.Tensor]]()
    run.on_batch = lambda step, batch: batches.append(batch)
    for _ in range(steps):
        weights.append({name: tensor.clone() for name, tensor in run.trainer.weights()})
        rows.append(grpo_step(run))
        run.step += 1
    return rows, batches, weights


def test_every_token_has_the_log_prob_of_its_own_version(tmp_path: Path) -> None:
    """In float32 the trainer with the weights of a version gives the engine's log-probs of that version's tokens, and
    other weights do not."""
    run = small_run(tmp_path, [*EXACT, "algo.partial_rollouts=3"])
    rows, batches, weights = stepped(run, 6)
    num_mixed, wrong = 0, list[float]()
    for step, batch in enumerate(batches):
        version, sampled = batch.rollout.version, batch.seqs.sampled
        assert version is not None and version.shape == batch.rollout.token_ids.shape
        assert int(version[sampled].max()) == step and int(version[sampled].min()) >= 0
        ordered = torch.where(sampled[:, 1:], version[:, 1:] - version[:, :-1], 0)
        assert (ordered >= 0).all()  # a response never goes back to an older policy
        num_mixed += int((ordered > 0).any(1).sum())
        for v in version[sampled].unique().tolist():
            for other in {v, step}:
                with run.trainer.holding(weights[other]):
                    gap = (
                        (run.trainer.score(batch.seqs).logp - batch.rollout.logp)[sampled & (version == v)].abs().max()
                    )
                if other == v:
                    assert gap < 2e-4
                else:
                    wrong.append(float(gap))
    assert num_mixed > 10 and min(wrong) > 2e-3
    assert max(row["staleness/age_max"] for row in rows) >= 2


def test_with_room_for_whole_responses_a_run_is_the_synchronous_one(tmp_path: Path) -> None:
    words = ["method=flashrl", "precision=int4", *EXACT[2:]]
    plain, room = small_run(tmp_path, words), small_run(tmp_path, [*words, "algo.partial_rollouts=64"])
    assert room.max_new_tokens <= 64
    rows, batches, _ = stepped(plain, 3)
    same, found, _ = stepped(room, 3)
    for a, b in zip(batches, found, strict=True):
        assert torch.equal(a.rollout.token_ids, b.rollout.token_ids) and torch.equal(a.rollout.logp, b.rollout.logp)
        assert a.items == b.items and torch.equal(a.rollout.truncated, b.rollout.truncated)
    assert tensors_hash(plain.trainer.weights()) == tensors_hash(room.trainer.weights())
    assert [row["train/loss"] for row in rows] == [row["train/loss"] for row in same]
    assert [row["staleness/age_max"] for row in same] == [0.0] * 3 and "staleness/age_max" not in rows[0]
    small = small_run(tmp_path, [*words, "algo.partial_rollouts=2"])
    stepped(small, 3)
    assert tensors_hash(small.trainer.weights()) != tensors_hash(plain.trainer.weights())


@pytest.mark.parametrize("size", [1, 2, 5])
def test_batches_are_full_in_order_and_bounded_in_age(size: int, tmp_path: Path) -> None:
    run = small_run(tmp_path, [*EXACT, f"algo.partial_rollouts={size}"])
    rows, batches, _ = stepped(run, 7)
    limit, seen = run.max_new_tokens, list[int]()
    for row, batch in zip(rows, batches, strict=True):
        assert len(batch.items) == 16 and all(batch.items[i] is batch.items[i - i % 4] for i in range(16))
        assert row["staleness/age_max"] <= 2 * -(-limit // size)
        assert row["rollout/in_flight"] <= 4 * -(-limit // size)
        seen += [item.index for item in batch.items[::4]]
        assert batch.rollout.lengths.max() <= limit
        ended = [response[-1] == run.task.eos_id for response in batch.rollout.responses()]
        assert [not x for x in ended] == batch.rollout.truncated.tolist()
    waiting = [group.item.index for group in run.in_flight]
    assert len({*seen, *waiting}) == len(seen) + len(waiting) == run.next_prompt  # each prompt once, none lost
    sampled = sum(row["rollout/tokens"] for row in rows)
    assert sampled == sum(int(b.rollout.lengths.sum()) for b in batches) + sum(g.num_tokens for g in run.in_flight)


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    words = ["method=flashrl", "precision=int8", "algo.num_minibatches=2", "algo.partial_rollouts=2", *EXACT[2:]]
    rows, batches, _ = stepped(straight := small_run(tmp_path, words), 6)
    stepped(first := small_run(tmp_path, words), 3)
    assert any(not group.is_complete and group.num_tokens for group in first.in_flight)
    save_state(tmp_path / "state.pt", first.state())
    second = small_run(tmp_path, words)
    second.restore(load_state(tmp_path / "state.pt"))
    assert second.in_flight == first.in_flight
    resumed, again, _ = stepped(second, 3)
    assert tensors_hash(straight.trainer.weights()) == tensors_hash(second.trainer.weights())
    for name in ("train/loss", "mismatch/kl_k3", "staleness/age_mean", "rollout/tokens"):
        assert [row[name] for row in resumed] == [row[name] for row in rows[3:]]
    for a, b in zip(batches[3:], again, strict=True):
        assert a.rollout.version is not None and b.rollout.version is not None
        assert torch.equal(a.rollout.version, b.rollout.version) and torch.equal(a.rollout.logp, b.rollout.logp)


def test_ids_and_states_of_other_runs_stand(tmp_path: Path) -> None:
    config = small_config(*EXACT, "algo.partial_rollouts=0")
    assert "partial_rollouts" not in to_json(config)["algo"]
    assert run_id(config) == run_id(small_config(*EXACT)) != run_id(small_config(*EXACT, "algo.partial_rollouts=4"))
    run = small_run(tmp_path, EXACT)
    state = run.state()
    assert state.pop("in_flight") == []
    run.restore(state)  # a state from before partial rollouts
    assert run.in_flight == []


def test_every_batch_says_its_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Synchronous: the step; stale: the step of the weights that sampled; mini-batches take their rows along."""
    seen: list[TokenBatch] = []
    kept = loop.update

    def looked(run: Run, seqs: Sequences, batch: TokenBatch, *args: object) -> object:
        seen.append(batch)
        return kept(run, seqs, batch, *args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(loop, "update", looked)
    for words, expected in (((), [0, 1, 2]), (("algo.staleness=2",), [0, 0, 0])):
        seen.clear()
        stepped(small_run(tmp_path, [*EXACT, *words]), 3)
        found = [batch.version for batch in seen]
        assert all(v is not None and (v == e).all() for v, e in zip(found, expected, strict=True))


def test_pieces_of_a_response_by_hand() -> None:
    rollout = Rollout(
        token_ids=torch.tensor([[7, 8, 9], [7, 2, 0]]), logp=torch.tensor([[-0.1, -0.2, -0.3], [-0.4, -0.5, 0.0]]),
        lengths=torch.tensor([3, 2]), truncated=torch.tensor([True, False]),
    )  # fmt: skip
    begun = Response(tokens=(5,), logp=(-1.0,), version=(3,))
    going = extended(begun, rollout, 0, 4, 9)
    assert (going.tokens, going.version, going.is_ended) == ((5, 7, 8, 9), (3, 4, 4, 4), False)
    full, ended = extended(begun, rollout, 0, 4, 4), extended(begun, rollout, 1, 4, 9)
    assert (full.is_ended, full.is_truncated) == (True, True) and (ended.is_ended, ended.is_truncated) == (True, False)
    both = joined([going, ended], 0)
    assert both.token_ids.tolist() == [[5, 7, 8, 9], [5, 7, 2, 0]] and both.lengths.tolist() == [4, 3]
    assert both.version is not None and both.version.tolist() == [[3, 4, 4, 4], [3, 4, 4, 0]]
    assert torch.equal(both.logp[0], torch.tensor([-1.0, -0.1, -0.2, -0.3]))


def test_a_task_that_stops_responses_ends_them(tmp_path: Path) -> None:
    run = small_run(tmp_path, [*EXACT, "algo.partial_rollouts=2"])

    class Cutting:
        pad_id = 0

        def num_kept(self, response: list[int]) -> int:
            return response.index(8) + 1 if 8 in response else len(response)

    run.task = Cutting()  # type: ignore[assignment]
    cut, whole = as_stopped(
        run,
        [
            Response(tokens=(5, 8, 9), logp=(-1.0, -2.0, -3.0), version=(0, 1, 1)),
            Response(tokens=(5, 7), logp=(0.0, 0.0), version=(1, 1)),
        ],
    )
    assert cut == Response(tokens=(5, 8), logp=(-1.0, -2.0), version=(0, 1), is_ended=True) and not whole.is_ended


def test_ages_by_hand(tmp_path: Path) -> None:
    """Ages 0, 2, 2 and 0, 0: mean 0.8, variance 0.96; one of two responses mixes versions; a masked row has none."""
    run = small_run(tmp_path, [*EXACT, "algo.partial_rollouts=2"])
    mask = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])
    zeros = torch.zeros(3, 3)
    batch = TokenBatch(
        token_ids=zeros.long(), mask=mask, adv=zeros, rollout_logp=zeros, old_logp=zeros,
        step=Step(index=5, total=9, seed=0), version=torch.tensor([[3, 3, 5], [5, 5, 0], [0, 0, 0]]),
    )  # fmt: skip
    found = age_metrics(run, batch)
    assert found["staleness/age_mean"] == pytest.approx(0.8) and found["staleness/age_std"] == pytest.approx(0.96**0.5)
    assert found["staleness/age_max"] == 2.0 and found["staleness/mixed_frac"] == 0.5
    assert age_metrics(small_run(tmp_path, EXACT), replace(batch, version=None)) == {}
    nothing = age_metrics(run, replace(batch, mask=torch.zeros_like(mask)))  # overlong_filter, and all are cut off
    assert all(math.isnan(nothing[f"staleness/age_{name}"]) for name in ("mean", "std", "max"))


def test_a_whole_run_evaluates_and_ends(tmp_path: Path) -> None:
    run = small_run(tmp_path, ["method=flashrl", "precision=int4", "algo.partial_rollouts=3", "trainer.steps=3"])
    train(run, lambda run: None)
    assert [record.step for record in run.evals] == [0, 0, 2, 2, 3, 3] and len(run.series) == 3


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("method=bf16", "algo.dynamic_sampling=true"), "algo.dynamic_sampling=true drops groups that have ended"),
        (("method=bf16", "algo.staleness=1"), "algo.staleness=1 gives every batch one age"),
        (("method=zero_mismatch",), "zero_mismatch samples with the trainer's own module"),
        (("method=mixed_rollouts",), "mixed_rollouts has several samplers in a batch"),
        (("method=router_replay", "model=moe_xs"), "router_replay needs routing of whole responses"),
        (("method=trm",), "trm needs rollout_kl of whole responses"),
    ],
)
def test_what_cannot_be_partial_is_refused_in_one_line(words: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=rf"^algo\.partial_rollouts=4: {reason}.*; valid beside it: algo"):
        check(small_config(*words, "algo.partial_rollouts=4"))
    with pytest.raises(ValueError, match=r"^algo\.partial_rollouts=4: verl's servers finish every response"):
        check(
            small_config("method=bf16", "algo.partial_rollouts=4", "trainer=verl", "engine=vllm", "trainer.device=cuda")
        )
