"""`lowbit passport`: planned and realized formats of a run, tensor by tensor."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.options import add_results
from harness.cli.table import table

if TYPE_CHECKING:
    from harness.records.run_result import RunResult


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run_id", help="a run id or the beginning of one")
    add_results(parser)


def run(a: argparse.Namespace) -> int:
    """Print planned and realized formats of a run, and how it happened."""
    result = find_run(a.run_id, a.results)
    print(f"{result.run_id}  {result.name}  {result.status}")
    if result.launch:
        print("launch:   " + ", ".join(f"{name}={value}" for name, value in result.launch.items()))
    if result.memory_gib:
        known = {name: gib for name, gib in result.memory_gib.items() if gib is not None}
        print("memory:   " + ", ".join(f"{name} {gib:.2f} GiB" for name, gib in known.items()))
    for line in result.retries:
        print(f"retried:  {line}")
    print("planned:  " + ", ".join(f"{k}={v}" for k, v in result.planned.items() if v))
    if result.trainer:
        print("trainer:  " + ", ".join(f"{count} linear layers in {who}" for who, count in result.trainer.items()))
    if result.passport is None:
        print("realized: nothing was loaded")
        return 0
    realized = result.passport
    print(
        f"realized: engine={realized['engine']}, sampler={realized['sampler']}, kv={realized['kv'] or 'base precision'}"
    )
    rows = [
        (t["name"], t["format"], t["dtype"], "x".join(map(str, t["scale_shape"])) if t["scale_shape"] else "-",
         realized["acts"].get(t["name"]) or "-", t["hash"])
        for t in realized["weights"]
    ]  # fmt: skip
    print(table(rows, ("tensor", "format", "codes", "scales", "inputs", "crc-32")))
    return 0


def find_run(beginning: str, results: Path) -> RunResult:
    """The one result whose id starts with `beginning`. Raises ValueError for none or several."""
    from harness.cli.results import unpack_all
    from harness.records.folder import readable
    from harness.records.paths import sweep_folders

    unpack_all(results)
    found = [r for folder in sweep_folders(results) for r in readable(folder)[0] if r.run_id.startswith(beginning)]
    if len({r.run_id for r in found}) != 1:
        names = ", ".join(f"{r.run_id} ({r.name})" for r in found[:8]) or "none"
        raise ValueError(f"run {beginning!r} matches {len(found)} results in {results}/runs: {names}")
    return found[0]
