from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.numerics.formats import format_named
from harness.numerics.packing import (
    pack,
    pack_fp4,
    pack_int32,
)
from harness.numerics.quantize import quantize
from tests.unpacking import unpack_fp4, unpack_int32


def words(packed: torch.Tensor) -> list[str]:
    return [f"{value & 0xFFFFFFFF:08x}" for value in packed.flatten().tolist()]


def test_int4_golden_words() -> None:
    codes = torch.tensor([[-8, -7, -1, 0, 1, 2, 6, 7], [3, -3, 0, 0, 0, 0, 0, 5]], dtype=torch.int8)
    assert words(pack_int32(codes, 4)) == ["fea98710", "d888885b"]
    assert words(pack_int32(codes.T.contiguous(), 4, dim=0)) == ["fea98710", "d888885b"]


def test_the_last_word_is_filled_with_zero_bits() -> None:
    assert words(pack_int32(torch.tensor([[-8, 7, 7]], dtype=torch.int8), 4)) == ["00000ff0"]


def test_three_bits_straddle_words() -> None:
    # Eleven codes of stored value 7 are 33 set bits: one word and one bit.
    assert words(pack_int32(torch.full((1, 11), 3, dtype=torch.int8), 3)) == ["ffffffff", "00000001"]


@settings(max_examples=40)
@given(bits=st.integers(1, 8), rows=st.integers(1, 40), columns=st.integers(1, 70), seed=st.integers(0, 99))
def test_int32_round_trip(bits: int, rows: int, columns: int, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    half = 2 ** (bits - 1)
    codes = torch.randint(-half, half, (rows, columns), generator=noise).to(torch.int8)
    dims: tuple[Literal[0, 1], ...] = (0, 1)
    for dim in dims:
        packed = pack_int32(codes, bits, dim=dim)
        length = (rows, columns)[dim]
        assert packed.shape[dim] == -(-length * bits // 32)
        assert torch.equal(unpack_int32(packed, bits, (rows, columns), dim=dim), codes)


def test_codes_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"range of 4 bits: -1\.\.8"):
        pack_int32(torch.tensor([[-1, 8]], dtype=torch.int8), 4)
    with pytest.raises(ValueError, match="num_bits is 9"):
        pack_int32(torch.zeros(1, 1, dtype=torch.int8), 9)


def test_the_even_element_is_the_low_nibble() -> None:
    codes = torch.tensor([1, 2, 14, 15], dtype=torch.uint8)
    assert pack_fp4(codes).tolist() == [0x21, 0xFE]
    assert unpack_fp4(pack_fp4(codes)).tolist() == codes.tolist()
    with pytest.raises(ValueError, match="3 codes"):
        pack_fp4(codes[:3])


def test_checkpoint_tensors() -> None:
    w = torch.randn(256, 192, generator=torch.Generator().manual_seed(0))
    shapes = {
        "bf16": {"weight": (256, 192)},
        "int8_channel": {"weight": (256, 192), "weight_scale": (256, 1)},
        "e4m3_block": {"weight": (256, 192), "weight_scale_inv": (2, 2)},
        "int4_g32": {"weight_packed": (256, 24), "weight_scale": (256, 6), "weight_shape": (2,)},
        "int3_g64_asym": {"weight_packed": (256, 18), "weight_scale": (256, 3), "weight_shape": (2,),
                          "weight_zero_point": (24, 3)},
        "int8_g128": {"weight_packed": (256, 48), "weight_scale": (256, 2), "weight_shape": (2,)},
        "nvfp4": {"weight_packed": (256, 96), "weight_scale": (256, 12), "weight_global_scale": (1,)},
        "nvfp4_torchao": {"weight": (256, 96), "weight_scale": (256, 12), "weight_scale_2": (1,)},
        "mxfp4": {"weight_packed": (256, 96), "weight_scale": (256, 6)},
        "mxfp8": {"weight": (256, 192), "weight_scale": (256, 6)},
    }  # fmt: skip
    for name, expected in shapes.items():
        tensors = pack(quantize(w, format_named(name)))
        assert {key: tuple(value.shape) for key, value in tensors.items()} == expected, name
    assert pack(quantize(w, format_named("mxfp4")))["weight_scale"].dtype == torch.uint8
    with pytest.raises(ValueError, match="nf4 has no checkpoint layout"):
        pack(quantize(w, format_named("nf4")))


def test_unsigned_codes_are_packed_like_signed_ones() -> None:
    """The same nibbles, whether a rule counts from 0 or from -8: code and zero point shift alike."""
    q = quantize(torch.tensor([[-3.0, 12.0, 0.0, 5.4]]), format_named("int4_g4_asym_qat"))
    tensors = pack(q)
    assert words(tensors["weight_packed"]) == ["000083f0"]
    assert words(tensors["weight_zero_point"]) == ["00000003"]
