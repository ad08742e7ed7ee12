"""Domains of claims: the settings that a claim speaks of, and whether a test of ours lies inside.

A claim declares its domain in `claims.yaml`; a test's place is read from the runs that answer it. The dimensions, in
the order in which they weigh:

    kernels      a real engine's, or emulated
    formats      of the rollouts; a 16-bit control does not count
    mismatch     k3 in nats a token, mean of the first five steps: before training can have changed it
    rate_ratio   learning rate of arm a over that of arm b
    rate         learning rate of arm b, or of a where it is alone
    length       response tokens
    parameters   of the model
    steps        of the run, policy steps

The nearest test decides: first those that ask the claim's own question, then those that have data, then by the first
dimension in which two tests differ in lying inside, then the order of the file. A dimension that a claim leaves out
binds nothing, but for kernels (real) and rate_ratio (1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Literal

from pydantic import ConfigDict

from harness.config.load import parse, read_yaml
from harness.foundation.project_files import CLAIMS
from harness.published.claims.evidence import Evidence, grouped, select, steps
from harness.published.claims.kinds import NotTestable, Replay, Settings, Speed, Test, Trend, Update, arms_of
from harness.records.arms import setting
from harness.records.run_result import RunResult
from harness.studies.break_even.costs import emulates, num_parameters

MISMATCH = "mismatch/kl_k3"
EARLY = 5
"""Steps at the start of a run whose mismatch counts."""
SLACK = 2.0
"""A mismatch counts as the claim's own within this factor of its range: sources round theirs."""
SIXTEEN = frozenset({"bf16", "fp16", "fp32"})
Range = tuple[float, float]
DIMENSIONS = ("kernels", "formats", "mismatch", "rate_ratio", "rate", "length", "parameters", "steps")
"""In the order in which they weigh."""


@dataclass(frozen=True, kw_only=True)
class Domain:
    """Settings that a claim speaks of. Ranges have both ends inside; `.inf` is a valid end."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    kernels: Literal["real", "any"] = "real"
    formats: tuple[str, ...] = ()
    """Precision names; empty for any."""
    mismatch: Range | None = None
    rate_ratio: float = 1.0
    rate: Range | None = None
    length: Range | None = None
    parameters: Range | None = None
    steps: Range | None = None

    def __post_init__(self) -> None:
        for name in ("mismatch", "rate", "length", "parameters", "steps"):
            found = getattr(self, name)
            if found is not None and not 0 <= found[0] <= found[1]:
                raise ValueError(f"{name}={list(found)}: two rising numbers from 0 on are expected")
        if not 0 < self.rate_ratio < math.inf:
            raise ValueError(f"rate_ratio={self.rate_ratio}: a positive number is expected")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Setting of a test; NaN: the dimension does not apply to it or was not recorded."""

    kernels: Literal["real", "emulated"]
    formats: frozenset[str]
    mismatch: float = math.nan
    rate_ratio: float = math.nan
    rate: float = math.nan
    length: float = math.nan
    parameters: float = math.nan
    steps: float = math.nan


def domains_of(paper: str, path: Path = CLAIMS) -> list[Domain]:
    """Domains of a paper's claims in the order of the file, each once; empty for a paper without claims. Checked are
    the domains alone."""
    found = _domains(path).get(paper.partition(" as in ")[0], [])
    return list(dict.fromkeys(found))


@cache
def _domains(path: Path) -> dict[str, list[Domain]]:
    found: dict[str, list[Domain]] = {}
    for row in read_yaml(path)["claims"] if path.is_file() else ():
        found.setdefault(row["source"], []).append(parse(Domain, row.get("domain", {})))
    return found


def domain_text(domain: Domain) -> str:
    """A domain in words; "any setting" for one that binds nothing but the kernels."""
    parts = [_names(domain.formats)] if domain.formats else []
    parts += [f"k3 {_range(domain.mismatch)}"] if domain.mismatch else []
    parts += [f"learning rate {_range(domain.rate)}"] if domain.rate else []
    if not math.isclose(domain.rate_ratio, 1.0, rel_tol=1e-3):
        parts.append(f"learning rates {domain.rate_ratio:.3g} to 1")
    for name, unit in (("length", "tokens"), ("parameters", "parameters"), ("steps", "steps")):
        span = getattr(domain, name)
        parts += [f"{_range(span)} {unit}"] if span else []
    return ", ".join(parts) or "any setting"


def place_of(test: Test, evidence: Mapping[str, Evidence]) -> Place | None:
    """None for a test without runs, or that cannot be made."""
    if isinstance(test, Speed):
        return Place(kernels="real", formats=_own({test.precision, test.over}), length=test.length,
                     parameters=_parameters(test.size))  # fmt: skip
    if isinstance(test, Update):
        return Place(kernels="real", formats=_own({test.precision}), parameters=_parameters(test.size))
    if isinstance(test, Replay):
        return Place(kernels="emulated", formats=_own({test.sampler}))
    if isinstance(test, NotTestable):
        return None
    found = evidence.get(test.sweep, Evidence())
    arms = [_runs(found, arm, test) for arm in arms_of(test)]
    if not all(arms):
        return None
    runs = [run for arm in arms for run in arm]
    rates = [_rate(arm[0]) for arm in arms]
    return Place(
        kernels="emulated" if any(emulates(run) for run in runs) else "real",
        formats=_own({run.config["precision"]["name"] for run in runs}),
        mismatch=max((median(early) for arm in arms if (early := _early(found, arm))), default=math.nan),
        rate_ratio=rates[0] / rates[1] if len(rates) > 1 else math.nan,
        rate=rates[-1],
        length=max(_length(run) for run in runs),
        parameters=max(num_parameters(run) or math.nan for run in runs),
        steps=max(float(run.config["trainer"]["steps"]) for run in runs),
    )


def _parameters(size: str) -> float:
    """Parameters of a size in words: 7e9 of "7b"."""
    return 1e9 * float(size.removesuffix("b"))


def _runs(found: Evidence, arm: Settings, test: Test) -> Sequence[RunResult]:
    if isinstance(test, Trend):
        return [run for runs in grouped(found, arm, test.along).values() for run in runs]
    return select(found, arm)


def _own(precisions: set[str]) -> frozenset[str]:
    return frozenset(precisions - SIXTEEN or precisions)


def _early(found: Evidence, runs: Sequence[RunResult]) -> list[float]:
    return [fmean(values[:EARLY]) for run in runs if (values := steps(found, run, MISMATCH))]


def _rate(run: RunResult) -> float:
    """Learning rate of what is trained, adapters by their factor."""
    own = setting(run)
    return float(own["trainer.lr"]) * float(own.get("knobs.LoRA.lr_scale", 1.0))


def _length(run: RunResult) -> float:
    """Response tokens: of a sorted answer its digits and the end, of other tasks the mean over the evaluations. NaN for
    a run without one."""
    task = run.config["task"]
    if task["name"] == "sort":
        return float(task["n"] + 1)
    told = [entry.length_mean for entry in run.evals if entry.length_mean is not None]
    return fmean(told) if told else math.nan


def outside(domain: Domain, place: Place) -> dict[str, str]:
    """Dimension -> in words why the place lies outside, in the order in which they weigh; empty inside."""
    found: dict[str, str] = {}
    if domain.kernels == "real" and place.kernels == "emulated":
        found["kernels"] = "emulated kernels"
    if domain.formats and not place.formats <= set(domain.formats):
        found["formats"] = f"{_names(place.formats)} instead of {_names(domain.formats)}"
    if domain.mismatch and not domain.mismatch[0] / SLACK <= place.mismatch <= domain.mismatch[1] * SLACK:
        found["mismatch"] = f"k3 {_number(place.mismatch)} instead of {_range(domain.mismatch)}"
    if not math.isnan(place.rate_ratio) and not math.isclose(place.rate_ratio, domain.rate_ratio, rel_tol=1e-3):
        found["rate_ratio"] = f"learning rates {place.rate_ratio:.3g} to 1 instead of {domain.rate_ratio:.3g} to 1"
    for name, unit in (("rate", "learning rate of "), ("length", ""), ("parameters", ""), ("steps", "")):
        span, value = getattr(domain, name), getattr(place, name)
        if span is not None and not math.isnan(value) and not span[0] <= value <= span[1]:
            what = {"rate": "", "length": " tokens"}.get(name, f" {name}")
            found[name] = f"{unit}{_number(value)}{what} instead of {_range(span)}"
    return found


def place_words(place: Place) -> str:
    """A place as the page shows it."""
    parts = [f"{place.kernels} kernels", _names(place.formats)]
    parts += [f"k3 {_number(place.mismatch)}"] * (not math.isnan(place.mismatch))
    if not math.isnan(place.rate_ratio) and not math.isclose(place.rate_ratio, 1.0, rel_tol=1e-3):
        parts.append(f"learning rates {place.rate_ratio:.3g} to 1")
    parts += [f"{place.length:.0f} tokens"] * (not math.isnan(place.length))
    parts += [f"{_number(place.parameters)} parameters"] * (not math.isnan(place.parameters))
    return ", ".join(parts)


def _names(formats: Sequence[str] | frozenset[str]) -> str:
    return ", ".join(sorted(formats))


def _range(span: Range) -> str:
    low, high = span
    if low == high:
        return _number(low)
    if math.isinf(high):
        return f"{_number(low)} or more"
    return f"at most {_number(high)}" if low == 0 else f"{_number(low)} to {_number(high)}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "not recorded"
    for at_least, size, unit in ((1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e5, 1e3, "K")):
        if value >= at_least:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"
