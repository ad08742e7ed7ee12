"""The kinds of tests that decide claims, as `claims.yaml` writes them.

contrast      a minus b, base by base
ratio         a over b, the mean of the logarithms over bases
growth        the last fifth of a run's steps over its first fifth, also by logarithms
level         a's own number
trend         slope of a's number (or of a minus b) along a setting, one slope per run
replay        one number of the replay laboratory with its interval, against a threshold or another arm
speed         a precision's rate over another's in the throughput map, with the range over neighbouring cells
update        how many times as fast a whole update is as in another arithmetic, from a record of one bench
not_testable  a reason
"""

from __future__ import annotations

import typing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from harness.config.schema import NotNegative, Positive
from harness.records import stats
from harness.studies.throughput.factors import MapPoint

Expect = Literal["above", "below", "equal", "not_below", "not_above"]
Reduce = Literal["mean", "median", "max", "min", "first", "last"]
Margin = Annotated[float, Field(gt=1)]
"""A factor."""
Settings = dict[str, Any]
"""Dotted config name -> value; `precision`, `model` and `task` stand for their names."""
ALIASES = {"precision": "precision.name", "model": "model.name", "task": "task.name"}
SCORES = (
    "auc", "accuracy", "gain", "base_accuracy", "rollout_auc", "rollout_accuracy", "rollout_gain",
    "base_rollout_accuracy", "reward",
)  # fmt: skip
"""Numbers of a run's evaluations; `rollout_*` in its own format, `gain` is final minus initial accuracy."""


@dataclass(frozen=True, kw_only=True)
class _Test:
    __pydantic_config__ = ConfigDict(extra="forbid")
    expect: Expect
    note: str = ""
    """Meaning of this test, where its fields do not say it."""
    is_side: bool = False
    """It asks another question than the claim, so it is shown and never decides."""


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
    margin: NotNegative = stats.DELTA


@dataclass(frozen=True, kw_only=True)
class Ratio(_OfRuns):
    """a over b."""

    b: Settings
    threshold: Positive = 1.0
    margin: Margin = 1.05


@dataclass(frozen=True, kw_only=True)
class Growth(_OfRuns):
    """Last fifth over first fifth of the steps."""

    threshold: Positive = 1.0
    margin: Margin = 1.05


@dataclass(frozen=True, kw_only=True)
class Level(_OfRuns):
    """a's own number."""

    threshold: float
    margin: NotNegative = 0.0


@dataclass(frozen=True, kw_only=True)
class Trend(_OfRuns):
    """Slope along a setting."""

    along: str
    per: Literal["unit", "doubling"] = "doubling"
    b: Settings | None = None
    threshold: float = 0.0
    margin: NotNegative = 0.01


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
    margin: NotNegative = 0.0

    def __post_init__(self) -> None:
        if (self.threshold is None) == (self.against is None):
            raise ValueError("a replay test needs one of threshold and against")


@dataclass(frozen=True, kw_only=True)
class _Factor(_Test):
    claimed: tuple[float, float] | None = None
    """The factor that the source reports, lowest and highest; the badge does not depend on it."""
    threshold: Positive = 1.0
    margin: Margin = 1.05

    def __post_init__(self) -> None:
        if self.claimed is not None and not 0 < self.claimed[0] <= self.claimed[1]:
            raise ValueError(f"claimed={list(self.claimed)}: two rising factors above 0 are expected")


@dataclass(frozen=True, kw_only=True)
class Speed(MapPoint, _Factor):
    """A precision's rate over another's, from the throughput map; the interval is the range over neighbouring cells."""

    sweep: str


@dataclass(frozen=True, kw_only=True)
class Update(_Factor):
    """Seconds of a whole update of one option over those of another, medians of a few updates without an interval, from
    a record of `bench long_sequences`."""

    file: str
    """In `results/bench`."""
    size: str
    precision: str
    """Rollout format whose arithmetic `option` computes in."""
    option: str
    over: str
    """The option that takes longer if the factor is above 1."""


@dataclass(frozen=True, kw_only=True)
class NotTestable:
    """Nothing here can decide the claim."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    reason: str


OfRuns = Contrast | Ratio | Growth | Level | Trend
Test = OfRuns | Replay | Speed | Update | NotTestable
KINDS: dict[str, type] = {
    "contrast": Contrast, "ratio": Ratio, "growth": Growth, "level": Level, "trend": Trend, "replay": Replay,
    "speed": Speed, "update": Update, "not_testable": NotTestable,
}  # fmt: skip


def kind_of(test: Test) -> str:
    """The name of a test's kind."""
    return next(name for name, kind in KINDS.items() if type(test) is kind)


def arms_of(test: OfRuns) -> tuple[Settings, ...]:
    """The settings of every arm that a test needs, `where` included."""
    b = typing.cast("Settings | None", getattr(test, "b", None))
    return tuple({ALIASES.get(k, k): v for k, v in {**test.where, **arm}.items()} for arm in (test.a, b) if arm)
