"""The layer of the FP8 training benchmark: one architecture, its linear layers from a factory, and who computes it.

Qwen2.5's: RMS norms, rotary positions, grouped-query attention by SDPA, SwiGLU. Left out: biases, embedding and head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.models.decoder import DecoderConfig
from harness.numerics.formats import format_named
from harness.numerics.fp8_flow import FP8Linear, use_kernels
from harness.numerics.fp8_gemm import Kernels
from harness.trainers.local.compiling import compile_layers

PLAIN, MASTERS, COMPILED = "bf16", "bf16, fp32 masters", "bf16, compiled"
BAR = 1.45
_OTHERS = ("square", "deep_gemm", "scaled_mm")
"""Other kernels that multiply in a layer that holds its weights."""
EPS = 1e-6
"""Epsilon of the norms."""
Make = Callable[[int, int], nn.Module]
"""(out, in) -> a linear layer."""


class MasterLinear(nn.Linear):
    """A bf16 product of a float32 master: cast on the way in, its gradient on the way back, as autocast does."""

    def forward(self, input: Tensor) -> Tensor:
        """bf16 [..., K] -> bf16 [..., N]."""
        return F.linear(input, self.weight.to(torch.bfloat16))


def makers(device: str) -> dict[str, Make]:
    """Contestant -> how its linear layers are made, with the same random weights."""

    def plain(n: int, k: int, kind: type[nn.Linear], dtype: torch.dtype) -> nn.Linear:
        layer = kind(k, n, bias=False, device=device, dtype=dtype)
        generator = torch.Generator(device).manual_seed(n + k)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(n, k, generator=generator, device=device).mul_(0.02))
        return layer

    def fp8(n: int, k: int) -> nn.Module:
        weights, acts = format_named("e4m3_block"), format_named("e4m3_1x128")
        return FP8Linear(plain(n, k, nn.Linear, torch.float32), weights=weights, acts=acts)

    return {
        PLAIN: lambda n, k: plain(n, k, nn.Linear, torch.bfloat16),
        MASTERS: lambda n, k: plain(n, k, MasterLinear, torch.float32),
        "fp8": fp8,
    }


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    """[T, H], in float32 inside."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype) * gain


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, [T, I]."""
    return F.silu(gate) * up


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, L, heads, d] turned by its position; `cos` and `sin` [L, 1, d / 2]."""
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


class Layer(nn.Module):
    """One decoder layer, with one product for q, k and v and one for gate and up."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: DecoderConfig, make: Make, *, length: int, device: str) -> None:
        """`length`: tokens of a sequence."""
        super().__init__()
        heads, pair = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.head_dim, self.length, self.qkv_sizes = shape.head_dim, length, [heads, pair, pair]
        self.qkv, self.o = make(sum(self.qkv_sizes), shape.hidden_size), make(shape.hidden_size, heads)
        self.up = make(2 * shape.intermediate_size, shape.hidden_size)
        self.down = make(shape.hidden_size, shape.intermediate_size)
        options = {"dtype": torch.bfloat16, "device": device}
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(shape.hidden_size, **options)) for _ in range(2))
        angle = torch.outer(torch.arange(length), 1e6 ** -torch.arange(0, 1, 2 / shape.head_dim))[:, None]
        self.register_buffer("cos", angle.cos().to(**options))
        self.register_buffer("sin", angle.sin().to(**options))

    def attention(self, projected: Tensor) -> Tensor:
        """q, k and v side by side [T, heads * d] -> [T, heads * d], causal within each sequence."""
        q, k, v = (
            part.view(-1, self.length, part.shape[-1] // self.head_dim, self.head_dim)
            for part in projected.split(self.qkv_sizes, -1)
        )
        q, k = (rotated(part, self.cos, self.sin) for part in (q, k))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(len(projected), -1)

    def forward(self, x: Tensor) -> Tensor:
        """bf16 [T, H] -> bf16 [T, H]."""
        projected = self.qkv(rms_norm(x, self.gains[0])).to(x.dtype)
        x = x + self.o(self.attention(projected)).to(x.dtype)
        gate, up = self.up(rms_norm(x, self.gains[1])).to(x.dtype).chunk(2, -1)
        return x + self.down(swiglu(gate, up)).to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One way to compute the layer."""

    name: str
    make: str
    """One of `makers`."""
    kernels: Kernels | None = None
    is_held: bool = False
    is_compiled: bool = False
    """As runs compile their layers (`trainers.compiling`), for one shape."""

    @property
    def bar(self) -> float | None:
        """Speed over bf16 that it shall reach; None: none is asked."""
        return BAR if self.is_held else None


def lineup(who: Mapping[str, Kernels | None], *, is_compiled: bool) -> list[Contestant]:
    """All contestants, by the kernels of `who`; `is_compiled`: with those that torch.compile makes."""
    name = "mixed" if "mixed" in who else next(iter(who))
    found = [Contestant(name=PLAIN, make=PLAIN)]
    if is_compiled:
        found += [Contestant(name=COMPILED, make=PLAIN, is_compiled=True), *_held(who, name, True)]
    found += _held(who, name, False)
    for other in _OTHERS:
        found += _held(who, other, is_compiled) if other != name else []
    if is_compiled:
        found.append(Contestant(name=f"{MASTERS}, compiled", make=MASTERS, is_compiled=True))
    return [
        *found,
        Contestant(name=MASTERS, make=MASTERS),
        Contestant(name=f"fp8, {name}", make="fp8", kernels=who[name]),
    ]


def _held(who: Mapping[str, Kernels | None], name: str, is_compiled: bool) -> list[Contestant]:
    """The contestant that holds its weights; none where these kernels are not here."""
    if who.get(name) is None:
        return []
    said = f"fp8 held, {name}{', compiled' if is_compiled else ''}"
    return [Contestant(name=said, make="fp8", kernels=who[name], is_held=True, is_compiled=is_compiled)]


def build(shape: DecoderConfig, entry: Contestant, *, length: int, device: str) -> nn.Module:
    """The layer of a contestant, in sequences of `length` tokens."""
    found = nn.Sequential(Layer(shape, makers(device)[entry.make], length=length, device=device))
    use_kernels(found, entry.kernels)
    if entry.is_compiled:
        compile_layers(found, is_dynamic=False)
    return found
