"""The run's own codes as a checkpoint: plain vLLM loads it to an equal passport and equal greedy tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.api import Step
from harness.engines.vllm import settings
from harness.engines.vllm.engine import VLLMEngine, start
from harness.engines.vllm.weights import VLLMWeights
from harness.run.build import build
from harness.run.loop import grpo_step, push_weights
from harness.run.policies import save_quantized
from tests.engines.vllm.vllm_cases import lacking, needs_vllm
from tests.toy import small_config, small_launch

pytestmark = needs_vllm
LENGTH = 6


def greedy(llm: Any, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    from vllm import SamplingParams  # pyright: ignore[reportAttributeAccessIssue]

    sampling = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
    asked: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [list(out.outputs[0].token_ids) for out in llm.generate(asked, sampling, use_tqdm=False)]


NO_TILES, NO_INT4 = lacking("amx_tile"), lacking("avx512f")
INT4 = ("naive", "int4", ("model=xs128",))
MOE = ("model=moe_xs", "model.head_dim=32")


@pytest.mark.parametrize(
    ("method", "precision", "model"),
    [("flashrl", "fp8_channel", ("model=xs128",)),
     pytest.param(*INT4, marks=pytest.mark.skipif(bool(NO_INT4), reason=NO_INT4 or "it has")),
     pytest.param("naive", "int8", MOE, marks=pytest.mark.skipif(bool(NO_TILES), reason=NO_TILES or "it has"))],
    ids=["fp8_channel", "int4", "int8, experts"],
)  # fmt: skip
def test_a_saved_policy_is_what_the_engine_held(
    method: str, precision: str, model: tuple[str, ...], tmp_path: Path
) -> None:
    config = small_config(
        *model, "engine=vllm", f"method={method}", f"precision={precision}", "base.target_accuracy=0.0",
        "base.num_eval=16", "task.num_eval=16",
    )  # fmt: skip
    run, _ = build(config, small_launch(tmp_path))
    engine = run.engine
    assert isinstance(engine, VLLMEngine)
    try:
        grpo_step(run)
        push_weights(run, Step(index=1, total=4, seed=0, purpose="eval"))
        passport, plan, shape = run.passport, run.composed.plan, run.trainer.model.config
        sent, sent_experts = engine.weights.sent, engine.weights.sent_experts
        prompts = [item.prompt for item in run.eval_items]
        tokens = greedy(engine.llm, prompts)
        folder = tmp_path / "policy"
        save_quantized(run, folder)
        build_of = engine.build
    finally:
        run.close()
    assert passport is not None
    arguments = settings.llm_arguments(folder, shape, plan, build_of, max_batch=64) | {"load_format": "auto"}
    llm = start(arguments, settings.fp32_gains(plan, shape), is_cpu=True)
    try:
        worker = llm.llm_engine.model_executor.driver_worker.worker
        weights = VLLMWeights(
            worker.model_runner.get_model(), worker.vllm_config, shape, plan, torch.device("cpu"), None, None
        )
        weights.sent, weights.sent_experts = sent, sent_experts
        loaded = weights.realized_plan(build_of, "vllm")
        assert (loaded.weights, loaded.acts, loaded.kv) == (passport.weights, passport.acts, passport.kv)
        assert greedy(llm, prompts) == tokens
    finally:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
