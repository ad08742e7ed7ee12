"""The figure of FP8 caches: k3 over the scale, with the rules' places, and k3 rule by rule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.report.plots.colours import BLUE, GREEN, INK, NOTE, ORANGE, PINK, SKY, VERMILION
from harness.report.plots.save import save_png
from harness.studies.fp8_cache.record import Record

ROLES = {"k": ("K alone", BLUE), "v": ("V alone", ORANGE), "kv": ("K and V", INK)}
POLICIES = (INK, BLUE, VERMILION, GREEN, PINK, SKY, ORANGE)
RULES = {
    "1": "scale 1, no calibration",
    "vllm": "vLLM's rule",
    "nemo": "NeMo-RL's rule",
    "nemo, prompts": "NeMo-RL's, from prompts alone",
    "nemo, heads": "NeMo-RL's, a scale a head",
    "vllm, stale": "vLLM's, kept from the first weights",
    "nemo, stale": "NeMo-RL's, kept likewise",
    "1, K": "scale 1, keys alone rounded",
    "1, V": "scale 1, values alone rounded",
    "1, Q": "scale 1, queries rounded, too",
    "1, QP": "scale 1, queries and softmax, too",
    "nemo, QP": "NeMo-RL's, queries and softmax, too",
    "vllm, fresh wide": "vLLM's, from untrained N(0, 1/inputs)",
    "vllm, fresh": "vLLM's, from untrained N(0, 0.02)",
}
"""Rule -> its words, in the order of the figure."""
CALIBRATED = ("1", "vllm", "nemo", "nemo, prompts", "nemo, heads")
"""Rules that see the trained weights, by which the title counts."""
EARLIER = (1e-2, 9e-2)
"""k3 of an earlier run with an FP8 cache, which was not kept."""
LEAST = 1e-6


def draw(records: Sequence[Record], path: Path) -> list[Path]:
    """Write the figure."""
    return save_png(lambda: figure_of(records), path)


def figure_of(records: Sequence[Record]) -> Figure:
    """Left: k3 over the scale of the first policy that has a scan. Right: k3 by rule, a mark for each policy of its
    task."""
    figure: Any = Figure(figsize=(7.6, 3.5), layout="constrained")
    axes = figure.subplots(1, 2, width_ratios=(1, 1.25))
    left, right = axes
    scan = next((record for record in records if any(row["factor"] for row in record["rows"])), None)
    if scan is not None:
        _scan(left, scan)
        records = [record for record in records if (record["task"], record["n"]) == (scan["task"], scan["n"])]
    _rules(right, records)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=len(records), fontsize=6)
    figure.suptitle(title(records), fontsize=8)
    return figure


def title(records: Sequence[Record]) -> str:
    """The finding, with its numbers."""
    rules = [row["k3"] for record in records for row in record["rows"] if row["name"] in CALIBRATED]
    fresh = [row["k3"] for record in records for row in record["rows"] if row["name"] == "vllm, fresh"]
    return (
        f"k3 of an FP8 cache is {min(rules):.0e} to {max(rules):.0e} by every rule that sees trained weights,\n"
        f"and {min(fresh):.0e} to {max(fresh):.0e} with scales from freshly initialised weights, N(0, 0.02)"
    )


def _scan(ax: Axes, record: Record) -> None:
    for roles, (words, colour) in ROLES.items():
        rows = [row for row in record["rows"] if row["factor"] is not None and set(row["stored"]) == set(roles)]
        rows.sort(key=lambda row: row["factor"])
        ax.plot([row["factor"] for row in rows], [max(row["k3"], LEAST) for row in rows], "o-", color=colour,
                markersize=2.6, linewidth=1.0, label=words)  # fmt: skip
    ax.axhspan(*EARLIER, color=VERMILION, alpha=0.12, linewidth=0)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlabel("scale / (largest magnitude / 448)")
    ax.set_ylabel("k3 a token, nats")
    ax.text(0.98, 0.58, "an earlier run, not kept", transform=ax.transAxes, ha="right", fontsize=6, color=NOTE)
    ax.set_title(f"Saturation left, subnormals right ({record['name']})", fontsize=7)
    ax.legend(fontsize=6)


def _rules(ax: Axes, records: Sequence[Record]) -> None:
    names = [name for name in RULES if any(row["name"] == name for record in records for row in record["rows"])]
    ax.axvspan(*EARLIER, color=VERMILION, alpha=0.12, linewidth=0)
    for number, record in enumerate(records):
        shift = 0.6 * ((number + 0.5) / len(records) - 0.5)
        colour = POLICIES[number % len(POLICIES)]
        for row in record["rows"]:
            if row["name"] in names:
                y = names.index(row["name"]) + shift
                ax.plot([max(row["k3_low"], LEAST), row["k3_high"]], [y, y], color=colour, linewidth=0.8)
                ax.plot(row["k3"], y, "o", color=colour, markersize=2.4)
        ax.plot([], [], "o", color=colour, markersize=2.4, label=record["name"])
    ax.set_xscale("log")
    ax.set_yticks(range(len(names)), [RULES[name] for name in names], fontsize=6.5)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_xlabel("k3 a token, nats")
    ax.grid(axis="y", visible=False)
