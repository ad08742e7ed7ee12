"""A contrast with the variance that the sweep's own tables would take.

Three seeds hardly tell how much runs spread, and a lucky three make an interval that is far too narrow. So the variance
leans on those of the other arms of the setting against the same control (`harness.records.stats.moderation`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from harness.published.claims.evidence import Evidence, numbers
from harness.published.claims.kinds import Settings
from harness.records import stats
from harness.records.arms import CONTEXT
from harness.records.run_result import RunResult
from harness.records.stats.decisions import spread

SETTING = (*CONTEXT, "algo.", "trainer.lr")
"""Beginnings of the names of what arms of one setting share."""


def moderated(
    found: stats.Contrast, evidence: Evidence, arm: Sequence[RunResult], control: Sequence[RunResult], metric: str
) -> stats.Contrast:
    """`found`, `arm` minus `control`, with the variance beside the setting's other arms. It stays as it is where these
    are too few."""
    own = next(setting for setting, runs in evidence.arms if runs[0].run_id == control[0].run_id)
    theirs = numbers(evidence, control, metric, "mean")
    others = [
        stats.contrast(numbers(evidence, runs, metric, "mean"), theirs, is_steady(evidence, runs, metric))
        for setting, runs in evidence.arms
        if runs[0].run_id not in (arm[0].run_id, control[0].run_id) and _shared(setting) == _shared(own)
    ]
    variances, df, _ = spread([found, *others])
    return replace(found, variance=float(variances[0]), df=float(df[0])) if df[0] > found.df else found


def is_steady(evidence: Evidence, runs: Sequence[RunResult], metric: str) -> bool:
    """Did no run collapse at the endpoint of `metric`?"""
    site = "rollout_" if metric.startswith("rollout") else ""
    start, end = (numbers(evidence, runs, name.format(site), "mean") for name in ("base_{}accuracy", "{}accuracy"))
    return not any(stats.is_collapsed(start.get(pair, math.nan), value) for pair, value in end.items())


def _shared(setting: Settings) -> Settings:
    return {name: value for name, value in setting.items() if name.startswith(SETTING)}
