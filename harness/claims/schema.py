"""`claims.yaml` as data: sources, claims, and the tests that decide them. Every name in it is checked when it is read.

A test compares numbers of committed runs. Its kinds:

    contrast      a minus b, pair by pair of seeds
    ratio         a over b, the mean of the logarithms over pairs
    growth        the last fifth of a run's steps over its first fifth, also by logarithms
    level         a's own number
    trend         slope of a's number (or of a minus b) along a setting, one slope per pair of seeds
    replay        one number of the replay laboratory with its interval, against a threshold or another arm
    not_testable  a reason
"""

from __future__ import annotations

import typing
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict

from harness import stats
from harness.config import groups, leaves, parse, read_yaml
from harness.metric_names import METRICS
from harness.nearest import nearest
from harness.results import SUMMARY
from harness.run_config import RunConfig
from harness.sweep import SWEEPS
from methods import method_named

CLAIMS = Path("claims.yaml")
Expect = Literal["above", "below", "equal", "not_below", "not_above"]
Reduce = Literal["mean", "median", "max", "min", "first", "last"]
Settings = dict[str, Any]
"""Dotted config name -> value; `precision`, `model` and `task` stand for their names."""
ALIASES = {"precision": "precision.name", "model": "model.name", "task": "task.name"}
SCORES = (
    "auc", "accuracy", "gain", "base_accuracy", "rollout_auc", "rollout_accuracy", "rollout_gain",
    "base_rollout_accuracy", "reward",
)  # fmt: skip
"""Numbers of a run's evaluations; `rollout_*` in its own format, `gain` is final minus initial accuracy."""
REPLAYED = ("bias", "cosine", "gain")
"""Columns of the replay laboratory that have an interval."""


@dataclass(frozen=True, kw_only=True)
class _Test:
    __pydantic_config__ = ConfigDict(extra="forbid")
    expect: Expect
    note: str = ""
    """What this test stands for, where its fields do not say it."""


@dataclass(frozen=True, kw_only=True)
class _OfRuns(_Test):
    sweep: str
    a: Settings
    where: Settings = field(default_factory=Settings)
    """Settings of every arm of the test."""
    metric: str = "auc"
    reduce: Reduce = "mean"
    """Over the finite values of a run's steps, where `metric` is of the series; `first` and `last` are five steps."""


@dataclass(frozen=True, kw_only=True)
class Contrast(_OfRuns):
    """a minus b."""

    b: Settings
    threshold: float = 0.0
    margin: float = stats.DELTA


@dataclass(frozen=True, kw_only=True)
class Ratio(_OfRuns):
    """a over b."""

    b: Settings
    threshold: float = 1.0
    margin: float = 1.05
    """A factor."""


@dataclass(frozen=True, kw_only=True)
class Growth(_OfRuns):
    """Last fifth over first fifth of the steps."""

    threshold: float = 1.0
    margin: float = 1.05


@dataclass(frozen=True, kw_only=True)
class Level(_OfRuns):
    """a's own number."""

    threshold: float
    margin: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Trend(_OfRuns):
    """Slope along a setting."""

    along: str
    per: Literal["unit", "doubling"] = "doubling"
    b: Settings | None = None
    threshold: float = 0.0
    margin: float = 0.01


@dataclass(frozen=True, kw_only=True)
class Replay(_Test):
    """A number of the replay laboratory."""

    context: str
    sampler: str
    arm: str
    column: Literal["bias", "cosine", "gain"]
    age: int = 0
    threshold: float | None = None
    against: str | None = None
    """Another arm of the same context; decided where the two intervals do not overlap."""
    margin: float = 0.0


@dataclass(frozen=True, kw_only=True)
class NotTestable:
    """Nothing here can decide the claim."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    reason: str


OfRuns = Contrast | Ratio | Growth | Level | Trend
Test = OfRuns | Replay | NotTestable
KINDS: dict[str, type] = {
    "contrast": Contrast, "ratio": Ratio, "growth": Growth, "level": Level, "trend": Trend, "replay": Replay,
    "not_testable": NotTestable,
}  # fmt: skip


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
    """How the source was read; `notes` is second-hand."""
    claim: str
    setting: Where
    unit: str = ""
    numbers: dict[str, float | str] = field(default_factory=dict[str, float | str])
    """The source's own numbers, in `unit`."""
    scale: Literal["same", "smaller"] = "smaller"
    """How our setting compares with the source's; `smaller` caps a badge at "direction supported"."""
    caveat: str = ""
    """What else keeps our test from being theirs."""
    tests: tuple[Test, ...]
    """The first is nearest to the source and decides."""


@dataclass(frozen=True, kw_only=True)
class Claims:
    """The whole file."""

    papers: dict[str, str]
    """Source -> title, in the order of the page."""
    claims: tuple[Claim, ...]


def read_claims(path: Path = CLAIMS, sweeps: Path = SWEEPS) -> Claims:
    """The checked file. Raises ValueError, one line, for an unknown key, source, sweep, method, precision or metric."""
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
    if isinstance(test, Replay):
        if (test.threshold is None) == (test.against is None):
            raise ValueError("a replay test needs one of threshold and against")
    elif not isinstance(test, NotTestable):
        _check_runs(test, sweeps)
    return test


def _check_runs(test: OfRuns, sweeps: Path) -> None:
    known = [path.stem for path in sweeps.glob("*.yaml")]
    if test.sweep not in known:
        raise ValueError(f"sweep={test.sweep}: unknown; {nearest(test.sweep, known)}")
    metrics = [*SCORES, *SUMMARY, *(name for name in METRICS if not name.startswith("by_"))]
    if test.metric not in metrics:
        raise ValueError(f"metric={test.metric}: unknown; {nearest(test.metric, metrics)}")
    if isinstance(test, Growth) and test.metric not in METRICS:
        raise ValueError(f"metric={test.metric}: growth needs a metric of every step; {nearest(test.metric, METRICS)}")
    if isinstance(test, Ratio | Growth) and (test.threshold <= 0 or test.margin <= 1):
        raise ValueError(f"threshold={test.threshold} margin={test.margin}: a ratio needs them above 0 and above 1")
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
            plain, choices = str(value).removesuffix("+kv8"), groups()["precision"]
            if plain not in choices:
                raise ValueError(f"precision={value}: unknown; {nearest(plain, choices)}")


def kind_of(test: Test) -> str:
    """The name of a test's kind."""
    return next(name for name, kind in KINDS.items() if type(test) is kind)


def arms_of(test: OfRuns) -> tuple[Settings, ...]:
    """The settings of every arm that a test needs, `where` included."""
    b = typing.cast("Settings | None", getattr(test, "b", None))
    return tuple({ALIASES.get(k, k): v for k, v in {**test.where, **arm}.items()} for arm in (test.a, b) if arm)
