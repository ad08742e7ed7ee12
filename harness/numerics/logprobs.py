"""Log-probability and entropy of sampled tokens from logits.

The distribution that is scored is the one that is sampled from, so the temperature is inside the softmax, and where the
sampler was truncated its support comes as logits of -inf.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]


def selected_logp(
    logits: Tensor,
    token_ids: Tensor,
    temperature: float = 1.0,
    *,
    chunk: int | None = None,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each given token and entropy of its distribution, softmax(logits / temperature).

    logits [M, V] of any float dtype, differentiable; token_ids [M] int64 -> (log-prob [M], entropy [M]), nats, float32
    (float64 for float64 logits). The entropy is detached unless `entropy_grad`. A logit of -inf has probability 0.
    `chunk` rows at a time are held in float32 and recomputed in the backward pass, so that V = 150k costs
    chunk x V floats beside the logits; None keeps one [M, V] log-softmax and is the fast choice for small V. Raises
    ValueError where `chunk` < 1.
    """
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk: {chunk} is not a number of rows (choose >= 1 or None)")
    if chunk is None or chunk >= logits.shape[0]:
        return _rows(logits, token_ids, temperature, entropy_grad)
    pieces: list[tuple[Tensor, Tensor]] = []
    for first in range(0, logits.shape[0], chunk):
        rows = slice(first, first + chunk)
        pieces.append(_recomputed(logits[rows], token_ids[rows], temperature, entropy_grad))
    return torch.cat([logp for logp, _ in pieces]), torch.cat([entropy for _, entropy in pieces])


def _recomputed(logits: Tensor, token_ids: Tensor, temperature: float, entropy_grad: bool) -> tuple[Tensor, Tensor]:
    if not (torch.is_grad_enabled() and logits.requires_grad):
        return _rows(logits, token_ids, temperature, entropy_grad)
    run: Callable[..., tuple[Tensor, Tensor]] = checkpoint  # pyright: ignore[reportUnknownVariableType]
    return run(_rows, logits, token_ids, temperature, entropy_grad, use_reentrant=False, preserve_rng_state=False)


def _rows(logits: Tensor, token_ids: Tensor, temperature: float, entropy_grad: bool) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if temperature != 1.0:
        logits = logits.to(dtype) / temperature
    log_probs = torch.log_softmax(logits, dim=-1, dtype=dtype)
    logp = log_probs.gather(-1, token_ids[:, None]).squeeze(-1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        # 0 * -inf is NaN: a masked logit enters as the lowest finite number, and its probability is exactly 0
        entropy = -(log_probs.exp() * log_probs.clamp_min(torch.finfo(dtype).min)).sum(-1)
    return logp, entropy
