"""Question sets from local folders as verl's Parquet, with a Hugging Face folder as the model; without verl."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from harness.config.compose import compose
from harness.config.load import load
from harness.config.resolve import resolve
from harness.config.schema import Launch
from harness.models.checkpoint import content_hash
from harness.start.prepare import start_of
from harness.tasks import Task
from harness.trainers.verl.data import lay_out, prompt_length
from harness.trainers.verl.job import VerlJob, read_job
from tests.source_tree import ROOT
from tests.verl_jobs.jobs import text_model

DATA = ROOT / "tests" / "tasks" / "data"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_model(tmp_path_factory.mktemp("models") / "toy")


def math_folder(folder: Path) -> Path:
    """MATH as it is published with answers: a file per split, the test questions those of MATH-500."""
    folder.mkdir()
    rows = [{"problem": f"Add {n} and {n}.", "solution": f"\\boxed{{{2 * n}}}", "answer": str(2 * n)} for n in range(5)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "test.jsonl").write_text((DATA / "math500" / "test.jsonl").read_text())
    return folder


def laid_out(folder: Path, model: Path, *words: str) -> tuple[VerlJob, Task]:
    overrides = [
        "trainer=verl", "method=bf16", "model=hf", f"model.path={model}", "task.options.num_workers=1",
        "task.num_eval=2", "algo.num_prompts=4", "algo.group_size=2", "engine.max_new_tokens=12", "trainer.steps=3",
    ]  # fmt: skip
    config = resolve(load([*overrides, *words]), lambda path: content_hash(Path(path)))
    launch = Launch(results=str(folder))
    start = start_of(config, launch)
    return lay_out(config, launch, compose(config), start, folder / "verl"), start.task


@pytest.mark.parametrize("name", ["gsm8k", "math", "dapo_math_17k"])
def test_a_local_question_set_becomes_verls_parquet(tmp_path: Path, model: Path, name: str) -> None:
    words = {
        "gsm8k": ("task=gsm8k", f"task.path={DATA / 'gsm8k'}"),
        "math": ("task=math500", f"task.path={math_folder(tmp_path / 'math')}", "task.options.train_split=train"),
        "dapo_math_17k": ("task=dapo_math_17k", f"task.path={DATA / 'dapo'}"),
    }[name]
    job, task = laid_out(tmp_path / "run", model, *words)
    longest = 0
    for split, path, count in (("train", job.train_file, 12), ("eval", job.eval_file, 2)):
        table = pq.read_table(path)
        assert table.schema.names == ["data_source", "prompt", "reward_model", "extra_info"]
        assert table.num_rows == count
        for row in table.to_pylist():
            info = row["extra_info"]
            item = task.sample(info["split"], [info["index"]])[0]
            assert row["data_source"] == info["split"] == split
            assert row["reward_model"] == {"style": "rule", "ground_truth": item.reference}
            assert info["num_tokens"] == len(item.prompt)
            longest = max(longest, len(item.prompt))
    assert prompt_length(job) == longest
    train = pq.read_table(job.train_file).to_pylist()
    size = task.num_train
    assert size is not None
    epoch = [row["extra_info"]["index"] for row in train[: min(size, 12)]]
    assert len(set(epoch)) == len(epoch)  # no question twice before all were asked
    assert {row["reward_model"]["ground_truth"] for row in train}.isdisjoint({""})


def test_a_job_names_its_files_by_absolute_paths(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data, folder = (os.path.relpath(path, tmp_path) for path in (DATA / "gsm8k", model))
    job, _ = laid_out(Path("run"), Path(folder), "task=gsm8k", f"task.path={data}")
    told = read_job(job.folder / "job.json").config
    for path, whole in ((told.task.path, DATA / "gsm8k"), (told.model.path, model)):
        assert path is not None and Path(path).is_absolute() and Path(path).samefile(whole)


def test_the_prompt_is_for_readers_and_its_answer_is_the_tasks(tmp_path: Path, model: Path) -> None:
    job, _ = laid_out(tmp_path, model, "task=gsm8k", f"task.path={DATA / 'gsm8k'}")
    row = next(row for row in pq.read_table(job.eval_file).to_pylist() if row["extra_info"]["index"] == 0)
    assert row["reward_model"]["ground_truth"] == "8020"
    assert row["prompt"][0]["role"] == "user"
    assert "20" in row["prompt"][0]["content"]
