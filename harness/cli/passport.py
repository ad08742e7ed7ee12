"""`lowbit passport`: planned and realized formats of a run, tensor by tensor."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.options import add_results, never
from harness.foundation.did_you_mean import LONG, nearest
from harness.foundation.text_table import text_table

if TYPE_CHECKING:
    from harness.records.run_result import RunResult


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "run_id",
        metavar="RUN",
        help="a run: its name, its id or the beginning of it, each with or without SWEEP/ before it, or its file",
    )
    add_results(parser, reads=lambda a: not a.run_id.endswith(".json"), writes=never)


def run(a: argparse.Namespace) -> int:
    """Print planned and realized formats of a run, and how it happened."""
    from harness.records.effective_bits import bits_of_run

    result = find_run(a.run_id, a.results)
    print(f"{result.run_id}  {result.name}  {result.status}")
    if result.launch:
        print("launch:   " + ", ".join(f"{name}={value}" for name, value in result.launch.items()))
    if result.memory_gib:
        known = {name: gib for name, gib in result.memory_gib.items() if gib is not None}
        print("memory:   " + ", ".join(f"{name} {gib:.2f} GiB" for name, gib in known.items()))
    for line in result.retries:
        print(f"retried:  {line}")
    if result.method.parts:
        parts = [" ".join([name, *(f"{k}={v}" for k, v in own.items())]) for name, own in result.method.parts.items()]
        print("parts:    " + ", ".join(parts))
    print("planned:  " + ", ".join(f"{k}={v}" for k, v in result.planned.items() if v))
    if not math.isnan(bits := bits_of_run(result)):
        print(f"stored:   {bits:.3f} bits a weight of the linear layers at the rollout")
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
    print(text_table(("tensor", "format", "codes", "scales", "inputs", "crc-32"), rows))
    return 0


def find_run(words: str, results: Path, also: str = "") -> RunResult:
    """The one run that `words` names: its name, its id or the beginning of one, with or without `SWEEP/` before it, or
    a path to its record. Raises ValueError for none or several, and for a file that is no result; `also`: what else
    the words name nowhere, such as " and no model folder"."""
    from harness.records.folder import all_sweeps, runs_of
    from harness.records.run_result import read_result
    from harness.records.statuses import FINISHED

    if words.endswith(".json"):
        return read_result(Path(words))
    sweep, _, wanted = words.rpartition("/")
    sweeps = [name for name in all_sweeps(results) if sweep in ("", name)]
    found: list[RunResult] = []
    for name in sweeps:
        runs, problems = runs_of(results, name)
        found += runs
        for problem in problems:
            print(f"warning: left alone: {problem}", file=sys.stderr)
    matching = [r for r in found if wanted == r.name or (wanted and r.run_id.startswith(wanted))]
    if len({r.run_id for r in matching}) == 1:  # of several sweeps one that finished it
        return next((r for r in matching if r.status in FINISHED), matching[0])
    if not matching:
        raise ValueError(f"no run in {results}{also} is {words!r}; {_hint(words, found, results)}")
    several = ", ".join(f"{r.sweep}/{r.run_id} ({r.name})" for r in matching[:8])
    raise ValueError(f"run {words!r} matches {len(matching)} results in {results}; {several}")


def _hint(words: str, found: Sequence[RunResult], results: Path) -> str:
    """The nearest runs, else their names where they are few, else the sweeps that have some."""
    from harness.records.folder import all_sweeps

    sweep, _, wanted = words.rpartition("/")
    names, sweeps = sorted({run.name for run in found}), all_sweeps(results)
    if sweep and sweeps and sweep not in sweeps:
        return f"no sweep {sweep!r}; {nearest(sweep, sweeps)}"
    hint = nearest(wanted, names)
    if names and (hint.startswith("nearest") or len(names) <= LONG):
        return hint
    return f"lowbit runs SWEEP lists runs; sweeps: {', '.join(sweeps) or 'none'}"
