"""Noise of AQN by step, and the share of it that a 16-bit number can hold (QeRL, arXiv 2510.11696, eq. 8, 10).

A run of M policy steps has K stages. Stage 0 is without noise, then sigma falls from `start` to `end`. The paper and
its code disagree on where stages end and on whether `end` is reached, so both are here. The code divides in
floating point; the integer divisions here are what it means. Of the decays only the exponential one is given as a
formula; the others are reconstructed from figures.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Definition = Literal["trainer", "repo", "paper"]
"""trainer: the authors' noise_scheduler.py as their trainer calls it, with steps counted from 1, reaches `end`; repo:
the same with steps counted from 0; paper: eq. 8 with Algorithm 1, does not reach it."""
Decay = Literal["exponential", "linear", "cosine", "logarithmic"]


def stage(index: int, total: int, num_stages: int, definition: Definition) -> int:
    """The stage of the policy step that `index` (0, 1, ...) steps of `total` came before.

    trainer: 0..K, each stage one step earlier than repo's, so that K is reached in the last step; repo: K only past the
    end of the run; paper: 0..K-1, its t is index + 1.
    """
    if definition == "paper":
        return min(index // max(1, total // num_stages), num_stages - 1)
    return min(index + (definition == "trainer"), total) * num_stages // max(1, total)


def decayed(u: float, start: float, end: float, decay: Decay) -> float:
    """sigma at progress u, 0 at the first noisy stage and 1 at `end`."""
    if decay == "exponential":
        return start * (end / start) ** u
    if decay == "cosine":
        return end + (start - end) * (1.0 + math.cos(math.pi * u)) / 2.0
    return start + (end - start) * (u if decay == "linear" else math.log1p(9.0 * u) / math.log(10.0))


def stage_sigma(
    at: int,
    *,
    num_stages: int,
    start: float,
    end: float,
    definition: Definition = "trainer",
    decay: Decay = "exponential",
) -> float:
    """sigma of a stage: 0 at stage 0 and where `start` is 0. With two stages the second has `start`."""
    if at == 0 or start == 0.0:
        return 0.0
    last = num_stages - (1 if definition == "paper" else 2)
    passed = min(at - 1, num_stages - 2)
    return decayed(passed / max(1, last), start, end, decay)


def survival(gain: Tensor, sigma: float, dtype: torch.dtype) -> Tensor:
    """P(cast(gain + Z) != gain) for Z ~ N(0, sigma^2) and each gain [...] that is a number of `dtype`: float64 [...].

    That is P(|Z| > half the spacing of `dtype` at the gain).
    """
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(gain.detach().to(torch.float64).abs().clamp(min=info.tiny))
    half = torch.ldexp(torch.full_like(exponent, 0.25 * info.eps, dtype=torch.float64), exponent)
    return torch.zeros_like(half) if sigma == 0.0 else torch.erfc(half / (sigma * math.sqrt(2.0)))
