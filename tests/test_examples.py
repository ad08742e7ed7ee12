"""The third-party package of examples/: installed beside the project, found by its entry point, run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from harness.foundation.provenance import ROOT
from harness.records.run_result import read_series
from tests.toy import SMALL, small_launch

EXAMPLES = ROOT / "examples"


def installed(name: str, tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """An example installed in a folder of its own, and the environment that finds it."""
    copy = tmp_path / "package"
    copy.mkdir()
    for file in ("pyproject.toml", f"lowbit_{name}.py"):
        (copy / file).write_text((EXAMPLES / name / file).read_text())
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(copy)], check=True)
    return site, os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}


def python(environment: dict[str, str], *words: str) -> str:
    """The output of Python, which must end well."""
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_a_sampler_side_method_installs_and_runs(tmp_path: Path) -> None:
    _, environment = installed("mse_scales", tmp_path)
    tests = EXAMPLES / "mse_scales" / "tests" / "test_mse_scales.py"
    assert "4 passed" in python(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", str(tests))
    results = small_launch(tmp_path).results
    words = [*SMALL, "method=mse_scales", "precision=int4", "trainer.steps=2"]
    python(environment, "-m", "harness.cli.main", "run", *words, "--results", results)
    (record,) = Path(results).glob("runs/runs/*.json")
    result = json.loads(record.read_text())
    assert result["status"] == "ok" and result["config"]["outside"][0].startswith("lowbit-mse-scales 0.1.0 ")


def test_a_third_party_method_installs_and_runs(tmp_path: Path) -> None:
    site, environment = installed("soft_tis", tmp_path)
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


def test_the_python_interface_works_from_outside_the_repository(tmp_path: Path) -> None:
    results = small_launch(tmp_path).results
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, str(EXAMPLES / "from_python.py"), results]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cell, *table, last = done.stdout.splitlines()
    assert re.fullmatch(r"ok flashrl-int4-xs-chain8-b0-s0 k3 of the last step \d\.\d\de-0\d", cell)
    assert [line.split()[:3] for line in table] == [
        ["method", "precision", "seeds"],
        ["bf16", "bf16", "1"],
        ["naive", "int4", "1"],
    ]
    assert last == "0 contrasts with bf16 at the same precision"
