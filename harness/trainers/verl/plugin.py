"""Our classes in verl's registries. verl imports this module in every process, by its entry point `verl.plugins` and by
the environment of a job; the second way does not swallow errors, and `check_registered` asserts what stands there.

A process that belongs to no job of ours is left alone. Imports of verl's larger modules wait until they are needed:
this module runs at the end of `import verl`.
"""

from __future__ import annotations

import os
from typing import Any

from harness.trainers.verl.job import JOB
from harness.trainers.verl.settings import ROLLOUT

ADAPTER = "harness.trainers.verl.adapter.Adapter"


def register() -> None:
    """Fill the registries; harmless when called again."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    _ROLLOUT_REGISTRY[(ROLLOUT, "async")] = ADAPTER
    RolloutReplicaRegistry.register(ROLLOUT, _replica)
    from harness.trainers.verl import engine  # noqa: F401 - registers itself


def _replica() -> type[Any]:
    from harness.trainers.verl.server import Replica

    return Replica


def check_registered() -> None:
    """Raises RuntimeError where verl would run something else than ours."""
    from verl.workers.engine import EngineRegistry
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    found = {
        "engine": EngineRegistry.get_engine_cls("language_model", "fsdp2").__module__,
        "rollout": _ROLLOUT_REGISTRY.get((ROLLOUT, "async"), "none"),
        "replica": RolloutReplicaRegistry.get(ROLLOUT).__module__,
    }
    wrong = [f"{kind} is {place}" for kind, place in found.items() if not place.startswith("harness.trainers.verl.")]
    if wrong:
        raise RuntimeError(f"verl did not take our classes: {'; '.join(wrong)}")


if JOB in os.environ:
    if os.environ.get("VERL_PLATFORM") == "cpu":
        from harness.trainers.verl import cpu

        cpu.install()
    register()
