"""Figures of a search, from its stored study: history, importance, slices, contours, Pareto fronts.

Shares of the budget have panels of their own, since each was searched for itself. Trials outside the constraint are
hollow everywhere; trials that were given up have no value and are ticks at the lower edge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from optuna.trial import FrozenTrial, TrialState

from harness.report.plots.style import COLOURS, INK
from harness.studies.search.confirm import Trials, best_of, is_feasible, values_of
from harness.studies.search.front import on_front
from harness.studies.search.importance import SHUFFLES, Importance, importances
from harness.studies.search.pruning import oriented
from harness.studies.search.spec import Objective, Search
from harness.studies.search.surface import GRID, ends, scaled, smoothed
from harness.studies.search.table import read_trials

STYLE = Path(__file__).parents[2] / "report" / "plots" / "plot_style.mplstyle"
WIDTH = 6.75


def draw_search(
    search: Search, results: Path, formats: Sequence[str] = ("png",), shuffles: int = SHUFFLES
) -> list[Path]:
    """Draw every figure into `figures/<name>/`: their paths. A figure that has nothing to show yet is left out."""
    trials = read_trials(search, results)
    folder = results / "figures" / search.name
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    with mpl.rc_context(fname=STYLE):
        found = importances(search, trials, shuffles)
        draws: dict[str, Callable[[], Figure | None]] = {
            "history": lambda: history(search, trials),
            "importance": lambda: importance(search, found),
            "slice": lambda: slices(search, trials),
            "contour": lambda: contours(search, trials, found),
            "pareto": lambda: fronts(search, trials),
        }
        for name, draw in draws.items():
            figure = draw()
            for kind in formats if figure is not None else ():
                assert figure is not None
                path = folder / f"{name}.{kind}"
                temporary = path.with_name(f".{path.name}.part")
                figure.savefig(temporary, format=kind, metadata={} if kind == "png" else {"Date": None})
                paths.append(temporary.replace(path))
    return paths


def _complete(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    return [trial for trial in trials if trial.state == TrialState.COMPLETE]


def _grid(count: int, height: float = 2.0, columns: int = 2) -> tuple[Figure, list[Axes]]:
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(WIDTH, height * rows + 0.5), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes[count:]:
        ax.set_axis_off()
    return figure, axes[:count]


def _dots(ax: Axes, x: Sequence[float], y: Sequence[float], filled: Sequence[bool], colour: str, size: float) -> None:
    faces = [colour if solid else "none" for solid in filled]
    ax.scatter(x, y, s=size, facecolors=faces, edgecolors=colour, linewidths=0.8, zorder=2)


def _legend(figure: Figure, entries: Sequence[tuple[str, dict[str, Any]]]) -> None:
    handles = [Line2D([], [], **({"linestyle": ""} | look), label=label) for label, look in entries]  # pyright: ignore
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))


def history(search: Search, trials: Trials) -> Figure | None:
    """The first objective of every trial in the order they ended, and the best feasible one so far."""
    if not any(_complete(found) for found in trials.values()):
        return None
    objective = search.objectives[0]
    figure, axes = _grid(len(trials))
    for ax, (share, found), colour in zip(axes, trials.items(), COLOURS * 4, strict=False):
        ended = [t for t in found if t.state in (TrialState.COMPLETE, TrialState.PRUNED)]
        ended.sort(key=lambda t: (t.datetime_complete is None, t.datetime_complete))
        order = {trial.number: index for index, trial in enumerate(ended, 1)}
        whole = _complete(ended)
        _dots(ax, [order[t.number] for t in whole], [t.values[0] for t in whole], [is_feasible(t) for t in whole],
              colour, 12)  # fmt: skip
        pruned = [order[t.number] for t in ended if t.state == TrialState.PRUNED]
        edge = ax.get_xaxis_transform()
        ax.plot(pruned, [0.03] * len(pruned), "|", color="#707070", markersize=5, transform=edge)
        best = [best_of(search, ended[:end]) for end in range(1, len(ended) + 1)]
        steps = [(i, b.values[0]) for i, b in enumerate(best, 1) if b is not None]
        ax.step([i for i, _ in steps], [v for _, v in steps], where="post", color=INK, linewidth=1.0)
        base = next((t for t in whole if "baseline" in t.user_attrs), None)
        if base is not None:
            ax.axhline(base.values[0], color="#707070", linewidth=0.8, linestyle="--", zorder=1)
        ax.set_title(share or search.name)
    figure.supxlabel("trials, in the order they ended", fontsize=8)
    figure.supylabel(f"{objective.metric}, mean of seeds {list(search.seeds)}", fontsize=8)
    _legend(figure, [
        ("trial", {"marker": "o", "color": "#707070"}),
        ("outside the constraint", {"marker": "o", "color": "#707070", "fillstyle": "none"}),
        ("given up", {"marker": "|", "color": "#707070"}), ("best so far", {"linestyle": "-", "color": INK}),
        ("default", {"linestyle": "--", "color": "#707070"}),
    ])  # fmt: skip
    return figure


def importance(search: Search, found: Mapping[str, Importance]) -> Figure | None:
    """fANOVA's share of the variance per knob and objective, with the most that shuffled values gave."""
    if not found:
        return None
    figure, axes = _grid(len(found), height=0.24 * max(len(i.values) for i in found.values()) + 0.6, columns=3)
    for ax, (metric, one) in zip(axes, found.items(), strict=True):
        names = sorted(one.values, key=lambda name: one.values[name])
        ax.barh(range(len(names)), [one.values[name] for name in names], color="#0072B2", height=0.6)
        for row, name in enumerate(names):
            ax.plot([one.chance[name]] * 2, [row - 0.4, row + 0.4], color="#D55E00", linewidth=1.5)
        ax.set_yticks(range(len(names)), [_short(name) for name in names])
        of_shares = f" ({one.between:.0%} of it between {search.budget.per}s)" if search.budget.per else ""
        ax.set_title(metric + of_shares)
        ax.set_xlim(left=0)
        ax.grid(axis="y", visible=False)
    within = " within them" if search.budget.per else ""
    figure.supxlabel(f"share of the variance{within} that a knob explains alone (fANOVA)", fontsize=8)
    _legend(figure, [
        ("measured", {"linestyle": "-", "color": "#0072B2", "linewidth": 5}),
        ("largest after shuffling", {"linestyle": "-", "color": "#D55E00"}),
    ])  # fmt: skip
    return figure


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _positions(search: Search, name: str, trials: Sequence[FrozenTrial]) -> tuple[list[float], list[FrozenTrial]]:
    """Where trials stand on the axis of a knob, and which ones have it."""
    with_it = [t for t in trials if name in values_of(t)]
    choices = search.space[name].choices
    if choices is None:
        return [float(values_of(t)[name]) for t in with_it], with_it
    words = [str(choice) for choice in choices]
    spread = {t.number: 0.3 * ((i * 0.618) % 1 - 0.5) for i, t in enumerate(with_it)}
    return [words.index(str(values_of(t)[name])) + spread[t.number] for t in with_it], with_it


def _knob_axis(ax: Axes, search: Search, name: str, axis: str = "x") -> None:
    knob = search.space[name]
    if knob.choices is not None:
        words = [str(choice) for choice in knob.choices]
        getattr(ax, f"set_{axis}ticks")(range(len(words)), words, rotation=20 if axis == "x" and len(words) > 2 else 0)
    elif knob.log:
        _log(ax, axis)
    getattr(ax, f"set_{axis}label")(_short(name))


def _log(ax: Axes, axis: str) -> None:
    """A logarithmic axis with plain numbers, as many as fit."""
    getattr(ax, f"set_{axis}scale")("log")
    sides = ax.xaxis if axis == "x" else ax.yaxis
    low, high = sorted(getattr(ax, f"get_{axis}lim")())
    subs = (1.0,) if high / low > 30 else (1.0, 2.0, 5.0) if high / low > 4 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    sides.set_major_locator(LogLocator(subs=subs))
    sides.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
    sides.set_minor_locator(NullLocator())


def slices(search: Search, trials: Trials) -> Figure | None:
    """The first objective over every knob; colours are shares."""
    names = [name for name in search.space if name != search.budget.per]
    if not any(_complete(found) for found in trials.values()):
        return None
    figure, axes = _grid(len(names), height=1.9, columns=3)
    for ax, name in zip(axes, names, strict=True):
        for (_, found), colour in zip(trials.items(), COLOURS * 4, strict=False):
            x, shown = _positions(search, name, _complete(found))
            _dots(ax, x, [t.values[0] for t in shown], [is_feasible(t) for t in shown], colour, 10)
        _knob_axis(ax, search, name)
    figure.supylabel(f"{search.objectives[0].metric},\nmean of seeds {list(search.seeds)}", fontsize=8)
    _legend(figure, [
        (share or "trial", {"marker": "o", "color": colour})
        for share, colour in zip(trials, COLOURS * 4, strict=False)
    ])  # fmt: skip
    return figure


def contours(search: Search, trials: Trials, found: Mapping[str, Importance]) -> Figure | None:
    """The first objective over the two most important ranges of a share, smoothed; trials in their own colours."""
    ranges = [name for name, knob in search.space.items() if knob.choices is None]
    first = found.get(search.objectives[0].metric)
    weight = first.values if first is not None else dict[str, float]()
    panels: list[tuple[str, list[FrozenTrial], str, str]] = []
    for share, of_share in trials.items():
        whole = _complete(of_share)
        here = [name for name in ranges if sum(name in values_of(t) for t in whole) >= 4]
        here.sort(key=lambda name: -weight.get(name, 0.0))
        if len(here) >= 2:
            panels.append((share, [t for t in whole if {*here[:2]} <= set(values_of(t))], here[0], here[1]))
    if not panels:
        return None
    values = [t.values[0] for _, shown, _, _ in panels for t in shown]
    norm = Normalize(min(values), max(values))
    figure, axes = _grid(len(panels), height=2.5)
    for ax, (share, shown, x_name, y_name) in zip(axes, panels, strict=True):
        sides_of = [ends(search, name) for name in (x_name, y_name)]
        points = np.array([[scaled(search, n, values_of(t)[n]) for n in (x_name, y_name)] for t in shown])
        surface = smoothed(points, np.array([t.values[0] for t in shown]))
        sides = [np.geomspace(*e, GRID) if search.space[n].log else np.linspace(*e, GRID)
                 for n, e in zip((x_name, y_name), sides_of, strict=True)]  # fmt: skip
        ax.contourf(sides[0], sides[1], surface.T, levels=12, cmap="viridis", norm=norm, alpha=0.85)
        xy = [[values_of(t)[name] for t in shown] for name in (x_name, y_name)]
        ax.scatter(*xy, c=[t.values[0] for t in shown], cmap="viridis", norm=norm, s=16, edgecolors="white",
                   linewidths=0.6)  # fmt: skip
        _knob_axis(ax, search, x_name)
        _knob_axis(ax, search, y_name, "y")
        ax.set_title(share or search.name)
        ax.grid(visible=False)
    colours = ScalarMappable(norm, "viridis")
    figure.colorbar(colours, ax=axes, label=f"{search.objectives[0].metric} (surface: kernel mean)", shrink=0.8)
    return figure


def fronts(search: Search, trials: Trials) -> Figure | None:
    """The first objective against every other one: fronts as lines, the constraint, the defaults as stars."""
    others = list(enumerate(search.objectives))[1:]
    if not others or not any(_complete(found) for found in trials.values()):
        return None
    figure, axes = _grid(len(others), height=3.0, columns=2)
    for ax, (at, objective) in zip(axes, others, strict=True):
        for (_, found), colour in zip(trials.items(), COLOURS * 4, strict=False):
            whole = _complete(found)
            _dots(ax, [t.values[at] for t in whole], [t.values[0] for t in whole], [is_feasible(t) for t in whole],
                  colour, 10)  # fmt: skip
            base = [t for t in whole if "baseline" in t.user_attrs]
            ax.plot([t.values[at] for t in base], [t.values[0] for t in base], "*", color=colour, markersize=9,
                    markeredgecolor=INK, zorder=4)  # fmt: skip
            _front_line(ax, search, found, at, colour)
        _front_axis(ax, search, objective)
    axes[0].set_ylabel(f"{search.objectives[0].metric}, mean of seeds {list(search.seeds)}")
    _legend(figure, [
        *((share or "trial", {"marker": "o", "color": c}) for share, c in zip(trials, COLOURS * 4, strict=False)),
        ("default", {"marker": "*", "color": "#707070", "markersize": 8}),
        ("front", {"linestyle": "-", "color": "#707070"}),
    ])  # fmt: skip
    return figure


def _front_line(ax: Axes, search: Search, trials: Sequence[FrozenTrial], at: int, colour: str) -> None:
    """Trials that none beats in these two objectives, joined as the stairs they are."""
    pair = (search.objectives[0], search.objectives[at])
    front = on_front(search, trials, (0, at))
    front.sort(key=lambda t: oriented(t.values[at], pair[1]))
    ax.step([t.values[at] for t in front], [t.values[0] for t in front], where="pre", color=colour, linewidth=1.0)


def _front_axis(ax: Axes, search: Search, objective: Objective) -> None:
    ax.set_xlabel(objective.metric)
    if objective.log:
        _log(ax, "x")
    bound = search.constraint
    if bound is not None and bound.metric == objective.metric:
        ax.axvline(bound.at_most, color="#D55E00", linewidth=1.0, linestyle="--")
        ax.text(bound.at_most, 0.02, " constraint", transform=ax.get_xaxis_transform(), fontsize=6.5, color="#D55E00")
