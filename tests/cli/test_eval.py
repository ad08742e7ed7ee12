"""`lowbit eval` and `lowbit export`: a run's policy asked again answers as in the run; any folder can be asked."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from harness.cli.main import main
from harness.config.load import run_id
from harness.engines.embedded.engine import EmbeddedEngine
from harness.foundation.lock_file import folder_held
from harness.published.recipes.twin import write_model, write_questions
from harness.records.packed import pack
from harness.records.run_result import read_result, write_result
from harness.run.cell import run_cell
from tests.toy import SMALL, small_config, small_launch

ENTRY = "evaluations=[{task:chain,num:8,k:3,greedy:true,options:{n:8}}]"


def test_a_policy_asked_again_answers_as_in_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config("method=naive", "precision=int8", "trainer.steps=2", ENTRY)
    result = run_cell(config, small_launch(tmp_path, save="hf"))
    folder = tmp_path / "runs" / "test"
    lost = [record.model_copy(update={"error": "lost", "correct": [], "scores": {}}) if record.step == 2 else record
            for record in result.evaluations]  # fmt: skip
    series = (folder / f"{run_id(config)}.parquet").read_bytes()
    write_result(folder, result.model_copy(update={"evaluations": lost}), series)
    with folder_held(tmp_path / "work" / run_id(config), ""):
        assert main(["eval", run_id(config), "--results", str(tmp_path)]) == 2
    said = f"lowbit: error: {run_id(config)}: the run, or another evaluation of it, is at work; wait for its end\n"
    assert capsys.readouterr().err == said
    assert read_result(folder / f"{run_id(config)}.json").evaluations == lost
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
    assert f"{tmp_path / 'nowhere'}: no such folder" in capsys.readouterr().err

    copy = tmp_path / "mine (1)"
    assert main(["export", run_id(config), str(copy), "--results", str(tmp_path)]) == 0
    assert main(["export", run_id(config), str(copy), "--results", str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["export", run_id(config), str(copy) + "q", "--quantized", "--results", str(tmp_path)]) == 2
    assert "with --again launch.save=quantized" in capsys.readouterr().err
    assert main(["eval", str(copy), ENTRY, "method=naive", "precision=int8", "--results", str(tmp_path)]) == 0
    (path,) = (tmp_path / "evaluations").glob("mine (1)-*.json")
    told = json.loads(path.read_text())["evaluations"]
    assert [line["correct"] for line in told] == [
        record.correct for record in sorted(result.evaluations, key=lambda r: r.site) if record.step == 2
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], " and no model folder is 'nothing'; lowbit runs SWEEP lists runs"),
        (["FOLDER"], "k:4}]', or a task made here: 'evaluations=[{task:sort,num:256}]'"),
        (
            ["FOLDER", "trainer.steps=9"],
            "trainer.steps=9: nothing is trained here; valid of the trainer: trainer.device, ",
        ),
        (["FOLDER", "base.n=9"], "base.n=9: no base is trained here, the model is the folder; leave it out"),
        (["FOLDER", "base=text_muon"], "base=text_muon: no base is trained here"),
        (["FOLDER", "evaluations=[{task:sort}]"], "evaluations.0.num=null: task 'sort' has questions without end"),
        (
            ["FOLDER", "evaluations=[{task:sort,num:1},{task:count,num:1}]"],
            "task 'count' ends responses at the token ids [-1], task 'sort' at [1], and one engine answers both",
        ),
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


def test_a_place_that_cannot_be_written_is_told_before_anything_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_launch(tmp_path)
    error = OSError(errno.EROFS, "Read-only file system")
    monkeypatch.setattr("harness.foundation.writable.TemporaryFile", Mock(side_effect=error))
    monkeypatch.setattr(EmbeddedEngine, "generate", None)
    folder = str(next((tmp_path / "bases").iterdir()))
    assert main(["eval", folder, ENTRY, "--results", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"lowbit: error: --results {tmp_path}: nothing can be written there: Read-only file system\n"
    )


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


def test_other_questions_than_the_runs_own_are_kept_apart_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config("method=flashrl", "precision=int8", "trainer.steps=1")
    run_cell(config, small_launch(tmp_path, save="hf"))
    record = tmp_path / "runs" / "test" / f"{run_id(config)}.json"
    before = record.read_bytes()
    assert main(["eval", run_id(config), ENTRY, "--results", str(tmp_path)]) == 0
    (path,) = (tmp_path / "evaluations").iterdir()
    assert path.name.startswith(f"{run_id(config)}-step-1-") and record.read_bytes() == before
    told = json.loads(path.read_text())
    assert [(line["task"], line["site"], len(line["correct"])) for line in told["evaluations"]] == [
        ("chain", "reference", 8)
    ]
    assert told["config"]["method"] == "flashrl" and told["config"]["evaluations"][0]["k"] == 3
    folder = tmp_path / "policies" / "test" / run_id(config) / "step-1"
    assert capsys.readouterr().out.endswith(
        "not asked as rolled: Profile of flashrl pushes more than the weights (scales, noise or adapters), and a model "
        "folder holds the weights alone. What a run lists in its own `evaluations` is asked as rolled while it trains; "
        f"for the weights in a plain format: lowbit eval {folder} method=naive precision=FORMAT 'evaluations=[...]'\n"
        f"result: {path}\n"
    )
    assert main(["eval", str(folder), ENTRY, "method=naive", "precision=int8", "--results", str(tmp_path)]) == 0
    assert "chain  rollout    int8" in capsys.readouterr().out
    assert main(["eval", str(folder), ENTRY, "method=flashrl", "precision=int4", "--results", str(tmp_path)]) == 0
    assert "chain  rollout    int4" in capsys.readouterr().out  # whose scales are none of the method's


def test_a_run_that_kept_no_policy_gets_one_by_running_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = ["--results", str(tmp_path)]
    words = ["run", *SMALL, "trainer.steps=1", "method=bf16", *results]
    small_launch(tmp_path)
    assert main(words) == 0
    assert main([*words, "launch.save=hf"]) == 0
    (record,) = (tmp_path / "runs" / "runs").glob("*.json")
    out = capsys.readouterr().out
    k3 = json.loads(record.read_text())["summary"]["k3_median"]
    assert f"\nmismatch: k3 {k3:.1e} nats a token, median of the steps\n" in out
    assert f"lowbit report runs {' '.join(results)}; formats in force: lowbit passport {record.stem} " in out
    assert f"finished before (--again runs it once more): ok  {record.stem}  " in out
    assert out.endswith("note: it kept no policy of launch.save=hf; --again trains it anew and keeps one\n")
    assert main(["export", record.stem, str(tmp_path / "mine"), *results]) == 2
    assert main([*words, "--again", "launch.save=hf"]) == 0
    (aside,) = (tmp_path / "replaced" / "runs").iterdir()
    out = capsys.readouterr().out
    assert f"what was there before is in {aside}" in out
    policy = tmp_path / "policies" / "runs" / record.stem
    assert out.endswith(f"policy: {policy}; lowbit eval and lowbit export take it by {record.stem}\n")
    assert main([*words, "launch.save=hf"]) == 0
    assert "note: " not in capsys.readouterr().out
    assert main([*words, "launch.save=quantized"]) == 0
    assert "note: it kept no policy of launch.save=quantized; --again" in capsys.readouterr().out
    assert main(["export", record.stem, str(tmp_path / "mine"), *results]) == 0
    assert (tmp_path / "mine" / "config.json").is_file()
