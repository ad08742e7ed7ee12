"""The decisions of `make setup`: which Python, which torch, and when there is nothing to do. Nothing is installed."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest

from harness.devtools import setup_env
from harness.devtools.setup_env import CUDA_PACKAGES, TORCH_CPU, TORCH_CUDA, Python, choose_python, read_limits, set_up
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
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    asked = PYPROJECT + setup_env.constraints(setup_env.lock_file("dev"), None)
    stamp = {"key": hashlib.sha256(asked.encode()).hexdigest(), "extras": ["dev", "tasks"]}
    (tmp_path / setup_env.STAMP).write_text(json.dumps(stamp), encoding="utf-8")
    monkeypatch.setattr(setup_env, "probe", lambda name: pytest.fail("looked for interpreters"))
    set_up(tmp_path, ["dev"], None, None)
    with pytest.raises(pytest.fail.Exception, match="looked for interpreters"):
        set_up(tmp_path, ["dev", "ui"], None, None)


@pytest.mark.parametrize(
    ("gpu", "cuda_deps", "answers", "expected"),
    [
        (True, True, True, [[TORCH_CUDA]]),
        (False, False, True, [[TORCH_CPU]]),
        (False, True, True, [[*FROM_CPU_INDEX, TORCH_CPU]]),
        (False, True, False, [[*FROM_CPU_INDEX, TORCH_CPU], [TORCH_CPU]]),
    ],
)
def test_which_torch_is_installed(monkeypatch, gpu, cuda_deps, answers, expected):
    ran: list[list[str]] = []

    def run(*command: str) -> int:
        ran.append(list(command))
        return 0 if answers else 1

    monkeypatch.setattr(setup_env, "has_nvidia_gpu", lambda: gpu)
    monkeypatch.setattr(setup_env, "needs_cuda", lambda venv, requirement: cuda_deps)
    monkeypatch.setattr(setup_env, "run", run)
    monkeypatch.setattr(setup_env, "exit_code", run)
    setup_env.install_torch(Path("venv"))
    assert [command[command.index("install") + 1 :] for command in ran] == expected


def test_cuda_packages_are_known_by_name():
    names = ["nvidia-cublas-cu12", "nvidia_nccl", "cuda-bindings", "triton", "tritonclient", "torch", "sympy"]
    assert [name for name in names if CUDA_PACKAGES.match(name)] == names[:4]
