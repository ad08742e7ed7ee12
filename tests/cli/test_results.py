"""`lowbit results verify | import` and what reads results: bad files are named, left alone, and hide no good ones."""

from __future__ import annotations

import os
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.foundation.provenance import ROOT
from harness.records.looks import Looks, level_of, write_looks
from harness.records.packed import pack
from harness.records.results_lock import results_lock
from harness.records.run_result import import_results, write_result
from harness.records.sweep_file import Purpose, Until, keep_purpose, purpose
from tests import result_factory as factory

needs_tar = pytest.mark.skipif(
    not hasattr(tarfile, "data_filter"), reason="an import of a tar needs Python 3.11.4 or newer"
)
TARS = [pytest.param(kind, marks=needs_tar) for kind in ("tar", "gztar", "bztar", "xztar")]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """One good result, and one file of every bad kind."""
    folder = tmp_path / "results" / "runs" / "quick"
    good, series = factory.result(trainer__steps=4, trainer__eval_every=2)
    other, _ = factory.result(seed=5, sweep="elsewhere", trainer__steps=4, trainer__eval_every=2)
    write_result(folder, good, series)
    (folder / "cut.json").write_bytes((folder / f"{good.run_id}.json").read_bytes()[:500])
    (folder / "package.json").write_text('{"name": "something else", "version": "1.0"}')
    (folder / "renamed.json").write_bytes((folder / f"{good.run_id}.json").read_bytes())
    write_result(folder, other, series)
    (folder / "alone.parquet").write_bytes(b"PAR1")
    (tmp_path / "results" / "packed").mkdir()
    (tmp_path / "results" / "packed" / "torn.zip").write_bytes(b"PK\x03\x04")
    return tmp_path / "results"


def test_verify_names_every_bad_file_and_changes_none(results: Path, capsys: pytest.CaptureFixture) -> None:
    before = contents(results)
    assert main(["results", "verify", "--results", str(results)]) == 1
    *lines, total = capsys.readouterr().out.splitlines()
    said = {Path(line.removeprefix("FAIL  ").partition(":")[0]).name: line for line in lines}
    elsewhere = next(name for name, line in said.items() if "belongs to the sweep 'elsewhere'" in line)
    assert sorted(said) == sorted(["alone.parquet", "cut.json", "package.json", "renamed.json", "torn.zip", elsewhere])
    assert "not a result file" in said["cut.json"] and "not a packed sweep" in said["torn.zip"]
    assert "the file name says 'renamed'" in said["renamed.json"] and total == "FAIL  5 results, 6 problems"
    assert contents(results) == before


def test_a_packed_sweep_is_verified_next_to_a_torn_one(results: Path, capsys: pytest.CaptureFixture) -> None:
    for path in (results / "runs" / "quick").iterdir():
        path.unlink()
    good, series = factory.result(trainer__steps=4, trainer__eval_every=2)
    folder = results / "runs" / "quick"
    write_result(folder, good, series)
    pack(results, "quick")
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    assert main(["results", "verify", "--results", str(results)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2 and "torn.zip: not a packed sweep" in out[0] and out[1] == "FAIL  1 results, 1 problems"
    assert not folder.exists()  # looking unpacks nothing


def test_a_passport_tells_how_the_run_happened(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    plain, series = factory.result(trainer__steps=4, trainer__eval_every=2)
    told = {
        "launch": {"packing": True, "micro_batch_tokens": 8192},
        "memory_gib": {"allocated": 1.5, "engine": 8.25},
        "trainer": {"bf16, native": 15},
        "retries": ["out of memory: x; checkpoint_layers False -> True"],
    }
    for name, result in (("plain", plain), ("told", plain.model_copy(update=told))):
        write_result(tmp_path / name / "runs" / "quick", result, series)
        assert main(["passport", plain.run_id, "--results", str(tmp_path / name)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert (lines[1:4] == [
            "launch:   packing=True, micro_batch_tokens=8192",
            "memory:   allocated 1.50 GiB, engine 8.25 GiB",
            "retried:  out of memory: x; checkpoint_layers False -> True",
        ]) == (name == "told")  # fmt: skip
        assert ("trainer:  15 linear layers in bf16, native" in lines) == (name == "told")


def test_an_import_with_foreign_files_names_them_all_and_copies_nothing(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    target, before = tmp_path / "ours", contents(results)
    assert main(["results", "import", str(results), "--results", str(target)]) == 2
    err = capsys.readouterr().err
    for name in ("cut.json", "package.json", "renamed.json", "torn.zip"):
        assert f"{name}: " in err
    assert err.splitlines()[-1].endswith("files that are no whole results: 4 (named above); nothing was imported")
    assert not target.exists() and contents(results) == before


@pytest.mark.parametrize("name", ["packed", "bases"])
def test_an_import_of_a_part_of_a_results_folder_names_what_to_give(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "theirs" / name).mkdir(parents=True)
    words = ["results", "import", str(tmp_path / "theirs" / name), "--results", str(tmp_path / "ours")]
    assert main(words) == 2
    assert capsys.readouterr().err.endswith(f"{name}: a part of a results folder; give the folder above it\n")


def test_an_import_names_ten_foreign_files_at_most(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "runs"
    source.mkdir()
    for index in range(12):
        (source / f"{index}.json").write_text("{}", encoding="utf-8")
    assert main(["results", "import", str(source), "--results", str(tmp_path / "ours")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 11 and "no whole results: 12 (the first 10 are named above)" in err


@pytest.mark.parametrize("is_missing", [True, False])
def test_an_import_refuses_runs_without_a_whole_series(
    is_missing: bool, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    for seed in range(2):
        path = write_result(theirs / "runs" / "quick", *factory.result(seed=seed)).with_suffix(".parquet")
    write_result(theirs / "runs" / "other", *factory.result(sweep="other"))
    pack(theirs, "other")
    if is_missing:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-9])
    assert main(["results", "import", str(theirs), "--results", str(ours)]) == 2
    first, last = capsys.readouterr().err.splitlines()
    assert path.name in first and last.endswith(
        "files that are no whole results: 1 (named above); nothing was imported"
    )
    assert not ours.exists()
    with pytest.raises(ValueError, match=path.name):
        import_results((theirs / "runs").rglob("*.json"), ours / "runs")
    assert not ours.exists()


@needs_tar
def test_an_archive_from_another_machine_brings_runs_and_bases(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    good, series = factory.result(trainer__steps=4, trainer__eval_every=2)
    theirs, ours = tmp_path / "out" / "results", tmp_path / "ours"
    write_result(theirs / "runs" / "quick", good, series)
    base = next((ROOT / "results" / "bases").glob("xs-chain8-b0-*"))
    shutil.copytree(base, theirs / "bases" / base.name)
    archive = shutil.make_archive(str(tmp_path / "back"), "gztar", tmp_path / "out")
    for added in (1, 0):
        assert main(["results", "import", archive, "--results", str(ours)]) == 0
        said = capsys.readouterr().out
        assert f"{added} runs imported" in said and f"{added} bases imported" in said
    assert contents(ours / "runs") == contents(theirs / "runs")
    assert contents(ours / "bases") == contents(theirs / "bases")
    (theirs / "bases" / base.name / "model.safetensors").write_bytes(b"other")
    shutil.rmtree(ours)
    assert main(["results", "import", str(theirs), "--results", str(ours)]) == 2
    assert "is damaged" in capsys.readouterr().err and not ours.exists()


@pytest.mark.parametrize("kind", ["zip", *TARS])
def test_an_archive_that_is_not_whole_is_refused(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    theirs, ours = tmp_path / "out" / "results", tmp_path / "ours"
    for seed in range(9):
        write_result(theirs / "runs" / "quick", *factory.result(seed=seed))
    archive = Path(shutil.make_archive(str(tmp_path / "back"), kind, tmp_path / "out"))
    whole = archive.read_bytes()
    header = max(whole.rfind(b"ustar"), len(whole) // 2)  # of the last file, where it can be read
    damaged = {
        "cut": whole[: len(whole) // 2],
        "changed": whole[:header] + bytes(64) + whole[header + 64 :],
        "locked": whole.replace(b"PK\x01\x02\x14\x03\x14\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01"),
    }
    for data in {name: data for name, data in damaged.items() if data != whole}.values():
        archive.write_bytes(data)
        assert main(["results", "import", str(archive), "--results", str(ours)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"lowbit: error: results import: {archive}: no whole zip or tar archive: ")
        assert said.count("\n") == 1 and not ours.exists()


@needs_tar
def test_a_tar_that_ends_in_a_zip_is_a_tar(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_result(tmp_path / "out" / "runs" / "quick", *factory.result())
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as other:
        other.writestr("note.txt", "x")
    with tarfile.open(tmp_path / "back.tar", "w") as archive:
        archive.add(tmp_path / "out", "results")
        archive.add(tmp_path / "other.zip", "other.zip")
    assert zipfile.is_zipfile(tmp_path / "back.tar")
    assert main(["results", "import", str(tmp_path / "back.tar"), "--results", str(tmp_path / "ours")]) == 0
    assert "1 runs imported" in capsys.readouterr().out


def test_a_python_that_cannot_unpack_a_tar_safely_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "out").mkdir()
    source = tmp_path / "back.tar"
    with tarfile.open(source, "w") as archive:
        archive.add(tmp_path / "out", "results")
    monkeypatch.delattr(tarfile, "data_filter", raising=False)  # as before Python 3.11.4
    assert main(["results", "import", str(source), "--results", str(tmp_path / "ours")]) == 2
    assert capsys.readouterr().err == (
        f"lowbit: error: results import: {source}: Python 3.11.4 or newer unpacks a tar safely; give a zip here\n"
    )
    assert not (tmp_path / "ours" / "runs").exists()


def test_a_packed_sweep_by_itself_is_imported_and_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    write_result(theirs / "runs" / "mine", *factory.result(sweep="mine"))
    keep_purpose("mine", Purpose(question="Which?"), theirs)
    source = pack(theirs, "mine").rename(tmp_path / "mine (1).zip")
    assert main(["results", "import", str(source), "--results", str(ours)]) == 0
    assert "1 runs imported" in capsys.readouterr().out
    assert contents(ours / "runs" / "mine").keys() == contents(theirs / "runs" / "mine").keys()
    with zipfile.ZipFile(source, "w") as archive:
        archive.writestr("records.jsonl", "{}\n")
    assert main(["results", "import", str(source), "--results", str(ours)]) == 2
    assert f"{source}: not a packed sweep" in capsys.readouterr().err


def test_what_has_no_results_is_refused_under_its_own_name(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "empty" / "runs").mkdir(parents=True)
    archive = shutil.make_archive(str(tmp_path / "back"), "zip", tmp_path / "empty")
    for source, said in (
        (str(tmp_path / "empty"), "holds no results"),
        (archive, "holds no results"),
        (str(tmp_path / "nowhere"), "no such file or folder"),
    ):
        assert main(["results", "import", source, "--results", str(tmp_path / "ours")]) == 2
        err = capsys.readouterr().err
        assert f"results import: {source}" in err and said in err and err.count("\n") == 1
    archive = shutil.make_archive(str(tmp_path / "back"), "zip", results)
    assert main(["results", "import", archive, "--results", str(tmp_path / "ours")]) == 2
    err = capsys.readouterr().err
    assert f"{archive}/runs/quick/cut.json: not a result file" in err and f"{archive}/packed/torn.zip: " in err
    assert "lowbit-import" not in err and not (tmp_path / "ours").exists()


def test_of_a_run_in_a_folder_and_a_packed_sweep_that_of_the_folder_is_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    run, series = factory.result()
    write_result(theirs / "runs" / "quick", run, series)
    pack(theirs, "quick")
    write_result(theirs / "runs" / "quick", run.model_copy(update={"commit": "later"}), series)
    assert main(["results", "import", str(theirs), "--results", str(ours)]) == 0
    assert capsys.readouterr().out == "1 runs imported, 0 were there already\n"
    assert contents(ours / "runs") == contents(theirs / "runs")


def test_an_import_joins_what_is_packed(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for seed in range(3):
        write_result(ours / "runs" / "quick", *factory.result(seed=seed))
    pack(ours, "quick")
    shutil.rmtree(ours / "runs")
    write_result(theirs / "runs" / "quick", *factory.result(seed=3))
    assert main(["results", "import", str(theirs), "--results", str(ours)]) == 0
    assert len([*(ours / "runs" / "quick").glob("*.json")]) == 4


@pytest.mark.parametrize("is_search", [False, True])
def test_an_import_waits_for_no_sweep_or_search_and_changes_nothing(
    tmp_path: Path, is_search: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    write_result(theirs / "runs" / "quick", *factory.result())
    words = ["results", "import", str(theirs), "--results", str(ours)]
    with results_lock(ours, is_shared=is_search):
        assert main(words) == 2
        who = "a search is at work there" if is_search else f"a sweep is at work there (process {os.getpid()})"
        assert capsys.readouterr().err == f"lowbit: error: results={ours}: {who}\n"
        assert [path.name for path in ours.iterdir()] == [".lock"]
    assert main(words) == 0
    assert contents(ours / "runs") == contents(theirs / "runs")


@pytest.mark.parametrize("is_packed", [True, False])
def test_the_purpose_of_a_sweep_travels_with_its_runs(
    tmp_path: Path, is_packed: bool, capsys: pytest.CaptureFixture
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    meant, other = Purpose(question="Which?", control="naive-int8"), Purpose(question="Another")
    write_result(theirs / "runs" / "mine", *factory.result(sweep="mine"))
    keep_purpose("mine", meant, theirs)
    if is_packed:
        pack(theirs, "mine")
        shutil.rmtree(theirs / "runs")
    assert main(["results", "import", str(theirs), "--results", str(ours)]) == 0
    assert purpose("mine", ours) == meant
    keep_purpose("mine", other, ours)
    assert main(["results", "import", str(theirs), "--results", str(ours)]) == 0
    assert purpose("mine", ours) == other  # runs that are there keep their own
    shutil.rmtree(ours)
    if not is_packed:
        (theirs / "runs" / "mine" / "purpose.yaml").write_text("endpoints: [none]\n")
        assert main(["results", "import", str(theirs), "--results", str(ours)]) == 2
        assert "purpose.yaml" in capsys.readouterr().err and not ours.exists()


@pytest.mark.parametrize("kind", ["folder", "zip", pytest.param("gztar", marks=needs_tar)])
def test_an_import_brings_packed_sweeps_and_looks(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "out" / "theirs"
    for seed in range(2):
        write_result(theirs / "runs" / "quick", *factory.result(seed=seed))
    pack(theirs, "quick")
    shutil.rmtree(theirs / "runs")
    rule = Until(max_seeds=6, batch=3)
    write_looks(theirs, Looks(sweep="quick", until=rule, level=0.019))
    write_looks(ours, Looks(sweep="quick", until=rule, level=0.033))
    source = str(theirs) if kind == "folder" else shutil.make_archive(str(tmp_path / "back"), kind, tmp_path / "out")
    for added in (2, 0):
        assert main(["results", "import", source, "--results", str(ours)]) == 0
        assert f"{added} runs imported" in capsys.readouterr().out
    assert len([*(ours / "runs" / "quick").glob("*.parquet")]) == 2
    assert level_of(ours, "quick") == 0.019  # the stricter one


def test_a_packed_sweep_with_a_flipped_byte_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_result(tmp_path / "runs" / "quick", *factory.result())
    path = pack(tmp_path, "quick")
    data = bytearray(path.read_bytes())
    data[80] ^= 0xFF  # in the compressed records
    path.write_bytes(data)
    shutil.rmtree(tmp_path / "runs")
    assert main(["results", "unpack", "--results", str(tmp_path)]) == 2
    assert f"{path}: not a packed sweep" in capsys.readouterr().err


def test_an_import_never_replaces_a_corrupt_or_finished_result(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    good, series = factory.result(trainer__steps=4, trainer__eval_every=2)
    source, target = tmp_path / "theirs", tmp_path / "ours"
    write_result(source / "runs" / "quick", good, series)
    path = target / "runs" / "quick" / f"{good.run_id}.json"
    path.parent.mkdir(parents=True)
    path.write_text("{ torn")
    assert main(["results", "import", str(source), "--results", str(target)]) == 2
    assert f"{path}: not a result file" in capsys.readouterr().err and path.read_text() == "{ torn"
    write_result(path.parent, good.model_copy(update={"seed": 1}), series)
    before = contents(target)
    assert main(["results", "import", str(source), "--results", str(target)]) == 2
    assert f"another result of quick/{good.run_id} is there" in capsys.readouterr().err
    assert contents(target) == before


def test_a_passport_is_found_among_bad_files(results: Path, capsys: pytest.CaptureFixture) -> None:
    good, _ = factory.result(trainer__steps=4, trainer__eval_every=2)
    assert main(["passport", good.run_id[:8], "--results", str(results)]) == 0
    said = capsys.readouterr()
    assert "warning: left alone: " in said.err and "torn.zip: not a packed sweep" in said.err
    assert f"{good.run_id}  {good.name}  ok" in said.out
    for words, hint in (
        (good.method.name, f"nearest: {good.name}"),
        ("zzz", f"valid: {good.name}"),
        (f"quik/{good.name}", "no sweep 'quik'; nearest: quick"),
    ):
        assert main(["passport", words, "--results", str(results)]) == 2
        assert f"no run in {results} is {words!r}; {hint}" in capsys.readouterr().err
    empty = results.parent / "empty"
    empty.mkdir()
    assert main(["passport", "quick/x", "--results", str(empty)]) == 2
    assert capsys.readouterr().err.endswith("is 'quick/x'; lowbit runs SWEEP lists runs; sweeps: none\n")
