"""Answers of the exact policy to held-out questions, the log-probs that a decoder gives every token of them,
and the divergence of two such decoders.

Axes: B answers, L positions of the longest prompt with its answer, T tokens of the longest answer, N answer tokens of
all, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from harness.api import Plan
from harness.config.load import load, of_folder
from harness.config.schema import RunConfig
from harness.engines.embedded.engine import EmbeddedEngine
from harness.models.checkpoint import check_folder, load_decoder
from harness.models.decoder import Decoder, response_hidden
from harness.numerics.formats import Format, format_named
from harness.objective.loss import log_ratio
from harness.records.stats import MIN_CLUSTERS, mean_interval
from harness.start.prepare import task_of
from harness.studies.fp8_cache.attention import Counts
from harness.tasks import Task, token_ids

ROWS = 8
"""Answers of one forward pass."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Prompts with one answer each, right padded."""

    ids: Tensor
    """[B, L] int64: prompt, then answer."""
    prompt_lens: Tensor
    """[B] int64."""
    lens: Tensor
    """[B] int64: tokens of the answer, its end token included."""

    def parts(self) -> Iterator[Answers]:
        """The answers, ROWS at a time, each part as long as its longest."""
        for at in torch.arange(len(self.ids)).split(ROWS):
            ends = (self.prompt_lens + self.lens)[at]
            yield Answers(ids=self.ids[at, : int(ends.max())], prompt_lens=self.prompt_lens[at], lens=self.lens[at])

    def first(self, count: int) -> Answers:
        """The first answers alone."""
        return Answers(ids=self.ids[:count], prompt_lens=self.prompt_lens[:count], lens=self.lens[:count])

    def places(self) -> tuple[Tensor, Tensor]:
        """[B, L] bool each: positions of a prompt, and of an answer."""
        at = torch.arange(self.ids.shape[1])
        is_prompt = at < self.prompt_lens[:, None]
        return is_prompt, (at < (self.prompt_lens + self.lens)[:, None]) & ~is_prompt

    def tokens(self) -> Tensor:
        """[N] int64: the answers' tokens, answer after answer."""
        return self.ids[self.places()[1]]


def policy_of(folder: Path, words: Sequence[str]) -> tuple[RunConfig, Task, Decoder]:
    """The configuration of a model folder under some overrides, its task and its decoder. Raises ValueError for a bad
    folder or override, and for a task of another model."""
    check_folder(folder)
    config = load([*words, *of_folder(folder)])
    return config, task_of(config), load_decoder(folder)


def check_questions(task: Task, count: int, option: str) -> None:
    """Raises ValueError, naming the option, for so few questions that a mean has no interval, and for more than the
    task has held out."""
    if count < MIN_CLUSTERS:
        raise ValueError(f"{option}={count}: an interval takes at least {MIN_CLUSTERS} questions")
    if task.num_eval is not None and count > task.num_eval:
        raise ValueError(
            f"{option}={count}: task {task.name} has {task.num_eval} held-out questions; valid: {MIN_CLUSTERS} to "
            f"{task.num_eval}"
        )


def prompts_of(task: Task, num_answers: int) -> list[tuple[int, ...]]:
    """Prompts of the first `num_answers` held-out questions. Raises ValueError as `check_questions` does."""
    check_questions(task, num_answers, "--answers")
    return [item.prompt for item in task.sample("eval", range(num_answers))]


def exact_engine(model: Decoder, task: Task, kv: Format | None = None) -> EmbeddedEngine:
    """An engine with the decoder's weights in float32, and a cache in the format `kv` (None: exact)."""
    plan = Plan(rollout_weights=format_named("fp32"), rollout_kv=kv)
    engine = EmbeddedEngine(model.config, plan, **token_ids(task))
    engine.load_weights((name, value.detach()) for name, value in model.named_parameters())
    return engine


def sampled(engine: EmbeddedEngine, task: Task, prompts: Sequence[Sequence[int]], *, seed: int) -> Answers:
    """An answer to every prompt at temperature 1."""
    out = engine.generate(prompts, num_samples=1, max_new_tokens=task.max_new_tokens, temperature=1.0, seed=seed)
    rows = [[*prompt, *answer] for prompt, answer in zip(prompts, out.responses(), strict=True)]
    width = max(map(len, rows))
    return Answers(
        ids=torch.tensor([row + [0] * (width - len(row)) for row in rows]),
        prompt_lens=torch.tensor([len(prompt) for prompt in prompts]),
        lens=out.lengths.cpu(),
    )


@torch.inference_mode()
def log_probs(model: Decoder, answers: Answers, counts: Counts | None = None) -> Tensor:
    """Log-probs of the whole vocabulary at every answer token, [N, V] float32 nats at temperature 1. `counts` is told
    which positions are real."""
    found: list[Tensor] = []
    for part in answers.parts():
        is_prompt, is_answer = part.places()
        if counts is not None:
            counts.real = is_prompt | is_answer
        width = int(part.lens.max())
        hidden = response_hidden(model, part.ids, part.prompt_lens, width)
        kept = hidden[torch.arange(width) < part.lens[:, None]]
        found.append(torch.log_softmax(model.head(kept), -1))
    return torch.cat(found)


def divergence(sampler: Tensor, trainer: Tensor) -> Tensor:
    """KL of the sampler's distribution to the trainer's at every token, [N] float32 nats, from log-probs [N, V]: what
    k3 estimates from one token, here over the whole vocabulary."""
    gap = log_ratio(trainer, sampler)
    return (sampler.exp() * (gap.expm1() - gap)).sum(-1)


def mean_k3(k3: Tensor, answers: Answers) -> dict[str, float]:
    """Fields of a record's row: the mean of k3 [N] and its 95 % interval, answers as clusters."""
    owners = torch.arange(len(answers.ids)).repeat_interleave(answers.lens)
    low, high = mean_interval(k3.double().numpy(), [str(i) for i in owners.tolist()])
    return {"k3": float(k3.mean()), "k3_low": low, "k3_high": high}
