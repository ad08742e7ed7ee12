"""Kernels of the FP8 training flow on a GPU: our quantizers around a library's block-scaled products.

    "deep_gemm"   DeepGEMM as vLLM bundles it: 1x128 by 128x128 into bf16; 1x128 by 1x128 added to a float32 buffer
    "scaled_mm"   torch.nn.functional.scaled_mm, that is cuBLASLt 12.9 or later
    "mixed"       DeepGEMM's for FProp and DGrad, cuBLASLt's for WGrad, which needs no zeroed buffer
    "square"      a variant of the flow by DeepGEMM: X^T of WGrad in square tiles, which it multiplies faster

Weights are quantized from the bf16 that an engine receives, into the codes and scales that its own loader makes
(`quantize.py`). All scales are float32: vLLM's option that rounds them to powers of two is left out, and so is
Blackwell, whose kernels know no other. DeepGEMM compiles a kernel per shape of a layer at its first use, seconds each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.foundation.did_you_mean import nearest
from harness.kernels import fp8_flow_bodies
from harness.kernels.quantize import BLOCK_WARPS, has_fp8_cast, rule_constants
from harness.numerics.formats import Format
from harness.numerics.fp8_gemm import TILE, Kernels, Operand, padded
from harness.numerics.scales import RULES, Rule, largest_code

# A product and a sum must not become one rounding, but where `fma` says so.
# These registers a thread let two tiles share a multiprocessor, so that one loads while the other computes.
_EXACT: dict[str, Any] = {"enable_fp_fusion": False}
_SQUARE: dict[str, Any] = _EXACT | {"num_warps": BLOCK_WARPS, "maxnreg": 64}
LAUNCH = {"num_warps": 8, "maxnreg": 128}
"""Launch of the quantizer of runs: on an H200 faster than 4 or 16 warps, with the same bits."""
_BODIES: Any = fp8_flow_bodies


def quantize_weight(weight: Tensor, fmt: Format) -> tuple[Operand, Operand]:
    """`Kernels.weight`: float [N, K] of sizes that 128 divides -> (W, W^T), their tensors freshly allocated.

    Raises ValueError for other shapes and for a format that is not E4M3 in 128 x 128 tiles with float32 scales.
    """
    rows, columns = weight.shape
    _check(fmt, (TILE, TILE), rows, columns)
    tiles = rows // TILE, columns // TILE
    out, turned = _bytes(weight, rows, columns), _bytes(weight, columns, rows)
    out_scale, turned_scale = (torch.empty(shape, device=weight.device) for shape in (tiles, tiles[::-1]))
    with torch.cuda.device_of(weight):
        _BODIES.square_kernel[tiles[::-1]](
            weight, out, out_scale, turned, turned_scale, rows, columns, *weight.stride(), BASE=_bf16(),
            HAS_CAST=has_fp8_cast(weight.device), **rule_constants(fmt), **_SQUARE,
        )  # fmt: skip
    return _operand(out, out_scale), _operand(turned, turned_scale)


def quantize_runs(
    x: Tensor, fmt: Format, *, has_rows: bool, has_columns: bool, is_twice: bool, is_square: bool = False
) -> tuple[Operand | None, Operand | None]:
    """`Kernels.runs`: one read of `x` [T, C], any float dtype and strides, 128 dividing C -> (X, X^T) as asked for.

    Raises ValueError for other shapes, and for a format that is not E4M3 in 1 x 128 runs with float32 scales and a
    floor.
    """
    tokens, channels = x.shape
    _check(fmt, (1, TILE), TILE, channels)
    whole = padded(tokens)
    grid = channels // TILE, whole // TILE
    # A pointer that no branch uses must still be one.
    rows = _bytes(x, whole, channels) if has_rows else x
    row_scale = torch.empty(grid[0], whole, device=x.device) if has_rows else x
    columns = torch.empty(channels, whole // 4, dtype=torch.int32, device=x.device) if has_columns else x
    column_scale = torch.empty(grid if is_square else (grid[1], channels), device=x.device)
    if tokens and (has_rows or has_columns):
        with torch.cuda.device_of(x):
            _BODIES.runs_kernel[grid](
                x, rows, row_scale, columns, column_scale, tokens, grid[1], channels, *x.stride(), HAS_ROWS=has_rows,
                HAS_COLUMNS=has_columns, IS_TWICE=is_twice and has_columns, IS_SQUARE=is_square, BASE=_bf16(),
                HAS_CAST=has_fp8_cast(x.device), TOP=largest_code(fmt), AMAX_FLOOR=RULES[fmt.rule].amax_floor,
                **_EXACT, **LAUNCH,
            )  # fmt: skip
    return (
        _operand(rows, row_scale.t()) if has_rows else None,
        _operand(columns, column_scale if is_square else column_scale.t()) if has_columns else None,
    )


def _check(fmt: Format, tile: tuple[int, int], rows: int, columns: int) -> None:
    rule = RULES.get(fmt.rule)
    if rule is None:
        is_known = False
    elif tile[0] == 1:  # the kernel of runs knows max(amax, floor) / 448, its floor so high that no scale is subnormal
        is_known = rule == Rule(amax_floor=rule.amax_floor) and rule.amax_floor >= 1e-30
    else:
        is_known = not rule.is_power_of_two and rule.margin == 1.0
    if fmt.tile != tile or fmt.element != "e4m3" or fmt.scale_dtype != "fp32" or not is_known:
        raise ValueError(f"format {fmt.name} has no kernel of the FP8 flow; choose e4m3_block with e4m3_1x128")
    if rows % TILE or columns % TILE:
        raise ValueError(
            f"a side of {rows if rows % TILE else columns}; the FP8 flow's kernels need multiples of {TILE}"
        )


def _bf16() -> Any:
    import triton.language as tl

    return tl.bfloat16


def _bytes(like: Tensor, rows: int, columns: int) -> Tensor:
    return torch.empty((rows, columns), dtype=torch.uint8, device=like.device)


def _operand(codes: Tensor, scale: Tensor) -> Operand:
    return Operand(codes=codes.view(torch.float8_e4m3fn), scale=scale)


def deep_by_tiles(a: Operand, b: Operand) -> Tensor:
    """`Kernels.by_tiles` by DeepGEMM. Raises RuntimeError where vLLM has none."""
    out = torch.empty(len(a.codes), len(b.codes), dtype=torch.bfloat16, device=a.codes.device)
    with torch.cuda.device_of(out):
        _deep_gemm()((a.codes, a.scale), (b.codes, b.scale), out, is_deep_gemm_e8m0_used=False)
    return out


def deep_by_runs(a: Operand, b: Operand) -> Tensor:
    """`Kernels.by_runs` by DeepGEMM, which on Hopper adds to what is there. T is not compiled in: it changes."""
    out = torch.zeros(len(a.codes), len(b.codes), device=a.codes.device)
    with torch.cuda.device_of(out):
        _deep_gemm()(
            (a.codes, a.scale), (b.codes, b.scale), out, c=out, recipe=(1, 1, TILE), compiled_dims="mn",
            is_deep_gemm_e8m0_used=False,
        )  # fmt: skip
    return out


@cache
def _deep_gemm() -> Any:
    from vllm.utils.deep_gemm import fp8_gemm_nt

    return fp8_gemm_nt


def scaled_by_tiles(a: Operand, b: Operand) -> Tensor:
    """`Kernels.by_tiles` by cuBLASLt, which reads the scales of W's tiles in rows of a multiple of four."""
    across = b.scale.shape[1]
    scale = F.pad(b.scale, (0, -across % 4)) if across % 4 else b.scale
    recipes = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    return F.scaled_mm(a.codes, b.codes.t(), a.scale, recipes[0], scale.t(), recipes[1], output_dtype=torch.bfloat16)


def scaled_by_runs(a: Operand, b: Operand) -> Tensor:
    """`Kernels.by_runs` by cuBLASLt."""
    recipe = F.ScalingType.BlockWise1x128
    return F.scaled_mm(a.codes, b.codes.t(), a.scale, recipe, b.scale, recipe, output_dtype=torch.float32)


def _deep_square(a: Operand, b: Operand) -> Tensor:
    return deep_by_tiles(a, b).to(torch.float32)


PRODUCTS: dict[str, tuple[Callable[[Operand, Operand], Tensor], Callable[[Operand, Operand], Tensor]]] = {
    "deep_gemm": (deep_by_tiles, deep_by_runs),
    "scaled_mm": (scaled_by_tiles, scaled_by_runs),
    "mixed": (deep_by_tiles, scaled_by_runs),
    "square": (deep_by_tiles, _deep_square),
}
"""Name -> (`Kernels.by_tiles`, `Kernels.by_runs`)."""
NAMES = tuple(PRODUCTS)


def kernels_named(name: str) -> Kernels:
    """One of `NAMES`. Raises ValueError with the nearest names where there is none."""
    if name not in NAMES:
        raise ValueError(f"kernels {name!r} are unknown; {nearest(name, NAMES)}")
    by_tiles, by_runs = PRODUCTS[name]
    return Kernels(name=name, weight=quantize_weight, runs=quantize_runs, by_tiles=by_tiles, by_runs=by_runs,
                   is_square=name == "square")  # fmt: skip


def best(device: torch.device) -> Kernels | None:
    """The best kernels for `device`: the fastest mixture on a Hopper GPU where vLLM brings DeepGEMM, cuBLASLt where
    not; None: emulate."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    return kernels_named("mixed" if has_deep_gemm() else "scaled_mm")


def has_deep_gemm() -> bool:
    """Is there a vLLM here that brings DeepGEMM?"""
    try:
        from vllm.utils.import_utils import has_deep_gemm as is_there
    except ImportError:
        return False
    return bool(is_there())
