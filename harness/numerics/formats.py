"""Number formats as data: what an element is, which elements share a scale, how the scale is made.

A format says nothing about where it is used; `harness.api.Plan` does. Rules and names: `quantize.py`.
Left out: packing layouts (`packing.py`) and kernels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Element = Literal["fp32", "bf16", "fp16", "e4m3", "e5m2", "e2m1", "int8", "int4", "int3", "int2", "nf4"]
ScaleDtype = Literal["fp32", "e4m3", "e8m0"]


@dataclass(frozen=True, kw_only=True)
class Format:
    """One number format. Value = code * scale (a "dequant multiplier"), unless it is a plain cast."""

    name: str
    element: Element
    tile: tuple[int, int] | None = None
    """Rows x columns that share one scale; 0 means the whole axis; None means a plain cast without scale."""
    scale_dtype: ScaleDtype = "fp32"
    rule: str = ""
    """How amax becomes a scale, where libraries differ: see `quantize.py`."""
    symmetric: bool = True
    double_quant: bool = False
    """Scales are themselves quantized (NF4)."""


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Low-rank adapters on linear layers: y = x W^T + (alpha / rank) * (x A^T) B^T."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    site: Literal["train", "rollout", "both"] = "both"
    is_trained: bool = True
