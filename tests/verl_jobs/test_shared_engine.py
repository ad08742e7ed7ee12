"""A vLLM engine over two devices of a real job: pushes to shares, and the passport of one device. Minutes each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.verl_jobs.jobs import SMALL, done, kinds

pytestmark = pytest.mark.verl
STILL = ("trainer.lr=1e-60", "trainer.steps=1", "trainer.eval_every=1")
"""A step that moves no weight: 1e-60 is 0 in float32."""
CASES: dict[str, tuple[tuple[str, ...], str, tuple[float, float]]] = {
    "codes": (("method=flashrl", "precision=fp8_channel"), "e4m3_channel", (0.01, 0.2)),
    "adapters": (("method=bf16_lora",), "bf16", (1e-4, 2e-2)),
}
"""Case -> (words, format of the linear layers, bounds of the mean gap of log-probs in nats)."""


@pytest.mark.parametrize("name", CASES)
def test_two_devices_have_the_passport_of_one(results: Path, name: str) -> None:
    words, kind, (low, high) = CASES[name]
    shared, series = done(results, *SMALL, *words, *STILL, "launch.gpus=2", "launch.tensor_parallel=2")
    alone, _ = done(results / "alone", *SMALL, *words, *STILL)
    assert shared.launch == {"gpus": 2, "tensor_parallel": 2}
    assert series["sync/num_replicas"] == [1.0]
    assert kinds(shared) == {kind}
    assert low < series["mismatch/logp_absdiff_mean"][0] < high
    assert series["mismatch/is_raw_mean"][0] == pytest.approx(1.0, abs=0.05)
    records: list[list[dict[str, Any]]] = []
    for record in (shared, alone):
        assert record.passport is not None
        records.append(list(record.passport["weights"]))
    assert records[0] == records[1]
    assert len({tensor["hash"] for tensor in records[0] if "_proj.weight" in tensor["name"]}) == 14
    assert any("lora_B" in tensor["name"] for tensor in records[0]) == (name == "adapters")
