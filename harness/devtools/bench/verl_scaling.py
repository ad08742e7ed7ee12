"""Throughput and scaling of trainer=verl on real shapes: seconds of a step and its stages on 1, 2, 4 GPUs.

    python -m harness.devtools.bench verl_scaling --size 0.5b,1.5b,7b --gpus 1,2,4 --out scaling.json
    python -m harness.devtools.bench verl_scaling --device cpu --size toy --gpus 1 --prompts 4 --tokens 16 --out x.json

A cell is a run as `lowbit run trainer=verl method=bf16_train launch.native_16bit=true` makes it, on
random weights of a Qwen2.5 shape and the task `count`: responses of one length, or with --mean-tokens of log-normal
ones; --padded then lays rows side by side, as a trainer without packing does. Weak scaling: as many prompts for every
GPU, whatever their number. The first step is dropped. Micro-batches and checkpointed layers are those of the capacity
plan; what it says does not fit is skipped. Finished cells of the file are kept: the same command goes on. Left out:
evaluation, checkpoints, and start-up, which is given beside.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

from harness.config.load import launch_of, load, of_folder
from harness.config.resolve import resolve
from harness.config.schema import Launch, RunConfig
from harness.devtools.bench.runner import (
    add_device_and_out,
    add_numbers,
    check_device,
    check_gpu_memory,
    check_positive,
    kept,
    number_list,
    save,
    settings_of,
    word_list,
)
from harness.engines.vllm.memory import num_parameters
from harness.foundation.clock import STAGES
from harness.foundation.provenance import commit, hardware, packages
from harness.foundation.visible_gpus import visible_gpus
from harness.models.checkpoint import CONFIG, WEIGHTS, config_json
from harness.models.decoder import tensor_shapes
from harness.models.tokenizer import BOS_ID, EOS_ID, PAD_ID, save_numbered
from harness.records.paths import work_folder
from harness.run.checks import check, check_place
from harness.start.prepare import start_of
from harness.studies.capacity.check import work_of
from harness.studies.capacity.place import place
from harness.studies.throughput.shapes import plan_of, shape_of
from harness.trainers.verl.data import lay_out
from harness.trainers.verl.job import write_job
from harness.trainers.verl.parent import Watched

WARM_UP = 1
TOLD = ("sync/num_replicas", "memory/rest_gib", "memory/host_gib", "train/grad_norm", "rollout/tokens")
"""Columns of a run's series that are kept, a value per step."""
LOOK_S = 2.0
"""Between two looks at what is in use of the GPUs."""
Found = dict[str, Any]


@torch.no_grad()
def make_folder(folder: Path, size: str, device: str, is_drawn: bool = False) -> None:
    """A Hugging Face folder of random bfloat16 weights, drawn on the device, with a tokenizer; kept if there.
    `is_drawn`: without weights, which the trainer then draws on its devices."""
    if folder.exists():
        return
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    config = replace(shape_of(size), bos_id=BOS_ID, eos_id=EOS_ID, pad_id=PAD_ID)
    draws, tensors = torch.Generator(device).manual_seed(0), dict[str, torch.Tensor]()
    for name, shape in () if is_drawn else tensor_shapes(config).items():
        made = torch.empty(shape, dtype=torch.bfloat16, device=device)
        filled = made.normal_(0.0, 0.02, generator=draws) if made.dim() == 2 else made.fill_(not name.endswith("bias"))
        tensors[name] = filled.cpu()
    if not is_drawn:
        save_file(tensors, part / WEIGHTS, metadata={"format": "pt"})
    (part / CONFIG).write_text(json.dumps(config_json(config, torch.bfloat16)), encoding="utf-8")
    save_numbered(part, config.vocab_size)
    part.rename(folder)
    if device == "cuda":
        torch.cuda.empty_cache()


def cell_of(folder: Path, size: str, gpus: int, precision: str, given: argparse.Namespace) -> tuple[RunConfig, Launch]:
    """Configuration and launch of a cell, as `lowbit run` makes them. Raises ValueError for what verl does not take."""
    samples = given.prompts * given.group
    spread = {"mean_tokens": given.mean_tokens, "sigma": given.sigma} if given.mean_tokens else {}
    options = {"prompt_tokens": given.prompt_tokens, "max_new_tokens": given.tokens,
               "vocab_size": shape_of(size).vocab_size, **spread}  # fmt: skip
    words = [
        "trainer=verl", f"trainer.device={given.device}", f"trainer.steps={given.steps}", "trainer.lr=1e-6",
        f"method={given.method}", f"precision={precision}", *of_folder(folder),
        "task=count", *(f"+task.options.{name}={value}" for name, value in options.items()),
        f"algo.num_prompts={given.prompts * gpus}", f"algo.group_size={given.group}",
        f"engine.max_batch={samples * given.tensor_parallel}", f"engine.gpu_memory={given.gpu_memory}",
    ]  # fmt: skip
    row = given.prompt_tokens + given.tokens
    values: dict[str, str] = {"gpus": str(gpus), "micro_batch_tokens": str(given.pass_tokens),
                              "native_16bit": str(given.device == "cuda"), "compile": str(given.compile),
                              "tensor_parallel": str(given.tensor_parallel), "offload": given.offload}  # fmt: skip
    if given.unplanned:
        values |= {"checkpoint_layers": "True"}
    elif given.device == "cuda":
        planned = place(work_of(size, gpus, precision, vars(given)), gpus)
        values |= {"micro_batch_tokens": str(planned.rows * row), "checkpoint_layers": str(planned.is_checkpointed)}
    config = resolve(load(words))
    return config, launch_of(values, results=str(given.work), sweep="bench")


def measure(folder: Path, size: str, gpus: int, precision: str, given: argparse.Namespace) -> Found:
    """One run: {"steps": seconds of every step, "stages": ..., ...}, {"skipped": why} or {"failed": verl's words}."""
    planned = place(work_of(size, gpus, precision, vars(given)), gpus) if given.device == "cuda" else None
    if planned is not None and planned.reason and not given.unplanned:
        return {"skipped": f"memory: {planned.reason}"}
    config, launch = cell_of(folder, size, gpus, precision, given)
    composed, work = check(config), Path(given.work) / f"{size}-{gpus}-{precision}"
    check_place(config, launch)
    shutil.rmtree(work, ignore_errors=True)
    job = lay_out(config, launch, composed, start_of(config, launch), work, is_timed=True)
    if given.padded:
        write_job(job := replace(job, is_padded=True))
    run = Watched(job, composed)
    started, seen = time.monotonic(), list[float]()
    try:
        run.train(looking(seen, given.device), lambda: False, RuntimeError)
        rows = run.series
    except (RuntimeError, MemoryError) as failure:
        log = [*getattr(failure, "__notes__", [])]
        return {"failed": str(failure), "gpu_gib": max(seen, default=None), "log": log}
    finally:
        run.close()
    seconds, peaks = time.monotonic() - started, run.memory_gib
    shutil.rmtree(work)
    stages = {stage: [row[f"time/{stage}_s"] for row in rows[WARM_UP:]] for stage in STAGES if stage != "eval"}
    steps = [sum(parts) for parts in zip(*stages.values(), strict=True)]
    tokens = [row["rollout/tokens"] for row in rows[WARM_UP:]]
    first = sum(rows[0][f"time/{stage}_s"] for stage in STAGES)
    return {
        "steps": steps, "stages": stages, "tokens": tokens, "start_s": seconds - first - sum(steps), "first_s": first,
        "trainer_gib": peaks.get("allocated"), "gpu_gib": max(seen, default=None),
        "is_raw_mean": [row["mismatch/is_raw_mean"] for row in rows],
        "micro_batch_tokens": launch.micro_batch_tokens, "checkpoint_layers": launch.checkpoint_layers,
        "memory_gib": peaks, "metrics": {name: [row[name] for row in rows] for name in TOLD if name in rows[0]},
        "planned_full_update_gib": None if planned is None else sum(planned.update.values()),
    }  # fmt: skip


def looking(seen: list[float], device: str) -> Callable[[int, float], None]:
    """Function that `Watched.train` calls during a run: keeps, now and then, the GiB of the fullest GPU in sight."""
    last = [-LOOK_S]

    def look(step: int, reward: float) -> None:
        if device == "cuda" and time.monotonic() - last[0] >= LOOK_S:
            last[0] = time.monotonic()
            words = ["nvidia-smi", f"--id={','.join(visible_gpus())}", "--query-gpu=memory.used",
                     "--format=csv,noheader,nounits"]  # fmt: skip
            said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
            seen.append(max(map(float, said.split())) / 1024)

    return look


def summary(cells: Mapping[str, Found]) -> list[Found]:
    """A row per measured cell: medians, generated tokens per second of whole steps and GPU, and efficiency: seconds on
    one GPU over seconds on all, at equal work for each."""
    once = {name: median(cell["steps"]) for name, cell in cells.items() if "steps" in cell}
    rows: list[Found] = []
    for name, seconds in once.items():
        size, gpus, precision = name.split(" ")
        alone = once.get(f"{size} 1 {precision}")
        rows.append({
            "size": size, "gpus": int(gpus), "precision": precision, "step_s": seconds,
            "tokens_per_s_gpu": median(cells[name]["tokens"]) / seconds / int(gpus),
            "efficiency": None if alone is None else alone / seconds,
            "stages": {stage: median(values) for stage, values in cells[name]["stages"].items()},
            "trainer_gib": cells[name]["trainer_gib"], "gpu_gib": cells[name]["gpu_gib"],
        })  # fmt: skip
    return rows


def lines(cells: Mapping[str, Found]) -> Iterator[str]:
    """The table of measured cells, and a line per cell that was skipped or failed."""
    yield f"{'size':6}{'GPUs':>5} {'rollouts':14}{'s/step':>9}{'tok/s/GPU':>11}{'eff.':>7}{'GiB':>7}  stages, s"
    for row in summary(cells):
        eff = "-" if row["efficiency"] is None else f"{row['efficiency']:.2f}"
        gib = "-" if row["gpu_gib"] is None else f"{row['gpu_gib']:.0f}"
        stages = ", ".join(f"{name} {value:.2f}" for name, value in row["stages"].items() if value >= 0.005)
        yield (
            f"{row['size']:6}{row['gpus']:>5} {row['precision']:14}{row['step_s']:>9.2f}"
            f"{row['tokens_per_s_gpu']:>11.0f}{eff:>7}{gib:>7}  {stages}"
        )
    for name, cell in cells.items():
        for word in ("skipped", "failed"):
            if word in cell:
                yield f"{name}: {word}: {cell[word]}"


def run(given: argparse.Namespace) -> Found:
    """Every cell that the file does not have, the smallest first; each is in the file before the next one starts."""
    names = ("device", "prompts", "group", "prompt_tokens", "tokens", "steps", "pass_tokens", "gpu_memory", "compile")
    later = {"mean_tokens": 0, "sigma": 1.0, "padded": False, "tensor_parallel": 1, "offload": "none",
             "method": "bf16_train", "drawn": False, "unplanned": False}  # fmt: skip
    head: Found = {"what": "verl_scaling", "settings": settings_of(given, names, later),
                   "hardware": hardware(given.device), "packages": packages()}  # fmt: skip
    cells = kept(given.out, "cells", settings=head["settings"])
    began = time.monotonic()
    for size in given.size:
        folder = Path(given.work).absolute() / f"model-{size}{'-drawn' if given.drawn else ''}"
        for gpus in given.gpus:
            for precision in given.precision:
                name = f"{size} {gpus} {precision}"
                if "steps" in cells.get(name, {}) or time.monotonic() - began > 60 * given.minutes:
                    continue
                make_folder(folder, size, given.device, given.drawn)
                cells[name] = measure(folder, size, gpus, precision, given)
                found = head | {"commit": commit()[0], "summary": summary(cells), "cells": cells}
                save(given.out, found)
                print("\n".join(lines({name: cells[name]})), flush=True)
        shutil.rmtree(folder, ignore_errors=True)  # 15 GB of the largest; drawn again in seconds
    print("\n".join(["", *lines(cells)]))
    return cells


def options(parser: argparse.ArgumentParser) -> None:
    """The options of the bench."""
    add_device_and_out(parser, needs_out=True)
    parser.add_argument("--size", type=word_list, default=["0.5b", "1.5b", "7b"], metavar="A,B",
                        help="Qwen2.5's shapes (default: 0.5b,1.5b,7b)")  # fmt: skip
    parser.add_argument("--gpus", type=number_list, default=[1, 2, 4], metavar="N,M",
                        help="GPUs of a run (default: 1,2,4)")  # fmt: skip
    parser.add_argument("--precision", type=word_list, default=["bf16", "fp8_block"], metavar="P,Q",
                        help="of the rollouts (default: bf16,fp8_block)")  # fmt: skip
    parser.add_argument(
        "--work", type=Path, default=work_folder(Path("results"), "verl_scaling"), help="models and jobs go here"
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="no cell begins later (default: no limit)")
    parser.add_argument("--compile", action="store_true", help="layers run compiled (launch.compile)")
    parser.add_argument("--gpu-memory", type=float, default=0.3, help="vLLM's share of a GPU (default: 0.3)")
    parser.add_argument("--sigma", type=float, default=1.0,
                        help="of the logarithm of lengths, with --mean-tokens (default: 1)")  # fmt: skip
    parser.add_argument("--padded", action="store_true", help="rows of a pass are padded to its longest")
    parser.add_argument("--drawn", action="store_true", help="no file of weights: they are drawn on the devices")
    parser.add_argument(
        "--unplanned", action="store_true", help="run what the plan of a full update says does not fit, such as LoRA"
    )
    parser.add_argument("--method", default="bf16_train", help="method of the runs (default: bf16_train)")
    parser.add_argument("--offload", default="none", help="launch.offload (default: none)")
    add_numbers(
        parser, ("mean-tokens", 0, "of responses whose lengths differ, up to --tokens; 0: all are that long"),
        ("tensor-parallel", 1, "GPUs of an engine"),
        ("prompts", 16, "for every GPU"), ("group", 8, "responses to a prompt"), ("prompt-tokens", 128, "of a prompt"),
        ("tokens", 512, "of every response"), ("steps", 4, "the first of them warms up"),
        ("pass-tokens", 16896, "of a micro-batch, at most"),
    )  # fmt: skip


def command(given: argparse.Namespace) -> int:
    """Run the cells. Exit code 1 where one failed. Raises ValueError, one line, for what cannot be measured here."""
    for size in given.size:
        num_parameters(shape_of(size))
    for precision in given.precision:
        plan_of(precision)
    check_positive(given, "prompts", "group", "prompt_tokens", "tokens", "pass_tokens", "tensor_parallel")
    check_gpu_memory(given)
    if given.minutes <= 0:
        raise ValueError(f"--minutes: {given.minutes:g}; valid: above 0")
    if given.steps <= WARM_UP:
        raise ValueError(f"--steps: {given.steps}; valid: >= {WARM_UP + 1}")
    check_device(given.device)
    return int(any("failed" in cell for cell in run(given).values()))
