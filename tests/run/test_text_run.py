"""A whole run in text on a CPU: a small base is trained where it is missing, and GRPO starts from it."""

import pytest

from harness.config.load import load
from harness.config.resolve import resolve
from harness.config.schema import Launch
from harness.run.cell import run_cell
from harness.tasks.wordmath_check import FAILURES

WORDS = (
    "method=naive", "precision=int8", "model=words_xs", "model.sft_lr=1e-2", "base=text_small", "base.num_eval=128",
    "base.target_accuracy=0.05", "base.eval_every=40", "base.max_steps=400", "base.batch_tokens=1024",
    "task=wordmath_ordered", "task.n=2", "task.options.num_names=4", "task.num_eval=64", "trainer.steps=30",
    "trainer.eval_every=30", "trainer.lr=1e-3", "algo.num_prompts=8", "algo.group_size=8",
)  # fmt: skip


def test_a_run_in_text_learns_from_its_own_base_and_says_how_it_fails(tmp_path):
    config, launch = resolve(load(WORDS)), Launch(results=str(tmp_path), sweep="text")
    result = run_cell(config, launch)
    assert (result.status, result.num_steps, result.error) == ("ok", 30, None)
    (folder,) = (path for path in (tmp_path / "bases").iterdir() if path.is_dir())
    assert folder.name.startswith("words_xs-wordmath2-b0-")
    assert len(result.evals) == 4 and {*result.evals[0].failures} <= {*FAILURES}
    for record in result.evals:  # with path as the reward, what does not fail is right
        assert record.accuracy == pytest.approx(1 - sum(record.failures.values()))
    before, after = (record.accuracy for record in result.evals if record.site == "reference")
    assert after > before  # 64 questions, from about 0.1
    assert result.summary["k3_median"] is not None and 0 < result.summary["k3_median"] < 0.05
