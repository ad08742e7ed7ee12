"""Python's byte code where an installation has none.

Images are often built with PYTHONDONTWRITEBYTECODE=1 and packages without `__pycache__`. There every process compiles
torch and vLLM anew, some 20 CPU seconds each; a job under verl is ten processes. What this process and its children
compile is kept in the user's cache instead: nothing is written beside the sources.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import cache_from_source, find_spec
from pathlib import Path

LARGE = ("torch", "vllm", "verl")
"""Packages whose compilation a user waits for."""
SKIP, PREFIX = "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"


def lacks_byte_code(spec: ModuleSpec | None) -> bool:
    """Is this installed package one whose byte code is neither there nor going to be written?"""
    if spec is None or spec.origin is None or sys.pycache_prefix is not None:
        return False
    compiled = Path(cache_from_source(spec.origin))
    return not compiled.exists() and (sys.dont_write_bytecode or not os.access(Path(spec.origin).parent, os.W_OK))


def keep(*packages: str) -> Path | None:
    """Keep what is compiled from now on, by this process and by those it starts, where one of `packages` (default:
    LARGE) lacks byte code. Returns the folder; None where nothing had to be done."""
    if not any(lacks_byte_code(find_spec(package)) for package in packages or LARGE):
        return None
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowbit" / "byte_code"
    os.environ.update({SKIP: "", PREFIX: str(folder)})
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    return folder
