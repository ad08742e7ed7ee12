"""Preparations of `main_h200` before its first step, on a GPU: bases learnt, and parts prepared as on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.models.checkpoint import load_decoder
from harness.models.decoder import DecoderConfig
from harness.run.checks import check
from harness.start.base_model import read_record, train_base
from harness.start.base_training import BaseRecipe, TrainingHost, Unfinished
from harness.start.prepare import Start, prepare, start_of
from harness.tasks.sort import Sort
from tests.toy import small_config, small_launch

pytestmark = pytest.mark.gpu
SHAPE = DecoderConfig(
    vocab_size=128, num_layers=2, hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=384
)
TASK = Sort(n=16, vocab_size=128)
RECIPE = BaseRecipe(curriculum=(4, 8), max_steps=1500, num_eval=128, lr=2e-3, eval_every=10)
CASES = [
    ("flashrl", "int8", 1e-6), ("qurl", "int8", 1e-6), ("fp8_rl", "fp8_block+kv8", 1e-3), ("rilq", "int4", None),
    ("qat_kd", "int4", None),
]  # fmt: skip
"""Method, precision, how far a CPU's result may be; None: a fit, which goes its own way."""


def test_a_base_is_learnt_size_by_size_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    polls = iter([False] * 40 + [True])
    host = TrainingHost(device="cuda", state=tmp_path / "state.pt", should_stop=lambda: next(polls))
    with pytest.raises(Unfinished, match=r"stopped after \d+ steps"):
        train_base(SHAPE, TASK, RECIPE, 0, tmp_path / "base", None, host)
    record = train_base(
        SHAPE, TASK, RECIPE, 0, tmp_path / "base", None, TrainingHost(device="cuda", state=tmp_path / "state.pt")
    )
    assert record["is_target_reached"] and 0.25 < record["accuracy"] < 0.75 and record["steps"] > 41
    assert record["device"] == torch.cuda.get_device_name() and read_record(tmp_path / "base") == record
    assert next(load_decoder(tmp_path / "base").parameters()).device.type == "cpu"


@pytest.mark.parametrize(("method", "precision", "tolerance"), CASES)
def test_parts_are_prepared_on_the_runs_device(method: str, precision: str, tolerance: float | None, tmp_path: Path):
    found: dict[str, dict[str, torch.Tensor]] = {}
    for device in ("cpu", "cuda"):
        words = [f"method={method}", f"precision={precision}", f"trainer.device={device}", "model.spread=0.5"]
        words += ["knobs.KD.steps=3"] if method == "qat_kd" else ["knobs.RILQ.updates=3"] if method == "rilq" else []
        config, launch = small_config(*words), small_launch(tmp_path / device)
        composed, start = check(config), start_of(config, launch)
        assert isinstance(start, Start) and start.device == device
        model = prepare(composed, config, start, launch)
        assert next(model.parameters()).device.type == device
        found[device] = dict(composed.fixed)
    assert found["cpu"].keys() == found["cuda"].keys()
    for name, tensor in found["cpu"].items():
        other = found["cuda"][name].cpu()
        assert other.shape == tensor.shape and bool(torch.isfinite(other.float()).all()), name
        if tolerance is not None:
            torch.testing.assert_close(other, tensor, rtol=tolerance, atol=0.0)
