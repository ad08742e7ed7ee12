"""Statistics of three scores of the same tokens: sizes of their differences, and how far two of them agree."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
PAIRS = (("vllm", "embedded"), ("vllm", "fp32"), ("embedded", "fp32"))
"""Differences are the first minus the second, in nats."""
CLOSE = 0.01
"""Nats below which a token counts as scored alike."""
LEVELS = tuple(range(1, 100))
"""Percentiles of |difference| that are kept for the figure."""


def key(pair: tuple[str, str]) -> str:
    """The name of a pair in records."""
    return f"{pair[0]}-{pair[1]}"


def describe(difference: Floats) -> dict[str, Any]:
    """Statistics of d [n] nats: mean |d|, mean d, percentiles of |d|, k3 = mean(exp(-d) - 1 + d), share with |d| <=
    CLOSE.

    Where the tokens were sampled from the first of the pair, k3 estimates KL(first || second) without bias
    (joschu.net/blog/kl-approx.html); vLLM sampled them, so for embedded against fp32 it is a size alone.
    """
    size = np.abs(difference)
    return {
        "mean_abs": float(size.mean()),
        "mean": float(difference.mean()),
        **{f"p{level}": float(np.percentile(size, level)) for level in (50, 90, 99)},
        "max": float(size.max()),
        "k3": float((np.exp(-difference) - 1.0 + difference).mean()),
        "within_0.01": float((size <= CLOSE).mean()),
        "percentiles": [float(f"{value:.4g}") for value in np.percentile(size, LEVELS)],
    }


def compare(scores: dict[str, Floats]) -> dict[str, Any]:
    """Statistics of log-probs [n] nats by scorer ("vllm", "embedded", "fp32"), every token once.

    "correlation": Pearson's, of vllm - fp32 with embedded - fp32 by token; None where one of them does not vary.
    "ratio": mean |vllm - embedded| / mean |embedded - fp32|, what kernels add for each nat of the format; None where
    the emulation is float32. Raises ValueError where a score is not finite.
    """
    for name, values in scores.items():
        if bad := int((~np.isfinite(values)).sum()):
            raise ValueError(f"{bad} of {values.size} log-probs of {name} are not finite")
    differences = {key(pair): scores[pair[0]] - scores[pair[1]] for pair in PAIRS}
    found: dict[str, Any] = {name: describe(d) for name, d in differences.items()}
    kernel, format_alone = differences["vllm-fp32"], differences["embedded-fp32"]
    varies = bool(kernel.std() > 0 and format_alone.std() > 1e-6)
    own, noise = found["vllm-embedded"]["mean_abs"], found["embedded-fp32"]["mean_abs"]
    return {
        "num_tokens": int(kernel.size),
        "correlation": float(np.corrcoef(kernel, format_alone)[0, 1]) if varies else None,
        "ratio": own / noise if noise > 1e-5 else None,
        "pairs": found,
    }
