"""The decoder layers of the FP8 training benchmark: one architecture, its linear layers from a factory.

Qwen2.5's: RMS norms, rotary positions, grouped-query attention by SDPA, SwiGLU. Left out: biases, embedding and head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.devtools.bench.sync_model import Shape
from harness.numerics.formats import format_named
from harness.numerics.fp8_flow import FP8Linear

EPS = 1e-6
"""Of the norms."""
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
        "bf16": lambda n, k: plain(n, k, nn.Linear, torch.bfloat16),
        "bf16, fp32 masters": lambda n, k: plain(n, k, MasterLinear, torch.float32),
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
    """One decoder layer."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, make: Make, *, is_merged: bool, length: int, device: str) -> None:
        """`is_merged`: one product for q, k and v and one for gate and up; `length`: tokens of a sequence."""
        super().__init__()
        heads, pair = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.shape, self.length = shape, length
        self.qkv_sizes, self.up_sizes = [heads, pair, pair], [shape.intermediate] * 2
        self.qkv = self._projections(self.qkv_sizes, shape.hidden, make, is_merged)
        self.up = self._projections(self.up_sizes, shape.hidden, make, is_merged)
        self.o, self.down = make(shape.hidden, heads), make(shape.hidden, shape.intermediate)
        options = {"dtype": torch.bfloat16, "device": device}
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(shape.hidden, **options)) for _ in range(2))
        angle = torch.outer(torch.arange(length), 1e6 ** -torch.arange(0, 1, 2 / shape.head_dim))[:, None]
        self.register_buffer("cos", angle.cos().to(**options))
        self.register_buffer("sin", angle.sin().to(**options))

    @staticmethod
    def _projections(sizes: list[int], k: int, make: Make, is_merged: bool) -> nn.ModuleList:
        return nn.ModuleList([make(sum(sizes), k)] if is_merged else [make(n, k) for n in sizes])

    @staticmethod
    def _project(layers: nn.ModuleList, x: Tensor, sizes: list[int]) -> list[Tensor]:
        found: list[Tensor] = []
        for layer in layers:
            found.append(layer(x).to(x.dtype))
        return list(found[0].split(sizes, -1)) if len(found) == 1 else found

    def attention(self, projected: list[Tensor]) -> Tensor:
        """q, k and v [T, heads * d] -> [T, heads * d], causal within each sequence."""
        q, k, v = (
            part.view(-1, self.length, part.shape[-1] // self.shape.head_dim, self.shape.head_dim) for part in projected
        )
        q, k = (rotated(part, self.cos, self.sin) for part in (q, k))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(len(projected[0]), -1)

    def forward(self, x: Tensor) -> Tensor:
        """bf16 [T, H] -> bf16 [T, H]."""
        projected = self._project(self.qkv, rms_norm(x, self.gains[0]), self.qkv_sizes)
        x = x + self.o(self.attention(projected)).to(x.dtype)
        gate, up = self._project(self.up, rms_norm(x, self.gains[1]), self.up_sizes)
        return x + self.down(swiglu(gate, up)).to(x.dtype)
