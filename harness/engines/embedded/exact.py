"""Sampling with the trainer's own forward pass, without a cache: zero mismatch by construction.

Every step runs the whole batch at its final shape, prompts left-aligned, L = longest prompt + max_new_tokens. Causal
attention makes what comes later irrelevant bit for bit, and equal shapes make every matrix product the same kernel on
the same operands; so the trainer's recomputation, `response_hidden` then `head` then log-softmax over all B x T
positions, gives exactly these log-probabilities. It must score the same rows together, at the same width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from harness.api import TensorRecord, WeightStream
from harness.engines.embedded.sampling import Draws, Transcript, pick, race_noise
from harness.engines.plain_record import plain_record
from harness.engines.requests import Requests
from harness.foundation.life import LIFE
from harness.models.decoder import Decoder, response_hidden
from harness.numerics.formats import Format


def check_same_weights(model: Decoder, weights: WeightStream) -> Iterator[tuple[str, Tensor]]:
    """Pass a stream on, comparing: ValueError where it is not the trainer's own weights, for the sampler uses those."""
    own = dict(model.named_parameters())
    for name, tensor in weights:
        if name not in own or not torch.equal(own[name].detach(), tensor.to(own[name].device)):
            raise ValueError(f"sampler=trainer samples from the trainer's module; the stream changes {name}")
        yield name, tensor


def parameter_records(model: Decoder) -> tuple[TensorRecord, ...]:
    """Passport lines of the module's own parameters."""
    return tuple(plain_record(name, tensor) for name, tensor in sorted(model.named_parameters()))


def input_formats(model: Decoder) -> dict[str, str]:
    """Formats of the inputs of the blocks' linear layers, by the weight's name: the module's own format, else fp32."""
    linears = [(name, module) for name, module in model.named_modules() if name.endswith("_proj")]
    formats = {name: getattr(module, "fmt", None) for name, module in linears}
    return {f"{name}.weight": fmt.name if isinstance(fmt, Format) else "fp32" for name, fmt in formats.items()}


def sample_exact(model: Decoder, requests: Requests, rows: Tensor, draws: Draws | None, out: Transcript) -> Transcript:
    """Sample one chunk; `rows` [R] int64 are its prompts' numbers. `draws` None: greedy."""
    steps, device = requests.max_new_tokens, out.tokens.device
    chosen = [requests.prompts[i] for i in rows.tolist()]
    width = max(map(len, requests.prompts)) + steps  # of the whole call, so that every chunk has one shape
    ids = torch.tensor([[*prompt, *[out.pad_id] * (width - len(prompt))] for prompt in chosen], device=device)
    lens = torch.tensor([len(prompt) for prompt in chosen], device=device)
    shortest = min(map(len, requests.prompts))  # the trainer gives one number where all prompts are of one length
    prompt_lens = lens if shortest + steps < width else shortest
    for t in range(steps):
        LIFE.alive()
        logits = model.head(response_hidden(model, ids, prompt_lens, steps))
        log_probs = log_probs_of(logits, requests.temperature)
        noise = None if draws is None else race_noise(draws, logits.shape[2])
        token, logp = pick(log_probs[:, t], noise)
        out.record_log_probs(log_probs[:, t])
        out.record(token, logp)
        ids.scatter_(1, (lens + t)[:, None], out.tokens[t][:, None])
        if not bool(out.is_alive.any()):
            break
    return out


def log_probs_of(logits: Tensor, temperature: float) -> Tensor:
    """[B, T, V] logits -> log-probabilities, over B * T rows as the trainer takes them (`logprobs.selected_logp`)."""
    flat = logits.flatten(0, 1)
    flat = flat if temperature in (0.0, 1.0) else flat.to(torch.float32) / temperature
    return torch.log_softmax(flat, -1, dtype=torch.float32).view(logits.shape)
