"""Ready configurations of a recipe: our command, verl's keys and TRL's arguments. What cannot do it raises ValueError.

Keys are those of verl 0.9.1 and TRL 1.16.0. verl's `quantization=fp8` is block FP8 (weights in blocks of 128 x 128).
"""

from __future__ import annotations

from typing import Any

from harness.config.load import of_folder
from harness.engines.vllm.builds import CUDA
from harness.studies.advise.accuracy import ICEPOP, METHODS_OF, NONE, TIS
from harness.studies.advise.question import Question
from harness.studies.capacity.host import NODE
from harness.studies.capacity.place import refusal
from methods import METHODS

CAP = 2.0
"""Largest weight of truncated importance sampling, as in the runs on word problems."""
LEAST, MOST = 0.5, 5.0
"""Weights that IcePop keeps, as there; a token outside has none."""
GROUP = 8
"""Answers to a prompt, where the batch divides by it."""
KV8, FP8_CACHE = "+kv8", "e4m3_kv"
"""Ending of a precision with an FP8 cache, and the format of that cache."""
VERL_FP8 = "fp8_block"
"""The format that verl's quantization=fp8 stands for."""


def ours(
    question: Question, precision: str, correction: str, folder: str = "FOLDER", *, ways: int = 1,
    pass_tokens: int | None = None, is_checkpointed: bool = False,
) -> list[str]:  # fmt: skip
    """Words of `lowbit run`, `folder` the model's, `ways` the GPUs of an engine, `pass_tokens` those that a GPU trains
    on at once, where a plan names them. Raises ValueError for a format that no method here samples in, for an engine
    over several GPUs that the trainer refuses, in its words, and for a batch that its GPUs cannot share evenly."""
    group = group_of(question.batch)
    method = "bf16" if precision == "bf16" else _method(precision, correction)
    if {precision, precision.removesuffix(KV8)}.isdisjoint(METHODS[method].precisions):
        raise ValueError(f"{precision}: {method} does not sample in it")
    if ways > 1 and (refused := refusal(question.size, precision, ways)):
        raise ValueError(refused)
    _check_shared(question)
    several = ["trainer=verl", f"launch.gpus={min(question.gpus, NODE)}", f"launch.nodes={question.nodes}",
               *(["launch.ray_address=auto"] if question.nodes > 1 else []),
               *([f"launch.tensor_parallel={ways}"] if ways > 1 else [])]  # fmt: skip
    return [
        f"method={method}", f"precision={precision}", *_knobs(correction),
        *of_folder(folder), "engine=vllm", *(several if question.gpus > 1 else []),
        "trainer.device=cuda", "engine.sleep=true", f"engine.max_new_tokens={question.length}",
        f"algo.num_prompts={question.batch // group}", f"algo.group_size={group}",
        *([f"launch.micro_batch_tokens={pass_tokens}"] if pass_tokens is not None else []),
        *(["launch.checkpoint_layers=true"] if is_checkpointed else []),
    ]  # fmt: skip


def _method(precision: str, correction: str) -> str:
    """The method that is a correction in a format: TIS with an FP8 cache is the one that renews the cache's scales, as
    in the runs on word problems."""
    renews_scales = correction == TIS and precision.endswith(KV8) and precision in METHODS["fp8_rl"].precisions
    return "fp8_rl" if renews_scales else METHODS_OF[correction][0]


def _knobs(correction: str) -> list[str]:
    bounds = [f"knobs.IcePop.alpha={LEAST}", f"knobs.IcePop.beta={MOST}"]
    return {NONE: [], TIS: [f"knobs.TIS.cap={CAP}"], ICEPOP: bounds}[correction]


def verl(question: Question, precision: str, correction: str, ways: int = 1) -> dict[str, Any]:
    """Dotted keys of verl's own configuration, with their values; `ways`: GPUs of an engine. Raises ValueError for a
    format that verl does not sample in, for a correction that renews the scales of an FP8 cache, and for a batch that
    its GPUs cannot share evenly."""
    base, is_kv8 = precision.removesuffix(KV8), precision.endswith(KV8)
    if base not in ("bf16", VERL_FP8):
        raise ValueError(f"its rollout.quantization takes fp8 and torchao, not {base}; our trainer=verl does it")
    if is_kv8 and correction == TIS:
        raise ValueError(
            "its engine keeps the scales of an FP8 cache at 1, and this recipe renews them at every push; our "
            "trainer=verl does it"
        )
    _check_shared(question)
    group, at = group_of(question.batch), "actor_rollout_ref.rollout."
    values: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo",
        "data.train_batch_size": question.batch // group,
        "data.max_response_length": question.length,
        f"{at}name": "vllm", f"{at}n": group, f"{at}temperature": 1.0, f"{at}top_p": 1.0, f"{at}top_k": -1,
        f"{at}quantization": "fp8" if base == VERL_FP8 else None,
        f"{at}tensor_model_parallel_size": ways,
        f"{at}calculate_log_probs": True,
        "algorithm.rollout_correction.rollout_is": None if correction == NONE else "token",
        "algorithm.rollout_correction.rollout_is_threshold": f"{LEAST}_{MOST}" if correction == ICEPOP else CAP,
        "algorithm.rollout_correction.rollout_rs": None,
        "algorithm.rollout_correction.bypass_mode": False,
        "trainer.n_gpus_per_node": min(question.gpus, NODE),
        "trainer.nnodes": question.nodes,
    }  # fmt: skip
    if is_kv8:
        values["+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype"] = CUDA.kv[FP8_CACHE]
    return values


def trl(question: Question, precision: str, correction: str, ways: int = 1) -> dict[str, Any]:
    """Arguments of TRL's `GRPOConfig`; `ways`: GPUs of an engine. Raises ValueError for every format but BF16,
    and for a batch that its GPUs cannot share evenly."""
    if precision != "bf16":
        raise ValueError("GRPOConfig has no argument for a quantized rollout of a BF16 model")
    _check_shared(question)
    group = group_of(question.batch)
    return {
        "use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": ways, "vllm_enable_sleep_mode": True,
        "max_completion_length": question.length, "num_generations": group, "temperature": 1.0,
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": question.batch // question.gpus,
        "bf16": True,
        "vllm_importance_sampling_correction": correction != NONE,
        "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": CAP,
    }  # fmt: skip


def _check_shared(question: Question) -> None:
    if question.batch % question.gpus:
        raise ValueError(f"{question.gpus} GPUs cannot share {question.batch} answers evenly; give another --batch")


def group_of(batch: int) -> int:
    """Answers to a prompt: the largest of 8, 4 and 2 that divides the batch, else all of it."""
    return next((n for n in (GROUP, GROUP // 2, GROUP // 4) if batch % n == 0), batch)
