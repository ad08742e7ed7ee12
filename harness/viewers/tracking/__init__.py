"""Trackers of experiments: what one is, what it is told of a run, and the thread that tells it while a sweep runs.

    tracker.py   the door: start of a run, parameters, series, artifacts, end
    facts.py     a result as tags, parameters and curves
    live.py      a thread that logs while a sweep runs

No tracker is imported here. `harness.viewers.mlflow` and `harness.viewers.wandb` stand behind the door.
"""
