"""A smooth surface through noisy trials over two knobs: the kernel mean that the contour figure draws."""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.studies.search.spec import Search

GRID = 40
"""Points per side of the surface."""
BANDWIDTH = 0.15
"""Of the kernel, in units of a knob's range."""


def ends(search: Search, name: str) -> tuple[float, float]:
    """Both ends of a knob's range."""
    knob = search.space[name]
    assert knob.low is not None and knob.high is not None
    return float(knob.low), float(knob.high)


def scaled(search: Search, name: str, value: float) -> float:
    """A value's place in its knob's range, 0 to 1."""
    low, high = ends(search, name)
    if search.space[name].log:
        return float(np.log(value / low) / np.log(high / low))
    return (value - low) / (high - low)


def smoothed(points: Any, values: Any) -> Any:
    """Gaussian kernel mean of values [N] at points [N, 2] on the unit square: [GRID, GRID]."""
    side = np.linspace(0, 1, GRID)
    grid = np.stack(np.meshgrid(side, side, indexing="ij"), -1).reshape(-1, 1, 2)
    distance = ((grid - points[None]) ** 2).sum(-1) / (2 * BANDWIDTH**2)
    weights = np.exp(-(distance - distance.min(1, keepdims=True)))
    return ((weights * values).sum(1) / weights.sum(1)).reshape(GRID, GRID)
