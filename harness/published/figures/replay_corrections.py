"""Every correction on the same stored rollouts: bias, direction and variance of its step (TIS, MIS, IcePop)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd

from harness.published.figures.drawn import Drawn
from harness.records.paths import replay_folder
from harness.report.plots.style import STYLE
from harness.studies.replay.figure import panels
from harness.studies.replay.store import CONTROL
from harness.studies.replay.tables import frame, read_records

AGE = 0
"""The policy that is updated is the one that was sampled."""
NONE, TIS = "none", "bf16_tis"
SHOWN = ((NONE, "none"), (TIS, "TIS"), ("sequence IS, no cap", "sequence IS"))
"""(arm, words) of the table."""
Key = tuple[int, str, str]
"""(length, sampler, arm)."""


def draw(results: Path) -> Drawn:
    """The figure of the replay laboratory at age 0, and the rows of the rules that stand out in it."""
    folder = replay_folder(results)
    records = [record for record in read_records(folder) if record["age"] == AGE]
    if not records:
        raise ValueError(f"{folder}: no records at age {AGE}")
    rows: dict[Key, dict[str, Any]] = {
        (r["length"], r["sampler"], r["arm"]): r for r in frame(records).to_dict("records")
    }
    places = dict.fromkeys((length, sampler) for length, sampler, _ in rows if sampler != CONTROL)
    numbers = pd.DataFrame(
        {"n": length, "sampler": sampler}
        | {key: value for arm, words in SHOWN for key, value in _cells(rows.get((length, sampler, arm)), words).items()}
        for length, sampler in places
    )
    with mpl.rc_context(fname=STYLE):
        figure = panels(records)
    return Drawn(figure=figure, numbers=numbers, says=_says(rows))


def _cells(row: dict[str, Any] | None, words: str) -> dict[str, float]:
    """Bias with its interval, and variance, of one rule."""
    if row is None:
        return {}
    bias = {f"bias, {words}{end}": float(row[f"bias{end}"]) for end in ("", "_low", "_high")}
    return bias | {f"variance, {words}": float(row["variance_ratio"])}


def _says(rows: dict[Key, dict[str, Any]]) -> tuple[str, ...]:
    lines: list[str] = []
    for length in dict.fromkeys(key[0] for key in rows):
        words: list[str] = []
        for sampler in dict.fromkeys(key[1] for key in rows if key[1] != CONTROL):
            none, tis = rows.get((length, sampler, NONE)), rows.get((length, sampler, TIS))
            if none and tis:
                words.append(f"{sampler} from {none['bias']:.2f} to {tis['bias']:.2f}")
        if words:
            lines.append(f"n = {length}: token TIS moves the bias, in units of the exact step: {'; '.join(words)}.")
    return tuple(lines)
