"""Predictions of lost accuracy from a probe, written before the runs of a sweep, and how they came out.

    probe of a base, no training -> k3 of every format -> dose -> curve of each correction -> results/predictions/
    the sweep's runs, later -> mean loss of every arm beside its prediction

A sweep with predictions is in no curve: it stays held out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from harness.config.load import to_json
from harness.config.schema import RunConfig
from harness.foundation.markdown_table import markdown_table
from harness.records.packed import read_packed, read_packed_series
from harness.records.paths import packed_path, predictions_path
from harness.records.run_result import write_atomic
from harness.studies.dose.curve import LEVEL, fitted, mean_interval, predicted
from harness.studies.dose.points import COLUMNS, NONE, Point, correction_of, points
from harness.studies.dose.study import TESTED, Study

FLOOR = "bf16"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One prediction beside its runs."""

    precision: str
    correction: str
    dose: float
    """Dose of the probe."""
    predicted: float
    found_dose: float
    """Median over the runs."""
    loss: float
    """Mean over the runs that did not collapse."""
    low: float
    """Its 95 % interval, bases as clusters; NaN for fewer than three."""
    high: float
    num_runs: int
    num_collapsed: int

    @property
    def error(self) -> float:
        """Measured less predicted."""
        return self.loss - self.predicted


def predict(s: Study, record: Mapping[str, Any], sweep: str, cells: Sequence[RunConfig]) -> dict[str, Any]:
    """Predictions for `sweep` and its cells from a probe, as plain JSON: lost accuracy of every arm whose correction is
    one of TESTED.

    Raises ValueError for a sweep without such an arm, and for a probe of another task, channel spread or format of
    weights than the sweep's.
    """
    rows: list[dict[str, Any]] = []
    for correction in TESTED:
        own = [p for p in s.points if p.correction == correction and not p.has_collapsed]
        arms = {c.precision.name: c for c in cells if correction_of(to_json(c)) == correction}
        if not own:
            continue
        curve = fitted(np.array([p.dose for p in own]), np.array([p.loss for p in own]))
        for name, cell in arms.items():
            if name == FLOOR:
                continue
            row = _probed(record, sweep, cell)
            dose = row["mismatch"]["kl_k3"] * row["length_mean"]
            loss = float(predicted(curve, np.array([dose]))[0])
            rows.append({"precision": name, "correction": correction, "dose": dose, "loss": round(loss, 4)})
    if not rows:
        raise ValueError(f"dose: {sweep} has no low-bit arm without a correction or with TIS")
    return {
        "sweep": sweep, "probe": record["id"], "folder": record["folder"], "num_runs": len(s.points),
        "made": datetime.now(UTC).isoformat(timespec="seconds"), "predictions": rows,
    }  # fmt: skip


def _probed(record: Mapping[str, Any], sweep: str, cell: RunConfig) -> Mapping[str, Any]:
    """The probe's row of a cell's format. Raises ValueError where it was measured in another setting."""
    task, model = record["config"]["task"], record["config"]["model"]
    pairs = (
        ("task", task["name"], cell.task.name), ("task.n", task["n"], cell.task.n),
        ("model.spread", model["spread"], cell.model.spread),
    )  # fmt: skip
    for key, probed, run in pairs:
        if probed != run:
            raise ValueError(f"dose: probe {record['id']} has {key}={probed}, {sweep} {key}={run}; probe with that")
    name, weights = cell.precision.name, cell.precision.weights
    found = next((row for row in record["formats"] if row["precision"] == name), None)
    if found is None or weights not in found["passport"]["weights"]:
        probed = "none" if found is None else " and ".join(found["passport"]["weights"])
        raise ValueError(f"dose: {sweep} has {name} with weights in {weights}, probe {record['id']} has {probed}; "
                         f"probe with --precisions {name}={weights}")  # fmt: skip
    return found


def write_predictions(results: Path, found: Mapping[str, Any]) -> Path:
    """Write `<results>/predictions/<sweep>.json`; the path. Raises ValueError where it is there already: a prediction
    is made once."""
    path = predictions_path(results, found["sweep"])
    if path.exists():
        raise ValueError(f"{path}: there already; predictions are made once")
    lines = ",\n  ".join(json.dumps(row) for row in found["predictions"])
    head = json.dumps({name: value for name, value in found.items() if name != "predictions"})[:-1]
    write_atomic(path, f'{head}, "predictions": [\n  {lines}\n]}}\n'.encode())
    return path


def read_outcomes(results: Path, sweep: str) -> list[Outcome]:
    """The predictions for a sweep beside its packed runs. Raises ValueError where one of them is missing, and where a
    run began before the predictions were made."""
    path, packed = predictions_path(results, sweep), packed_path(results, sweep)
    for one in (path, packed):
        if not one.is_file():
            raise ValueError(f"dose: {one} is missing; predict first, then run the sweep and pack it")
    found, runs = json.loads(path.read_bytes()), read_packed(packed)
    early = [run.name for run in runs if run.started_at is None or _when(run.started_at) <= _when(found["made"])]
    if early:
        raise ValueError(f"dose: {', '.join(early)} of {sweep} ran before the predictions were made ({found['made']})")
    return outcomes(found["predictions"], points(runs, read_packed_series(packed, COLUMNS)))


def outcomes(predictions: Sequence[Mapping[str, Any]], runs: Sequence[Point]) -> list[Outcome]:
    """Every prediction that has runs."""
    found: list[Outcome] = []
    for row in predictions:
        own = [p for p in runs if (p.precision, p.correction) == (row["precision"], row["correction"])]
        alive = [p for p in own if not p.has_collapsed]
        if not alive:
            continue
        losses = np.array([p.loss for p in alive])
        low, high = mean_interval(losses, [p.base for p in alive], LEVEL)
        found.append(
            Outcome(
                precision=row["precision"], correction=row["correction"], dose=row["dose"], predicted=row["loss"],
                found_dose=float(np.median([p.dose for p in alive])), loss=float(losses.mean()), low=low, high=high,
                num_runs=len(own), num_collapsed=len(own) - len(alive),
            )
        )  # fmt: skip
    return found


def _when(text: str) -> datetime:
    when = datetime.fromisoformat(text)
    return when if when.tzinfo else when.replace(tzinfo=UTC)


def outcome_page(sweep: str, found: Sequence[Outcome]) -> str:
    """Markdown: every prediction and its runs, and how far they are apart."""
    errors = np.array([o.error for o in found])
    losses = np.array([o.loss for o in found])
    inside = [o.low <= o.predicted <= o.high for o in found]
    lines = [
        f"# Predictions for `{sweep}`, and what came", "",
        "Lost accuracy against BF16 rollouts (mean of the evaluations during training). Predicted from a probe of one "
        "base before any run of the sweep: k3 x length, and the curve of [the dose study](dose_curve.md), which these "
        "runs are not part of. Brackets: 95 % over bases.",
        "",
        f"{len(found)} predictions: root mean square error {np.sqrt((errors**2).mean()):.3f}, mean error "
        f"{errors.mean():+.3f} (measured less predicted); to predict no loss at all errs by "
        f"{np.sqrt((losses**2).mean()):.3f}. {sum(inside)} lie in the interval of their runs.",
        "",
    ]  # fmt: skip
    head = ("format", "correction", "dose, probe", "dose, runs", "predicted", "measured", "error", "runs")
    rows = list[tuple[str, ...]]()
    for o in found:
        fell = f", {o.num_collapsed} collapsed" if o.num_collapsed else ""
        cells = (
            o.precision, "none" if o.correction == NONE else o.correction, f"{o.dose:.2g}", f"{o.found_dose:.2g}",
            f"{o.predicted:+.3f}", f"{o.loss:+.3f} [{o.low:+.3f}, {o.high:+.3f}]", f"{o.error:+.3f}",
            f"{o.num_runs}{fell}",
        )  # fmt: skip
        rows.append(cells)
    return "\n".join([*lines, markdown_table(head, rows)]) + "\n"
