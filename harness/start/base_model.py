"""Base models of the embedded experiments: supervised from scratch, stopped early, cached by content.

A base must be under-trained: a converged one has logit margins that hide every precision effect. So training stops at
a target sampled accuracy. Where a question has one right answer, the chance to sample it is the product of its token
probabilities, and the mean over questions is the expected accuracy at temperature 1; where answers have many wordings,
they are sampled and checked. The schedule counts steps, never time; weights, data and order are functions of
(config, task, recipe, base seed), on a CPU bit for bit. Left out: the training itself (`base_training`
for one right answer, `text_training` for many).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from harness.config.schema import MIXTURE
from harness.foundation.json_object import read_json_object
from harness.foundation.lock_file import held
from harness.foundation.seeds import stable_seed
from harness.models.checkpoint import content_hash, save_decoder
from harness.models.decoder import Decoder, DecoderConfig
from harness.models.tokenizer import BOS_ID, save_tokenizer, save_words
from harness.start import text_training
from harness.start.base_training import (
    BaseRecipe,
    Progress,
    TrainingHost,
    Unfinished,
    expected_accuracy,
    fit,
    stages,
    stop_accuracy,
)
from harness.start.text_documents import buckets_of
from harness.start.text_step import check_family
from harness.start.text_training import TextRecipe, fit_text, sampled_accuracy
from harness.tasks import Demonstrated, Worded

RULE = 1
"""Version of this training procedure; part of the key."""
RECORD = "recipe.json"
LOOK_S, TELL_S = 0.05, 60.0
"""Between two looks at a lock that another process holds, and between two lines that say so."""
Recipe = BaseRecipe | TextRecipe


def base_key(config: DecoderConfig, task: Demonstrated, recipe: Recipe, base_seed: int) -> str:
    """12 hexadecimal digits over everything that decides the base's weights."""
    parts = {
        "rule": _rule(recipe),
        "model": _values(_complete(config, task)),
        "task": [task.name, task.content_hash()],
        "recipe": recipe_values(recipe),
        "base_seed": base_seed,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _values(config: DecoderConfig) -> dict[str, Any]:
    """The shape as JSON. Fields that came later are left out where a model made here has none of it: scaling of the
    rotary embedding always, the mixture of a dense one."""
    values = dataclasses.asdict(config)
    del values["rope_scaling"]
    return values if config.num_experts else {name: value for name, value in values.items() if name not in MIXTURE}


def _described(config: DecoderConfig, task: Demonstrated, recipe: Recipe) -> dict[str, Any]:
    """Fields of a record that decide a base's weights, its seed left out."""
    return {
        "rule": _rule(recipe), "task": task.name, "task_hash": task.content_hash(),
        "model": _values(_complete(config, task)), "recipe": recipe_values(recipe),
    }  # fmt: skip


def seconds_taken(config: DecoderConfig, task: Demonstrated, recipe: Recipe, folders: Iterable[Path]) -> list[float]:
    """Seconds that the bases of these folders took which differ from such a one in their seed alone, of those whose
    record tells (text bases trained on a GPU). Raises ValueError for a damaged record."""
    wanted = _described(config, task, recipe)
    records = [read_json_object(path) for folder in folders if (path := folder / RECORD).is_file()]
    alike = [record for record in records if {name: record.get(name) for name in wanted} == wanted]
    return [record["seconds"] for record in alike if "seconds" in record]


def check_recipe(config: DecoderConfig, task: Demonstrated, recipe: Recipe) -> None:
    """Raises ValueError, one line, where the recipe cannot train such a decoder on the task: for its vocabulary or
    family, the sizes of the curriculum, the length of documents. Trains nothing."""
    _complete(config, task)
    if isinstance(recipe, BaseRecipe):
        try:
            stages(task, recipe)
        except ValueError as error:
            raise ValueError(f"base.curriculum={[*recipe.curriculum]}: {error}") from None
    else:
        assert isinstance(task, Worded)
        check_family(config)
        buckets_of(task, recipe.sizes, recipe.batch_tokens, config.max_positions)


def base_name(model: str, task: Demonstrated, base_seed: int, key: str) -> str:
    """The folder's name: `s-sort8-b0-0123456789ab`. The 8 is the size of the problems."""
    return f"{model}-{task.name}{task.n}-b{base_seed}-{key}"


def ensure_base(
    model: str,
    config: DecoderConfig,
    task: Demonstrated,
    recipe: Recipe,
    base_seed: int,
    root: Path,
    progress: Progress | None = None,
    host: TrainingHost | None = None,
) -> Path:
    """The base's folder under `root`, trained first (at `host`) if it is not there. `model` only names it.

    Two processes that ask for one base train it once: the second waits for the lock. ValueError if the folder is
    damaged, if the vocabulary does not fit the task, or if training ends below half of the target. Raises Unfinished as
    `host` says.
    """
    name, host = base_name(model, task, base_seed, base_key(config, task, recipe, base_seed)), host or TrainingHost()
    folder = root / name
    if not folder.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        with held(root / f".{name}.lock", waiting(f"{name}: another process trains it", host.should_stop)):
            if not folder.is_dir():
                train_base(config, task, recipe, base_seed, folder, progress, host)
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
    recipe: Recipe,
    base_seed: int,
    folder: Path,
    progress: Progress | None = None,
    host: TrainingHost | None = None,
) -> dict[str, Any]:
    """Train a base and write `folder`: weights as bfloat16, tokenizer, and the record that is returned.

    The folder appears whole or not at all, and on a CPU is the same bit for bit on one machine: one thread does the
    work, because sums depend on how many share them. Raises ValueError and Unfinished: see `ensure_base`.
    """
    config, host, threads = _complete(config, task), host or TrainingHost(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model, found = _trained(config, task, recipe, base_seed, host, progress)
    finally:
        torch.set_num_threads(threads)
    target = stop_accuracy(task, recipe.target_accuracy)
    if found["accuracy"] < target / 2:
        raise ValueError(
            f"the base for task {task.name!r} reached accuracy {found['accuracy']:.3f} after max_steps="
            f"{recipe.max_steps}, less than half of its target {target:.3f}: allow more steps or ask for a smaller "
            "problem"
        )
    record = {
        "key": base_key(config, task, recipe, base_seed),
        **_described(config, task, recipe),
        "base_seed": base_seed,
        **found,
        "torch": torch.__version__,
    }
    record |= {} if host.device == "cpu" else {"device": torch.cuda.get_device_name(host.device)}
    record = _store(model.cpu(), record, task.words if isinstance(task, Worded) else None, folder)
    host.forget()
    return record


def _trained(
    config: DecoderConfig,
    task: Demonstrated,
    recipe: Recipe,
    base_seed: int,
    host: TrainingHost,
    progress: Progress | None,
) -> tuple[Decoder, dict[str, Any]]:
    """(model with its weights rounded to bfloat16, what it reached: on other questions than those that decided when to
    stop, and with the weights as they are stored)."""
    items = task.sample("eval", range(recipe.num_eval))
    if isinstance(recipe, TextRecipe):
        assert isinstance(task, Worded)
        trained = fit_text(config, task, recipe, base_seed, host, progress)
        _round(trained.model)
        seed = stable_seed(base_seed, "base accuracy")
        accuracy, greedy = (sampled_accuracy(trained.model, task, items, seed=seed, temperature=t) for t in (1.0, 0.0))
    else:
        trained = fit(config, task, recipe, base_seed, host, progress)
        _round(trained.model)
        accuracy, greedy = expected_accuracy(trained.model, task, items)
    target = stop_accuracy(task, recipe.target_accuracy)
    found: dict[str, Any] = {
        "steps": trained.steps,
        "is_target_reached": any((sampled or 0.0) >= target for _, sampled, _ in trained.curve),
        "accuracy": round(accuracy, 6),
        "greedy_accuracy": round(greedy, 6),
        "curve": [[s, None if a is None else round(a, 6), round(b, 6)] for s, a, b in trained.curve],
    }
    if isinstance(recipe, TextRecipe) and host.device != "cpu":
        found |= {"seconds": round(trained.seconds, 1), "tokens": trained.steps * recipe.batch_tokens}
        found |= {"tokens_per_s": round(trained.tokens_per_s)}
    return trained.model, found


@torch.no_grad()
def _round(model: Decoder) -> None:
    for tensor in model.parameters():
        tensor.copy_(tensor.bfloat16())


def _rule(recipe: Recipe) -> int | str:
    return f"text {text_training.RULE}" if isinstance(recipe, TextRecipe) else RULE


def recipe_values(recipe: Recipe) -> dict[str, Any]:
    """A recipe as JSON. What is off is left out of later fields: the keys of recipes from before them stand."""
    values = json.loads(json.dumps(dataclasses.asdict(recipe)))
    off = {"curriculum": [], "lr_power": 0.0, "average": 0.0, "tolerance": 0.0, "optimizer": "adamw"}
    return {name: value for name, value in values.items() if name not in off or value != off[name]}


def _store(model: Decoder, record: dict[str, Any], words: Sequence[str] | None, folder: Path) -> dict[str, Any]:
    """Write the folder beside its place, then move it there; the record, with the content hash. `words` of the
    tokenizer; None: its tokens are characters."""
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    save_decoder(model, part, torch.bfloat16)
    if words is None:
        save_tokenizer(part, model.config.vocab_size)
    else:
        save_words(part, words)
    record = {**record, "content_hash": content_hash(part)}
    (part / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    part.rename(folder)
    return record


def _complete(config: DecoderConfig, task: Demonstrated) -> DecoderConfig:
    """The config with the tokenizer's ids. ValueError if the vocabularies differ."""
    if config.vocab_size != task.vocab_size:
        raise ValueError(f"vocab_size={config.vocab_size} of the model is not the task's {task.vocab_size}")
    return dataclasses.replace(config, bos_id=BOS_ID, eos_id=task.eos_id, pad_id=task.pad_id)


def waiting(why: str, should_stop: Callable[[], bool]) -> Callable[[], None]:
    """Pauses between two looks at a lock, which tell the launcher that this is no hang. Raise Unfinished where
    `should_stop` says so."""
    started = told = time.monotonic()

    def pause() -> None:
        nonlocal told
        if should_stop():
            raise Unfinished("stopped while another process was at work")
        time.sleep(LOOK_S)
        if (now := time.monotonic()) - told >= TELL_S:
            told = now
            print(f"{why}; waited for {now - started:.0f} s so far", flush=True)

    return pause
