"""Settings that `lowbit advise` writes for verl, composed by Hydra over verl's own defaults and read by its
configuration classes -> verl_settings.json.

`given` is what tests/studies/advise/test_configurations.py compares with the generated ones; `resolved` is what verl
holds under the same keys.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.utils.config import omega_conf_to_dataclass

AT = "actor_rollout_ref.rollout."
CACHE = f"+{AT}engine_kwargs.vllm.kv_cache_dtype"


def settings(quantization: str | None, rule: str | None, more: dict[str, Any]) -> dict[str, Any]:
    """A recipe's settings."""
    return {
        "algorithm.adv_estimator": "grpo", "data.train_batch_size": 64, "data.max_response_length": 8192,
        f"{AT}name": "vllm", f"{AT}n": 8, f"{AT}temperature": 1.0, f"{AT}top_p": 1.0, f"{AT}top_k": -1,
        f"{AT}quantization": quantization, f"{AT}tensor_model_parallel_size": 2, f"{AT}calculate_log_probs": True,
        "algorithm.rollout_correction.rollout_is": rule, "algorithm.rollout_correction.rollout_is_threshold": 2.0,
        "algorithm.rollout_correction.rollout_rs": None, "algorithm.rollout_correction.bypass_mode": False,
        "trainer.n_gpus_per_node": 8, "trainer.nnodes": 2, **more,
    }  # fmt: skip


GIVEN = [settings("fp8", "token", {}), settings("fp8", None, {CACHE: "fp8_e4m3"}), settings(None, None, {})]


def main() -> None:
    """Compose each, read the rollout's and the algorithm's part by verl's dataclasses."""
    rows: list[dict[str, Any]] = []
    for given in GIVEN:
        words = [f"{key}={'null' if value is None else value}" for key, value in given.items()]
        with initialize_config_dir(str(files("verl").joinpath("trainer/config")), version_base=None):
            config = compose("ppo_trainer", overrides=words)
        rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
        correction = RolloutCorrectionConfig(**dict(config.algorithm.rollout_correction))
        resolved: dict[str, Any] = {}
        for key in given:
            place, _, name = key.lstrip("+").rpartition(".")
            held = {AT.rstrip("."): rollout, "algorithm.rollout_correction": correction}.get(place)
            resolved[key] = OmegaConf.select(config, key.lstrip("+")) if held is None else getattr(held, name)
        rows.append({"given": given, "resolved": resolved})
    text = json.dumps({"version": version("verl"), "rows": rows}, indent=1)
    Path(__file__).with_name("verl_settings.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
