"""Number formats as data: what an element is, which elements share a scale, how the scale is made.

A format says nothing about where it is used; `harness.api.Plan` does. What a `rule` computes: `scales.py`.
Left out: packing layouts (`packing.py`) and kernels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from harness.foundation.did_you_mean import nearest

Element = Literal["fp32", "bf16", "fp16", "e4m3", "e5m2", "e2m1", "int8", "int4", "int3", "int2", "nf4"]
ScaleDtype = Literal["fp32", "e4m3", "e8m0", "e8m0_m8"]
"""e8m0_m8: powers of two by tile, over 1 + an 8-bit mantissa by `MACRO` columns."""
MACRO = 128
"""Columns that share a mantissa under scale dtype e8m0_m8 (macro-block scaling, 2605.20402)."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """One number format. Value = code * scale (a "dequant multiplier"), unless it is a plain cast."""

    name: str
    element: Element
    tile: tuple[int, int] | None = None
    """Rows x columns that share one scale; 0 means the whole axis; None means a plain cast without scale."""
    scale_dtype: ScaleDtype = "fp32"
    rule: str = ""
    """Name of the rule that turns amax into a scale, where libraries differ: `scales.RULES`, `scales.MX_RULES`, or an
    NVFP4 convention."""
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
    train_norms: bool = False
    """The two norm gains of every block are trained beside trained adapters."""


def at_rollout(adapters: Adapters | None) -> Adapters | None:
    """The adapters of a plan, where the rollout engine computes with them; None where it has none."""
    return None if adapters is None or adapters.site == "train" else adapters


_INT_GROUPS = re.compile(r"int([2348])_g([1-9]\d*)(_asym)?(_qat)?")
_BITS: dict[str, Element] = {"2": "int2", "3": "int3", "4": "int4", "8": "int8"}
_TENSOR, _ROW, _BLOCK, _RUN = (0, 0), (1, 0), (128, 128), (1, 128)


def _int_groups(name: str) -> Format | None:
    """`int<bits>_g<columns>[_asym][_qat]`: weights in groups along K; None where the name is of another kind."""
    match = _INT_GROUPS.fullmatch(name)
    if match is None:
        return None
    bits, columns, asym, qat = match.groups()
    rule = "qat" if qat else "ct"
    return Format(name=name, element=_BITS[bits], tile=(1, int(columns)), rule=rule, symmetric=asym is None)


def _known() -> dict[str, Format]:
    formats = [
        Format(name="fp32", element="fp32"),
        Format(name="bf16", element="bf16"),
        Format(name="fp16", element="fp16"),
        Format(name="e4m3_tensor", element="e4m3", tile=_TENSOR, rule="tensor"),
        Format(name="e5m2_tensor", element="e5m2", tile=_TENSOR, rule="tensor"),
        Format(name="e4m3_channel", element="e4m3", tile=_ROW, rule="vllm"),
        Format(name="e4m3_channel_ct", element="e4m3", tile=_ROW, rule="ct"),
        Format(name="e4m3_token", element="e4m3", tile=_ROW, rule="vllm"),
        Format(name="e4m3_block", element="e4m3", tile=_BLOCK, rule="ct"),
        Format(name="e4m3_block_verl", element="e4m3", tile=_BLOCK, rule="verl"),
        Format(name="e4m3_block_verl_torch", element="e4m3", tile=_BLOCK, rule="inverse"),
        Format(name="e4m3_block_ue8m0", element="e4m3", tile=_BLOCK, rule="ue8m0"),
        Format(name="e4m3_1x128", element="e4m3", tile=_RUN, rule="vllm_group"),
        Format(name="e4m3_1x128_ue8m0", element="e4m3", tile=_RUN, rule="ue8m0"),
        Format(name="int8_channel", element="int8", tile=_ROW, rule="int_kernel"),
        Format(name="int8_channel_ct", element="int8", tile=_ROW, rule="ct"),
        Format(name="int8_token", element="int8", tile=_ROW, rule="int_kernel"),
        Format(name="nvfp4", element="e2m1", tile=(1, 16), scale_dtype="e4m3", rule="ct"),
        Format(name="nvfp4_act", element="e2m1", tile=(1, 16), scale_dtype="e4m3", rule="ct"),
        Format(name="nvfp4_act_token", element="e2m1", tile=(1, 16), scale_dtype="e4m3", rule="ct_token"),
        Format(name="nvfp4_torchao", element="e2m1", tile=(1, 16), scale_dtype="e4m3", rule="torchao"),
        Format(name="nf4", element="nf4", tile=(1, 64), rule="bitsandbytes"),
        Format(name="nf4_dq", element="nf4", tile=(1, 64), rule="bitsandbytes", double_quant=True),
        Format(name="e4m3_kv", element="e4m3", tile=_TENSOR, rule="kv"),
        Format(name="e5m2_kv", element="e5m2", tile=_TENSOR, rule="kv"),
    ]
    mx: dict[str, Element] = {"mxfp4": "e2m1", "mxfp8": "e4m3"}
    for kind, element in mx.items():
        for rule in ("floor", "even", "ceil", "rceil", "ct"):
            formats.append(Format(name=f"{kind}_{rule}", element=element, tile=(1, 32), scale_dtype="e8m0", rule=rule))
    formats.append(Format(name="mxfp4_mbs", element="e2m1", tile=(1, 32), scale_dtype="e8m0_m8", rule="rceil"))
    for bits in ("8", "4", "3", "2"):
        for columns in (32, 64, 128):
            for suffix in ("", "_asym", "_qat", "_asym_qat"):
                fmt = _int_groups(f"int{bits}_g{columns}{suffix}")
                assert fmt is not None
                formats.append(fmt)
    table = {fmt.name: fmt for fmt in formats}
    assert len(table) == len(formats), "two formats of one name"
    # The rule that the engine itself applies or loads: compressed-tensors checkpoints, vLLM's online MXFP8.
    return table | {"mxfp4": table["mxfp4_ct"], "mxfp8": table["mxfp8_rceil"]}


FORMATS: dict[str, Format] = _known()
"""Every format by name. `mxfp4` and `mxfp8` are second names of `mxfp4_ct` and `mxfp8_rceil`."""


def format_named(name: str, field: str = "format") -> Format:
    """The format called `name`; `int<2|3|4|8>_g<columns>[_asym][_qat]` takes any group size.

    Raises ValueError with the field that names it and the nearest names where there is none.
    """
    fmt = FORMATS.get(name) or _int_groups(name)
    if fmt is None:
        raise ValueError(f"{field}={name}: unknown; {nearest(name, FORMATS)}")
    return fmt


def format_or_none(name: str | None, field: str = "format") -> Format | None:
    """The format called `name`, None for None. Raises ValueError as `format_named`."""
    return None if name is None else format_named(name, field)
