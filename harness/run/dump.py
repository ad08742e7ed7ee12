"""Responses of a run under the local trainer written out step by step, where `launch.dump_rollouts` asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from harness.config.load import run_id
from harness.config.schema import Launch
from harness.records.paths import rollouts_path
from harness.run.run import Collected, Run
from harness.trainers.rollout_file import Answer, RolloutFile


def dump(launch: Launch, run: Run) -> Callable[[int, Collected], None] | None:
    """A function that appends a step's batch to the run's file; None where nothing is asked for."""
    if not launch.dump_rollouts:
        return None
    path = rollouts_path(launch.results, launch.sweep, run_id(run.config))
    file = RolloutFile(path, run.task, launch.dump_rollouts, run.step)
    return lambda step, batch: file.append(step, _answers(batch))


def _answers(batch: Collected) -> Iterator[Answer]:
    """The responses of a batch, in order."""
    truncated = batch.rollout.truncated.tolist()
    for item, score, response, cut in zip(batch.items, batch.scores, batch.rollout.responses(), truncated, strict=True):
        yield Answer(item=item, response=response, reward=score.reward, is_parsable=score.is_parsable,
                     is_truncated=bool(cut))  # fmt: skip
