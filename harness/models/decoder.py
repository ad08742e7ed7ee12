"""The decoder of every embedded run: Qwen2, Qwen3, Qwen3-MoE and bias-free Llama, written for one CPU thread.

Module and parameter names are those of Hugging Face, so a state dict is a checkpoint and adapter targets work.
Float32 masters, causal attention over right-padded rows, no cache (`harness.engines.embedded` has it), no dropout,
no sliding window; rope scaling as transformers computes it. A mixture of experts is sparse in every layer; nothing
balances the load of its experts. Axes: B rows, L positions, d hidden, H heads, K key-value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from harness.numerics.experts import mix, route
from harness.numerics.rms_norm import RMSNorm

ROUTER = "mlp.gate"
"""Linear layer of a block whose outputs choose the experts."""
Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The shape of a decoder; `harness.models.checkpoint.load_config` reads one from a folder."""

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10000.0
    rope_scaling: tuple[tuple[str, float | bool | str], ...] = ()
    """Scaling of the rotary frequencies, as pairs of Hugging Face's `rope_parameters` without the base; empty: none."""
    rms_eps: float = 1e-6
    qk_norm: bool = True
    """RMSNorm over the head dimension of queries and keys: Qwen3."""
    attention_bias: bool = False
    """Biases on q, k and v, none on o: Qwen2."""
    num_experts: int = 0
    """Experts of every layer's mixture, Qwen3-MoE; 0: one MLP of `intermediate_size`, which a mixture does not have."""
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    """Width of one expert."""
    norm_topk_prob: bool = True
    """The gates of a token's experts add up to 1."""
    tie_embeddings: bool = True
    max_positions: int = 4096
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embedding needs an even one")
        if not self.num_experts and (self.num_experts_per_tok or self.moe_intermediate_size):
            raise ValueError("num_experts=0: num_experts_per_tok and moe_intermediate_size are of a mixture; valid: 0")
        if self.num_experts and not (self.qk_norm and not self.attention_bias):
            raise ValueError(f"num_experts={self.num_experts}: mixtures of experts are of the qwen3 family")
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(f"num_experts_per_tok={self.num_experts_per_tok}: valid: 1 to {self.num_experts}")
        if self.num_experts and self.moe_intermediate_size < 1:
            raise ValueError(f"moe_intermediate_size={self.moe_intermediate_size}: a mixture needs experts' width")

    @property
    def mlps(self) -> tuple[tuple[str, int], ...]:
        """(prefix in a layer, width) of every MLP of a layer: its one, or its experts."""
        if self.num_experts == 0:
            return (("mlp.", self.intermediate_size),)
        return tuple((f"mlp.experts.{i}.", self.moe_intermediate_size) for i in range(self.num_experts))


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint, by Hugging Face name, in model order. A tied head is not a tensor of its own."""
    d, hd = config.hidden_size, config.head_dim
    heads = {"q": config.num_heads * hd, "k": config.num_kv_heads * hd, "v": config.num_kv_heads * hd}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, d)}
    for i in range(config.num_layers):
        at = f"model.layers.{i}."
        for name, rows in heads.items():
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, d)
            if config.attention_bias:
                shapes[f"{at}self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{at}self_attn.o_proj.weight"] = (d, heads["q"])
        if config.qk_norm:
            shapes[f"{at}self_attn.q_norm.weight"] = shapes[f"{at}self_attn.k_norm.weight"] = (hd,)
        if config.num_experts:
            shapes[f"{at}{ROUTER}.weight"] = (config.num_experts, d)
        for prefix, ff in config.mlps:
            shapes[f"{at}{prefix}gate_proj.weight"] = shapes[f"{at}{prefix}up_proj.weight"] = (ff, d)
            shapes[f"{at}{prefix}down_proj.weight"] = (d, ff)
        shapes[f"{at}input_layernorm.weight"] = shapes[f"{at}post_attention_layernorm.weight"] = (d,)
    shapes["model.norm.weight"] = (d,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, d)
    return shapes


def bare(kind: type[Module], *args: Any, **options: Any) -> Module:
    """A module whose parameters hold no values yet, on the default device: on "meta" they take no memory."""
    return cast(Module, skip_init(kind, *args, **options, device=torch.get_default_device()))


def rope_tables(config: DecoderConfig, length: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Rotary tables for positions 0..length-1: cos and signed sin, [length, 1, D] float32.

    With them the rotation is `x * cos + x.roll(D / 2) * sin`: the sine of the first half carries the minus sign
    (RoFormer, arXiv 2104.09864, eq. 34, in the half-split layout that Hugging Face checkpoints use).
    """
    with torch.device("cpu"):
        inverse, factor = _scaled_frequencies(config) if config.rope_scaling else (_frequencies(config), 1.0)
        angle = torch.arange(length, dtype=torch.float32)[:, None] * inverse
    cos = torch.cat((angle.cos(), angle.cos()), -1)
    sin = torch.cat((-angle.sin(), angle.sin()), -1)
    if factor != 1.0:
        cos, sin = factor * cos, factor * sin
    return cos[:, None].to(device), sin[:, None].to(device)


def _frequencies(config: DecoderConfig) -> Tensor:
    """Angle per position of every pair of dimensions, [D / 2] float32 radians."""
    return 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim)


@cache
def _scaled_frequencies(config: DecoderConfig) -> tuple[Tensor, float]:
    """(angles [D / 2] float32 radians, factor on cosine and sine) by transformers' own rule of this kind of scaling."""
    from transformers import PretrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling, make = dict(config.rope_scaling), cast(Any, PretrainedConfig)  # its fields are those of every model
    given = make(
        hidden_size=config.hidden_size, num_attention_heads=config.num_heads, head_dim=config.head_dim,
        max_position_embeddings=config.max_positions, rope_parameters={"rope_theta": config.rope_theta, **scaling},
    )  # fmt: skip
    rule: Any = ROPE_INIT_FUNCTIONS[str(scaling["rope_type"])]
    inverse, factor = rule(given, torch.device("cpu"))
    return inverse, float(factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [..., heads, D] by tables that broadcast against it."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


@dataclass(frozen=True, kw_only=True)
class Queries:
    """The positions that a last layer computes: keys and values need all of them, its output only these."""

    index: slice | Tensor
    """Columns, the same for every row, or [B, T] int64."""
    mask: Tensor
    """[T, L] or [B, 1, T, L] bool: the keys that each may see."""

    def take(self, x: Tensor) -> Tensor:
        """The columns of x at these positions: [B, L, d] -> [B, T, d]."""
        if isinstance(self.index, slice):
            return x[:, self.index]
        return x.gather(1, self.index[:, :, None].expand(-1, -1, x.shape[2]))


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Beginnings that several sequences of a packed row have in common: of N places U tokens are computed."""

    source: Tensor
    """[N] int64: the computed token that stands at each place."""
    first: Tensor
    """[U] int64: the place where each computed token stands first."""
    repeated: Tensor
    """[S] int64: computed tokens that stand at several places."""
    places: Tensor
    """[S, C] int64: all places of those; N where there are fewer than C."""

    @classmethod
    def of(cls, source: Tensor) -> Shared:
        """From `source`, whose tokens are numbered in the order of their first places."""
        order = source.argsort(stable=True)
        counts = source.bincount()
        begins = counts.cumsum(0) - counts
        repeated = (counts > 1).nonzero()[:, 0]
        turn = torch.arange(int(counts.max()), device=source.device)
        at = (begins[repeated, None] + turn).clamp(max=len(source) - 1)
        is_there = turn < counts[repeated, None]
        return cls(source=source, first=order[begins], repeated=repeated,
                   places=torch.where(is_there, order[at], len(source)))  # fmt: skip

    def spread(self, x: Tensor) -> Tensor:
        """[1, H, U, D] -> [1, H, N, D]: every token at all its places."""
        return cast(Tensor, _Spread.apply(x, self))


class _Spread(torch.autograd.Function):
    """Indexing whose gradient is summed in a fixed order, in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shared: Shared) -> Tensor:
        ctx.shared = shared
        return x.index_select(2, shared.source)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        shared, grad = cast(Shared, ctx.shared), grads[0]
        out = grad.index_select(2, shared.first)
        padded = F.pad(grad, (0, 0, 0, 1))  # a last place that holds nothing
        every = padded[:, :, shared.places]
        wide = torch.promote_types(grad.dtype, torch.float32)
        out[:, :, shared.repeated] = every.sum(3, dtype=wide).to(grad.dtype)
        return out, None


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Sequences laid end to end in one row: each position sees its own sequence only."""

    lengths: tuple[int, ...]
    """Tokens of each, in order; their sum is the length of the row."""
    ends: Tensor
    """[sequences + 1] int32: where each begins, and the length of the row."""
    shared: Shared | None = None
    """Beginnings in common, if there are any: attention alone then sees the sequences end to end, and everything else
    the computed tokens."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str, shared: Shared | None = None) -> Spans:
        """Sequences of these lengths, all at least 1."""
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        return cls(lengths=tuple(lengths), ends=ends, shared=shared)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention inside each sequence: q [1, H, N, D], k and v [1, K, N, D] -> [1, H, N, D]; with `shared`, U
        computed tokens in place of N."""
        if self.shared is None:
            return self._attend(q, k, v)
        q, k, v = map(self.shared.spread, (q, k, v))
        return self._attend(q, k, v).index_select(2, self.shared.first)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A GPU, where K must be H, runs one kernel for all: launches for each take longer than a small model's
        arithmetic."""
        if q.is_cuda:
            run: Any = torch.ops.aten._efficient_attention_forward  # PyTorch's own kernel for float32
            longest, causal = max(self.lengths), 1
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = run(q, k, v, None, self.ends, self.ends, longest, longest, 0.0, causal, torch.is_grad_enabled())
            return out[0].transpose(1, 2)
        grouped = q.shape[1] > k.shape[1]
        parts = zip(*(x.split(self.lengths, 2) for x in (q, k, v)), strict=True)
        return torch.cat([F.scaled_dot_product_attention(*own, is_causal=True, enable_gqa=grouped) for own in parts], 2)


def attend(spans: Spans, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`Spans.attend` of the spans at hand: those of a split row exchange heads first (`trainers.verl.ulysses`)."""
    return spans.attend(q, k, v)


class CoreAttention(nn.Module):
    """Softmax attention alone, after norms and rotation: where keys and values can be seen as a cache has them."""

    packed: Callable[[Spans, Tensor, Tensor, Tensor], Tensor] = staticmethod(attend)
    """Attention of a packed row: a compiler does not look into it (`trainers.local.compiling`)."""
    dtype: torch.dtype | None = None
    """Type to which queries, keys and values are rounded, and of the product; None: as they come."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: Tensor | Spans | None) -> Tensor:
        """q [B, H, T, D], k and v [B, K, L, D] -> [B, H, T, D]. `at`: a mask [T, L] or [B, 1, T, L] bool, the sequences
        of one packed row, or None for causal."""
        given = q.dtype
        if self.dtype is not None:
            q, k, v = (x.to(self.dtype) for x in (q, k, v))
        return self._attend(q, k, v, at).to(given)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, at: Tensor | Spans | None) -> Tensor:
        grouped = q.shape[1] > k.shape[1]
        if grouped and q.is_cuda:  # float32 kernels on CUDA have no grouped form; the CPU kernel has
            repeats = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
            grouped = False
        if isinstance(at, Spans):
            return self.packed(at, q, k, v)
        return F.scaled_dot_product_attention(q, k, v, at, is_causal=at is None, enable_gqa=grouped)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        d, hd = config.hidden_size, config.head_dim
        self.head_dim = hd
        self.q_proj = bare(nn.Linear, d, config.num_heads * hd, bias=config.attention_bias)
        self.k_proj = bare(nn.Linear, d, config.num_kv_heads * hd, bias=config.attention_bias)
        self.v_proj = bare(nn.Linear, d, config.num_kv_heads * hd, bias=config.attention_bias)
        self.o_proj = bare(nn.Linear, config.num_heads * hd, d, bias=False)
        self.q_norm = RMSNorm(hd, config.rms_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(hd, config.rms_eps) if config.qk_norm else nn.Identity()
        self.core = CoreAttention()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, at: Queries | Spans | None = None) -> Tensor:
        """[B, L, d] and tables that broadcast against [B, L, heads, D] -> [B, L, d], or [B, T, d] at `Queries`."""
        k = rotate(self.k_norm(self._heads(self.k_proj(x))), cos, sin).transpose(1, 2)
        v = self._heads(self.v_proj(x)).transpose(1, 2)
        if isinstance(at, Queries):
            x, cos, sin = at.take(x), cos[at.index], sin[at.index]
        q = rotate(self.q_norm(self._heads(self.q_proj(x))), cos, sin).transpose(1, 2)
        out = self.core(q, k, v, at.mask if isinstance(at, Queries) else at)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim)


class MLP(nn.Module):
    """The SwiGLU feed-forward of one layer."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = bare(nn.Linear, hidden, width, bias=False)
        self.up_proj = bare(nn.Linear, hidden, width, bias=False)
        self.down_proj = bare(nn.Linear, width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Mixture(nn.Module):
    """A sparse mixture of SwiGLU experts."""

    chosen: Tensor
    """Expert ids of the last forward pass, [..., k] int64."""
    logits: Tensor
    """Router logits of the last forward pass, [..., E], without graph."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.num_chosen, self.is_normed = config.num_experts_per_tok, config.norm_topk_prob
        self.gate = bare(nn.Linear, config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(MLP(config.hidden_size, width) for _, width in config.mlps)

    def forward(self, x: Tensor, given: Tensor | None = None) -> Tensor:
        """[..., d] -> [..., d]. `given` [..., k] integers: experts in place of the router's own (`experts.route`)."""
        flat = x.flatten(0, -2)
        chosen = None if given is None else given.flatten(0, -2)
        logits = self.gate(flat)
        ids, gates = route(logits, self.num_chosen, is_normed=self.is_normed, given=chosen)
        self.chosen, self.logits = ids.view(*x.shape[:-1], -1), logits.detach().view(*x.shape[:-1], -1)
        return mix(flat, ids, gates, len(self.experts), lambda i, rows: self.experts[i](rows)).view(x.shape)


class Layer(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = Mixture(config) if config.num_experts else MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, at: Queries | Spans | None = None, experts: Tensor | None = None
    ) -> Tensor:
        """[B, L, d] -> [B, L, d], or [B, T, d] at `Queries`. `experts` [B, L, k]: those that a mixture is to use."""
        attended = self.self_attn(self.input_layernorm(x), cos, sin, at)
        x = (at.take(x) if isinstance(at, Queries) else x) + attended
        h = self.post_attention_layernorm(x)
        if experts is None:
            return x + self.mlp(h)
        return x + self.mlp(h, at.take(experts) if isinstance(at, Queries) else experts)


class Backbone(nn.Module):
    """Embedding, blocks, final norm: the `model.` prefix of the checkpoint."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = bare(nn.Embedding, config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_eps)


class Decoder(nn.Module):
    """The whole model. `hidden` and `head` apart, so that a trainer computes logits only where it needs them."""

    _cos: Tensor
    _sin: Tensor
    checkpoint_layers = False
    """Keep only what enters each layer for the backward pass, which then computes the layer again."""

    def __init__(self, config: DecoderConfig, generator: torch.Generator | None = None, init_std: float = 0.02) -> None:
        """Linear and embedding weights from N(0, init_std^2), biases 0, gains 1, as Hugging Face initialises.

        Without a generator the weights are left uninitialised, for a loader to fill. Draws happen on the CPU
        generator given, whatever device the model moves to later, and leave the global generator alone.
        """
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = bare(nn.Linear, config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        cos, sin = rope_tables(config, min(64, config.max_positions))
        self.register_buffer("_cos", cos, persistent=False)
        self.register_buffer("_sin", sin, persistent=False)
        if generator is not None:
            self._initialise(generator, init_std)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator, std: float) -> None:
        for name, tensor in self.named_parameters():
            if name.endswith(".bias"):
                tensor.zero_()
            elif tensor.dim() == 2:
                tensor.normal_(0.0, std, generator=generator)

    def _tables(self, length: int) -> tuple[Tensor, Tensor]:
        if length > self._cos.shape[0]:
            if length > self.config.max_positions:
                raise ValueError(f"sequence length {length} exceeds max_positions={self.config.max_positions}")
            size = min(max(2 * self._cos.shape[0], length), self.config.max_positions)
            with torch.inference_mode(False):  # a table made inside inference mode could not be used in training
                self._cos, self._sin = rope_tables(self.config, size, self._cos.device)
        return self._cos, self._sin

    def hidden(
        self, ids: Tensor, positions: Tensor | None = None, at: Queries | Spans | None = None,
        experts: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Token ids [B, L] int64, right padded -> final-norm output [B, L, d] float32, or [B, T, d] at `Queries`.

        `positions` [B, L] int64 overrides 0..L-1 (not together with `Queries`). `experts` [B, L, layers, k] integers:
        those that the mixtures use in place of their own (`harness.numerics.experts`). Raises ValueError past
        `max_positions`.
        """
        length = ids.shape[1] if positions is None else int(positions.max()) + 1
        cos, sin = self._tables(length)
        cos, sin = (cos[:length], sin[:length]) if positions is None else (cos[positions], sin[positions])
        x = self.model.embed_tokens(ids)
        last = len(self.model.layers) - 1
        for i, layer in enumerate(self.model.layers):
            own = at if i == last or isinstance(at, Spans) else None
            args = (x, cos, sin, own) if experts is None else (x, cos, sin, own, experts[:, :, i])
            if self.checkpoint_layers and torch.is_grad_enabled():
                run: Callable[..., Tensor] = checkpoint  # pyright: ignore[reportUnknownVariableType]
                x = run(layer, *args, use_reentrant=False, preserve_rng_state=False)  # no layer draws
            else:
                x = layer(*args)
        return self.model.norm(x)

    def head(self, h: Tensor) -> Tensor:
        """[..., d] -> logits [..., V] float32."""
        return self.lm_head(h)

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Token ids [B, L] -> logits [B, L, V] float32."""
        return self.head(self.hidden(ids, positions))


def response_hidden(
    model: Decoder, ids: Tensor, prompt_lens: int | Tensor, num_tokens: int, experts: Tensor | None = None
) -> Tensor:
    """The hidden states that predict each response token: [B, T, d] float32.

    `ids` [B, L] int64 holds prompt then response, right padded; `prompt_lens` is one length for all rows or [B]
    int64. Entry t comes from position prompt_len + t - 1; positions past the row end repeat its last one. The last
    layer computes nothing else, and columns that predict nothing are left out where the length is one for all.
    `experts`: as in `Decoder.hidden`. The zero-mismatch sampler and the trainer both go through here, with the same
    kind of `prompt_lens` and at equal shapes [B, L] and [B, T]: that is what makes their log-probabilities equal bit
    for bit.
    """
    if isinstance(prompt_lens, int):
        first, end = prompt_lens - 1, prompt_lens - 1 + num_tokens
        ids, experts = ids[:, :end], None if experts is None else experts[:, :end]
        at = torch.arange(ids.shape[1], device=ids.device)
        return model.hidden(ids, at=Queries(index=slice(first, end), mask=at[first:, None] >= at), experts=experts)
    at = torch.arange(ids.shape[1], device=ids.device)
    index = prompt_lens[:, None] - 1 + torch.arange(num_tokens, device=ids.device)
    index = index.clamp(max=ids.shape[1] - 1)
    return model.hidden(ids, at=Queries(index=index, mask=(index[:, :, None] >= at)[:, None]), experts=experts)
