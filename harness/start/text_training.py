"""Supervised training of a base on a task with many right wordings, up to a sampled accuracy.

    packed documents, short problems first -> AdamW, or Muon for the layers' matrices (warm-up, constant, linear decay)
    -> average of weights, if any
    -> every so often: how sure of the numbers? -> only if that can be near the target: sample answers and check them
    -> go on, or done; where the target was passed by too much, back between the last two evaluations

A right answer has many wordings, so its probability is no product along one of them: accuracy is measured by sampling
with the embedded engine. The probability of all numbers of a demonstrated answer, its words given, costs one forward
pass and is lower (0.32 where 0.81 of the sampled answers were right, 10M parameters at n = 10): while it is far below
the target, nobody samples. Longer answers have more numbers, so that of theirs a root counts. Schedules are
functions of the step alone. On a CPU weights, data and order are functions of (config, task, recipe, base seed), bit
for bit. Left out: batches (`harness.start.text_documents`), the step (`text_step`), what is stored
(`base_model`).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from harness.api import Plan
from harness.config.schema import BaseOptimizer
from harness.engines.embedded.engine import EmbeddedEngine
from harness.foundation.seeds import generator, stable_seed
from harness.models.decoder import Decoder, DecoderConfig
from harness.numerics.formats import format_named
from harness.start.base_training import Point, Progress, Trained, TrainingHost, reached
from harness.start.text_documents import Documents, batches, buckets_of, pack
from harness.start.text_step import PackedDecoder, PackedStep, device_of, document_numbers
from harness.tasks import Item, Worded, token_ids

RULE = 1
"""Version of this training procedure; part of the key of a text base."""
EMBED_STD = 0.02
FINE = 4
"""Factor by which evaluations are more frequent once the sampled accuracy is `CLOSE` times the target."""
CLOSE = 0.5
SURE = 0.2
"""Answers are sampled once the probability of their numbers is above this share of the target."""
NUMBERS = 70
"""Numbers in an answer up to which their probability counts as it is, about as many as at n = 10; that of k times as
many counts by its k-th root. (n = 30, 228 numbers: 0.07, root 0.44, where 0.77 of the sampled answers were right.)"""
HALVINGS = 6
"""Halvings, at most, of the line between the last two evaluations."""
SAMPLED_ROWS = 1024
"""Answers sampled at a time: few rounds, for at these sizes a GPU waits for the host at each token."""


@dataclass(frozen=True, kw_only=True)
class TextRecipe:
    """Recipe of a text base's training. The rate: linear warm-up, constant, then linear to `final_lr` of it at
    `max_steps`."""

    target_accuracy: float = 0.40
    """Training stops at the first sampled accuracy that reaches it."""
    eval_every: int = 500
    """Steps between evaluations; a quarter of it (`FINE`) where the target is near."""
    num_eval: int = 512
    max_steps: int = 5500
    batch_tokens: int = 32768
    sizes: tuple[int, ...] = ()
    """Ends of the ranges of problem sizes that are mixed (`text_documents.MIX`); empty: the task's own size alone."""
    optimizer: BaseOptimizer = "adamw"
    """`muon`: the matrices of the layers learn by Muon (`harness.start.muon`), all else by AdamW."""
    lr: float = 3e-3
    final_lr: float = 0.05
    decay_from: float = 0.6
    """Share of `max_steps` after which the rate falls; 1: never."""
    average: float = 0.0
    """Share of the steps so far over which weights are averaged, exponentially: the base is the average. 0: it is the
    last weights."""
    tolerance: float = 0.0
    """Accuracy by which the target may be passed; beyond it the base is a point between the weights of the last two
    evaluations. 0: anything may."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    warmup_steps: int = 150
    grad_clip: float = 1.0

    def __post_init__(self) -> None:
        if self.batch_tokens < 1:
            raise ValueError(f"base.batch_tokens={self.batch_tokens}: a task in words needs it; choose base=text")
        if any(high <= low for low, high in pairwise((1, *self.sizes))):
            raise ValueError(
                f"base.curriculum={[*self.sizes]}: ends of ranges of problem sizes, for a task in words; valid: "
                "numbers that rise, from 2 on, such as [6,14]"
            )


class _Average:
    """The weights that are evaluated and kept: the trained ones, or their average over the last steps.

    The average is exponential with a window that grows with the steps (arXiv:2312.02696, section 3.1, to first order).
    It takes the noise of a high learning rate out of the weights, as letting the rate fall does.
    """

    def __init__(self, trained: Decoder, share: float) -> None:
        """`share` of the steps so far: the window; 0: the trained weights themselves."""
        self.share = share
        self.model = copy.deepcopy(trained) if share else trained
        self.parameters = [list(model.parameters()) for model in (self.model, trained)]

    @torch.no_grad()
    def add(self, done: int) -> None:
        """Take the weights after step `done`, counted from 1."""
        if self.share:
            for own, new in zip(*self.parameters, strict=True):
                own.lerp_(new, min(1.0, 1 / (self.share * done)))


class LastLook:
    """The weights of the last evaluation, where a recipe goes back from a target that it has passed.

    Accuracy leaves its plateau fast (at n = 30 it rises by up to 0.24 in 200 steps), and more frequent evaluations
    would cost more than the training. On the line between two averages of weights it changes gradually.
    """

    def __init__(self, model: Decoder, is_kept: bool) -> None:
        self.model, self.is_kept, self.step = model, is_kept, 0
        self.weights = [tensor.detach().clone() for tensor in model.parameters()] if is_kept else []

    @torch.no_grad()
    def keep(self, step: int) -> None:
        """Remember the weights after `step`."""
        self.step = step
        for own, new in zip(self.weights, self.model.parameters(), strict=self.is_kept):
            own.copy_(new)

    @torch.no_grad()
    def go_back(self, step: int, look: Callable[[int], Point], target: float, tolerance: float) -> list[Point]:
        """Move the model, whose weights after `step` are too good, towards those of the last look until its accuracy
        is within `tolerance` of `target`, or `HALVINGS` times. `look` evaluates it; it takes a step in between as the
        name of the place. Returns what was seen."""
        ends, seen = [tensor.detach().clone() for tensor in self.model.parameters()], list[Point]()
        low, high = 0.0, 1.0
        while len(seen) < HALVINGS and abs(reached(seen) - target) > tolerance:
            share = (low + high) / 2
            for tensor, before, after in zip(self.model.parameters(), self.weights, ends, strict=True):
                torch.lerp(before, after, share, out=tensor)
            seen.append(look(self.step + round(share * (step - self.step))))
            low, high = (share, high) if reached(seen) < target else (low, share)
        return seen


class _Pace:
    """Steps a second between evaluations, those before the first one left out: they compile."""

    def __init__(self, is_cuda: bool) -> None:
        self.is_cuda, self.seconds, self.steps = is_cuda, 0.0, 0
        self.since: tuple[int, float] | None = None

    def stop(self, step: int) -> None:
        """An evaluation after `step` begins."""
        if self.is_cuda:
            torch.cuda.synchronize()
        if self.since is not None:
            self.steps += step - self.since[0]
            self.seconds += time.perf_counter() - self.since[1]

    def go(self, step: int) -> None:
        """The evaluation after `step` has ended."""
        self.since = (step, time.perf_counter())

    @property
    def steps_per_s(self) -> float:
        """0 where nothing was measured."""
        return self.steps / self.seconds if self.seconds else 0.0


def learning_rate(recipe: TextRecipe, step: int) -> float:
    """The rate of a step, counted from 1."""
    rate = recipe.lr * min(1.0, step / max(recipe.warmup_steps, 1))
    share = step / recipe.max_steps
    if share > recipe.decay_from:
        rate *= 1 - (1 - recipe.final_lr) * (share - recipe.decay_from) / (1 - recipe.decay_from)
    return rate


def new_decoder(config: DecoderConfig, base_seed: int) -> Decoder:
    """A decoder whose linears keep the variance of their inputs, and those that write to the residual share it among
    the layers."""
    model = Decoder(config, generator("cpu", base_seed, "base init"), init_std=1.0)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() == 2:
                scale = EMBED_STD if "embed" in name else tensor.shape[1] ** -0.5
                tensor.mul_(scale * ((2 * config.num_layers) ** -0.5 if "o_proj" in name or "down_proj" in name else 1))
    return model


def fit_text(
    config: DecoderConfig,
    task: Worded,
    recipe: TextRecipe,
    base_seed: int,
    host: TrainingHost,
    progress: Progress | None,
) -> Trained:
    """Train up to the target or to the last step. Raises Unfinished as `host` says."""
    buckets = buckets_of(task, recipe.sizes, recipe.batch_tokens, config.max_positions)
    model = new_decoder(config, base_seed).to(host.device)
    step = PackedStep(model, buckets, recipe.batch_tokens, recipe.betas, recipe.weight_decay, recipe.grad_clip,
                      recipe.optimizer == "muon")  # fmt: skip
    average = _Average(model, recipe.average)
    last = LastLook(average.model, recipe.tolerance > 0)
    done, curve, spent = 0, list[Point](), 0.0

    def restore(saved: dict[str, Any]) -> None:
        nonlocal done, curve, spent
        done, curve, spent = _restore(step, model, average, last, saved)

    if not host.resumed(restore):
        return fit_text(config, task, recipe, base_seed, host, progress)
    watched = task.sample("train", [stable_seed(base_seed, "base watch", i) for i in range(recipe.num_eval)])
    numbers = numbers_of(task, watched)
    documents = Documents(
        task=task, buckets=tuple(buckets), tokens=recipe.batch_tokens, base_seed=base_seed, max_steps=recipe.max_steps
    )
    feed, began = batches(documents, done + 1, host.workers, is_pinned=step.is_cuda), time.perf_counter()
    pace = _Pace(step.is_cuda)

    def state() -> dict[str, Any]:
        return _state(step, model, average, last, done, curve, spent + time.perf_counter() - began)

    def look(at: int) -> Point:
        return _point(average.model, task, watched, numbers, recipe, at, base_seed)

    while done < recipe.max_steps and reached(curve) < recipe.target_accuracy:
        done += 1
        step(next(feed), learning_rate(recipe, done))
        average.add(done)
        is_close = reached(curve) >= CLOSE * recipe.target_accuracy
        every = max(1, recipe.eval_every // FINE) if is_close else recipe.eval_every
        if done % every == 0 or done == recipe.max_steps:
            pace.stop(done)
            curve.append(look(done))
            if recipe.tolerance and reached(curve) > recipe.target_accuracy + recipe.tolerance:
                curve += last.go_back(done, look, recipe.target_accuracy, recipe.tolerance)
                break
            last.keep(done)
            pace.go(done)
            if progress is not None:
                progress(done, recipe.max_steps, reached(curve))
        host.after_step(done, state)
    return Trained(model=average.model, steps=done, curve=curve, seconds=spent + time.perf_counter() - began,
                   tokens_per_s=pace.steps_per_s * recipe.batch_tokens)  # fmt: skip


def _point(
    model: Decoder, task: Worded, items: Sequence[Item], numbers: float, recipe: TextRecipe, done: int, base_seed: int
) -> Point:
    sure = number_certainty(model, task, items, recipe.batch_tokens)
    if not can_be_near(sure, numbers, recipe.target_accuracy) and done < recipe.max_steps:
        return done, None, sure
    seed = stable_seed(base_seed, "base sampling", done)
    return done, sampled_accuracy(model, task, items, seed=seed), sure


def numbers_of(task: Worded, items: Sequence[Item]) -> float:
    """Mean count of numbers (`firm_ids`) in a right answer."""
    firm = set(task.firm_ids)
    return sum(sum(token in firm for token in answer) for answer in task.answers(items)) / len(items)


def can_be_near(sure: float, numbers: float, target: float) -> bool:
    """True where answers with so many numbers, right with probability `sure` altogether, can be near the target."""
    return bool(sure ** (NUMBERS / max(numbers, NUMBERS)) >= SURE * target)


@torch.no_grad()
def number_certainty(model: Decoder, task: Worded, items: Sequence[Item], tokens: int) -> float:
    """Mean over items of the probability of all numbers (`firm_ids`) of a right answer, each given what stands before
    it. `tokens` are computed at a time."""
    device = device_of(model)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    bucket = buckets_of(task, (), tokens, model.config.max_positions)[0]
    decoder = PackedDecoder(model, dtype, bucket.longest)
    shown = list(zip([item.prompt for item in items], task.answers(items), strict=True))
    firm = torch.zeros(task.vocab_size, device=device)
    firm[list(task.firm_ids)] = 1.0
    total = 0.0
    while shown:
        batch, count = pack(shown, bucket, 0, tokens)
        shown = shown[count:]
        size = tokens if device.type == "cuda" else batch.num_used
        ids, ends = batch.ids[:size].to(device), batch.ends.clamp(max=size).to(device)
        counts = batch.wanted[:size].to(device) * firm[ids.roll(-1)]
        lost = torch.zeros(len(ends), device=device)
        number = document_numbers(ends, size)
        lost.index_add_(0, number, decoder.losses(ids, ends, bucket.longest) * counts)
        has = torch.zeros_like(lost).index_add_(0, number, counts)
        total += float((torch.exp(-lost) * (has > 0)).sum())
    return total / len(items)


def sampled_accuracy(
    model: Decoder, task: Worded, items: Sequence[Item], *, seed: int, temperature: float = 1.0
) -> float:
    """Mean reward of one sampled answer to each item, by the model with its weights rounded to bfloat16."""
    engine = EmbeddedEngine(
        model.config, Plan(rollout_weights=format_named("fp32")), device=device_of(model),
        max_batch=SAMPLED_ROWS, **token_ids(task),
    )  # fmt: skip
    engine.load_weights((name, tensor.detach().bfloat16().float()) for name, tensor in model.named_parameters())
    rollout = engine.generate(
        [item.prompt for item in items], num_samples=1, max_new_tokens=task.max_new_tokens, temperature=temperature,
        seed=seed,
    )  # fmt: skip
    engine.close()
    return sum(score.reward for score in task.score(items, rollout.responses())) / len(items)


def _state(
    step: PackedStep, model: Decoder, average: _Average, last: LastLook, done: int, curve: list[Point], seconds: float
) -> dict[str, Any]:
    averaged: dict[str, Any] = {"average": average.model.state_dict()} if average.share else {}
    averaged |= {"last": last.weights, "last_step": last.step} if last.is_kept else {}
    learnt = {name: optimizer.state_dict() for name, optimizer in step.optimizers.items()}
    return {"model": model.state_dict(), "step": done, "curve": [list(point) for point in curve],
            "seconds": seconds} | learnt | averaged  # fmt: skip


def _restore(
    step: PackedStep, model: Decoder, average: _Average, last: LastLook, saved: dict[str, Any]
) -> tuple[int, list[Point], float]:
    if average.share:
        average.model.load_state_dict(saved["average"])
    if last.is_kept:
        last.step = saved["last_step"]
        for own, kept in zip(last.weights, saved["last"], strict=True):
            own.copy_(kept)
    model.load_state_dict(saved["model"])
    for name, optimizer in step.optimizers.items():
        optimizer.load_state_dict(saved[name])
    step.keep_rate()
    return saved["step"], [tuple(point) for point in saved["curve"]], saved["seconds"]
