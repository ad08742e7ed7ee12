"""Every grid gives the same bits on a GPU as on the CPU, where the libraries' answers pin it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from harness.numerics.formats import FORMATS, Format
from harness.numerics.kv_scales import kv_scale, quantize_kv
from harness.numerics.packing import pack_fp4, pack_int32
from harness.numerics.quantize import Quantized, code_flips, dequantize, fake_quantize, quantize, saturated_frac
from tests.unpacking import unpack_int32

pytestmark = pytest.mark.gpu
GRIDS = [fmt for name, fmt in FORMATS.items() if fmt.name == name]


def matrices() -> list[Tensor]:
    noise = torch.Generator().manual_seed(0)
    spread = torch.randn(64, 256, generator=noise) * 10 ** (torch.rand(64, 1, generator=noise) * 24 - 12)
    spread[3] = 0.0
    spread[5, :128] = 0.0
    ties = torch.randint(-32, 33, (33, 200), generator=noise) / 4.0
    return [spread, spread.bfloat16().float(), ties, torch.randn(3, 5, 64, generator=noise)]


def bits(x: Tensor | None) -> bytes:
    return b"" if x is None else x.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def parts(q: Quantized) -> dict[str, bytes]:
    tensors = {"codes": q.codes, "scale": q.scale, "zero": q.zero_point, "level": q.global_scale}
    return {key: bits(value) for key, value in tensors.items()}


@pytest.mark.parametrize("fmt", GRIDS, ids=[fmt.name for fmt in GRIDS])
def test_gpu_equals_cpu(fmt: Format) -> None:
    for w in matrices():
        here, there = quantize(w, fmt), quantize(w.cuda(), fmt)
        if fmt.double_quant:  # a mean in another order of summation: the offset moves by its last bits
            assert code_flips(here, replace(there, codes=there.codes.cpu())) == 0.0
            assert torch.allclose(dequantize(here), dequantize(there).cpu(), rtol=0.05, atol=1e-30)
            continue
        assert parts(here) == parts(there)
        assert torch.equal(dequantize(here), dequantize(there).cpu())
        assert torch.equal(fake_quantize(w.cuda(), fmt).cpu(), dequantize(here))
        if there.scale is not None and fmt.rule not in ("ct_token",) and fmt.element != "nf4":
            again = quantize(
                w.cuda(), fmt, scale=there.scale, zero_point=there.zero_point, tensor_amax=w.abs().max().cuda()
            )
            assert code_flips(again, there) < 1e-2 and saturated_frac(w.cuda(), there) <= 0.2


def test_packing_and_kv_on_gpu() -> None:
    codes = torch.randint(-4, 4, (37, 45), dtype=torch.int8)
    packed = pack_int32(codes.cuda(), 3)
    assert bits(packed) == bits(pack_int32(codes, 3))
    assert bits(unpack_int32(packed, 3, (37, 45))) == bits(codes)
    nibbles = torch.randint(0, 16, (8, 64), dtype=torch.uint8)
    assert bits(pack_fp4(nibbles.cuda())) == bits(pack_fp4(nibbles))
    for fmt in (FORMATS["e4m3_kv"], FORMATS["e5m2_kv"]):
        k = torch.randn(2, 4, 8, 16)
        scale = kv_scale(k.abs().max(), fmt)
        assert bits(kv_scale(k.cuda().abs().max(), fmt)) == bits(scale)
        assert torch.equal(quantize_kv(k.cuda(), fmt, scale.cuda()).cpu(), quantize_kv(k, fmt, scale))
