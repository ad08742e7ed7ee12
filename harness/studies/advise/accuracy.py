"""Accuracy of a format with a correction on word problems, and whether the mismatch asked about was ever trained with.

The evidence is the table of `main_wordmath`: models of 10M parameters, vLLM's kernels, 150 steps, two lengths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from harness.foundation.span import span
from harness.records.paths import tables_folder
from harness.report.tables import difference_cell
from harness.report.verdicts import loss_on_bases, short_verdict
from harness.studies.advise.question import Mismatch, Question

SWEEP, MISMATCH, TASK, KERNELS = "main_wordmath", "mismatch", "wordmath", "vllm"
NONE, TIS, ICEPOP = "none", "TIS", "IcePop"
"""Corrections: none, truncated importance sampling, and the two-sided mask of IcePop."""
METHODS_OF = {NONE: ("naive",), TIS: ("flashrl", "fp8_rl"), ICEPOP: ("icepop",)}
"""Correction -> the methods of the table that are it. `fp8_rl` is TIS where the cache is in FP8, too, and measures the
cache's scales anew at every push."""
CONTROL = "bf16"
Standing = Literal["held", "undecided", "lost", "beyond"]
STANDINGS: dict[Standing, str] = {
    "held": "Equal to BF16 rollouts on word problems",
    "undecided": "Undecided on word problems, or not run at both lengths",
    "lost": "Runs collapsed or lost accuracy on word problems",
    "beyond": "Your mismatch is larger than any that was trained with",
}
"""Kinds of answers in their order, with what they say."""
NOT_RUN = "not run"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of the two tables, for one deployment."""

    prefix: str
    """Prefix of the columns that count: empty for the BF16 policy, "deployed_" for the policy in the rollout format."""
    tokens: Mapping[int, int]
    """Problem size -> tokens of an answer, to 20."""
    rows: Mapping[tuple[str, str, int], Mapping[str, Any]]
    """(method, precision, problem size) -> row."""
    k3: Mapping[str, tuple[float, float]]
    """Format -> smallest and largest k3 of a base before training, nats a token, over both lengths."""


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """A format with a correction on word problems."""

    standing: Standing
    cells: tuple[str, ...]
    """A verdict per length, in the order of `Table.tokens`."""
    k3: str
    """Range of k3 there; "-" where nothing ran."""
    words: str
    """Differences with their intervals, and how the k3 asked about compares."""


def read_tables(results: Path) -> dict[str, Table]:
    """Deployed weights -> the evidence, of each arm in its usual setting (no variant). Raises ValueError naming the
    file where a table is missing or has an arm twice."""
    found = {name: tables_folder(results) / f"{name}.csv" for name in (SWEEP, MISMATCH)}
    for path in found.values():
        if not path.is_file():
            raise ValueError(f"{path}: there is no such table")
    arms, mismatch = (pd.read_csv(path).to_dict("records") for path in found.values())
    usual = [row for row in arms if pd.isna(row["variant"])]
    rows = {(row["method"], row["precision"], row["task.n"]): row for row in usual}
    if len(rows) < len(usual):
        raise ValueError(f"{found[SWEEP]}: two rows without a variant of one method, format and length")
    sizes = sorted({n for _, _, n in rows})
    bases = [
        row for row in mismatch
        if (row["task"], row["engine"], row["spread"]) == (TASK, KERNELS, 0) and row["n"] in sizes
    ]  # fmt: skip
    parameters = max(bases, key=lambda row: row["num_bases"])["parameters"]
    tokens, spans = dict[int, float](), dict[str, tuple[float, float]]()
    for row in bases:
        if row["parameters"] == parameters:
            low, high = spans.get(row["format"], (math.inf, 0.0))
            spans[row["format"]] = min(low, row["k3_low"]), max(high, row["k3_high"])
            if row["format"] == CONTROL:
                tokens[row["n"]] = row["length"]
    return {
        deploy: Table(
            prefix=prefix,
            tokens={n: 20 * round(tokens[n] / 20) for n in sizes},
            rows=rows,
            k3=spans,
        )
        for deploy, prefix in (("bf16", ""), ("rollout", "deployed_"))
    }


def corrections(table: Table, precision: str) -> list[str]:
    """Corrections of a format: none, TIS, and IcePop where it ran with it."""
    ran = {correction for correction in METHODS_OF for n in table.tokens if _row(table, precision, correction, n)}
    return [correction for correction in METHODS_OF if correction in {NONE, TIS} | ran]


def accuracy(table: Table, question: Question, precision: str, correction: str) -> Accuracy:
    """One format with one correction."""
    rows = [_row(table, precision, correction, n) for n in table.tokens]
    asked, trained = question.mismatch.get(precision), table.k3.get(precision)
    said = [
        f"{tokens} tokens: {_explained(row, table.prefix)}"
        for tokens, row in zip(table.tokens.values(), rows, strict=True)
    ]
    return Accuracy(
        standing=_standing(rows, table.prefix, asked, trained),
        cells=tuple(NOT_RUN if row is None else short_verdict(table.prefix)(row) for row in rows),
        k3="-" if trained is None else _span(trained),
        words="; ".join([*said, _compared(precision, asked, trained)]),
    )


def control(table: Table) -> Accuracy:
    """BF16 rollouts: how many of their runs collapsed."""
    rows = [table.rows[CONTROL, CONTROL, n] for n in table.tokens]
    cells = tuple(f"falls {row['collapse'].partition(':')[0].replace(' of ', '/')}" for row in rows)
    return Accuracy(
        standing="held", cells=cells, k3=_span(table.k3[CONTROL]), words="BF16 rollouts are what is compared with"
    )


def _row(table: Table, precision: str, correction: str, n: int) -> Mapping[str, Any] | None:
    rows = (table.rows.get((method, precision, n)) for method in METHODS_OF[correction])
    return next((row for row in rows if row is not None), None)


def _standing(
    rows: Sequence[Mapping[str, Any] | None], prefix: str, asked: Mismatch | None, trained: tuple[float, float] | None
) -> Standing:
    ran = [row for row in rows if row is not None]
    if any(_is_lost(row, prefix) for row in ran):
        return "lost"
    if asked is not None and trained is not None and asked.k3 > trained[1]:
        return "beyond"
    is_equal = all(row is not None and row[f"{prefix}verdict"] in ("equal", "better") for row in rows)
    return "held" if is_equal else "undecided"


def _is_lost(row: Mapping[str, Any], prefix: str) -> bool:
    """Did a run collapse, or is a loss shown, in the mean or, where that is open, on most bases or on single ones?"""
    has_fallen = row[f"{prefix}collapse_low"] > 0
    return bool(has_fallen or row[f"{prefix}verdict"] == "worse" or loss_on_bases(row, prefix))


def _explained(row: Mapping[str, Any] | None, prefix: str) -> str:
    if row is None:
        return NOT_RUN
    runs = f"{row['method']}, {row['ok']:.0f} runs, collapsed {row[f'{prefix}collapse']}"
    return f"{difference_cell(prefix)(row)} ({runs})"


def _compared(precision: str, asked: Mismatch | None, trained: tuple[float, float] | None) -> str:
    if asked is None:
        return f"no k3 is given for {precision}; lowbit probe measures it"
    there = "no base was measured there" if trained is None else f"those bases have {_span(trained)}"
    return f"k3 {asked.k3:.2g} ({asked.source}), {there}"


def _span(ends: tuple[float, float]) -> str:
    return span(*ends, ".0e").replace("e-0", "e-")
