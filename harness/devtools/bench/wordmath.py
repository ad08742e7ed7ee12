"""Generator of `wordmath`: problems a second of one process, beside draws of a plain loop in the same interpreter.

    python -m harness.devtools.bench wordmath

A problem is drawn and worded; a demonstration is also solved in words. Seconds are the process's own, so other
processes of the machine lengthen them by what they do to its caches alone, and the ratio to the loop by less.
"""

from __future__ import annotations

import argparse
import random
from statistics import median

from harness.devtools.bench.runner import table
from harness.devtools.bench.timing import cpu_seconds, in_turns
from harness.tasks.wordmath import Wordmath

SIZES = (4, 10, 30)
BAR = 10_000
"""Problems a second at n = 10 on an idle core."""
PROBLEMS, DRAWS, REPEATS = 200, 200_000, 15


def run() -> list[dict[str, object]]:
    """A row per problem size: problems and demonstrations a second, and what one costs in draws of the loop."""
    rows: list[dict[str, object]] = []
    for n in SIZES:
        task = Wordmath(n=n)
        calls = {
            "problems": lambda task=task: task.sample("train", range(PROBLEMS)),
            "demonstrations": lambda task=task: task.demonstrations(range(PROBLEMS), 0),
            "draws": _draw,
        }
        spent = {name: median(found) for name, found in in_turns(calls, cpu_seconds, 2, REPEATS).items()}
        draw_s = spent["draws"] / DRAWS
        row: dict[str, object] = {"n": n, "problems per s, at least": BAR if n == 10 else None}
        for name in ("problems", "demonstrations"):
            row |= {f"{name} per s": PROBLEMS / spent[name], f"draws a {name[:-1]}": spent[name] / PROBLEMS / draw_s}
        rows.append(row | {"draws per s": 1 / draw_s})
    return rows


def options(parser: argparse.ArgumentParser) -> None:
    """The bench has none."""


def command(given: argparse.Namespace) -> int:
    """Print the table."""
    print(table(run()))
    return 0


def _draw() -> list[float]:
    """The reference: random numbers drawn and collected in a plain loop."""
    draw, found = random.Random(0).random, list[float]()
    for _ in range(DRAWS):
        found.append(draw())
    return found
