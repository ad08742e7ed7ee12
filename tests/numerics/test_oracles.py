"""Bit for bit against the libraries: tests/oracles/<library>.npz holds their answers, written by `make oracles`."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.numerics import nf4
from harness.numerics.formats import format_named
from harness.numerics.packing import pack_fp4, pack_int32
from harness.numerics.quantize import Quantized, dequantize, fake_quantize, quantize
from tests.unpacking import unpack_int32, unpack_nf4

Answers = dict[str, NDArray[np.generic]]


@lru_cache(maxsize=4)
def answers(library: str) -> Answers:
    path = Path(__file__).parents[1] / "oracles" / f"{library}.npz"
    with np.load(path, allow_pickle=False) as npz:
        return {key: npz[key] for key in npz.files}


def cases(library: str) -> list[tuple[str, str]]:
    """(format, matrix) pairs that the library answered."""
    return sorted({(name, case) for name, case, *rest in (key.split("/") for key in answers(library) if "/" in key)
                   if rest and rest[0] in ("codes", "packed")})  # fmt: skip


def stored_codes(q: Quantized) -> Tensor:
    """Codes as the libraries give them: E2M1 packed, float8 as bytes."""
    if q.fmt.element == "e2m1":
        return pack_fp4(q.codes)
    return q.codes.view(torch.uint8) if q.fmt.element == "e4m3" else q.codes


def positive_zeros(codes: Tensor, name: str) -> Tensor:
    """Packed E2M1 or e4m3 codes with -0 made +0: libraries disagree about the sign of what was -0 to begin with."""
    if name.startswith(("nvfp4", "mxfp4")):
        low, high = codes & 0xF, codes >> 4
        return torch.where(low == 8, 0, low) | torch.where(high == 8, 0, high) << 4
    return torch.where(codes == 0x80, 0, codes) if codes.dtype == torch.uint8 else codes


def same(ours: Tensor, theirs: NDArray[np.generic], what: str) -> None:
    """Equal shape and value; NaN nowhere."""
    other = torch.from_numpy(theirs)
    ours = ours.reshape(other.shape)
    assert not other.to(torch.float32).isnan().any(), f"{what}: the oracle itself gives NaN"
    differing = (ours.to(torch.float64) != other.to(torch.float64)).sum().item()
    assert differing == 0, f"{what}: {differing} of {other.numel()} differ"


@pytest.mark.parametrize(("name", "case"), cases("compressed_tensors"))
def test_equals_compressed_tensors(name: str, case: str) -> None:
    table = answers("compressed_tensors")
    w = torch.from_numpy(table[f"input/{case}"])
    q = quantize(w, format_named(name))
    assert q.scale is not None
    key = f"{name}/{case}"
    same(q.scale.to(torch.float32), table[f"{key}/scale"], "scale")
    if q.global_scale is not None:
        same(q.global_scale, table[f"{key}/level"], "global scale")
    if q.zero_point is not None:
        same(q.zero_point, table[f"{key}/zero"], "zero point")
    theirs = positive_zeros(torch.from_numpy(table[f"{key}/codes"]), name)
    same(positive_zeros(stored_codes(q), name), theirs.numpy(), "codes")
    if f"{key}/values" in table:
        same(dequantize(q), table[f"{key}/values"], "values")
    assert torch.equal(fake_quantize(w, q.fmt), dequantize(q))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_packs_as_compressed_tensors(bits: int, dim: Literal[0, 1]) -> None:
    table = answers("compressed_tensors")
    codes = torch.from_numpy(table[f"pack{bits}/codes"])
    packed = pack_int32(codes, bits, dim=dim)
    same(packed, table[f"pack{bits}/dim{dim}"], "packed words")
    assert torch.equal(unpack_int32(packed, bits, (37, 45), dim=dim), codes)


@pytest.mark.parametrize(("name", "case"), cases("torchao"))
def test_equals_torchao(name: str, case: str) -> None:
    table = answers("torchao")
    w, key = torch.from_numpy(table[f"input/{case}"]), f"{name}/{case}"
    q = quantize(w, format_named(name))
    assert q.scale is not None
    stored = q.scale.view(torch.uint8) if q.fmt.scale_dtype == "e8m0" else q.scale.to(torch.float32)
    same(stored, table[f"{key}/scale"], "scale")
    if q.global_scale is not None:
        same(q.global_scale, table[f"{key}/level"], "tensor-level scale")
    theirs = positive_zeros(torch.from_numpy(table[f"{key}/codes"]), name)
    same(positive_zeros(stored_codes(q), name), theirs.numpy(), "codes")
    if f"{key}/values" in table:
        same(dequantize(q), table[f"{key}/values"], "values")
    assert torch.equal(fake_quantize(w, q.fmt), dequantize(q))


@pytest.mark.parametrize(("name", "case"), cases("bitsandbytes"))
def test_equals_bitsandbytes(name: str, case: str) -> None:
    table = answers("bitsandbytes")
    w, key = torch.from_numpy(table[f"input/{case}"]), f"{name}/{case}"
    q = quantize(w, format_named(name))
    same(q.codes, unpack_nf4(torch.from_numpy(table[f"{key}/packed"]), q.shape).numpy(), "codes")
    if name == "nf4_dq":
        q = check_double_quantization(q, key)
    assert q.scale is not None
    same(q.scale, table[f"{key}/scale"], "absmax")
    if f"{key}/values" in table:
        same(dequantize(q), table[f"{key}/values"], "values")


def check_double_quantization(q: Quantized, key: str) -> Quantized:
    """Compare the nested scales; returns `q` with the library's own indices.

    The library's CPU code rounds to 65536 steps before it looks for the nearest level (its CUDA code does not), so the
    indices are compared after the same rounding, and without it may be one off beside a decision point.
    """
    table = answers("bitsandbytes")
    assert q.zero_point is not None and q.global_scale is not None and q.scale is not None
    same(q.zero_point, table[f"{key}/offset"], "offset")
    same(q.global_scale, table[f"{key}/outer"], "outer absmax")
    theirs = torch.from_numpy(table[f"{key}/scale"])
    absmax = torch.from_numpy(table[f"{key.replace('nf4_dq', 'nf4')}/scale"])
    outer = q.global_scale.repeat_interleave(nf4.OUTER_BLOCK)[: absmax.numel()]
    v = (absmax - q.zero_point) / outer.clamp(min=1e-38)
    stepped = torch.floor((v + 1) * 0.5 * 65535 + 0.5) * (2 / 65535) - 1
    same(nf4.nearest_dynamic(stepped), theirs.numpy(), "nested indices after rounding to steps")
    off = (q.scale.int() - theirs.int()).abs()
    assert off.max() <= 1 and (off > 0).sum() <= 0.02 * off.numel()
    return replace(q, scale=theirs)


def test_dynamic_map_equals_bitsandbytes() -> None:
    same(nf4.dynamic_map(torch.device("cpu")), answers("bitsandbytes")["dynamic_map"], "dynamic map")
