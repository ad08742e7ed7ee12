"""Folders that appear whole: what was there stays until the new one is complete, and nothing is left beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.foundation.whole_folder import replacing


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_folder_is_replaced_at_the_end_and_not_before(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "model"
    with replacing(folder) as scratch:
        (scratch / "a").write_text("1")
        assert not folder.exists()
    with replacing(folder) as scratch:
        assert names(folder) == ["a"] and names(scratch) == []
        (scratch / "b").write_text("2")
    assert names(tmp_path / "deep") == ["model", "model/b"]


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a").write_text("1")
    with pytest.raises(OSError, match="full"), replacing(folder) as scratch:
        (scratch / "half").write_text("2")
        raise OSError("full")
    assert names(tmp_path) == ["model", "model/a"]


def test_what_was_there_comes_back_where_the_new_one_cannot_take_its_place(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a").write_text("1")
    with pytest.raises(FileNotFoundError), replacing(folder) as scratch:
        scratch.rmdir()
    assert names(tmp_path) == ["model", "model/a"]
