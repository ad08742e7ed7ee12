"""Provenance of a number: commit, package versions, hardware, memory."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "numpy", "safetensors", "hydra-core", "pydantic", "math-verify", "vllm", "verl", "peft")
CODE = ("harness", "methods", "pyproject.toml", "setup.py")
"""Files and folders of the checkout that decide what a run does."""
COMMIT = "LOWBIT_COMMIT"
"""Environment variable that tells a copy without git its commit: 40 hexadecimal digits, `-dirty` behind them where the
copied tree differed from it."""


def commit() -> tuple[str | None, bool]:
    """(commit of the checkout this code runs from, whether its code differs from that).

    Documents, sweeps and results folders do not count: a record has its whole configuration. LOWBIT_COMMIT speaks where
    there is no checkout, or no git to read it. Raises ValueError, one line, where that says something else.
    """

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "HEAD") if (ROOT / ".git").exists() else None
    if head is None:
        told = os.environ.get(COMMIT)
        if told and not re.fullmatch(r"[0-9a-f]{40}(-dirty)?", told):
            raise ValueError(f"{COMMIT}={told!r}: not a commit; valid: 40 hexadecimal digits, with or without -dirty")
        return (told.removesuffix("-dirty"), told.endswith("-dirty")) if told else (None, False)
    return head, git("status", "--porcelain", "--", *CODE) != ""  # None, unknown, counts as differing


def packages() -> dict[str, str]:
    """Versions of what is installed of the packages that decide numbers, and Python's."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def hardware(device: str) -> dict[str, Any]:
    """The machine and this process's part of it, as JSON values: names, numbers of cores and threads, GiB."""
    import torch

    info: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "threads": torch.get_num_threads(),
        "device": device,
    }
    if device == "cuda" and torch.cuda.is_available():
        info["gpu"] = torch.cuda.get_device_name()
        info["cuda"] = torch.version.cuda
    return info


def cpu_name() -> str:
    """Model name from the kernel where it tells, else the architecture."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def peak_memory_gib(device: str) -> float:
    """Peak of this process in GiB: resident memory on a CPU, allocated memory on a GPU."""
    import torch

    if device == "cuda" and torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    per_gib = 2**30 if sys.platform == "darwin" else 2**20  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / per_gib


def text_hash(texts: Iterable[str]) -> str:
    """16 hexadecimal digits of the SHA-256 of some texts in order."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:16]


def tensors_hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """16 hexadecimal digits of the SHA-256 of names and bytes in the order given: equal hashes are equal parameters,
    bit for bit."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
