"""The table of commands and the files that do them; what help and a refusal import."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from harness.cli.main import COMMANDS, GROUPS, main
from tests.source_tree import ROOT

SHARED = ("__init__", "main", "options")
"""Files of `harness/cli` that are no command."""
SLOW = {"hydra", "matplotlib", "mlflow", "numpy", "optuna", "pandas", "pyarrow", "scipy", "torch"}


def test_every_command_is_a_file_and_every_file_a_command() -> None:
    files = {path.stem.replace("_", "-") for path in (ROOT / "harness" / "cli").glob("*.py") if path.stem not in SHARED}
    assert files == set(COMMANDS)
    assert sum(len(group) for group in GROUPS.values()) == len(COMMANDS)


def test_help_lists_every_command_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [lines.index(f"{group}:") for group in GROUPS]
    assert heads == sorted(heads) and list(GROUPS) == ["run", "look", "study", "check"]
    for (group, commands), start in zip(GROUPS.items(), heads, strict=True):
        end = min((head for head in heads if head > start), default=len(lines))
        listed = [line.split()[0] for line in lines[start + 1 : end] if line[:2] == "  " and line[2] != " "]
        assert listed[: len(commands)] == list(commands), group


ASK = """
import contextlib, io, json, sys
from harness.cli.main import main
for line in sys.argv[1:]:
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            code = main(line.split())
    except SystemExit as left:
        code = left.code
    print(json.dumps([line, code, said.getvalue().split("\\n")[0], sorted(sys.modules)]))
"""


def test_answers_that_run_nothing_import_nothing_slow() -> None:
    """The help of every command, then refusals: in one process, which tells after each what has been loaded."""
    helps = {"--help": "usage: lowbit", **{f"{name} --help": f"usage: lowbit {name}" for name in COMMANDS}}
    refused = {"run trainer.stepz=3": set(), "sweep smoke algo.lr=3": set(), "run trainer.steps=0": {"hydra"},
               "run method=flashrk": {"hydra"}}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", ASK, *helps, *refused], cwd=ROOT, capture_output=True, text=True, check=True
    )
    told = [json.loads(answer) for answer in done.stdout.splitlines()]
    assert [line for line, *_ in told] == [*helps, *refused]
    for line, code, first, loaded in told:
        assert code == (0 if line in helps else 2) and first.startswith(helps.get(line, "")), line
        assert SLOW & set(loaded) <= refused.get(line, set()), line
