"""The trackers by name, as `--tracking` chooses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from harness.records.folder import sweeps_in
from harness.viewers.tracking.live import Live
from harness.viewers.tracking.tracker import Tracker


def check_installed(names: Iterable[str]) -> None:
    """Raises ValueError, one line, for a tracker whose package is missing."""
    for name in names:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a folder of that name is no package: W&B leaves one where it runs
            raise ValueError(f"tracking={name}: {name} is not installed; pip install 'lowbit-rl-bench[{name}]'")


def follow(
    results: Path, sweep: str, names: Iterable[str], tags: Mapping[str, Mapping[str, str]] | None = None
) -> Live:
    """A thread that logs the cells of a sweep to these trackers while it runs."""
    return Live(results, sweep, [partial(_opener(name), results) for name in names], tags)


def track(results: Path, sweep: str, names: Iterable[str]) -> int:
    """Log what these trackers lack of one sweep: how many cells were new, counted for each."""
    count = 0
    for name in names:
        if name == "mlflow":
            from harness.viewers import mlflow

            count += mlflow.track(results, sweep)
        else:
            from harness.viewers import wandb

            count += wandb.track(results, sweep)
    return count


def log_all(results: Path, name: str) -> tuple[int, bool]:
    """Log what a tracker lacks of every sweep of a results folder: (how many cells were new, whether it was on to the
    end)."""
    if not (sweeps := sweeps_in(results)):
        return 0, True
    if name == "mlflow":
        from harness.viewers import mlflow

        tracker = mlflow.Tracker.open(results=results)
        count = sum(mlflow.log_sweep(tracker, results, sweep) for sweep in sweeps)
        return count, tracker.is_on
    from harness.viewers import wandb

    owner = wandb.WandbTracker(results)
    try:
        count = sum(wandb.log_sweep(owner, results, sweep) for sweep in sweeps)
    finally:
        owner.close()
    return count, owner.is_on


def _opener(name: str) -> Callable[[Path], Tracker]:
    """The function that connects a tracker for a results folder, in the thread that uses it."""

    def connected(results: Path) -> Tracker:
        if name == "mlflow":
            from harness.viewers.mlflow import Tracker as MLflowTracker

            return MLflowTracker.open(results=results)
        from harness.viewers.wandb import WandbTracker

        return WandbTracker(results)

    return connected
