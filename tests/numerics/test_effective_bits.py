"""Effective bits per weight against values worked out by hand."""

from __future__ import annotations

import pytest

from harness.numerics.effective_bits import adapter_bits, effective_bits, stored_bits
from harness.numerics.formats import Adapters, format_named

SQUARE = (4096, 4096)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("int4_g128", 4 + 16 / 128),  # 4.125
        ("int4_g32", 4 + 16 / 32),  # 4.5
        ("int4_g128_asym", 4 + 16 / 128 + 4 / 128),
        ("int2_g16_asym", 2 + 16 / 16 + 2 / 16),
        ("int8_channel", 8 + 32 / 4096),
        ("e4m3_block", 8 + 32 / 128**2),  # 8.002
        ("e4m3_tensor", 8 + 32 / 4096**2),
        ("nvfp4", 4 + 8 / 16 + 32 / 4096**2),  # 4.5 and the scale of the tensor
        ("mxfp4", 4 + 8 / 32),
        ("mxfp4_mbs", 4 + 8 / 32 + 8 / 128),  # 4.3125
        ("mxfp8", 8 + 8 / 32),
        ("nf4", 4 + 32 / 64),
        ("nf4_dq", 4 + 8 / 64 + 32 / (64 * 256) + 32 / 4096**2),
        ("bf16", 16),
        ("fp32", 32),
    ],
)
def test_a_square_matrix_by_hand(name: str, bits: float):
    fmt = format_named(name)
    assert stored_bits(SQUARE, fmt) / 4096**2 == bits
    assert effective_bits({"w": SQUARE}, {"w": fmt}) == bits


def test_a_part_of_a_tile_has_a_scale_of_its_own():
    assert stored_bits((130, 129), format_named("e4m3_block")) == 8 * 130 * 129 + 32 * 4
    assert stored_bits((3, 33), format_named("int4_g32")) == 4 * 99 + 16 * 3 * 2
    assert stored_bits((3, 160), format_named("mxfp4_mbs")) == 4 * 480 + 8 * 3 * 5 + 8 * 3 * 2


def layer(d: int, kv: int, ff: int) -> dict[str, tuple[int, int]]:
    """One block of a decoder whose query heads span its width."""
    own = {"q_proj": (d, d), "k_proj": (kv, d), "v_proj": (kv, d), "o_proj": (d, d)}
    own |= {"gate_proj": (ff, d), "up_proj": (ff, d), "down_proj": (d, ff)}
    return {f"layers.0.{name}.weight": shape for name, shape in own.items()}


@pytest.mark.parametrize(
    ("shapes", "added"),
    [
        # s: (2 * 128 + 2 * 96 + 3 * 256) * 16 = 19456 adapter weights beside 49152.
        (layer(64, 32, 192), 16 * 19456 / 49152),  # 6.33
        # s128: (2 * 512 + 2 * 384 + 3 * 1024) * 16 = 77824 beside 786432.
        (layer(256, 128, 768), 16 * 77824 / 786432),  # 1.58
    ],
)
def test_rank_16_in_16_bits_adds_what_the_notes_say(shapes: dict[str, tuple[int, int]], added: float):
    int4, rilq = format_named("int4_g32"), Adapters(rank=16, alpha=4.0, site="rollout", is_trained=False)
    plain = effective_bits(shapes, dict.fromkeys(shapes, int4))
    assert plain == 4.5
    assert effective_bits(shapes, dict.fromkeys(shapes, int4), rilq) - plain == pytest.approx(added, abs=1e-12)


def test_adapters_count_where_the_rollout_has_them_and_on_their_targets():
    shapes = {"a.q_proj.weight": (4, 8), "a.v_proj.weight": (4, 8)}
    half = Adapters(rank=2, alpha=1.0, targets=("q_proj",))
    assert adapter_bits(shapes, half) == 16 * 2 * 12
    assert adapter_bits(shapes, Adapters(rank=2, alpha=1.0, site="train")) == 0
    assert adapter_bits(shapes, None) == 0
    assert effective_bits(shapes, {"a.v_proj.weight": None}, half) == 16
    with pytest.raises(ValueError, match="at least one matrix"):
        effective_bits(shapes, {})
