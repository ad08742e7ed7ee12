"""The commit that a result names: the checkout's, or the one that a copy without git is told."""

from __future__ import annotations

from pathlib import Path

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
