"""The quantization kernels on a CUDA device, bit for bit against the reference on the CPU, and their memory."""

from __future__ import annotations

import pytest
import torch

from harness.numerics.formats import format_named
from tests.engines import kernel_cases
from tests.engines.kernel_cases import FORMATS, Case

pytestmark = pytest.mark.gpu
CUDA = "cuda"


@pytest.fixture(autouse=True)
def needs_triton() -> None:
    """Triton comes with a CUDA build of torch."""
    pytest.importorskip("triton", reason="Triton is not installed; it comes with CUDA builds of torch")


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in kernel_cases.cases()])
def test_codes_and_scales_are_the_references(case: Case) -> None:
    assert kernel_cases.mismatches(case, CUDA) == 0


@pytest.mark.parametrize("fmt", [name for name in FORMATS if name != "nvfp4"])
def test_given_scales_are_used(fmt: str) -> None:
    assert kernel_cases.given_mismatches(fmt, CUDA) == 0


@pytest.mark.parametrize("has_cast", [True, False], ids=["instruction", "integers"])
def test_every_bf16_number_gets_its_e4m3_code(monkeypatch: pytest.MonkeyPatch, has_cast: bool) -> None:
    from harness.kernels import quantize as kernels

    if has_cast and not kernels.has_fp8_cast(torch.device("cuda")):
        pytest.skip("the device is older than compute capability 8.9: it has no e4m3 instruction")
    monkeypatch.setattr(kernels, "has_fp8_cast", lambda device: has_cast)
    assert kernel_cases.every_bf16(CUDA) == 0
    assert kernel_cases.mismatches(Case(fmt="e4m3_channel", values="magnitudes"), CUDA) == 0


def test_another_rule_gives_other_codes() -> None:
    assert kernel_cases.other_rule(CUDA) > 0


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_shapes_of_a_7b_model(fmt: str, source: torch.dtype) -> None:
    for shape in ((512, 3584), (384, 18944)):
        assert kernel_cases.mismatches(Case(fmt=fmt, values="magnitudes", shape=shape, source=source), CUDA) == 0


def test_scales_of_a_narrower_dtype_are_rounded_as_a_copy_rounds_them() -> None:
    from harness.kernels.quantize import quantize_into
    from harness.numerics.quantize import quantize

    fmt, w = format_named("int4_g32"), kernel_cases.values("normal", (64, 256))
    q = quantize(w.bfloat16(), fmt)
    assert q.scale is not None
    out = torch.empty(64, 32, dtype=torch.int32, device=CUDA)
    scale = torch.empty(64, 8, dtype=torch.bfloat16, device=CUDA)
    quantize_into(w.to(CUDA), fmt, out, scale, base=torch.bfloat16)
    assert torch.equal(scale.cpu(), q.scale.bfloat16())


def test_a_merged_group_shares_its_level() -> None:
    from harness.kernels.quantize import quantize_into, tensor_level, update_amax
    from harness.numerics.packing import pack_fp4
    from harness.numerics.quantize import quantize

    fmt = format_named("nvfp4")
    gate, up = (kernel_cases.values("normal", (64, 256)) * gain for gain in (1.0, 3.0))
    amax = torch.zeros((), device=CUDA)
    for w in (gate, up):
        update_amax(w.to(CUDA), amax, base=torch.bfloat16)
    bf16 = torch.cat((gate, up)).bfloat16()
    assert amax.item() == bf16.abs().max().item()
    q = quantize(bf16, fmt)
    assert q.scale is not None
    out = torch.empty(128, 128, dtype=torch.uint8, device=CUDA)
    scale = torch.empty(128, 16, dtype=torch.float8_e4m3fn, device=CUDA)
    for i, w in enumerate((gate, up)):
        rows = slice(64 * i, 64 * i + 64)
        quantize_into(w.to(CUDA), fmt, out[rows], scale[rows], base=torch.bfloat16, level=tensor_level(amax, fmt))
    assert kernel_cases.differing(out.cpu(), pack_fp4(q.codes)) == 0
    assert kernel_cases.differing(scale.cpu(), q.scale) == 0


def test_twenty_swaps_allocate_nothing() -> None:
    from harness.kernels.quantize import quantize_into

    w = torch.randn(1024, 3584, dtype=torch.bfloat16, device=CUDA)
    out = torch.empty(w.shape, dtype=torch.float8_e4m3fn, device=CUDA)
    scale = torch.empty(8, 28, device=CUDA)
    quantize_into(w, format_named("e4m3_block"), out, scale, base=torch.bfloat16)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(20):
        quantize_into(w, format_named("e4m3_block"), out, scale, base=torch.bfloat16)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) == (before, before)
