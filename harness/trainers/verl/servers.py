"""vLLM's replicas under verl as an engine, as far as parts and evaluations need one.

Every replica holds the same weights (`rows.one_passport`), so requests go to them in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from harness.api import KVProtocol, Rollout
from harness.foundation.seeds import stable_seed
from harness.tasks import Task, stop_ids
from harness.trainers.verl.job import VerlJob, current_method

TELL_S = 5.0
"""Between two looks at how many answers are there."""


def ends_of(job: VerlJob, task: Task) -> frozenset[int]:
    """Token ids that end an answer."""
    return frozenset({job.eos_id, *stop_ids(task)} - {-1})


def ending(ends: frozenset[int]) -> dict[str, Any]:
    """vLLM's sampling parameters for answers that end so."""
    return {"stop_token_ids": sorted(ends)} if ends else {"ignore_eos": True}


class Servers:
    """Engine of remote replicas. `told` hears how many answers are there."""

    def __init__(
        self, handles: list[Any], ends: frozenset[int] = frozenset(), told: Callable[[int], None] | None = None
    ):
        self.handles, self.ends = handles, ends
        self.told = told or (lambda count: None)

    def calibrate_kv(self, prompts: Any, protocol: KVProtocol = "trainer") -> None:
        """Calibrate every replica from the same prompts."""
        if current_method().plan.rollout_kv is not None:
            ray.get([h.lowbit_calibrate.remote([list(p) for p in prompts], protocol) for h in self.handles])

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        num_samples: int,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        top_p: float = 1.0,
    ) -> Rollout:
        """`num_samples` responses per prompt, adjacent. Temperature 0 is greedy. Raises RuntimeError where a replica
        does not answer, or breaks an answer off."""
        shared = {"temperature": temperature, "top_p": top_p, "max_tokens": max_new_tokens, "logprobs": True}
        rows = [list(prompt) for prompt in prompts for _ in range(num_samples)]
        asked = [
            self.handles[i % len(self.handles)].generate.remote(
                prompt_ids=prompt, request_id=f"evaluation-{seed}-{i}",
                sampling_params=shared | ending(self.ends) | {"seed": stable_seed(seed, "row", i) % 2**31},
            )
            for i, prompt in enumerate(rows)
        ]  # fmt: skip
        try:
            waiting = asked
            while waiting:
                _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=TELL_S)
                self.told(len(asked) - len(waiting))
            answers = ray.get(asked)
        except RayError as failure:
            raise RuntimeError(f"a replica did not answer: {' '.join(str(failure).split())}") from failure
        if 0 in (lengths := [len(answer.token_ids) for answer in answers]):
            raise RuntimeError(f"a replica broke off {lengths.count(0)} of {len(lengths)} answers")
        token_ids, logp = torch.zeros(len(rows), max(lengths), dtype=torch.long), torch.zeros(len(rows), max(lengths))
        for i, (answer, length) in enumerate(zip(answers, lengths, strict=True)):
            token_ids[i, :length] = torch.tensor(answer.token_ids)
            logp[i, :length] = torch.tensor(answer.log_probs[:length])
        return Rollout(
            token_ids=token_ids, logp=logp, lengths=torch.tensor(lengths),
            truncated=torch.tensor([answer.token_ids[-1] not in self.ends for answer in answers]),
        )  # fmt: skip
