"""Live engines of vLLM, one for each file, and what its scheduler is asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from harness.engines.vllm.engine import VLLMEngine
from tests.engines.vllm.vllm_cases import LiveEngine, scheduler_of


@pytest.fixture(scope="module")
def live() -> Iterator[LiveEngine]:
    """A holder of the file's one engine, started anew for every other plan."""
    holder = LiveEngine()
    yield holder
    holder.close()


@pytest.fixture
def asked(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of running requests at every call of the scheduler of the file's `engine`."""
    scheduler, seen = scheduler_of(engine), list[int]()
    plain = scheduler.schedule

    def counting(*args: Any, **more: Any) -> Any:
        planned = plain(*args, **more)
        seen.append(len(planned.num_scheduled_tokens))
        return planned

    monkeypatch.setattr(scheduler, "schedule", counting)
    return seen
