"""Noise schedules against golden values of their definitions, and the survival of noise in 16 bits by sampling."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from harness.foundation.seeds import generator
from harness.numerics.noise_schedule import Decay, Definition, decayed, stage, stage_sigma, survival

GOLDEN: dict[Definition, list[float]] = {
    "paper": [1.000e-2, 7.169e-3, 5.139e-3, 3.684e-3, 2.641e-3, 1.893e-3, 1.357e-3, 9.729e-4, 6.975e-4],
    "repo": [1.000e-2, 6.877e-3, 4.729e-3, 3.252e-3, 2.236e-3, 1.538e-3, 1.057e-3, 7.271e-4, 5.000e-4],
}
"""Stages 1 to 9 of K = 10, sigma 1e-2 to 5e-4, exponential."""
GOLDEN["trainer"] = GOLDEN["repo"]
DECAYS: tuple[Decay, ...] = ("exponential", "linear", "cosine", "logarithmic")
SURVIVAL = {
    0.25: (0.98, 0.92, 0.85, 0.33, 0.05),
    0.5: (0.97, 0.85, 0.70, 0.05, 1e-4),
    1.0: (0.94, 0.70, 0.43, 1e-4, 0.0),
    2.0: (0.88, 0.43, 0.12, 0.0, 0.0),
    4.0: (0.75, 0.12, 0.002, 0.0, 0.0),
}
"""Lower end of a gain's binade -> the share of draws that BF16 keeps, at `SIGMAS`."""
SIGMAS = (5e-2, 1e-2, 5e-3, 1e-3, 5e-4)


@pytest.mark.parametrize("definition", GOLDEN)
def test_golden_stages(definition: Definition) -> None:
    found = [stage_sigma(j, num_stages=10, start=1e-2, end=5e-4, definition=definition) for j in range(1, 10)]
    assert found == pytest.approx(GOLDEN[definition], rel=1e-3)
    assert stage_sigma(0, num_stages=10, start=1e-2, end=5e-4, definition=definition) == 0.0
    last = 1e-2 * 0.05 ** (8 / 9) if definition == "paper" else 5e-4
    assert stage_sigma(9, num_stages=10, start=1e-2, end=5e-4, definition=definition) == pytest.approx(last)


def test_golden_steps() -> None:
    at = {t: stage(t, 100, 10, "repo") for t in (0, 9, 10, 89, 90, 99, 100, 250)}
    assert at == {0: 0, 9: 0, 10: 1, 89: 8, 90: 9, 99: 9, 100: 10, 250: 10}
    assert stage_sigma(10, num_stages=10, start=1e-2, end=5e-4) == pytest.approx(5e-4)
    for t in (1, 10, 11, 90, 91, 99, 100):  # the paper counts from 1
        assert stage(t - 1, 100, 10, "paper") == min((t - 1) // 10, 9)
    # 103 steps: the paper's stages are of 10 steps, the last one of 13; the code's of 10.3
    assert [stage(i, 103, 10, "paper") for i in (9, 10, 90, 99, 102)] == [0, 1, 9, 9, 9]
    assert [stage(i, 103, 10, "repo") for i in (10, 11, 92, 93, 102, 103)] == [0, 1, 8, 9, 9, 10]


@pytest.mark.parametrize("definition", ["paper", "repo"])
def test_every_run_length_walks_through_the_stages_in_order(definition: Definition) -> None:
    for total in (1, 2, 3, 7, 10, 12, 33, 36, 70, 80, 1000):
        stages = [stage(i, total, 10, definition) for i in range(total)]
        assert stages[0] == 0 and stages == sorted(stages) and max(stages) <= 9
        assert total < 10 or set(stages) == set(range(10))
        if definition == "repo" and total % 10 == 0:
            assert stages == [math.floor(i / (total / 10)) for i in range(total)]


def test_the_released_trainer_counts_from_1() -> None:
    """Every stage begins one step earlier than with steps from 0, and the last step is in the last stage."""
    for total in (1, 4, 10, 33, 100, 103, 1000):
        for i in range(total):
            assert stage(i, total, 10, "trainer") == stage(i + 1, total, 10, "repo")
        assert stage(total - 1, total, 10, "trainer") == 10
    assert [stage(i, 100, 10, "trainer") for i in (0, 8, 9, 18, 19, 98, 99)] == [0, 0, 1, 1, 2, 9, 10]
    found = [stage_sigma(stage(i, 100, 10, "trainer"), num_stages=10, start=1e-2, end=5e-4) for i in (8, 9, 88, 89, 99)]
    assert found == pytest.approx([0.0, 1e-2, GOLDEN["repo"][7], 5e-4, 5e-4], rel=1e-3)


def test_few_steps_and_few_stages() -> None:
    assert [stage(i, 4, 10, "paper") for i in range(4)] == [0, 1, 2, 3]  # floor(M / K) is 0
    assert [stage(i, 4, 10, "repo") for i in range(4)] == [0, 2, 5, 7]
    assert stage(0, 0, 10, "repo") == stage(0, 0, 10, "paper") == 0
    for definition in GOLDEN:
        two = [stage_sigma(j, num_stages=2, start=1e-2, end=5e-4, definition=definition) for j in (0, 1, 2)]
        assert two == [0.0, 1e-2, 1e-2]  # K - 2 = 0: the first sigma only
    three = [stage_sigma(j, num_stages=3, start=1e-2, end=5e-4) for j in (1, 2, 3)]
    assert three == pytest.approx([1e-2, 5e-4, 5e-4])
    for decay in DECAYS:
        assert stage_sigma(5, num_stages=10, start=0.0, end=0.0, decay=decay) == 0.0


@pytest.mark.parametrize("decay", DECAYS)
def test_decays_fall_from_start_to_end(decay: Decay) -> None:
    values = [decayed(i / 8, 1e-2, 5e-4, decay) for i in range(9)]
    assert values[0] == pytest.approx(1e-2) and values[-1] == pytest.approx(5e-4)
    assert all(a > b for a, b in pairwise(values))
    half = {"exponential": math.sqrt(1e-2 * 5e-4), "linear": 5.25e-3, "cosine": 5.25e-3}
    expected = half.get(decay, 1e-2 - 9.5e-3 * math.log(5.5) / math.log(10))
    assert values[4] == pytest.approx(expected)


@pytest.mark.parametrize("low", SURVIVAL)
def test_survival_in_bf16(low: float) -> None:
    """The formula against the published table, and both against casting."""
    gains = (low * (1 + torch.rand(20000, generator=generator("cpu", "gains", int(low * 4))))).to(torch.bfloat16)
    gains = gains[
        (gains > low) & (gains < 2 * low)
    ].float()  # at a power of two the spacing below is half of that above
    for sigma, published in zip(SIGMAS, SURVIVAL[low], strict=True):
        planned = survival(gains, sigma, torch.bfloat16)
        assert (planned == planned[0]).all()
        noised = gains + sigma * torch.randn(gains.shape, generator=generator("cpu", "noise", str(sigma)))
        arrived = float((noised.to(torch.bfloat16).float() != gains).double().mean())
        # a draw that leaves the binade upward meets a grid twice as wide
        assert arrived == pytest.approx(float(planned[0]), abs=0.012)
        assert float(planned[0]) == pytest.approx(published, abs=0.006 if published > 1e-3 else 2e-4)


def test_survival_elsewhere() -> None:
    gain = torch.tensor([1.5, -1.5, 0.0])
    kept = survival(gain, 1e-3, torch.float16)
    assert kept[0] == kept[1] == pytest.approx(math.erfc(2.0**-11 / (1e-3 * math.sqrt(2))))
    assert kept[0] > 0.6 and survival(gain, 1e-3, torch.bfloat16)[0] < 2e-4 and kept[2] > 0.999
    assert (survival(gain, 5e-4, torch.float32) > 0.9998).all()
    assert (survival(gain, 0.0, torch.bfloat16) == 0).all()
