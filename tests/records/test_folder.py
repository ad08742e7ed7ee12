"""Records of a sweep, read from its folder or from its packed file."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.records.folder import all_sweeps, check_sweep, place_of, read_place, runs_of, series_of
from harness.records.packed import pack
from harness.records.run_result import write_result
from tests import result_factory as factory


def test_a_folder_counts_as_the_whole_sweep_and_a_packed_file_where_there_is_none(tmp_path: Path) -> None:
    folder, packed = tmp_path / "runs" / "quick", tmp_path / "packed" / "quick.zip"
    assert place_of(tmp_path, "quick") == folder and read_place(folder) == [] and all_sweeps(tmp_path) == []
    result, rows = factory.result()
    write_result(folder, result, rows)
    pack(tmp_path, "quick")
    assert place_of(tmp_path, "quick") == folder and read_place(folder) == [result]
    from_folder = series_of(tmp_path, "quick", ["train/entropy"])
    for path in folder.iterdir():
        path.unlink()
    assert place_of(tmp_path, "quick") == folder and read_place(folder) == [], "what was deleted does not come back"
    assert all_sweeps(tmp_path) == [] and runs_of(tmp_path, "quick") == ([], [])
    with pytest.raises(ValueError) as error:
        check_sweep(tmp_path, "quick")
    assert str(error.value) == (
        f"sweep 'quick' has no results in {tmp_path}; lowbit sweep quick runs it; lowbit runs lists the sweeps that "
        "have some"
    )
    folder.rmdir()
    assert place_of(tmp_path, "quick") == packed and read_place(packed) == [result]
    assert all_sweeps(tmp_path) == ["quick"] and runs_of(tmp_path, "quick") == ([result], [])
    (again, problems), (first, _) = series_of(tmp_path, "quick", ["train/entropy"]), from_folder
    assert not problems and again[result.run_id]["train/entropy"] == pytest.approx(
        first[result.run_id]["train/entropy"], rel=1e-6
    )
