"""Casts of single values. The oracle is ml_dtypes; the tables are those of the formats' specifications."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.numerics.formats import Element, format_named
from harness.numerics.quantize import dequantize, fake_quantize, quantize
from harness.numerics.rounding import (
    FLOAT_MAX,
    binades,
    decode,
    e8m0_byte,
    e8m0_value,
    encode_,
    power_of_two_at_least,
    round_float_,
)

ML_DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}
FLOATS: list[Element] = ["e4m3", "e5m2", "e2m1"]
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def values(x: list[float], element: Element) -> list[float]:
    return decode(encode_(torch.tensor(x), element), element).tolist()


def test_e4m3_casts() -> None:
    x = [449.0, 464.0, 464.01, 480.0, 1e4, float("inf"), 2.0**-10, 17.0, 18.0, 19.0, -0.0, 2.0**-9]
    assert values(x, "e4m3") == [448, 448, 448, 448, 448, 448, 0, 16, 18, 20, 0, 2.0**-9]
    codes = encode_(torch.tensor([448.0, -448.0, 2.0**-9, 2.0**-6]), "e4m3")
    assert codes.view(torch.uint8).tolist() == [0x7E, 0xFE, 0x01, 0x08]


def test_e5m2_saturates_although_it_has_inf() -> None:
    assert values([61440.0, 1e9, -1e9, 2.0**-17, 2.0**-16, 2.0**-14], "e5m2") == [
        57344, 57344, -57344, 0, 2.0**-16, 2.0**-14,
    ]  # fmt: skip


def test_e2m1_decision_points() -> None:
    edges = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 100.0]
    at = [0, 1, 1, 2, 2, 4, 4, 6]
    below = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    above = [0.5, 1, 1.5, 2, 3, 4, 6, 6]
    assert values(edges, "e2m1") == at
    assert values(np.nextafter(np.array(edges, dtype=np.float32), np.float32(0)).tolist(), "e2m1") == below
    assert values(np.nextafter(np.array(edges, dtype=np.float32), np.float32(1e9)).tolist(), "e2m1") == above


def test_e2m1_codes_keep_the_sign_of_zero() -> None:
    codes = encode_(torch.tensor([0.0, -0.0, 0.1, -0.1, 0.5, -0.5, 6.0, -6.0]), "e2m1")
    assert codes.dtype == torch.uint8
    assert codes.tolist() == [0, 8, 0, 8, 1, 9, 7, 15]


@pytest.mark.parametrize("element", FLOATS)
def test_nan_stays_nan(element: Element) -> None:
    assert round_float_(torch.tensor([float("nan"), 1.0]), element).isnan().tolist() == [True, False]
    if element != "e2m1":
        assert decode(encode_(torch.tensor([float("nan")]), element), element).isnan().all()


def every_code(element: Element) -> np.ndarray:
    """All codes of an element in the library's own type."""
    return np.arange(16 if element == "e2m1" else 256, dtype=np.uint8).view(ML_DTYPES[element])


def assert_casts_equal(array: np.ndarray, element: Element) -> None:
    """Codes and values are those of ml_dtypes, which gives NaN beyond the largest code: clamped before."""
    limit = FLOAT_MAX[element]
    expected = array.clip(-limit, limit).astype(ML_DTYPES[element])
    codes = encode_(torch.from_numpy(array.copy()), element)
    assert codes.view(torch.uint8).tolist() == expected.view(np.uint8).tolist()
    assert round_float_(torch.from_numpy(array.copy()), element).tolist() == expected.astype(np.float32).tolist()


@pytest.mark.parametrize("element", FLOATS)
@given(x=st.lists(finite, min_size=1, max_size=50))
def test_casts_equal_ml_dtypes(element: Element, x: list[float]) -> None:
    assert_casts_equal(np.array(x, dtype=np.float32), element)


@pytest.mark.parametrize("element", FLOATS)
def test_casts_beside_every_code_and_every_tie_equal_ml_dtypes(element: Element) -> None:
    codes = every_code(element).astype(np.float32)
    codes = np.unique(codes[np.isfinite(codes)])
    ties = ((codes[:-1].astype(np.float64) + codes[1:]) / 2).astype(np.float32)
    around = [np.nextafter(ties, np.float32(s)) for s in (-np.inf, np.inf)]
    assert_casts_equal(np.concatenate([codes, ties, *around]), element)


@pytest.mark.parametrize("element", FLOATS)
def test_every_code_has_the_value_of_ml_dtypes_and_survives(element: Element) -> None:
    codes = torch.arange(16 if element == "e2m1" else 256, dtype=torch.uint8)
    if element != "e2m1":
        codes = codes.view(torch.float8_e4m3fn if element == "e4m3" else torch.float8_e5m2)
    number = decode(codes, element)
    np.testing.assert_array_equal(number.numpy(), every_code(element).astype(np.float32))
    keep = number.isfinite()
    assert encode_(number[keep].clone(), element).view(torch.uint8).tolist() == codes.view(torch.uint8)[keep].tolist()


@given(x=st.lists(finite, min_size=1, max_size=50))
def test_plain_casts_equal_ml_dtypes_and_numpy(x: list[float]) -> None:
    array = np.array(x, dtype=np.float32)
    with np.errstate(over="ignore"):
        expected = {"bf16": array.astype(ml_dtypes.bfloat16), "fp16": array.astype(np.float16), "fp32": array}
    for name, numbers in expected.items():
        w = torch.from_numpy(array)
        assert fake_quantize(w, format_named(name)).tolist() == numbers.astype(np.float32).tolist()
        assert torch.equal(dequantize(quantize(w, format_named(name))), fake_quantize(w, format_named(name)))


def test_fp16_overflow_is_kept() -> None:
    x = torch.tensor([65504.0, 65519.0, 65520.0, -1e6])
    assert fake_quantize(x, format_named("fp16")).tolist() == [65504.0, 65504.0, float("inf"), float("-inf")]


def test_e8m0_has_no_zero_and_one_nan() -> None:
    every = np.arange(256, dtype=np.uint8)
    number = e8m0_value(torch.from_numpy(every)).numpy()
    np.testing.assert_array_equal(number, every.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    assert number[[0, 1, 127, 254]].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127] and np.isnan(number[255])
    assert e8m0_byte(torch.tensor([2.0**-127, 1.0, 2.0**127, float("inf")])).tolist() == [0, 127, 254, 255]


@given(x=st.lists(st.floats(min_value=2.0**-126, max_value=2.0**126, width=32), min_size=1, max_size=50))
def test_powers_of_two_by_exponent_bits(x: list[float]) -> None:
    up, down = power_of_two_at_least(torch.tensor(x)).tolist(), binades(torch.tensor(x)).tolist()
    for value, above, below in zip(torch.tensor(x).tolist(), up, down, strict=True):
        assert np.frexp(above)[0] == 0.5 and np.frexp(below)[0] == 0.5
        assert above / 2 < value <= above and below <= value < 2 * below


def test_no_power_of_two_is_at_least_what_is_no_number() -> None:
    values = torch.tensor([3.0, float("inf"), float("nan")])
    assert power_of_two_at_least(values).tolist() == [4.0, float("inf"), float("inf")]
