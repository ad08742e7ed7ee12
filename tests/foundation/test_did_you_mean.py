"""The end of an error about a name: what is near, and what is valid."""

from __future__ import annotations

import pytest

from harness.foundation.did_you_mean import nearest


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
