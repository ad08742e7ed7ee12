"""The figure of a sweep's dials: what longer answers, the age of rollouts, updates a batch or the rate cost, by line.

A panel is one dial, a line one method and mode at one precision, everything else as the control without a variant has
it. A point is the mean over bases of the arm's accuracy minus that of the control on the same base, so that lines over
other bases can be compared; small dots are the bases. The control of a length is that of this length, of any other dial
that at its usual setting. Left out: intervals, which the tables have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.records.arms import Arm, label
from harness.records.stats import DELTA
from harness.report.plots.colours import REFERENCE
from harness.report.plots.style import PRECISION_LOOKS, Fill, Look, Looks, legend, looks_of_names, shift_of, style_name
from harness.report.plots.titles import score_words
from harness.report.scores import score_arm

DIALS = {
    "algo.staleness": "age of the rollouts, steps",
    "algo.num_minibatches": "updates a batch",
    "algo.num_epochs": "passes over a batch",
    "trainer.lr": "learning rate",
}
"""Field -> its words, of the dials within a context."""
LENGTH = "task.n"
"""The dial whose values are contexts."""
WORDS = DIALS | {LENGTH: "size of the problems, n"}
"""Words of every dial under an axis."""
FILLS: tuple[Fill, ...] = ("full", "none", "left", "top", "right", "bottom")
"""Filling of the markers, by precision in turn."""
SPREAD = 0.5
"""Width over which the points of one value stand side by side, in steps of the axis."""
MAX_LINES = 16
"""Lines of a panel of lengths beyond which nobody finds one."""
LOSS = 0.15
"""Mean gap from which on a line is named in the title."""
Gaps = tuple[float, ...]
"""Accuracy minus that of the control on the same base, base by base: an arm of more runs on one base counts it once."""
Line = dict[float, Gaps]
"""Value of the dial -> the bases there."""
Lines = dict[tuple[str, str], Line]
"""(precision, method and mode) -> line."""


def along(arms: Sequence[Arm], control: str) -> Figure | None:
    """A panel per dial and context, those of lengths first; None where no line has two points. `control`: method of the
    reference."""
    panels = [(LENGTH, where, found) for where, found in lines_over_lengths(arms, control).items()]
    for context in dict.fromkeys(label(arm.context) for arm in arms):
        inside = [arm for arm in arms if label(arm.context) == context]
        for dial in DIALS:
            found = lines_along(inside, dial, control)
            if any(len(line) > 1 for line in found.values()):
                panels.append((dial, context, found))
    if not panels:
        return None
    names = list(dict.fromkeys(key for _, _, found in panels for key in found))
    looks = _looks(names, looks_of_names([*map(style_name, arms), *(name for _, name in names)], control))
    figure = Figure(figsize=(min(7.6, 3.8 * len(panels) + 0.6), 3.4 + 0.13 * len(names) / 3), layout="constrained")
    axes: Any = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    for ax, (dial, context, found) in zip(axes[0], panels, strict=True):
        _draw(ax, found, looks)
        ax.set_xlabel(WORDS[dial] + (f" ({context})" if context else ""))
        if dial == LENGTH:
            _name_lengths(ax, arms, control)
    usual = "" if all(dial == LENGTH for dial, *_ in panels) else " at its usual setting"
    shown = {context for _, context, _ in panels}
    words = score_words([arm for arm in arms if label(arm.context) in shown] or arms)
    figure.supylabel(f"{words} minus that of\n{control}{usual}, same base", fontsize=8)
    _, title = max(found_along(found, dial, context) for dial, context, found in panels)
    legend(figure, {f"{precision} {name}": look for (precision, name), look in looks.items()}, True, 4, title)
    return figure


def lines_over_lengths(arms: Sequence[Arm], control: str) -> dict[str, Lines]:
    """Context without the length -> lines along the lengths whose plain controls differ in nothing but it and the base;
    a line is an arm that ran at several. Without a context of more than `MAX_LINES`."""
    groups: dict[str, list[Arm]] = {}
    for arm in arms:
        if arm.method == control and not arm.variant and arm.fields.get(LENGTH) is not None:
            rest = {name: v for name, v in arm.fields.items() if name != LENGTH and not name.startswith("base.")}
            groups.setdefault(json.dumps(rest, sort_keys=True), []).append(arm)
    found: dict[str, Lines] = {}
    for plain in groups.values():
        lines: Lines = {}
        for own in plain:
            level = _level(own)
            for arm in arms:
                if arm.context == own.context and arm is not own and (gaps := _gaps(arm, level)):
                    lines.setdefault((arm.precision, style_name(arm)), {})[float(own.fields[LENGTH])] = gaps
        lines = {key: line for key, line in lines.items() if len(line) > 1}
        if 0 < len(lines) <= MAX_LINES:
            found[label({name: v for name, v in plain[0].context.items() if name != LENGTH})] = lines
    return found


def _level(plain: Arm) -> dict[Any, float]:
    """Base -> mean over the runs of an arm."""
    found: dict[Any, list[float]] = {}
    for (base, _), run in score_arm(plain).outcomes["reference"].items():
        found.setdefault(base, []).append(run.value)
    return {base: float(np.mean(values)) for base, values in found.items()}


def _gaps(arm: Arm, level: Mapping[Any, float]) -> Gaps:
    return tuple(value - level[base] for base, value in _level(arm).items() if base in level)


def lines_along(arms: Sequence[Arm], dial: str, control: str) -> Lines:
    """The lines of arms of one context along `dial`: arms that differ from the control's plain one in nothing else that
    is a dial, with more than the control's own value of it. Empty where no control ran.

    Plain is the control without a variant, and where there is none the one with the most arms one dial away from it.
    """

    def is_plainer(arm: Arm) -> tuple[bool, int]:
        away = [sum(arm.fields.get(name) != other.fields.get(name) for name in DIALS) for other in arms]
        return not arm.variant, away.count(1)

    plain = max((arm for arm in arms if arm.method == control), key=is_plainer, default=None)
    if plain is None or dial not in plain.axes:
        return {}
    lines: Lines = {}
    level = _level(plain)
    for arm in arms:
        if any(arm.fields.get(name) != plain.fields.get(name) for name in DIALS if name != dial):
            continue
        value = arm.axes[dial]
        if gaps := _gaps(arm, level):
            name = style_name(arm)
            for words in filter(None, (label({dial: value}), plain.variant)):  # what the axis and all lines say
                name = name.replace(f" {words}", "")
            lines.setdefault((arm.precision, name), {})[float(value or 0)] = gaps
    usual = float(plain.axes[dial] or 0)
    return {key: line for key, line in lines.items() if set(line) != {usual}}


def found_along(lines: Lines, dial: str, context: str = "") -> tuple[float, str]:
    """(largest mean loss at the dial's last value, what the lines do there in words)."""
    last = max(value for line in lines.values() for value in line)
    there = {" ".join(key): float(np.mean(line[last])) for key, line in lines.items() if last in line}
    lost = {name: gap for name, gap in there.items() if gap <= -LOSS}
    rest = [gap for name, gap in there.items() if name not in lost]
    others = f"{_count(len(rest), bool(lost))} by {_span(rest)}" if rest else ""
    verb = "loses" if len(lost) == 1 else "lose"
    said = f"{', '.join(lost)} {verb} {_span([-gap for gap in lost.values()], '')}" if lost else ""
    where = label({dial: last if last % 1 else int(last)}) + (f" ({context})" if context else "")
    return -min(there.values()), f"At {where} " + "; ".join(filter(None, [said, others]))


def _count(number: int, is_rest: bool) -> str:
    """Lines that do not lose, with their verb."""
    if number == 1:
        return "the other differs" if is_rest else "the one line differs"
    return f"the other {number} differ" if is_rest else f"{'both' if number == 2 else f'all {number}'} lines differ"


def _span(values: Sequence[float], sign: str = "+") -> str:
    """The smallest and the largest of some numbers."""
    low, high = (f"{round(value, 2) + 0.0:{sign}.2f}" for value in (min(values), max(values)))  # no "-0.00"
    return low if low == high else f"{low} to {high}"


def _looks(names: Sequence[tuple[str, str]], methods: Looks) -> dict[tuple[str, str], Look]:
    """Colour and marker by method, as in the sweep's other figures; dash and filling by format. No two are alike."""
    fills = dict(zip(dict.fromkeys(precision for precision, _ in names), cycle(FILLS), strict=False))
    return {
        (precision, name): replace(
            methods[name], dash=PRECISION_LOOKS[precision].dash if precision in PRECISION_LOOKS else methods[name].dash,
            fill=fills[precision],
        )
        for precision, name in names
    }  # fmt: skip


def _name_lengths(ax: Axes, arms: Sequence[Arm], control: str) -> None:
    """Write the mean tokens of the control's answers under the sizes, where its evaluations tell them."""
    tokens: dict[str, list[float]] = {}
    for arm in arms:
        if arm.method == control:
            lengths = (run.evals[-1].length_mean for run in arm.runs if run.evals)
            tokens.setdefault(str(arm.fields.get(LENGTH)), []).extend(length for length in lengths if length)
    sizes = [text.get_text() for text in ax.get_xticklabels()]
    words = [f"{size}\n{np.mean(tokens[size]):.0f} tokens" if tokens.get(size) else size for size in sizes]
    ax.set_xticks(ax.get_xticks(), words)


def _draw(ax: Axes, lines: Lines, looks: Mapping[tuple[str, str], Look]) -> None:
    values = sorted({value for line in lines.values() for value in line})
    for index, (key, line) in enumerate(lines.items()):
        look, shift = looks[key], shift_of(index, len(lines), SPREAD)
        points = sorted(line.items())
        at = [values.index(value) + shift for value, _ in points]
        ax.plot(
            at, [float(np.mean(gaps)) for _, gaps in points], color=look.colour, linestyle=look.dash,
            marker=look.marker, fillstyle=look.fill, linewidth=1.0, markersize=3.6,
        )  # fmt: skip
        for x, (_, gaps) in zip(at, points, strict=True):
            ax.plot([x] * len(gaps), gaps, ".", color=look.colour, markersize=2.0, alpha=0.6)
    ax.axhline(0.0, color=REFERENCE, linewidth=0.8, zorder=1)
    ax.axhspan(-DELTA, DELTA, color=REFERENCE, alpha=0.12, zorder=0, linewidth=0)
    ax.set_xticks(range(len(values)), [f"{value:g}" for value in values])
    ax.set_xlim(-0.5, len(values) - 0.5)
    ax.grid(axis="x", visible=False)
