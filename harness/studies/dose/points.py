"""Runs with their loss of accuracy against BF16 rollouts, and the doses of mismatch that they got."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.api import knobs
from harness.config.compose import OUTSIDE_LOSS, has_hook
from harness.foundation.json_object import read_json_object
from harness.foundation.progress_bar import progress_bar
from harness.records.arms import setting
from harness.records.packed import read_packed, read_packed_series
from harness.records.paths import packed_folder, packed_paths, predictions_path
from harness.records.run_result import RunResult
from harness.records.stats import Floats, is_collapsed
from harness.records.statuses import FINISHED
from methods import METHODS

CONTROLS = ("bf16", "naive")
"""Methods that are the control at the precision bf16: neither changes anything there."""
SEARCHES = "search_"
"""Prefix of sweeps whose trials have other knobs each, and are left out."""
SCALES = ("Profile",)
"""Parts that choose a format's scales: they belong to the format."""
NOISE = "WeightNoise"
"""Part that makes a mismatch as a format does; it corrects nothing."""
FORMAT, STALENESS = "format", "staleness"
"""Kinds of dose beside those of noise: rounding to a format, and weights of earlier steps in BF16."""
NONE = "none"
FLOOR = "bf16"
"""Rollout format without a dose."""
FIRST = 5
"""First steps of a run: about what a probe before training sees."""
ENTROPY = 0.1
"""Entropy of the trainer, nats, from which on a token is one that decides."""
K3, LENGTH, K1, ABSDIFF, ESS, CHI2 = (
    "mismatch/kl_k3", "rollout/length_mean", "mismatch/kl_k1", "mismatch/logp_absdiff_mean", "mismatch/ess_token_raw",
    "mismatch/chi2_token",
)  # fmt: skip
PROFILES = ("by_entropy/entropy", "by_entropy/k3", "by_entropy/count")
COLUMNS = (K3, LENGTH, K1, ABSDIFF, ESS, CHI2)
"""Series with a number a step."""
DOSE = "k3 x length"
START = f"k3 x length, first {FIRST} steps"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run."""

    run_id: str
    correction: str
    """Parts that correct, or "none"."""
    task: str
    precision: str
    length: int
    """Problem size of the task: the length axis."""
    size: str
    engine: str
    base: str
    """Model, task and base seed: runs that share it are one cluster."""
    loss: float
    """Mean accuracy of the evaluations during training of the control, less this run's."""
    has_collapsed: bool
    doses: Mapping[str, float]
    kind: str = FORMAT
    """Origin of the mismatch: FORMAT, STALENESS, "fixed noise" or "fresh noise"."""
    source: str = ""
    """The same with its amount: "int4", "staleness 4", "fixed noise 0.1"."""
    spread: float = 0.0
    """Sigma of the channel spread of the model's weights."""
    is_held_out: bool = False
    """A prediction is for this run: it is in no curve."""

    @property
    def dose(self) -> float:
        """Dose k3 x length."""
        return self.doses[DOSE]

    @property
    def weights(self) -> str:
        """Hash of the base's weights: the same at all problem sizes that a base runs on."""
        return self.base.split()[-1]

    @property
    def held_out(self) -> str:
        """Size, length and engine: what is left out together."""
        return f"{self.task} {self.size} {self.length} {self.engine}"


def curve_points(points: Iterable[Point]) -> list[Point]:
    """The runs of which a curve is made: those whose dose is a format's and which no prediction is for."""
    return [p for p in points if p.kind == FORMAT and not p.is_held_out]


def read_all_points(results: Path) -> list[Point]:
    """The runs of every packed sweep with a control, each once, of every kind of dose, predicted or not. Raises
    ValueError where there is none."""
    found: dict[str, Point] = {}
    held_out = set[str]()
    for path in progress_bar(packed_paths(results), "packed sweep"):
        if path.stem.startswith(SEARCHES):
            continue
        own = {p.run_id: p for p in sweep_points(path)}
        said = predictions_path(results, path.stem)
        ids = predicted_runs(read_json_object(said)) if said.exists() else frozenset[str]()
        held_out |= own.keys() if ids is None else ids
        found |= own
    if not found:
        raise ValueError(f"dose: {packed_folder(results)} holds no run with a control; pack a sweep first")
    return [replace(p, is_held_out=name in held_out) for name, p in found.items()]


def sweep_points(path: Path) -> list[Point]:
    """The runs of one packed sweep with a control. Raises ValueError naming a file that is no packed sweep."""
    return points(read_packed(path), read_packed_series(path, (*COLUMNS, *PROFILES)))


def predicted_runs(said: Mapping[str, Any]) -> frozenset[str] | None:
    """Ids of the runs that predictions are for; None where they name none and are for the whole sweep."""
    rows = said["predictions"]
    if not rows or any("runs" not in row for row in rows):
        return None
    return frozenset(name for row in rows for name in row["runs"])


def points(runs: Iterable[RunResult], series: Mapping[str, Mapping[str, Sequence[Any]]]) -> list[Point]:
    """The runs of a sweep that are corrected in the decoupled mode and have a control of equal base, seed and setting.
    A run that stands where its control collapsed is left out. A run is stale where BF16 weights of earlier steps make
    its mismatch, and in no other case; a control never is."""
    ended = [run for run in runs if run.status in FINISHED]
    aucs = {run.run_id: auc for run in ended if (auc := run.summary.get("auc")) is not None}
    usable = [run for run in ended if run.run_id in aucs]
    controls = {_place(run): run for run in usable if _is_control(run)}
    found: list[Point] = []
    for run in usable:
        control = controls.get(_place(run))
        columns = series.get(run.run_id, {})
        correction, dosed = correction_of(run.config), kind_of(run.config)
        if control is None or correction is None or dosed is None or _is_control(run) or not columns.get(K3):
            continue
        c = run.config
        doses = run_doses(columns)
        if (
            c["algo"]["mode"] != "decoupled"
            or c["algo"].get("partial_rollouts")
            or c["model"].get("num_experts")  # a mixture's mismatch is of its routing, too
            or not math.isfinite(doses[DOSE])
        ):
            continue
        has_collapsed = _has_collapsed(run)
        if _has_collapsed(control) and not has_collapsed:  # its loss would be the control's
            continue
        found.append(
            Point(
                run_id=run.run_id, correction=correction, task=c["task"]["name"], precision=c["precision"]["name"],
                length=c["task"]["n"] or 0, size=size_of(c["model"]["name"]), engine=c["engine"]["name"],
                base=f"{c['model']['name']} {c['task']['name']} {c['task']['n']} {run.base_seed} {run.base.weights}",
                loss=aucs[control.run_id] - aucs[run.run_id],
                has_collapsed=has_collapsed,
                doses=doses,
                kind=dosed[0], source=dosed[1], spread=c["model"]["spread"],
            )
        )  # fmt: skip
    return found


def run_doses(columns: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    """Candidate doses of a run from its series, each a median over steps; NaN where a column is missing.

    The spread of a response's log-ratio is what independent, normal token log-ratios of the recorded mean |d| would
    have: its variance is L x pi/2 x mean|d|^2.
    """
    values = {name: np.array(columns.get(name, ()), dtype=np.float64) for name in COLUMNS}
    k3, length = values[K3], values[LENGTH]

    def times_length(x: Floats, steps: int | None = None) -> float:
        return _median((x * length)[:steps]) if len(x) == len(length) else math.nan

    return {
        DOSE: times_length(k3),
        START: times_length(k3, FIRST),
        "k3 alone": _median(k3),
        "length alone": _median(length),
        "|k1| x length": times_length(np.abs(values[K1])),
        "chi2 x length": times_length(values[CHI2]),
        "spread of log-ratio": math.sqrt(times_length(np.pi / 2 * values[ABSDIFF] ** 2)),
        f"k3 x length, entropy from {ENTROPY:g}": _deciding(columns) * _median(length),
        "1 - ESS": _median(1 - values[ESS]),
    }


def _deciding(columns: Mapping[str, Sequence[Any]]) -> float:
    """Sum of k3 over the tokens of at least ENTROPY, per token of the whole, median over the recorded profiles."""
    found: list[float] = []
    for entropy, k3, count in zip(*(columns.get(name, ()) for name in PROFILES), strict=True):
        if isinstance(entropy, list) and entropy and sum(count):
            e, k, n = (np.array(x, dtype=np.float64) for x in (entropy, k3, count))
            inside = (e >= ENTROPY * 0.999) & (n > 0)
            found.append(float((k[inside] * n[inside]).sum() / n.sum()))
    return _median(np.array(found))


def size_of(model: str) -> str:
    """The size of a model by its name: `s128` is `s` in a shape that vLLM's kernels take."""
    return model.removesuffix("128")


def correction_words(correction: str) -> str:
    """A correction as sentences and titles name it."""
    return "no correction" if correction == NONE else correction


def correction_of(c: Mapping[str, Any]) -> str | None:
    """Names of the parts that correct, "none" for naive; None where the method does more than correct, or not with the
    knobs that it has by default. `parts` may be those of the method with NOISE beside. `c` is a run's configuration."""
    method = METHODS.get(c["method"])
    if method is None:
        return None
    usual = {type(part).__name__: knobs(part) for part in method.parts if type(part).__name__ != NOISE}
    if c["parts"] and sorted(name.rpartition(".")[2] for name in c["parts"]) != sorted([*usual, NOISE]):
        return None
    stated = {part: own for part, own in c["knobs"].items() if part != NOISE}
    if any(usual.get(part, {}).get(name) != value for part, own in stated.items() for name, value in own.items()):
        return None
    acting = [part for part in method.parts if type(part).__name__ not in (*SCALES, NOISE)]
    if any(has_hook(part, hook) for part in acting for hook in OUTSIDE_LOSS):
        return None
    return "+".join(type(part).__name__ for part in acting) or NONE


def kind_of(c: Mapping[str, Any]) -> tuple[str, str] | None:
    """(kind, kind with its amount) of what makes a run's mismatch; None where several things do. `c` is a run's
    configuration with every knob filled in."""
    precision, noise, age = c["precision"]["name"], c["knobs"].get(NOISE), c["algo"].get("staleness", 0)
    found = [(STALENESS, f"{STALENESS} {age}")] if age else []
    if noise is not None:
        found.append((f"{noise['draw']} noise", f"{noise['draw']} noise {noise['sigma']:g}"))
    if not found:
        return FORMAT, precision
    return found[0] if len(found) == 1 and precision == FLOOR else None


def _is_control(run: RunResult) -> bool:
    c = run.config
    return c["method"] in CONTROLS and c["algo"]["mode"] == "decoupled" and kind_of(c) == (FORMAT, FLOOR)


def _has_collapsed(run: RunResult) -> bool:
    known = (run.summary.get(name) for name in ("base_accuracy", "final_accuracy"))
    start, end = (math.nan if value is None else value for value in known)
    return is_collapsed(start, end, run.status == "diverged")


def _place(run: RunResult) -> str:
    """Everything of a run's setting but its method and what makes its mismatch, with its seeds."""
    own = {
        name: value
        for name, value in setting(run).items()
        if not name.startswith(("knobs", "precision", "algo.mode"))
        and name not in ("method", "parts", "algo.staleness")
    }
    return json.dumps([own, run.pair], sort_keys=True)


def _median(x: Floats) -> float:
    known = x[np.isfinite(x)]
    return float(np.median(known)) if len(known) else math.nan
