"""Frozen parameters at rest: in bfloat16, where that loses nothing.

A policy with trained adapters (LoRA) never changes its base, and a frozen reference changes nothing at all. Weights
that come from a bfloat16 checkpoint are bfloat16 values, so half of the bytes hold them exactly.

    sharded     FSDP casts a parameter to float32 as it gathers it (`settings.PRECISION` of the trainer verl), so that
                modules see the same numbers as ever: every frozen parameter may rest
    one process layers that round their weight at every pass (`linear.CastLinear`) compute the same from either: the
                linear layers of the blocks rest, embedding, head and norms do not

Left out: values on a grid with float32 scales (a base in NF4, NVFP4 or INT4), which bfloat16 hardly ever holds; they
rest in float32. Those of MXFP4, whose scales are powers of two, fit.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from harness.models.decoder import Decoder
from harness.numerics.linear import CastLinear

LOW_HALF = 0xFFFF
"""Bits of a float32 that bfloat16 does not have."""


def is_bf16(values: Tensor) -> bool:
    """Does bfloat16 hold every value of a float32 tensor exactly? True on the meta device, where there are none."""
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


def linears_in_bf16(model: Decoder) -> int:
    """Let the frozen float32 weights of the rounding linear layers of blocks rest in bfloat16 where it holds them
    exactly, in place; the number of layers. Anybody else who reads one has to cast it."""
    found = 0
    for module in model.model.layers.modules():
        if type(module) is not CastLinear or module.weight.requires_grad or module.weight.dtype != torch.float32:
            continue
        if is_bf16(module.weight.detach()):
            module.weight.data = module.weight.data.to(torch.bfloat16)
            found += 1
    return found
