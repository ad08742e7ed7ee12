"""Trainer and vLLM on one GPU: the engine lends its memory, the run stays the run, the record tells the memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.vllm_cases import NEEDS_VLLM

pytestmark = [pytest.mark.gpu, NEEDS_VLLM]


def cell(folder: Path, *words: str) -> dict[str, Any]:
    folder.mkdir()
    command = [sys.executable, "-m", "tests.gpu.colocated_case", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["status"] == "ok", found["error"]
    return found


def test_an_engine_that_sleeps_gives_its_memory_and_the_same_run(tmp_path: Path) -> None:
    words = ("method=fp8_rl", "precision=fp8_channel+kv8")
    awake, asleep = (cell(tmp_path / sleep, *words, f"engine.sleep={sleep}") for sleep in ("false", "true"))
    assert awake["memory"].keys() == {"allocated", "reserved", "engine"}
    assert asleep["memory"].keys() == {"allocated", "reserved", "engine", "given_back"}
    assert asleep["memory"]["given_back"] > 1.0, asleep["memory"]
    for found in (awake, asleep):
        memory = found["memory"]
        assert memory["reserved"] >= memory["allocated"] > max(found["update"]) * 0.99 > 0, found
        assert memory["engine"] > 1.0, memory
    assert awake["sleep_s"] < 0.1 < awake["total_s"] and asleep["sleep_s"] > awake["sleep_s"]
    assert len(asleep["kl"]) == 3 and all(0 < kl < 0.1 for kl in asleep["kl"]), asleep["kl"]
    assert asleep["kl"][0] == pytest.approx(awake["kl"][0], rel=0.2)
    assert [e[:2] for e in asleep["evals"]] == [[s, w] for s in (0, 2, 3) for w in ("reference", "rollout")]
    assert [e[:2] for e in asleep["evals"]] == [e[:2] for e in awake["evals"]]


def test_jet_rl_agrees_with_the_engines_kernels(tmp_path: Path) -> None:
    """The trainer's FP8 units against vLLM's: less divergence than a BF16 trainer of the same rollouts. None would be
    left if all kernels gave the same bits; noise of one bit leaves a fifth to a third (test_fp8_flow, test_trainer)."""
    mixed = cell(tmp_path / "mixed", "method=naive", "precision=fp8_block", "parts=[bf16_train.BF16Compute]")
    jet = cell(tmp_path / "jet", "method=jet_rl")
    assert mixed["trainer"] == {"bf16, emulated": 15}
    assert sum(jet["trainer"].values()) == 15
    if any("emulated" in who and "e4m3" in who for who in jet["trainer"]):
        pytest.skip("the device is no Hopper GPU: the FP8 flow was emulated")
    assert jet["kl"][0] < 0.7 * mixed["kl"][0], (jet["kl"], mixed["kl"])


def test_a_short_run_learns_on_real_kernels(tmp_path: Path) -> None:
    """FP8 in vLLM and in the trainer, one GPU shared. On a CPU: 0.23 to 0.50, 0.50 and 0.55 over three seeds."""
    words = ("task=sort", "task.n=4", "task.num_eval=256", "trainer.steps=40", "trainer.eval_every=40",
             "trainer.lr=3e-4", "algo.num_prompts=16", "algo.group_size=8", "base.target_accuracy=0.3",
             "base.num_eval=128")  # fmt: skip
    found = cell(tmp_path / "learns", "method=jet_rl", "engine.sleep=true", *words)
    accuracy = {(step, site): value for step, site, value in found["evals"]}
    assert accuracy[40, "reference"] > accuracy[0, "reference"] + 0.12 > 0.2, accuracy
    assert sum(found["reward"][-10:]) / 10 > sum(found["reward"][:5]) / 5 + 0.05, found["reward"]
    assert len(found["kl"]) == 40 and 0 < max(found["kl"]) < 5e-3, found["kl"]
