"""Compiled decoder layers: `torch.compile` layer by layer, so that all layers of a shape share one compilation.

What may be compiled is what was tried and gave the numbers of the eager layers: float32 linears, trained adapters
beside them, and 16-bit products on 16-bit operands. Emulated formats are refused: a compiler takes a cast to 16 bits
and back for nothing and drops the rounding, and it cannot trace the quantizers.
Left out: embedding and head, packed batches (every set of lengths would be another graph).
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from harness.models.decoder import Decoder
from harness.numerics.fake_quant import FakeQuantLinear
from harness.numerics.fp8_flow import FP8Linear
from harness.numerics.linear import CastLinear

GRAPHS = 64
"""Variants of a layer that are kept: with and without gradients, all or some positions, one row or several. Beyond
them torch goes on without compiling, and says so."""


def compile_layers(model: Decoder, *, packing: bool) -> None:
    """Compile every layer of `model`, in place, at its first call. Parameters and names stay.

    Raises ValueError, one line, for packed batches, for layers that would compute something else, and where there is no
    compiler.
    """
    if packing:
        raise ValueError("launch.compile=true: packed batches are laid out anew each time; valid: launch.packing=false")
    for name, module in model.model.layers.named_modules():
        if why := obstacle(module):
            raise ValueError(f"launch.compile=true: {name} {why}")
    check_compiler(next(model.parameters()).device)
    torch._dynamo.config.recompile_limit = GRAPHS
    for layer in model.model.layers:
        layer.compile(dynamic=True)


def obstacle(module: nn.Module) -> str | None:
    """Why a module cannot be compiled; None where it can."""
    if isinstance(module, FP8Linear):
        return "computes in FP8, which cannot be compiled; valid: launch.compile=false"
    if isinstance(module, FakeQuantLinear):
        return "is fake-quantized, which cannot be compiled; valid: launch.compile=false"
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
    """Inside, layers run uncompiled: hooks that are put on compiled ones are not called."""
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
