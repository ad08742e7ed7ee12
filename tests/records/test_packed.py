"""A sweep packed into one file and made again of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from harness.foundation.provenance import ROOT
from harness.records.packed import COLUMNS, RECORDS, make_available, pack, read_packed, unpack
from harness.records.run_result import RunResult, read_result, read_results, read_series, write_result
from harness.records.statuses import TO_RUN_AGAIN
from tests.result_factory import result


def packed(folder: Path) -> list[str]:
    """Three runs of a sweep in `<folder>/results`, one without a series, and their pack: the run ids."""
    made = [result("naive", "int4", seed=i, status="ok" if i else "failed", sweep="big") for i in range(3)]
    for record, rows in made:
        write_result(folder / "results" / "runs" / "big", record, rows)
    assert pack(folder / "results", "big") == folder / "results" / "packed" / "big.zip"
    return [record.run_id for record, _ in made]


def test_records_come_back_byte_for_byte_and_series_by_their_chosen_columns(tmp_path: Path) -> None:
    ids = packed(tmp_path)
    runs, original = tmp_path / "results" / "runs" / "big", tmp_path / "original"
    shutil.copytree(runs, original)
    shutil.rmtree(runs)
    make_available(tmp_path / "results", "other")
    assert not runs.exists()
    make_available(tmp_path / "results")
    assert sorted(p.name for p in runs.iterdir()) == sorted(p.name for p in original.iterdir())
    for run_id in ids:
        assert (runs / f"{run_id}.json").read_bytes() == (original / f"{run_id}.json").read_bytes()
    before, after = (read_series(folder, ids[1]) for folder in (original, runs))
    assert set(after) - {"step"} == set(before) & set(COLUMNS) and len(after) > 2
    assert all(str(after[name]) == str(before[name]) for name in after if name != "step")


def test_only_what_is_missing_is_written(tmp_path: Path) -> None:
    ids = packed(tmp_path)
    runs = tmp_path / "results" / "runs" / "big"
    (runs / f"{ids[2]}.json").unlink()
    untouched = (runs / f"{ids[1]}.parquet").stat().st_mtime_ns
    assert unpack(tmp_path / "results", "big") == 1 and unpack(tmp_path / "results") == 0
    assert (runs / f"{ids[1]}.parquet").stat().st_mtime_ns == untouched
    assert len(read_results(runs)) == 3


def test_an_interrupted_unpacking_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed(tmp_path)
    results, written = tmp_path / "results", list[str]()
    shutil.rmtree(results / "runs")

    def stops(folder: Path, record: RunResult, rows: object) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(record.run_id)
        write_result(folder, record, rows)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr("harness.records.packed.write_result", stops)
        with pytest.raises(KeyboardInterrupt):
            make_available(results)
    assert len(written) == 1 and not (results / "runs" / "big").exists() and not [*(results / "work").rglob("*.json")]
    make_available(results)
    assert len(read_results(results / "runs" / "big")) == 3


def test_packing_loses_no_result(tmp_path: Path) -> None:
    ids = packed(tmp_path)
    (tmp_path / "results" / "runs" / "big" / f"{ids[2]}.json").unlink()
    with pytest.raises(ValueError, match=rf"has 1 results that .*big lacks, {ids[2]} among them; .*unpack big"):
        pack(tmp_path / "results", "big")


def test_packing_loses_no_series_and_unpacking_restores_it(tmp_path: Path) -> None:
    ids = packed(tmp_path)
    results, path = tmp_path / "results", tmp_path / "results" / "packed" / "big.zip"
    runs, before = results / "runs" / "big", path.read_bytes()
    series, record = runs / f"{ids[2]}.parquet", runs / f"{ids[2]}.json"
    held = read_series(runs, ids[2])
    series.unlink()
    with pytest.raises(
        ValueError, match=rf"big lacks the series of 1 runs, {ids[2]} among them; .*unpack big"
    ) as caught:
        pack(results, "big")
    assert "\n" not in str(caught.value) and path.read_bytes() == before
    written = record.read_bytes()
    assert unpack(results, "big") == 1 and unpack(results) == 0 and record.read_bytes() == written
    back = read_series(runs, ids[2])
    assert len(back) > 2 and all(str(back[name]) == str(held[name]) for name in back if name != "step")
    series.unlink()
    write_result(runs, read_result(record).model_copy(update={"started_at": "2026-01-01T00:00:00Z"}), None)
    assert unpack(results, "big") == 0 and not series.exists()  # a run of later
    path.unlink()
    with pytest.raises(ValueError, match="lacks the series of 1 runs"):
        pack(results, "big")
    assert not path.exists()


def test_a_cell_that_was_put_aside_takes_no_packed_results_place(tmp_path: Path) -> None:
    ids = packed(tmp_path)
    runs, path = tmp_path / "results" / "runs" / "big", tmp_path / "results" / "packed" / "big.zip"
    before = path.read_bytes()
    waits = {"status": "cancelled", "reason": TO_RUN_AGAIN, "num_steps": 0}
    write_result(runs, read_result(runs / f"{ids[1]}.json").model_copy(update=waits), None)
    with pytest.raises(
        ValueError, match=f"1 cells were put aside by --again .*{ids[1]} among them; the sweep's command"
    ):
        pack(tmp_path / "results", "big")
    assert path.read_bytes() == before


def test_packing_again_gives_the_same_bytes(tmp_path: Path) -> None:
    packed(tmp_path)
    first = (tmp_path / "results" / "packed" / "big.zip").read_bytes()
    pack(tmp_path / "results", "big")
    assert (tmp_path / "results" / "packed" / "big.zip").read_bytes() == first


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sweep nothing: .* holds no result to pack"):
        pack(tmp_path, "nothing")
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "torn.zip").write_bytes(b"PK not a zip")
    with pytest.raises(ValueError, match=r"torn\.zip: not a packed sweep"):
        unpack(tmp_path)
    path = tmp_path / "packed" / "other.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(RECORDS, '{"run_id": "a", "more": 1}\n')
    with pytest.raises(ValueError, match=rf"^{path}: not a packed sweep: unknown key more$"):
        read_packed(path)


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (6, 207, "zip file version 20.7"),
        (8, 1, "File 'records.jsonl' is encrypted, password required for extraction"),
        (10, 8, "Error -3 while decompressing data: invalid stored block lengths"),
    ],
)
def test_a_damaged_directory_is_one_line(tmp_path: Path, place: int, value: int, reason: str) -> None:
    """`place`: a byte of the first entry of the zip's directory."""
    packed(tmp_path)
    path = tmp_path / "results" / "packed" / "big.zip"
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + place] = value
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_packed(path)
    assert str(caught.value) == f"{path}: not a packed sweep: {reason}"


def test_reading_series_leaves_no_thread_behind(tmp_path: Path) -> None:
    """A thread that frees what it read when the interpreter ends aborts the process."""
    ids = packed(tmp_path)
    code = (
        "import sys, pathlib, psutil, pyarrow.parquet\n"
        "from harness.records.packed import read_packed_series\n"
        "from harness.records.run_result import read_series\n"
        "before, results = psutil.Process().num_threads(), pathlib.Path(sys.argv[1])\n"
        "read_series(results / 'runs' / 'big', sys.argv[2])\n"
        "read_packed_series(results / 'packed' / 'big.zip', ('reward/mean',))\n"
        "print(psutil.Process().num_threads() - before)\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "results"), ids[1]]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "0\n"
