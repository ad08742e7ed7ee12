"""TRL's side of `peers.py`, run by the Python and the path of TRL's own environment.

    python trl_step.py MODEL_FOLDER SETTINGS

prints {"steps": ..., "stages": ...} as the last line, as JSON.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the training: one update per batch, no KL, responses that never end by themselves."""

    device: str = "cpu"
    prompts: int = 8
    group: int = 8
    prompt_tokens: int = 8
    tokens: int = 64
    rows: int = 64
    """Sequences per forward and backward pass."""
    steps: int = 10
    warm_up: int = 2
    lr: float = 1e-6
    gpu_memory: float = 0.3
    is_checkpointed: bool = False
    """Layers are computed again in the backward pass, by every peer."""
    is_compiled: bool = False
    """Our layers run compiled; TRL and verl have their own ways."""


def numbers(digits: int, count: int) -> list[str]:
    """Different prompts: numbers of so many digits, each a token. The last are longer where there are too few."""
    return [str(10 ** (digits - 1) + 7 * i) for i in range(count)]


def arguments(given: Settings, out: str, eos_id: int) -> dict[str, Any]:
    """`GRPOConfig`: transformers' generation in float32 on a CPU, colocated vLLM and BF16 on a GPU."""
    accumulated = given.prompts * given.group // given.rows
    both: dict[str, Any] = {
        "output_dir": out, "per_device_train_batch_size": given.rows, "gradient_accumulation_steps": accumulated,
        "num_generations": given.group, "max_completion_length": given.tokens, "max_steps": given.steps,
        "learning_rate": given.lr, "beta": 0.0, "num_iterations": 1, "logging_steps": 1000, "save_strategy": "no",
        "report_to": [], "disable_tqdm": True, "gradient_checkpointing": given.is_checkpointed,
    }  # fmt: skip
    if given.device == "cpu":
        return both | {"use_cpu": True, "bf16": False, "generation_kwargs": {"suppress_tokens": [eos_id]}}
    return both | {
        "bf16": True, "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": given.gpu_memory,
        "vllm_max_model_length": given.prompt_tokens + given.tokens + 8, "generation_kwargs": {"ignore_eos": True},
        "vllm_importance_sampling_correction": False,  # it would score every batch once more
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }  # fmt: skip


def measure(folder: str, given: Settings) -> tuple[list[float], dict[str, list[float]]]:
    """Train with GRPOTrainer: (seconds of every step after the warm-up, seconds in each of what TRL itself times)."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.extras import profiling

    torch.set_num_threads(1)
    marks, stages, spent = list[float](), dict[str, list[float]](), defaultdict[str, float](float)

    def keep(self: Any, seconds: float) -> None:
        spent[self.name] += seconds

    profiling.ProfilingContext._log_metrics = keep

    class Marks(TrainerCallback):
        """Time at the end of every step."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if given.device == "cuda":
                torch.cuda.synchronize()
            marks.append(time.perf_counter())
            if len(marks) > given.warm_up:
                for name, seconds in spent.items():
                    stages.setdefault(name, []).append(seconds)
            spent.clear()

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = numbers(given.prompt_tokens, given.prompts * given.steps)
    with tempfile.TemporaryDirectory() as out:
        trainer = GRPOTrainer(
            model=model,
            args=GRPOConfig(**arguments(given, out, tokenizer.eos_token_id)),
            processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            reward_funcs=lambda completions, **_: [float(text.count("1")) for text in completions],
            callbacks=[Marks()],
        )
        trainer.train()
    return [b - a for a, b in itertools.pairwise(marks)][given.warm_up - 1 :], stages


if __name__ == "__main__":
    found, parts = measure(sys.argv[1], Settings(**json.loads(sys.argv[2])))
    print(json.dumps({"steps": found, "stages": parts}))
