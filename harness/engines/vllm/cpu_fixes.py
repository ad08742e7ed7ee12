"""Two seams of vLLM's CPU build that do not survive a reload of weights, and what stands in for them.

* Unquantized layers are bound to a packed copy of their weight when they are loaded: a tied head then keeps the old
  copy. Here they read the live parameter.
* The INT8 kernel's handler keeps a raw pointer to the scales of a temporary tensor. Here the handler owns a copy.
"""

from __future__ import annotations

from typing import Any

import torch


def apply() -> None:
    """Replace both seams in this process; harmless when called again."""
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
