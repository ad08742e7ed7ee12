"""Arguments of bare `vllm.LLM` for one size and precision: the engine's settings, and what the map adds.

Formats and their checks are `harness.engines.vllm.settings`', so that the map and the engine mean the same.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from harness.engines.vllm import settings
from harness.engines.vllm.builds import check_plan
from harness.studies.throughput.estimates import UTILIZATION
from harness.studies.throughput.plan import Sweep
from harness.studies.throughput.shapes import plan_of, shape_of

CPU_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


def environment(sweep: Sweep) -> dict[str, str]:
    """Environment variables of an engine process, beside the caller's; its log tells which kernels run."""
    ours = settings.DEFAULTS | settings.ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "INFO"}
    return ours | (CPU_ENVIRONMENT if sweep.device == "cpu" else {}) | dict(sweep.environment or {})


def refusal(sweep: Sweep, size: str, precision: str) -> str | None:
    """Reason why the installed build, the device or the shape cannot have a precision, in one line; None where it can.

    Raises ValueError where vLLM is not installed in a version that is known.
    """
    build, plan = settings.installed_build(), plan_of(precision)
    try:
        check_plan(build, plan)
        settings.check_device(build, sweep.device, plan)
        settings.check_shape(build, shape_of(size), plan)
    except ValueError as error:
        return str(error)
    return None


def llm_arguments(sweep: Sweep, size: str, precision: str, folder: Path) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`; `folder` gets the config.json it starts from."""
    plan = plan_of(precision)
    config = dataclasses.replace(shape_of(size), max_positions=max(shape_of(size).max_positions, sweep.max_model_len))
    settings.write_model_folder(folder, config, plan)
    arguments = settings.llm_arguments(
        folder, config, plan, settings.installed_build(), max_batch=max(sweep.batches),
        max_length=sweep.max_model_len, gpu_memory=UTILIZATION,
    )  # fmt: skip
    arguments |= {
        "max_num_batched_tokens": max(sweep.prefill_tokens, *sweep.batches, 2048),
        "enable_prefix_caching": False,
        "kv_transfer_config": {
            "kv_connector": "FilledContext",
            "kv_connector_module_path": "harness.studies.throughput.connector",
            "kv_role": "kv_producer",  # a consumer frees the blocks of finished requests a step later
        },
    }
    if "compilation_config" in arguments:  # graphs for the batches of the map, no others
        arguments["compilation_config"]["cudagraph_capture_sizes"] = list(sweep.batches)
    return arguments | dict(sweep.engine or {})
