"""The table of commands and the files that do them; what help and a refusal import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from harness.cli.main import COMMANDS, GROUPS, main
from tests.source_tree import ROOT

SHARED = ("__init__", "main", "options", "table")
"""Files of `harness/cli` that are no command."""
SLOW = ("hydra", "matplotlib", "mlflow", "numpy", "optuna", "pandas", "pyarrow", "scipy", "torch")


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


@pytest.mark.parametrize(
    ("words", "may"),
    [(["--help"], ()), *[([name, "--help"], ()) for name in COMMANDS], (["run", "trainer.stepz=3"], ()),
     (["run", "trainer.steps=0"], ("hydra",)), (["run", "method=flashrk"], ("hydra",)),
     (["sweep", "smoke", "algo.lr=3"], ())],
    ids=lambda value: " ".join(value),
)  # fmt: skip
def test_an_answer_that_runs_nothing_imports_nothing_slow(words: list[str], may: tuple[str, ...]) -> None:
    code = (
        "import sys\nfrom harness.cli.main import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        f"print('loaded', *sorted(set({SLOW!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(done.stdout.splitlines()[-1].split()[1:]) <= set(may)
