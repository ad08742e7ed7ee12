"""The commit that a result names: the checkout's, or the one that a copy without git is told."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.foundation import provenance

SHA = "0a2afe294179610c17a6d0421a917869d2e40e86"


@pytest.mark.parametrize(
    ("told", "found"), [(None, (None, False)), (SHA, (SHA, False)), (f"{SHA}-dirty", (SHA, True)), ("", (None, False))]
)
def test_a_copy_without_git_is_told_its_commit(tmp_path: Path, monkeypatch, told, found) -> None:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.delenv(provenance.COMMIT, raising=False)
    if told is not None:
        monkeypatch.setenv(provenance.COMMIT, told)
    assert provenance.commit() == found


def test_what_is_no_commit_is_one_line(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setenv(provenance.COMMIT, "main")
    with pytest.raises(ValueError, match="LOWBIT_COMMIT='main': not a commit; valid: 40 hexadecimal digits"):
        provenance.commit()


def test_a_checkout_speaks_for_itself(monkeypatch) -> None:
    monkeypatch.setenv(provenance.COMMIT, SHA)
    assert provenance.commit()[0] not in (None, SHA)


def test_results_of_ones_own_leave_a_checkout_clean_and_a_method_does_not(tmp_path: Path, monkeypatch) -> None:
    """`--results mine` in a clone made every run after the first a draft, which other sweeps do not take over."""
    for name in ("methods/known.py", "README.md"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("1\n")
    for words in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm first"):
        subprocess.run(["git", "-C", str(tmp_path), *words.split()], check=True)
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text("2\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "run.json").write_text("{}")
    assert not provenance.commit()[1]
    (tmp_path / "methods" / "own.py").write_text("2\n")
    assert provenance.commit()[1]


def test_where_git_cannot_answer_the_variable_speaks_and_unknown_changes_are_changes(
    tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setenv(provenance.COMMIT, SHA)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.commit() == (SHA, False)
    (tmp_path / "git").write_text('#!/bin/sh\n[ "$3" = rev-parse ] && echo abc\n')
    (tmp_path / "git").chmod(0o755)
    assert provenance.commit() == ("abc", True)


def test_peak_memory_is_in_gib_on_either_system(monkeypatch) -> None:
    monkeypatch.setattr(provenance.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=2**30))
    for system, peak in (("linux", 1024.0), ("darwin", 1.0)):
        monkeypatch.setattr(provenance.sys, "platform", system)
        assert provenance.peak_memory_gib("cpu") == peak
