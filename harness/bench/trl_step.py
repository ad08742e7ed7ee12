"""TRL's side of `grpo_step.py`, run by the Python of TRL's own environment: prints seconds per step as JSON."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from typing import Any

NUM_STEPS = 10
WARM_UP = 2


def main(folder: str) -> None:
    """Train with GRPOTrainer and time its steps."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    marks: list[float] = []

    class Marks(TrainerCallback):
        """Time at the end of every step."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            marks.append(time.perf_counter())

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [str(10000000 + 7 * i)[:8] for i in range(8 * NUM_STEPS)]
    with tempfile.TemporaryDirectory() as out:
        settings = GRPOConfig(
            output_dir=out, use_cpu=True, bf16=False, per_device_train_batch_size=64, num_generations=8,
            max_completion_length=64, max_steps=NUM_STEPS, learning_rate=1e-6, beta=0.0, num_iterations=1,
            logging_steps=1000, save_strategy="no", report_to=[], disable_tqdm=True, gradient_checkpointing=False,
            generation_kwargs={"suppress_tokens": [tokenizer.eos_token_id]},
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model,
            args=settings,
            processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            reward_funcs=lambda completions, **_: [float(text.count("1")) for text in completions],
            callbacks=[Marks()],
        )
        trainer.train()
    steps = [b - a for a, b in itertools.pairwise(marks)]
    print(json.dumps(steps[WARM_UP - 1 :]))


if __name__ == "__main__":
    main(sys.argv[1])
