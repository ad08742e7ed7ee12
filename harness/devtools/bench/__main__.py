"""Every bench by its name: `python -m harness.devtools.bench NAME [options]`, without one those of `make bench`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch

from harness.devtools.bench.runner import PROGRAM, table
from harness.foundation import bytecode_cache
from harness.foundation.provenance import cpu_name

RATIOS = ("sampler", "grpo_step", "overhead", "fp8_flow", "preparations", "rilq", "start", "wordmath")
"""Benches of this CPU without options, whose `run` gives rows: `make bench`."""
OTHERS = (
    "coverage",
    "folder_run",
    "fp8_layers",
    "head",
    "long_sequences",
    "peers",
    "sync",
    "verl_scaling",
    "vllm_engine",
)
"""Benches with options of their own (`NAME --help`), most of them of a GPU: each has a `main`."""


def main(words: Sequence[str] | None = None) -> int:
    """Run a bench: its exit code, 2 for an unknown one."""
    bytecode_cache.keep()
    words = list(sys.argv[1:] if words is None else words)
    if words[:1] in (["--help"], ["-h"]):
        print(listing())
        return 0
    if words and words[0] not in (*RATIOS, *OTHERS):
        print(f"bench: {words[0]!r} is unknown; valid: {', '.join((*RATIOS, *OTHERS))}", file=sys.stderr)
        return 2
    if words and words[0] in OTHERS:
        return import_module(f"harness.devtools.bench.{words[0]}").main(words[1:])
    if len(words) > 1:
        print(f"bench: {words[0]} has no options, and {words[1]!r} is one too many", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    print(f"{cpu_name()}, torch {torch.__version__}, 1 thread")
    for name in words or RATIOS:
        print(f"\n{name}\n{table(import_module(f'harness.devtools.bench.{name}').run())}", flush=True)
    return 0


def listing() -> str:
    """Every bench with the first line of its docstring, read without importing it."""
    lines = [f"usage: {PROGRAM} [NAME [options]]", ""]
    for title, names in (("ratios on this CPU, all of them without a NAME:", RATIOS), ("others:", OTHERS)):
        lines.append(title)
        for name in names:
            source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
            lines.append(f"  {name:16}{(ast.get_docstring(ast.parse(source)) or '').splitlines()[0]}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
