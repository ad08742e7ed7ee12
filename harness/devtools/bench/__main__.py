"""Every bench by its name: `python -m harness.devtools.bench NAME [options]`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.devtools.bench import runner
from harness.foundation import bytecode_cache
from harness.foundation.did_you_mean import nearest

BENCHES = (
    "coverage",
    "folder_run",
    "fp8_layers",
    "head",
    "long_sequences",
    "peers",
    "sampler",
    "verl_scaling",
    "vllm_engine",
)
"""Modules with `options` and `command`."""


def main(words: Sequence[str] | None = None) -> int:
    """Run a bench: its exit code, 2 for an unknown one."""
    bytecode_cache.keep()
    name, *rest = (sys.argv[1:] if words is None else words) or ["--help"]
    if name in ("--help", "-h"):
        print(listing())
        return 0
    if name not in BENCHES:
        print(f"bench: {name!r} is unknown; {nearest(name, BENCHES)}", file=sys.stderr)
        return 2
    return runner.run(name, rest)


def listing() -> str:
    """Every bench with the first line of its docstring, read without importing it."""
    lines = [f"usage: {runner.PROGRAM} NAME [options], where NAME --help lists the options", ""]
    for name in BENCHES:
        source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        lines.append(f"  {name:16}{(ast.get_docstring(ast.parse(source)) or '').splitlines()[0]}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
