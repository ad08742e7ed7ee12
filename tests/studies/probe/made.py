"""A tiny Qwen2 folder for probes, and records made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from harness.models.checkpoint import save_decoder
from harness.models.decoder import Decoder, DecoderConfig
from harness.models.tokenizer import BOS_ID, EOS_ID, PAD_ID, save_tokenizer

QWEN2 = DecoderConfig(
    vocab_size=32, num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=64,
    rope_theta=10000.0, eos_id=EOS_ID, pad_id=PAD_ID, bos_id=BOS_ID, max_positions=64, qk_norm=False,
    attention_bias=True,
)  # fmt: skip
WORDS = ("task=sort", "task.n=4", "task.num_eval=8", "algo.num_prompts=6", "algo.group_size=4",
         "engine.max_new_tokens=10")  # fmt: skip


def qwen2(folder: Path) -> Path:
    """A Qwen2 folder whose random weights are large enough for peaked distributions."""
    save_decoder(Decoder(QWEN2, torch.Generator().manual_seed(3), init_std=0.2), folder)
    save_tokenizer(folder, QWEN2.vocab_size)
    return folder


def row(precision: str, k3: float, half: float | None = None, name: str | None = None, **values: Any) -> dict[str, Any]:
    """A format of a record; `half`: half of the interval of k3."""
    plain: dict[str, Any] = {
        "name": name or precision, "precision": precision, "seed": 0,
        "mismatch": {"kl_k3": k3, "kl_k1": 0.5 * k3, "logp_absdiff_mean": 0.1, "logp_absdiff_p99": 0.2,
                     "logp_absdiff_max": 0.3},
        "k3_low": None if half is None else k3 - half, "k3_high": None if half is None else k3 + half,
        "by_position": {"position": [0.0, 1.0], "k3": [k3, k3], "absdiff": [0.1, 0.1], "count": [8.0, 8.0]},
        "by_entropy": {"entropy": [0.0, 1.0], "k3": [k3, None], "absdiff": [0.1, None], "count": [16.0, 0.0]},
        "ess_by_length": {"length": [1.0, 2.0, 4.0], "ess": [0.9, 0.8, 0.7], "count": [8.0, 2.0, 1.0]},
        "corrections": {
            "flashrl": {"beyond_frac": 0.01, "token_kept_frac": 1.0, "ess": 0.95},
            "bf16_tis": {"beyond_frac": 0.01, "token_kept_frac": 1.0, "ess": 0.95},
            "mis": {"beyond_frac": 0.5, "token_kept_frac": 0.5, "ess": 0.8},
        },
        "accuracy": 0.25, "accuracy_low": 0.1, "accuracy_high": 0.5, "num_prompts": 2, "num_answers": 8,
        "num_tokens": 20, "length_mean": 2.5, "tokens_per_s": 1234.5, "push_s": 0.01, "num_parameters": 1000,
        "effective_bits": 16.0, "weights_gib": 0.5, "cache_kib_per_token": 0.25, "memory_gib": {}, "cache_tokens": None,
        "passport": {"engine": "embedded", "weights": {"bf16": 3}, "acts": {"bf16": 3}, "kv": None},
    }  # fmt: skip
    return plain | values


def record(*rows: dict[str, Any], folder: str = "base", **values: Any) -> dict[str, Any]:
    """A record of these formats, the floor of k3 1e-4 and 2e-4 before them."""
    floor = (row("bf16", 1e-4, 5e-5), row("bf16", 2e-4, 5e-5, name="bf16 again"))
    return {
        "id": "0123456789ab", "folder": folder, "is_untrained": False, "hashes": {"model": "aa"},
        "config": {"task": {"name": "sort", "n": 4}, "model": {"spread": 0.0}, "engine": {"name": "embedded"}},
        "formats": [*floor, *rows], "commit": "0" * 40, "is_dirty": False, "hardware": {"cpu": "a CPU"},
    } | values  # fmt: skip
