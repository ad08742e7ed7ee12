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
    """A thread that logs the cells of a sweep to these trackers while it runs; it connects them itself."""
    return Live(results, sweep, [lambda name=name: _connected(name, results)[0] for name in names], tags)


def track(results: Path, sweep: str, names: Iterable[str]) -> int:
    """Log what these trackers lack of one sweep: how many cells were new, counted for each."""
    return sum(_log(results, name, [sweep])[0] for name in names)


def log_all(results: Path, name: str) -> tuple[int, bool]:
    """Log what a tracker lacks of every sweep of a results folder: (how many cells were new, whether it was on to the
    end)."""
    return _log(results, name, sweeps) if (sweeps := sweeps_in(results)) else (0, True)


def _log(results: Path, name: str, sweeps: Iterable[str]) -> tuple[int, bool]:
    tracker, log_sweep = _connected(name, results)
    try:
        count = sum(log_sweep(results, sweep) for sweep in sweeps)
    finally:
        tracker.close()
    return count, tracker.is_on


def _connected(name: str, results: Path) -> tuple[Tracker, Callable[[Path, str], int]]:
    """(a tracker of a results folder, the function that logs to it what is missing of a sweep)."""
    if name == "mlflow":
        from harness.viewers import mlflow

        tracker = mlflow.Tracker.open(results=results)
        return tracker, partial(mlflow.log_sweep, tracker)
    from harness.viewers import wandb

    tracker = wandb.WandbTracker(results)
    return tracker, partial(wandb.log_sweep, tracker)
