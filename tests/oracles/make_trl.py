"""Advantages, importance-sampling ratios, losses and gradients of TRL's GRPOTrainer -> trl.npz.

A real trainer around a toy model, with generation, rewards and log-probs replaced by the given batches; what lies
between is TRL's. It believes that vLLM sampled, so that its correction runs.
"""

from __future__ import annotations

import logging
import tempfile
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from log_probs import GROUP, batches, save
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

MAX_LENGTH = 16
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")
CORRECTIONS = {
    "token_truncate": (2.0, None),
    "token_mask": (5.0, 0.5),
    "sequence_truncate": (2.0, None),
    "sequence_mask": (3.0, None),
}
"""Mode -> (largest, smallest ratio); the last is TRL's default."""
TOKENS = {
    "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0,
    "vllm_importance_sampling_clip_min": None,
}  # fmt: skip
BETA = 0.3
"""Coefficient of the KL to the reference."""


def toy() -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """The smallest model and tokenizer that the trainer accepts."""
    vocabulary = {"<pad>": 0, "<eos>": 1, "a": 2, "b": 3}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="a")), pad_token="<pad>", eos_token="<eos>"
    )
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=4, num_key_value_heads=1, **shape)), tokenizer


def trainer(folder: str, b: dict[str, Any], **options: Any) -> GRPOTrainer:
    """A trainer whose sampler, reward and log-probs are the batch's."""
    rows, width = b["mask"].shape
    model, tokenizer = toy()
    args = GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=rows,
        num_generations=GROUP, max_completion_length=MAX_LENGTH, epsilon=0.2, epsilon_high=0.28,
        gradient_checkpointing=False, **options,
    )  # fmt: skip
    made = GRPOTrainer(
        model=model, processing_class=tokenizer, args=args, train_dataset=Dataset.from_dict({"prompt": ["a"] * rows}),
        reward_funcs=lambda completions, **_: b["scores"].tolist(),
    )  # fmt: skip
    lengths = b["mask"].sum(1)
    ids = [[2] * (n - 1) + [1] for n in lengths]
    sampled = [row[:n].tolist() for row, n in zip(b["rollout"], lengths, strict=True)]
    generated = ([[2]] * rows, ids, None, [["b"]] * rows, sampled, {}, None, None)
    made._generate = lambda prompts, *_, **__: generated
    made._get_per_token_logps_and_entropies = lambda *_, **__: (made.given, torch.zeros(rows, width), None)
    made.use_vllm = made.vllm_importance_sampling_correction = True
    made.model.train()
    made.current_gradient_accumulation_steps = 1
    return made


def answer(folder: str, b: dict[str, Any], beta: float = 0.0, **options: Any) -> dict[str, Any]:
    """Everything TRL computes from the batch. With `beta` its loss has the KL to the batch's reference, which no model
    computes."""
    made = trainer(folder, b, **options)
    made.given = torch.tensor(b["old"])
    inputs = made._generate_and_score_completions([{"prompt": "a"} for _ in range(len(b["mask"]))])
    made.beta, inputs["ref_per_token_logps"] = beta, torch.tensor(b["ref"])
    found = {"adv": inputs["advantages"].numpy(), "ratio": inputs["importance_sampling_ratio"].numpy()}
    made.given = torch.tensor(b["logp"], requires_grad=True)
    loss = made._compute_loss(made.model, inputs)
    (grad,) = torch.autograd.grad(loss, made.given)
    metrics = {name: values[-1] for name, values in made._metrics["train"].items()}
    names = ("low_mean", "high_mean", "region_mean")
    difference = "sampling/sampling_logp_difference/"
    found |= {name: metrics[f"clip_ratio/{name}"] for name in names if f"clip_ratio/{name}" in metrics}
    found |= {f"difference_{kind}": metrics[f"{difference}{kind}"] for kind in ("mean", "max")}
    return found | {"loss": loss.item(), "grad": grad.numpy()}


def main() -> None:
    """Every batch through every loss, correction and reward scaling."""
    logging.disable(logging.WARNING)
    answers: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, b in batches().items():
            for mode, (largest, smallest) in CORRECTIONS.items():
                options = {
                    "vllm_importance_sampling_mode": mode,
                    "vllm_importance_sampling_clip_max": largest,
                    "vllm_importance_sampling_clip_min": smallest,
                }
                for loss in LOSSES:
                    answers[f"{name}/{loss}/{mode}"] = answer(folder, b, loss_type=loss, **options)
            for scale in ("group", "batch", "none"):
                answers[f"{name}/scale/{scale}"] = answer(folder, b, scale_rewards=scale)
            sequence = answer(folder, b, loss_type="grpo", importance_sampling_level="sequence")
            answers[f"{name}/gspo"] = sequence
            answers[f"{name}/sapo"] = answer(folder, b, loss_type="sapo", **TOKENS)
            for is_unbiased in (False, True):
                for level, options in (("token", TOKENS), ("sequence", {})):
                    kind = {"use_bias_correction_kl": is_unbiased, "importance_sampling_level": level}
                    case = f"{name}/kl_{'k3_is' if is_unbiased else 'k3'}/{level}"
                    answers[case] = answer(folder, b, BETA, loss_type="grpo", **kind, **options)
    save("trl", version("trl"), answers)


if __name__ == "__main__":
    np.seterr(all="raise")
    main()
