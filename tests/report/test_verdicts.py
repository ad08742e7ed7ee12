"""Verdicts in words: what is missing, and what single bases show where the mean is open."""

from __future__ import annotations

import math
from typing import Any

import pytest

from harness.report.tables import LEGEND, NO_CONTROL, WIDTH
from harness.report.verdicts import (
    BELOW_ON,
    LOWER_ON,
    PREFIXES,
    VERDICT_WIDTH,
    legends,
    loss_on_bases,
    num_below,
    num_lower,
    short_verdict,
    shown_verdict,
    verdict_words,
)


def row(prefix: str = "", **values: Any) -> dict[str, Any]:
    """An undecided row of nine bases, on none of which a loss is shown, with other values at one endpoint."""
    plain: dict[str, Any] = {
        "verdict": "cannot tell", "further_seeds": 7.0, "collapse_high": 0.3, "bases": 9, "bases_lower": 0,
        "bases_below": 5, "p_below": 1.0,
    }  # fmt: skip
    sides = dict.fromkeys(PREFIXES.values(), plain) | {prefix: plain | values}
    return {f"{side}{name}": value for side, own in sides.items() for name, value in own.items()}


@pytest.mark.parametrize(
    ("further", "said"),
    [(8.0, "cannot tell (+8)"), (1000.0, "cannot tell (+1000)"), (math.inf, "cannot tell (>1000)"),
     (math.nan, "cannot tell"), (None, "cannot tell")],
)  # fmt: skip
def test_the_seeds_that_are_missing_stand_beside_the_verdict(further: float | None, said: str) -> None:
    row = {"verdict": "cannot tell", "further_seeds": further, "collapse_high": 0.3}
    assert verdict_words(row) == short_verdict()(row) == said
    assert len(said) <= VERDICT_WIDTH and max(map(len, (*LEGEND, BELOW_ON, LOWER_ON, NO_CONTROL))) <= WIDTH


@pytest.mark.parametrize(
    ("values", "below", "lower", "said", "short"),
    [
        ({}, 0, 0, "", "cannot tell (+7)"),
        ({"bases_lower": 1}, 0, 1, "lower on 1 of 9 bases", "lower on 1/9 bases"),
        ({"bases_below": 9, "p_below": 0.04}, 9, 0, "below on 9 of 9 bases", "below on 9/9"),
        ({"bases_below": 9, "p_below": 0.04, "bases_lower": 2}, 9, 2,
         "below on 9 of 9 bases, by 0.03 and more on 2", "below on 9/9"),
        ({"bases_below": 9, "p_below": 0.06}, 0, 0, "", "cannot tell (+7)"),
        ({"bases_below": 0, "p_below": 0.04}, 0, 0, "", "cannot tell (+7)"),  # above its control on every base
        ({"bases": 1, "bases_lower": 1}, 0, 0, "", "cannot tell (+7)"),
        ({"bases_lower": math.nan}, 0, 0, "", "cannot tell (+7)"),
        ({"verdict": "worse", "bases_lower": 3, "bases_below": 9, "p_below": 0.01, "further_seeds": None}, 0, 0, "",
         "worse"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("prefix", ["", "deployed_"])
def test_a_loss_on_single_bases_is_said_first_where_the_mean_is_open(
    values: dict[str, Any], below: int, lower: int, said: str, short: str, prefix: str
) -> None:
    found = row(prefix, **values)
    assert (num_below(found, prefix), num_lower(found, prefix), loss_on_bases(found, prefix)) == (below, lower, said)
    assert shown_verdict(found, prefix) == (f"{said}, the mean open" if said else found[f"{prefix}verdict"])
    assert verdict_words(found, prefix) == (f"{said}, the mean open (+7)" if said else short)
    assert short_verdict(prefix)(found) == short and len(short) <= VERDICT_WIDTH
    other = "deployed_" if prefix == "" else ""
    assert not loss_on_bases(found, other)
    assert legends([found], "below", "lower") == ["below"] * (below > 0) + ["lower"] * (lower > 0 and not below)


def test_each_legend_stands_once() -> None:
    lower, below = row(bases_lower=1), row("deployed_", bases_below=9, p_below=0.01)
    assert legends([lower, below, lower], "below", "lower") == ["below", "lower"]
    assert legends([row()], "below", "lower") == []
