"""`claims.yaml` as data: sources, claims, and the tests that decide them. Every name in it is checked when it is read.

The kinds of tests are in `harness.published.claims.kinds`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict

from harness.config.load import groups, leaves, parse, read_yaml
from harness.config.schema import RunConfig
from harness.foundation.did_you_mean import nearest
from harness.foundation.project_files import CLAIMS
from harness.published.claims.domains import Domain
from harness.published.claims.kinds import (
    ALIASES,
    KINDS,
    SCORES,
    Growth,
    NotTestable,
    OfRuns,
    Replay,
    Settings,
    Speed,
    Test,
    Trend,
    Update,
)
from harness.records.metric_names import METRICS
from harness.records.run_result import SUMMARY
from harness.studies.replay.arms import arm_names
from harness.studies.throughput import plan as throughput
from harness.studies.throughput.shapes import SIZES
from harness.sweep import SWEEPS
from methods import method_named


@dataclass(frozen=True, kw_only=True)
class Where:
    """The setting of the source."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    model: str = ""
    task: str = ""
    precision: str = ""
    hardware: str = ""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One published claim."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    id: str
    source: str
    """A key of the file's `papers`."""
    place: str
    """Table, section, blog or page."""
    read: Literal["text", "code", "docs", "notes"]
    """Form in which the source was read; `notes` is second-hand."""
    read_on: str = ""
    """Day on which the claim was last read against what could be read of its source."""
    claim: str
    setting: Where
    unit: str = ""
    numbers: dict[str, float | str] = field(default_factory=dict[str, float | str])
    """The source's own numbers, in `unit`."""
    scale: Literal["same", "smaller"] = "smaller"
    """Size of our setting beside the source's; `smaller` caps a badge at "direction supported"."""
    caveat: str = ""
    """Further differences between our test and theirs."""
    domain: Domain = field(default_factory=Domain)
    """Settings that the claim speaks of: a test outside cannot decide it."""
    tests: tuple[Test, ...]
    """The one nearest to the domain decides; of two as near the first."""


@dataclass(frozen=True, kw_only=True)
class Claims:
    """The whole file."""

    papers: dict[str, str]
    """Source -> title, in the order of the page."""
    claims: tuple[Claim, ...]


def read_claims(path: Path = CLAIMS, sweeps: Path = SWEEPS) -> Claims:
    """The checked file. Raises ValueError, one line, for an unknown key, source, sweep, method, precision,
    metric or arm of the replay laboratory."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    values = read_yaml(path)
    unknown = [key for key in values if key not in ("papers", "claims")]
    if unknown:
        raise ValueError(f"{path}: unknown key {unknown[0]}; {nearest(unknown[0], ('papers', 'claims'))}")
    papers, rows = values.get("papers"), values.get("claims")
    if not isinstance(papers, dict) or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: papers is a mapping of sources to titles, claims a list of mappings")
    claims = tuple(_claim(row, path, papers, sweeps) for row in rows)
    twice = [name for name, count in Counter(claim.id for claim in claims).items() if count > 1]
    if twice:
        raise ValueError(f"{path}: two claims are called {twice[0]}")
    return Claims(papers={str(k): str(v) for k, v in papers.items()}, claims=claims)


def _claim(row: dict[str, Any], path: Path, papers: dict[str, str], sweeps: Path) -> Claim:
    name = row.get("id", "(without id)")
    tests = row.get("tests")
    if not isinstance(tests, list) or not tests or not all(isinstance(test, dict) for test in tests):
        raise ValueError(f"{path}: claim {name}: tests is a list with at least one test")
    try:
        found = tuple(_test(test, sweeps) for test in tests)
        claim = parse(Claim, row | {"tests": []})
        for precision in claim.domain.formats:
            _check_precision("domain formats", precision)
        if claim.source not in papers:
            raise ValueError(f"source={claim.source}: not among papers; {nearest(claim.source, papers)}")
    except ValueError as error:
        raise ValueError(f"{path}: claim {name}: {error}") from None
    return replace(claim, tests=found)


def _test(values: dict[str, Any], sweeps: Path) -> Test:
    kind = values.get("kind")
    if kind not in KINDS:
        raise ValueError(f"test kind={kind}: unknown; {nearest(str(kind), KINDS)}")
    test: Test = parse(KINDS[kind], {key: value for key, value in values.items() if key != "kind"})
    if isinstance(test, NotTestable):
        return test
    if test.expect == "equal" and not test.margin:
        raise ValueError("margin=0: expect=equal needs one above 0, for no interval lies inside of it")
    if isinstance(test, Speed):
        _check_speed(test, sweeps)
    elif isinstance(test, Update):
        _check_precision("precision", test.precision)
        _check_size(test.size)
    elif isinstance(test, Replay):
        _check_precision("sampler", test.sampler)
        for key, arm in (("arm", test.arm), ("against", test.against)):
            if arm is not None and arm not in arm_names():
                raise ValueError(f"{key}={arm}: the replay laboratory has no such arm; {nearest(arm, arm_names())}")
    else:
        _check_runs(test, sweeps)
    return test


def _check_size(size: str) -> None:
    """Raises ValueError for a size that no model has; toy is for rehearsals on a CPU, and its name no number."""
    sizes = [name for name in SIZES if name != "toy"]
    if size not in sizes:
        raise ValueError(f"size={size}: unknown; {nearest(size, sizes)}")


def _check_speed(test: Speed, sweeps: Path) -> None:
    sweep = throughput.read_sweep(test.sweep, sweeps)
    engines = {(spec.size, spec.precision) for spec in throughput.engine_specs(sweep)}
    for size in (test.size, *([test.against_size] if test.against_size else [])):
        for precision in (test.precision, test.over):
            if (size, precision) not in engines:
                choices = [f"{a} {b}" for a, b in sorted(engines)]
                raise ValueError(f"{test.sweep} has no {size} {precision}; {nearest(f'{size} {precision}', choices)}")
        _check_size(size)
    for length in (test.length, *([test.against_length] if test.against_length else [])):
        if length not in sweep.lengths:
            raise ValueError(f"length={length}: not among {list(sweep.lengths)} of {test.sweep}")
    if test.batch is not None and test.batch not in sweep.batches:
        raise ValueError(f"batch={test.batch}: not among {list(sweep.batches)} of {test.sweep}")


def _check_runs(test: OfRuns, sweeps: Path) -> None:
    known = [path.stem for path in sweeps.glob("*.yaml")]
    if test.sweep not in known:
        raise ValueError(f"sweep={test.sweep}: unknown; {nearest(test.sweep, known)}")
    metrics = [*SCORES, *SUMMARY, *(name for name in METRICS if not name.startswith("by_"))]
    if test.metric not in metrics:
        raise ValueError(f"metric={test.metric}: unknown; {nearest(test.metric, metrics)}")
    if isinstance(test, Growth) and test.metric not in METRICS:
        raise ValueError(f"metric={test.metric}: growth needs a metric of every step; {nearest(test.metric, METRICS)}")
    if test.reduce != "mean" and (isinstance(test, Growth) or test.metric not in METRICS):
        why = "growth takes both ends" if isinstance(test, Growth) else f"{test.metric} is one number"
        raise ValueError(f"reduce={test.reduce}: {why} of a run; leave it out")
    for settings in (test.a, getattr(test, "b", None) or {}, test.where):
        _check_settings(settings)
    if isinstance(test, Trend):
        _check_settings({test.along: None})


def _check_settings(settings: Settings) -> None:
    known = leaves(RunConfig)
    for key, value in settings.items():
        if key not in known and key not in ALIASES and not key.startswith("knobs."):
            raise ValueError(f"setting {key}: unknown; {nearest(key, [*known, *ALIASES])}")
        if key == "method":
            method_named(str(value))
        if key == "precision":
            _check_precision(key, str(value))


def _check_precision(field_name: str, value: str) -> None:
    plain, choices = value.removesuffix("+kv8"), groups()["precision"]
    if plain not in choices:
        raise ValueError(f"{field_name}={value}: unknown; {nearest(plain, choices)}")
