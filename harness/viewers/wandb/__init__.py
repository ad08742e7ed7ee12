"""Weights & Biases as a view of the results: a project, a group per arm, a run per cell.

    tracker.py   cells logged one at a time

The only import of wandb, an optional package (extra `wandb`). Runs are written without a network to
`<results>/wandb/offline-run-*`, and `wandb sync` on such a folder uploads it; WANDB_MODE=online uploads at once.
WANDB_PROJECT and WANDB_ENTITY name another place than the project `lowbit`.
"""

from harness.viewers.wandb.tracker import WandbTracker, log_sweep

__all__ = ["WandbTracker", "log_sweep"]
