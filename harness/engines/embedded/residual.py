"""The second pass over the inputs of low-bit linears: the error of rounding, on the channels where it is largest.

    y = W_hat Q(x) + alpha W_hat[:, S] Q(e_S),   e = x - Q(x),   S: channels of the largest mean |e| over some prompts

QUADS (2607.15810): alpha 1. Outlier fallback (2605.20402): alpha 0.5, all channels. The errors of S are gathered, in
channel order, before they are quantized in the inputs' own format.
`EmulatedLinear` takes both products at once. Channels are found anew from the first pass alone, so that they depend on
weights and prompts and on nothing before. Left out: the kernel; emulated, the second pass costs time and saves none.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from harness.api import TensorRecord
from harness.numerics.linear import EmulatedLinear


class ResidualChannels:
    """Owns the channels of one engine's linears."""

    def __init__(self, ratio: float, alpha: float, linears: Mapping[str, EmulatedLinear]) -> None:
        """`linears` by name; those with plain inputs are left alone. All channels need no choice. Raises ValueError for
        a ratio outside (0, 1], an alpha of 0 or less, and where no input is quantized."""
        if not 0.0 < ratio <= 1.0:
            raise ValueError(f"residual: {ratio} is no share of channels; choose more than 0 and at most 1")
        if not alpha > 0.0:
            raise ValueError(f"residual_alpha: {alpha} is no factor of a second pass; choose more than 0")
        self.ratio = ratio
        self.linears = {name: x for name, x in linears.items() if x.acts is not None and x.acts.tile is not None}
        if not self.linears:
            raise ValueError("residual: no input of a linear layer is quantized; choose a precision such as nvfp4_w4a4")
        for linear in self.linears.values():
            linear.residual_alpha = alpha
            if ratio == 1.0:
                linear.residual = torch.arange(linear.weight.shape[1], device=linear.weight.device)

    @property
    def is_set(self) -> bool:
        """True where every linear has its channels."""
        return all(linear.residual is not None for linear in self.linears.values())

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Context whose forward passes decide the channels, without a second pass. On an error they stay unset."""
        sums: dict[str, Tensor] = {}
        handles: list[Any] = []
        for name, linear in self.linears.items():
            linear.residual = None
            handles.append(linear.register_forward_pre_hook(partial(_observe, sums, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for name, linear in self.linears.items():
            count = max(1, round(self.ratio * linear.weight.shape[1]))
            seen = sums.get(name, linear.weight.new_zeros(linear.weight.shape[1]))  # no prompt may reach an expert
            linear.residual = seen.argsort(descending=True, stable=True)[:count].sort().values

    def alphas(self) -> list[float]:
        """Factors of the second pass, read from the live modules."""
        return sorted({linear.residual_alpha for linear in self.linears.values()})

    def records(self, parts: Mapping[str, tuple[str, ...]]) -> Iterator[TensorRecord]:
        """Passport lines: the channels that each checkpoint module (`parts`, by linear) reads twice."""
        for name, linear in self.linears.items():
            assert linear.residual is not None and linear.acts is not None
            crc = zlib.crc32(linear.residual.cpu().numpy().tobytes())
            for module in parts[name]:
                yield TensorRecord(
                    name=f"{module}.residual_channels", format=linear.acts.name, dtype="int64",
                    scale_shape=tuple(linear.residual.shape), hash=f"{crc:08x}",
                )  # fmt: skip


def _observe(sums: dict[str, Tensor], name: str, linear: nn.Module, args: tuple[Tensor, ...]) -> None:
    """Add up |e| per channel over the input rows of a linear layer."""
    assert isinstance(linear, EmulatedLinear)
    x, quantized = linear.entering(args[0])
    total = (x - quantized).abs().flatten(0, -2).sum(0, dtype=torch.float64)
    sums[name] = sums[name] + total if name in sums else total
