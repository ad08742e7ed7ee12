"""Router replay: whose experts the trainer uses, what it does to the mismatch, and that the router still learns."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.api import Sequences, Step
from harness.foundation.clock import Clock
from harness.foundation.provenance import tensors_hash
from harness.run.checks import check
from harness.run.collect import collect, fitted, join_rollouts, take_rollout
from harness.run.loop import grpo_step, push_weights
from harness.run.run import Collected, Run
from harness.trainers.local.trainer import LocalTrainer
from tests.toy import MIXTURE, small_config, small_run, take_steps

FIRST = Step(index=0, total=4, seed=0)


def run_of(folder: Path, *more: str) -> Run:
    return small_run(folder, [*MIXTURE, *more])


def sampled(run: Run) -> Collected:
    """The first rollout batch of a run."""
    push_weights(run, FIRST)
    return collect(run, FIRST, Clock("cpu"))


def k3(logp: Tensor, batch: Collected) -> float:
    """k3 of log-probs [B, T] against the sampler's."""
    d = (logp - batch.rollout.logp)[batch.seqs.sampled]
    return float((d.exp() - d - 1).mean())


def both_given(a: Tensor, b: Tensor) -> Tensor:
    """[B, L, layers] bool: places with experts in both."""
    return (a >= 0).all(-1) & (b >= 0).all(-1)


@pytest.mark.parametrize("precision", ["bf16", "int8", "fp8_block", "int4", "nvfp4"])
def test_the_trainer_uses_the_samplers_experts_and_the_mismatch_falls(precision: str, moe_folder: Path) -> None:
    run = run_of(moe_folder, "method=router_replay", f"precision={precision}", "algo.num_prompts=64")
    batch = sampled(run)
    seqs = batch.seqs
    assert seqs.experts is not None and seqs.experts.shape == (*seqs.ids.shape, 2, 2)
    with torch.no_grad():
        replayed = run.trainer.score(seqs, keeps_experts=True)
        own = run.trainer.score(replace(seqs, experts=None), keeps_experts=True)
    assert replayed.experts is not None and own.experts is not None
    places = both_given(seqs.experts, own.experts)
    assert int(places.sum()) > 4000
    assert torch.equal(replayed.experts[places], seqs.experts[places])
    flips = (own.experts.sort(-1).values != seqs.experts.sort(-1).values).any(-1)[places].float().mean()
    assert flips > (0.0002 if precision == "bf16" else 0.005)  # without replay some tokens go elsewhere
    assert k3(replayed.logp, batch) < 0.9 * k3(own.logp, batch)


def test_every_pass_of_a_step_replays_and_the_router_learns(moe_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    score, accumulate = LocalTrainer.score, LocalTrainer.accumulate

    def scoring(self: LocalTrainer, seqs: Sequences, **values: object) -> object:
        seen.append(seqs.experts is not None)
        return score(self, seqs, **values)  # pyright: ignore[reportArgumentType]

    def learning(self: LocalTrainer, seqs: Sequences, *args: object, **values: object) -> object:
        seen.append(seqs.experts is not None)
        return accumulate(self, seqs, *args, **values)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(LocalTrainer, "score", scoring)
    monkeypatch.setattr(LocalTrainer, "accumulate", learning)
    options = ("precision=int4", "algo.num_minibatches=2", "algo.kl_coef=0.01", "algo.mode=decoupled")
    for method, wanted in (("router_replay", True), ("naive", False)):
        seen.clear()
        run = run_of(moe_folder, f"method={method}", *options)
        before = {name: tensor.clone() for name, tensor in run.trainer.weights()}
        assert grpo_step(run)["train/grad_norm"] > 0
        assert seen == [wanted] * 4  # old log-probs, the reference's, two updates
        after = dict(run.trainer.weights())
        for i in range(2):
            name = f"model.layers.{i}.mlp.gate.weight"
            assert (after[name] - before[name]).abs().max() > 1e-5
    run = run_of(moe_folder, "method=router_replay", "precision=int4")
    seqs = sampled(run).seqs
    run.trainer.score(seqs, keep_graph=True).logp.sum().backward()
    grad = run.trainer.model.model.layers[0].mlp.gate.weight.grad
    assert grad is not None and (grad.abs().sum(1) > 0).all()  # every expert's row


def test_r2_leaves_the_first_update_alone_and_keeps_its_experts_in_the_second(moe_folder: Path) -> None:
    once = ("precision=int4", "algo.num_epochs=1", "trainer.lr=0.02")
    alone = [run_of(moe_folder, f"method={method}", *once) for method in ("naive", "router_replay_r2")]
    for run in alone:
        grpo_step(run)
    assert tensors_hash(alone[0].trainer.weights()) == tensors_hash(alone[1].trainer.weights())

    used: dict[str, list[Tensor]] = {}
    given: list[Tensor] = []
    twice = ("precision=int4", "algo.num_epochs=2", "trainer.lr=0.02")
    for method in ("naive", "router_replay_r2", "router_replay"):
        run = run_of(moe_folder, f"method={method}", *twice)
        found = used.setdefault(method, [])

        def look(module: object, args: object, output: object, found: list[Tensor] = found) -> None:
            found.append(module.chosen.clone())  # type: ignore[attr-defined]

        run.trainer.model.model.layers[0].mlp.register_forward_hook(look)
        run.on_batch = lambda step, batch: given.append(batch.seqs.experts)
        grpo_step(run)
    old, first, second = used["router_replay_r2"]  # old log-probs, then two updates
    assert torch.equal(old, first) and torch.equal(old, second)
    sampler = given[-1][:, : old.shape[1], 0].long()
    places = (sampler >= 0).all(-1)
    assert all(torch.equal(each[places], sampler[places]) for each in used["router_replay"])
    old, first, second = used["naive"]
    assert torch.equal(old, first) and not torch.equal(old, second)  # the first update flipped some
    assert torch.equal(old, used["router_replay_r2"][0]) and not torch.equal(old, used["router_replay"][0])


@pytest.mark.parametrize("method", ["router_replay", "router_replay_r2"])
def test_what_cannot_replay_is_refused_in_one_line(method: str) -> None:
    with pytest.raises(ValueError, match=rf"^method={method} model=xs: replays .* such as model=moe_xs$"):
        check(small_config(f"method={method}"))
    more = ("trainer=verl", "engine=vllm", "trainer.device=cuda")
    with pytest.raises(ValueError, match=r"trainer=verl: (Rollout|Own)Routing needs (own_)?routing; verl's workers"):
        check(small_config(f"method={method}", *MIXTURE, *more))


def test_rows_of_several_batches_keep_their_experts(moe_folder: Path) -> None:
    """Dynamic sampling drops rows and joins batches of other widths."""
    run = run_of(moe_folder, "method=router_replay", "precision=int4")
    rollout = sampled(run).rollout
    assert rollout.experts is not None
    some = take_rollout(rollout, [5, 0, 9])
    assert some.experts is not None and torch.equal(some.experts, rollout.experts[[5, 0, 9]])
    short = replace(some, token_ids=some.token_ids[:, :2], logp=some.logp[:, :2], experts=some.experts[:, :4])
    joined = join_rollouts([short, rollout], 0).experts
    assert joined is not None and joined.shape == (3 + 128, *rollout.experts.shape[1:])
    assert torch.equal(joined[:3, :4], some.experts[:, :4]) and (joined[:3, 4:] == -1).all()
    assert torch.equal(joined[3:], rollout.experts)
    every = replace(rollout, version=torch.full_like(rollout.token_ids, 7), sampler=rollout.lengths.clone())
    kept = join_rollouts([take_rollout(every, [5, 0]), every], 0)
    for field in fields(kept):  # none gets lost
        value, own = getattr(kept, field.name), getattr(every, field.name)
        assert (value is None) == (own is None), field.name
        assert value is None or torch.equal(value[:2], own[[5, 0]]), field.name
    wide = fitted(rollout.experts, 40)
    assert wide.shape[1] == 40 and torch.equal(wide[:, : rollout.experts.shape[1]], rollout.experts)
    assert torch.equal(fitted(wide, 5), rollout.experts[:, :5])


def test_a_few_steps_learn_with_and_without_replay(moe_folder: Path) -> None:
    """The k3 of a whole run: replay takes the flips out of it, and reward does not fall."""
    mean: dict[str, float] = {}
    for method in ("naive", "router_replay"):
        run = run_of(moe_folder, f"method={method}", "precision=fp8_block")
        rows = take_steps(run, 4)
        mean[method] = sum(row["mismatch/kl_k3"] for row in rows) / len(rows)
        assert rows[-1]["reward/mean"] > 0.2
    assert mean["router_replay"] < 0.7 * mean["naive"] < 0.1
