"""Corrections of vLLM's CPU build in four places.

* Attention uses AMX tiles where the processor has them, but nobody asks the kernel for them, which Linux wants once a
  process: an illegal instruction, unless oneDNN happened to ask before. Here they are asked for.
* Unquantized layers are bound to a packed copy of their weight when they are loaded: a tied head then keeps the old
  copy. Here they read the live parameter.
* The INT8 kernel's handler keeps a raw pointer to the scales of a temporary tensor. Here the handler owns a copy.
* The channel-wise FP8 kernel calls `torch._scaled_mm`, which has oneDNN multiply where there are AMX tiles: by its
  reference loop, several hundred times as slow as a float32 product of the codes, which torch itself takes elsewhere.
  Here they are multiplied so everywhere.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch


def allow_tiles() -> None:
    """Ask the kernel for AMX tiles. Raises RuntimeError where the processor has them and the kernel refuses."""
    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():  # pyright: ignore[reportPrivateUsage]
        raise RuntimeError("the kernel does not permit AMX tiles to this process, and vLLM would die of using them")


def multiply_codes(
    _: Any, *, A: torch.Tensor, B: torch.Tensor, out_dtype: torch.dtype, As: torch.Tensor, Bs: torch.Tensor,
    bias: torch.Tensor | None, output_shape: list[int],
) -> torch.Tensor:  # fmt: skip
    """Codes A [T', K] and B [K, N], float32 scales As [T', 1] and Bs [N, 1] -> `out_dtype`, of `output_shape`: the
    float32 product of the codes, scaled, the bias added, rounded once. Rows that fill A up are dropped."""
    rows = prod(output_shape[:-1])
    product = (A[:rows].float() @ B.float()) * As[:rows] * Bs.t()
    return (product if bias is None else product + bias).to(out_dtype).view(*output_shape)


def apply() -> None:
    """Apply all four corrections in this process; harmless when called again."""
    allow_tiles()
    from vllm import _custom_ops  # pyright: ignore[reportAttributeAccessIssue]
    from vllm.model_executor.kernels.linear.scaled_mm import pytorch as fp8_kernels
    from vllm.model_executor.layers import utils

    def read_the_parameter(layer: torch.nn.Module, remove_weight: bool) -> None:
        object.__setattr__(layer, "cpu_linear", torch.nn.functional.linear)

    utils.dispatch_cpu_unquantized_gemm = read_the_parameter
    kernel: Any = fp8_kernels.ChannelWiseTorchFP8ScaledMMLinearKernel
    kernel.apply_scaled_mm = multiply_codes
    original = _custom_ops.create_onednn_scaled_mm
    if getattr(original, "owns_scales", False):
        return

    def create(weight: torch.Tensor, weight_scales: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        owned = weight_scales.detach().clone()
        handler = original(weight, owned, *args, **kwargs)
        handler.owned_scales = owned  # pyright: ignore[reportAttributeAccessIssue]
        return handler

    create.owns_scales = True  # pyright: ignore[reportFunctionMemberAccess]
    _custom_ops.create_onednn_scaled_mm = create
