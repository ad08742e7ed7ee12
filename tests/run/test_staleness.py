"""Stale rollouts: which weights sample each step, what the trainer then sees, and bit-exact resume."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.api import Step, TokenBatch, WeightStream
from harness.config.load import run_id, to_json
from harness.foundation.provenance import tensors_hash
from harness.foundation.state_files import load_state, save_state
from harness.objective.mismatch import staleness_metrics
from harness.run.checks import check
from harness.run.loop import grpo_step, train
from harness.run.run import Run
from harness.run.staleness import keep, synced
from methods.qerl import AQN
from tests.toy import small_config, small_run

EXACT = ("method=bf16", "precision=fp32", "trainer.steps=8", "trainer.eval_every=8")


def pushes(run: Run) -> list[str]:
    """Hashes of what the engine gets from now on."""
    pushed, load = list[str](), run.engine.load_weights

    def listened(weights: WeightStream) -> None:
        stream = list(weights)
        pushed.append(tensors_hash(stream))
        load(iter(stream))

    run.engine.load_weights = listened  # type: ignore[method-assign]
    return pushed


def stepped(run: Run, steps: int) -> tuple[list[dict[str, float]], list[str], list[str]]:
    """(rows, hash of the trainer's weights before each step, hash of what the engine got at each step)."""
    rows, own, pushed = list[dict[str, float]](), list[str](), pushes(run)
    for _ in range(steps):
        own.append(tensors_hash(run.trainer.weights()))
        rows.append(grpo_step(run))
        run.step += 1
    return rows, own, pushed


@pytest.mark.parametrize("age", [0, 1, 3])
def test_the_engine_holds_the_weights_of_that_many_steps_ago(age: int, tmp_path: Path) -> None:
    run = small_run(tmp_path, [*EXACT, f"algo.staleness={age}", "algo.num_minibatches=2"])
    rows, own, pushed = stepped(run, 6)
    assert len(set(own)) == 6
    assert pushed == [own[max(0, step - age)] for step in range(6)]
    assert [row.get("staleness/steps", 0.0) for row in rows] == [float(min(step, age)) for step in range(6)]
    assert len(run.past) == (age + 1 if age else 0)


def test_no_staleness_is_the_run_it_was(tmp_path: Path) -> None:
    config = small_config(*EXACT, "algo.staleness=0")
    assert config == small_config(*EXACT)
    assert "staleness" not in to_json(config)["algo"]
    assert run_id(config) == run_id(small_config(*EXACT)) != run_id(small_config(*EXACT, "algo.staleness=1"))
    assert small_run(tmp_path, EXACT).state()["past"] == []


def test_old_is_the_trainer_of_now_and_the_mismatch_has_two_parts(tmp_path: Path) -> None:
    """In float32 without quantization all of the mismatch is age; until the first update there is none."""
    run = small_run(tmp_path, [*EXACT, "algo.staleness=5"])
    rows, _, _ = stepped(run, 6)
    k3 = [row["mismatch/kl_k3"] for row in rows]
    assert k3[0] < 1e-10 < 1e-5 < k3[1] < k3[5]
    assert rows[5]["staleness/kl_k3"] == pytest.approx(k3[5], rel=1e-3)
    assert rows[5]["staleness/format_kl_k3"] < 1e-10
    assert [("staleness/kl_k3" in row) for row in rows] == [True, False, False, False, False, True]
    low = small_run(tmp_path, ["method=naive", "precision=int4", *EXACT[2:], "algo.staleness=5"])
    found, _, _ = stepped(low, 6)
    assert found[0]["staleness/kl_k3"] == 0.0
    assert found[0]["staleness/format_kl_k3"] == pytest.approx(found[0]["mismatch/kl_k3"], rel=1e-6)
    assert found[5]["staleness/kl_k3"] > 1e-5 and found[5]["staleness/format_kl_k3"] > 1e-5


def test_both_parts_by_hand() -> None:
    """d = ln 2 and ln 1/2 over two tokens, a third one without a log-prob, a fourth one outside of the mask."""
    old, stale = torch.tensor([[0.0, 0.0, 0.0, 5.0]]), torch.tensor([[-math.log(2), math.log(2), 0.0, 0.0]])
    rollout = torch.tensor([[-math.log(2), 0.0, -math.inf, 0.0]])
    mask = torch.tensor([[True, True, True, False]])
    batch = TokenBatch(token_ids=torch.zeros(1, 4, dtype=torch.int64), mask=mask, adv=torch.zeros(1, 4), old_logp=old,
                       rollout_logp=rollout, step=Step(index=0, total=1, seed=0), extras={}, shadow={})  # fmt: skip
    found = staleness_metrics(batch, stale)
    up, down = 2 - math.log(2) - 1, 0.5 + math.log(2) - 1
    assert found["staleness/kl_k3"] == pytest.approx((up + down) / 2)
    assert found["staleness/format_kl_k3"] == pytest.approx((0.0 + up) / 2)


def test_a_resumed_run_goes_on_with_the_old_weights_bit_for_bit(tmp_path: Path) -> None:
    words = ["method=flashrl", "precision=int8", "algo.num_minibatches=2", "algo.staleness=3", *EXACT[2:]]
    rows, _, pushed = stepped(straight := small_run(tmp_path, words), 7)
    stepped(first := small_run(tmp_path, words), 5)
    save_state(tmp_path / "state.pt", first.state())
    second = small_run(tmp_path, words)
    second.restore(load_state(tmp_path / "state.pt"))
    resumed, _, again = stepped(second, 2)
    assert again == pushed[5:]
    assert tensors_hash(straight.trainer.weights()) == tensors_hash(second.trainer.weights())
    for name in ("train/loss", "mismatch/kl_k3", "reward/accuracy"):
        assert [row[name] for row in resumed] == [row[name] for row in rows[5:]]
    assert resumed[0]["staleness/kl_k3"] == rows[5]["staleness/kl_k3"]


def test_the_trainers_own_module_samples_as_the_stored_policy_bit_for_bit(tmp_path: Path) -> None:
    """With lag k the log-ratio of the control is that of now to the stored policy alone, and is exactly that."""
    words = ["method=zero_mismatch", "precision=fp32", "trainer.steps=6", "trainer.eval_every=6"]
    fresh, _, _ = stepped(small_run(tmp_path, words), 3)
    assert [row["mismatch/logp_absdiff_max"] for row in fresh] == [0.0, 0.0, 0.0]
    run, old, found = small_run(tmp_path, [*words, "algo.staleness=2"]), list[dict[str, Tensor]](), list[tuple]()
    run.on_batch = lambda step, sampled: found.append((sampled.seqs, sampled.rollout.logp))
    for step in range(5):
        old.append({name: tensor.clone() for name, tensor in run.trainer.weights()})
        row = grpo_step(run)
        run.step += 1
        seqs, sampled_logp = found[-1]
        with run.trainer.holding(old[max(0, step - 2)]):
            stored = run.trainer.score(seqs).logp
        with run.trainer.holding(old[step]):
            now = run.trainer.score(seqs).logp
        assert torch.equal(sampled_logp[seqs.sampled], stored[seqs.sampled])
        largest = float((now - stored)[seqs.sampled].double().abs().max())
        assert row["mismatch/logp_absdiff_max"] == pytest.approx(largest, rel=1e-6)
        assert (largest > 0) == (step > 0)
        assert row["staleness/steps"] == min(step, 2)
        assert row.get("staleness/format_kl_k3", 0.0) == 0.0
        assert ("staleness/kl_k3" in row) == (step % 5 == 0)


def test_evaluations_are_of_the_weights_of_now(tmp_path: Path) -> None:
    """The policy as deployed is the newest one; the push of the step that follows is of old weights again."""
    run = small_run(tmp_path, ["method=naive", "precision=int4", "trainer.eval_every=2", "algo.staleness=3"])
    pushed = pushes(run)
    now = [tensors_hash(run.trainer.weights())]
    train(run, lambda run: now.append(tensors_hash(run.trainer.weights())))
    assert len(now) == 5 and len(set(now)) == 5
    start = now[0]
    assert pushed == [start, start, start, now[2], start, start, now[4]]  # evaluated at 0, 2 and 4
    assert run.evaluated_sync == {}


def test_a_version_is_pushed_with_the_noise_of_its_own_step(tmp_path: Path) -> None:
    run = small_run(tmp_path, ["method=naive", "precision=nvfp4", "parts=[qerl.AQN]", *EXACT[2:], "algo.staleness=2"])
    part = run.composed.parts[0]
    assert isinstance(part, AQN)
    sigma = [part.sigma(Step(index=index, total=8, seed=0)) for index in range(8)]
    rows, _, _ = stepped(run, 8)
    assert [row["part/AQN.sigma"] for row in rows] == [sigma[0], sigma[0], *sigma[:6]]
    assert len(set(sigma[:6])) > 2


def test_a_version_is_pushed_with_the_scales_of_its_own_step(tmp_path: Path) -> None:
    run = small_run(tmp_path, ["method=flashrl", "precision=int8", "algo.staleness=1"])
    step = Step(index=0, total=4, seed=0)
    name = "model.layers.0.self_attn.q_proj.weight_scale"
    scale = run.composed.fixed[name]
    keep(run, step)
    run.composed.fixed[name] = 2 * scale
    keep(run, replace(step, index=1))
    rollout, now = (dict(synced(run, replace(step, index=1, purpose=p), run.composed)) for p in ("rollout", "eval"))
    assert torch.equal(rollout[name], scale) and torch.equal(now[name], 2 * scale)


def test_holding_other_weights_leaves_no_trace(tmp_path: Path) -> None:
    run = small_run(tmp_path, EXACT)
    before = tensors_hash(run.trainer.weights())
    other: dict[str, Tensor] = {name: tensor + 1.0 for name, tensor in run.trainer.weights()}
    with pytest.raises(KeyError), run.trainer.holding(other):
        assert tensors_hash(run.trainer.weights()) == tensors_hash(list(other.items()))
        raise KeyError
    assert tensors_hash(run.trainer.weights()) == before


def test_what_cannot_be_stale_is_refused() -> None:
    message = r"^algo.staleness=4: the start would sample all trainer.steps=4 steps; valid: 0 to 3$"
    with pytest.raises(ValueError, match=message):
        check(small_config("method=bf16", "algo.staleness=4"))
    with pytest.raises(ValueError, match=r"^algo.staleness=-1: must be at least 0$"):
        small_config("algo.staleness=-1")
