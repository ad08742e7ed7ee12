"""Log-probs of given responses: under an embedded engine's live weights, inputs and cache, and under a decoder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.engines.embedded.engine import EmbeddedEngine
from harness.engines.embedded.forward import decode, fold, head_gains
from harness.engines.embedded.sampling import scaled_log_probs
from harness.engines.requests import requests_of
from harness.models.decoder import Decoder, response_hidden
from harness.numerics.logprobs import selected_logp


@torch.inference_mode()
def engine_logp(
    engine: EmbeddedEngine, prompts: Sequence[Sequence[int]], token_ids: Tensor, temperature: float
) -> Tensor:
    """Log-probs [B, T] float32 nats that the engine would have recorded had it sampled `token_ids` [B, T] int64.

    The path of its own `generate`, token by token against its cache, with the draws replaced. B / len(prompts)
    adjacent responses continue each prompt; entries past a response's end mean nothing. Raises ValueError for
    requests that do not fit the model.
    """
    num_tokens = token_ids.shape[1]
    requests = requests_of(prompts, len(token_ids) // len(prompts), num_tokens, temperature, engine.config)
    tokens, gains = token_ids.to(engine.device), head_gains(engine.weights)
    logits, lens, mask, length = engine._start(requests, requests.rows)
    cos, sin = engine._tables(length + num_tokens)
    found: list[Tensor] = []
    for t in range(num_tokens):
        found.append(scaled_log_probs(logits, temperature).gather(1, tokens[:, t : t + 1])[:, 0])
        if t < num_tokens - 1:
            at = slice(length + t, length + t + 1) if mask is None else lens + t
            tables = fold(gains, cos[at], sin[at])
            hidden = decode(engine.weights, engine.kv, tokens[:, t], length + t, mask, tables, engine.cache)
            logits = engine.weights.head(hidden)
    return torch.stack(found, 1).cpu()


@torch.inference_mode()
def decoder_logp(
    model: Decoder, prompts: Sequence[Sequence[int]], token_ids: Tensor, temperature: float, rows: int = 64
) -> Tensor:
    """The same log-probs [B, T] by one full float32 forward pass over right-padded rows, `rows` of them at once."""
    repeats, (count, num_tokens) = len(token_ids) // len(prompts), token_ids.shape
    own = [list(prompt) for prompt in prompts for _ in range(repeats)]
    lens = torch.tensor([len(prompt) for prompt in own])
    ids = torch.zeros(count, int(lens.max()) + num_tokens, dtype=torch.int64)
    for i, prompt in enumerate(own):
        ids[i, : len(prompt) + num_tokens] = torch.cat((torch.tensor(prompt), token_ids[i]))
    found: list[Tensor] = []
    for part in torch.arange(count).split(rows):
        logits = model.head(response_hidden(model, ids[part], lens[part], num_tokens))
        logp, _ = selected_logp(logits.flatten(0, 1), token_ids[part].flatten(), temperature)
        found.append(logp.view(len(part), num_tokens))
    return torch.cat(found)
