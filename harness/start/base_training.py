"""Supervised training of a base from scratch, up to an accuracy: the loop, its curriculum, its state.

    problem sizes of the curriculum below the task's own, then that one; each until the target is reached
    at every evaluation: expected accuracy -> go on, next size, or done

A long answer teaches nothing while every place of it is wrong, and a size once learnt carries over to the next, so a
curriculum makes long responses affordable. On a GPU float32 products run in TF32 and sums in no fixed order: two
trainings there agree in what they reach, not bit for bit. Left out: what is stored of a base
(`harness.start.base_model`).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.foundation.seeds import generator, stable_seed
from harness.foundation.state_files import load_or_set_aside, save_state, set_aside
from harness.models.decoder import Decoder, DecoderConfig
from harness.tasks import Demonstrated, Item

Progress = Callable[[int, int, float], None]
"""Callback with (steps done, most steps, expected sampled accuracy), at every evaluation."""
SHOW_S = 10.0
"""Seconds between two lines about a base's training; a launcher takes them as signs of life."""
Point = tuple[int, float | None, float]
"""(step, accuracy of sampling or None where nobody sampled, what is measured beside it: here the accuracy of greedy
decoding, of a text base the mean probability of all numbers of an answer)."""


def in_words(name: str, say: Callable[[str], None], every_s: float = SHOW_S) -> Progress:
    """Progress of a base's training as a line, which `say` is called with once in `every_s` seconds."""
    last = [time.monotonic()]

    def progress(step: int, most: int, accuracy: float) -> None:
        if time.monotonic() - last[0] >= every_s:
            last[0] = time.monotonic()
            say(f"{name}: step {step} of at most {most}, accuracy {accuracy:.3f}")

    return progress


KEEP_S = 60.0
"""Seconds between two states that a training keeps as it goes on; more where saving would take a twentieth of them."""
Answers = tuple[Tensor, int]
"""(prompts and right answers [B, L] int64, length of the prompts)."""


class Unfinished(RuntimeError):  # noqa: N818 - a request, not a defect
    """Training was asked to stop; what it had reached is in `TrainingHost.state`, where there is one."""


@dataclass(frozen=True, kw_only=True)
class BaseRecipe:
    """Recipe of a base's training. AdamW without decay, linear warm-up, then constant; a curriculum's sizes may slow
    down."""

    target_accuracy: float = 0.40
    """Training stops at the first evaluation that reaches it, or what the demonstrations allow (`stop_accuracy`)."""
    eval_every: int = 5
    """Steps between evaluations; above half the target every step is evaluated, so as not to overshoot."""
    num_eval: int = 512
    max_steps: int = 400
    batch_size: int = 64
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.98)
    warmup_steps: int = 50
    grad_clip: float = 1.0
    curriculum: tuple[int, ...] = ()
    """Problem sizes that come first, in this order; those not below the task's own are passed over."""
    lr_power: float = 0.0
    """A size n of the curriculum is learnt at lr * (its first size / n)**lr_power: an answer of n tokens must have a
    smaller error in each, and the noise of a constant rate keeps it from there."""

    def __post_init__(self) -> None:
        if self.lr_power < 0 or (self.lr_power and not self.curriculum):
            raise ValueError(
                f"base.lr_power={self.lr_power:g}: must be at least 0, and above it needs a base.curriculum"
            )


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Result of a training."""

    model: Decoder
    steps: int
    curve: list[Point]
    """That of the task itself; empty where a curriculum did not get there."""
    seconds: float = 0.0
    """Seconds of training and evaluation of a text base, those before a stop in between included."""
    tokens_per_s: float = 0.0
    """Tokens per second of a text base's steps between two looks at the clock, evaluations and the first steps left
    out; 0 where there are none."""


@dataclass(frozen=True, kw_only=True)
class TrainingHost:
    """Device, saved state and stop of a base's training. They do not change the base."""

    device: str = "cpu"
    state: Path | None = None
    """File that keeps the training now and then and when it is asked to stop, and from which it goes on."""
    should_stop: Callable[[], bool] = lambda: False
    """Asked after every step: should training stop?"""
    workers: int = 0
    """Processes that make the documents of a text base; they change nothing but the time."""
    due: list[float] = field(default_factory=lambda: [time.monotonic() + KEEP_S])
    """Monotonic time from which the next state is kept."""

    def after_step(self, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """Keep the training, which is what `state` says, where that is due or a stop is asked for. Raises Unfinished
        for the stop, and ValueError where its state cannot be written; a full disk costs any other state alone."""
        is_stopping, began = self.should_stop(), time.monotonic()
        if self.state is not None and (is_stopping or began >= self.due[0]):
            try:
                save_state(self.state, state())
            except ValueError as error:
                if is_stopping:
                    raise
                print(error, flush=True)
            now = time.monotonic()
            self.due[0] = now + max(KEEP_S, 20 * (now - began))
        if is_stopping:
            raise Unfinished(f"stopped after {step} steps")

    def resumed(self, restore: Callable[[dict[str, Any]], None]) -> bool:
        """Go on from the kept state, where there is one. False for one that does not fit, of another version or
        training: it is set aside, a line says so, and the caller begins anew, with nothing that `restore` touched."""
        saved = self.kept()
        if self.state is None or saved is None:
            return True
        try:
            restore(saved)
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            if "alloc" in str(error):  # memory that ran out says nothing about the file
                raise
            first = " ".join(str(error).split("\n")[:2])  # torch has a line for every tensor
            why = ValueError(f"not a state of this training: {type(error).__name__}: {' '.join(first.split())}")
            print(set_aside(self.state, why), flush=True)
            return False
        return True

    def forget(self) -> None:
        """Remove the saved state."""
        if self.state is not None:
            self.state.unlink(missing_ok=True)

    def kept(self) -> dict[str, Any] | None:
        """State to go on from; None where there is none. One that is damaged is set aside, and a line says so."""
        if self.state is None or not self.state.exists():
            return None
        return load_or_set_aside(self.state, partial(print, flush=True))


class Training:
    """Live parts of a training; `stage` is an index into `stages`, `curve` that of the size under way."""

    def __init__(self, model: Decoder, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step, self.stage = model, optimizer, 0, 0
        self.curve = list[Point]()

    def state(self) -> dict[str, Any]:
        """Tensors and plain values, for `restore`."""
        return {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step,
            "stage": self.stage, "curve": [list(point) for point in self.curve],
        }  # fmt: skip

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step, self.stage = saved["step"], saved["stage"]
        self.curve = [tuple(point) for point in saved["curve"]]


def reached(curve: Sequence[Point]) -> float:
    """The accuracy of sampling at the last evaluation: 0 where nobody sampled, minus infinity before the first."""
    return curve[-1][1] or 0.0 if curve else -math.inf


def stop_accuracy(task: Demonstrated, target: float) -> float:
    """A recipe's target, at most 85 % of the accuracy of the demonstrations: a base approaches that slowly."""
    return min(target, 0.85 * task.ceiling)


def learning_rate(recipe: BaseRecipe, task: Demonstrated, step: int) -> float:
    """The rate of a step, counted from 1, at the size of `task`."""
    size: Any = task
    falls = (min(recipe.curriculum) / size.n) ** recipe.lr_power if recipe.lr_power else 1.0
    return recipe.lr * min(1.0, step / max(recipe.warmup_steps, 1)) * min(falls, 1.0)


def stages(task: Demonstrated, recipe: BaseRecipe) -> list[Demonstrated]:
    """The task at every size of the curriculum that is below its own, then itself."""
    own: Any = task
    return [*(dataclasses.replace(own, n=size) for size in recipe.curriculum if size < own.n), task]


@torch.no_grad()
def expected_accuracy(model: Decoder, task: Demonstrated, items: Sequence[Item]) -> tuple[float, float]:
    """(expected exact match of sampling at temperature 1, exact match of greedy decoding) on `items`.

    Teacher forcing along the right answer. Greedy decoding is right iff every token is the argmax there.
    """
    device = str(next(model.parameters()).device)
    return _accuracy(model, _answers([item.prompt for item in items], task.answers(items), device))


def fit(
    config: DecoderConfig, task: Demonstrated, recipe: BaseRecipe, base_seed: int, host: TrainingHost,
    progress: Progress | None,
) -> Trained:  # fmt: skip
    """Train up to the target or to the last step. Raises Unfinished as `host` says."""
    # Unit-variance logits at the start: with the usual 0.02 narrow models take a third more steps.
    model = Decoder(config, generator("cpu", base_seed, "base init"), init_std=config.hidden_size**-0.5)
    model = model.to(host.device)
    optimizer = torch.optim.AdamW(model.parameters(), recipe.lr, recipe.betas, weight_decay=0.0, fused=True)
    run = Training(model, optimizer)
    if not host.resumed(run.restore):
        return fit(config, task, recipe, base_seed, host, progress)
    order = stages(task, recipe)
    with _matmul_precision(host.device):
        while run.stage < len(order):
            if not _learn(run, order[run.stage], recipe, base_seed, host, progress):
                break
            run.stage += 1
            run.curve = [] if run.stage < len(order) else run.curve
    return Trained(model=model, steps=run.step, curve=run.curve if run.stage >= len(order) - 1 else [])


def _learn(
    run: Training, task: Demonstrated, recipe: BaseRecipe, base_seed: int, host: TrainingHost, progress: Progress | None
) -> bool:
    """Train at one size up to its target; False where the steps ran out before."""
    watched = task.sample("train", [stable_seed(base_seed, "base watch", i) for i in range(recipe.num_eval)])
    shown = _answers([item.prompt for item in watched], task.answers(watched), host.device)
    target = stop_accuracy(task, recipe.target_accuracy)
    is_near = reached(run.curve) > target / 2
    while run.step < recipe.max_steps:
        run.step += 1
        _update(run, task, recipe, base_seed, host.device)
        if is_near or run.step % recipe.eval_every == 0 or run.step == recipe.max_steps:
            sampled, top = _accuracy(run.model, shown)
            run.curve.append((run.step, sampled, top))
            if progress is not None:
                progress(run.step, recipe.max_steps, sampled)
            if sampled >= target:
                return True
            is_near = sampled > target / 2
        host.after_step(run.step, run.state)
    return False


def _update(run: Training, task: Demonstrated, recipe: BaseRecipe, base_seed: int, device: str) -> None:
    first = (run.step - 1) * recipe.batch_size
    indices = [stable_seed(base_seed, "base batch", first + i) for i in range(recipe.batch_size)]
    shown = task.demonstrations(indices, stable_seed(base_seed, "base demonstrations"))
    batch = _answers([prompt for prompt, _ in shown], [answer for _, answer in shown], device)
    logits, answers = _answer_logits(run.model, batch)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten())
    run.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), recipe.grad_clip)
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(recipe, task, run.step)
    run.optimizer.step()


@torch.no_grad()
def _accuracy(model: Decoder, shown: Answers) -> tuple[float, float]:
    logits, target = _answer_logits(model, shown)
    logp = logits.log_softmax(-1).gather(-1, target[..., None])[..., 0]
    is_top = (logits.argmax(-1) == target).all(-1)
    return float(logp.sum(-1).exp().mean()), float(is_top.float().mean())


def _answers(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], device: str) -> Answers:
    """Prompts and right answers of items, one length of each."""
    assert len({(len(p), len(a)) for p, a in zip(prompts, answers, strict=True)}) == 1
    ids = torch.tensor([[*p, *a] for p, a in zip(prompts, answers, strict=True)])
    return ids.to(device), len(prompts[0])


def _answer_logits(model: Decoder, shown: Answers) -> tuple[Tensor, Tensor]:
    """Logits [B, T, V] float32 that predict each answer token, and those tokens [B, T] int64."""
    ids, size = shown
    return model.head(model.hidden(ids[:, :-1])[:, size - 1 :]), ids[:, size:]


@contextmanager
def _matmul_precision(device: str) -> Iterator[None]:
    """Context with TF32 products on a GPU: a base need not be bit-equal to a reference."""
    before = torch.get_float32_matmul_precision()
    if device != "cpu":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
