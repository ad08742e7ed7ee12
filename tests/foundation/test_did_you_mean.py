"""Names in errors: what is near, what is valid, and long lists."""

from __future__ import annotations

import pytest

from harness.foundation.did_you_mean import listed, nearest


@pytest.mark.parametrize(
    ("name", "choices", "expected"),
    [
        ("int9", ["int8", "bf16", "int4", "bf16"], "nearest: int8, int4; valid: int8, bf16, int4"),
        ("zz", ["int8", "bf16"], "valid: int8, bf16"),
        ("fp8", ["fp8_block", "int8"], "nearest: fp8_block; valid: fp8_block, int8"),
        ("a7", [f"a{i}" for i in range(41)], "nearest: a7, a37, a27"),
        ("", ["int8"], "valid: int8"),
        ("FP8", ["fp8_block", "mis"], "nearest: fp8_block; valid: fp8_block, mis"),
        ("FLASHRL", ["flashrl", "mis"], "nearest: flashrl; valid: flashrl, mis"),
        ("quick", [], "valid: none"),
    ],
)
def test_what_was_probably_meant_and_what_is_valid(name: str, choices: list[str], expected: str) -> None:
    assert nearest(name, choices) == expected


def test_long_lists_are_cut_short() -> None:
    assert [listed("abcde"[:n]) for n in (0, 1, 4, 5)] == ["none", "a", "a, b, c, d", "a, b, c, d and 1 more"]
    assert listed({"x": 1, "y": 2, "z": 3}, 1) == "x and 2 more"
