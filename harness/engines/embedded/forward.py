"""The rollout forward pass: prefill of distinct prompts, then one token per row and step against the cache.

It computes what `harness.models.decoder` computes, in fewer and larger operations: fused qkv and gate_up, the rotary
tables multiplied by the head norms' gains and by 1/sqrt(D), the last layer of a prefill at its last position only.
Attention reads what the cache gives back, so a quantized cache acts in the prefill too.
Axes: P distinct prompts, R rows, L prompt slots (left padded), H heads, K key-value heads, D head dim, d hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.engines.embedded.kv_cache import KVCache, KVScales
from harness.engines.embedded.weights import FusedLayer, LiveWeights
from harness.numerics.experts import mix, route

Tables = Iterable[tuple[Tensor, Tensor]]
"""Layer by layer: the rotary cos and sin with the gains of the head norms in them. It is read once."""


def head_gains(weights: LiveWeights) -> tuple[Tensor, Tensor]:
    """(gain, rolled gain) [layers, H + K, D]: what `fold` multiplies into cos and sin."""
    c = weights.config
    scale = c.head_dim**-0.5
    if c.qk_norm:
        q, k = weights.stacks["q_gain"] * scale, weights.stacks["k_gain"]
    else:
        k = torch.ones(c.num_layers, c.head_dim, device=weights.device)
        q = k * scale
    sizes = (-1, c.num_heads, -1), (-1, c.num_kv_heads, -1)
    gain = torch.cat((q[:, None].expand(*sizes[0]), k[:, None].expand(*sizes[1])), 1)
    return gain, gain.roll(c.head_dim // 2, -1)


def fold(gains: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor) -> Tables:
    """Rotary tables [..., 1, D] times the gains: layer by layer [..., H + K, D]. Where every row has positions of its
    own, a layer's are made when it is reached: those of all layers of a 7B model take 10 GiB for 64 prompts."""
    gain, rolled = gains
    if cos.dim() == 3 and cos.shape[0] == 1:  # one position for every row: all layers in one operation
        return list(zip((cos * gain).unbind(0), (sin * rolled).unbind(0), strict=True))
    return ((cos * gain[i], sin * rolled[i]) for i in range(gain.shape[0]))


def rms_norm(x: Tensor, gain: Tensor | None, eps: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain over the last axis, float32, `eps` []: fewer passes than torch's own."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    out = x * torch.addcmul(eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
    return out if gain is None else out.mul_(gain)


def heads(weights: LiveWeights, layer: FusedLayer, x: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Residual [..., d] -> rotated and scaled q [..., H, D], rotated k [..., K, D], v [..., K, D]."""
    c = weights.config
    qkv = layer.qkv(rms_norm(x, layer.input_gain, weights.eps)).view(*x.shape[:-1], -1, c.head_dim)
    sizes = (c.num_heads, c.num_kv_heads)
    qk, v = qkv.split((sum(sizes), c.num_kv_heads), -2)
    if c.qk_norm:
        qk = rms_norm(qk, None, weights.eps)
    cos, sin = tables  # q and k end apart, so that both come out contiguous
    straight, rolled = (qk * cos).split(sizes, -2), qk.roll(c.head_dim // 2, -1).split(sizes, -2)
    q, k = (torch.addcmul(a, b, s) for a, b, s in zip(straight, rolled, sin.split(sizes, -2), strict=True))
    return q, k, v


def mlp_(weights: LiveWeights, layer: FusedLayer, x: Tensor, experts: list[Tensor] | None = None) -> Tensor:
    """Add the block's MLP, or its mixture of experts, to the residual [..., d], in place. `experts` then gets the ids
    of the chosen ones, [..., k] int64."""
    h, c = rms_norm(x, layer.post_gain, weights.eps), weights.config
    if layer.router is None:
        return x.add_(_mlp(layer, 0, h))
    rows = h.flatten(0, -2)
    ids, gates = route(layer.router(rows), c.num_experts_per_tok, is_normed=c.norm_topk_prob)
    if experts is not None:
        experts.append(ids.view(*x.shape[:-1], -1))
    return x.add_(mix(rows, ids, gates, c.num_experts, partial(_mlp, layer)).view(x.shape))


def _mlp(layer: FusedLayer, number: int, h: Tensor) -> Tensor:
    """[..., d] -> [..., d] by the MLP, or by one expert."""
    gate_up, down = layer.mlps[number]
    gate, up = gate_up(h).chunk(2, -1)
    return down(F.silu(gate).mul_(up))


Store = Callable[[int, Tensor, Tensor], None]
"""(layer, K, V), both [P, K, L, D]: where a prefill leaves them."""


def prefill(
    weights: LiveWeights, kv: KVScales, ids: Tensor, pad: Tensor | None, tables: Tables, store: Store,
    experts: list[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Prompts [P, L] int64 -> final-norm hidden state of the last slot [P, d].

    `pad` [P] int64: empty slots at the left of each prompt (None: none anywhere). `experts` gets those of every
    layer: [P, L, k], of the last one [P, 1, k].
    """
    c, length = weights.config, ids.shape[1]
    mask = None
    if pad is not None:
        slot = torch.arange(length, device=ids.device)
        own = slot[:, None] == slot  # an empty slot sees itself, or its softmax would be over nothing
        mask = ((slot >= pad[:, None])[:, None, :] & (slot[:, None] >= slot) | own)[:, None]
    x = F.embedding(ids, weights.stacks["embed"])
    for i, (layer, table) in enumerate(zip(weights.layers, tables, strict=True)):
        q, k, v = (t.transpose(1, 2) for t in heads(weights, layer, x, table))
        k, v = kv.stored(i, k, v)
        store(i, k, v)
        is_last = i == c.num_layers - 1
        if is_last:
            x, q, mask = x[:, -1:], q[:, :, -1:], None if mask is None else mask[:, :, -1:]
        x = x + layer.out(_attend(q, k, v, mask, is_causal=mask is None and not is_last).transpose(1, 2).flatten(2))
        x = mlp_(weights, layer, x, experts)
    return rms_norm(x[:, -1], weights.stacks["norm"], weights.eps)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, is_causal: bool) -> Tensor:
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1 and q.is_cuda:  # float32 kernels on CUDA have no grouped form
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=is_causal, scale=1.0, enable_gqa=k.shape[1] != q.shape[1]
    )


def decode(
    weights: LiveWeights, kv: KVScales, tokens: Tensor, slot: int, mask: Tensor | None, tables: Tables, cache: KVCache,
    experts: list[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """One step: tokens [R] int64, stored at `slot` -> final-norm hidden state [R, d].

    `mask` [R, 1, S] float32 is -inf at empty slots (None: there are none). `experts` gets those of every layer, [R, k].
    """
    c, rows = weights.config, len(tokens)
    groups, repeats = rows * c.num_kv_heads, c.num_heads // c.num_kv_heads
    cache.ensure(slot)
    x = F.embedding(tokens, weights.stacks["embed"])
    for i, (layer, table) in enumerate(zip(weights.layers, tables, strict=True)):
        q, k, v = heads(weights, layer, x, table)
        cache.append(i, slot, *kv.stored(i, k, v))
        seen_k, seen_v = cache.k[i][:, : slot + 1], cache.v[i][:, : slot + 1]
        scores = torch.bmm(q.view(groups, repeats, c.head_dim), seen_k.transpose(1, 2))
        if mask is not None:
            scores.view(rows, -1, slot + 1).add_(mask[:, :, : slot + 1])
        out = torch.bmm(torch.softmax(scores, -1), seen_v)
        x.add_(layer.out(out.view(rows, -1)))
        x = mlp_(weights, layer, x, experts)
    return rms_norm(x, weights.stacks["norm"], weights.eps)
