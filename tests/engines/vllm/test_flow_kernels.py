"""The FP8 flow's quantizers: interpreted, byte for byte; what they compile to for Hopper; their division; refusals."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from harness.numerics import fp8_gemm
from harness.numerics.formats import format_named
from harness.numerics.fp8_gemm import Operand
from tests.engines.flow_cases import ACTS, KINDS, WEIGHTS, cases
from tests.engines.kernel_cases import run_interpreted

NEEDS_TRITON = pytest.mark.needs_vllm("triton")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, int]:
    """Every case, interpreted."""
    return run_interpreted("tests.engines.flow_cases")


@NEEDS_TRITON
@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_are_the_references(interpreted: dict[str, int], kind: str) -> None:
    names = [case.name for case in cases() if case.kind == kind]
    assert len(names) >= 5
    assert {name: interpreted[name] for name in names if interpreted[name]} == {}


@NEEDS_TRITON
def test_weight_codes_are_those_of_the_rollout_engines_kernel(interpreted: dict[str, int]) -> None:
    assert interpreted["engine"] == 0


@NEEDS_TRITON
def test_a_second_rounding_gives_other_codes(interpreted: dict[str, int]) -> None:
    assert interpreted["control"] > 5000


def corrected(x: np.ndarray, divisor: np.float32, inverse: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """(x times about 1 / divisor, the same after the kernel's correction), each fma rounded once."""
    wide = np.longdouble
    first = (x * inverse).astype(np.float32)
    rest = (first.astype(wide) * wide(divisor) - x.astype(wide)).astype(np.float32)
    return first, (rest.astype(wide) * wide(-inverse) + first.astype(wide)).astype(np.float32)


def e4m3(v: np.ndarray) -> np.ndarray:
    """Saturated codes."""
    return np.clip(v, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


MANTISSAS = (1 + np.arange(128) / 128).astype(np.float32)
TOP = np.float32(448.0)


@pytest.mark.parametrize("ulps", [-2, -1, 0, 1, 2])
def test_the_corrected_product_is_the_quotient_for_every_pair_of_bf16_mantissas(ulps: int) -> None:
    """Under every inverse that an approximate division may give."""
    assert np.finfo(np.longdouble).nmant >= 63, "needs numbers of 64 bits, which x86 has"
    x = (MANTISSAS[None, :] * np.exp2(np.arange(-22, 2, dtype=np.float32))[:, None]).ravel()
    moved = 0
    for amax in (*MANTISSAS, np.float32(1e-10)):
        scale = np.float32(amax / TOP)
        inverse = (np.float32(1.0) / scale).view(np.int32) + np.int32(ulps)
        inside = x if amax >= 1 else x * np.float32(2.0**-34)
        first, found = corrected(inside, scale, inverse.view(np.float32))
        assert np.array_equal(found, inside / scale)
        assert np.array_equal(e4m3(found), e4m3(inside / scale))
        moved += int((first != inside / scale).sum())
    assert moved > 1000  # without the correction the quotient is another one


def test_the_corrected_product_is_the_scale_of_every_bf16_magnitude() -> None:
    amax = np.append(MANTISSAS, [*(MANTISSAS * np.float32(2.0**127)), np.float32(1e-10)]).astype(np.float32)
    first, found = corrected(amax, TOP, np.float32(1.0 / 448.0))
    assert np.array_equal(found, amax / TOP) and not np.array_equal(first, found)


def compiled(name: str, values: dict[str, str], constants: dict[str, Any], **options: Any) -> Any:
    """One kernel for compute capability 9.0, from contiguous tensors of sizes that 16 divides; needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from harness.kernels import fp8_flow_bodies

    kernel: Any = getattr(fp8_flow_bodies, name)
    names, unknown = kernel.arg_names, ("tokens", "blocks", "A", "B")
    source = ASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in constants else values.get(n, "i32") for n in names},
        constexprs={(i,): constants[n] for i, n in enumerate(names) if n in constants},
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in (*constants, *unknown)},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def quantizer(what: str, source: str, **options: Any) -> Any:
    """`compiled` of the weight's quantizer or of the runs'."""
    import triton.language as tl

    from harness.kernels.quantize import rule_constants

    known = {"BASE": tl.bfloat16, "HAS_CAST": True}
    if what == "weight":
        pointers = {"W": source, "OUT": "*u8", "TURNED": "*u8", "OUT_SCALE": "*fp32", "TURNED_SCALE": "*fp32"}
        return compiled("square_kernel", pointers, known | rule_constants(WEIGHTS) | {"w_k": 1}, **options)
    pointers = {"X": source, "ROWS": "*u8", "COLUMNS": "*i32", "ROW_SCALE": "*fp32", "COLUMN_SCALE": "*fp32"}
    knobs = {"HAS_ROWS": what != "columns", "HAS_COLUMNS": what != "rows", "IS_TWICE": what in ("twice", "square"),
             "IS_SQUARE": what == "square", "TOP": 448.0, "AMAX_FLOOR": 1e-10, "x_c": 1}  # fmt: skip
    return compiled("runs_kernel", pointers, known | knobs, **options)


@NEEDS_TRITON
@pytest.mark.parametrize("source", ["*bf16", "*fp32"])
@pytest.mark.parametrize("what", ["rows", "columns", "both", "twice", "weight"])
def test_compiles_for_hopper(what: str, source: str) -> None:
    from harness.kernels import fp8_flow

    how: dict[str, Any] = {"num_warps": 16, "maxnreg": 64} if what == "weight" else fp8_flow.LAUNCH
    ptx = quantizer(what, source, enable_fp_fusion=False, **how).asm["ptx"]
    if what == "weight":  # approximate division would move codes
        assert "div.rn.f32" in ptx and re.findall(r"\bfma\.|div\.full|div\.approx", ptx) == []
    else:
        # What corrects the one approximate division; nothing divides exactly, which costs ten times as much.
        # It may flush: no scale and no inverse is subnormal.
        assert "fma.rn.f32" in ptx and "div.approx.ftz.f32" in ptx and "div.rn" not in ptx
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx and ".ftz" not in ptx.replace("div.approx.ftz", "")
    # Codes leave 8 or 16 bytes at a time in both layouts, and none is turned through shared memory byte by byte but a
    # weight's, which is read once for many products.
    assert re.findall(r"st\.global\.b8\b|st\.global\.b16\b", ptx) == []
    assert "st.global.v" in ptx and "ld.global.v4.b32" in ptx
    assert what == "weight" or re.findall(r"st\.shared(\.v\d)?\.b8\b", ptx) == []


def spills(found: Any) -> int:
    """Bytes of the stack of a compiled kernel."""
    import triton

    tool = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        words = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"STACK:(\d+)", text)[0])


@NEEDS_TRITON
@pytest.mark.parametrize("what", ["both", "twice", "square"])
def test_the_launch_keeps_a_tile_in_registers(what: str) -> None:
    from harness.kernels import fp8_flow

    found = quantizer(what, "*bf16", enable_fp_fusion=False, **fp8_flow.LAUNCH)
    assert spills(found) <= 64
    assert spills(quantizer(what, "*bf16", enable_fp_fusion=False, num_warps=4, maxnreg=64)) > 64  # a control


def operand(rows: int, columns: int, *, is_square: bool = False, device: str = "meta") -> Operand:
    """Codes and scales laid out as the quantizers lay them out; on a CPU with random content."""
    if is_square:
        scale = torch.rand(rows // 128, columns // 128, device=device)
    else:
        scale = torch.rand(columns // 128, rows, device=device).t()
    codes = torch.empty(rows, columns, device=device) if device == "meta" else torch.randn(rows, columns)
    return Operand(codes=codes.to(torch.float8_e4m3fn), scale=scale)


@NEEDS_TRITON
@pytest.mark.parametrize(("m", "n", "k"), [(256, 384, 512), (128, 128, 128), (256, 128, 384), (8192, 3584, 18944)])
def test_torch_accepts_what_scaled_mm_is_given(m: int, n: int, k: int) -> None:
    """Its checks of sizes and strides of the scales, which meta tensors pass through."""
    from harness.kernels import fp8_flow

    y = fp8_flow.scaled_by_tiles(operand(m, k), operand(n, k, is_square=True))
    assert (y.shape, y.dtype) == ((m, n), torch.bfloat16)
    y = fp8_flow.scaled_by_runs(operand(m, k), operand(n, k))
    assert (y.shape, y.dtype) == ((m, n), torch.float32)
    if k == 512:  # a control
        with pytest.raises(RuntimeError, match="1x128 x 1x128 blockwise scaling"):
            row_major = replace(operand(n, k), scale=torch.empty(n, k // 128, device="meta"))
            fp8_flow.scaled_by_runs(operand(m, k), row_major)


def deep_gemm(a: Any, b: Any, d: Tensor, *, is_deep_gemm_e8m0_used: bool, **more: Any) -> None:
    """DeepGEMM's `fp8_gemm_nt` on Hopper as csrc/apis/gemm.hpp and layout.hpp check and compute it."""
    assert not is_deep_gemm_e8m0_used
    (x, x_scale), (w, w_scale) = a, b
    (m, k), n, is_runs = x.shape, len(w), more.get("recipe") == (1, 1, 128)
    assert x.is_contiguous() and w.is_contiguous() and d.is_contiguous() and d.shape == (m, n)
    # As it reads them without a copy: outer axis innermost, 16 bytes aligned.
    assert x_scale.shape == (m, k // 128) and x_scale.stride() == (1, m) and m % 4 == 0
    if is_runs:
        assert w_scale.shape == (n, k // 128) and w_scale.stride() == (1, n) and n % 4 == 0
        assert d.dtype == torch.float32 and more["c"] is d and more["compiled_dims"] == "mn"
        d += Operand(codes=x, scale=x_scale).values() @ Operand(codes=w, scale=w_scale).values().t()
    else:
        assert more == {} and w_scale.shape == (n // 128, k // 128) and w_scale.is_contiguous()
        assert d.dtype == torch.bfloat16
        d.copy_(Operand(codes=x, scale=x_scale).values() @ Operand(codes=w, scale=w_scale).values().t())


@NEEDS_TRITON
def test_deep_gemm_is_given_what_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.kernels import fp8_flow

    monkeypatch.setattr(fp8_flow, "_deep_gemm", lambda: deep_gemm)
    kernels, reference = fp8_flow.kernels_named("deep_gemm"), fp8_gemm.reference()
    x, w, u = (operand(256, 512, device="cpu"), operand(384, 512, is_square=True, device="cpu"),
               operand(128, 512, device="cpu"))  # fmt: skip
    assert torch.equal(kernels.by_tiles(x, w), reference.by_tiles(x, w))
    assert torch.equal(kernels.by_runs(x, u), reference.by_runs(x, u))
    variant = fp8_flow.kernels_named("square")
    square = variant.by_runs(x, w)
    assert variant.is_square and not kernels.is_square and variant.by_tiles is kernels.by_tiles
    assert square.dtype == torch.float32 and torch.equal(square, reference.by_tiles(x, w).float())
    mixed = fp8_flow.kernels_named("mixed")
    assert (mixed.by_tiles, mixed.by_runs) == (fp8_flow.deep_by_tiles, fp8_flow.scaled_by_runs)
    assert fp8_flow.kernels_named("scaled_mm").by_tiles is fp8_flow.scaled_by_tiles


@NEEDS_TRITON
def test_what_does_not_fit_is_refused() -> None:
    from harness.kernels import fp8_flow

    knobs: dict[str, Any] = {"has_rows": True, "has_columns": True, "is_twice": False}
    with pytest.raises(ValueError, match="a side of 200; the FP8 flow's kernels need multiples of 128"):
        fp8_flow.quantize_weight(torch.zeros(128, 200), WEIGHTS)
    with pytest.raises(ValueError, match="a side of 130;"):
        fp8_flow.quantize_runs(torch.zeros(5, 130), ACTS, **knobs)
    for name in ("e4m3_1x128_ue8m0", "e4m3_token", "mxfp8", "e4m3_block"):
        with pytest.raises(ValueError, match="has no kernel of the FP8 flow; choose e4m3_block with e4m3_1x128"):
            fp8_flow.quantize_runs(torch.zeros(128, 128), format_named(name), **knobs)
    with pytest.raises(ValueError, match="kernels 'deepgem' are unknown; nearest: deep_gemm"):
        fp8_flow.kernels_named("deepgem")
    assert fp8_flow.best(torch.device("cpu")) is None
