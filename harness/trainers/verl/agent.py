"""One prompt of a task, one answer, one reward: tokens in and out, scored by the task's own code.

verl's loop would render a chat and decode the answer; here both ends are the token ids that every other engine sees.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from functools import cache
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from harness.start.prepare import task_of
from harness.tasks import Task
from harness.tasks.count import Count
from harness.trainers.verl.job import current_job
from harness.trainers.verl.servers import ending, ends_of

ASKED: Counter[int] = Counter()
"""Prompt -> answers that this process has asked for, where a task says how long each is."""


@cache
def _task() -> Task:
    return task_of(current_job().config)


class TaskLoop(AgentLoopBase):
    """verl makes one per answer. Its own set-up wants a chat tokenizer, which a task of token ids need not have."""

    def __init__(self, *args: Any, server_manager: Any, **kwargs: Any) -> None:
        self.server_manager = server_manager

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """`kwargs["extra_info"]` names the item by split and index."""
        job, task, info = current_job(), _task(), kwargs["extra_info"]
        item = task.sample(info["split"], [int(info["index"])])[0]
        ids_of_end = ends_of(job, task)
        ends = ending(ids_of_end)
        if isinstance(task, Count):
            ends["max_tokens"] = task.limit(item.index, ASKED[item.index])
            ASKED[item.index] += 1
        output = await self.server_manager.generate(
            request_id=uuid4().hex, prompt_ids=list(item.prompt), sampling_params={**sampling_params, **ends}
        )
        ids = output.token_ids[: job.max_new_tokens]
        logp = output.log_probs[: len(ids)]
        score = (await asyncio.to_thread(task.score, [item], [ids]))[0]
        facts = {"acc": float(score.reward), "is_parsable": float(score.is_parsable), "index": float(item.index),
                 "length": float(len(ids)), "truncated": float(ids[-1] not in ids_of_end),
                 "failure": score.failure, "lost": float(sum(map(math.isnan, logp)))}  # fmt: skip
        return AgentLoopOutput(
            prompt_ids=list(item.prompt), response_ids=ids, response_mask=[1] * len(ids),
            response_logprobs=logp, reward_score=float(score.reward), num_turns=2,
            metrics=AgentLoopMetrics(), extra_fields={**output.extra_fields, "reward_extra_info": facts},
        )  # fmt: skip
