"""Base models of the embedded experiments: supervised from scratch, stopped early, cached by content.

A base must be under-trained: a converged one has logit margins that hide every precision effect. So training stops at
a target sampled accuracy, measured without sampling: a question has one right answer, hence the chance to sample it is
the product of its token probabilities, and the mean over questions is the expected accuracy at temperature 1.
The schedule counts steps, never time; weights, data and order are functions of (config, task, recipe, base seed).
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.models.checkpoint import content_hash, save_decoder
from harness.models.decoder import Decoder, DecoderConfig
from harness.models.tokenizer import BOS_ID, save_tokenizer
from harness.seeds import generator, stable_seed
from harness.tasks import Demonstrated, Item

RULE = 1
"""Version of this training procedure; part of the key."""
RECORD = "recipe.json"
Progress = Callable[[int, int, float], None]
"""(steps done, most steps, expected sampled accuracy), at every evaluation."""


@dataclass(frozen=True, kw_only=True)
class BaseRecipe:
    """How a base is trained. AdamW without decay, linear warm-up, then constant."""

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


def stop_accuracy(task: Demonstrated, recipe: BaseRecipe) -> float:
    """The recipe's target, at most 85 % of the accuracy of the demonstrations: a base approaches that slowly."""
    return min(recipe.target_accuracy, 0.85 * task.ceiling)


def base_key(config: DecoderConfig, task: Demonstrated, recipe: BaseRecipe, base_seed: int) -> str:
    """12 hexadecimal digits over everything that decides the base's weights."""
    parts = {
        "rule": RULE,
        "model": dataclasses.asdict(_complete(config, task)),
        "task": [task.name, task.content_hash()],
        "recipe": dataclasses.asdict(recipe),
        "base_seed": base_seed,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def base_name(model: str, task: Demonstrated, base_seed: int, key: str) -> str:
    """The folder's name: `s-sort8-b0-0123456789ab`. The 8 is the response length without EOS."""
    return f"{model}-{task.name}{task.max_new_tokens - 1}-b{base_seed}-{key}"


def ensure_base(
    model: str,
    config: DecoderConfig,
    task: Demonstrated,
    recipe: BaseRecipe,
    base_seed: int,
    root: Path,
    progress: Progress | None = None,
) -> Path:
    """The base's folder under `root`, trained first if it is not there. `model` only names it.

    Two processes that ask for one base train it once: the second waits for the lock. ValueError if the folder is
    damaged, if the vocabulary does not fit the task, or if training ends below half of the target.
    """
    name = base_name(model, task, base_seed, base_key(config, task, recipe, base_seed))
    folder = root / name
    if not folder.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root / f".{name}.lock"):
            if not folder.is_dir():
                train_base(config, task, recipe, base_seed, folder, progress)
    read_record(folder)
    return folder


def read_record(folder: Path) -> dict[str, Any]:
    """The `recipe.json` of a base folder. ValueError if it is missing or the weights are not those it describes."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        is_whole = record["content_hash"] == content_hash(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"base folder {folder} is damaged ({error}): delete it to train it again") from error
    if not is_whole:
        raise ValueError(f"base folder {folder} is damaged (its weights were changed): delete it to train it again")
    return record


def train_base(
    config: DecoderConfig,
    task: Demonstrated,
    recipe: BaseRecipe,
    base_seed: int,
    folder: Path,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Train a base and write `folder`: weights as bfloat16, tokenizer, and the record that is returned.

    The folder appears whole or not at all, and is the same bit for bit on one machine: one thread does the work,
    because sums depend on how many share them. ValueError: see `ensure_base`.
    """
    config = _complete(config, task)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model, steps, curve = _fit(config, task, recipe, base_seed, progress)
    finally:
        torch.set_num_threads(threads)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(tensor.bfloat16())
    # Other questions than those that decided when to stop, and the weights as they are stored.
    accuracy, greedy = expected_accuracy(model, task, task.sample("eval", range(recipe.num_eval)))
    target = stop_accuracy(task, recipe)
    if accuracy < target / 2:
        raise ValueError(
            f"the base for task {task.name!r} reached accuracy {accuracy:.3f} after max_steps={recipe.max_steps}, less "
            f"than half of its target {target:.3f}: allow more steps or ask for a smaller problem"
        )
    record = {
        "key": base_key(config, task, recipe, base_seed),
        "rule": RULE,
        "task": task.name,
        "task_hash": task.content_hash(),
        "model": dataclasses.asdict(config),
        "recipe": {**dataclasses.asdict(recipe), "betas": list(recipe.betas)},
        "base_seed": base_seed,
        "steps": steps,
        "is_target_reached": curve[-1][1] >= target,
        "accuracy": round(accuracy, 6),
        "greedy_accuracy": round(greedy, 6),
        "curve": [[step, round(sampled, 6), round(top, 6)] for step, sampled, top in curve],
        "torch": torch.__version__,
    }
    return _store(model, record, folder)


def _store(model: Decoder, record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write the folder beside its place, then move it there; the record, with the content hash."""
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    save_decoder(model, part, torch.bfloat16)
    save_tokenizer(part, model.config.vocab_size)
    record = {**record, "content_hash": content_hash(part)}
    (part / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    part.rename(folder)
    return record


@torch.no_grad()
def expected_accuracy(model: Decoder, task: Demonstrated, items: Sequence[Item]) -> tuple[float, float]:
    """(expected exact match of sampling at temperature 1, exact match of greedy decoding) on `items`.

    Teacher forcing along the right answer. Greedy decoding is right iff every token is the argmax there.
    """
    prompts, answers = [item.prompt for item in items], task.answers(items)
    logits, target = _answer_logits(model, prompts, answers)
    logp = logits.log_softmax(-1).gather(-1, target[..., None])[..., 0]
    is_top = (logits.argmax(-1) == target).all(-1)
    return float(logp.sum(-1).exp().mean()), float(is_top.float().mean())


def _fit(
    config: DecoderConfig, task: Demonstrated, recipe: BaseRecipe, base_seed: int, progress: Progress | None
) -> tuple[Decoder, int, list[tuple[int, float, float]]]:
    """(model, steps done, [(step, sampled accuracy, greedy accuracy)])."""
    # Unit-variance logits at the start: with the usual 0.02 narrow models take a third more steps.
    model = Decoder(config, generator("cpu", base_seed, "base init"), init_std=config.hidden_size**-0.5)
    optimizer = torch.optim.AdamW(model.parameters(), recipe.lr, recipe.betas, weight_decay=0.0, fused=True)
    watched = task.sample("train", [stable_seed(base_seed, "base watch", i) for i in range(recipe.num_eval)])
    curve: list[tuple[int, float, float]] = []
    target = stop_accuracy(task, recipe)
    for step in range(1, recipe.max_steps + 1):
        first = (step - 1) * recipe.batch_size
        indices = [stable_seed(base_seed, "base batch", first + i) for i in range(recipe.batch_size)]
        shown = task.demonstrations(indices, stable_seed(base_seed, "base demonstrations"))
        logits, answers = _answer_logits(model, [prompt for prompt, _ in shown], [answer for _, answer in shown])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * min(1.0, step / max(recipe.warmup_steps, 1))
        optimizer.step()
        is_near = bool(curve) and curve[-1][1] > target / 2
        if is_near or step % recipe.eval_every == 0 or step == recipe.max_steps:
            sampled, top = expected_accuracy(model, task, watched)
            curve.append((step, sampled, top))
            if progress is not None:
                progress(step, recipe.max_steps, sampled)
            if sampled >= target:
                break
    return model, curve[-1][0], curve


def _answer_logits(
    model: Decoder, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Logits [B, T, V] float32 that predict each answer token, and those tokens [B, T] int64. One length each."""
    assert len({(len(p), len(a)) for p, a in zip(prompts, answers, strict=True)}) == 1
    ids = torch.tensor([[*p, *a] for p, a in zip(prompts, answers, strict=True)])
    size = len(prompts[0])
    return model.head(model.hidden(ids[:, :-1])[:, size - 1 :]), ids[:, size:]


def _complete(config: DecoderConfig, task: Demonstrated) -> DecoderConfig:
    """The config with the tokenizer's ids. ValueError if the vocabularies differ."""
    if config.vocab_size != task.vocab_size:
        raise ValueError(f"vocab_size={config.vocab_size} of the model is not the task's {task.vocab_size}")
    return dataclasses.replace(config, bos_id=BOS_ID, eos_id=task.eos_id, pad_id=task.pad_id)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock file. The system releases it when the process dies; it is removed when done."""
    while True:
        handle = path.open("w")
        fcntl.flock(handle, fcntl.LOCK_EX)
        # The holder before us removes the file: if the name is gone or taken anew, our lock is on nothing.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle.fileno()), path.stat()):
                break
        handle.close()
    try:
        yield
    finally:
        path.unlink()
        handle.close()
