"""Figures of a sweep, drawn from its results alone: final scores, curves with bands over seeds, mismatch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D

from harness.records.arms import Arm, label, rank
from harness.records.folder import Series, load_series
from harness.records.sweep_file import BASELINES
from harness.report.leaderboard import Board
from harness.report.plots.along import along
from harness.report.plots.bands import over_evaluations, over_profile, over_steps
from harness.report.plots.bases import bases
from harness.report.plots.colours import BLUE, INK, REFERENCE, VERMILION
from harness.report.plots.differences import differences
from harness.report.plots.profiles import profile_figure
from harness.report.plots.save import save
from harness.report.plots.style import (
    STYLE,
    Looks,
    above_panels,
    draw_band,
    legend,
    log_y,
    looks_of,
    small_multiples,
    stripes,
    style_name,
)
from harness.report.plots.titles import largest_title, panel_title, scores_title, slope_title

MAX_ARMS = 16
"""Arms of one precision beyond which a sweep has no curves."""
MAX_LINES = 5
"""Lines of a panel: the control, the uncorrected arm, then the best."""
MAX_CONTEXTS = 3
"""Most contexts with all figures; beyond it each has its overview and the accuracy of its plain arms alone."""
SMOOTHING = 5
"""Steps of the running mean of reward curves."""
SCORES = (
    ("accuracy", "BF16 policy", INK, "o", "full"),
    ("rollout_accuracy", "as deployed", VERMILION, "s", "none"),
    ("reward", "sampler reward", BLUE, "D", "full"),
)
"""(column, name, colour, marker, fill) of the three scores, in the order they stand in a row."""


NAMES = (
    "overview", "scores", "accuracy", "deployed", "reward", "mismatch", "mismatch_position", "mismatch_entropy",
    "differences", "along", "grid", "bases", "profiles",
)  # fmt: skip
"""Figures of a sweep; a context follows behind a hyphen."""


Overview = Callable[[Sequence[Arm], str], Figure | None]
"""(arms, control) -> one figure of a whole sweep, None where it is not for such arms."""


def draw_all(
    judged: Board, runs: Path, out_folder: Path, formats: Sequence[str] = ("png",), overview: Overview | None = None
) -> list[Path]:
    """Draw every figure of a sweep into `out_folder`, its series from `runs`; `formats` are "png", "pdf" or "svg".

    A sweep over several contexts (model sizes, lengths) gets one set per context, or the short one of each; one over
    both has the `overview`, where one is given.
    """
    arms, control = judged.arms, judged.control
    series = load_series(runs, judged.results)
    board = {str(row["arm"]): row for row in judged.table.to_dict("records")}
    contexts: dict[str, list[Arm]] = {}
    for arm in arms:
        contexts.setdefault(label(arm.context), []).append(arm)
    contexts = {context: without_shared_variant(inside) for context, inside in contexts.items()}
    looks = looks_of([arm for inside in contexts.values() for arm in inside], control)
    paths: list[Path] = []
    with mpl.rc_context(fname=STYLE):
        if overview is not None and (grid := overview(arms, control)) is not None:
            paths += [save(grid, out_folder / f"grid.{kind}") for kind in formats]
        elif len(board) > MAX_ARMS and (whole := differences(arms, board, control)) is not None:
            paths += [save(whole, out_folder / f"differences.{kind}") for kind in formats]
        if (dials := along(arms, control)) is not None:
            paths += [save(dials, out_folder / f"along.{kind}") for kind in formats]
        for context, inside in contexts.items():
            suffix = "-" + re.sub(r"[^\w.]+", "", context.replace(" ", "_")) if context else ""
            is_brief = len(contexts) > MAX_CONTEXTS
            for name, figure in _figures(inside, series, board, looks, control, is_brief).items():
                paths += [save(figure, out_folder / f"{name}{suffix}.{kind}") for kind in formats]
        if (whole := profile_figure(arms, judged.scores, control)) is not None:
            paths += [save(whole, out_folder / f"profiles.{kind}") for kind in formats]
    _remove_old(out_folder, paths, formats)
    return paths


def without_shared_variant(arms: Sequence[Arm]) -> list[Arm]:
    """The arms of one context, their variant left out where all have the same: it is part of the setting there."""
    return [replace(arm, variant="") for arm in arms] if len({arm.variant for arm in arms}) == 1 else list(arms)


def _remove_old(folder: Path, drawn: Sequence[Path], formats: Sequence[str]) -> None:
    """Remove figures of earlier results that these no longer get, such as curves of a sweep that has outgrown them."""
    for path in folder.iterdir():
        if path not in drawn and path.suffix[1:] in formats and path.stem.partition("-")[0] in NAMES:
            path.unlink()


def _figures(
    arms: Sequence[Arm], series: Series, board: dict[str, Any], looks: Looks, control: str, is_brief: bool
) -> dict[str, Figure]:
    """Name -> figure, for the arms of one context. Names in reading order; curves only where a panel can hold them."""
    reward = partial(over_steps, series=series, column="reward/mean", window=SMOOTHING)
    k3 = partial(over_steps, series=series, column="mismatch/kl_k3", center="median")
    position = partial(over_profile, series=series, group="by_position", axis="position", column="k3")
    entropy = partial(over_profile, series=series, group="by_entropy", axis="entropy", column="k3")
    if max(Counter(arm.precision for arm in arms).values()) > MAX_ARMS:
        return {"scores": scores(arms, board, control)}
    shown = lines_of([arm for arm in arms if not arm.variant] if is_brief else arms, board, control)
    grid = partial(small_multiples, shown, looks=looks, control=control, note=left_out(arms, shown))
    mean, median = (step_label(kind, shown) for kind in ("mean", "median"))
    figures: dict[str, Figure | None] = {"overview": overview(arms, series, board, looks, control)}
    if not is_brief:
        figures |= {"scores": scores(arms, board, control), "bases": bases(arms, looks)}
    endpoints: tuple[tuple[str, Literal["reference", "rollout"], str], ...] = (
        ("accuracy", "reference", "the BF16 policy"), ("deployed", "rollout", "as deployed"),
    )  # fmt: skip
    for name, site, of_what in endpoints:
        figures[name] = grid(
            partial(over_evaluations, site=site), mean, f"accuracy, {of_what}", marked=True,
            panel=partial(panel_title, board=board, site=site),
        )  # fmt: skip
    if not is_brief:
        figures |= {
            "reward": grid(
                reward, mean, f"sampler reward, mean of {SMOOTHING} steps",
                panel=partial(panel_title, board=board, site="reference"),
            ),
            "mismatch": grid(
                k3, median, "mismatch k3, nats per token", is_log=True,
                title=partial(largest_title, words="Mismatch k3", control=control),
            ),
            "mismatch_position": grid(
                position, "position in the response, tokens (mean over training)", "mismatch k3, nats", is_log=True,
                title=partial(slope_title, words="Mismatch k3 along the response", control=control),
            ),
            "mismatch_entropy": grid(
                entropy, "entropy of the trainer, nats (lower edge of a bucket)", "mismatch k3, nats", is_log=True,
                marked=True, x_linear_below=1e-3,
                title=partial(slope_title, words="Mismatch k3 from sure to unsure tokens", control=control),
            ),
        }  # fmt: skip
    return {name: figure for name, figure in figures.items() if figure is not None}


def step_label(kind: str, arms: Sequence[Arm]) -> str:
    """Label of the step axis under curves of these arms. It says so where some have fewer bases than others."""
    uneven = "; some arms lack bases" if len({*num_bases(arms)}) > 1 else ""
    return f"policy step ({kind}, and all seeds as a band{uneven})"


def num_bases(arms: Sequence[Arm]) -> list[int]:
    """Number of bases of each arm. Means over other bases are not comparable."""
    return [len({run.base for run in arm.runs}) for arm in arms]


def lines_of(arms: Sequence[Arm], board: dict[str, Any], control: str) -> list[Arm]:
    """Arms that are drawn as curves, in the order given: per precision the control, TIS, the uncorrected arm, and those
    of the highest mean accuracy during training, MAX_LINES with the control."""
    chosen: list[Arm] = []
    for precision in dict.fromkeys(arm.precision for arm in arms):
        others = [arm for arm in arms if arm.precision == precision and (arm.method != control or arm.variant)]
        others.sort(key=lambda arm: (arm.method not in BASELINES or bool(arm.variant), -board[arm.label]["auc"]))
        chosen += others[: MAX_LINES - 1]
    return [arm for arm in arms if (arm.method == control and not arm.variant) or arm in chosen]


def left_out(arms: Sequence[Arm], shown: Sequence[Arm]) -> str:
    """Line below curves on the arms that have none; empty where each has one."""
    left = len(arms) - len(shown)
    return f"\nnot drawn: {left} of {len(arms)} arms, see the sweep's table" if left else ""


def scores(arms: Sequence[Arm], board: dict[str, Any], control: str) -> Figure:
    """Final accuracy per precision and method: the three scores of every arm side by side."""
    figure = Figure(figsize=(6.75, 0.24 * len(arms) + 1.1), layout="constrained")
    draw_scores(figure, arms, board, scores_title(arms, board, control))
    return figure


def draw_scores(figure: Figure | SubFigure, arms: Sequence[Arm], board: dict[str, Any], title: str) -> None:
    """One row per arm with intervals, and the number of its bases where others have more; the start and the control's
    accuracy as lines."""
    ax: Axes = figure.subplots()
    rows = [board[arm.label] for arm in arms]
    for column, _, colour, marker, fill in SCORES:
        offset = 0.24 * [name for name, *_ in SCORES].index(column) - 0.24
        for y, row in enumerate(rows):
            low, high, value = row[f"{column}_low"], row[f"{column}_high"], row[column]
            ax.plot([low, high], [y + offset] * 2, color=colour, linewidth=1.0, alpha=0.7, solid_capstyle="butt")
            ax.plot(value, y + offset, color=colour, marker=marker, fillstyle=fill, markersize=3.6)
    stripes(ax, [arm.precision for arm in arms])
    control = next((row for row in rows if row["verdict"] == "control"), None)
    if control is not None:
        for value, style in ((control["accuracy"], "--"), (control["base_accuracy"], ":")):
            ax.axvline(value, color=REFERENCE, linewidth=0.8, linestyle=style, zorder=1)
    bases = num_bases(arms)
    names = [f"{arm.precision}  {style_name(arm)}" for arm in arms]
    ax.set_yticks(range(len(arms)), [name if n == max(bases) else f"{name}, {n} of {max(bases)} bases"
                                     for name, n in zip(names, bases, strict=True)])  # fmt: skip
    ax.set_ylim(len(arms) - 0.5, -0.5)
    ax.set_xlabel("fraction right after training, 95 % intervals")
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    handles = [
        Line2D([], [], color=colour, marker=marker, fillstyle=fill, linewidth=1.0, markersize=3.6, label=name)  # pyright: ignore
        for _, name, colour, marker, fill in SCORES
    ]
    if control is not None:
        handles.append(Line2D([], [], color=REFERENCE, linewidth=0.8, linestyle="--", label=f"{control['method']}"))
        handles.append(Line2D([], [], color=REFERENCE, linewidth=0.8, linestyle=":", label="start"))
    above_panels(figure, handles, 3, title)


def overview(arms: Sequence[Arm], series: Series, board: dict[str, Any], looks: Looks, control: str) -> Figure:
    """The README's figure: every arm's scores, and learning and mismatch at the precision with most arms."""
    counts = Counter(arm.precision for arm in arms)
    focus = max(counts, key=lambda precision: (counts[precision], rank(precision)))
    inside = [arm for arm in arms if arm.precision == focus or arm.method == control]
    shown = lines_of(inside, board, control)
    figure = Figure(figsize=(7.4, max(3.4, 0.24 * len(arms) + 1.2)), layout="constrained")
    halves: Any = figure.subfigures(1, 2, width_ratios=(1.15, 1))
    left, right = halves
    draw_scores(left, arms, board, scores_title(arms, board, control))
    axes: Any = right.subplots(2, 1, sharex=True)
    top, bottom = axes
    for arm in shown:
        look = looks[style_name(arm)]
        draw_band(top, over_evaluations(arm, "reference"), look, marked=True)
        draw_band(bottom, over_steps(arm, series, "mismatch/kl_k3", "median"), look, is_log=True)
    top.set_title(panel_title(f"{focus} rollouts", shown, board=board, site="reference").replace("\n", ", "))
    top.set_ylabel("accuracy,\nBF16 policy")
    bottom.set_title("Mismatch of sampler and trainer")
    bottom.set_ylabel("k3, nats per token")
    log_y(bottom)
    bottom.locator_params(axis="x", integer=True)
    bottom.set_xlabel("policy step" + left_out(inside, shown))
    legend(right, {style_name(arm): looks[style_name(arm)] for arm in shown}, True, 2)
    return figure
