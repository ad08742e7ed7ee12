"""`lowbit eval` and `lowbit export`: a run's policy asked again answers as in the run; any folder can be asked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.cli.main import main
from harness.config.load import run_id
from harness.engines.embedded.engine import EmbeddedEngine
from harness.published.recipes.twin import write_model, write_questions
from harness.records.packed import pack
from harness.records.run_result import read_result, write_result
from harness.run.cell import run_cell
from tests.toy import small_config, small_launch

ENTRY = "evaluations=[{task:chain,num:8,k:3,greedy:true,options:{n:8}}]"


def test_a_policy_asked_again_answers_as_in_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config("method=naive", "precision=int8", "trainer.steps=2", ENTRY)
    result = run_cell(config, small_launch(tmp_path, save="hf"))
    folder = tmp_path / "runs" / "test"
    lost = [record.model_copy(update={"error": "lost", "correct": [], "scores": {}}) if record.step == 2 else record
            for record in result.evaluations]  # fmt: skip
    series = (folder / f"{run_id(config)}.parquet").read_bytes()
    write_result(folder, result.model_copy(update={"evaluations": lost}), series)
    assert main(["eval", run_id(config), "--results", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "avg@3" in shown and "maj@3" in shown and "pass@2" in shown
    again = read_result(folder / f"{run_id(config)}.json")
    timeless = {"seconds": None}
    assert [record.model_copy(update=timeless) for record in again.evaluations] == [
        record.model_copy(update=timeless) for record in sorted(result.evaluations, key=lambda r: (r.step, r.site))
    ]
    assert (folder / f"{run_id(config)}.parquet").read_bytes() == series

    pack(tmp_path, "test")
    shutil.rmtree(folder)
    assert main(["eval", run_id(config), "--results", str(tmp_path)]) == 0
    assert len(read_result(folder / f"{run_id(config)}.json").evaluations) == len(again.evaluations)

    assert main(["eval", str(folder / f"{run_id(config)}.json"), "--results", str(tmp_path)]) == 0
    assert main(["eval", str(tmp_path / "nowhere"), "--results", str(tmp_path)]) == 2
    assert f"{tmp_path / 'nowhere'}: no model folder" in capsys.readouterr().err

    copy = tmp_path / "mine (1)"
    assert main(["export", run_id(config), str(copy), "--results", str(tmp_path)]) == 0
    assert main(["export", run_id(config), str(copy), "--results", str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["export", run_id(config), str(copy) + "q", "--quantized", "--results", str(tmp_path)]) == 2
    assert "launch.save=quantized keeps them" in capsys.readouterr().err
    assert main(["eval", str(copy), ENTRY, "method=naive", "precision=int8", "--results", str(tmp_path)]) == 0
    (path,) = (tmp_path / "evaluations").glob("mine (1)-*.json")
    told = json.loads(path.read_text())["evaluations"]
    assert [line["correct"] for line in told] == [
        record.correct for record in sorted(result.evaluations, key=lambda r: r.site) if record.step == 2
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "run 'nothing' matches 0 results"),
        (["FOLDER"], "evaluations=[]: nothing is asked"),
        (["FOLDER", "trainer.steps=0"], "trainer.steps=0: must be at least 1; lowbit eval FOLDER evaluates without"),
        (["FOLDER", "evaluations=[{task:sort}]"], "evaluations.0.num=null: task 'sort' has questions without end"),
    ],
)
def test_what_cannot_be_asked_is_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_launch(tmp_path)
    folder = str(next((tmp_path / "bases").iterdir()))
    assert main(["eval", *[folder if w == "FOLDER" else w for w in words], "--results", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
    assert not (tmp_path / "evaluations").exists()


def test_a_folder_is_asked_with_all_its_stop_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "model", "qwen2", "qwen2.5")
    write_questions(tmp_path / "data", "gsm8k")
    ends = json.loads((tmp_path / "model" / "config.json").read_text())["eos_token_id"], 3
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    seen, real = set[tuple[int, ...]](), EmbeddedEngine.generate

    def generate(self: EmbeddedEngine, *args: Any, **values: Any) -> Any:
        seen.add(tuple(self.end_ids))
        return real(self, *args, **values)

    monkeypatch.setattr(EmbeddedEngine, "generate", generate)
    entry = f"evaluations=[{{task:gsm8k,path:'{tmp_path}/data',num:2,k:1,max_new_tokens:4}}]"
    assert (
        main(["eval", str(tmp_path / "model"), entry, "precision=int8", "method=naive", "--results", str(tmp_path)])
        == 0
    )
    assert {tuple(sorted(ids)) for ids in seen} == {tuple(sorted(ends))}
