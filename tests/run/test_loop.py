"""The step as a whole: zero mismatch, invariance to micro-batches, modes that must coincide, divergence, FP16."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.api import Rollout
from harness.foundation.provenance import ROOT, tensors_hash
from harness.foundation.state_files import load_state, save_state
from harness.objective.advantage import shaped
from harness.run.loop import evaluate, grpo_step, train
from harness.run.run import Run
from harness.trainers.local.trainer import Diverged, schedule
from harness.trainers.stopping import stopped
from tests.toy import Short, small_config, small_run, stepped, take_steps


def parameters(run: Run) -> torch.Tensor:
    return torch.cat([t.flatten() for _, t in run.trainer.weights()])


def test_zero_mismatch_is_exactly_zero(tmp_path: Path) -> None:
    _, rows = stepped(tmp_path, "method=zero_mismatch", "engine.max_batch=16", steps=3)
    assert [row["mismatch/logp_absdiff_max"] for row in rows] == [0.0, 0.0, 0.0]
    assert [row["mismatch/kl_k3"] for row in rows] == [0.0, 0.0, 0.0]


def test_a_zero_mismatch_that_is_none_stops_the_run(tmp_path: Path) -> None:
    run = small_run(tmp_path, ["method=zero_mismatch", "engine.max_batch=16"])
    sample = run.engine.generate

    def off_by_a_bit(*words: object, **named: object) -> Rollout:
        rollout = sample(*words, **named)  # type: ignore[arg-type]
        return replace(rollout, logp=torch.nextafter(rollout.logp, torch.zeros(())))

    run.engine.generate = off_by_a_bit  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"sampler=trainer: sampler and trainer differ by up to \d"):
        grpo_step(run)


@pytest.mark.parametrize("method", ["naive", "flashrl"])
def test_an_engine_without_log_probs_stops_the_run(method: str, tmp_path: Path) -> None:
    run = small_run(tmp_path, [f"method={method}", "precision=int8"])
    sample = run.engine.generate

    def lost(*words: object, **named: object) -> Rollout:
        rollout = sample(*words, **named)  # type: ignore[arg-type]
        rollout.logp[1:, 1] = math.nan
        rollout.logp[0, 0] = -math.inf  # a token that cannot be drawn is counted, not fatal
        return rollout

    run.engine.generate = lost  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"^the engine's log-probs of \d+ of \d+ tokens are NaN, the trainer's not$"):
        grpo_step(run)


def test_cached_sampler_in_fp32_is_within_1e_5(tmp_path: Path) -> None:
    _, rows = stepped(tmp_path, "method=bf16", "precision=fp32")
    assert all(0.0 < row["mismatch/logp_absdiff_max"] < 1e-5 for row in rows)


def test_low_bits_differ_more_than_high_bits(tmp_path: Path) -> None:
    k3 = {}
    for precision in ("int8", "int4", "int2"):
        _, rows = stepped(tmp_path, "method=naive", f"precision={precision}", steps=1)
        k3[precision] = rows[0]["mismatch/kl_k3"]
    assert 0 < k3["int8"] < k3["int4"] < k3["int2"]


@pytest.mark.parametrize("agg", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_micro_batches_cannot_change_the_result(tmp_path: Path, agg: str) -> None:
    words = ("method=flashrl", "precision=int4", f"algo.agg={agg}", "algo.num_minibatches=2")
    whole, _ = stepped(tmp_path, *words)
    split, _ = stepped(tmp_path, *words, micro_batch_tokens=60)
    assert split.trainer.rows_per_pass(19) == 3
    # Adam turns float noise of tiny gradients into parts of an update (lr 5e-4); a wrong denominator moves everything.
    assert (parameters(whole) - parameters(split)).abs().max() < 2e-5


def test_on_policy_decoupled_and_bypass_pg_take_the_same_first_step(tmp_path: Path) -> None:
    """losses.md 9.4: one update, token TIS, equal gradients; the loss values differ."""
    words = ("method=flashrl", "precision=int4")
    decoupled, a = stepped(tmp_path, *words, steps=1)
    bypass, b = stepped(tmp_path, *words, "algo.mode=bypass_pg", steps=1)
    assert a[0]["train/grad_norm"] == pytest.approx(b[0]["train/grad_norm"], rel=1e-5)
    assert a[0]["train/loss"] != pytest.approx(b[0]["train/loss"], rel=1e-3)
    assert (parameters(decoupled) - parameters(bypass)).abs().max() < 1e-6


def test_rejection_acts_in_every_mode(tmp_path: Path) -> None:
    """In the bypass modes the rule compares the live policy with the sampler; the clip's denominator is the sampler."""
    for mode in ("decoupled", "bypass_ppo", "bypass_pg"):
        words = ("method=k3_rs", "precision=int4", f"algo.mode={mode}", "knobs.K3RS.hi=0.002")
        _, rows = stepped(tmp_path, *words, steps=1)
        assert 0.0 < rows[0]["correction/seq_kept_frac"] < 1.0, mode


def test_without_mismatch_a_correction_changes_nothing(tmp_path: Path) -> None:
    """losses.md 9.1, through the whole loop, bit for bit."""
    exact = ("method=zero_mismatch", "engine.max_batch=16")
    plain, _ = stepped(tmp_path, *exact)
    weighted, _ = stepped(tmp_path, *exact, "parts=[zero_mismatch.TrainerSampler,flashrl.TIS]")
    assert torch.equal(parameters(plain), parameters(weighted))


def test_several_updates_move_the_ratio_from_one(tmp_path: Path) -> None:
    _, once = stepped(tmp_path, "method=bf16", steps=1)
    _, often = stepped(tmp_path, "method=bf16", "algo.num_minibatches=2", "algo.num_epochs=3", steps=1)
    assert once[0]["train/ess_ppo"] == pytest.approx(1.0, abs=1e-6)
    assert often[0]["train/ess_ppo"] < 1 - 1e-6


def test_kl_term_pulls_towards_the_reference(tmp_path: Path) -> None:
    weak, strong = (
        [row["train/kl_ref"] for row in stepped(tmp_path, "method=bf16", f"algo.kl_coef={coef}", steps=3)[1]]
        for coef in (1e-6, 10.0)
    )
    assert weak[0] == strong[0] == pytest.approx(0.0, abs=1e-6)
    assert weak[1] == strong[1] > 1e-4  # at the reference itself the term has no gradient
    assert strong[2] < 0.6 * weak[2]


@pytest.mark.parametrize(
    ("words", "launch"),
    [
        (("method=bf16_train",), {}),
        (("method=bf16_train", "trainer.compute=bf16"), {"native_16bit": True, "attention_16bit": True}),
        (("method=fp16",), {"packing": True}),
        (("method=bf16_lora", "knobs.LoRA.lr_scale=1", "trainer.compute=bf16"), {}),
    ],
    ids=["bf16", "native", "fp16", "lora"],
)
def test_the_reference_computes_as_the_policy(words: tuple[str, ...], launch: dict[str, Any], tmp_path: Path) -> None:
    """At the start the two are one: to the bit no KL, which float32 beside 16 bits would show."""
    run, rows = stepped(tmp_path, *words, "algo.kl_coef=0.1", **launch)
    assert rows[0]["train/kl_ref"] == 0.0 < rows[1]["train/kl_ref"]
    assert run.trainer.reference is not None
    assert not any(parameter.requires_grad for parameter in run.trainer.reference.parameters())


def test_a_non_finite_weight_ends_the_run_as_diverged(tmp_path: Path) -> None:
    run = small_run(tmp_path, ["method=bf16", "precision=fp32"])

    def break_it(run: Run) -> None:
        if run.step == 2:
            next(run.trainer.model.parameters()).data.fill_(math.nan)

    with pytest.raises(Diverged, match="not finite"):
        train(run, break_it)
    assert len(run.series) == 2


def lost(run: Run, site: str) -> None:
    """From now on an engine of a run has no log-prob of the first two answers' first tokens."""
    engine = run.reference if site == "reference" else run.engine
    sample = engine.generate

    def generate(*words: object, **named: object) -> Rollout:
        rollout = sample(*words, **named)  # type: ignore[arg-type]
        rollout.logp[:2, 0] = math.nan
        return rollout

    engine.generate = generate  # type: ignore[method-assign]


def test_an_evaluation_without_log_probs_ends_the_run(tmp_path: Path) -> None:
    """Sampled from NaN, answers are those of no policy: where float32 has them, it is the policy that diverged."""
    for site, kind, said in (
        ("reference", Diverged, r"^a log-probability of the policy is not finite$"),
        ("rollout", RuntimeError, r"^the engine's log-probs of 2 of \d+ tokens are NaN$"),
    ):
        run = small_run(tmp_path, ["method=naive", "precision=int8"])
        lost(run, site)
        with pytest.raises(kind, match=said) as error:
            train(run, lambda run: None)
        assert type(error.value) is kind and run.series == []


def test_a_last_evaluation_without_log_probs_is_told_by_a_finished_run(tmp_path: Path) -> None:
    run = small_run(tmp_path, ["method=naive", "precision=int8", "trainer.eval_every=9"])
    train(run, lambda run: lost(run, "rollout") if run.step == 4 else None)
    (told,) = run.evaluation_errors
    assert re.fullmatch(r"step 4: RuntimeError: the engine's log-probs of 2 of \d+ tokens are NaN", told)
    assert [(record.step, record.site) for record in run.evals] == [(0, "reference"), (0, "rollout"), (4, "reference")]


def test_fp16_overflow_halves_the_scale_and_skips_the_step(tmp_path: Path) -> None:
    run, rows = stepped(tmp_path, "method=fp16", "trainer.loss_scale=1e30", steps=1)
    assert rows[0]["train/skipped"] == 1.0
    assert run.trainer.scaler.get_scale() == pytest.approx(5e29)
    assert (run.trainer.num_updates, run.trainer.num_skipped) == (0, 1)
    before, _ = stepped(tmp_path, "method=fp16", steps=0)
    assert torch.equal(parameters(run), parameters(before))


def test_fp16_scaling_leaves_the_clip_norm_alone(tmp_path: Path) -> None:
    _, low = stepped(tmp_path, "method=fp16", "trainer.loss_scale=1024", steps=1)
    _, high = stepped(tmp_path, "method=fp16", "trainer.loss_scale=4096", steps=1)
    assert low[0]["train/grad_norm"] == pytest.approx(high[0]["train/grad_norm"], rel=1e-3)
    assert low[0]["train/skipped"] == high[0]["train/skipped"] == 0.0


def test_restored_state_continues_bit_for_bit(tmp_path: Path) -> None:
    words = ("method=flashrl", "precision=int8", "algo.num_minibatches=2", "trainer.schedule=cosine")
    straight, rows = stepped(tmp_path, *words, steps=4)
    first, _ = stepped(tmp_path, *words, steps=2)
    second = small_run(tmp_path, words)
    second.restore(first.state())
    resumed = take_steps(second, 2)
    assert tensors_hash(straight.trainer.weights()) == tensors_hash(second.trainer.weights())
    assert resumed[1]["train/loss"] == rows[3]["train/loss"]
    assert resumed[1]["mismatch/kl_k3"] == rows[3]["mismatch/kl_k3"]


def test_a_run_that_resumes_after_its_last_step_keeps_the_passport_of_its_rollouts(tmp_path: Path) -> None:
    """That of the evaluation behind it is of newer weights, and has one sampler."""
    words, states = ("method=mixed_rollouts", "precision=int4", "trainer.steps=1"), list[dict[str, Any]]()
    straight, resumed = small_run(tmp_path, words), small_run(tmp_path, words)
    train(straight, lambda run: states.append(run.state()))
    save_state(tmp_path / "state.pt", states[-1])
    resumed.restore(load_state(tmp_path / "state.pt"))
    train(resumed, lambda run: None)
    assert straight.passport is not None and straight.passport.state["samples"] == 2
    assert resumed.passport == straight.passport


def test_dynamic_sampling_fills_the_batch_with_informative_groups(tmp_path: Path) -> None:
    _, rows = stepped(tmp_path, "method=bf16", "algo=dapo", steps=1)
    assert rows[0]["reward/informative_frac"] == 1.0
    assert rows[0]["rollout/gen_batches"] >= 1.0


def test_dynamic_sampling_gives_up_with_the_numbers(tmp_path: Path) -> None:
    run = small_run(tmp_path, ["method=bf16", "algo=dapo", "algo.max_gen_batches=1", "algo.group_size=2"])
    with pytest.raises(ValueError, match=r"algo.max_gen_batches=1: only \d of 4 prompts"):
        for _ in range(20):
            grpo_step(run)


def test_soft_overlong_penalty_lowers_the_shaped_reward_only(tmp_path: Path) -> None:
    _, plain = stepped(tmp_path, "method=bf16", steps=1)
    _, penalized = stepped(tmp_path, "method=bf16", "algo.overlong_buffer=4", "algo.reward_scale=plus_minus", steps=1)
    rate = plain[0]["reward/accuracy"]
    assert penalized[0]["reward/accuracy"] == plain[0]["reward/accuracy"]
    assert penalized[0]["reward/mean"] < 2 * rate - 1 - 0.5


def test_a_right_answer_at_the_limit_is_never_scored_as_a_wrong_short_one() -> None:
    with pytest.raises(ValueError, match=r"overlong_factor=1.0: .* valid: reward_scale=plus_minus, as in DAPO, or"):
        small_config("method=bf16", "algo.overlong_buffer=4")
    group, sampled = torch.zeros(3, dtype=torch.int64), torch.ones(3, 4, dtype=torch.bool)
    lengths, truncated = torch.tensor([4, 2, 4]), torch.tensor([False, False, True])
    advantages = []
    for words in (("algo.reward_scale=plus_minus",), ("algo.overlong_factor=0.5",)):
        algo = small_config("method=bf16", "algo.overlong_buffer=2", *words).algo
        _, adv, row = shaped(algo, 4, [1.0, 0.0, 0.0], lengths, truncated, sampled, group)
        advantages.append(adv[:, 0])
        assert row["reward/accuracy"] == pytest.approx(1 / 3)
    # DAPO: right and full 1 - 1 = 0, wrong and short -1, wrong and full -2: one each side of the mean, s.d. 1
    assert advantages[0].tolist() == pytest.approx([1.0, 0.0, -1.0], abs=1e-5)
    assert advantages[1].tolist() == pytest.approx(advantages[0].tolist(), abs=1e-5)  # half of it on 0/1 is the same


def test_dynamic_sampling_draws_gen_prompts_at_once(tmp_path: Path) -> None:
    words = ["method=bf16", "algo=dapo", "algo.group_size=4", "algo.num_prompts=4"]
    run, rows = stepped(tmp_path, *words, "algo.gen_prompts=24", steps=1)
    assert run.next_prompt == 24 and rows[0]["rollout/gen_batches"] == 1.0
    few, small = stepped(tmp_path, *words, steps=1)
    assert few.next_prompt == 4 * small[0]["rollout/gen_batches"] < 24
    assert rows[0]["reward/informative_frac"] == 1.0
    with pytest.raises(ValueError, match=r"gen_prompts=8: without algo\.dynamic_sampling"):
        small_config("algo.gen_prompts=8")


class Stops:
    """A task that ends every response after its first token 7."""

    pad_id = 0

    def num_kept(self, response: list[int]) -> int:
        return response.index(7) + 1 if 7 in response else len(response)


def test_a_response_ends_where_its_task_says() -> None:
    rollout = Rollout(
        token_ids=torch.tensor([[3, 7, 5, 6], [3, 4, 5, 6], [7, 1, 0, 0]]), logp=-torch.ones(3, 4),
        lengths=torch.tensor([4, 4, 2]), truncated=torch.tensor([True, True, False]),
    )  # fmt: skip
    found = stopped(rollout, Stops())  # pyright: ignore[reportArgumentType]
    assert found.token_ids.tolist() == [[3, 7, 0, 0], [3, 4, 5, 6], [7, 0, 0, 0]]
    assert found.logp.tolist() == [
        [-1, -1, 0, 0],
        [-1, -1, -1, -1],
        [-1, 0, -1, -1],
    ]  # as it came: padding is no concern here
    assert (found.lengths.tolist(), found.truncated.tolist()) == ([2, 4, 1], [False, True, False])


def test_answers_of_an_evaluation_end_where_their_task_says(tmp_path: Path) -> None:
    """As responses do in training: what comes behind is neither length nor cut off by the limit."""
    run = small_run(tmp_path, ["method=bf16", "evaluations=[{task:chain,num:8,k:2}]"])
    run.task = Short(run.task)  # type: ignore[assignment]
    run.asked = [replace(one, task=Short(one.task)) for one in run.asked]  # type: ignore[arg-type]
    evaluate(run)
    assert [(e.length_mean, e.truncated_frac, e.accuracy) for e in run.evals] == [(2.0, 0.0, 0.0)] * 2
    assert [(e.length_mean, e.truncated_frac) for e in run.evaluations] == [(2.0, 0.0)] * 2


def test_overlong_filter_takes_truncated_responses_out_of_the_loss(tmp_path: Path) -> None:
    _, rows = stepped(tmp_path, "method=bf16", "engine.max_new_tokens=4", "algo.overlong_filter=true", steps=1)
    assert rows[0]["rollout/truncated_frac"] == 1.0
    assert rows[0]["train/loss"] == 0.0


def test_evaluation_is_the_same_for_equal_weights_and_covers_both_sites(tmp_path: Path) -> None:
    run = small_run(tmp_path, ["method=naive", "precision=int4"])
    evaluate(run)
    evaluate(run)
    first, second = run.evals[:2], run.evals[2:]
    assert [e.site for e in first] == ["reference", "rollout"]
    assert [e.precision for e in first] == ["fp32", "int4"]
    assert [e.correct for e in first] == [e.correct for e in second]
    assert len(first[0].correct) == 32


@pytest.mark.golden
@pytest.mark.parametrize(
    "words",
    [
        ("method=bf16",),
        ("method=flashrl", "precision=int8"),
        ("method=naive", "precision=nvfp4", "algo.mode=bypass_ppo", "algo.num_minibatches=2"),
        ("method=fp16",),
    ],
    ids=lambda words: "-".join(word.partition("=")[2] for word in words),
)
def test_losses_are_the_committed_ones(
    tmp_path: Path, golden: Callable[[str, object], None], request: pytest.FixtureRequest, words: tuple[str, ...]
) -> None:
    """Per-step numbers to the last bit, by CPU instruction set and torch version, where float kernels are the same."""
    _, rows = stepped(tmp_path, *words, steps=3)
    names = ("train/loss", "train/grad_norm", "mismatch/kl_k3", "reward/accuracy")
    where = (
        f"{torch.backends.cpu.get_cpu_capability().lower().replace(' ', '')}-torch{torch.__version__.partition('+')[0]}"
    )
    name = f"loop-{request.node.callspec.id}.{where}"
    path = ROOT / "tests" / "golden" / f"{name}.json"
    if not path.exists() and not request.config.getoption("--rewrite-golden"):
        pytest.skip(f"no golden numbers for {where}; `make golden` writes them")
    golden(name, [[row[key] for key in names] for row in rows])


def test_schedules_start_and_end_where_they_should() -> None:
    warm = small_config("trainer.warmup_steps=4", "trainer.schedule=linear").trainer
    assert [schedule(warm, i, 12) for i in (0, 3, 4, 8)] == [0.25, 1.0, 1.0, 0.5]
    assert schedule(small_config("trainer.schedule=cosine").trainer, 6, 12) == pytest.approx(0.5)
    assert schedule(small_config().trainer, 11, 12) == 1.0
    for kind in ("linear", "cosine"):
        floor = small_config(f"trainer.schedule={kind}", "trainer.min_lr_ratio=0.1").trainer
        assert [schedule(floor, i, 12) for i in (0, 6, 12)] == pytest.approx([1.0, 0.55, 0.1])
