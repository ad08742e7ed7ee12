"""Verdicts in words, and what single bases show where the mean over bases is open.

An arm whose mean cannot be told may be shown to lose on single bases, where the noise of a run is known, or to be below
its control on most of them, by a sign test. Tables, figures, the site and MLflow say that first. Rows are those of the
leaderboard; a prefix chooses the endpoint, "" the BF16 policy and "deployed_" the policy as deployed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from harness.records import stats

Row = Mapping[str, Any]
PREFIXES = {"reference": "", "rollout": "deployed_"}
"""Site of an evaluation -> prefix of the leaderboard's columns."""
SIGN_LEVEL = 0.05
"""Level of the sign test over bases, times the arms of a context."""
VERDICT_WIDTH = 19
"""Columns of a verdict in a terminal."""
BELOW = (
    "Below on x of n bases, the mean open: an exact sign test over bases says, at 5 % over all arms of the setting, "
    "that the arm is below its control on most bases. A few far larger losses, which widen the interval of the mean, "
    f"do not weaken this test. By {stats.DELTA:g} and more on y: so large a loss is shown on y single bases."
)
LOWER = (
    f"Lower on x of n bases, the mean open: on x single bases a loss of {stats.DELTA:g} and more is shown, so the arm "
    "does not keep the accuracy on every base. What it loses on average over bases cannot be told."
)
BELOW_ON = "below on x/n: the mean is open, but on so many bases it is below its control (sign test, 5 %)."
LOWER_ON = f"lower on x/n bases: the mean is open, but on so many single ones it is lower by {stats.DELTA:g} and more."


def num_below(row: Row, prefix: str = "") -> int:
    """Single bases on which an undecided arm is below its control; 0 where the sign test does not say that it is below
    on most."""
    below, p = row.get(f"{prefix}bases_below", 0), row.get(f"{prefix}p_below", 1.0)
    is_open = row[f"{prefix}verdict"] == "cannot tell" and p <= SIGN_LEVEL and 2 * below > row[f"{prefix}bases"]
    return int(below) if is_open else 0


def num_lower(row: Row, prefix: str = "") -> int:
    """Single bases on which an undecided arm is lower; 0 where there is one base, whose mean is the mean over bases."""
    lower = row.get(f"{prefix}bases_lower", 0)
    is_open = row[f"{prefix}verdict"] == "cannot tell" and lower > 0 and row[f"{prefix}bases"] > 1
    return int(lower) if is_open else 0


def loss_on_bases(row: Row, prefix: str = "") -> str:
    """Loss of an undecided arm on single bases, "lower on 2 of 5 bases" or "below on 12 of 12 bases, by 0.03 and more
    on 2"; empty where none is shown."""
    below, lower = num_below(row, prefix), num_lower(row, prefix)
    if below:
        words = f"below on {below} of {row[f'{prefix}bases']:.0f} bases"
        return f"{words}, by {stats.DELTA:g} and more on {lower}" if lower else words
    return f"lower on {lower} of {row[f'{prefix}bases']:.0f} bases" if lower else ""


def shown_verdict(row: Row, prefix: str = "") -> str:
    """A verdict as it is shown: where the mean is open and a loss is shown on single bases, that first."""
    words = loss_on_bases(row, prefix)
    return f"{words}, the mean open" if words else str(row[f"{prefix}verdict"])


def verdict_words(row: Row, prefix: str = "") -> str:
    """A verdict as tables print it: with the seeds that are missing; "equal" has its bound on collapse."""
    words = shown_verdict(row, prefix)
    if words == "equal":
        words += f" (collapse {row[f'{prefix}collapse']})"
    return f"{words} {stats.further(row[f'{prefix}further_seeds'])}".rstrip()


def short_verdict(prefix: str = "") -> Callable[[Row], str]:
    """A verdict in at most `VERDICT_WIDTH` columns, for a terminal."""

    def show(row: Row) -> str:
        words, bound = row[f"{prefix}verdict"], row[f"{prefix}collapse_high"]
        if words == "equal":
            return f"equal, falls ≤{bound:.0%}"
        if words.startswith(stats.COLLAPSES):
            return words.replace(f"{stats.COLLAPSES} in ", "falls ").replace(" of ", "/").replace("else ", "")
        if below := num_below(row, prefix):
            return f"below on {below}/{row[f'{prefix}bases']:.0f}"
        if lower := num_lower(row, prefix):
            words = f"lower on {lower}/{row[f'{prefix}bases']:.0f} bases"
            return words if len(words) <= VERDICT_WIDTH else words.removesuffix(" bases")
        return verdict_words(row, prefix)

    return show


def legends(rows: Iterable[Row], below: str, lower: str) -> list[str]:
    """Legends of the words on single bases: `below` and `lower`, each where a row has such a word."""
    sides = [(row, prefix) for row in rows for prefix in PREFIXES.values()]
    has_below = any(num_below(*side) for side in sides)
    has_lower = any(num_lower(*side) and not num_below(*side) for side in sides)
    return [below] * has_below + [lower] * has_lower
