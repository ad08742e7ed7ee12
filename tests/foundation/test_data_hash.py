"""The hash of a data set: of names and contents, whatever else lies beside them."""

from __future__ import annotations

from pathlib import Path

from harness.foundation.data_hash import data_hash


def test_a_data_set_is_known_by_its_files_and_what_they_hold(tmp_path: Path) -> None:
    assert data_hash(tmp_path) is None and data_hash(tmp_path / "nowhere") is None
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "train.jsonl"
    file.write_text("1\n")
    of_folder, of_file = data_hash(tmp_path), data_hash(file)
    assert of_folder is not None and of_file is not None and of_folder != of_file
    (tmp_path / "README.md").write_text("words")
    assert data_hash(str(tmp_path)) == of_folder
    (tmp_path / "test.parquet").write_text("2")
    assert data_hash(tmp_path) != of_folder and data_hash(file) == of_file
    (tmp_path / "test.parquet").unlink()
    file.rename(tmp_path / "a" / "dev.jsonl")
    assert data_hash(tmp_path) != of_folder and data_hash(tmp_path / "a" / "dev.jsonl") == of_file
    (tmp_path / "a" / "dev.jsonl").write_text("3\n")
    assert data_hash(tmp_path / "a" / "dev.jsonl") != of_file
