"""A campaign as JSON, as a table, and as a figure of what became of every fault."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.devtools.faults.audit import WRONGS
from harness.devtools.faults.campaign import Campaign
from harness.devtools.faults.open_round import Settings
from harness.devtools.faults.outcome import OUTCOMES, summary, totals
from harness.foundation.markdown_table import markdown_table
from harness.foundation.provenance import commit, cpu_name
from harness.foundation.whole_file import write_atomic
from harness.records.paths import figures_folder, tables_folder
from harness.report.plots.save import save_png
from harness.report.plots.style import INK

FILE = "faults.json"
NAMES = {
    "kill": "kill -9 of a cell", "kill_sweep": "kill -9 of the sweep", "memory": "out of memory",
    "nan": "numbers not finite", "disk": "full disk", "hang": "hung cell", "state": "damaged state",
    "prepared": "damaged preparation", "base": "damaged base", "record": "damaged or foreign results",
    "mlflow": "MLflow down", "twin": "two sweeps at once",
}  # fmt: skip
"""Kind -> what a reader calls it."""
EQUAL = " Everything else that is measured equals the undisturbed run bit for bit, times left out."
COLOURS = ("#009E73", "#0072B2", "#56B4E9", "#E69F00")


def to_json(settings: Settings, campaign: Campaign, duration_s: float) -> dict[str, Any]:
    """A campaign as plain JSON."""
    kinds = summary(campaign.outcomes, settings.kinds)
    sha, is_dirty = commit()
    return {
        "schema_version": 1, "seed": settings.seed, "count": settings.count, "commit": sha, "is_dirty": is_dirty,
        "cpu": cpu_name(), "duration_s": round(duration_s),
        "rounds": campaign.rounds, "cells_per_round": settings.cells,
        "sweep_starts": campaign.starts, "cell_processes": campaign.processes, "has_full_volumes": campaign.volume,
        "unmeasured": campaign.unmeasured, "ended_by_hand": campaign.ended,
        "totals": totals(kinds, campaign.cases, campaign.records), "kinds": kinds,
        "cases": [asdict(case) for case in campaign.cases],
    }  # fmt: skip


def write(results: Path, data: Mapping[str, Any]) -> list[Path]:
    """Write `<results>/faults.json`, `tables/faults.md` and `figures/faults/outcomes.png`."""
    paths = [results / FILE, tables_folder(results) / "faults.md", figures_folder(results, "faults") / "outcomes.png"]
    write_atomic(paths[0], (json.dumps(data, indent=1) + "\n").encode())
    write_atomic(paths[1], table(data).encode())
    save_png(lambda: figure(data), paths[2])
    return paths


def table(data: Mapping[str, Any]) -> str:
    """The campaign as Markdown."""
    sums = data["totals"]
    wrong = ", ".join(f"{sums[name]} {name}" for name in WRONGS)
    lines = [
        "# Faults",
        "",
        f"{sums['injected']} faults injected into {data['rounds']} sweeps of {data['cells_per_round']} real cells "
        f"({sums['records']} records audited against undisturbed runs): {wrong}.",
        f"Seed {data['seed']}; {data['sweep_starts']} starts of the sweep, {data['cell_processes']} processes of cells "
        f"in {data['duration_s'] / 60:.0f} minutes.",
        "",
    ]
    rows = list[tuple[str, ...]]()
    for kind, row in data["kinds"].items():
        became = (str(row["became"][name]) for name in OUTCOMES)
        seconds = "" if row["recovery_s_median"] is None else f"{row['recovery_s_median']:.1f}"
        rows.append((NAMES[kind], str(row["injected"]), str(row["recovered"]), *became, seconds))
    lines += [
        markdown_table(("fault", "injected", "recovered", *OUTCOMES, "median s to recovery"), rows),
        "", f"A resumed run leaves the flip rate of its first step empty, {data['unmeasured']} values here: it has no "
        f"earlier codes to compare with.{'' if data['cases'] else EQUAL}", "",
        f"{data['ended_by_hand']} cells were stopped (SIGSTOP) when their sweep was killed and had to be ended by "
        "hand: a stopped process notices nothing and keeps its folder locked.", "",
        "Recovery is the cell's next step or its record; for what the sweep refuses, the refusal.", "",
    ]  # fmt: skip
    lines += [f"* {case['wrong']}: {case['where']}: {case['words']}" for case in data["cases"]]
    return "\n".join(lines).rstrip() + "\n"


def figure(data: Mapping[str, Any]) -> Figure:
    """Faults by kind and what became of them; to the right the seconds to recovery."""
    kinds = list(reversed(data["kinds"]))
    drawn = Figure(figsize=(6.75, 0.6 + 0.26 * len(kinds)), layout="constrained")
    left, right = drawn.subplots(1, 2, width_ratios=(3, 2), sharey=True)
    start = dict.fromkeys(kinds, 0)
    for name, colour in zip(OUTCOMES, COLOURS, strict=True):
        counts = [data["kinds"][kind]["became"][name] for kind in kinds]
        left.barh(range(len(kinds)), counts, left=list(start.values()), color=colour, height=0.68, label=name)
        start = {kind: start[kind] + count for kind, count in zip(kinds, counts, strict=True)}
    for row, kind in enumerate(kinds):
        left.text(start[kind] + 0.4, row, str(data["kinds"][kind]["injected"]), va="center", fontsize=7, color=INK)
    left.set_yticks(range(len(kinds)), [NAMES[kind] for kind in kinds])
    left.set_xlim(0, max(1, *start.values()) * 1.08)
    left.set_xlabel("faults injected")
    left.tick_params(axis="y", length=0)
    _draw_seconds(right, [data["kinds"][kind] for kind in kinds])
    sums = data["totals"]
    title = f"{sums['injected']} faults, {sums['records']} records: " + ", ".join(f"{sums[w]} {w}" for w in WRONGS[:3])
    left.set_title(title)
    drawn.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return drawn


def _draw_seconds(axes: Axes, kinds: list[Mapping[str, Any]]) -> None:
    """A dot per fault, a bar at the median."""
    for row, kind in enumerate(kinds):
        seconds = kind["recovery_s"]
        axes.plot(seconds, [row] * len(seconds), "o", color="#0072B2", alpha=0.35, markersize=3, markeredgewidth=0)
        if seconds:
            axes.plot(kind["recovery_s_median"], row, "|", color=INK, markersize=9, markeredgewidth=1.4)
    axes.set_xscale("log")
    axes.set_xlabel("seconds to recovery (bar: median)")
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
