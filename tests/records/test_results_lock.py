"""The lock of a results folder: who may hold it together, and what the others are told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.records.results_lock import check_folder, results_lock


def refused(results: Path, *, is_shared: bool) -> str:
    with pytest.raises(ValueError, match="at work there") as caught, results_lock(results, is_shared=is_shared):
        pass
    return str(caught.value)


def test_a_sweep_holds_it_alone_and_is_named(tmp_path: Path) -> None:
    with results_lock(tmp_path):
        said = f"results={tmp_path}: a sweep is at work there (process {os.getpid()})"
        assert [refused(tmp_path, is_shared=kind) for kind in (False, True)] == [said, said]
    with results_lock(tmp_path):
        pass


def test_an_import_is_named_as_one(tmp_path: Path) -> None:
    with results_lock(tmp_path, who="an import"):
        said = f"results={tmp_path}: an import is at work there (process {os.getpid()})"
        assert [refused(tmp_path, is_shared=kind) for kind in (False, True)] == [said, said]


def test_searches_share_it_and_keep_sweeps_out(tmp_path: Path) -> None:
    results = tmp_path / "new"
    with results_lock(results):
        pass
    with results_lock(results, is_shared=True), results_lock(results, is_shared=True):
        assert refused(results, is_shared=False) == f"results={results}: a search is at work there"


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "x"):
        said = rf"^results={place}: cannot be written: Not a directory$"
        with pytest.raises(ValueError, match=said), results_lock(place):
            pass
        with pytest.raises(ValueError, match=said):
            check_folder(place)


def test_a_folder_that_can_be_made_is_left_to_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place in (tmp_path, tmp_path / "new" / "results", Path("new"), Path()):
        check_folder(place)
    assert not any(tmp_path.iterdir())
