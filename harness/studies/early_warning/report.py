"""The early warnings of sweeps in words, as a table and as figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from harness.foundation.markdown_table import markdown_table
from harness.foundation.number_cell import number_cell, with_interval
from harness.foundation.whole_file import write_atomic
from harness.studies.early_warning.alarms import BASE, REWARD_DROP, SMOOTH, Trace
from harness.studies.early_warning.collapse import FALL, LOSS, WINDOW
from harness.studies.early_warning.scores import MIN_HEALTHY, RATE, SLOW, Score, by_reward, score_all, within_format

NUM_NAMED = 3
"""Signals that get a sentence."""
_share = partial(number_cell, form=".0%")
_number = partial(number_cell, form=".2f")
_steps = partial(with_interval, form=".0f")


def report(runs: Sequence[Trace]) -> tuple[str, list[Score]]:
    """The page, and the scores in it. Raises ValueError where no run collapsed, or too few are healthy."""
    counts = Counter(run.kind for run in runs)
    if not counts["collapsed"] or counts["healthy"] < MIN_HEALTHY:
        raise ValueError(
            f"early warning: {counts['collapsed']} collapsed and {counts['healthy']} healthy runs; it takes at least 1 "
            f"and {MIN_HEALTHY}"
        )
    scores = score_all(runs)
    if not scores:
        raise ValueError(f"early warning: no run collapses after step {SLOW} where other seeds could set a threshold")
    others = {
        "within a format": score_all(within_format(runs)),
        "with hidden losses counted by their reward": score_all(by_reward(runs)),
    }
    return markdown(runs, scores, others), scores


def write(runs: Sequence[Trace], page: str, scores: Sequence[Score], tables: Path, figures: Path) -> list[Path]:
    """Write `early_warning.md` and its figures; the paths."""
    from harness.studies.early_warning.figure import draw

    path = tables / "early_warning.md"
    write_atomic(path, page.encode())
    return [path, *draw(runs, scores, figures)]


def markdown(runs: Sequence[Trace], scores: Sequence[Score], others: Mapping[str, Sequence[Score]]) -> str:
    """The page: runs, findings, and a row per signal; `others` are the scores under other choices, by name."""
    tables = [block for name, found in others.items() for block in (f"## Thresholds {name}", _table(found))]
    blocks = [
        "# Early warning", _about(runs),
        "\n".join(f"- {line}" for line in [*sentences(runs, scores), *firmness(scores, others)]),
        "## Thresholds over all formats of a setting", _table(scores),
        *tables,
        "## How to read it", "\n".join(f"- {line}" for line in READING),
    ]  # fmt: skip
    return "\n\n".join(blocks) + "\n"


READING = (
    f"Collapsed: the sampler's reward (mean of {WINDOW} steps) stays at {FALL:g} of its best so far or less for "
    f"{WINDOW} steps, or the run diverged. Hidden: the reward holds and the policy in the reference precision ends at "
    f"least {LOSS:g} below its start. Declining: the reward ends below its start. Healthy: the rest.",
    f"A level is the mean of {SMOOTH} steps; a drift is the level less the run's own mean over its first {BASE} steps. "
    "`up` and `down` say which way is bad. The reward drop is the share of its best that the reward has lost: a signal "
    "that does not warn before it adds nothing.",
    f"A threshold lets {RATE:.0%} of the healthy runs of other base seeds in the same setting alarm at any step, so "
    "all signals compare at one false-alarm rate; false alarms are those of the held-out seeds.",
    "Recall: alarm before the onset. Lead: median steps from alarm to onset, 0 for a miss. Gain: lead less that of the "
    "reward drop, run by run. First: share of collapses where no other signal alarmed earlier. Brackets: 95 %, arms "
    "resampled with all their seeds. Hidden: share of the hidden losses that alarm at all.",
    f"Recall, lead, gain, precision and first are over collapses from step {SLOW} on; earlier ones leave no time and "
    "are in `fast`. `from bf16, int8`: share of the healthy runs of other formats that would alarm if the 99th "
    "percentile of bf16 and int8 steps were the threshold.",
)


def _about(runs: Sequence[Trace]) -> str:
    counts = Counter(run.kind for run in runs)
    slow = sum(run.onset is not None and run.onset >= SLOW for run in runs)
    return (
        f"{len(runs)} runs of {', '.join(dict.fromkeys(run.context for run in runs))}: {counts['healthy']} healthy, "
        f"{counts['collapsed']} collapsed ({slow} of them from step {SLOW} on), {counts['hidden']} hidden losses, "
        f"{counts['declining']} declining."
    )


def sentences(runs: Sequence[Trace], scores: Sequence[Score]) -> list[str]:
    """The reward first, then the best signals, then who was first, the hidden losses, and thresholds from bf16."""
    by_name = {s.name: s for s in scores}
    signals = [s for s in scores if s.name != REWARD_DROP]
    said: list[str] = []
    drop = by_name.get(REWARD_DROP)
    if drop is not None:
        said.append(
            f"The reward's own drop warns of {_share(drop.recall)} of the collapses, {drop.lead:.0f} steps before "
            f"(median{_ends(drop.lead_low, drop.lead_high)}), at {_share(drop.false_alarms)} false alarms."
        )
    said += [_signal_words(s) for s in sorted(signals, key=lambda s: (-s.gain, -s.recall))[:NUM_NAMED]]
    first = sorted(signals, key=lambda s: -s.first)[:NUM_NAMED]
    said.append("First to move: " + ", ".join(f"{s.name} in {_share(s.first)}" for s in first) + " of the collapses.")
    useless = [s.name for s in signals if s.recall < RATE]
    if useless:
        said.append(f"No better than chance (recall below the {RATE:.0%} of false alarms): {', '.join(useless)}.")
    num_hidden = sum(run.kind == "hidden" for run in runs)
    if num_hidden:
        by_drop = 0.0 if drop is None else drop.hidden
        best = sorted((s for s in signals if s.hidden > by_drop), key=lambda s: -s.hidden)[:NUM_NAMED]
        found = ", ".join(f"{s.name} in {_share(s.hidden)}" for s in best)
        said.append(
            f"Of the {num_hidden} hidden losses "
            + (
                f"the reward's drop alarms in {_share(by_drop)}, the best signals in more: {found}."
                if best
                else f"no signal finds more than the reward's drop: {_share(by_drop)}."
            )
        )
    known = [s.reference_alarms for s in signals if not math.isnan(s.reference_alarms)]
    if known:
        middle = sorted(known)[len(known) // 2]
        verdict = "is no alarm for other formats" if middle > RATE else "serves other formats, too"
        said.append(
            f"A threshold taken from bf16 and int8 runs {verdict}: the median signal then alarms in {_share(middle)} "
            "of their healthy runs."
        )
    return said


def firmness(scores: Sequence[Score], others: Mapping[str, Sequence[Score]]) -> list[str]:
    """Lines on how much of the best signal's gain is due to the choices made here, and to being picked as the best."""
    signals = [s for s in scores if s.name != REWARD_DROP]
    if not signals:
        return []
    best = max(signals, key=lambda s: (s.gain, s.recall))
    found = {name: next((s for s in rows if s.name == best.name), None) for name, rows in others.items()}
    gains = [f"{_steps(s.gain, s.gain_low, s.gain_high)} {name}" for name, s in found.items() if s is not None]
    holds = best.gain_low > 0 and all(s is not None and s.gain_low > 0 for s in found.values())
    verdict = "It holds under each choice" if holds else "It does not hold under every choice: take it as a hint"
    here = _steps(best.gain, best.gain_low, best.gain_high)
    return [
        f"How firm is the best, {best.name}? Its gain over the reward is {here} steps here, {', '.join(gains)}. "
        f"{verdict}. It is also the best of {len(signals)} statistics on the very runs it is reported on, and signals, "
        "scales and classes were settled on these sweeps; only thresholds come from other seeds."
    ]


def _signal_words(s: Score) -> str:
    gain = _ends(s.gain_low, s.gain_high)
    if s.gain_low > 0:
        word = f"{s.gain:.0f} steps before the reward's drop (median{gain})"
    elif s.gain_high < 0:
        word = f"{-s.gain:.0f} steps after the reward's drop"
    else:
        word = f"not clearly before the reward's drop ({s.gain:+.0f} steps{gain})"
    recall, lead = _ends(s.recall_low, s.recall_high, "%"), _ends(s.lead_low, s.lead_high)
    return (
        f"{s.name} warns of {_share(s.recall)} of the collapses{_bracketed(recall)}, "
        f"{s.lead:.0f} steps before{_bracketed(lead)}, {word}, at {_share(s.false_alarms)} false alarms."
    )


def _ends(low: float, high: float, form: str = "f") -> str:
    """`, 95 % 10 to 19`; empty without an interval."""
    return "" if math.isnan(low) else f", 95 % {low:.0{form}} to {high:.0{form}}"


def _bracketed(ends: str) -> str:
    return f" ({ends.removeprefix(', ')})" if ends else ""


def _table(scores: Sequence[Score]) -> str:
    head = (
        "signal", "recall", "lead, steps", "gain, steps", "first", "precision", "false alarms", "fast", "hidden",
        "from bf16, int8", "collapsed", "healthy",
    )  # fmt: skip
    rows = list[list[str]]()
    for s in scores:
        recall = with_interval(s.recall, s.recall_low, s.recall_high, ".2f")
        cells = [
            s.name, recall, _steps(s.lead, s.lead_low, s.lead_high),
            _steps(s.gain, s.gain_low, s.gain_high), _number(s.first), _number(s.precision), _number(s.false_alarms),
            _number(s.recall_fast), _number(s.hidden), _number(s.reference_alarms), str(s.num_collapsed),
            str(s.num_healthy),
        ]  # fmt: skip
        rows.append(cells)
    return markdown_table(head, rows, align="lr")
