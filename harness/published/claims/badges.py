"""Badges of claims: the outcome that an interval allows, and what it says of the claim.

    expected    supported          contradicted       (threshold t, margin m, 95 % interval)
    above       low > t            high < t           unless equal, below
    below       high < t           low > t            unless equal, below
    equal       t - m < interval < t + m              interval beyond t - m or t + m
    not_below   low > t - m        high < t - m
    not_above   high < t + m       low > t + m

Every other outcome is "undecided": the data cannot tell, or show no difference where one is claimed. An interval inside
t - m and t + m shows none, whichever side of t it lies on.

The outcome of a test outside the claim's domain (`domains.py`) is the badge "out of domain" whatever it is. Inside, a
claim about a larger setting than ours is at most "direction supported".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

from harness.published.claims.kinds import Expect

Outcome = Literal["supported", "undecided", "contradicted", "not testable here"]
Badge = Literal[
    "supported", "direction supported", "undecided", "contradicted in its own domain", "out of domain",
    "not testable here",
]  # fmt: skip
BADGES: tuple[Badge, ...] = get_args(Badge)
"""In the order of the summary."""


def judge(low: float, high: float, expect: Expect, threshold: float, margin: float) -> Outcome:
    """The outcome of one interval. All in the unit of the interval."""
    assert not math.isnan(low) and not math.isnan(high)
    floor, ceiling = threshold - margin, threshold + margin
    if expect in ("above", "below") and is_equal(low, high, threshold, margin):
        return "undecided"
    is_supported = {
        "above": low > threshold,
        "below": high < threshold,
        "equal": is_equal(low, high, threshold, margin),
        "not_below": low > floor,
        "not_above": high < ceiling,
    }[expect]
    is_contradicted = {
        "above": high < threshold,
        "below": low > threshold,
        "equal": high < floor or low > ceiling,
        "not_below": high < floor,
        "not_above": low > ceiling,
    }[expect]
    return "supported" if is_supported else "contradicted" if is_contradicted else "undecided"


def is_equal(low: float, high: float, threshold: float, margin: float) -> bool:
    """Does the interval show that there is no difference that matters?"""
    return threshold - margin < low and high < threshold + margin


def badge_of(outcome: Outcome, is_own: bool, scale: Literal["same", "smaller"]) -> Badge:
    """The badge that an outcome gives, inside the claim's domain (`is_own`) or not."""
    if outcome == "not testable here":
        return outcome
    if not is_own:
        return "out of domain"
    if outcome == "supported":
        return "direction supported" if scale == "smaller" else outcome
    return "contradicted in its own domain" if outcome == "contradicted" else outcome


def counts(badges: Sequence[Badge]) -> dict[Badge, int]:
    """Badge -> how many claims have it, in the order of BADGES, zeros left out."""
    return {badge: badges.count(badge) for badge in BADGES if badge in badges}
