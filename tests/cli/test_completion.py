"""Completions by the tab key: commands, options, sweeps, methods and choices, as the shell would ask for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli import completion
from harness.cli.main import main
from harness.config.load import groups
from harness.foundation.project_files import STARTS
from harness.published.recipes.recipe import recipe_names
from harness.sweep.planning import sweep_names
from methods import METHODS
from tests.source_tree import ROOT


def offered(line: str, tmp_path: Path) -> list[str]:
    """Completions that bash gets for the last word of `line`."""
    out = tmp_path / "out"
    asking = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_SHELL": "bash", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line,
              "COMP_POINT": str(len(line)), "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n", "COMP_TYPE": "9",
              "_ARGCOMPLETE_STDOUT_FILENAME": str(out)}  # fmt: skip
    subprocess.run([sys.executable, "-m", "harness.cli.main"], cwd=ROOT, env=os.environ | asking, check=True)
    return [word.strip() for word in out.read_text(encoding="utf-8").split("\n")]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("lowbit swe", ["sweep"]),
        ("lowbit sweep quick --launcher ", ["local", "ray", "slurm"]),
        ("lowbit sweep quick --max-h", ["--max-hours"]),
        ("lowbit search ", ["search_aqn", "search_aqn_words", "search_clip", "search_clip_words", "search_rate"]),
        ("lowbit paper q", ["qerl", "qurl"]),
        ("lowbit run method=naive precision=mxfp8", ["precision=mxfp8"]),
        ("lowbit run method=flashr", ["method=flashrl"]),
        ("lowbit methods flashr", ["flashrl"]),
    ],
)
def test_the_shell_is_told(line: str, expected: list[str], tmp_path: Path) -> None:
    assert offered(line, tmp_path) == expected


def test_sweeps_are_those_that_the_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert completion.sweeps("sweep") == completion.sweeps("report") == sweep_names()
    assert completion.sweeps("paper") == recipe_names()
    everything = {path.stem for path in (ROOT / "sweeps").glob("*.yaml")}
    assert {name for command in ("sweep", *STARTS) for name in completion.sweeps(command)} == everything


def test_overrides_are_choices_between_names() -> None:
    assert completion.overrides("prec") == completion.overrides("")
    assert set(completion.overrides("")) == {"method=", *(f"{group}=" for group in groups())}
    assert completion.overrides("method=") == [f"method={name}" for name in METHODS]
    for group, names in groups().items():
        assert completion.overrides(f"{group}=x") == [f"{group}={name}" for name in names]
    assert completion.overrides("trainer.steps=") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_code_names_the_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "--shell", shell]) == 0
    assert "lowbit" in capsys.readouterr().out
