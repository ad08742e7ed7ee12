"""One optimizer step of a text base on packed documents; on a GPU a CUDA graph for every bucket.

    before (norm, q, k, v, rotation) -> attention inside documents -> after (output, MLP)   per layer
    head -> sum of cross-entropies over response tokens -> backward -> clip -> AdamW, or Muon and AdamW

The masters are the `Decoder`'s own float32 parameters. Products run in `dtype`: bfloat16 on a GPU, float32 on a CPU.
A GPU runs the elementwise parts compiled, each bucket eagerly for two steps, and from its third on as one graph of
forward, backward and update, so that the host only copies a batch and replays. Two trainings there agree in what they
reach, not bit for bit. A mixture of experts runs without graphs, for the tokens of an expert change from batch to
batch; nothing balances their load. Left out: schedules and evaluation (`harness.start.text_training`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.models.decoder import Decoder, DecoderConfig, Layer, Mixture, rope_tables, rotate
from harness.numerics.compiler_options import compiler_options
from harness.numerics.experts import mix, route
from harness.numerics.rms_norm import rms_norm
from harness.start.muon import Muon
from harness.start.text_documents import Bucket, Packed

MLP_PARTS = ("gate", "up", "down")
EAGER_STEPS = 2
"""Steps of a bucket before its graph is captured: kernels get compiled, the optimizer gets its state."""


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == torch.float32:
        return rms_norm(x, weight, eps)
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


def before(x: Tensor, layer: Sequence[Tensor], cos: Tensor, sin: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Residual [N, d] and tables [N, 1, D] -> rotated q [N, H, D], rotated k and v [N, K, D]."""
    gain, wq, wk, wv, q_gain, k_gain = layer
    y = _norm(x, gain, eps)
    q, k, v = (_linear(y, weight).view(len(x), -1, cos.shape[-1]) for weight in (wq, wk, wv))
    return rotate(_norm(q, q_gain, eps), cos, sin), rotate(_norm(k, k_gain, eps), cos, sin), v


def after(x: Tensor, attended: Tensor, layer: Sequence[Tensor], eps: float) -> Tensor:
    """Residual [N, d] and attention [N, H * D] -> residual [N, d]."""
    wo, gain, gate, up, down = layer
    x = x + _linear(attended, wo)
    y = _norm(x, gain, eps)
    return x + _linear(F.silu(_linear(y, gate)) * _linear(y, up), down)


def after_mixture(x: Tensor, attended: Tensor, layer: Sequence[Tensor], mixture: Mixture, eps: float) -> Tensor:
    """As `after`, with a mixture of experts in place of the MLP."""
    wo, gain = layer
    x = x + _linear(attended, wo)
    y = _norm(x, gain, eps)
    logits = _linear(y, mixture.get_parameter("gate.weight"))
    ids, gates = route(logits, mixture.num_chosen, is_normed=mixture.is_normed)

    def expert(number: int, rows: Tensor) -> Tensor:
        gate, up, down = (mixture.experts[number].get_parameter(f"{name}_proj.weight") for name in MLP_PARTS)
        return _linear(F.silu(_linear(rows, gate)) * _linear(rows, up), down)

    return x + mix(y, ids, gates, len(mixture.experts), expert)


def embedded(ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of the embedding [N, d]; on a GPU a product with one-hot rows, whose gradient a graph can capture."""
    if not ids.is_cuda:
        return F.embedding(ids, weight).to(dtype)
    one_hot = (ids[:, None] == torch.arange(weight.shape[0], device=ids.device)).to(dtype)
    return one_hot @ weight.to(dtype)


def token_losses(x: Tensor, gain: Tensor, head: Tensor, target: Tensor, eps: float) -> Tensor:
    """Cross-entropy [N] float32, nats, of `target` [N] int64 after the residual [N, d]."""
    return F.cross_entropy(_linear(_norm(x, gain, eps), head).float(), target, reduction="none")


def attend(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int) -> Tensor:
    """Causal attention inside each document: q [N, H, D], k and v [N, K, D] -> [N, H * D]. `ends` as in `Packed`."""
    if q.is_cuda:
        run: Any = torch.ops.aten._flash_attention_forward
        return run(q, k, v, ends, ends, longest, longest, 0.0, True, False)[0].reshape(len(q), -1)
    sizes = [size for size in ends.diff().tolist() if size]
    parts = zip(*(t.transpose(0, 1)[None].split(sizes, 2) for t in (q, k, v)), strict=True)
    grouped = q.shape[1] != k.shape[1]
    out = [F.scaled_dot_product_attention(*own, is_causal=True, enable_gqa=grouped) for own in parts]
    return torch.cat(out, 2)[0].transpose(0, 1).reshape(len(q), -1)


def document_numbers(ends: Tensor, size: int) -> Tensor:
    """[size] int64: the document of every token, counted from 0."""
    return torch.searchsorted(ends, torch.arange(size, device=ends.device, dtype=ends.dtype), right=True) - 1


def document_positions(ends: Tensor, size: int) -> Tensor:
    """[size] int64: the place of every token in its document."""
    return torch.arange(size, device=ends.device) - ends.long()[document_numbers(ends, size)]


def device_of(model: Decoder) -> torch.device:
    """Device of the model's weights."""
    return next(model.parameters()).device


def check_family(config: DecoderConfig) -> None:
    """Raises ValueError, one line, for a decoder that is not of the Qwen3 family."""
    if config.attention_bias or not config.qk_norm or not config.tie_embeddings:
        raise ValueError("model.family: a base for text is trained for qwen3 alone, with tied embeddings")


class PackedDecoder:
    """The forward pass of a `Decoder` over packed documents."""

    def __init__(self, model: Decoder, dtype: torch.dtype, longest: int) -> None:
        """`longest` tokens of a document. Raises ValueError as `check_family`."""
        config = model.config
        check_family(config)
        self.model, self.dtype, self.eps = model, dtype, config.rms_eps
        device = device_of(model)
        self.cos, self.sin = (table.to(dtype) for table in rope_tables(config, longest, device))
        self.functions: tuple[Callable[..., Any], ...] = (before, after, token_losses, embedded)

    def compile(self) -> None:
        """From now on the elementwise parts run as compiled code."""
        options = compiler_options(device_of(self.model))
        self.functions = tuple(torch.compile(function, dynamic=False, options=options) for function in self.functions)

    def losses(self, ids: Tensor, ends: Tensor, longest: int) -> Tensor:
        """Ids [N] int64 and ends [D + 1] int32 -> cross-entropy [N] float32 of the token after each; the last one's is
        that of the first token and means nothing."""
        first, second, losses_of, embed = self.functions
        place = document_positions(ends, len(ids))
        cos, sin = self.cos[place], self.sin[place]
        body = self.model.model
        x = embed(ids, body.embed_tokens.weight, self.dtype)
        for layer in body.layers:
            assert isinstance(layer, Layer)
            at, mlp = layer.self_attn, layer.mlp
            gains = (at.q_norm.weight, at.k_norm.weight)
            linears = (at.q_proj.weight, at.k_proj.weight, at.v_proj.weight)
            q, k, v = first(x, (layer.input_layernorm.weight, *linears, *gains), cos, sin, self.eps)
            ends_of_layer = (at.get_parameter("o_proj.weight"), layer.post_attention_layernorm.weight)
            attended = attend(q, k, v, ends, longest)
            if isinstance(mlp, Mixture):
                x = after_mixture(x, attended, ends_of_layer, mlp, self.eps)
                continue
            weights = (*ends_of_layer, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
            x = second(x, attended, weights, self.eps)
        return losses_of(x, body.norm.weight, body.embed_tokens.weight, ids.roll(-1), self.eps)


class PackedStep:
    """One optimizer step per call. Owns the memory that batches are copied into, and on a GPU the graphs."""

    def __init__(self, model: Decoder, buckets: Sequence[Bucket], tokens: int, betas: tuple[float, float],
                 weight_decay: float, grad_clip: float, has_muon: bool = False) -> None:  # fmt: skip
        """`tokens` of a batch. Weight decay acts on matrices alone. `has_muon`: those of the layers learn by Muon, the
        embedding and the gains by AdamW at the same rate."""
        device = device_of(model)
        self.is_graphed = model.config.num_experts == 0
        self.is_cuda, self.buckets, self.grad_clip = device.type == "cuda", buckets, grad_clip
        dtype = torch.bfloat16 if self.is_cuda else torch.float32
        self.decoder = PackedDecoder(model, dtype, max(bucket.longest for bucket in buckets))
        self.parameters = list(model.parameters())
        self.lr = torch.zeros((), device=device)
        gains = [p for p in self.parameters if p.dim() != 2]
        inside = [p for p in model.model.layers.parameters() if p.dim() == 2] if has_muon else []
        matrices = [p for p in self.parameters if p.dim() == 2 and not any(p is own for own in inside)]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": gains, "weight_decay": 0.0}]
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "optimizer": torch.optim.AdamW(groups, self.lr, betas, fused=True, capturable=self.is_cuda)
        }
        if inside:
            self.optimizers["muon"] = Muon(inside, self.lr, weight_decay)
        self.keep_rate()
        self.ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.wanted = torch.zeros(tokens, device=device)
        self.ends = [torch.zeros(bucket.most + 1, dtype=torch.int32, device=device) for bucket in buckets]
        self.num_wanted, self.loss = torch.ones((), device=device), torch.zeros((), device=device)
        self.calls = [0] * len(buckets)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        if self.is_cuda:
            self.decoder.compile()

    def keep_rate(self) -> None:
        """Bind the optimizers to the tensor that holds the learning rate; after their state was loaded, again."""
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = self.lr

    def __call__(self, batch: Packed, lr: float) -> None:
        """Learn one batch at a learning rate. `loss` [] float32 is then its mean cross-entropy in nats."""
        number = batch.bucket
        self.lr.fill_(lr)
        self.num_wanted.fill_(float(batch.num_wanted))
        self.ends[number].copy_(batch.ends, non_blocking=True)
        self.ids.copy_(batch.ids, non_blocking=True)
        self.wanted.copy_(batch.wanted, non_blocking=True)
        self.calls[number] += 1
        if not self.is_cuda:  # no shape to keep: what is padding costs nothing
            return self._learn(number, batch.num_used)
        if not self.is_graphed:
            return self._learn(number, len(self.ids))
        if number not in self.graphs and self.calls[number] > EAGER_STEPS:
            self.graphs[number] = self._captured(number)
        if number in self.graphs:
            return self.graphs[number].replay()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._learn(number, len(self.ids))
        torch.cuda.current_stream().wait_stream(side)

    def _learn(self, number: int, size: int) -> None:
        """Forward, backward and update on the first `size` tokens of the memory; the gradients are dropped."""
        ids, ends = self.ids[:size], self.ends[number].clamp(max=size)
        losses = self.decoder.losses(ids, ends, self.buckets[number].longest)
        loss = (losses * self.wanted[:size]).sum() / self.num_wanted
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, self.grad_clip)
        for optimizer in self.optimizers.values():
            optimizer.step()
        self.loss.copy_(loss.detach())
        for p in self.parameters:
            p.grad = None

    def _captured(self, number: int) -> torch.cuda.CUDAGraph:
        """The graph of a bucket's step. Graphs share one memory pool: nothing in it outlives a replay."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.graphs.values())).pool() if self.graphs else None
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self._learn(number, len(self.ids))
        return graph
