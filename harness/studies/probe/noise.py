"""Sigma of the weight noise that makes the k3 of a format: noise of equal size for runs that compare the two.

k3 grows with sigma, so sigma is bisected (false position in the logarithms, where k3 is nearly a straight line). The
prompts, the draws of the noise and the sampler's random numbers are those of DRAWS fixed seeds at every sigma, so one
sigma has one k3. A single push cannot tell a fixed draw from a fresh one: the sigma is for both. Engine and trainer are
built once; every sigma and seed is a push into them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from harness.config.load import load
from harness.config.resolve import resolve
from harness.config.schema import Launch, RunConfig
from harness.foundation.digits import significant
from harness.run.build import build
from harness.run.checks import check
from harness.studies.dose.points import NOISE
from harness.studies.probe.measure import DIGITS, k3_and_length

METHOD = "weight_noise"
LOW, HIGH = 0.01, 2.0
"""Sigmas that are looked through: BF16 rounding adds as much to less, and more is another model."""
TOLERANCE = 0.03
"""Relative distance of the k3 found from the one wished for."""
TRIES = 15
DRAWS = 4
"""Seeds, of prompts and of noise, that a k3 is the mean of."""
Meter = Callable[[float], tuple[float, float]]
"""Sigma -> (mean k3 of a token, nats; mean tokens of an answer) over the draws."""


def noise_config(sigma: float, overrides: list[str]) -> RunConfig:
    """The run that samples with noise of `sigma`. Raises ValueError for a bad override."""
    return resolve(load([*overrides, f"method={METHOD}", "precision=bf16", f"knobs.{NOISE}.sigma={sigma}"]))


@contextmanager
def noise_meter(config: RunConfig, launch: Launch) -> Iterator[Meter]:
    """The meter of one model, which measures a sigma once. `config` is any of `noise_config`. A measurement raises
    ValueError as `measure` does."""
    run, _ = build(config, launch)

    @cache
    def at(sigma: float) -> tuple[float, float]:
        found = list[tuple[float, float]]()
        for seed in range(DRAWS):
            knobs = {NOISE: {**config.knobs[NOISE], "sigma": sigma}}
            run.config, run.next_prompt = replace(config, seed=seed, knobs=knobs), 0
            run.composed = replace(check(run.config), fixed=run.composed.fixed)
            found.append(k3_and_length(run))
        k3, length = np.array(found).mean(0).tolist()
        return k3, length

    try:
        yield at
    finally:
        run.close()


def noise_like(precision: str, k3: float, at: Meter) -> dict[str, Any]:
    """A row of a probe's record: `precision` and its `k3`, the `sigma` of equal k3 (3 digits), and `kl_k3` and
    `length_mean` at that sigma. Raises ValueError where no sigma has this k3."""
    sigma = sigma_of(k3, lambda sigma: at(sigma)[0])
    found, length = at(sigma)
    row = {"precision": precision, "k3": k3, "sigma": sigma, "kl_k3": found, "length_mean": length, "draws": DRAWS}
    return significant(row, DIGITS)


def sigma_of(k3: float, at: Callable[[float], float]) -> float:
    """The sigma (3 digits) from LOW to HIGH at which `at`, which rises, is `k3` (nats) within TOLERANCE. Raises
    ValueError where it is outside of what LOW and HIGH give, or no sigma of 3 digits comes so near."""
    low, high = LOW, HIGH
    k3_low, k3_high = at(low), at(high)
    if not 0 < k3_low <= k3 <= k3_high:
        raise ValueError(f"--noise-like: a k3 of {k3:.2g} is outside of {k3_low:.2g} to {k3_high:.2g}, what noise of "
                         f"sigma {LOW:g} to {HIGH:g} makes")  # fmt: skip
    for turn in range(TRIES):
        share = (math.log(k3) - math.log(k3_low)) / max(math.log(k3_high) - math.log(k3_low), 1e-9)
        share = 0.5 if turn % 3 == 2 else share  # bisection every third time, so that a bent curve cannot stall it
        sigma = float(f"{low * (high / low) ** share:.3g}")
        found = at(sigma)
        if abs(found - k3) <= TOLERANCE * k3:
            return sigma
        if found < k3:
            low, k3_low = sigma, found
        else:
            high, k3_high = sigma, found
    raise ValueError(f"--noise-like: no sigma from {low:g} to {high:g} has a k3 of {k3:.3g} within {TOLERANCE:.0%}")
