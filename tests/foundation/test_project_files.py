"""Sweeps, claims and committed results: the clone's, or those of an installed package; and what a wheel carries."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from harness.foundation.project_files import bring_results, committed_sweeps, home, shipped_files
from harness.studies.advise.accuracy import MISMATCH, SWEEP
from tests.source_tree import ROOT


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The files of an installed package: a sweep, the claims, and results of two sweeps."""
    folder = tmp_path / "shipped"
    for name in ("claims.yaml", "sweeps/a.yaml", "results/packed/big.zip", "results/runs/small/1.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def test_the_first_place_with_sweeps_and_claims_is_home(package: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "theirs" / "sweeps").mkdir(parents=True)  # a folder of that name alone is somebody else's
    assert home(tmp_path / "empty", tmp_path / "theirs", package, ROOT) == package
    assert home(ROOT, package) == ROOT
    assert home(tmp_path / "empty", tmp_path / "theirs") == tmp_path / "theirs"


def test_committed_sweeps_are_packed_or_a_folder_of_runs(package: Path) -> None:
    assert committed_sweeps(package) == ["big", "small"]
    packed = {path.stem for path in (ROOT / "results" / "packed").glob("*.zip")}
    assert committed_sweeps(ROOT) == sorted(packed | {"corrections"})


def test_results_are_brought_once_whole_and_touch_no_folder_that_is_there(package: Path, tmp_path: Path) -> None:
    target = tmp_path / "results"
    assert [bring_results(target, package) for _ in range(2)] == [2, 0]
    assert (target / "packed" / "big.zip").read_text() == "results/packed/big.zip"
    (target / "runs" / "small" / "1.json").unlink()
    assert bring_results(target, package) == 0 and not (target / "runs" / "small" / "1.json").exists()
    assert bring_results(package / "results", package) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results", "shipped"]  # no half of a folder


def test_of_two_processes_that_bring_results_one_is_left_alone(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, copyfile = tmp_path / "results", shutil.copyfile

    def faster_elsewhere(source: Path, part: Path) -> None:
        copyfile(source, part)
        target.mkdir(exist_ok=True)
        (target / "theirs").write_text("whole")

    monkeypatch.setattr(shutil, "copyfile", faster_elsewhere)
    assert bring_results(target, package) == 0
    assert [path.name for path in target.iterdir()] == ["theirs"] and not [*tmp_path.glob(".results*")]


def test_where_no_results_can_be_brought_one_line_says_so(package: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "results").symlink_to(tmp_path / "nowhere")
    for target in (tmp_path / "file" / "results", tmp_path / "results"):
        with pytest.raises(ValueError, match=f"results={target}: cannot be written: Not a directory"):
            bring_results(target, package)
    assert not [*tmp_path.glob(".results*")]


def test_a_wheel_carries_what_is_committed_of_sweeps_and_results() -> None:
    names = {path.as_posix() for path in shipped_files(ROOT)}
    listed = subprocess.run(["git", "ls-files", "-z", "sweeps", "results"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout of git")
    kept = set(listed.stdout.split("\0"))
    wanted = (
        "sweeps/", "results/packed/", "results/runs/", "results/throughput/", "results/replay/", "results/looks/",
        "results/predictions/", "results/probes/",
    )  # fmt: skip
    assert {name for name in kept if name.startswith(wanted)} <= names
    assert {"claims.yaml", "results/claims.md"} <= names
    assert {f"results/tables/{name}.csv" for name in (SWEEP, MISMATCH)} <= names, "what `lowbit advise` reads"
    assert sum((ROOT / name).stat().st_size for name in names & kept) < 80e6  # PyPI takes 100 MB


def test_what_is_measured_on_a_users_own_models_is_no_change_of_the_checkout() -> None:
    kinds = ("bases/mine/model.safetensors", "evaluations/mine-0.json", "fp8_cache/mine.json", "layers/mine.json",
             "probes/0.json", "rollouts/mine/0.jsonl", "tables/probe_0.md", "figures/probe_0.png")  # fmt: skip

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode == 128:
            pytest.skip("not a checkout of git")
        return done.stdout.splitlines()

    own = [f"results/{kind}" for kind in kinds]
    assert git("check-ignore", *own) == own
    committed = git("ls-files", "results/probes", "results/bases")
    assert "results/probes/20d8dbae8b3f.json" in committed and len(committed) > 200
    assert git("check-ignore", *committed) == []


def test_a_command_in_an_empty_folder_finds_sweeps_and_bases(tmp_path: Path) -> None:
    """The code lies in the clone, the command runs elsewhere; a results folder that it names is left to it. Neither a
    dry run nor a wrong name copies the committed results."""
    words, environment = [sys.executable, "-P", "-m", "harness.cli.main"], os.environ | {"PYTHONPATH": str(ROOT)}

    def said(*given: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*words, *given], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    planned = said("sweep", "smoke", "--results", "mine", "--dry-run")
    assert planned.returncode == 0 and "smoke: 3 of 3 cells to run" in planned.stdout
    assert said("base", "quick", "--dry-run").stdout == "0 bases to train\n"
    wrong = said("sweep", "smokee")
    assert wrong.returncode == 2 and "not found; nearest: smoke" in wrong.stderr and "standard" in wrong.stderr
    assert "not found; valid: search_aqn" in said("search", "nothing").stderr
    assert "not found; nearest: smoke" in said("base", "smokee").stderr
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_a_wheel_and_an_sdist_are_built_with_the_files(tmp_path: Path) -> None:
    """Built from a clone, since a build leaves folders behind."""
    tree = tmp_path / "tree"
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", str(tree)], check=True)
    code = (
        "import sys; from setuptools import build_meta as b; out = sys.argv[1]; "  # building changes sys.argv
        "print('built', b.build_wheel(out), b.build_sdist(out), sep=chr(10))"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    said = subprocess.run(words, cwd=tree, capture_output=True, text=True, check=True).stdout
    built = said.split("built\n")[1].split()
    wanted = {path.as_posix() for path in shipped_files(tree)}
    with zipfile.ZipFile(tmp_path / built[0]) as wheel:
        names = set(wheel.namelist())
        carried = {name.removeprefix("harness/shipped/") for name in names if name.startswith("harness/shipped/")}
        assert carried == wanted and len(wanted) > 200
        assert {"harness/config/conf/run.yaml", "methods/flashrl.py"} <= names
        assert not any(name.startswith(("tests/", "sweeps/", "results/")) for name in names)
        assert wheel.read("harness/shipped/sweeps/quick.yaml") == (ROOT / "sweeps" / "quick.yaml").read_bytes()
    with tarfile.open(tmp_path / built[1]) as sdist:
        inside = {name.partition("/")[2] for name in sdist.getnames()}
    assert wanted <= inside and {"setup.py", "pyproject.toml"} <= inside
