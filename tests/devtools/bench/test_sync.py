"""The sync benchmark on a CPU: buffers, byte counts, verl's order of work, and a check that sees wrong codes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.devtools.bench import sync, sync_verl
from harness.devtools.bench.sync_model import SIZES, EngineBuffers, engine_for, packed, trainer_weights
from harness.numerics.formats import format_named
from harness.numerics.quantize import quantize

BLOCK = "e4m3_block"


def engine(fmt: str = BLOCK) -> EngineBuffers:
    """Buffers of size toy."""
    return engine_for(*trainer_weights(SIZES["toy"], "cpu"), format_named(fmt))


@pytest.mark.parametrize("fmt", sync.TIMED)
def test_buffers_are_those_of_the_fused_matrix(fmt: str) -> None:
    found = engine(fmt)
    for group in found.groups[:4]:
        codes, scale = packed(torch.cat([part.w for part in group]), found.fmt)
        assert sum(len(part.out) for part in group) == len(codes)
        assert sum(len(part.scale) for part in group) == len(scale)
        for part in group:
            assert (part.out.shape[1:], part.out.dtype) == (codes.shape[1:], codes.dtype)
            assert (part.scale.shape[1:], part.scale.dtype) == (scale.shape[1:], scale.dtype)
        assert len({part.out.untyped_storage().data_ptr() for part in group}) == 1


def test_bytes_of_a_sync() -> None:
    # Per layer: q 256 + k 128 + v 128, o 256, gate and up 384 rows of 256 columns; down 256 of 384.
    linear = 2 * ((512 + 256 + 768) * 256 + 256 * 384)
    blocks = 2 * ((4 + 2 + 6) * 2 + 2 * 3)
    plain = 2 * 512 * 256 + 256 + 2 * (512 + 2 * 256)
    assert engine().num_bytes() == linear * (2 + 1) + blocks * 4 + plain * 2 * 2


def to_fp8(w: Tensor, block: list[int]) -> tuple[Tensor, Tensor]:
    """Stands in for verl's kernel."""
    assert block == [128, 128] and w.dtype == torch.bfloat16
    q = quantize(w, format_named("e4m3_block_verl"))
    assert q.scale is not None
    return q.codes, q.scale.flatten()


@pytest.mark.parametrize("num_bytes", [None, 1 << 30, 200_000])
def test_verls_order_writes_every_buffer(num_bytes: int | None) -> None:
    found = engine()
    bucket = None if num_bytes is None else torch.empty(num_bytes, dtype=torch.uint8)
    swap = partial(sync_verl.swap, found, to_fp8, bucket)
    assert sync.wrong_codes(found, swap, "e4m3_block_verl") == 0.0
    for part in found.parts():
        assert torch.equal(part.scale, to_fp8(part.w, [128, 128])[1].view_as(part.scale))
    for source, target in found.plain:
        assert torch.equal(source, target)


def test_wrong_codes_are_seen() -> None:
    found = engine()
    assert sync.wrong_codes(found, partial(sync.reference, found), BLOCK) == 0.0
    assert sync.wrong_codes(found, lambda: None, BLOCK) > 0.9


def test_command_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sync.json"
    assert sync.main(["--size", "toy", "--device", "cpu", "--repeats", "1", "--out", str(out)]) == 0
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [(row["what"], row["wrong_codes"]) for row in rows] == [(sync.LIMIT, None), (sync.TORCH, 0.0)]
    assert rows[0]["x_limit"] == 1.0 and rows[1]["ms"] > rows[0]["ms"]
    assert sync.TORCH in capsys.readouterr().out


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert sync.main(["--size", "toy", "--device", "cpu", "--repeats", "0"]) == 2
    assert "--repeats: 0; valid: >= 1" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert sync.main(["--size", "toy"]) == 2
        assert capsys.readouterr().err.strip().endswith("valid: --device cpu")
