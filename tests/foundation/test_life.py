"""Signs of life between the steps of a run: who gives them, and how often."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.engines.embedded import engine, exact
from harness.foundation import life
from harness.run.loop import evaluate, grpo_step
from harness.start import prepare
from harness.trainers.local import trainer
from tests.toy import small_run


def test_a_sign_is_given_once_a_second_and_only_where_a_file_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(life.time, "monotonic", lambda: now[0])
    own = life.Life()
    own.alive()  # nobody looks
    own.file = tmp_path / life.NAME
    own.alive()
    first = (tmp_path / life.NAME).stat().st_mtime_ns
    (tmp_path / life.NAME).unlink()
    now[0] += 0.5
    own.alive()
    assert not (tmp_path / life.NAME).exists()
    now[0] += 0.5
    own.alive()
    assert (tmp_path / life.NAME).stat().st_mtime_ns >= first
    own.file = tmp_path / "no folder" / life.NAME
    now[0] += 5.0
    own.alive()  # a place that cannot be written costs the sign alone


class Count:
    """A life that counts its signs."""

    def __init__(self) -> None:
        self.signs = 0

    def alive(self) -> None:
        self.signs += 1


def test_preparations_samplings_and_passes_give_signs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, sampled, passed = Count(), Count(), Count()
    monkeypatch.setattr(prepare, "LIFE", prepared)
    monkeypatch.setattr(engine, "LIFE", sampled)
    monkeypatch.setattr(trainer, "LIFE", passed)
    run = small_run(tmp_path, ("method=qat_kd", "precision=int4"), micro_batch_tokens=64)
    assert prepared.signs >= 2 * run.trainer.model.config.num_layers  # GPTQ and distillation run the model
    evaluate(run)
    assert (sampled.signs >= 4, passed.signs) == (True, 0)  # a sign for every token of the longest answer
    grpo_step(run)
    rows = run.config.algo.num_prompts * run.config.algo.group_size
    assert passed.signs >= rows * 2 * 9 // 64  # scored and updated, at least nine tokens a row, 64 a pass


def test_the_trainers_own_sampler_gives_a_sign_for_every_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signs = Count()
    monkeypatch.setattr(exact, "LIFE", signs)
    run = small_run(tmp_path, ("method=zero_mismatch", "precision=fp32"))
    run.engine.load_weights(run.trainer.weights())
    prompts = [item.prompt for item in run.eval_items[:4]]
    out = run.engine.generate(prompts, num_samples=1, max_new_tokens=9, temperature=1.0, seed=0)
    assert signs.signs == int(out.lengths.max()) > 1
