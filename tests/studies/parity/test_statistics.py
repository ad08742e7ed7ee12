"""Statistics of three scores of the same tokens, against closed forms and enumeration."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness.studies.parity.statistics import LEVELS, compare, describe


def scores(size: int = 4000, kernel: float = 0.01, shared: float = 0.05) -> dict[str, np.ndarray]:
    """float32 + one format error that both share + kernel noise of vLLM alone."""
    draws = np.random.default_rng(0)
    exact = -draws.exponential(1.0, size)
    emulated = exact + shared * draws.standard_normal(size)
    return {"fp32": exact, "embedded": emulated, "vllm": emulated + kernel * draws.standard_normal(size)}


def test_sizes_of_a_difference_made_by_hand() -> None:
    found = describe(np.array([0.0, 0.005, -0.01, 0.02, -1.0]))
    assert found["mean_abs"] == pytest.approx(1.035 / 5)
    assert found["mean"] == pytest.approx(-0.985 / 5)
    assert (found["p50"], found["max"], found["within_0.01"]) == (0.01, 1.0, 0.6)
    assert found["p90"] == pytest.approx(0.02 + 0.6 * 0.98)
    k3 = [math.exp(-d) - 1 + d for d in (0.0, 0.005, -0.01, 0.02, -1.0)]
    assert found["k3"] == pytest.approx(sum(k3) / 5)
    assert len(found["percentiles"]) == len(LEVELS) and found["percentiles"][49] == 0.01


def test_k3_is_the_divergence_of_the_sampler_from_the_other() -> None:
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.3, 0.2])
    tokens = np.repeat([0, 1, 2], (p * 1000).round().astype(int))  # a sample in exact proportion
    found = describe(np.log(p[tokens]) - np.log(q[tokens]))
    assert found["k3"] == pytest.approx(float((p * np.log(p / q)).sum()), rel=1e-12)
    assert found["mean"] == pytest.approx(found["k3"], rel=1e-12)


def test_shared_error_correlates_and_kernel_noise_is_the_ratio() -> None:
    found = compare(scores())
    assert found["num_tokens"] == 4000
    assert found["correlation"] == pytest.approx(0.05 / math.hypot(0.05, 0.01), abs=0.005)
    assert found["ratio"] == pytest.approx(0.2, rel=0.03)
    pairs = found["pairs"]
    assert pairs["vllm-embedded"]["mean_abs"] == pytest.approx(0.01 * math.sqrt(2 / math.pi), rel=0.03)
    assert pairs["vllm-fp32"]["mean_abs"] > pairs["embedded-fp32"]["mean_abs"] > pairs["vllm-embedded"]["mean_abs"]


def test_unrelated_errors_do_not_correlate() -> None:
    found, draws = scores(), np.random.default_rng(1)
    found["vllm"] = found["fp32"] + 0.05 * draws.standard_normal(4000)
    assert abs(compare(found)["correlation"]) < 0.05
    assert compare(found)["ratio"] == pytest.approx(math.sqrt(2), rel=0.03)


def test_an_emulation_that_is_exact_has_neither_correlation_nor_ratio() -> None:
    found = compare(scores(shared=0.0))
    assert found["correlation"] is None and found["ratio"] is None
    assert found["pairs"]["embedded-fp32"]["mean_abs"] == 0.0


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_score_that_is_no_number_is_refused(value: float) -> None:
    found = scores(10)
    found["embedded"][3] = value
    with pytest.raises(ValueError, match="1 of 10 log-probs of embedded are not finite"):
        compare(found)
