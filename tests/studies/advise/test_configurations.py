"""Configurations of recipes: ours is read by our own loader, those of verl and TRL have the keys of their recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.config.load import load, split_launch
from harness.studies.advise.configurations import CAP, group_of, ours, shown, trl, verl
from tests.studies.advise.made import question
from tests.studies.probe import made

ROLLOUT = "actor_rollout_ref.rollout."


@pytest.mark.parametrize(
    ("precision", "correction", "method"),
    [("bf16", "none", "bf16"), ("fp8_block", "none", "naive"), ("fp8_block+kv8", "TIS", "flashrl"),
     ("int8", "TIS", "flashrl"), ("int4", "none", "naive"), ("nvfp4", "TIS", "flashrl")],
)  # fmt: skip
@pytest.mark.parametrize("gpus", [1, 16])
def test_our_words_are_a_run_of_the_recipe(
    precision: str, correction: str, method: str, gpus: int, tmp_path: Path
) -> None:
    asked = question(gpus=gpus, length=40, batch=96)
    words = ours(asked, precision, correction, str(made.qwen2(tmp_path / "m")))
    own, launch = split_launch(words)
    config = load(own)
    assert (config.method, config.precision.name, config.engine.name) == (method, precision, "vllm")
    assert config.algo.num_prompts * config.algo.group_size == 96 and config.engine.max_new_tokens == 40
    assert config.engine.sleep and config.trainer.device == "cuda"
    assert config.trainer.name == ("local" if gpus == 1 else "verl")
    assert launch == ({} if gpus == 1 else {"gpus": 8, "nodes": 2})
    assert config.knobs.get("TIS", {}).get("cap") == (CAP if method == "flashrl" else None)


def test_a_format_that_no_method_samples_in_is_refused() -> None:
    with pytest.raises(ValueError, match="fp17: naive does not sample in it"):
        ours(question(), "fp17", "none")


def test_verl_has_the_keys_of_the_recipe() -> None:
    found = verl(question(gpus=16, batch=512, length=8192), "fp8_block+kv8", "TIS", ways=2)
    assert found.values == {
        "algorithm.adv_estimator": "grpo", "data.train_batch_size": 64, "data.max_response_length": 8192,
        f"{ROLLOUT}name": "vllm", f"{ROLLOUT}n": 8, f"{ROLLOUT}temperature": 1.0, f"{ROLLOUT}top_p": 1.0,
        f"{ROLLOUT}top_k": -1, f"{ROLLOUT}quantization": "fp8", f"{ROLLOUT}tensor_model_parallel_size": 2,
        f"{ROLLOUT}calculate_log_probs": True, "algorithm.rollout_correction.rollout_is": "token",
        "algorithm.rollout_correction.rollout_is_threshold": 2.0, "algorithm.rollout_correction.rollout_rs": None,
        "algorithm.rollout_correction.bypass_mode": False, "trainer.n_gpus_per_node": 8, "trainer.nnodes": 2,
        f"+{ROLLOUT}engine_kwargs.vllm.kv_cache_dtype": "fp8",
    }  # fmt: skip
    plain = verl(question(gpus=4), "bf16", "none").values
    assert plain is not None and f"+{ROLLOUT}engine_kwargs.vllm.kv_cache_dtype" not in plain
    assert plain[f"{ROLLOUT}quantization"] is None and plain["algorithm.rollout_correction.rollout_is"] is None
    assert (plain["trainer.n_gpus_per_node"], plain["trainer.nnodes"]) == (4, 1)
    for precision in ("int8", "int4", "nvfp4"):
        found = verl(question(), precision, "TIS")
        assert found.values is None and f"takes fp8 and torchao, not {precision}" in found.reason


def test_trl_has_the_arguments_of_the_recipe() -> None:
    found = trl(question(gpus=8, batch=512, length=8192), "bf16", "TIS", ways=2)
    assert found.values == {
        "use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 2, "vllm_enable_sleep_mode": True,
        "max_completion_length": 8192, "num_generations": 8, "temperature": 1.0, "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 64, "bf16": True, "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0,
    }  # fmt: skip
    off = trl(question(), "bf16", "none").values
    assert off is not None and off["vllm_importance_sampling_correction"] is False
    assert trl(question(), "fp8_block", "none").values is None and "quantized" in trl(question(), "int8", "TIS").reason


@pytest.mark.parametrize(("batch", "group"), [(512, 8), (12, 4), (6, 2), (7, 7), (1, 1)])
def test_groups_divide_the_batch(batch: int, group: int) -> None:
    assert group_of(batch) == group and batch % group == 0


@pytest.mark.parametrize(
    ("value", "text"), [(None, "null"), (True, "true"), (2.0, "2.0"), ("grpo", "grpo"), (-1, "-1")]
)
def test_values_are_shown_as_hydra_reads_them(value: Any, text: str) -> None:
    assert shown(value) == text
