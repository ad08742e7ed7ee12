"""The folder that a run under verl starts from: model, prompts as Parquet, what the parts prepared.

Prompts are written in the order in which the run draws them (`sampling.py`, as the local trainer does), for verl to
read at its start and to know the longest. A row names its item by (split, index); `agent.py` takes the tokens from the
task.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.torch import save_file
from tokenizers import Tokenizer

from harness.config.compose import Composed, has_hook
from harness.config.load import run_id
from harness.config.schema import Launch, RunConfig
from harness.models.checkpoint import link_folder, save_decoder
from harness.records.paths import rollouts_path
from harness.start.prepare import Start, evaluation_tasks, held_out, prepare
from harness.tasks import Item
from harness.tasks.prompt_order import prompt_indices
from harness.trainers.dynamic_sampling import num_drawn
from harness.trainers.task_evaluation import asked
from harness.trainers.verl.job import VerlJob, write_job
from harness.trainers.verl.settings import ROLLOUT

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt",
                   "generation_config.json", "chat_template.jinja")  # fmt: skip
CHUNK = 4096
"""Items held at once."""


def lay_out(
    config: RunConfig, launch: Launch, composed: Composed, start: Start, folder: Path, *, is_timed: bool = False
) -> VerlJob:
    """Write everything that verl reads; what is there already is kept. Raises ValueError where it cannot be."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(start.folder / "tokenizer.json"))
    rollouts = rollouts_path(launch.results, launch.sweep, run_id(config))
    job = VerlJob(
        config=_with_absolute_paths(config), launch=launch, folder=folder.absolute(), eos_id=start.task.eos_id,
        max_new_tokens=config.engine.max_new_tokens or start.task.max_new_tokens,
        num_tokens=tokenizer.get_vocab_size(with_added_tokens=True), is_timed=is_timed,
        base=str(start.folder.absolute()), evaluation_length=evaluation_length(config),
        rollouts=str(rollouts.absolute()) if launch.dump_rollouts else "",
    )  # fmt: skip
    if not (job.model / "config.json").exists():
        write_model(job, composed, config, start, launch)
    write_prompts(job.train_file, _train_items(job, start), tokenizer)
    write_prompts(job.eval_file, held_out(config, start.task), tokenizer)
    agent = [{"name": ROLLOUT, "_target_": "harness.trainers.verl.agent.TaskLoop"}]
    (job.folder / "agent.yaml").write_text(json.dumps(agent), encoding="utf-8")
    write_job(job)
    return job


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    """The processes of a run have another working directory than the command."""

    def absolute(path: str | None) -> str | None:
        return path and str(Path(path).absolute())

    return replace(
        config, model=replace(config.model, path=absolute(config.model.path)),
        task=replace(config.task, path=absolute(config.task.path)),
        evaluations=tuple(replace(entry, path=absolute(entry.path)) for entry in config.evaluations),
    )  # fmt: skip


def evaluation_length(config: RunConfig) -> int:
    """Tokens of the longest prompt with a whole answer among `evaluations`; 0 where there are none."""
    ones = asked(config.evaluations, evaluation_tasks(config))
    return max((max(len(item.prompt) for item in one.items) + one.max_new_tokens for one in ones), default=0)


def write_model(job: VerlJob, composed: Composed, config: RunConfig, start: Start, launch: Launch) -> None:
    """The prepared policy as a Hugging Face folder with the base's tokenizer; where nothing is prepared, the base."""
    part = job.folder / "model.part"
    shutil.rmtree(part, ignore_errors=True)
    if not start.spread and not any(has_hook(each, "prepare") for each in composed.parts):
        save_file({}, str(job.fixed_file))
        if start.max_positions is None:
            job.model.symlink_to(start.folder.absolute(), target_is_directory=True)
        else:
            link_folder(start.folder, part, start.max_positions)
            part.rename(job.model)
        return
    part.mkdir()
    model = prepare(composed, config, start, launch)
    save_file({name: tensor.contiguous() for name, tensor in composed.fixed.items()}, str(job.fixed_file))
    save_decoder(model, part)
    for name in TOKENIZER_FILES:
        if (start.folder / name).exists():
            shutil.copy2(start.folder / name, part / name)
    part.rename(job.model)


def train_indices(job: VerlJob, num_train: int | None) -> Sequence[int]:
    """The items of all rollout batches, in order. With dynamic sampling nobody knows how many there will be: all that
    the task has, or as many as are needed where no prompt is dropped."""
    algo = job.config.algo
    count = job.config.trainer.steps * num_drawn(algo)
    if algo.dynamic_sampling and num_train is not None:
        count = max(num_train, num_drawn(algo))
    return prompt_indices(job.config.seed, range(count), num_train)


def _train_items(job: VerlJob, start: Start) -> Iterator[Item]:
    indices = train_indices(job, start.task.num_train)
    for first in range(0, len(indices), CHUNK):
        yield from start.task.sample("train", indices[first : first + CHUNK])


def write_prompts(path: Path, items: Iterable[Item], tokenizer: Any) -> int:
    """verl's columns, one row an item; returns the rows. The text is for readers, `index` is what names the item."""
    split = path.stem
    rows = [prompt_row(item, split, tokenizer.decode(list(item.prompt), skip_special_tokens=False)) for item in items]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return len(rows)


def prompt_row(item: Item, split: str, text: str) -> dict[str, Any]:
    """verl's columns of one item. `text`: its prompt, for readers."""
    return {
        "data_source": split,
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"style": "rule", "ground_truth": item.reference},
        "extra_info": {"split": split, "index": item.index, "num_tokens": len(item.prompt)},
    }


def prompt_length(job: VerlJob) -> int:
    """Tokens of the longest prompt."""
    infos = [pq.read_table(path, columns=["extra_info"]).to_pylist() for path in (job.train_file, job.eval_file)]
    return max(row["extra_info"]["num_tokens"] for rows in infos for row in rows)
