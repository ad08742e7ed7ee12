"""Triton kernels that quantize one weight on the GPU straight into an engine's buffers: each byte is moved once.

`quantize_into` writes, bit for bit, what `harness.numerics.quantize.quantize` and `packing.pack` make of the same
tensor; the reference is the definition, the kernels are its fast twin. Rules of scales come from `scales.RULES`.
Under Triton's interpreter (TRITON_INTERPRET=1, set before the import) the same code runs on a CPU.
Left out: asymmetric codes, microscaling, NF4, and layouts of kernels such as Marlin's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from harness.kernels import quantize_bodies
from harness.numerics import scales
from harness.numerics.formats import FORMATS, Format
from harness.numerics.rounding import CASTS
from harness.numerics.scales import FLOAT32_TINY, RULES, SMALLEST, largest_code
from harness.numerics.tiles import stored_shape

SINGLE_READ = 8192
"""Columns of a row that a program keeps in registers; a longer row is read a second time, through the L2 cache."""
BLOCK_WARPS = 16
"""Warps that share a 128 x 128 tile: 32 values a thread."""
_CHUNK = 4096
_TILE = 4096
"""Elements of a program of the group kernels."""
_BASES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_KINDS = {("e4m3", (128, 128)): "block", ("e4m3", (1, 0)): "row", ("int8", (1, 0)): "row", ("e4m3", (0, 0)): "tensor"}
# A product and a sum must not become one rounding: the reference rounds twice.
_EXACT: dict[str, Any] = {"enable_fp_fusion": False}
_BODIES: Any = quantize_bodies


def kind(fmt: Format) -> str | None:
    """Kind of kernel that takes `fmt`: "block", "row", "tensor", "group" or "nvfp4"; None where none does."""
    if fmt.tile is None or not fmt.symmetric:
        return None
    if fmt.element == "e2m1":
        return "nvfp4" if (fmt.scale_dtype, fmt.rule) == ("e4m3", "ct") else None
    rule = RULES.get(fmt.rule)
    if fmt.scale_dtype != "fp32" or rule is None or rule.margin != 1.0 or rule.is_power_of_two or fmt.rule == "qat":
        return None
    if fmt.element == "int4" and fmt.tile[0] == 1:
        columns = fmt.tile[1]
        return "group" if columns >= 8 and columns & (columns - 1) == 0 and columns <= _TILE else None
    return _KINDS.get((fmt.element, fmt.tile))


def quantize_into(
    w: Tensor,
    fmt: Format,
    out: Tensor,
    out_scale: Tensor,
    *,
    base: torch.dtype,
    level: Tensor | None = None,
    is_scale_given: bool = False,
) -> None:
    """`w` [N, K] bf16, fp16 or fp32, rounded to `base` first -> codes in `out`, scales in `out_scale`.

    Both outputs may have any strides. `out`: float8_e4m3fn or int8 [N, K]; int32 [N, ceil(K/8)] for INT4 groups; uint8
    [N, K/2] for NVFP4. `out_scale`: shaped as in `tiles.py`; float32, or a narrower float, rounded as a copy rounds it;
    float8_e4m3fn for NVFP4.
    `level`: float32 [] on the device, of the merged group (`tensor_level`): the quant multiplier of NVFP4 and the scale
    of one-scale FP8, which is then written to `out_scale` [] too.
    `is_scale_given`: `out_scale` holds the scales already; only codes are written.
    Raises ValueError where no kernel takes the format, or a shape or dtype does not fit.
    """
    found = kind(fmt)
    if found is None:
        valid = ", ".join(name for name, known in FORMATS.items() if kind(known) is not None)
        raise ValueError(f"format {fmt.name} has no kernel; valid: {valid}")
    _check(w, fmt, found, out, out_scale, base)
    if found == "nvfp4" and (level is None or is_scale_given):
        raise ValueError(f"format {fmt.name} needs a level, and makes its block scales itself")
    if found == "tensor" and level is None and not is_scale_given:
        raise ValueError(f"format {fmt.name} needs a level (`tensor_level`) or a given scale")
    how: dict[str, Any] = {"BASE": _BASES[base], "IS_GIVEN": is_scale_given}
    if found == "tensor":
        if level is not None:
            out_scale.copy_(level.reshape(out_scale.shape))
        out_scale, how["IS_GIVEN"] = out_scale.reshape(1, 1).expand(len(w), 1), True
    launch = {"block": _launch_block, "group": _launch_group, "nvfp4": _launch_nvfp4}.get(found, _launch_rows)
    with torch.cuda.device_of(w):
        launch(w, out, out_scale, fmt, level, how)


def update_amax(w: Tensor, amax: Tensor, *, base: torch.dtype) -> None:
    """`amax` float32 [] on the device becomes max(amax, largest magnitude of `w` [N, K] rounded to `base`).

    Start it at 0 and call it for every tensor of a merged group. NaN wins.
    """
    rows, columns = w.shape
    block = min(_CHUNK, _power_of_two(columns))
    with torch.cuda.device_of(w):
        _BODIES.amax_kernel[(rows, _cdiv(columns, block))](
            w, amax.view(torch.int32), columns, *w.stride(), BASE=_BASES[base], BLOCK=block, num_warps=4
        )


def tensor_level(amax: Tensor, fmt: Format) -> Tensor:
    """float32 `amax` of any shape, one per merged group -> what `quantize_into` takes as `level`, of that shape."""
    return scales.tensor_level(amax, fmt) if fmt.element == "e2m1" else scales.scale_of(amax, fmt)


def _check(w: Tensor, fmt: Format, found: str, out: Tensor, out_scale: Tensor, base: torch.dtype) -> None:
    if base not in _BASES or w.dtype not in _BASES:
        raise ValueError(f"base {base} of {w.dtype}; valid: {', '.join(map(str, CASTS.values()))}")
    if w.ndim != 2:
        raise ValueError(f"w has shape {tuple(w.shape)}; a weight has two dimensions")
    rows, columns = w.shape
    if found == "nvfp4" and columns % 2:
        raise ValueError(f"w has {columns} columns; {fmt.name} packs two per byte")
    codes, wanted = {
        "group": ((rows, -(-columns // 8)), torch.int32),
        "nvfp4": ((rows, columns // 2), torch.uint8),
    }.get(found, ((rows, columns), torch.float8_e4m3fn if fmt.element == "e4m3" else torch.int8))
    assert fmt.tile is not None
    scale = stored_shape(fmt.tile, (rows, columns))
    if out.shape != codes or out.dtype != wanted:
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}; {fmt.name} of {tuple(w.shape)} is {wanted} {codes}")
    if found == "tensor" and out_scale.dtype != torch.float32:
        raise ValueError(f"out_scale is {out_scale.dtype}; {fmt.name} reads its one scale back, in torch.float32")
    if out_scale.shape != scale and not (found == "tensor" and out_scale.numel() == 1):
        raise ValueError(f"out_scale has shape {tuple(out_scale.shape)}; {fmt.name} of {tuple(w.shape)} has {scale}")


# Triton has both, wrapped for use in kernels: a fifth of the time of a launch.
def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


@lru_cache(maxsize=16)
def has_fp8_cast(device: torch.device) -> bool:
    """Can `device` round to e4m3 in one instruction? Elsewhere (and in the interpreter) integers do it."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def rule_constants(fmt: Format) -> dict[str, Any]:
    """The rule of `fmt` as compile-time constants of `_scale_and_factor`."""
    rule = RULES[fmt.rule]
    zero = 0.0 if rule.zero_scale is None else rule.zero_scale
    return {"TOP": largest_code(fmt), "AMAX_FLOOR": rule.amax_floor, "SCALE_FLOOR": rule.scale_floor, "ZERO": zero,
            "ZERO_BELOW": FLOAT32_TINY if rule.form == "reciprocal" else SMALLEST,
            "FORM": "kernel" if fmt.rule == "int_kernel" else rule.form}  # fmt: skip


def _launch_block(w: Tensor, out: Tensor, scale: Tensor, fmt: Format, _: Tensor | None, how: dict[str, Any]) -> None:
    rows, columns = w.shape
    _BODIES.block_kernel[(_cdiv(columns, 128), _cdiv(rows, 128))](
        w, out.view(torch.uint8), scale, rows, columns, *w.stride(), *out.stride(), *scale.stride(),
        HAS_CAST=has_fp8_cast(w.device), num_warps=BLOCK_WARPS, **how, **rule_constants(fmt), **_EXACT,
    )  # fmt: skip


def _launch_rows(w: Tensor, out: Tensor, scale: Tensor, fmt: Format, _: Tensor | None, how: dict[str, Any]) -> None:
    rows, columns = w.shape
    is_single = columns <= SINGLE_READ
    is_int = fmt.element == "int8"
    _BODIES.row_kernel[(rows,)](
        w, out if is_int else out.view(torch.uint8), scale, columns, *w.stride(), *out.stride(), scale.stride(0),
        IS_INT=is_int, HAS_CAST=has_fp8_cast(w.device), IS_SINGLE=is_single,
        BLOCK=_power_of_two(columns) if is_single else _CHUNK, num_warps=8 if columns > _CHUNK else 4,
        **how, **rule_constants(fmt), **_EXACT,
    )  # fmt: skip


def _launch_group(w: Tensor, out: Tensor, scale: Tensor, fmt: Format, _: Tensor | None, how: dict[str, Any]) -> None:
    assert fmt.tile is not None
    (rows, columns), group = w.shape, fmt.tile[1]
    across = max(256, group)
    _BODIES.group_kernel[(_cdiv(columns, across), _cdiv(rows, _TILE // across))](
        w, out, scale, rows, columns, out.shape[1], scale.shape[1], *w.stride(), *out.stride(), *scale.stride(),
        GROUP=group, ROWS=_TILE // across, COLUMNS=across, num_warps=4, **how, **rule_constants(fmt), **_EXACT,
    )  # fmt: skip


def _launch_nvfp4(
    w: Tensor, out: Tensor, scale: Tensor, fmt: Format, level: Tensor | None, how: dict[str, Any]
) -> None:
    rows, columns = w.shape
    _BODIES.nvfp4_kernel[(_cdiv(columns, 256), _cdiv(rows, 16))](
        w, out, scale.view(torch.uint8), level, rows, columns, out.shape[1], scale.shape[1], *w.stride(),
        *out.stride(), *scale.stride(),
        HAS_CAST=has_fp8_cast(w.device), ROWS=16, COLUMNS=256, num_warps=4, BASE=how["BASE"], **_EXACT,
    )  # fmt: skip
