"""The embedded sampler against transformers `generate` and against its own matrix products alone.

    python -m harness.devtools.bench sampler

One thread, 256 different 18-token prompts x 32 new tokens, no early end. Nothing is shared between rows, but for the
contestant that samples 32 prompts 8 times each. All contestants take turns inside one run, on process CPU time, because
the machine may be shared; compare ratios, never seconds of different runs. The floor does every linear layer of the
same prefill and decode steps and nothing else.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from harness.api import Plan
from harness.config.decoder_config import decoder_config
from harness.config.load import load
from harness.devtools.bench.runner import table
from harness.devtools.bench.timing import cpu_seconds, in_turns
from harness.engines.embedded.engine import EmbeddedEngine
from harness.foundation.provenance import cpu_name
from harness.models.checkpoint import save_decoder
from harness.models.decoder import Decoder, DecoderConfig
from harness.numerics.formats import format_named

SIZES = ("xs", "m")
"""Models of `conf/model`."""
ROWS, PROMPT, NEW = 256, 18, 32
REPEATS = 7


def decoder(size: str) -> Decoder:
    """A random decoder of one of `SIZES`."""
    return Decoder(decoder_config(load([f"model={size}"]).model), torch.Generator().manual_seed(0), init_std=0.1)


def prompts() -> list[list[int]]:
    """ROWS different prompts."""
    return torch.randint(2, 32, (ROWS, PROMPT), generator=torch.Generator().manual_seed(1)).tolist()


def own_sampler(model: Decoder, fmt: str, num_samples: int = 1) -> Callable[[], object]:
    """One call of the embedded engine; no token ends a response. `num_samples` rows share a prompt."""
    engine = EmbeddedEngine(model.config, Plan(rollout_weights=format_named(fmt)), eos_id=-1, pad_id=0)
    engine.load_weights((name, p.detach()) for name, p in model.named_parameters())
    batch = prompts()[: ROWS // num_samples]
    return lambda: engine.generate(batch, num_samples=num_samples, max_new_tokens=NEW, temperature=1.0, seed=2)


def transformers_generate(model: Decoder) -> Callable[[], object]:
    """One call of transformers' `generate` with its default (dynamic) cache: float32, pure sampling, no scores."""
    from transformers import AutoModelForCausalLM, GenerationConfig  # pyright: ignore[reportMissingTypeStubs]

    with tempfile.TemporaryDirectory() as folder:
        save_decoder(model, f"{folder}/model")
        other: Any = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32).eval()
    ids = torch.tensor(prompts())
    mask = torch.ones_like(ids)
    other.generation_config = GenerationConfig(
        do_sample=True, top_k=0, top_p=1.0, temperature=1.0, max_new_tokens=NEW, pad_token_id=0, eos_token_id=None
    )
    return lambda: other.generate(input_ids=ids, attention_mask=mask)


def linears_only(config: DecoderConfig) -> Callable[[], object]:
    """Every matrix product with a weight in one call of the sampler: the bound that nothing can beat."""
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    shapes = [
        (hidden, heads + 2 * config.num_kv_heads * config.head_dim),
        (heads, hidden),
        (hidden, 2 * config.intermediate_size),
        (config.intermediate_size, hidden),
    ]
    weights = [torch.randn(n, k) for k, n in shapes] * config.num_layers
    head = torch.randn(config.vocab_size, hidden)
    inputs = {(rows, k): torch.randn(rows, k) for rows in (ROWS, ROWS * PROMPT) for k in {k for k, _ in shapes}}

    def run() -> None:
        with torch.inference_mode():
            for rows in (ROWS * PROMPT, *[ROWS] * (NEW - 1)):
                for w in weights:
                    F.linear(inputs[rows, w.shape[1]], w)
                F.linear(inputs[ROWS, hidden], head)

    return run


def run() -> list[dict[str, Any]]:
    """One row per size and contestant: tokens_per_s, times_transformers, share_of_linears_only."""
    rows: list[dict[str, Any]] = []
    for size in SIZES:
        model = decoder(size)
        contestants = {
            "linears only": linears_only(model.config),
            "transformers generate": transformers_generate(model),
            "own fp32": own_sampler(model, "fp32"),
            "own fp32, 8 samples per prompt": own_sampler(model, "fp32", 8),
            "own bf16 (emulated)": own_sampler(model, "bf16"),
        }
        times = in_turns(contestants, cpu_seconds, 1, REPEATS)
        seconds = {name: median(values) for name, values in times.items()}
        for name, value in seconds.items():
            rows.append({
                "size": size, "what": name, "tokens_per_s": ROWS * NEW / value,
                "times_transformers": seconds["transformers generate"] / value,
                "share_of_linears_only": seconds["linears only"] / value,
            })  # fmt: skip
    return rows


def options(parser: argparse.ArgumentParser) -> None:
    """No options."""


def command(given: argparse.Namespace) -> int:
    """Print the table."""
    torch.set_num_threads(1)
    print(f"{cpu_name()}, torch {torch.__version__}, 1 thread")
    print(table(run()))
    return 0
