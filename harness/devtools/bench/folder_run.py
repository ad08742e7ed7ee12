"""Whole runs on the shape of a Hugging Face model: real questions, an evaluation, a saved policy, memory and seconds.

    python -m harness.devtools.bench folder_run --size 1.5b,7b --data GSM8K --out folder_run.json
    python -m harness.devtools.bench folder_run --device cpu --size toy --precision bf16,int8 --prompts 2 --group 2 \\
        --tokens 16 --questions 2 --data GSM8K --out x.json

A cell is `lowbit run` in a process of its own, with the local trainer and vLLM in one GPU: weights are random, the
tokenizer is byte-level BPE made from the questions, with Qwen2.5's chat template and as many ids as the model has. So
nearly every response is as long as it may be, and none is right: seconds and memory are those of real weights in the
worst case, rewards and accuracies say nothing. Micro-batches and checkpointed layers are those of the capacity plan.
Finished cells of the file are kept: the same command goes on. Left out: states to resume from, which
have 85 GB at 7B.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.config.load import of_folder, quoted
from harness.devtools.bench.runner import (
    add_device_and_out,
    add_numbers,
    check_device,
    check_gpu_memory,
    check_positive,
    kept,
    save,
    settings_of,
    word_list,
)
from harness.devtools.bench.verl_scaling import make_folder
from harness.engines.vllm.memory import num_parameters
from harness.foundation.clock import STAGES
from harness.foundation.own_process import code_path, module_command
from harness.foundation.provenance import commit, hardware, packages
from harness.models.tokenizer import BOS_ID, EOS_ID, PAD_ID, SPECIAL
from harness.published.recipes.twin import TEMPLATES
from harness.records.paths import policy_folder, runs_folder, work_folder
from harness.records.run_result import RunResult, read_result, read_series
from harness.studies.capacity.check import work_of
from harness.studies.capacity.place import place
from harness.studies.throughput.shapes import plan_of, shape_of
from harness.tasks.data_files import find_files, read_rows

CORRECTED = "flashrl"
"""Method of rollouts in fewer bits than BF16."""
MERGES = 8192
"""Most pieces of text of the tokenizer; further ids of a model's vocabulary are fillers that no text has."""
ROOM = 1024
"""Positions for a prompt."""
GPU_MEMORY, PROMPT_TOKENS, PASS_TOKENS = 0.3, 256, 16896
"""Usual values of the options of these names."""
Found = dict[str, Any]


def write_folder(folder: Path, size: str, data: Path, device: str) -> None:
    """A Hugging Face folder of random weights whose tokenizer reads and answers the questions of `data`; kept if
    there. Raises ValueError for data without questions to train on."""
    if folder.exists():
        return
    texts = [value["question"] for _, value in read_rows(find_files("gsm8k", "", "main", "train", str(data), None),
                                                         {"question": ("question",)})]  # fmt: skip
    made = folder.with_name(f"{folder.name}.weights")
    shutil.rmtree(made, ignore_errors=True)
    make_folder(made, size, device)
    write_tokenizer(made, texts, shape_of(size).vocab_size)
    made.rename(folder)


def write_tokenizer(folder: Path, texts: Sequence[str], size: int, chat: str | None = None) -> None:
    """Byte-level BPE made from `texts`, with `size` ids and a chat template, by default Qwen2.5's; the first three ids
    are the special tokens that `make_folder` gives the model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    usual, _, turns = TEMPLATES["qwen2.5"]
    chat = chat or usual.replace("<|im_end|>", SPECIAL[EOS_ID])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=min(MERGES, size), initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False, special_tokens=[*SPECIAL, *turns],
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    written = json.loads(tokenizer.to_str())
    vocab = written["model"]["vocab"]
    vocab |= {f"filler{i}": i for i in range(len(vocab), size)}
    (folder / "tokenizer.json").write_text(json.dumps(written), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[BOS_ID],
                "eos_token": SPECIAL[EOS_ID], "pad_token": SPECIAL[PAD_ID], "unk_token": SPECIAL[PAD_ID],
                "chat_template": chat}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def words_of(folder: Path, size: str, precision: str, given: argparse.Namespace) -> list[str]:
    """Overrides of one cell."""
    data, method = quoted(str(given.data.absolute())), "bf16" if precision == "bf16" else CORRECTED
    evaluation = f"task:gsm8k,path:{data},num:{given.questions},k:{given.samples},max_new_tokens:{given.tokens}"
    words = [
        f"method={method}", f"precision={precision}", *of_folder(folder),
        f"model.max_positions={ROOM + given.tokens}", "task=gsm8k", f"task.path={data}",
        f"task.num_eval={given.questions}", f"evaluations=[{{{evaluation},temperature:0.6,top_p:0.95}}]",
        f"trainer.device={given.device}", f"trainer.steps={given.steps}", f"trainer.eval_every={given.steps}",
        f"algo.num_prompts={given.prompts}", f"algo.group_size={given.group}", f"engine={given.engine}",
        f"engine.max_new_tokens={given.tokens}", f"engine.max_batch={given.prompts * given.group}",
        "launch.save=hf", f"launch.checkpoint_every_steps={given.steps + 1}",
    ]  # fmt: skip
    if given.device == "cuda":
        planned = place(work_of(size, 1, precision, vars(given)), 1)
        words += ["engine.sleep=true", f"engine.gpu_memory={given.gpu_memory}",
                  f"launch.micro_batch_tokens={planned.rows * (given.prompt_tokens + given.tokens)}",
                  f"launch.checkpoint_layers={str(planned.is_checkpointed).lower()}"]  # fmt: skip
    return [*words, *given.overrides]


def measure(folder: Path, size: str, precision: str, given: argparse.Namespace) -> Found:
    """One run as its record tells it, or {"failed": the last words of the process}."""
    results = Path(given.work).absolute() / f"{size}-{precision}"
    shutil.rmtree(results, ignore_errors=True)
    words = words_of(folder, size, precision, given)
    started = time.monotonic()
    done = subprocess.run(
        module_command("harness.cli.main", "run", *words, "--results", str(results)),
        capture_output=True, text=True, check=False, env=os.environ | code_path(),
    )  # fmt: skip
    seconds = time.monotonic() - started
    records = sorted(runs_folder(results, "runs").glob("*.json"))
    log = [*done.stdout.splitlines()[-20:], *done.stderr.splitlines()[-20:]]
    if not records:
        return {"words": words, "wall_s": seconds, "failed": log[-1] if log else "no words", "log": log}
    record = read_result(records[0])
    found = {"words": words, "wall_s": seconds} | told(record, results)
    shutil.rmtree(results)
    return found if record.status == "ok" else found | {"failed": record.reason or record.status, "log": log}


def told(record: RunResult, results: Path) -> Found:
    """The record's status, seconds of every step and stage, memory, evaluations and saved policy."""
    series = read_series(runs_folder(results, "runs"), record.run_id) if record.num_steps else {}
    stages = {stage: series[f"time/{stage}_s"] for stage in STAGES if f"time/{stage}_s" in series}
    weights = [*policy_folder(results, "runs", record.run_id).glob("*/*.safetensors")]
    formats = sorted({tensor["format"] for tensor in record.passport["weights"]}) if record.passport else []
    return {
        "run_id": record.run_id, "status": record.status, "reason": record.reason, "error": record.error,
        "steps": [sum(parts) for parts in zip(*stages.values(), strict=True)], "stages": stages,
        "rollout_tokens": series.get("rollout/tokens"), "k3": series.get("mismatch/kl_k3"), "time_s": record.time_s,
        "tokens_per_s": record.tokens_per_s, "peak_gib": record.peak_memory_gib, "memory_gib": record.memory_gib,
        "formats": formats, "products": record.trainer, "retries": record.retries,
        "evaluations": [
            one.model_dump(include={"task", "step", "site", "precision", "engine", "k", "scores", "length_mean",
                                    "truncated_frac", "seconds", "error"}) for one in record.evaluations
        ],
        "evaluation_errors": record.evaluation_errors,
        "policy": {"files": len(weights), "gib": sum(path.stat().st_size for path in weights) / 2**30},
    }  # fmt: skip


def lines(cells: Mapping[str, Found]) -> Iterator[str]:
    """A line per cell."""
    for name, cell in cells.items():
        if "failed" in cell:
            yield f"{name}: failed: {cell['failed']}"
            continue
        steps = ", ".join(f"{seconds:.1f}" for seconds in cell["steps"])
        last = cell["evaluations"][-1]
        peak = "not measured" if cell["peak_gib"] is None else f"{cell['peak_gib']:.1f} GiB"
        yield (
            f"{name}: steps {steps} s; peak {peak}; evaluation "
            f"{last['error'] or '{:.1f} s'.format(last['seconds'])}; policy {cell['policy']['gib']:.3f} GiB"
        )


def run(given: argparse.Namespace) -> Found:
    """Every cell that the file does not have; each is in the file before the next one starts."""
    names = ("device", "engine", "prompts", "group", "tokens", "steps", "questions", "samples", "overrides")
    later = {"gpu_memory": GPU_MEMORY, "prompt_tokens": PROMPT_TOKENS, "pass_tokens": PASS_TOKENS}
    head: Found = {"what": "folder_run", "settings": settings_of(given, names, later),
                   "hardware": hardware(given.device), "packages": packages()}  # fmt: skip
    cells = kept(given.out, "cells", settings=head["settings"])
    for size in given.size:
        folder = Path(given.work).absolute() / f"model-{size}"
        for precision in given.precision:
            name = f"{size} {precision}"
            if name in cells and "failed" not in cells[name]:
                continue
            write_folder(folder, size, given.data, given.device)
            cells[name] = measure(folder, size, precision, given) | {"commit": commit()[0]}
            save(given.out, head | {"cells": cells})
            print("\n".join(lines({name: cells[name]})), flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    return cells


def options(parser: argparse.ArgumentParser) -> None:
    """The options of the bench."""
    add_device_and_out(parser, needs_out=True)
    parser.add_argument("overrides", nargs="*", default=[], help="of `lowbit run`, for every cell; they come last")
    parser.add_argument("--data", type=Path, required=True, help="GSM8K, as its publisher has it")
    parser.add_argument("--size", type=word_list, default=["1.5b", "7b"], metavar="A,B",
                        help="Qwen2.5's shapes (default: 1.5b,7b)")  # fmt: skip
    parser.add_argument("--precision", type=word_list, default=["bf16", "fp8_block"], metavar="P,Q",
                        help="of the rollouts (default: bf16,fp8_block)")  # fmt: skip
    parser.add_argument("--engine", choices=("vllm", "embedded"), default="vllm", help="(default: vllm)")
    parser.add_argument("--work", type=Path, default=work_folder(Path("results"), "folder_run"),
                        help="models and runs go here")  # fmt: skip
    parser.add_argument("--gpu-memory", type=float, default=GPU_MEMORY,
                        help=f"vLLM's share of a GPU (default: {GPU_MEMORY:g})")  # fmt: skip
    add_numbers(
        parser, ("prompts", 64, "of a step"), ("group", 8, "responses to a prompt"),
        ("tokens", 1024, "of a response, at most"), ("steps", 3, "of training"),
        ("questions", 64, "of the evaluation"), ("samples", 4, "answers to each of them"),
        ("prompt-tokens", PROMPT_TOKENS, "that the capacity plan reckons with"),
        ("pass-tokens", PASS_TOKENS, "of a micro-batch, at most"),
    )  # fmt: skip


def command(given: argparse.Namespace) -> int:
    """Run the cells. Exit code 1 where one failed. Raises ValueError for an unknown size, precision or data folder."""
    for size in given.size:
        num_parameters(shape_of(size))
    for precision in given.precision:
        plan_of(precision)
    check_device(given.device)
    check_positive(given, "prompts", "group", "tokens", "steps", "questions", "samples", "prompt_tokens", "pass_tokens")
    check_gpu_memory(given)
    find_files("gsm8k", "", "main", "train", str(given.data), None)
    return int(any("failed" in cell for cell in run(given).values()))
