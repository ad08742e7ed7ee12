"""Sentences on a sweep's table: where the scores disagree, what fell below its start, and what was expected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pandas as pd

from harness.records.stats import DELTA, MIN_SEEDS
from harness.records.stats.outcomes import COLLAPSES
from harness.records.sweep_file import BASELINES, Expectation
from harness.report.verdicts import loss_on_bases, num_below
from methods import METHODS

EXPECTED_WITHIN = 0.05
"""Scores that are expected to be close are at most this far apart."""


def findings(board: pd.DataFrame, expectations: Sequence[Expectation] = ()) -> list[str]:
    """Sentences about a leaderboard, strongest first; on point estimates, the verdict column has the intervals."""
    lines: list[str] = []
    for context, rows in board.groupby("context", sort=False):
        where = f" ({context})" if context else ""
        lines += [line + where for line in [*_collapses(rows), *_reversals(rows)]]
    return lines + _expectations(board, expectations)


def three_sentences(board: pd.DataFrame, baseline: str = BASELINES[-1]) -> list[str]:
    """Sentences on what uncorrected rollouts cost, what a correction gives back, and what cost nothing; per context.

    Losses are the decided ones, in the mean accuracy of the BF16 policy over the runs that did not collapse. The share
    given back is that of the best corrected arm at the format that lost most. A variant that all rows of a context have
    belongs to it.
    """
    lines: list[str] = []
    for context, rows in board.groupby("context", sort=False):
        lines += _collapsing_settings(rows, f", {context}" if context else "")
        variants = list(dict.fromkeys(rows["variant"]))
        shared = variants[0] if len(variants) == 1 else ""
        rows = rows.assign(variant="") if shared else rows
        where = "".join(f", {words}" for words in (context, shared) if words)
        plain = [row for row in rows.to_dict("records") if not row["variant"] and not math.isnan(row["difference"])]
        bare = [row for row in plain if row["method"] == baseline]
        if not bare:
            continue
        if all(row["is_preliminary"] for row in bare):
            lines.append(f"Fewer than {MIN_SEEDS} seeds{where}: nothing is decided yet.")
            continue
        lost = sorted((row for row in bare if row["verdict"].endswith("worse")), key=lambda row: row["difference"])
        if lost:
            each = [f"{-row['difference']:.2f} ({spelled(row['precision'])})" for row in lost]
            lines.append(
                f"{spelled(lost[0]['precision'])} rollouts without a correction lost {-lost[0]['difference']:.2f} of "
                f"accuracy{where}."
                if len(lost) == 1
                else f"Rollouts without a correction lost {_list(each)} of accuracy{where}."
            )
        else:
            lines.append(_none_lost(rows, baseline, where))
        lines += [_fallen(row) for row in bare if row["verdict"].startswith(COLLAPSES)]
        if lost:
            lines.append(_given_back(lost[0], plain, baseline))
        lines += _free(bare)
    return lines


def _collapsing_settings(rows: pd.DataFrame, where: str) -> list[str]:
    """A sentence for every variant in which all runs of some arm collapse and all of another stand, if both have seeds
    enough. The control's rows count too."""
    lines: list[str] = []
    seeded = [row for row in rows.to_dict("records") if row["variant"] and not row["is_preliminary"]]
    for variant in dict.fromkeys(row["variant"] for row in seeded):
        counts = {
            f"{row['method']} {row['precision']}": str(row["collapse"]).partition(":")[0].split(" of ")
            for row in seeded if row["variant"] == variant and row["collapse"] != "-"  # "-": no run was evaluated
        }  # fmt: skip
        fallen = [name for name, (few, runs) in counts.items() if few == runs]
        standing = [name for name, (few, _) in counts.items() if few == "0"]
        if fallen and standing:
            lines.append(
                f"With {variant}{where} every run of {_list(fallen)} collapses, and none of {_list(standing)}."
            )
    return lines


def _none_lost(rows: pd.DataFrame, baseline: str, where: str) -> str:
    """Words where no uncorrected arm of the usual settings is shown to lose, with those of other settings that are."""
    bare = [row for row in rows.to_dict("records") if row["method"] == baseline]
    worse = [row for row in bare if row["variant"] and row["verdict"].endswith("worse")]
    lost = [f"{row['arm']} ({row['difference']:+.2f})" for row in worse]
    usual = " at the usual settings" if lost else ""
    beside = f"; at others {_list(lost)} {'does' if len(lost) == 1 else 'do'}" if lost else ""
    first = "Where runs do not collapse, no" if any(row["verdict"].startswith(COLLAPSES) for row in bare) else "No"
    mean = " on average over bases" if any(row.get("bases_lower", 0) > 0 or num_below(row) for row in bare) else ""
    return f"{first} rollout format without a correction is shown to lose accuracy{mean}{where}{usual}{beside}."


def _fallen(row: dict[str, Any]) -> str:
    """Number of runs of a format that collapsed, and what is known of the others."""
    runs, _, rest = row["verdict"].removeprefix(f"{COLLAPSES} in ").partition(", else ")
    undecided = f", undecided{_lower_on(row)}"
    known = {"worse": "", "better": ", which gained", "equal": f", at most {DELTA:g} apart"}.get(rest, undecided)
    return (
        f"{spelled(row['precision'])} collapsed in {runs} runs; the others differ by {row['difference']:+.2f}{known}."
    )


def _lower_on(row: dict[str, Any]) -> str:
    """The single bases on which a format loses, in brackets; empty where it is on none, or none was judged."""
    least, most = (row.get(f"base_loss_{end}", math.nan) for end in ("least", "most"))
    if math.isnan(least):
        return ""
    by = f"{least:.2f}" if f"{least:.2f}" == f"{most:.2f}" else f"{least:.2f} to {most:.2f}"
    return f" (it loses {by} on {row['bases_lower']:.0f} of {row['bases']:.0f} bases)"


def _open(row: dict[str, Any]) -> str:
    """Words for a format whose mean loss is not decided: where the sign test says so, that it loses on most bases."""
    below = num_below(row)
    said = f"is below its control on {below} of {row['bases']:.0f} bases{_lower_on(row)} and its mean loss is undecided"
    return said if below else f"is undecided{_lower_on(row)}"


def _given_back(worst: dict[str, Any], plain: Sequence[dict[str, Any]], baseline: str) -> str:
    others = [
        row for row in plain
        if row["precision"] == worst["precision"] and row["method"] != baseline and not row["is_preliminary"]
    ]  # fmt: skip
    if not others:
        return f"No corrected arm of {spelled(worst['precision'])} with {MIN_SEEDS} seeds stands beside it."
    best = max(others, key=lambda row: row["difference"])
    share = (best["difference"] - worst["difference"]) / -worst["difference"]
    name = METHODS[best["method"]].plain_name if best["method"] in METHODS else ""
    words = name or best["method"]
    if share <= 0:
        return f"{words} gave back nothing of the {-worst['difference']:.2f}."
    part = "more than half" if share > 0.5 else "less than half"
    fell = best["verdict"].startswith(COLLAPSES)
    fallen = f"; {best['collapse'].partition(':')[0]} runs with it collapsed and are left out" if fell else ""
    return f"{words} gave back {part} of the {-worst['difference']:.2f} ({100 * share:.0f} %){fallen}."


def _free(bare: Sequence[dict[str, Any]]) -> list[str]:
    """The uncorrected formats that cost nothing that matters, show no cost, or whose loss is not decided."""
    equal = [spelled(row["precision"]) for row in bare if row["verdict"] == "equal"]
    open_rows = [row for row in bare if row["verdict"] == "cannot tell"]
    single = [row for row in open_rows if loss_on_bases(row)]
    others = [row for row in open_rows if row not in single]
    unseen = [spelled(row["precision"]) for row in others if row["difference"] > -DELTA]
    undecided = [
        f"{spelled(row['precision'])} ({row['difference']:+.2f})" for row in others if row["difference"] <= -DELTA
    ]
    said = [f"{_list(equal)} cost at most {DELTA:g}"] if equal else []
    said += [f"{_list(unseen)} cost nothing that can be seen with these seeds"] if unseen else []
    said += [f"{_list(undecided)} {'is' if len(undecided) == 1 else 'are'} undecided"] if undecided else []
    said += [f"{spelled(row['precision'])} {_open(row)}" for row in single]
    return [f"{'; '.join(said)}."] if said else []


def spelled(precision: str) -> str:
    """A precision as prose has it: `int4` is INT4 (4-bit), `fp8_block` FP8 in blocks."""
    plain, _, cache = precision.partition("+")
    words = {"fp8_block": "FP8 (blocks)", "fp8_channel": "FP8 (channels)", "fp8_tensor": "FP8 (tensors)"}
    name = words.get(plain, plain.upper().replace("_", " "))
    four = "4-bit " if plain.endswith("4") else ""
    return four + name + (" with an FP8 cache" if cache == "kv8" else "")


def _list(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _collapses(rows: pd.DataFrame) -> list[str]:
    return [
        f"{row['arm']}: training ends below its start, {row['accuracy']:.2f} against {row['base_accuracy']:.2f}"
        for row in rows.to_dict("records")
        if row["accuracy"] < row["base_accuracy"]
    ]


def _reversals(rows: pd.DataFrame) -> list[str]:
    """Sentences on arms of one precision and as many runs that the two accuracies rank in opposite orders, by more than
    the margin of equality in both; per precision the clearest pair."""
    lines: list[str] = []
    for precision, group in rows.groupby("precision", sort=False):
        clearest, line = DELTA, ""
        for a, b in permutations(group.to_dict("records"), 2):
            if a["seeds"] != b["seeds"]:
                continue
            gain, loss = a["accuracy"] - b["accuracy"], b["rollout_accuracy"] - a["rollout_accuracy"]
            if min(gain, loss) > clearest:
                clearest = min(gain, loss)
                line = (
                    f"{precision}: {a['arm']} is ahead of {b['arm']} in the reference precision (by {gain:.2f}) "
                    f"and behind it in the rollout format (by {loss:.2f})"
                )
        lines += [line] if line else []
    return lines


def _expectations(board: pd.DataFrame, expectations: Sequence[Expectation]) -> list[str]:
    """Sentences on every expectation, one a context that has its arms, or that none has both."""
    lines: list[str] = []
    for expected in expectations:
        found: list[str] = []
        for context, rows in board.groupby("context", sort=False):
            index = {f"{r['method']} {r['precision']} {r['variant']}".strip(): r for r in rows.to_dict("records")}
            low, high = (index.get(arm, {}).get(expected.score, math.nan) for arm in (expected.low, expected.high))
            if not math.isnan(high - low):
                is_held = abs(high - low) <= EXPECTED_WITHIN if expected.is_close else low < high
                word, where = "as expected" if is_held else "NOT as expected", f" ({context})" if context else ""
                found.append(f"{word}: {expected.text} ({expected.score} {low:.2f} and {high:.2f}){where}")
        missing = f"no {expected.score} of both {expected.low} and {expected.high} in one table"
        lines += found or [f"not judged: {expected.text} ({missing})"]
    return lines
