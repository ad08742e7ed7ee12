"""Sweeps of seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.sweep import Sweep
from tests.toy import SMALL

TINY = (*SMALL, "trainer.steps=2", "trainer.eval_every=2")


def sweep_of(*arms: Mapping[str, Any], seeds: tuple[int, ...] = (0,), **axes: Sequence[Any]) -> Sweep:
    """A sweep of these arms over small cells."""
    values = {key: list(found) for key, found in axes.items()}
    return Sweep(name="test", question="", overrides=TINY, arms=tuple(map(dict, arms)), seeds=seeds, axes=values)
