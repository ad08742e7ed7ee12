"""Evidence and questions for the tests of advice."""

from __future__ import annotations

from functools import cache
from typing import Any

from harness.foundation.provenance import ROOT
from harness.studies.advise.accuracy import Curves, curves_of
from harness.studies.advise.question import FORMATS, Mismatch, Question
from harness.studies.advise.speed import Evidence, read_evidence
from tests.studies.dose import made

RESULTS = ROOT / "results"
SMALL = {"size": "0.1m", "length": 32}
"""Size and length within those of the made runs."""


@cache
def evidence() -> Evidence:
    """The committed rates: reading them takes a tenth of a second."""
    return read_evidence(RESULTS)


@cache
def curves(deploy: str = "bf16") -> Curves:
    """Curves of runs whose losses are known."""
    return curves_of(made.cloud(60, noise=0.01), deploy)


def question(k3: float | None = None, **values: Any) -> Question:
    """A question with one k3 for every format."""
    mismatch = {} if k3 is None else {name: Mismatch(k3=k3, source="made") for name in FORMATS}
    return Question(**({"size": "7b", "length": 1024, "mismatch": mismatch} | values))
