"""Frozen parameters of a sharded model at rest: in bfloat16, where that loses nothing.

A policy with trained adapters (LoRA) never changes its base, and a frozen reference changes nothing at all. Weights
that come from a bfloat16 checkpoint are bfloat16 values, so half of the bytes hold them exactly. FSDP casts a parameter
to float32 as it gathers it (`settings.PRECISION`), so that modules see the same numbers as ever.

Left out: values on a grid with float32 scales (a base in NF4, NVFP4 or INT4), which bfloat16 hardly ever holds; they
rest in float32. Those of MXFP4, whose scales are powers of two, fit.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

LOW_HALF = 0xFFFF
"""Bits of a float32 that bfloat16 does not have."""


def is_bf16(values: Tensor) -> bool:
    """Does bfloat16 hold every value of a float32 tensor exactly? On the meta device, whose values are nobody's, it
    does."""
    return values.is_meta or not bool((values.contiguous().view(torch.int32) & LOW_HALF).any())


def frozen_in_bf16(model: nn.Module) -> None:
    """Let every frozen float32 parameter that bfloat16 holds exactly rest in it, in place; rank 0, which has the
    values, decides for all ranks."""
    frozen = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.dtype == torch.float32 and not parameter.requires_grad
    }
    exact = [[name for name, parameter in frozen.items() if is_bf16(parameter.detach())]]
    torch.distributed.broadcast_object_list(exact, src=0)
    for name in exact[0]:
        frozen[name].data = frozen[name].data.to(torch.bfloat16)
