"""Preparation before a run: the base checkpoint, and every part's offline preparation, cached by content."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from harness.api import Plan, Rollout, Site, stated_knobs
from harness.config.compose import Composed, has_hook, plan_json
from harness.config.decoder_config import decoder_config, shape_to_check
from harness.config.load import run_id
from harness.config.outside import part_sources
from harness.config.schema import BaseConfig, Launch, RunConfig
from harness.engines.embedded.engine import EmbeddedEngine
from harness.foundation.life import LIFE
from harness.foundation.lock_file import held
from harness.foundation.seeds import stable_seed
from harness.models.checkpoint import content_hash, load_config, load_decoder, save_decoder, spread_channels
from harness.models.decoder import Decoder, DecoderConfig, Layer
from harness.numerics.formats import format_named
from harness.records.cell_progress import tell
from harness.records.paths import base_folders, bases_folder, work_folder
from harness.start.base_model import base_key, base_name, check_recipe, ensure_base, seconds_taken, waiting
from harness.start.base_training import BaseRecipe, TrainingHost, in_words
from harness.start.text_training import TextRecipe
from harness.tasks import EMBEDDED, Demonstrated, Item, Task, Worded, build_task, check_ends, token_ids
from harness.tasks.contract import Split

DEMONSTRATED = tuple(name for name in vars(Demonstrated) if not name.startswith("_"))
"""Names that a task has where a base can be trained for it, beside those of every task."""
FOR_WORDS = ("batch_tokens", "lr_factor", "decay_from", "optimizer", "average", "tolerance", "weight_decay")
"""Fields of `BaseConfig` that the base of a task in words alone has."""
NUM_CALIBRATION = 128
"""Calibration prompts offered to `Part.prepare`."""
PROMPTS = 256
"""Prompts of a split, at most, that are held against the model's positions before a run starts."""
DIGEST = "digest.txt"
"""Hash of what a part prepared, beside it."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Task, base and device that a run starts from."""

    folder: Path
    """Hugging Face folder of the base."""
    task: Task
    spread: float
    spread_seed: int
    device: str = "cpu"
    """Device of the run."""
    max_positions: int | None = None
    """Positions in place of the folder's own."""
    should_stop: Callable[[], bool] = lambda: False
    """Asked while another process prepares what the run waits for."""

    def build(self, folder: Path) -> Decoder:
        """The module of a checkpoint, on the device; the base's channels are spread, a prepared checkpoint's are."""
        model = load_decoder(folder, max_positions=self.max_positions)
        if folder == self.folder and self.spread:
            spread_channels(model, self.spread, self.spread_seed)
        return model.to(self.device)


def task_of(config: RunConfig) -> Task:
    """The task of a run, its data read. Raises ValueError, one line, for missing or corrupt data and models."""
    options = dict(config.task.options)
    if config.task.n is not None:
        options["n"] = config.task.n
    if config.task.path is not None:
        options["path"] = config.task.path
    path = Path(config.model.path) if config.model.path is not None else None
    if path is not None:
        load_config(path)
    elif config.model.vocab_size is not None and config.task.name in EMBEDDED:
        options["vocab_size"] = config.model.vocab_size
    task = build_task(config.task.name, options, path)
    for count, doing, split in ((task.num_train, "train", "train_split"), (task.num_eval, "evaluate", "eval_split")):
        if count == 0 and config.trainer.steps:
            raise ValueError(
                f"task={config.task.name}: no questions to {doing} on; give a task.path that has some and "
                f"task.options.{split}=NAME, or another task"
            )
    return task


def evaluation_tasks(config: RunConfig) -> list[Task]:
    """The tasks of `evaluations`, in order, their data read; those that differ in nothing but how they are sampled are
    one object. Raises ValueError, one line, for missing data, and for a task that the model cannot be asked."""
    built: dict[str, Task] = {}
    tasks: list[Task] = []
    folder = Path(config.model.path) if config.model.path is not None else None
    for i, entry in enumerate(config.evaluations):
        options = dict(entry.options)
        if entry.path is not None:
            options["path"] = entry.path
        if config.model.vocab_size is not None and entry.task in EMBEDDED:
            options["vocab_size"] = config.model.vocab_size
        key = json.dumps([entry.task, options], sort_keys=True, default=str)
        if key not in built:
            try:
                built[key] = build_task(entry.task, options, folder)
            except ValueError as error:
                raise ValueError(f"evaluations.{i}: {error}") from None
        task = built[key]
        if entry.num is None and task.num_eval is None:
            raise ValueError(f"evaluations.{i}.num=null: task {entry.task!r} has questions without end; give num=COUNT")
        if task.num_eval == 0:
            raise ValueError(f"evaluations.{i}.task={entry.task}: there are no held-out questions in its data")
        tasks.append(task)
    return tasks


def start_hashes(start: Start, evaluations: Sequence[Task]) -> dict[str, str | None]:
    """Content hashes of the base, of the task and of the tasks of `evaluations`, as a record keeps them."""
    hashes: dict[str, str | None] = {"model": content_hash(start.folder), "task": start.task.content_hash()}
    return hashes | {f"evaluations.{i}": task.content_hash() for i, task in enumerate(evaluations)}


def check_data(config: RunConfig) -> None:
    """Raises ValueError, one line, where the data of the task or of an evaluation is missing or corrupt, where a base
    is to be trained for a task that shows no answers or by a recipe that cannot train it, where the tasks end responses
    at different token ids, and where `algo.overlong_buffer` is longer than its responses, or the model has too few
    tokens for the prompts, or it or the engine's room too few positions."""
    task = task_of(config)
    base_task = None
    if config.model.path is None:
        base_task = _base_task(config, task)
        check_recipe(decoder_config(config.model), base_task, _recipe(config, base_task))
    others = evaluation_tasks(config)
    check_ends([task, *others])
    limit = config.engine.max_new_tokens or task.max_new_tokens
    if config.algo.overlong_buffer > limit:
        raise ValueError(
            f"algo.overlong_buffer={config.algo.overlong_buffer}: responses have at most {limit} tokens; valid: 0 to "
            f"{limit}"
        )
    shape = shape_to_check(config.model)
    if shape is None:
        return
    longest = max(limit, task.max_new_tokens) if base_task is task else limit  # a base is trained on whole answers
    where = f"task={config.task.name}"
    prompt = max(
        _longest_prompt(shape, where, task, "train", None),
        _longest_prompt(shape, where, task, "eval", config.task.num_eval),
    )
    key = "task.n" if base_task is task and limit <= task.max_new_tokens else "engine.max_new_tokens"
    _check_positions(config, shape, where, prompt, longest, key)
    _check_room(config, shape, where, prompt, limit)
    if base_task is not None and base_task is not task:
        where, shown = f"base.n={config.base.n}", base_task.max_new_tokens
        prompt = _longest_prompt(shape, where, base_task, "eval", None)
        _check_positions(config, shape, where, prompt, shown, "base.n")
    for i, (entry, other) in enumerate(zip(config.evaluations, others, strict=True)):
        where = f"evaluations.{i}.task={entry.task}"
        prompt = _longest_prompt(shape, where, other, "eval", entry.num)
        limit = entry.max_new_tokens or other.max_new_tokens
        _check_positions(config, shape, where, prompt, limit, f"evaluations.{i}.max_new_tokens")
        _check_room(config, shape, where, prompt, limit)


def _longest_prompt(shape: DecoderConfig, where: str, task: Task, split: Split, num_asked: int | None) -> int:
    """Tokens of the longest of the first `num_asked` prompts of a split, of `PROMPTS` at most. Raises ValueError where
    one has a token that the model does not have."""
    has = task.num_eval if split == "eval" else task.num_train
    count = min(number for number in (num_asked, has, PROMPTS) if number is not None)
    prompts = [item.prompt for item in task.sample(split, range(count))]
    if (highest := max(map(max, prompts), default=0)) >= shape.vocab_size:
        raise ValueError(f"{where}: prompts have token ids up to {highest}, the model has {shape.vocab_size} tokens")
    return max(map(len, prompts), default=0)


def _check_positions(config: RunConfig, shape: DecoderConfig, where: str, prompt: int, limit: int, key: str) -> None:
    """Raises ValueError where a prompt with a whole response of `limit` tokens, which `key` sets, does not fit the
    model: an engine would stop there."""
    positions = shape.max_positions
    if prompt + limit > positions:
        asked = "null" if config.model.max_positions is None else config.model.max_positions
        raise ValueError(
            f"model.max_positions={asked}: with {where} a prompt of {prompt} and a response of {limit} tokens need "
            f"{prompt + limit} positions, the model has {positions}; valid: {prompt + limit} or more, or a smaller "
            f"{key}"
        )


def _check_room(config: RunConfig, shape: DecoderConfig, where: str, prompt: int, limit: int) -> None:
    """The same for the room that the engine is to make."""
    room = config.engine.max_model_len
    if config.engine.name == "vllm" and room is not None and prompt + limit > room:
        raise ValueError(
            f"engine.max_model_len={room}: with {where} a prompt of {prompt} and a response of {limit} tokens need "
            f"{prompt + limit} positions; valid: {prompt + limit} to {shape.max_positions}, or null"
        )


def held_out(config: RunConfig, task: Task) -> list[Item]:
    """The questions that a run is evaluated on, in order: `task.num_eval` of them, or all that there are."""
    count = config.task.num_eval
    return task.sample("eval", range(min(count, task.num_eval or count)))


def base_folder(config: RunConfig, launch: Launch) -> Path | None:
    """Folder of the base of a run, also before it is trained; None where the model comes from a folder."""
    if config.model.path is not None:
        return None
    return bases_folder(launch.results) / _base_of(config, task_of(config))[0]


def missing_bases(cells: Iterable[RunConfig], launch: Launch) -> dict[Path, RunConfig]:
    """Folders of the bases that cells start from and that are not there yet, each with the first cell that asks for
    it."""
    found: dict[Path, RunConfig] = {}
    for cell in cells:
        folder = base_folder(cell, launch)
        if folder is not None and not folder.is_dir():
            found.setdefault(folder, cell)
    return found


def base_seconds(config: RunConfig, launch: Launch) -> list[float]:
    """Seconds that the trainings of other bases took, of those that are there and differ from the one of a run in their
    seed alone; none on a CPU, where no record tells. Raises ValueError for a damaged record."""
    if config.trainer.device == "cpu":
        return []
    _, task, recipe = _base_of(config, task_of(config))
    return seconds_taken(decoder_config(config.model), task, recipe, base_folders(launch.results))


def _base_of(config: RunConfig, task: Task) -> tuple[str, Demonstrated, BaseRecipe | TextRecipe]:
    """Folder name, task and recipe of the base of a run on `task`."""
    task = _base_task(config, task)
    recipe = _recipe(config, task)
    key = base_key(decoder_config(config.model), task, recipe, config.base_seed)
    return base_name(config.model.name, task, config.base_seed, key), task, recipe


def _base_task(config: RunConfig, task: Task) -> Demonstrated:
    """The task that the base is trained on: that of the run, at `base.n` where it is given."""
    if config.base.n is not None:
        task = task_of(replace(config, task=replace(config.task, n=config.base.n)))
    if lacking := [name for name in DEMONSTRATED if not hasattr(task, name)]:
        raise ValueError(
            f"task={config.task.name}: no base can be trained for it, its class has no {', '.join(lacking)}; give "
            "model=hf model.path=FOLDER"
        )
    return cast(Demonstrated, task)


def _recipe(config: RunConfig, task: Demonstrated) -> BaseRecipe | TextRecipe:
    """The recipe of a base for `task`. Raises ValueError for values that are none, or of another kind of task."""
    base = config.base
    if isinstance(task, Worded):
        return TextRecipe(
            target_accuracy=base.target_accuracy, eval_every=base.eval_every, num_eval=base.num_eval,
            max_steps=base.max_steps, warmup_steps=base.warmup_steps, grad_clip=base.grad_clip, sizes=base.curriculum,
            batch_tokens=base.batch_tokens, decay_from=base.decay_from, average=base.average,
            tolerance=base.tolerance, optimizer=base.optimizer, weight_decay=base.weight_decay,
            lr=config.model.sft_lr * base.lr_factor,
        )  # fmt: skip
    for name in FOR_WORDS:
        if getattr(base, name) != getattr(BaseConfig(), name):
            raise ValueError(
                f"base.{name}={getattr(base, name)}: for tasks in words alone, and task={config.task.name} is none; "
                f"valid: {getattr(BaseConfig(), name)}, as in base=default"
            )
    return BaseRecipe(
        target_accuracy=base.target_accuracy, eval_every=base.eval_every, num_eval=base.num_eval,
        max_steps=base.max_steps, batch_size=base.batch_size, warmup_steps=base.warmup_steps,
        grad_clip=base.grad_clip, curriculum=base.curriculum, lr_power=base.lr_power,
        lr=config.model.sft_lr,
    )  # fmt: skip


def start_of(
    config: RunConfig,
    launch: Launch,
    should_stop: Callable[[], bool] = lambda: False,
) -> Start:
    """The task and the base of a run; trains the base where it is not there yet, on the run's device, and then prints
    how far it is and tells the launcher of the run, where it has one.

    Raises Unfinished where `should_stop` says so: the same call later goes on from there.
    """
    task = task_of(config)
    path = Path(config.model.path) if config.model.path is not None else None
    if path is None:
        (name, shown, recipe), shape = _base_of(config, task), decoder_config(config.model)
        root = bases_folder(launch.results)
        state = work_folder(launch.results, "bases") / f"{name}.pt"
        device = config.trainer.device
        workers = 0 if device == "cpu" else max(1, min(8, (os.cpu_count() or 1) // 2))
        host = TrainingHost(device=device, state=state, should_stop=should_stop, workers=workers)
        work = work_folder(launch.results, run_id(config))

        def say(line: str) -> None:
            print(line, flush=True)
            tell(work, 0, config.trainer.steps, note=line)

        path = ensure_base(config.model.name, shape, shown, recipe, config.base_seed, root, in_words(name, say), host)
    seed = stable_seed(config.base_seed, "spread")
    return Start(
        folder=path, task=task, spread=config.model.spread, spread_seed=seed, device=config.trainer.device,
        max_positions=config.model.max_positions, should_stop=should_stop,
    )  # fmt: skip


def prepare(composed: Composed, config: RunConfig, start: Start, launch: Launch) -> Decoder:
    """Run every `Part.prepare` in order, or read what it left: fills `composed.fixed`, returns the module to train.

    Cells that need the same thing prepare it once: the others wait for the lock, and raise Unfinished where
    `start.should_stop` says so.
    """
    folder = start.folder
    identity: list[Any] = [
        content_hash(folder), start.spread, start.spread_seed, plan_json(composed.plan), config.base_seed,
        start.task.content_hash(), config.numerics_version,
        config.engine.max_batch, config.engine.max_new_tokens, config.engine.temperature,  # of `Site.sample`
    ]  # fmt: skip
    if start.max_positions is not None:
        identity.append(start.max_positions)
    if start.device == "cpu":  # sums are rounded otherwise there; the keys of GPUs are from before devices were told
        identity.append(start.device)
    identity += config.outside  # a method that was edited may prepare something else
    for i, part in enumerate(composed.parts):
        # what an earlier part wraps or prepares is seen by this one
        identity += [type(part).__name__, stated_knobs(part), *part_sources(part)]
        if not has_hook(part, "prepare"):
            continue
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        cache = work_folder(launch.results, "prepared") / key
        pause = waiting(f"{type(part).__name__}: another process prepares it", start.should_stop)
        if not _is_whole(cache):
            with held(cache.with_name(f".{key}.lock"), pause):
                if not _is_whole(cache):  # nor made meanwhile
                    site = _site(replace(composed, parts=composed.parts[:i]), config, start, folder)
                    _store(cache, *part.prepare(site, composed.plan))
        composed.fixed.update(load_file(str(cache / "fixed.safetensors")))
        folder = cache / "checkpoint" if (cache / "checkpoint").is_dir() else folder
    return start.build(folder)


def _site(earlier: Composed, config: RunConfig, start: Start, folder: Path) -> Site:
    """Inputs that the next part may use after the `earlier` ones."""
    task, count = start.task, min(NUM_CALIBRATION, start.task.num_train or NUM_CALIBRATION)

    def demonstrations(count: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        if not hasattr(task, "demonstrations"):
            return []
        seed = stable_seed(config.base_seed, "prepare demonstrations")
        return cast(Demonstrated, task).demonstrations(range(count), seed)

    def build(checkpoint: Path) -> Decoder:
        model = start.build(checkpoint)
        for layer in (module for module in model.modules() if isinstance(module, Layer)):
            layer.register_forward_pre_hook(lambda *_: LIFE.alive())  # a preparation may run for hours
        return model

    def sample(model: nn.Module, prompts: Sequence[Sequence[int]], seed: int) -> Rollout:
        assert isinstance(model, Decoder)
        engine = EmbeddedEngine(
            model.config, Plan(rollout_weights=format_named("fp32")), device=next(model.parameters()).device,
            max_batch=config.engine.max_batch, **token_ids(task),
        )  # fmt: skip
        engine.load_weights((name, tensor.detach()) for name, tensor in model.named_parameters())
        limit = config.engine.max_new_tokens or task.max_new_tokens
        temperature = config.engine.temperature
        return engine.generate(prompts, num_samples=1, max_new_tokens=limit, temperature=temperature, seed=seed)

    return Site(
        checkpoint=folder, original=start.folder, seed=config.base_seed, build=build, wrap=earlier.wrap,
        calibration=tuple(item.prompt for item in task.sample("train", range(count))),
        demonstrations=demonstrations, sample=sample, fixed=dict(earlier.fixed),
    )  # fmt: skip


def _store(cache: Path, model: nn.Module | None, fixed: dict[str, Tensor]) -> None:
    """Write a prepared folder, whole or not at all. Under its lock, so that what is there is damaged: it is set aside
    by name."""
    part = cache.with_name(f".{cache.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in fixed.items()}, str(part / "fixed.safetensors"))
    if model is not None:
        save_decoder(cast(Decoder, model), part / "checkpoint")
    (part / DIGEST).write_text(_digest(part), encoding="utf-8")
    if cache.is_dir():
        cache.rename(cache.with_name(f"{cache.name}.corrupt-{os.getpid()}"))
    part.rename(cache)


def _digest(folder: Path) -> str:
    """SHA-256 (hexadecimal) of every file under a folder, the digest itself left out."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != DIGEST):
        with path.open("rb") as file:
            digest.update(f"{path.relative_to(folder)} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def _is_whole(cache: Path) -> bool:
    """Is a part's prepared folder there, as it was written?"""
    with suppress(OSError, UnicodeDecodeError):
        return (cache / DIGEST).read_text(encoding="utf-8") == _digest(cache)
    return False
