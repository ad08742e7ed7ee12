"""Linear layers that compute as a low-precision engine or trainer would, in float32 arithmetic.

`EmulatedLinear` is the sampler's: codes times scales are multiplied out and the product is taken in float32, which is
what int8 x int8 (exact integer sums) and FP8 (float32 accumulation) kernels approximate up to summation order. Where a
kernel applies the scales after the sum, the result differs in the last float32 bits only.
`CastLinear` is the trainer's: 16-bit operands, results and gradients around a float32 master weight.
Left out: the FP8 training flow (`fp8_flow.py`), and any real low-precision kernel.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.numerics.formats import Format
from harness.numerics.quantize import fake_quantize
from harness.numerics.rounding import CASTS


def cast_dtype(fmt: Format | None) -> torch.dtype | None:
    """The torch dtype of a plain cast that rounds; None for fp32 and for no format. Raises ValueError for any other."""
    if fmt is None or fmt.element == "fp32":
        return None
    if fmt.tile is not None:
        raise ValueError(f"format {fmt.name} is not a plain cast; choose fp32, bf16 or fp16")
    return CASTS[fmt.element]


class EmulatedLinear(nn.Module):
    """y = base(acts(base(x)) W^T + b): `weight` float32 [N, K] is dequantized already, `bias` float32 [N] or None.

    `base` (bf16, fp16; None or fp32: no rounding) rounds what enters and leaves; `acts` fake-quantizes what enters the
    product, a plain cast being one more rounding. Round `weight` and `bias` to `base` yourself where the engine holds
    them so. Neither carries a gradient. Raises ValueError where `base` is not a plain cast.
    """

    weight: Tensor
    bias: Tensor | None
    adapter_a: Tensor | None
    """float32 [R, K], reads the input before `acts`; with `adapter_b` [N, R], whose product is added to the output."""
    adapter_b: Tensor | None
    residual: Tensor | None
    """int64 [S]: input channels whose rounding error is quantized in turn and added (QUADS, 2607.15810)."""
    residual_alpha: float
    """Factor of that second pass."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, acts: Format | None, base: Format | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().to(torch.float32).clone())
        self.register_buffer("bias", None if bias is None else bias.detach().to(torch.float32).clone())
        self.adapter_a = self.adapter_b = self.residual = None
        self.residual_alpha = 1.0
        self.acts = acts
        self.base = base
        self._base_dtype = cast_dtype(base)

    def entering(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[..., K] of any float dtype -> the input in base, and as it enters the product: float32 [..., K] both."""
        dtype = self._base_dtype
        x = x.to(torch.float32) if dtype is None else x.to(dtype).to(torch.float32)
        if self.acts is None:
            return x, x
        entering = fake_quantize(x, self.acts)
        if self.residual is not None:  # W Q(x) + alpha W_S Q(e_S) as one product: equal up to the order of summation
            error = (x - entering)[..., self.residual]
            entering = entering.index_add(-1, self.residual, fake_quantize(error, self.acts), alpha=self.residual_alpha)
        return x, entering

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] of any float dtype -> float32 [..., N]."""
        dtype = self._base_dtype
        x, entering = self.entering(x)
        y = F.linear(entering, self.weight, self.bias)
        if self.adapter_a is not None:
            assert self.adapter_b is not None
            y = y + F.linear(F.linear(x, self.adapter_a), self.adapter_b)
        return y if dtype is None else y.to(dtype).to(torch.float32)

    def extra_repr(self) -> str:
        """Shape and formats, for printing."""
        n, k = self.weight.shape
        acts = self.acts.name if self.acts else None
        return f"{k} -> {n}, acts={acts}, base={self.base.name if self.base else None}"


class _Round(torch.autograd.Function):
    """Round to a 16-bit dtype and back, the gradient likewise. Overflow becomes inf on both ways, so that a loss
    scaler sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return x.to(dtype).to(torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype).to(torch.float32), None


@torch.library.custom_op("lowbit::rounded", mutates_args=())
def _opaque(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`_round` for a compiler, which may not look into it: a cast to 16 bits and back seems superfluous to it."""
    return x.to(dtype).to(torch.float32)


def _opaque_shape(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x)


def _opaque_setup(ctx: Any, inputs: tuple[Tensor, torch.dtype], output: Tensor) -> None:
    ctx.dtype = inputs[1]


def _opaque_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return cast(Tensor, _opaque(grad.contiguous(), ctx.dtype)), None


_opaque.register_fake(_opaque_shape)  # pyright: ignore[reportUnknownMemberType]
_opaque.register_autograd(_opaque_backward, setup_context=_opaque_setup)  # pyright: ignore[reportUnknownMemberType]


def round_both_ways(x: Tensor, fmt: Format) -> Tensor:
    """Float32 `x` rounded to a plain cast, with the gradient rounded to it as well; overflow to inf is kept."""
    dtype = cast_dtype(fmt)
    if dtype is None:
        return x
    return cast(Tensor, _opaque(x, dtype)) if torch.compiler.is_compiling() else _round(x, dtype)


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    return cast(Tensor, _Round.apply(x, dtype))  # pyright: ignore[reportUnknownMemberType]


class CastLinear(nn.Linear):
    """An nn.Linear whose weight, input, output and their gradients are rounded to a plain cast (2510.26788, section 3:
    16-bit compute, float32 master weight). The parameters and their names stay those of the layer it stands for.
    """

    is_native = False
    """Multiply 16-bit tensors, on tensor cores where there are some, in place of float32 ones that a 16-bit tensor
    could hold. Everything is rounded in the same places; sums are taken as the kernel does, in its order and, where
    torch allows reduced-precision reductions, in its precision."""

    def __init__(self, linear: nn.Linear, fmt: Format) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.fmt = fmt
        self._dtype = cast_dtype(fmt)
        self.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """float32 [..., K] -> float32 [..., N] that a 16-bit tensor could hold."""
        x, weight, bias, dtype = self.operands(input)
        y = F.linear(x, weight, bias)
        return y.to(torch.float32) if dtype is None else _round(y, dtype)

    def operands(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor | None, torch.dtype | None]:
        """Operands of the product, rounded both ways: input [..., K], weight [N, K], bias [N] or None; and the dtype
        that the product and its gradient are still to be rounded to, None where it has that dtype by itself."""
        dtype, bias = self._dtype, cast(Tensor | None, self.bias)
        if dtype is None:
            return input, self.weight, bias, None
        if self.is_native:
            return input.to(dtype), self.weight.to(dtype), None if bias is None else bias.to(dtype), None
        return _round(input, dtype), _round(self.weight, dtype), None if bias is None else _round(bias, dtype), dtype


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: Format) -> Tensor:
        return fake_quantize(x, fmt).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def ste(x: Tensor, fmt: Format) -> Tensor:
    """Straight-through fake quantization: the value of `fake_quantize(x, fmt)` in the dtype of `x`, gradient 1.

    x + (fake_quantize(x) - x).detach() without its second rounding (Bengio et al., 1308.3432).
    """
    return cast(Tensor, _StraightThrough.apply(x, fmt))  # pyright: ignore[reportUnknownMemberType]
