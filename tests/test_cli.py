"""The command line: help reads, bad input is one line with exit code 2, commands print what they promise."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from harness import cli
from harness.cell import run_cell
from tests.toy import small_config, small_launch

COMMANDS = ("sweep", "run", "base", "report", "methods", "metrics", "doctor", "passport", "results", "replay", "browse")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([command, "--help"])
    assert left.value.code == 0
    assert "usage: lowbit " + command in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sweep", "quik"], "nearest: quick"),
        (["run", "method=naive", "precision=int5"], "int4"),
        (["run", "method=bf16", "precision=int4"], "method bf16 cannot use it"),
        (["run", "metod=bf16"], "nearest: method"),
        (["run", "method=flashrl", "knobs.TIS.cup=2"], "nearest: cap"),
        (["run", "task.n=0"], "n=0"),
        (["report", "nothing"], "no results"),
        (["passport", "zzz"], "matches 0 results"),
        (["results", "import", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*words, "--results", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("lowbit: error: ")
    assert err.count("\n") == 1
    assert expected in err


def test_overrides_may_follow_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "method=bf16", "--results", str(tmp_path), "--dry-run", "trainer.steps=7", "seed=3"]
    assert cli.main(words) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert (config["trainer"]["steps"], config["seed"]) == (7, 3)
    with pytest.raises(SystemExit) as left:
        cli.main([*words, "--colour"])
    assert left.value.code == 2
    assert "--colour" in capsys.readouterr().err


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "results/figures/x.png")

    monkeypatch.setattr("harness.commands.reporting.report", full)
    assert cli.main(["report", "quick"]) == 2
    assert capsys.readouterr().err == "lowbit: error: results/figures/x.png: No space left on device\n"


def test_methods_lists_parts_and_knobs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["methods", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["flashrl"]["parts"]["TIS"]["cap"] == 2.0
    assert found["bf16"]["is_control"]
    assert found["k3_rs_tis"]["reconstructed"]


def test_metrics_translate_has_verl_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["metrics", "--translate"]) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("mismatch/kl_k3 "))
    assert "rollout_corr/k3_kl" in line


def test_dry_run_prints_the_resolved_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["run", "method=flashrl", "--dry-run", "--results", str(tmp_path)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["config"]["precision"]["name"] == "int8"
    assert shown["config"]["trainer"]["lr"] == 3e-4
    assert list(tmp_path.iterdir()) == []


def test_passport_and_report_read_a_finished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_cell(small_config("method=flashrl", "precision=int8"), small_launch(tmp_path))
    assert cli.main(["passport", result.run_id[:6], "--results", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "model.layers.0.self_attn.q_proj.weight" in out
    assert "int8_channel" in out and "int8_token" in out
    assert cli.main(["report", "test", "--only", "tables", "--results", str(tmp_path)]) == 0
    assert (tmp_path / "tables" / "test.md").read_text().count("flashrl int8") >= 1
    assert cli.main(["results", "verify", "--results", str(tmp_path)]) == 0


def test_a_missing_gpu_is_one_line_and_planning_needs_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words = ["trainer.device=cuda", "task=chain", "model=xs", "--results", str(tmp_path)]
    assert cli.main(["run", *words]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "lowbit: error: trainer.device=cuda: no CUDA device is visible; valid: trainer.device=cpu"
    ]
    assert cli.main(["run", "--dry-run", *words]) == 0
    assert '"device": "cuda"' in capsys.readouterr().out
