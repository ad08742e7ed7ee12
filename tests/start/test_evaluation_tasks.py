"""Tasks of `evaluations`: built beside the training task, one object per task, refused where they do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.config.load import load
from harness.start.prepare import check_data, evaluation_tasks
from harness.tasks.sort import Sort
from tests.source_tree import ROOT

DATA = ROOT / "tests" / "tasks" / "data"


def test_other_tasks_and_other_sizes_stand_beside_the_training_task() -> None:
    config = load(
        ["task=chain", "model=xs", "evaluations=[{task:sort,num:4,options:{n:6}},{task:chain,num:2,options:{n:4}},"
         "{task:sort,num:8,k:3,options:{n:6}}]"]
    )  # fmt: skip
    check_data(config)
    sort, chain, again = evaluation_tasks(config)
    assert (sort.name, chain.name) == ("sort", "chain")
    assert again is sort
    assert len(sort.sample("eval", [0])[0].prompt) == 6 + 2
    assert sort.vocab_size == config.model.vocab_size


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{task:sort}", r"evaluations.0.num=null: task 'sort' has questions without end"),
        ("{task:sorr,num:1}", r"evaluations.0: task 'sorr' is unknown: nearest: sort"),
        ("{task:sort,num:1,options:{m:1}}", r"evaluations.0: task 'sort' has no option 'm'"),
        ("{task:aime,num:1}", r"evaluations.0: task 'aime' needs a model folder with a tokenizer"),
        ("{task:wordmath,num:1}", r"evaluations.0: task 'wordmath': vocab_size=32: valid: 512"),
        (
            "{task:count,num:1}",
            r"^task 'count' ends responses at the token ids \[-1\], task 'chain' at \[1\], and one engine answers "
            "both; ask them apart$",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_line(entry: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_data(load(["task=chain", "model=xs", f"evaluations=[{entry}]"]))


def test_a_length_penalty_over_more_than_a_response_is_refused_before_a_run() -> None:
    words = ["task=chain", "model=xs", "algo.overlong_factor=0.5"]
    check_data(load([*words, "engine.max_new_tokens=8", "algo.overlong_buffer=8"]))
    with pytest.raises(ValueError, match=r"algo\.overlong_buffer=9: responses have at most 8 tokens; valid: 0 to 8"):
        check_data(load([*words, "engine.max_new_tokens=8", "algo.overlong_buffer=9"]))
    with pytest.raises(ValueError, match=r"algo\.overlong_buffer=4096: responses have at most \d+ tokens"):
        check_data(load([*words, "algo.overlong_buffer=4096"]))


def test_prompts_with_tokens_that_the_model_lacks_are_refused_before_a_run(tmp_path: Path) -> None:
    """A folder without a tokenizer says nothing else of its tokens."""
    base = next((ROOT / "results" / "bases").glob("xs-chain8-b0-*"))
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((base / name).read_bytes())
    words = ["model=hf", f"model.path={tmp_path}"]
    for task, other, said in (
        ("task=count", "[]", "task=count: prompts have token ids up to 127, the model has 32 tokens"),
        ("task=chain", "[{task:wordmath,num:8,options:{n:4}}]",
         "evaluations.0.task=wordmath: prompts have token ids up to 492, the model has 32 tokens"),
    ):  # fmt: skip
        with pytest.raises(ValueError) as told:
            check_data(load([*words, task, f"evaluations={other}"]))
        assert str(told.value) == said
    check_data(load([*words, "task=count", "+task.options.vocab_size=32"]))


def test_data_are_looked_at_also_where_the_length_is_given() -> None:
    with pytest.raises(ValueError, match="task 'aime' needs a model folder with a tokenizer"):
        check_data(load(["task=aime", "model=xs", "engine.max_new_tokens=8"]))


def test_a_base_for_a_task_that_shows_no_answers_is_refused_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Sort, "answers")
    monkeypatch.delattr(Sort, "demonstrations")
    with pytest.raises(ValueError) as told:
        check_data(load(["task=sort"]))
    assert str(told.value) == (
        "task=sort: no base can be trained for it, its class has no answers, demonstrations; give model=hf "
        "model.path=FOLDER"
    )
    base = next((ROOT / "results" / "bases").glob("s-sort8-b0-*"))
    check_data(load(["task=sort", "model=hf", f"model.path={base}"]))
