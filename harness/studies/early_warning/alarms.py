"""Signals of a run as statistics per step that rise before trouble, and the runs they are read from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.records.arms import group_arms, label
from harness.records.run_result import RunResult, accuracies, read_series
from harness.records.running_mean import running_mean
from harness.records.stats import Floats
from harness.studies.early_warning.collapse import Kind, drawdown, kind, onset

REWARD = "reward/accuracy"
REWARD_DROP = "reward drop"
SMOOTH = 3
"""Steps of the trailing mean of a signal."""
BASE = 5
"""First steps of a run, whose mean a drift is measured from."""
Transform = Callable[[Floats], Floats]


def _log(scale: float) -> Transform:
    """log(scale + x): changes far below `scale`, about what harmless int8 rollouts show, do not count."""
    return lambda x: np.log(scale + np.maximum(x, 0))


def _loss(x: Floats) -> Floats:
    """Log of what an effective sample size lacks of 1."""
    return np.log(0.01 + np.maximum(1 - x, 0))


SIGNALS: dict[str, tuple[str, Transform]] = {
    "ESS raw": ("mismatch/ess_token_raw", _loss),
    "ESS truncated": ("mismatch/ess_token", _loss),
    "k3": ("mismatch/kl_k3", _log(0.01)),
    "|d| p99": ("mismatch/logp_absdiff_p99", _log(0.1)),
    "|d| p99.9": ("mismatch/logp_absdiff_p999", _log(0.3)),
    "|d| max": ("mismatch/logp_absdiff_max", _log(1.0)),
    "entropy up": ("train/entropy", _log(0.01)),
    "entropy down": ("train/entropy", lambda x: -np.log(0.01 + x)),
    "clip fraction up": ("train/clip_frac", _log(0.001)),
    "clip fraction down": ("train/clip_frac", lambda x: -np.log(0.001 + x)),
    "gradient norm up": ("train/grad_norm", _log(0.05)),
    "gradient norm down": ("train/grad_norm", lambda x: -np.log(0.05 + x)),
    "code flips up": ("sync/code_flip_rate", _log(0.001)),
    "code flips down": ("sync/code_flip_rate", lambda x: -np.log(0.001 + x)),
    "|ppo_kl|": ("train/ppo_kl", lambda x: np.log(0.001 + np.abs(x))),
    "cut responses": ("rollout/truncated_frac", _log(0.01)),
}
"""Signal -> (column of the series, transform after which larger is worse). Cut: stopped by the length limit."""
COLUMNS = tuple(dict.fromkeys([REWARD, *(column for column, _ in SIGNALS.values())]))


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One run, ready to be watched."""

    context: str
    """Sweep and setting: thresholds are not carried from one to another."""
    arm: str
    precision: str
    fold: int
    """Base seed: thresholds come from other folds."""
    kind: Kind
    reward_kind: Kind
    """The same by the reward alone, which knows no hidden loss."""
    onset: int | None
    statistics: dict[str, Floats]
    """"signal (level)" and "signal (drift)" -> [N], larger is worse, NaN before it is defined."""


def traces(folder: Path, results: Sequence[RunResult]) -> list[Trace]:
    """The runs of a sweep's folder that recorded a reward, in the order of their arms."""
    found: list[Trace] = []
    for arm in group_arms(results):
        for run in arm.runs:
            has_series = (folder / f"{run.run_id}.parquet").exists()
            series = read_series(folder, run.run_id, COLUMNS) if has_series else {}
            if series.get(REWARD):
                columns = {name: np.array(values) for name, values in series.items()}
                reward = columns[REWARD]
                found.append(
                    Trace(
                        context=" ".join(filter(None, [run.sweep, label(arm.context)])),
                        arm=f"{run.sweep} {arm.label}",
                        precision=arm.precision,
                        fold=run.base_seed,
                        kind=kind(reward, run.status, [value for _, value in accuracies(run.evals, "reference")]),
                        reward_kind=kind(reward, run.status),
                        onset=onset(reward, run.status),
                        statistics=statistics(columns),
                    )
                )
    return found


def statistics(columns: dict[str, Floats]) -> dict[str, Floats]:
    """Every signal whose column is there and ever moves, as a level and as a drift from the run's own start."""
    found = {REWARD_DROP: drawdown(columns[REWARD])}
    for name, (column, transform) in SIGNALS.items():
        values = columns.get(column)
        if values is None or not np.isfinite(values).any() or np.nanmax(values) == np.nanmin(values):
            continue
        level = running_mean(transform(values), SMOOTH)
        base = running_mean(transform(values), BASE)[BASE - 1 : BASE]
        drift = (
            np.where(np.arange(len(level)) >= BASE, level - base, np.nan) if len(base) else np.full(len(level), np.nan)
        )
        found |= {f"{name} (level)": level, f"{name} (drift)": drift}
    return found
