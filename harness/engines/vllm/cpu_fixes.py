"""Three seams of vLLM's CPU build, and what stands in for them.

* Attention uses AMX tiles where the processor has them, but nobody asks the kernel for them, which Linux wants once a
  process: an illegal instruction, unless oneDNN happened to ask before. Here they are asked for.
* Unquantized layers are bound to a packed copy of their weight when they are loaded: a tied head then keeps the old
  copy. Here they read the live parameter.
* The INT8 kernel's handler keeps a raw pointer to the scales of a temporary tensor. Here the handler owns a copy.
"""

from __future__ import annotations

from typing import Any

import torch


def allow_tiles() -> None:
    """Ask the kernel for AMX tiles. Raises RuntimeError where the processor has them and the kernel refuses."""
    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():  # pyright: ignore[reportPrivateUsage]
        raise RuntimeError("the kernel does not permit AMX tiles to this process, and vLLM would die of using them")


def apply() -> None:
    """Mend all three in this process; harmless when called again."""
    allow_tiles()
    from vllm import _custom_ops  # pyright: ignore[reportAttributeAccessIssue]
    from vllm.model_executor.layers import utils

    def read_the_parameter(layer: torch.nn.Module, remove_weight: bool) -> None:
        object.__setattr__(layer, "cpu_linear", torch.nn.functional.linear)

    utils.dispatch_cpu_unquantized_gemm = read_the_parameter
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
