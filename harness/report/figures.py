"""Figures of a sweep, drawn from its results alone: final scores, curves with bands over seeds, mismatch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D

from harness.records.arms import Arm, group_arms, label, rank
from harness.records.run_result import read_results
from harness.report.leaderboard import leaderboard
from harness.report.plots.bands import Series, load_series, over_evaluations, over_profile, over_steps
from harness.report.plots.differences import differences
from harness.report.plots.style import INK, STYLE, Looks, draw_band, legend, looks_of, small_multiples, style_name

MAX_LINES = 16
"""Arms of one precision that a panel of curves can hold."""
MAX_CONTEXTS = 3
"""With more of them than this, each gets its overview and the accuracy of its plain arms alone."""
SMOOTHING = 5
"""Steps of the running mean of reward curves."""
SCORES = (
    ("accuracy", "reference precision", INK, "o", "full"),
    ("rollout_accuracy", "rollout format", "#D55E00", "s", "none"),
    ("reward", "sampler reward", "#0072B2", "D", "full"),
)
"""(column, name, colour, marker, fill) of the three scores, in the order they stand in a row."""


Overview = Callable[[Sequence[Arm], str], Figure | None]
"""(arms, control) -> one figure of a whole sweep, None where it is not for such arms."""


def draw_all(
    results_folder: Path,
    out_folder: Path,
    sweep: str,
    control: str = "bf16",
    formats: Sequence[str] = ("png",),
    overview: Overview | None = None,
) -> list[Path]:
    """Draw every figure of `<results_folder>/runs/<sweep>` into `out_folder`; `formats` are "png", "pdf" or "svg".

    A sweep over several contexts (model sizes, lengths) gets one set per context, or the short one of each; one over
    both has the `overview`, where one is given. Raises ValueError without results.
    """
    folder = results_folder / "runs" / sweep
    results = read_results(folder)
    if not results:
        raise ValueError(f"sweep {sweep!r} has no results in {results_folder} to draw")
    arms = group_arms(results)
    series = load_series(folder, results)
    board = {str(row["arm"]): row for row in leaderboard(results, control).to_dict("records")}
    looks = looks_of(arms, control)
    out_folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    with mpl.rc_context(fname=STYLE):
        contexts = dict.fromkeys(label(arm.context) for arm in arms)
        if overview is not None and (grid := overview(arms, control)) is not None:
            paths += _save(grid, out_folder / "grid", formats)
        elif len(board) > MAX_LINES and (whole := differences(arms, board, control)) is not None:
            paths += _save(whole, out_folder / "differences", formats)
        for context in contexts:
            inside = [arm for arm in arms if label(arm.context) == context]
            suffix = "-" + re.sub(r"[^\w.]+", "", context.replace(" ", "_")) if context else ""
            is_brief = len(contexts) > MAX_CONTEXTS
            for name, figure in _figures(inside, series, board, looks, control, is_brief).items():
                paths += _save(figure, out_folder / f"{name}{suffix}", formats)
    return paths


def _save(figure: Figure, stem: Path, formats: Sequence[str]) -> list[Path]:
    """One file per format; without a date, so that equal results give equal files."""
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in formats]
    for path in paths:
        dates = {"png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
        temporary = path.with_name(f".{path.name}.part")  # a full disk must not leave half a figure
        figure.savefig(temporary, format=path.suffix[1:], metadata=dates[path.suffix[1:]])
        temporary.replace(path)
        figure.set_layout_engine("none")  # laid out once, by the first format
    return paths


def _figures(
    arms: Sequence[Arm], series: Series, board: dict[str, Any], looks: Looks, control: str, is_brief: bool
) -> dict[str, Figure]:
    """Name -> figure, for the arms of one context. Names in reading order; curves only where a panel can hold them."""
    accuracy = partial(over_evaluations, site="reference")
    reward = partial(over_steps, series=series, column="reward/mean", window=SMOOTHING)
    k3 = partial(over_steps, series=series, column="mismatch/kl_k3", center="median")
    position = partial(over_profile, series=series, group="by_position", axis="position", column="k3")
    entropy = partial(over_profile, series=series, group="by_entropy", axis="entropy", column="k3")
    if max(Counter(arm.precision for arm in arms).values()) > MAX_LINES:
        return {"scores": scores(arms, board)}
    shown = [arm for arm in arms if not arm.variant] if is_brief else arms
    grid = partial(small_multiples, shown, looks=looks, control=control)
    figures: dict[str, Figure | None] = {"overview": overview(arms, series, board, looks, control)}
    if not is_brief:
        figures["scores"] = scores(arms, board)
    figures["accuracy"] = grid(
        accuracy, "policy step (mean, and all seeds as a band)", "accuracy, reference precision", marked=True
    )
    if not is_brief:
        figures |= {
            "reward": grid(
                reward, "policy step (mean, and all seeds as a band)", f"sampler reward, mean of {SMOOTHING} steps"
            ),
            "mismatch": grid(
                k3, "policy step (median, and all seeds as a band)", "mismatch k3, nats per token", is_log=True
            ),
            "mismatch_position": grid(
                position, "position in the response, tokens (mean over training)", "mismatch k3, nats", is_log=True
            ),
            "mismatch_entropy": grid(
                entropy,
                "entropy of the trainer, nats (lower edge of a bucket)",
                "mismatch k3, nats",
                is_log=True,
                marked=True,
                x_linear_below=1e-3,
            ),
        }
    return {name: figure for name, figure in figures.items() if figure is not None}


def scores(arms: Sequence[Arm], board: dict[str, Any]) -> Figure:
    """Final accuracy per precision and method: the three scores of every arm side by side."""
    figure = Figure(figsize=(6.75, 0.24 * len(arms) + 1.1), layout="constrained")
    draw_scores(figure, arms, board)
    return figure


def draw_scores(figure: Figure | SubFigure, arms: Sequence[Arm], board: dict[str, Any], title: str = "") -> None:
    """One row per arm with intervals; the start and the control's accuracy as lines."""
    ax: Axes = figure.subplots()
    ax.set_title(title)
    rows = [board[arm.label] for arm in arms]
    for column, _, colour, marker, fill in SCORES:
        offset = 0.24 * [name for name, *_ in SCORES].index(column) - 0.24
        for y, row in enumerate(rows):
            low, high, value = row[f"{column}_low"], row[f"{column}_high"], row[column]
            ax.plot([low, high], [y + offset] * 2, color=colour, linewidth=1.0, alpha=0.7, solid_capstyle="butt")
            ax.plot(value, y + offset, color=colour, marker=marker, fillstyle=fill, markersize=3.6)
    precisions = [arm.precision for arm in arms]
    for index, precision in enumerate(dict.fromkeys(precisions)):
        first, count = precisions.index(precision), precisions.count(precision)
        if index % 2 == 0:
            ax.axhspan(first - 0.5, first + count - 0.5, color="#F3F3F3", zorder=0, linewidth=0)
    control = next((row for row in rows if row["verdict"] == "control"), None)
    if control is not None:
        for value, style in ((control["accuracy"], "--"), (control["base_accuracy"], ":")):
            ax.axvline(value, color="#707070", linewidth=0.8, linestyle=style, zorder=1)
    ax.set_yticks(range(len(arms)), [f"{arm.precision}  {style_name(arm)}" for arm in arms])
    ax.set_ylim(len(arms) - 0.5, -0.5)
    ax.set_xlabel("fraction right after training, 95 % intervals")
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    handles = [
        Line2D([], [], color=colour, marker=marker, fillstyle=fill, linewidth=1.0, markersize=3.6, label=name)  # pyright: ignore
        for _, name, colour, marker, fill in SCORES
    ]
    if control is not None:
        handles.append(Line2D([], [], color="#707070", linewidth=0.8, linestyle="--", label=f"{control['method']}"))
        handles.append(Line2D([], [], color="#707070", linewidth=0.8, linestyle=":", label="start"))
    figure.legend(handles=handles, loc="outside upper center", ncols=3)


def overview(arms: Sequence[Arm], series: Series, board: dict[str, Any], looks: Looks, control: str) -> Figure:
    """The README's figure: every arm's scores, and learning and mismatch at the precision with most arms."""
    counts = Counter(arm.precision for arm in arms)
    focus = max(counts, key=lambda precision: (counts[precision], rank(precision)))
    shown = [arm for arm in arms if arm.precision == focus or arm.method == control]
    figure = Figure(figsize=(7.4, max(3.4, 0.24 * len(arms) + 1.2)), layout="constrained")
    halves: Any = figure.subfigures(1, 2, width_ratios=(1.15, 1))
    left, right = halves
    draw_scores(left, arms, board, "Final scores")
    axes: Any = right.subplots(2, 1, sharex=True)
    top, bottom = axes
    for arm in shown:
        look = looks[style_name(arm)]
        draw_band(top, over_evaluations(arm, "reference"), look, marked=True)
        draw_band(bottom, over_steps(arm, series, "mismatch/kl_k3", "median"), look, is_log=True)
    top.set_title(f"Learning with {focus} rollouts")
    top.set_ylabel("accuracy,\nreference precision")
    bottom.set_title("Mismatch of sampler and trainer")
    bottom.set_ylabel("k3, nats per token")
    bottom.set_yscale("log")
    bottom.minorticks_off()
    bottom.set_xlabel("policy step")
    legend(right, {style_name(arm): looks[style_name(arm)] for arm in shown}, True, 2)
    return figure
