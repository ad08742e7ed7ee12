"""Predictions of lost accuracy, written before the runs of a sweep, and how they came out.

    probe of a base, no training, or runs of another sweep -> k3 of every format -> dose (`probed_dose`, `known_dose`)
    dose -> curve of each correction -> results/predictions/ (`predict`, `write_predictions`)
    the sweep's runs, later -> mean loss of every arm beside its prediction (`read_outcomes`)

Runs with a prediction are in no curve: they stay held out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.config.load import run_id, to_json
from harness.config.schema import RunConfig
from harness.foundation.json_object import read_json_object
from harness.foundation.markdown_table import markdown_table
from harness.foundation.number_cell import with_interval
from harness.foundation.time_stamp import moment, now
from harness.records.json_rows import write_json_rows
from harness.records.packed import read_packed
from harness.records.paths import packed_path, predictions_path
from harness.records.stats import mean_interval
from harness.studies.dose.points import (
    FLOOR,
    FORMAT,
    NOISE,
    NONE,
    STALENESS,
    Point,
    correction_of,
    kind_of,
    predicted_runs,
    size_of,
    sweep_points,
)
from harness.studies.dose.study import TESTED, Study, alive, prediction

Dose = Callable[[RunConfig], float]
"""Dose that a run will have. Raises ValueError where nothing says it."""
TRAITS: dict[str, Callable[[RunConfig], str]] = {
    "spread": lambda cell: f"{cell.model.spread:g}",
    "task": lambda cell: cell.task.name,
    "model": lambda cell: size_of(cell.model.name),
    "engine": lambda cell: cell.engine.name,
}
"""Settings on which doses of a format and length depend; a prediction names those that vary in its sweep."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One prediction beside its runs."""

    precision: str
    correction: str
    length: int | None
    """Problem size of the task; None where the predictions name none, because all have one."""
    dose: float
    """The dose that the prediction was made from."""
    predicted: float
    found_dose: float
    """Median over the runs that did not collapse; NaN where there is none."""
    loss: float
    """Mean over the runs that did not collapse; NaN where there is none."""
    low: float
    """Its 95 % interval, bases as clusters; NaN for fewer than three."""
    high: float
    num_runs: int
    num_collapsed: int

    @property
    def error(self) -> float:
        """Measured less predicted."""
        return self.loss - self.predicted


def predict(
    s: Study, sweep: str, cells: Sequence[RunConfig], dose: Dose, source: Mapping[str, Any], done: Collection[str] = ()
) -> dict[str, Any]:
    """Predictions for the cells of `sweep` that are not `done` (run ids), as plain JSON: lost accuracy of every arm
    whose correction is one of TESTED, at every length. `source` says where the doses come from. Staleness has no
    prediction: its dose is how far training moves, which nothing says before.

    Raises ValueError for a sweep without such an arm, and where `dose` does.
    """
    rows: list[dict[str, Any]] = []
    varying = [trait for trait, of in TRAITS.items() if len({of(cell) for cell in cells}) > 1]
    for correction in TESTED:
        if not alive(s.points, correction):
            continue
        arms: dict[tuple[int, str], list[RunConfig]] = {}
        for cell in cells:
            if is_predictable(cell, correction) and run_id(cell) not in done:
                dosed = kind_of(to_json(cell))
                assert dosed is not None
                name = ", ".join([dosed[1], *(f"{trait} {TRAITS[trait](cell)}" for trait in varying)])
                arms.setdefault((cell.task.n or 0, name), []).append(cell)
        for (length, name), alike in arms.items():
            found = dose(alike[0])
            loss = round(prediction(s, correction, found), 4)
            rows.append({
                "length": length, "precision": name, "correction": correction, "dose": float(f"{found:.6g}"),
                "loss": loss, "runs": [run_id(cell) for cell in alike],
            })  # fmt: skip
    if not rows:
        raise ValueError(f"dose: {sweep} has no low-bit arm without a correction or with TIS that has not run")
    return {
        "sweep": sweep, **source, "num_runs": len(s.points), "made": now(),
        "predictions": rows,
    }  # fmt: skip


def is_predictable(cell: RunConfig, correction: str) -> bool:
    """True for a low-bit run of this correction, or one with noise: decoupled, without age."""
    values = to_json(cell)
    dosed = kind_of(values)
    usual = cell.algo.mode == "decoupled" and dosed is not None and dosed[0] != STALENESS and dosed[1] != FLOOR
    return usual and correction_of(values) == correction


def probed_dose(records: Sequence[Mapping[str, Any]], sweep: str) -> Dose:
    """Doses from probes, k3 x mean length of answers: for a run that of its channel spread. The result raises
    ValueError for a run of another task, engine, channel spread, format of weights or sigma of noise than probed."""

    def dose(cell: RunConfig) -> float:
        record = next((r for r in records if r["config"]["model"]["spread"] == cell.model.spread), records[0])
        _check_probed(record, sweep, cell)
        if NOISE in cell.knobs:
            row = _probed_noise(record, sweep, cell)
            return row["kl_k3"] * row["length_mean"]
        row = _probed(record, sweep, cell)
        return row["mismatch"]["kl_k3"] * row["length_mean"]

    return dose


def known_dose(runs: Sequence[Point], name: str) -> Dose:
    """Doses from the uncorrected runs of a sweep by name that did not collapse: medians by length, between lengths
    straight in the logarithms, beyond them the k3 a token of the nearest; a task without a size has one median. The
    result raises ValueError for a format, task, size or engine that did not run."""

    def dose(cell: RunConfig) -> float:
        size, n = size_of(cell.model.name), cell.task.n or 1
        what = (cell.task.name, size, cell.engine.name, cell.precision.name)
        usable = [p for p in runs if p.correction == NONE and p.kind == FORMAT and not p.has_collapsed]
        own = [p for p in usable if (p.task, p.size, p.engine, p.precision) == what]
        if not own:
            raise ValueError(f"dose: no run of {name} has {cell.precision.name} without a correction on "
                             f"task={what[0]}, model={size}, engine={what[2]}")  # fmt: skip
        lengths = sorted({p.length or 1 for p in own})
        by_length = [float(np.median([p.dose for p in own if (p.length or 1) == at])) / at for at in lengths]
        return n * float(np.exp(np.interp(np.log(n), np.log(lengths), np.log(by_length))))

    return dose


def _check_probed(record: Mapping[str, Any], sweep: str, cell: RunConfig) -> None:
    """Raises ValueError where the probe was made in another setting than the cell's."""
    task, model, engine = (record["config"][name] for name in ("task", "model", "engine"))
    pairs = (
        ("task", task["name"], cell.task.name), ("task.n", task["n"], cell.task.n),
        ("model.spread", model["spread"], cell.model.spread), ("engine", engine["name"], cell.engine.name),
    )  # fmt: skip
    for key, probed, run in pairs:
        if probed != run:
            raise ValueError(f"dose: probe {record['id']} has {key}={probed}, {sweep} {key}={run}; probe with that")


def _probed_noise(record: Mapping[str, Any], sweep: str, cell: RunConfig) -> Mapping[str, Any]:
    """The probe's row of a cell's noise. Raises ValueError where its sigma was not probed."""
    sigma, rows = cell.knobs[NOISE]["sigma"], record.get("noise", [])
    found = next((row for row in rows if row["sigma"] == sigma), None)
    if found is None:
        known = ", ".join(f"{row['sigma']:g}" for row in rows) or "none"
        raise ValueError(f"dose: {sweep} has noise of sigma {sigma:g}, probe {record['id']} has {known}; probe with "
                         "--noise-like")  # fmt: skip
    return found


def _probed(record: Mapping[str, Any], sweep: str, cell: RunConfig) -> Mapping[str, Any]:
    """The probe's row of a cell's format. Raises ValueError where it was not probed with these weights."""
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
    write_json_rows(path, found, "predictions")
    return path


def read_outcomes(results: Path, sweep: str) -> tuple[dict[str, Any], list[Outcome]]:
    """The predictions for a sweep, and each beside its packed runs. Raises ValueError where a file is missing, and
    where a predicted run began before the predictions were made."""
    path, packed = predictions_path(results, sweep), packed_path(results, sweep)
    for one in (path, packed):
        if not one.is_file():
            raise ValueError(f"dose: {one} is missing; predict first, then run the sweep and pack it")
    found, runs = read_json_object(path), read_packed(packed)
    ids = predicted_runs(found)
    early = [
        run.name for run in runs if ids is None or run.run_id in ids
        if run.started_at is None or moment(run.started_at) <= moment(found["made"])
    ]  # fmt: skip
    if early:
        raise ValueError(f"dose: {', '.join(early)} of {sweep} ran before the predictions were made ({found['made']})")
    return found, outcomes(found["predictions"], sweep_points(packed))


def outcomes(predictions: Sequence[Mapping[str, Any]], runs: Sequence[Point]) -> list[Outcome]:
    """Every prediction beside its runs, which may be none."""
    found: list[Outcome] = []
    for row in predictions:
        own = [p for p in runs if p.correction == row["correction"]]
        own = [p for p in own if (p.run_id in row["runs"] if "runs" in row else p.precision == row["precision"])]
        alive = [p for p in own if not p.has_collapsed]
        losses = np.array([p.loss for p in alive])
        low, high = mean_interval(losses, [p.base for p in alive])
        found.append(
            Outcome(
                precision=row["precision"], correction=row["correction"], length=row.get("length"), dose=row["dose"],
                predicted=row["loss"], found_dose=float(np.median([p.dose for p in alive])) if alive else math.nan,
                loss=float(losses.mean()) if alive else math.nan, low=low, high=high, num_runs=len(own),
                num_collapsed=len(own) - len(alive),
            )
        )  # fmt: skip
    return found


def outcome_page(said: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    """Markdown: every prediction and its runs, and how far they are apart. Raises ValueError where none has runs that
    did not collapse."""
    found = [o for o in outcomes if not math.isnan(o.loss)]
    if not found:
        raise ValueError(f"dose: no prediction for {said['sweep']} has a run that did not collapse")
    errors, losses = np.array([o.error for o in found]), np.array([o.loss for o in found])
    inside = [o.low <= o.predicted <= o.high for o in found]
    judged = sum(not math.isnan(o.low) for o in found)
    probed = "a probe of one base" if "probe" in said else "probes of one base" if "probes" in said else ""
    source = probed or f"the uncorrected runs of `{said['doses_of']}`"
    lines = [
        f"# Predictions for `{said['sweep']}`, and what came", "",
        "Lost accuracy against BF16 rollouts (mean of the evaluations during training). Predicted from "
        f"{source} before any of these runs: k3 x length, and the curve of [the dose study](dose_curve.md), which they "
        "are not part of. Brackets: 95 % over bases, of which it takes three.",
        "",
        f"{len(found)} predictions: root mean square error {np.sqrt((errors**2).mean()):.3f}, mean error "
        f"{errors.mean():+.3f} (measured less predicted); to predict no loss at all errs by "
        f"{np.sqrt((losses**2).mean()):.3f}. {sum(inside)} of {judged} lie in the interval of their runs.",
        "",
    ]  # fmt: skip
    head = ("format", "correction", "dose, before", "dose, runs", "predicted", "measured", "error", "runs")
    several = len({o.length for o in outcomes}) > 1
    rows = list[tuple[str, ...]]()
    for o in found:
        fell = f", {o.num_collapsed} collapsed" if o.num_collapsed else ""
        cells = (
            o.precision + (f", n={o.length}" if several else ""), o.correction,
            f"{o.dose:.2g}", f"{o.found_dose:.2g}", f"{o.predicted:+.3f}", with_interval(o.loss, o.low, o.high, "+.3f"),
            f"{o.error:+.3f}", f"{o.num_runs}{fell}",
        )  # fmt: skip
        rows.append(cells)
    lines.append(markdown_table(head, rows))
    fallen = [f"{o.precision} {o.correction} ({o.num_runs})" for o in outcomes if math.isnan(o.loss) and o.num_runs]
    missing = sum(not o.num_runs for o in outcomes)
    if fallen:
        lines += ["", f"Not scored, since every run collapsed: {', '.join(fallen)}."]
    if missing:
        lines += ["", f"{missing} further predictions have no run yet."]
    return "\n".join(lines) + "\n"
