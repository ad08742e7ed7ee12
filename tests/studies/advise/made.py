"""Evidence and questions for the tests of advice."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd

from harness.foundation.provenance import ROOT
from harness.studies.advise.accuracy import Table, read_tables
from harness.studies.advise.question import FORMATS, Mismatch, Question
from harness.studies.advise.speed import Evidence, read_evidence

RESULTS = ROOT / "results"


@cache
def evidence() -> Evidence:
    """The committed rates: reading them takes a tenth of a second."""
    return read_evidence(RESULTS)


def row(
    method: str, precision: str, n: int, verdict: str = "equal", fell: int = 0, deployed: str = "equal", **values: Any
) -> dict[str, Any]:
    """A row of the table of word problems: six runs, of which `fell` collapsed, both endpoints alike but for the
    verdict."""
    own: dict[str, Any] = {"method": method, "precision": precision, "task.n": n, "variant": "", "ok": 6}
    for prefix, said in (("", verdict), ("deployed_", deployed)):
        own |= {
            f"{prefix}verdict": f"collapses in {fell} of 6" if fell else said, f"{prefix}further_seeds": float("nan"),
            f"{prefix}collapse": f"{fell} of 6: at most 39 %", f"{prefix}collapse_low": fell / 100,
            f"{prefix}collapse_high": 0.393, f"{prefix}difference": -0.01, f"{prefix}difference_low": -0.02,
            f"{prefix}difference_high": 0.01, f"{prefix}bases": 6, f"{prefix}bases_lower": 0,
            f"{prefix}bases_below": 3, f"{prefix}p_below": 1.0,
        }  # fmt: skip
    return own | values


ROWS = [
    *(row("bf16", "bf16", n) for n in (10, 30)),
    *(row(method, "fp8_block", n) for method in ("naive", "flashrl") for n in (10, 30)),
    row("fp8_rl", "fp8_block+kv8", 10), row("naive", "fp8_block+kv8", 10, deployed="worse"),
    row("naive", "fp8_block+kv8", 30, "cannot tell", further_seeds=8.0),
    row("naive", "int8", 10, "cannot tell", bases_below=6, p_below=0.01), row("naive", "int8", 30, "worse"),
    row("flashrl", "int8", 10), row("flashrl", "int8", 30, "better"),
    row("naive", "int4", 10), row("naive", "int4", 30, fell=1),
    row("flashrl", "int4", 10), row("flashrl", "int4", 30, "cannot tell", bases_lower=1),
    row("icepop", "int4", 30),
    row("rilq", "int8", 10, "worse"), row("naive", "int8", 10, "worse", variant="rilq.RILQ"),
    row("naive", "fp8_block", 10, "worse", variant="lr=0.001"),
]  # fmt: skip
"""Every kind of row, and three that are no recipe's."""


def mismatch(name: str, n: int, low: float, high: float, **values: Any) -> dict[str, Any]:
    """A row of the table of mismatch."""
    own = {"task": "wordmath", "n": n, "length": 24.4 * n, "parameters": 1e7, "spread": 0.0, "engine": "vllm"}
    return own | {"format": name, "k3_low": low, "k3_high": high, "num_bases": 6} | values


K3 = [
    mismatch("bf16", 10, 1e-5, 3e-5), mismatch("bf16", 30, 8e-6, 2e-5),
    *(mismatch(name, n, 1e-4 / n, 2e-3 / n) for name in FORMATS if name != "nvfp4" for n in (10, 30)),
    mismatch("int8", 10, 1.0, 1.0, spread=0.5), mismatch("int8", 10, 1.0, 1.0, engine="embedded"),
    mismatch("int8", 10, 1.0, 1.0, parameters=3e7, num_bases=5), mismatch("int8", 75, 1.0, 1.0),
]  # fmt: skip
"""Ranges over bases, and rows of other settings."""


def write_tables(results: Path) -> None:
    """The two tables, as `lowbit report` and `lowbit mismatch` write them."""
    (results / "tables").mkdir(parents=True, exist_ok=True)
    pd.DataFrame(ROWS).to_csv(results / "tables" / "main_wordmath.csv", index=False)
    pd.DataFrame(K3).to_csv(results / "tables" / "mismatch.csv", index=False)


@cache
def tables() -> dict[str, Table]:
    """The evidence of these rows, for both kinds of deployed weights."""
    with TemporaryDirectory() as folder:
        write_tables(Path(folder))
        return read_tables(Path(folder))


def question(k3: float | None = None, **values: Any) -> Question:
    """A question with one k3 for every format."""
    mismatch = {} if k3 is None else {name: Mismatch(k3=k3, source="made") for name in FORMATS}
    return Question(**({"size": "7b", "length": 1024, "mismatch": mismatch} | values))
