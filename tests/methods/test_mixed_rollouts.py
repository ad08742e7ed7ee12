"""Two samplers of a batch: what corrections see of them, their shares, refusals. The rest: tests/run/test_samplers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.api import Plan, Sampler, Step, sample_counts, sampler_plans
from harness.config.compose import compose, plan_json
from harness.engines.embedded.engine import EmbeddedEngine
from harness.foundation.clock import Clock
from harness.numerics.formats import format_named
from harness.run.checks import check
from harness.run.collect import advantages, collect, groups
from harness.run.loop import grpo_step, push_weights, scored
from methods.flashrl import TIS
from methods.mixed_rollouts import METHOD, SecondSampler
from tests.toy import small_config, small_run

STEP = Step(index=0, total=4, seed=0)
WORDS = ("method=mixed_rollouts", "precision=int2")


def test_the_batch_says_who_sampled_and_each_prompt_has_its_shares(tmp_path: Path) -> None:
    run = small_run(tmp_path, [*WORDS, "knobs.SecondSampler.share=0.25"])
    push_weights(run, STEP)
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


def test_frozen_scales_of_one_sampler_do_not_reach_another(tmp_path: Path) -> None:
    """FlashRL's INT8 scales are largest magnitude / 127; FP8 by channel has largest magnitude / 448 of its own."""
    other = ["knobs.SecondSampler.weights=e4m3_channel", "knobs.SecondSampler.acts=e4m3_token"]
    parts = "parts=[flashrl.Profile,mixed_rollouts.SecondSampler,flashrl.TIS]"
    run = small_run(tmp_path, ["method=mixed_rollouts", "precision=int8", parts, *other])
    push_weights(run, STEP)
    weights = dict(run.trainer.weights())
    engines = (run.engine, run.others[0].engine)
    for engine, largest in zip(engines, (127.0, 448.0), strict=True):
        assert isinstance(engine, EmbeddedEngine)
        slab, q = next(pair for pair in engine.weights.loaded if pair[0].sources[0].endswith("q_proj.weight"))
        wide = weights[slab.sources[0]].to(torch.bfloat16).float().abs().amax(1)
        assert q.scale is not None
        first = q.scale.flatten(0, -2)[: len(wide), 0]
        assert torch.allclose(first, wide / largest, rtol=0.01)


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
    for part, precision, message in (
        (
            "rilq.RILQ",
            "int2",
            r"adapters that make up for its rounding would reach .* precision int2 alone",
        ),
        ("quads.ResidualPass", "nvfp4_w4a4", r"a second pass over its inputs would reach every sampler of a batch"),
        ("qat_no_kd.GPTQStart", "int4", r"exceptions: \*.q_proj.weight as int4_g32_asym would reach every sampler"),
    ):
        asymmetric = ["knobs.GPTQStart.grid=asymmetric"] if "GPTQ" in part else []
        with pytest.raises(ValueError, match=message):
            compose(small_config(mixed[0], f"precision={precision}", f"{second},{part}]", *asymmetric))
    compose(small_config(*mixed, f"{second},aqn_bf16.AQN]"))  # gains in float32 are on no grid
    with pytest.raises(ValueError, match=r"engine=vllm: cannot do samplers of method mixed_rollouts"):
        check(small_config(*mixed, "engine=vllm", "model=xs128"))
    with pytest.raises(ValueError, match=r"trainer=verl.*samplers|samplers.*verl"):
        check(small_config(*mixed, "engine=vllm", "model=xs128", "trainer=verl"))
