"""Two samplers of a batch: shares, order, passports and columns of a run, and each token's ratio to its own sampler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.api import Plan, Sampler, Step, sample_counts, sampler_plans
from harness.config.compose import compose, plan_json
from harness.foundation.clock import Clock
from harness.foundation.seeds import stable_seed
from harness.numerics.formats import format_named
from harness.run.checks import check
from harness.run.collect import advantages, collect, generate, groups
from harness.run.loop import evaluate, grpo_step, push_weights, scored
from methods.flashrl import TIS
from methods.mixed_rollouts import METHOD, SecondSampler
from tests.toy import small_config, small_run

STEP = Step(index=0, total=4, seed=0)
WORDS = ("method=mixed_rollouts", "precision=int2")


def test_the_batch_says_who_sampled_and_each_prompt_has_its_shares(tmp_path: Path) -> None:
    run = small_run(tmp_path, [*WORDS, "knobs.SecondSampler.share=0.25"])
    push_weights(run, run.engine, STEP)
    sampled = collect(run, STEP, Clock("cpu"))
    rollout, seqs = sampled.rollout, sampled.seqs
    assert rollout.sampler is not None
    assert rollout.sampler.view(4, 4).tolist() == [[0, 0, 0, 1]] * 4
    prompts = [tuple(item.prompt) for item in sampled.items]
    assert all(len(set(prompts[i : i + 4])) == 1 for i in range(0, 16, 4)) and len(set(prompts)) > 1
    mask, adv, _ = advantages(run, sampled.scores, rollout, seqs.sampled)
    _, batch = scored(run, sampled, mask, adv, STEP, keep_graph=False)
    assert batch.group is not None and batch.reward is not None and batch.sampler is not None
    assert torch.equal(batch.group, groups(run, 16)) and batch.group.tolist() == sorted([0, 1, 2, 3] * 4)
    assert batch.reward.tolist() == pytest.approx([score.reward for score in sampled.scores])
    gap = (batch.old_logp - batch.rollout_logp).abs()
    second = batch.sampler == 1
    assert gap[second][batch.mask[second]].max() < 0.1 < gap[~second][batch.mask[~second]].max()


def test_each_sampler_draws_what_it_would_draw_alone(tmp_path: Path) -> None:
    """The BF16 rows are those of a BF16 engine with the sampler's own seed; their log-probs are of that engine."""
    run = small_run(tmp_path, WORDS)
    push_weights(run, run.engine, STEP)
    prompts = [item.prompt for item in run.eval_items[:3]]
    found = generate(run, prompts, 7)
    assert found.sampler is not None and found.sampler.view(3, 4).tolist() == [[0, 0, 1, 1]] * 3
    for number, engine, seed in ((0, run.engine, 7), (1, run.others[0].engine, stable_seed(7, "sampler", "bf16"))):
        alone = engine.generate(prompts, num_samples=2, max_new_tokens=run.max_new_tokens, temperature=1.0, seed=seed)
        rows = (found.sampler == number).nonzero().flatten()
        width = alone.token_ids.shape[1]
        assert torch.equal(found.token_ids[rows][:, :width], alone.token_ids)
        assert torch.equal(found.logp[rows][:, :width], alone.logp)
        assert torch.equal(found.lengths[rows], alone.lengths)


def test_a_run_has_both_passports_and_columns_of_each_sampler(tmp_path: Path) -> None:
    run = small_run(tmp_path, WORDS)
    row = grpo_step(run)
    assert row["sampler/int2/kl_k3"] > 100 * row["sampler/bf16/kl_k3"] > 0
    assert row["sampler/int2/ess_token_raw"] < row["sampler/bf16/ess_token_raw"]
    mean = 0.5 * (row["sampler/int2/reward"] + row["sampler/bf16/reward"])
    assert mean == pytest.approx(row["reward/accuracy"], abs=1e-6)
    assert run.passport is not None and run.passport.state["samples"] == 2
    (other,) = run.passport.state["samplers"]
    assert (other["name"], other["samples"]) == ("bf16", 2)
    formats = {r["name"]: r["format"] for r in other["weights"] if r["name"].endswith("q_proj.weight")}
    assert set(formats.values()) == {"bf16"}
    own = {r.format for r in run.passport.weights if r.name.endswith("q_proj.weight")}
    assert len(own) == 1 and own != {"bf16"}
    run.step += 1
    evaluate(run)
    assert {record.site for record in run.evals} == {"reference", "rollout"}


def test_the_share_is_between_all_low_bit_and_all_high(tmp_path: Path) -> None:
    mismatches = [
        grpo_step(small_run(tmp_path, words))["mismatch/kl_k3"]
        for words in (
            ["method=flashrl", "precision=int2"],
            [*WORDS, "knobs.SecondSampler.share=0.25"],
            [*WORDS, "knobs.SecondSampler.share=0.75"],
            ["method=bf16"],
        )
    ]
    assert mismatches == sorted(mismatches, reverse=True) and mismatches[0] > 1.2 * mismatches[1]


def test_shares_that_are_no_responses_are_refused() -> None:
    bf16 = format_named("bf16")

    def plan(*shares: float) -> Plan:
        samplers = tuple(Sampler(name=f"s{i}", share=x, weights=bf16) for i, x in enumerate(shares))
        return Plan(rollout_weights=format_named("int4_g64"), samplers=samplers)

    assert sample_counts(Plan(), 8) == [8] and sample_counts(plan(0.25, 0.5), 8) == [2, 2, 4]
    for shares, words in (
        ((0.3,), r"algo.group_size=8: the share 0.3 of sampler s0 is no whole number"),
        ((1.0,), r"the share 1 of sampler s0"), ((0.0,), r"the share 0 of sampler s0"),
        ((0.5, 0.5), r"samplers beside the plan's own take 8 responses"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            sample_counts(plan(*shares), 8)
    own, second = sampler_plans(plan(0.5))
    assert own.rollout_weights == format_named("int4_g64") and own.samplers is None
    assert second.rollout_weights == bf16 and second.rollout_acts is None and second.rollout_kv is None


def test_method_plan_and_refusals() -> None:
    assert METHOD.parts == (SecondSampler(share=0.5, weights="bf16", acts=None), TIS()) and METHOD.is_control
    composed = compose(small_config("method=mixed_rollouts", "precision=int8"))
    words = plan_json(composed.plan)["samplers"]
    assert words == [{"name": "bf16", "share": 0.5, "weights": "bf16", "acts": None, "kv": None}]
    for knobs, message in (({"share": 0.0}, "SecondSampler.share: 0"), ({"share": 1.0}, "SecondSampler.share: 1")):
        with pytest.raises(ValueError, match=message):
            SecondSampler(**knobs)
    mixed, second = ["method=mixed_rollouts", "precision=int8"], "parts=[mixed_rollouts.SecondSampler"
    for more, message in (
        ([*mixed, "knobs.SecondSampler.weights=bf17"], r"SecondSampler.weights: .*bf17"),
        ([*mixed, "knobs.SecondSampler.acts=e5m9"], r"SecondSampler.acts: .*e5m9"),
        ([*mixed, "knobs.SecondSampler.share=0.3"], r"algo.group_size=4: the share 0.3"),
        (["method=bf16", f"{second}]"], r"precision=bf16: two samplers of a batch are called bf16"),
        (["method=bf16", "precision=fp32", f"{second},zero_mismatch.TrainerSampler]"], r"the trainer's own module is"),
    ):
        with pytest.raises(ValueError, match=message):
            compose(small_config(*more))
    with pytest.raises(ValueError, match=r"engine=vllm: cannot do samplers of method mixed_rollouts"):
        check(small_config(*mixed, "engine=vllm", "model=xs128"))
    with pytest.raises(ValueError, match=r"trainer=verl.*samplers|samplers.*verl"):
        check(small_config(*mixed, "engine=vllm", "model=xs128", "trainer=verl"))
