"""Passport lines of plain tensors: formats by dtype, and checksums by zlib over bytes written out by hand."""

from __future__ import annotations

import struct
import zlib

import pytest
import torch

from harness.engines.plain_record import plain_record


@pytest.mark.parametrize(
    ("dtype", "fmt", "bytes_of"),
    [
        (torch.float32, "fp32", struct.pack("<4f", 1.0, -2.0, 0.5, 3.0)),
        (torch.float16, "fp16", struct.pack("<4e", 1.0, -2.0, 0.5, 3.0)),
        (torch.bfloat16, "bf16", bytes.fromhex("803f 00c0 003f 4040")),
        (torch.float64, "float64", struct.pack("<4d", 1.0, -2.0, 0.5, 3.0)),
    ],
)
def test_format_dtype_and_hash(dtype: torch.dtype, fmt: str, bytes_of: bytes) -> None:
    record = plain_record("a.weight", torch.tensor([[1.0, -2.0], [0.5, 3.0]], dtype=dtype))
    assert (record.name, record.format, record.dtype) == ("a.weight", fmt, str(dtype).removeprefix("torch."))
    assert record.hash == f"{zlib.crc32(bytes_of):08x}" and record.scale_shape is None


def test_a_view_is_read_in_its_own_order() -> None:
    whole = torch.arange(6.0).view(2, 3)
    assert (
        plain_record("x", whole.T).hash == plain_record("x", whole.T.contiguous()).hash != plain_record("x", whole).hash
    )
