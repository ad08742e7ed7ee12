"""The third-party packages of examples/: installed beside the project, found by their entry points, run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from harness.foundation.own_process import module_command
from harness.foundation.provenance import ROOT
from harness.records.paths import runs_folder
from harness.records.run_result import RunResult, read_results, read_series
from tests.toy import SMALL, small_launch

EXAMPLES = ROOT / "examples"


def installed(tmp_path: Path, *names: str) -> tuple[Path, dict[str, str]]:
    """Examples installed in one folder of their own, and the environment that finds them."""
    site, copies = tmp_path / "site", [tmp_path / "packages" / name for name in names]
    for name, copy in zip(names, copies, strict=True):
        copy.mkdir(parents=True)
        for file in ("pyproject.toml", f"lowbit_{name}.py"):
            (copy / file).write_text((EXAMPLES / name / file).read_text())
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(site), *map(str, copies)], check=True)
    return site, os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}


def python(environment: dict[str, str], *words: str) -> str:
    """The output of Python, which must end well."""
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_a_sampler_side_method_installs_and_runs(tmp_path: Path) -> None:
    _, environment = installed(tmp_path, "mse_scales")
    tests = EXAMPLES / "mse_scales" / "tests" / "test_mse_scales.py"
    assert "4 passed" in python(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", str(tests))
    results = small_launch(tmp_path).results
    words = [*SMALL, "method=mse_scales", "precision=int4", "trainer.steps=2"]
    python(environment, "-m", "harness.cli.main", "run", *words, "--results", results)
    (record,) = Path(results).glob("runs/runs/*.json")
    result = json.loads(record.read_text())
    assert result["status"] == "ok" and result["config"]["outside"][0].startswith("lowbit-mse-scales 0.1.0 ")


def test_a_third_party_method_installs_and_runs(tmp_path: Path) -> None:
    site, environment = installed(tmp_path, "soft_tis")
    listed = json.loads(python(environment, "-m", "harness.cli.main", "methods", "--json"))
    assert listed["soft_tis"]["parts"] == {"SoftTIS": {"cap": 2.0}}
    tests = EXAMPLES / "soft_tis" / "tests" / "test_soft_tis.py"
    assert "4 passed" in python(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", str(tests))
    results = small_launch(tmp_path).results
    words = [*SMALL, "method=soft_tis", "precision=int4", "knobs.SoftTIS.cap=3", "trainer.steps=2"]
    python(environment, "-m", "harness.cli.main", "run", *words, "--results", results)
    (record,) = Path(results).glob("runs/runs/*.json")
    result = json.loads(record.read_text())
    assert result["status"] == "ok" and result["method"]["parts"] == {"SoftTIS": {"cap": 3.0}}
    (source,) = result["config"]["outside"]
    assert re.fullmatch(r"lowbit-soft-tis 0\.1\.0 [0-9a-f]{12}", source)
    series = read_series(record.parent, result["run_id"])
    assert len(series["part/SoftTIS.weight_max"]) == 2 and all(1.0 < x < 3.0 for x in series["part/SoftTIS.weight_max"])
    # An edited method is another run; an entry point that does not load is told, and ends nothing.
    module = site / "lowbit_soft_tis.py"
    module.write_text(module.read_text().replace("cap - 1.0 + rho)", "cap - 1.0 + rho)  # as it was"))
    (site / "broken-1.0.dist-info").mkdir()
    (site / "broken-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (site / "broken-1.0.dist-info" / "entry_points.txt").write_text("[lowbit.methods]\nbroken = not_there:METHOD\n")
    python(environment, "-m", "harness.cli.main", "run", *words, "--results", results)
    records = [json.loads(path.read_text())["config"]["outside"] for path in Path(results).glob("runs/runs/*.json")]
    assert len(records) == 2 and records[0] != records[1]
    doctor = [sys.executable, "-m", "harness.cli.main", "doctor", "--results", results]
    told = subprocess.run(doctor, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (
        told.returncode == 1
        and "FAIL  methods    entry point broken = not_there:METHOD of lowbit.methods does" in told.stdout
    )
    assert "ok    methods    from other packages: soft_tis (lowbit_soft_tis:METHOD)" in told.stdout


def foreign_folder(tmp_path: Path) -> Path:
    """A working folder with packages `harness` and `methods` and a module `queue` that are not ours."""
    folder = tmp_path / "elsewhere"
    for name in ("harness/__init__.py", "methods/__init__.py", "queue.py"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('raise RuntimeError("a file of the working folder was imported")\n')
    return folder


def test_loss_sampler_and_mixture_run_from_a_foreign_folder_and_again_when_edited(tmp_path: Path) -> None:
    names = ("soft_tis", "mse_scales", "two_samplers")
    site, environment = installed(tmp_path, *names)
    folder, results = foreign_folder(tmp_path), Path(small_launch(tmp_path).results)

    def lowbit(*words: str, code: int = 0) -> str:
        command = module_command("harness.cli.main", *words, "--results", str(results))
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == code, done.stderr + done.stdout
        return done.stdout + done.stderr

    def records() -> dict[str, list[RunResult]]:
        """Records of the sweep by method."""
        found = read_results(runs_folder(results, "outside"))
        return {name: [r for r in found if r.config["method"] == name] for name in names}

    tests = EXAMPLES / "two_samplers" / "tests" / "test_two_samplers.py"
    assert "4 passed" in python(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", str(tests))
    arms = [{"method": name, "precision": "int2" if name == "two_samplers" else "int4"} for name in names]
    words = [*SMALL, "trainer.steps=1", "trainer.eval_every=1"]
    sweep = {"question": "Do methods of other packages run?", "overrides": words, "arms": arms, "seeds": [0]}
    (folder / "outside.yaml").write_text(json.dumps(sweep))  # JSON is YAML
    command = ("sweep", "outside.yaml", "--workers", "1", "--no-tracking")

    lowbit(*command)
    first = records()
    assert {name: [r.status for r in found] for name, found in first.items()} == {name: ["ok"] for name in names}
    (mixed,) = first["two_samplers"]
    assert (
        mixed.planned["samplers"][0]["name"] == "fine"
        and (mixed.passport or {})["state"]["samplers"][0]["samples"] == 1
    )
    series = read_series(runs_folder(results, "outside"), mixed.run_id)
    assert series["sampler/int2/kl_k3"][0] > 10 * series["sampler/fine/kl_k3"][0]
    assert 0.5 < series["part/FineSampler.kept_frac"][0] < 1.0

    for wrong, said in (
        (("knobs.FineSampler.share=0.3",), "algo.group_size=4: the share 0.3 of sampler fine is no whole number"),
        (("engine=vllm", "model=xs128"), "engine=vllm: cannot do samplers of method two_samplers"),
    ):
        told = lowbit("run", *SMALL, "method=two_samplers", "precision=int4", *wrong, code=2)
        assert said in told, told

    assert "all 3 cells are finished" in lowbit(*command)
    module = site / "lowbit_two_samplers.py"
    text = module.read_text()
    assert text.count("share: float = 0.25") == text.count("| ~is_coarse)") == 1
    module.write_text(text.replace("| ~is_coarse)", "& is_coarse)"))  # the finer sampler's tokens are left out
    lowbit(*command)
    edited = records()
    assert [len(edited[name]) for name in names] == [1, 1, 2]
    assert len({r.config["outside"][0] for r in edited["two_samplers"]}) == 2
    (other,) = [r for r in edited["two_samplers"] if r.run_id != mixed.run_id]
    assert read_series(runs_folder(results, "outside"), other.run_id)["train/grad_norm"] != series["train/grad_norm"]

    times = {r.run_id: r.ended_at for found in edited.values() for r in found}
    lowbit(*command, "--again")
    again = {r.run_id: r.ended_at for found in records().values() for r in found}
    assert len(again) == 4 and [again[run] == time for run, time in times.items()].count(True) == 1  # before the edit
    assert len(list((results / "replaced").rglob("*.json"))) >= 3


def test_the_python_interface_works_from_outside_the_repository(tmp_path: Path) -> None:
    results = small_launch(tmp_path).results
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, str(EXAMPLES / "from_python.py"), results]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cell, *table, last = done.stdout.splitlines()
    assert re.fullmatch(r"ok flashrl-int4-xs-chain8-b0-s0 k3 of the last step \d\.\d\de-0\d", cell)
    head, control, *low, contrast = (line.split() for line in table)
    assert head == ["arm", "seeds", "auc", "control", "difference", "verdict"]
    assert control[:3] == ["bf16", "bf16", "1"] and control[-1] == "control"
    assert sorted([*line[:3], *line[4:6]] for line in low) == [
        ["flashrl", "int4", "1", "bf16", "bf16"], ["naive", "int4", "1", "bf16", "bf16"]
    ]  # fmt: skip
    assert contrast == ["arm", "control", "difference", "verdict"]
    assert last.split()[:4] == ["flashrl", "int4", "naive", "int4"] and last.endswith(" cannot tell")  # of one seed


def test_the_python_example_tells_a_wrong_folder_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    for words, said in (
        ([], "usage: python from_python.py RESULTS_FOLDER\n"),
        (["--help"], "usage: python from_python.py RESULTS_FOLDER\n"),
        ([str(tmp_path / "file")], f"error: results={tmp_path / 'file'}: cannot be written: Not a directory\n"),
    ):
        command = [sys.executable, str(EXAMPLES / "from_python.py"), *words]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 1 and done.stderr == said
