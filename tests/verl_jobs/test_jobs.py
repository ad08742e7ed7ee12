"""Whole jobs of verl on this CPU: Ray, FSDP on gloo, vLLM's server. Two to five minutes each.

INT8, 4 bits and an FP8 cache need kernels that not every processor has; FP8 weights and BF16 run on all.
"""

from __future__ import annotations

import math
import signal
import statistics
import time
from pathlib import Path

import pytest

from harness.foundation.provenance import tensors_hash
from harness.models.checkpoint import read_tensors
from harness.records.policies import last_policy
from harness.trainers.verl.parent import read_lines
from tests.source_tree import ROOT
from tests.verl_jobs.jobs import QUICK_S, SMALL, command, done, kinds, text_model

pytestmark = pytest.mark.verl
DATA = ROOT / "tests" / "tasks" / "data"
WIDEST = ("correction/clip_high_max", "mismatch/is_raw_max", "correction/weight_max")


def test_bf16_has_a_mean_ratio_of_one(results: Path) -> None:
    record, series = done(results, *SMALL, "method=bf16")
    assert record.status == "ok"
    assert record.num_steps == 3
    assert kinds(record) == {"bf16"}
    for ratio, gap in zip(series["mismatch/is_raw_mean"], series["mismatch/logp_absdiff_mean"], strict=True):
        assert ratio == pytest.approx(1.0, abs=1e-2)
        assert 1e-4 < gap < 2e-2
    assert [e.step for e in record.evals] == [0, 0, 3, 3]
    assert [e.site for e in record.evals] == ["reference", "rollout"] * 2
    assert len({e.question_hash for e in record.evals}) == 1


def test_qurl_rolls_out_in_fp8_and_widens_the_clip(results: Path) -> None:
    words = ("method=qurl", "precision=fp8_channel", "algo.num_minibatches=2", "knobs.ACR.cap=1.02")
    record, series = done(results, *SMALL, *words)
    assert kinds(record) == {"e4m3_channel"}
    assert all(0.01 < gap < 0.2 for gap in series["mismatch/logp_absdiff_mean"])
    assert all(ratio == pytest.approx(1.0, abs=0.05) for ratio in series["mismatch/is_raw_mean"])
    for widest, largest, weight in zip(*(series[name] for name in WIDEST), strict=True):
        assert largest > 1.02
        most = 1.28 * largest / 1.02  # in the update that has the largest ratio of the batch
        assert (most + 1.28) / 2 <= widest * (1 + 1e-4)  # the mean over two updates; the other's is at least 1.28
        assert widest <= most * (1 + 1e-4)
        assert weight == pytest.approx(1.02, rel=1e-6)
    assert math.isnan(series["sync/code_flip_rate"][0])
    assert all(0.01 < rate < 0.5 for rate in series["sync/code_flip_rate"][1:])


def test_noise_arrives_in_the_sampler_and_is_off_in_evaluations(results: Path) -> None:
    words = ("method=aqn_bf16", "knobs.AQN.num_stages=3", "trainer.steps=6", "trainer.eval_every=6")
    record, series = done(results, *SMALL, *words)
    sigmas = series["part/AQN.sigma"]
    assert sigmas == pytest.approx([0.0, 1e-2, 1e-2, 5e-4, 5e-4, 5e-4], rel=1e-6)
    assert series["part/AQN.sigma_realized"] == pytest.approx(sigmas, rel=0.2)
    assert record.passport is not None
    found = {t["name"]: t["format"] for t in record.passport["weights"]}
    assert found["model.layers.0.input_layernorm.weight"] == "fp32"
    assert found["model.norm.weight"] == "bf16"
    assert found["model.layers.0.mlp.up_proj.lora_A.weight"] == "bf16"
    assert series["mismatch/kl_k3"][0] < statistics.fmean(series["mismatch/kl_k3"][1:3])


def test_two_ranks_train_one_policy(results: Path) -> None:
    words = ("method=flashrl", "precision=fp8_channel", "trainer.steps=4", "trainer.eval_every=4", "launch.gpus=2",
             "algo.kl_coef=0.01")  # fmt: skip
    record, series = done(results, *SMALL, *words)
    assert (record.status, record.num_steps) == ("ok", 4)
    assert record.launch == {"gpus": 2}
    assert series["sync/num_replicas"] == [2.0] * 4  # after a push every engine's passport is read, and all agree
    assert kinds(record) == {"e4m3_channel"}
    assert all(tokens > 2 * 32 for tokens in series["rollout/tokens"])
    assert all(0.01 < gap < 0.2 for gap in series["mismatch/logp_absdiff_mean"])
    assert all(ratio == pytest.approx(1.0, abs=0.05) for ratio in series["mismatch/is_raw_mean"])
    assert all(0.0 < norm < 100.0 for norm in series["train/grad_norm"])
    assert series["train/kl_ref"][0] == pytest.approx(0.0, abs=1e-7)  # the first update starts from the reference
    assert all(1e-7 < kl < 0.5 for kl in series["train/kl_ref"][1:])
    assert math.isnan(series["sync/code_flip_rate"][0])  # what evaluations push between is not counted
    assert all(0.0 < rate < 0.5 for rate in series["sync/code_flip_rate"][1:])
    assert [e.step for e in record.evals] == [0, 0, 4, 4]


def test_a_hugging_face_folder_on_gsm8k(results: Path, tmp_path: Path) -> None:
    words = ("method=flashrl", "precision=fp8_channel", "model=hf", f"model.path={text_model(tmp_path / 'toy')}",
             "task=gsm8k", f"task.path={DATA / 'gsm8k'}", "task.options.num_workers=1", "task.num_eval=3",
             "algo.num_prompts=4", "algo.group_size=2", "engine.max_new_tokens=12", "trainer.steps=2",
             "trainer.eval_every=2")  # fmt: skip
    record, series = done(results, *words)
    assert (record.status, record.num_steps) == ("ok", 2)
    assert kinds(record) == {"e4m3_channel"}
    assert [e.unparsable_frac for e in record.evals] == [1.0] * 4  # a random model states no answer
    assert all(len(e.correct) == 3 for e in record.evals)
    assert series["reward/unparsable_frac"] == [1.0, 1.0]
    assert all(ratio == pytest.approx(1.0, abs=0.05) for ratio in series["mismatch/is_raw_mean"])


def test_replicas_answer_the_evaluations_and_the_policy_is_kept(results: Path, tmp_path: Path) -> None:
    """Two replicas share the requests; answers of 16 tokens are longer than those that are trained on."""
    asked = f"task:gsm8k,path:{DATA / 'gsm8k'},num:3,max_new_tokens:16,options:{{num_workers:1}}"
    words = ("method=flashrl", "precision=fp8_channel", "model=hf", f"model.path={text_model(tmp_path / 'toy')}",
             "task=gsm8k", f"task.path={DATA / 'gsm8k'}", "task.options.num_workers=1", "task.num_eval=3",
             "algo.num_prompts=4", "algo.group_size=2", "engine.max_new_tokens=12", "trainer.steps=2",
             "trainer.eval_every=2", "launch.gpus=2", "launch.save=hf",
             f"evaluations=[{{{asked},k:4,temperature:0.6,top_p:0.95}},{{{asked},k:0,greedy:true}}]")  # fmt: skip
    record, _ = done(results, *words)
    assert (record.status, record.evaluation_errors) == ("ok", [])
    found = [(one.step, one.number, one.site, one.precision, one.error) for one in record.evaluations]
    assert found == [(step, number, "rollout", "fp8_channel", None) for step in (0, 2) for number in (0, 1)]
    sampled, greedy = record.evaluations[2:]
    assert [len(row) for row in sampled.correct or []] == [4, 4, 4]
    assert len(greedy.greedy or []) == 3
    assert all(12 < one.length_mean <= 16 for one in record.evaluations if one.length_mean is not None)
    folder = last_policy(results, record.sweep, record.run_id)
    assert folder.name == "step-2"
    assert tensors_hash(read_tensors(folder)) == record.hashes["final"]
    assert (folder / "tokenizer.json").read_bytes() == (tmp_path / "toy" / "tokenizer.json").read_bytes()


def test_flashrl_in_fp8_learns(results: Path) -> None:
    words = ("method=flashrl", "precision=fp8_channel", "task.n=3", "task.num_eval=256", "algo.num_prompts=16",
             "algo.group_size=8", "trainer.steps=32", "trainer.eval_every=32")  # fmt: skip
    record, series = done(results, *SMALL, *words)
    assert statistics.fmean(series["reward/mean"][-8:]) > statistics.fmean(series["reward/mean"][:8]) + 0.05
    before, after = (e.accuracy for e in record.evals if e.site == "reference")
    assert before is not None
    assert after is not None
    assert after > before + 0.1
    assert all(weight <= 2.0 for weight in series["correction/weight_max"])
    assert all(math.isfinite(norm) for norm in series["train/grad_norm"])


def test_a_run_that_is_stopped_goes_on_from_its_checkpoint_and_keeps_its_policy(results: Path) -> None:
    words = ("method=bf16", "seed=7", "trainer.steps=12", "trainer.eval_every=12", "launch.save=hf")
    process = command(results, *SMALL, *words)
    wanted, started = (results / "work"), time.monotonic()
    while process.poll() is None and time.monotonic() - started < QUICK_S:
        found = [path for path in wanted.glob("*/verl/series.jsonl") if len(read_lines(path)) >= 3]
        if found:
            break
        time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=QUICK_S)
    assert process.returncode == 130
    before = read_lines(found[0])
    assert 3 <= len(before) < 12
    record, series = done(results, *SMALL, *words)
    assert record.num_steps == 12
    assert series["train/loss"][: len(before)] == pytest.approx([row["train/loss"] for row in before], rel=1e-6)
    assert [e.step for e in record.evals if e.site == "rollout"] == [0, 12]
    kept = last_policy(results, record.sweep, record.run_id)
    assert kept.name == "step-12"
    assert all(bool(tensor.isfinite().all()) for _, tensor in read_tensors(kept))
