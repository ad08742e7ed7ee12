"""`lowbit base`: which bases a sweep still wants, the longest answers first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.cli.base import wanted
from harness.cli.main import main
from harness.config.schema import Launch
from harness.start.prepare import base_folder

SWEEP = """
question: Which?
overrides: [model=xs, task=sort]
axes: {task.n: [4, 8]}
arms: [{method: bf16}, {method: naive, precision: int8}]
seeds: [0, 1]
"""


def test_every_missing_base_is_wanted_once_the_longest_first(tmp_path: Path) -> None:
    path = tmp_path / "two_lengths.yaml"
    path.write_text(SWEEP, encoding="utf-8")
    launch = Launch(results=str(tmp_path))
    found = list(wanted([str(path)], [], launch).values())
    assert [(cell.task.n, cell.base_seed) for cell in found] == [(8, 0), (8, 1), (4, 0), (4, 1)]
    folder = base_folder(found[1], launch)
    assert folder is not None
    folder.mkdir(parents=True)
    assert [(cell.task.n, cell.base_seed) for cell in wanted([str(path)], [], launch).values()] == [
        (8, 0),
        (4, 0),
        (4, 1),
    ]
    for cell in found:
        base_folder(cell, launch).mkdir(parents=True, exist_ok=True)  # type: ignore[union-attr]
    for value, code in (("2", 0), ("none", 2)):
        assert main(["base", str(path), f"launch.threads={value}", "--results", str(tmp_path)]) == code


def test_overrides_alone_name_the_base_of_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["base", "task=sort", "task.n=4", "model=xs", "base_seed=3", "--dry-run", "--results", str(tmp_path)]
    assert main(words) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("xs-sort4-b3-") and first.endswith(", on a CPU") and last == "1 base to train"
    (tmp_path / "bases" / first.partition(",")[0]).mkdir(parents=True)
    assert main(words) == 0
    assert capsys.readouterr().out == "0 bases to train\n"
    assert main(["base", "task=sort", "base=text", "--dry-run", "--results", str(tmp_path)]) == 2
    assert "base.batch_tokens=32768: for tasks in words alone, and task=sort is none" in capsys.readouterr().err


def test_a_time_limit_says_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["base", "task=sort", "task.n=4", "model=xs", "--minutes", "1e-9", "--results", str(tmp_path)]
    assert main(words) == 0
    left = "time limit: 1 base is left; the same command goes on from here\n"
    assert capsys.readouterr().out == f"1 base to train\n{left}"


def test_a_folder_that_cannot_be_written_is_named_and_a_training_that_meets_one_fails_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bases").touch()
    words = ["base", "task=sort", "task.n=4", "model=xs", "--results", str(tmp_path)]
    assert main(words) == 2
    assert f"--results {tmp_path / 'bases'}: nothing can be written there: File exists" in capfd.readouterr().err
    monkeypatch.setattr("harness.foundation.writable.check_writable", lambda folder, option: None)  # it was, and is not
    assert main(words) == 1
    err = capfd.readouterr().err
    assert err.startswith("failed: xs-sort4-b0-") and "File exists" in err and err.count("\n") == 1


def test_a_signal_to_the_command_alone_stops_its_trainings(tmp_path: Path) -> None:
    """As a service manager sends it. The training saves what it has."""
    path = tmp_path / "slow.yaml"
    path.write_text(SWEEP.replace("model=xs", "model=s").replace("[0, 1]", "[0]").replace("[4, 8]", "[16]"))
    command = subprocess.Popen(
        [sys.executable, "-m", "harness.cli.main", "base", str(path), "--results", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    assert command.stdout is not None
    said = command.stdout.readline()
    while not list((tmp_path / "bases").glob(".*.lock")) and command.poll() is None:
        time.sleep(0.05)
    os.kill(command.pid, signal.SIGTERM)
    said += command.stdout.read()  # ends when the training does, which writes there, too
    assert command.wait() == 130, said
    assert "interrupted; the same command goes on from here" in said and "stopped after" in said
    assert len(list((tmp_path / "work" / "bases").glob("s-sort16-b0-*.pt"))) == 1
    assert not list((tmp_path / "bases").glob("s-*"))
