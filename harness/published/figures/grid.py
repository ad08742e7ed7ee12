"""The figure of the product itself: speed, mismatch and accuracy of every format and method, by size and length.

One heat map per measure; rows are arms, columns are sizes within lengths. Speed and accuracy are against bf16; speed on
real kernels within one commit alone, for an engine gets faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from harness.published.figures.estimates import difference, floored, geometric, ratio
from harness.published.figures.records import auc, summary, value_of
from harness.records.arms import Arm, control_of, rank
from harness.report.plots.colours import GREY_25, INK, NOTE
from harness.report.plots.style import STYLE
from harness.studies.break_even.costs import emulates, timed_code

SIZES = ("xs", "s", "m", "l")
ModelAndLength = tuple[str, int]
"""(size, length)."""
Row = tuple[str, str]
"""(precision, method)."""


@dataclass(frozen=True, kw_only=True)
class Square:
    """A number of one arm; `is_clear` where its interval leaves out no difference."""

    value: float
    is_clear: bool = False


def places_of(arms: Sequence[Arm]) -> list[ModelAndLength]:
    """Every (size, length), by length and then size; empty where the sweep does not vary both."""
    found = {place_of(arm) for arm in arms}
    if len({size for size, _ in found}) < 2 or len({n for _, n in found}) < 2:
        return []
    order = [*SIZES, *sorted({size for size, _ in found} - set(SIZES))]
    return sorted(found, key=lambda place: (place[1], order.index(place[0])))


def place_of(arm: Arm) -> ModelAndLength:
    """Place of an arm: model size and task length."""
    return str(arm.fields.get("model.name")), int(arm.fields.get("task.n") or 0)


def draw_grid(arms: Sequence[Arm], control: str) -> Figure | None:
    """Heat maps of speed (measured on real kernels alone), mismatch and accuracy of the usual arms; None for a sweep
    that does not vary both size and length with them."""
    usual = {(place_of(arm), arm.precision, arm.method): arm for arm in arms if not arm.variant and place_of(arm)[1]}
    places = places_of(list(usual.values()))
    rows: list[Row] = sorted({(arm.precision, arm.method) for arm in usual.values()}, key=lambda r: _order(r, control))
    if not places or not rows:
        return None

    def cells(measure: Callable[[Arm, Arm | None], Square]) -> list[list[Square]]:
        return [
            [
                measure(arm, control_of(arm, arms, control))
                if (arm := usual.get((place, *row)))
                else Square(value=math.nan)
                for place in places
            ]
            for row in rows
        ]

    gaps = cells(_accuracy)
    maps: list[tuple[str, list[list[Square]], str, Normalize, str]] = [
        ("Mismatch, median k3 in nats", cells(_mismatch), "viridis_r", LogNorm(1e-5, 1.0), "e"),
        (f"AUC minus that of {control}", gaps, "PuOr", Normalize(-0.5, 0.5), "{:+.2f}"),
    ]
    note = ""
    if not all(emulates(run) for arm in usual.values() for run in arm.runs):  # an emulated format has no speed
        maps.insert(0, ("Rollout speed over bf16", cells(_speed), "cividis", Normalize(0.5, 1.5), "{:.2f}"))
        note = " Cells shared a machine: the first map says nothing about hardware."
    with mpl.rc_context(fname=STYLE):
        figure = Figure(figsize=(2.87 * len(maps), 0.2 * len(rows) + 1.5), layout="constrained")
        axes: Any = figure.subplots(1, len(maps), sharey=True)
        figure.suptitle(_finding(rows, places, gaps, control), fontsize=8.5, fontweight="bold", x=0.01, ha="left")
        for ax, (title, values, colours, norm, form) in zip(axes, maps, strict=True):
            _heat_map(ax, values, colours, norm, form)
            ax.set_title(title)
            _columns(ax, places)
        axes[0].set_yticks(range(len(rows)), [f"{p}  {m}" for p, m in rows], fontsize=6.5)
        figure.supxlabel(
            f"Model size within problem size n, {_seeds(arms)}. Bold: the 95 % interval leaves out 0.{note}",
            fontsize=6.5, color=NOTE, x=0.01, ha="left",
        )  # fmt: skip
    return figure


def _finding(rows: Sequence[Row], places: Sequence[ModelAndLength], gaps: list[list[Square]], control: str) -> str:
    """The largest loss of all arms, and the format whose arms lose least at most."""
    known = [(gap.value, row, place) for row, line in zip(rows, gaps, strict=True)
             for place, gap in zip(places, line, strict=True) if math.isfinite(gap.value)]  # fmt: skip
    if not known:
        return ""
    value, (precision, method), (size, n) = min(known)
    worst = {p: min(v for v, (own, _), _ in known if own == p) for p in dict.fromkeys(p for _, (p, _), _ in known)}
    mild = max(worst, key=lambda p: worst[p])
    return (
        f"{precision} {method} loses most against {control} ({value:+.2f}, size {size}, n={n});\n"
        f"{mild} loses least ({worst[mild]:+.2f} at worst)"
    )


def _seeds(arms: Sequence[Arm]) -> str:
    counts = sorted({len(arm.runs) for arm in arms})
    return f"{' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} seed{'s' * (counts[-1] != 1)}"


def _order(row: Row, control: str) -> tuple[Any, ...]:
    precision, method = row
    order = ("naive", "flashrl", "qurl")
    return method != control, rank(precision), order.index(method) if method in order else len(order), method


def _speed(arm: Arm, control: Arm | None) -> Square:
    if control is None:
        return Square(value=math.nan)
    own, other = (value_of(a, lambda run: run.tokens_per_s.get("rollout")) for a in (arm, control))
    codes = [{run.pair: timed_code(run) for run in a.runs} for a in (arm, control)]
    at = {pair for pair in own if codes[0][pair] == codes[1].get(pair)}
    return Square(value=ratio({pair: own[pair] for pair in at}, other).value)


def _mismatch(arm: Arm, control: Arm | None) -> Square:
    return Square(value=geometric(floored(summary(arm, "k3_median"))).value)


def _accuracy(arm: Arm, control: Arm | None) -> Square:
    if control is None or control is arm:
        return Square(value=math.nan)
    found = difference(auc(arm), auc(control))
    return Square(value=found.value, is_clear=found.low > 0 or found.high < 0)


def _heat_map(ax: Axes, cells: list[list[Square]], colours: str, norm: Any, form: str) -> None:
    values = np.array([[cell.value for cell in row] for row in cells])
    image = ax.imshow(np.ma.masked_invalid(values), cmap=colours, norm=norm, aspect="auto")
    for y, row in enumerate(cells):
        for x, cell in enumerate(row):
            known = math.isfinite(cell.value)
            red, green, blue, _ = tuple(image.to_rgba(np.array([cell.value]))[0]) if known else (1.0, 1.0, 1.0, 1.0)
            ink = "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else INK
            text = _short(cell.value, form) if known else "·"
            weight = "bold" if cell.is_clear else "normal"
            ax.text(x, y, text, ha="center", va="center", fontsize=5.2, color=ink, fontweight=weight)


def _short(value: float, form: str) -> str:
    """Two digits where a cell is narrow: 2e-3 as 2e-3, 0.05 as .05."""
    if form == "e":
        mantissa, exponent = f"{value:.0e}".split("e")
        return f".{round(100 * value):02d}" if 0.01 <= value < 0.995 else f"{mantissa}e{int(exponent)}"
    return form.format(value).replace("0.", ".")


def _columns(ax: Axes, places: Sequence[ModelAndLength]) -> None:
    """Sizes below the columns, lengths above them, a white line between lengths."""
    ax.set_xticks(range(len(places)), [size for size, _ in places])
    lengths = [n for _, n in places]
    for n in dict.fromkeys(lengths):
        first, count = lengths.index(n), lengths.count(n)
        ax.text(first + (count - 1) / 2, -0.62, f"n={n}", ha="center", va="bottom", fontsize=6.5, color=GREY_25)
        ax.axvline(first - 0.5, color="white", linewidth=2)
    ax.grid(visible=False)
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.set_title(ax.get_title(loc="left"), pad=14)
