"""Measuring parity: one policy, the formats asked for on one device, a row of the device's record each."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from harness.config.load import load
from harness.config.schema import Launch
from harness.foundation import provenance
from harness.foundation.seeds import stable_seed
from harness.foundation.whole_file import write_atomic
from harness.models.checkpoint import content_hash, load_decoder, save_decoder
from harness.records.paths import passports_folder
from harness.start.prepare import start_of, task_of
from harness.studies.parity import record
from harness.studies.parity.driver import row_of, run
from harness.studies.parity.worker import FormatCase
from harness.tasks import Task

RESPONSES_PER_PROMPT = 4
TEMPERATURE = 1.0


def measure(
    results: Path, *, device: str | None, formats: tuple[str, ...], checkpoint: Path | None, model: str,
    num_samples: int, has_passports: bool,
) -> int:  # fmt: skip
    """Measure. Returns 0, or 1 where a worker failed; a format that vLLM refuses is an answer."""
    from harness.engines.vllm.settings import installed_build

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    names, build = record.chosen(formats), installed_build()
    with tempfile.TemporaryDirectory(prefix="lowbit-policy-") as folder:
        task, setting = _policy(results, checkpoint, model, Path(folder))
        case = _case(task, Path(folder), device, num_samples)
        setting |= {
            "engine": f"vllm-{build.name}-{build.version}",
            "packages": provenance.packages(),
            "hardware": provenance.hardware(device),
            "num_responses": len(case["prompts"]) * RESPONSES_PER_PROMPT,
            "temperature": TEMPERATURE,
        }
        return _measure(results, device, names, case, json.loads(json.dumps(setting)), has_passports)


def _policy(results: Path, checkpoint: Path | None, model: str, folder: Path) -> tuple[Task, dict[str, Any]]:
    """The task, and what names the policy, which is written to `folder` in float32 as runs start from it."""
    config = load([f"model={model}", "task=sort"])
    if checkpoint is None:
        start = start_of(config, Launch(results=str(results)))
        task, policy, source = start.task, start.build(start.folder), start.folder
    else:
        task, policy, source = task_of(config), load_decoder(checkpoint), checkpoint
        if policy.config.vocab_size != task.vocab_size:
            raise ValueError(f"checkpoint: {policy.config.vocab_size} tokens, task sort has {task.vocab_size}")
    save_decoder(policy, folder)
    return task, {"model": model if checkpoint is None else source.name, "task": f"{task.name}{config.task.n}",
                  "checkpoint_hash": content_hash(folder)}  # fmt: skip


def _case(task: Task, folder: Path, device: str, num_samples: int) -> dict[str, Any]:
    count = -(-num_samples // RESPONSES_PER_PROMPT)
    return {
        "checkpoint": str(folder), "device": device, "num_samples": RESPONSES_PER_PROMPT, "out": "",
        "prompts": [list(item.prompt) for item in task.sample("eval", range(count))],
        "max_new_tokens": task.max_new_tokens, "temperature": TEMPERATURE, "seed": stable_seed(0, "parity"),
        "eos_id": task.eos_id, "pad_id": task.pad_id,
    }  # fmt: skip


def _measure(
    results: Path, device: str, names: Sequence[str], case: dict[str, Any], setting: dict[str, Any], has_passports: bool
) -> int:
    found, code = record.begin(results, device, setting), 0
    with tqdm(total=len(names), unit="format", disable=not sys.stderr.isatty()) as bar:
        for name in names:
            weights, acts, kv = record.FORMATS[name]
            answer = run(FormatCase(**case, weights=weights, acts=acts, kv=kv))
            row = found["formats"][name] = row_of(answer)
            record.keep(results, device, found)
            if has_passports and row["status"] == "ok":
                text = json.dumps(answer["passport"], indent=1) + "\n"
                write_atomic(passports_folder(results) / f"vllm-{device}-{name}.json", text.encode())
            code = max(code, int(row["status"] == "failed"))
            bar.update(1)
            tqdm.write(_line(name, row), file=sys.stdout)
            sys.stdout.flush()
    return code


def _line(name: str, row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return f"{name:<16}{row['status']}: {row['reason']}"
    sizes = {pair: stats["mean_abs"] for pair, stats in row["pairs"].items()}
    said = ", ".join(f"{pair} {size:.2e}" for pair, size in sizes.items())
    return f"{name:<16}{said} nats over {row['num_tokens']} tokens; {', '.join(row['kernels'])}"
