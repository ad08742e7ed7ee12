"""Arguments that `lowbit advise` writes for TRL, as GRPOConfig takes them -> trl_arguments.json.

`given` is what tests/studies/advise/test_configurations.py compares with the generated ones; `resolved` is what the
constructed GRPOConfig holds under the same names.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trl import GRPOConfig

GIVEN: list[dict[str, Any]] = [
    {
        "use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 2, "vllm_enable_sleep_mode": True,
        "max_completion_length": 8192, "num_generations": 8, "temperature": 1.0, "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 64, "bf16": True, "vllm_importance_sampling_correction": is_corrected,
        "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0,
    }
    for is_corrected in (True, False)
]  # fmt: skip


def main() -> None:
    """Construct each, on a CPU."""
    rows: list[dict[str, Any]] = []
    for given in GIVEN:
        config = GRPOConfig(output_dir="out", report_to="none", use_cpu=True, **given)
        rows.append({"given": given, "resolved": {name: getattr(config, name) for name in given}})
    text = json.dumps({"version": version("trl"), "rows": rows}, indent=1)
    Path(__file__).with_name("trl_arguments.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
