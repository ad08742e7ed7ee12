"""Progress of a cell, as its launcher reads it."""

from __future__ import annotations

from pathlib import Path

from harness.records.cell_progress import tell, told


def test_the_last_word_counts_and_one_without_a_work_folder_is_lost(tmp_path: Path) -> None:
    tell(tmp_path, 0, 4, note="a base: step 5 of at most 400")
    assert told(tmp_path) == (0, "a base: step 5 of at most 400")
    tell(tmp_path, 3, 4, 0.5)
    assert told(tmp_path) == (3, None)
    tell(tmp_path / "gone", 1, 4, 0.5)
    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"]
