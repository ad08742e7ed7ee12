"""Passport line of a tensor that an engine holds as it is, in a dtype of torch and on no grid."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from harness.api import TensorRecord
from harness.numerics.rounding import cast_name


def plain_record(name: str, live: Tensor) -> TensorRecord:
    """Line of checkpoint tensor `name`, from the live memory: its format is its dtype's, its hash the CRC-32 of its
    bytes."""
    data = live.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    dtype = str(live.dtype).removeprefix("torch.")
    return TensorRecord(
        name=name, format=cast_name(live.dtype), dtype=dtype, scale_shape=None, hash=f"{zlib.crc32(data):08x}"
    )
