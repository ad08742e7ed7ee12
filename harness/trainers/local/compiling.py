"""Compiled decoder layers: `torch.compile` layer by layer, so that all layers of a shape share one compilation.

What may be compiled is what was tried and gave the numbers of the eager layers: float32 linears, trained adapters
beside them, 16-bit products on 16-bit operands, and FP8 products. Those of kernels are operators, which the compiler
passes on unchanged and whose neighbours it fuses; emulated ones it does not see, and breaks its graph there. Codes and
products are made as in an eager layer, bit for bit. Other emulated formats are refused: a compiler takes a cast to 16
bits and back for nothing and drops the rounding, and it cannot trace the quantizers. Attention of packed sequences is
not seen either: every set of lengths would be another graph. The head's chunks are compiled by
`harness.numerics.head_logp`. Left out: the embedding, a head whose logits stand as a whole.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from harness.fitting.fake_quant import FakeQuantLinear
from harness.models.decoder import CoreAttention, Mixture, Spans
from harness.numerics.compiler_options import compiler_options
from harness.numerics.fp8_flow import FP8Linear
from harness.numerics.linear import CastLinear

GRAPHS = 64
"""Compiled variants of a layer that are kept: with and without gradients, all or some positions, one row or several.
Beyond them torch goes on without compiling, and says so."""


def compile_layers(layers: nn.ModuleList | nn.Sequential, *, is_dynamic: bool = True) -> None:
    """Compile every one of `layers`, in place, at its first call. Parameters and names stay.

    `is_dynamic`: one compilation for all sizes of a batch. Raises ValueError, one line, for layers that would compute
    something else, and where there is no compiler.
    """
    for name, module in layers.named_modules():
        if why := obstacle(module):
            raise ValueError(f"launch.compile=true: {name} {why}")
    device = next(layers.parameters()).device
    check_compiler(device)
    torch._dynamo.config.recompile_limit = GRAPHS
    for module in layers.modules():
        if isinstance(module, FP8Linear):
            module.run = _unseen()
        elif isinstance(module, CoreAttention):
            module.packed = _unseen_attention()
    for layer in layers:
        layer.compile(dynamic=is_dynamic, options=compiler_options(device, is_dynamic=is_dynamic))


@cache
def _unseen() -> Callable[[FP8Linear, Tensor], Tensor]:
    """FP8 products as a function that the compiler does not look into; one for all layers, so that they share
    compilations."""
    from torch._dynamo import mark_static

    def compute(layer: FP8Linear, input: Tensor) -> Tensor:
        y = layer.emulate(input)
        mark_static(y, y.dim() - 1)  # behind a break all sizes count as changing; channels do not
        return y

    unseen: Any = torch.compiler.disable(compute, reason="FP8 codes and products are made as they stand")
    return unseen


@cache
def _unseen_attention() -> Callable[[Spans, Tensor, Tensor, Tensor], Tensor]:
    """Attention of a packed row as a function that the compiler does not look into; one for all layers."""
    from torch._dynamo import mark_static

    def attend(spans: Spans, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = spans.attend(q, k, v)
        for dim in (0, 1, 3):  # the number of tokens alone changes
            mark_static(out, dim)
        return out

    unseen: Any = torch.compiler.disable(attend, reason="the lengths of packed sequences change in every pass")
    return unseen


def obstacle(module: nn.Module) -> str | None:
    """Reason why a module cannot be compiled; None where it can."""
    if isinstance(module, FakeQuantLinear):
        return "is fake-quantized, which cannot be compiled; valid: launch.compile=false"
    if isinstance(module, Mixture):
        return "is a mixture of experts, whose sizes change in every pass; valid: launch.compile=false"
    if isinstance(module, CastLinear) and not module.is_native:
        return f"emulates {module.fmt.name}; add launch.native_16bit=true"
    return None


def check_compiler(device: torch.device) -> None:
    """Raises ValueError, one line, where torch finds nobody to compile for `device`."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise ValueError("launch.compile=true: Triton is not installed; valid: launch.compile=false")
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ValueError("launch.compile=true: no C++ compiler is installed; valid: launch.compile=false") from None


def eagerly(is_compiled: bool) -> AbstractContextManager[object]:
    """Context in which layers run uncompiled: hooks on compiled layers are not called."""
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
