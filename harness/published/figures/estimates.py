"""Means, differences and ratios over bases, with 95 % intervals of Student's t (`harness.records.stats.contrast`).

Values are {(base, run seed): value}; several runs on a base enter by their mean. Ratios are of geometric means: their
interval is that of the logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from harness.records.run_result import Pair
from harness.records.stats import Verdict, contrast, verdict

Values = Mapping[Pair, float]
NOISE = 1e-6
"""Nats of k3 below which two computations of one log-prob agree."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number with its interval; NaN where there is none, bounds also for a single seed."""

    value: float
    low: float
    high: float
    seeds: int

    def cells(self, name: str) -> dict[str, float]:
        """The three columns of a table."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}

    def __str__(self) -> str:
        return bracketed(self.value, self.low, self.high)


def mean(values: Values) -> Estimate:
    """Arithmetic mean over seeds."""
    return difference(values, dict.fromkeys(values, 0.0))


def fraction(values: Values) -> Estimate:
    """Arithmetic mean over seeds of numbers in [0, 1], as are the bounds."""
    found = mean(values)
    low, high = (x if math.isnan(x) else min(max(x, 0.0), 1.0) for x in (found.low, found.high))
    return replace(found, low=low, high=high)


def difference(values: Values, control: Values) -> Estimate:
    """Mean of value minus control over common bases."""
    found = contrast(values, control)
    low, high = found.interval()
    return Estimate(value=found.mean, low=low, high=high, seeds=found.num_units)


def geometric(values: Values) -> Estimate:
    """Geometric mean over seeds of positive numbers; zeros have none and are left out."""
    return ratio(values, dict.fromkeys(values, 1.0))


def floored(values: Values) -> dict[Pair, float]:
    """Mismatches with what is float32 noise raised to `NOISE`, so that a logarithm does not dwell on it."""
    return {pair: max(value, NOISE) for pair, value in values.items()}


def ratio(values: Values, control: Values) -> Estimate:
    """Geometric mean of value over control over common bases where both are above 0."""
    found = difference(_logs(values), _logs(control))
    return Estimate(value=math.exp(found.value), low=math.exp(found.low), high=math.exp(found.high), seeds=found.seeds)


def called(estimate: Estimate) -> Verdict:
    """The verdict on one difference of accuracies, unadjusted: a figure shows each by itself."""
    return verdict(estimate.low, estimate.high)


def _logs(values: Values) -> dict[Pair, float]:
    return {pair: math.log(value) for pair, value in values.items() if value > 0}


def bracketed(value: float, low: float, high: float) -> str:
    """ "value [low, high]" with as many digits as the largest of them asks for; without bounds the value alone."""
    form = digits(max(abs(x) for x in (value, low, high) if not math.isnan(x)) if not math.isnan(value) else 0.0)
    if math.isnan(value):
        return "-"
    return form(value) if math.isnan(low) else f"{form(value)} [{form(low)}, {form(high)}]"


def digits(size: float) -> Callable[[float], str]:
    """Format of numbers of about this size: three digits, never more than three decimals or an exponent."""
    if size == 0 or 0.01 <= size < 10:
        return lambda x: f"{x:.3f}" if size < 1 else f"{x:.2f}"
    return lambda x: f"{x:.0f}" if size >= 100 else f"{x:.1f}" if size >= 10 else f"{x:.1e}"
