"""Time and memory of log-probabilities from a wide vocabulary's head: whole logits, chunks of them, compiled chunks.

    python -m harness.devtools.bench head --out x.json
    python -m harness.devtools.bench head --device cpu --hidden 256 --vocabulary 32000 --tokens 256 --logits-mib 8

What a micro-batch of a Qwen2.5 model pays behind its last layer: hidden states [tokens, hidden] in the dtype given, an
untied head of `vocabulary` rows, log-probability and entropy of one token a row, and the gradients of both inputs. All
three ways start from the same draws; their log-probs are compared with those of chunks in float32. Medians of
`--repeats` after one that warms up (and compiles). Left out: the layers in front
(`harness.devtools.bench.long_sequences`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from harness.devtools.bench.runner import add_device_and_out, add_numbers, check_device, check_positive, save
from harness.devtools.bench.timing import timed
from harness.foundation.provenance import commit, hardware, packages
from harness.numerics.head_logp import head_logp
from harness.numerics.logprobs import selected_logp
from harness.trainers.local.forward import Thrift

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
Way = Callable[[nn.Linear, Tensor, Tensor], tuple[Tensor, Tensor]]


def ways(chunk: int) -> dict[str, Way]:
    """Name -> (log-prob [M], entropy [M]) of head, hidden states [M, d] and token ids [M]."""
    return {
        "whole": lambda head, x, ids: selected_logp(head(x), ids),
        "chunks": lambda head, x, ids: head_logp(head, x, ids, chunk=chunk),
        "chunks, compiled": lambda head, x, ids: head_logp(head, x, ids, chunk=chunk, is_compiled=True),
    }


def measured(way: Way, head: nn.Linear, x: Tensor, ids: Tensor, exact: Tensor, repeats: int) -> dict[str, Any]:
    """Seconds of both passes, the peak beyond what stood before, the largest distance of a log-prob from `exact`."""
    device, forward, backward = x.device.type, list[float](), list[float]()
    distance = 0.0
    for i in range(repeats + 1):
        head.weight.grad = x.grad = None
        if i == repeats and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        seconds, found = timed(lambda: way(head, x, ids)[0], device)
        forward.append(seconds)
        distance = float((found.detach() - exact).abs().max())
        backward.append(timed(found.sum().backward, device)[0])
        del found  # before the next one is made
    peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else None
    return {
        "forward_s": median(forward[1:]),
        "backward_s": median(backward[1:]),
        "peak_gib": None if peak is None else peak / 2**30,
        "largest_distance": distance,
    }


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Every way at every width; what was found is in the file before the next one starts."""
    found: dict[str, Any] = {
        "what": "head", "tokens": given.tokens, "vocabulary": given.vocabulary, "dtype": given.dtype,
        "logits_mib": given.logits_mib, "commit": commit()[0], "packages": packages(),
        "hardware": hardware(given.device), "rows": [],
    }  # fmt: skip
    chunk = Thrift(logits_mib=given.logits_mib).head_rows(given.vocabulary)
    print(f"{'hidden':>6} {'way':18}{'forward s':>11}{'backward s':>11}{'peak GiB':>10}{'nats off':>10}")
    for hidden in given.hidden:
        rng = torch.Generator(given.device).manual_seed(hidden)
        head = nn.Linear(hidden, given.vocabulary, bias=False, device=given.device)
        x = torch.randn(given.tokens, hidden, generator=rng, device=given.device)
        ids = torch.randint(given.vocabulary, (given.tokens,), generator=rng, device=given.device)
        with torch.no_grad():
            head.weight.normal_(0.0, hidden**-0.5, generator=rng)
            exact = head_logp(head, x, ids, chunk=chunk)[0]
        head, x = head.to(DTYPES[given.dtype]), x.to(DTYPES[given.dtype]).requires_grad_()
        for name, way in ways(chunk).items():
            row = {"hidden": hidden, "way": name} | measured(way, head, x, ids, exact, given.repeats)
            found["rows"].append(row)
            save(given.out, found)
            peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}"
            print(f"{hidden:>6} {name:18}{row['forward_s']:>11.4f}{row['backward_s']:>11.4f}{peak:>10}"
                  f"{row['largest_distance']:>10.2g}", flush=True)  # fmt: skip
    return found


def options(parser: argparse.ArgumentParser) -> None:
    """The options of the bench."""
    add_device_and_out(parser)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16", help="(default: bfloat16)")
    parser.add_argument("--hidden", nargs="+", type=int, default=[896, 3584], metavar="WIDTH",
                        help="widths of the hidden states (default: 896 3584)")  # fmt: skip
    add_numbers(
        parser, ("vocabulary", 152064, "rows of the head"), ("tokens", 16384, "of a micro-batch"),
        ("logits-mib", 1024, "launch.logits_mib"), ("repeats", 5, "after the first"),
    )  # fmt: skip


def command(given: argparse.Namespace) -> int:
    """Check the options, then measure. Raises ValueError, one line, for what cannot be measured here."""
    check_positive(given, "vocabulary", "tokens", "logits_mib", "repeats")
    if min(given.hidden) < 1:
        raise ValueError(f"--hidden: {min(given.hidden)}; valid: >= 1")
    check_device(given.device)
    run(given)
    return 0
