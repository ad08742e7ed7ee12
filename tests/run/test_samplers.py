"""Several samplers of one batch: who draws which responses, in which formats, and what is measured of each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.api import Rollout, Step
from harness.foundation.seeds import stable_seed
from harness.models.adapters import COMPANIONS
from harness.run.collect import generate
from harness.run.gpu_sharing import lend, reclaim
from harness.run.loop import evaluate, grpo_step, push_weights
from harness.run.run import Collected, Run
from tests.toy import small_run, take_steps

MIXED = ("method=mixed_rollouts", "precision=int4", "knobs.SecondSampler.share=0.25")
"""Three of four responses in INT4, one in BF16."""


def stepped(folder: Path, *words: str, steps: int = 1) -> tuple[Run, list[dict[str, float]], list[Collected]]:
    run, batches = small_run(folder, [*MIXED, *words]), list[Collected]()
    run.on_batch = lambda step, batch: batches.append(batch)
    return run, take_steps(run, steps), batches


def formats(weights: list[dict[str, object]] | tuple) -> set[object]:
    return {t["format"] for t in weights if "_proj.weight" in str(t["name"])}


def test_every_prompt_has_its_shares_and_each_row_its_sampler(tmp_path: Path) -> None:
    """Rows of the second sampler are those that its own engine draws with its own seed."""
    run, _, (batch,) = stepped(tmp_path)
    sampler = batch.rollout.sampler
    assert sampler is not None and sampler.tolist() == [0, 0, 0, 1] * 4
    assert [item.index for item in batch.items[3::4]] == [item.index for item in batch.items[::4]]
    seed = stable_seed(run.config.seed, "rollout", 0, 0)
    again = small_run(tmp_path, [*MIXED])
    grpo_step(again)  # pushes the same weights, then moves: the engines hold those of the step's start
    prompts = [item.prompt for item in batch.items[::4]]
    for number, count, own in ((0, 3, seed), (1, 1, stable_seed(seed, "sampler", "bf16"))):
        alone = again.engines[number].generate(
            prompts, num_samples=count, max_new_tokens=run.max_new_tokens, temperature=1.0, seed=own
        )
        rows = (sampler == number).nonzero().flatten()
        width = min(alone.token_ids.shape[1], batch.rollout.token_ids.shape[1])
        assert torch.equal(alone.token_ids[:, :width], batch.rollout.token_ids[rows, :width])
        assert torch.equal(alone.logp[:, :width], batch.rollout.logp[rows, :width])
    mixed = generate(again, prompts, seed)
    assert torch.equal(mixed.token_ids[:, :width], batch.rollout.token_ids[:, :width])


def test_the_passport_lists_all_and_each_is_what_it_says(tmp_path: Path) -> None:
    run, _, _ = stepped(tmp_path)
    assert run.passport is not None
    (second,) = run.passport.state["samplers"]
    assert (run.passport.state["samples"], second["name"], second["samples"]) == (3, "bf16", 1)
    assert {t.format for t in run.passport.weights if "_proj.weight" in t.name} == {"int4_g32"}
    assert formats(second["weights"]) == {"bf16"}
    assert [engine.realized_plan().weights == run.passport.weights for engine in run.engines] == [True, False]
    evaluate(run)
    assert [record.site for record in run.evals] == ["reference", "rollout"]


def test_each_sampler_has_columns_of_its_own(tmp_path: Path) -> None:
    """BF16 rows are near the trainer, INT4 rows far, and the whole batch lies between."""
    _, (row,), (batch,) = stepped(tmp_path, "algo.num_prompts=8")
    assert row["sampler/bf16/kl_k3"] < 1e-4
    assert row["sampler/int4/kl_k3"] > 100 * row["sampler/bf16/kl_k3"]
    assert row["sampler/bf16/kl_k3"] < row["mismatch/kl_k3"] < row["sampler/int4/kl_k3"]
    assert 0.5 < row["sampler/int4/ess_token_raw"] < row["sampler/bf16/ess_token_raw"] <= 1.0
    rewards = torch.tensor([score.reward for score in batch.scores]).view(8, 4)
    assert row["sampler/int4/reward"] == pytest.approx(float(rewards[:, :3].mean()))
    assert row["sampler/bf16/reward"] == pytest.approx(float(rewards[:, 3].mean()))


def test_one_sampler_has_neither_columns_nor_numbers_of_rows(tmp_path: Path) -> None:
    run = small_run(tmp_path, ["method=flashrl", "precision=int4"])
    batches: list[Collected] = []
    run.on_batch = lambda step, batch: batches.append(batch)
    row = grpo_step(run)
    assert not [name for name in row if name.startswith("sampler/")]
    assert batches[0].rollout.sampler is None and run.engines == [run.engine]
    assert run.passport is not None and "samplers" not in run.passport.state


def test_dynamic_sampling_keeps_the_sampler_of_each_row(tmp_path: Path) -> None:
    _, (row,), (batch,) = stepped(tmp_path, "algo.dynamic_sampling=true", "algo.gen_prompts=3")
    assert batch.rollout.sampler is not None and batch.rollout.sampler.tolist() == [0, 0, 0, 1] * 4
    rewards = torch.tensor([score.reward for score in batch.scores]).view(4, 4)
    assert row["rollout/gen_batches"] > 1 and bool((rewards.std(1) > 0).all())


def test_stale_weights_reach_every_sampler(tmp_path: Path) -> None:
    """With `algo.staleness=1` the second step samples with the first one's weights, in both formats."""
    stale, _, _ = stepped(tmp_path, "algo.staleness=1", steps=2)
    fresh, _, _ = stepped(tmp_path, steps=2)
    start, _, _ = stepped(tmp_path, steps=1)

    def hashes(run: Run) -> list[list[str]]:
        return [[t.hash for t in engine.realized_plan().weights] for engine in run.engines]

    assert hashes(stale) == hashes(start)
    assert all(own != other for own, other in zip(hashes(fresh), hashes(start), strict=True))


LORA = ("parts=[qlora.LoRA,mixed_rollouts.SecondSampler,flashrl.TIS]", "knobs.LoRA.rank=4")
QAT = ("parts=[qat_kd.GPTQStart,mixed_rollouts.SecondSampler,flashrl.TIS]", "knobs.GPTQStart.num_sequences=8")


@pytest.mark.parametrize(
    ("parts", "precision", "second"),
    [(LORA, "nvfp4", "bf16"), (LORA, "nvfp4", "int4_g32"), (LORA, "mxfp4", "int4_g32"), (QAT, "int4", "mxfp4")],
)
def test_a_sampler_of_another_format_finds_its_own_scales(
    parts: tuple[str, ...], precision: str, second: str, tmp_path: Path
) -> None:
    """A trainer on frozen or rounded weights sends their scales; the second engine has the codes of the values alone,
    the first one still has the trainer's scales, and its codes."""
    run = small_run(
        tmp_path, ["method=mixed_rollouts", f"precision={precision}", *parts, f"knobs.SecondSampler.weights={second}"]
    )
    step = Step(index=0, total=4, seed=0)
    push_weights(run, step)
    own, other = run.engines
    pushed = other.realized_plan().weights
    other.load_weights((name, t) for name, t in run.trainer.weights() if not name.endswith(COMPANIONS))
    assert pushed == other.realized_plan().weights
    before = own.realized_plan().weights
    own.load_weights(run.composed.sync(run.trainer.weights(), step))
    assert before == own.realized_plan().weights


def test_all_engines_sleep_wake_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, said = small_run(tmp_path, [*MIXED, "engine.sleep=true"]), list[str]()
    for number, engine in enumerate(run.engines):
        for name in ("sleep", "wake", "close"):
            monkeypatch.setattr(engine, name, lambda name=name, number=number: said.append(f"{name} {number}"))
    lend(run)
    reclaim(run)
    run.close()
    assert said == ["sleep 0", "sleep 1", "wake 0", "wake 1", "close 0", "close 1"]


def test_a_lone_rollout_is_the_engines_own(tmp_path: Path) -> None:
    """Nothing is joined or put in another order."""
    run = small_run(tmp_path, ["method=bf16"])
    made: list[Rollout] = []
    real = run.engine.generate

    def kept(*words: object, **named: object) -> Rollout:
        made.append(real(*words, **named))  # type: ignore[arg-type]
        return made[-1]

    run.engine.generate = kept  # type: ignore[method-assign]
    run.engine.load_weights(run.trainer.weights())
    assert generate(run, [item.prompt for item in run.eval_items[:2]], 3) is made[0]
