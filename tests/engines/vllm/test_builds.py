"""Plans that each build of vLLM takes and refuses, and in which words; nothing here starts an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.api import Plan
from harness.config.compose import check_supported, compose
from harness.config.load import load
from harness.engines.vllm import builds, settings
from harness.engines.vllm.builds import CPU, CUDA, Build, check_plan
from harness.numerics.formats import format_named
from tests.engines.vllm.vllm_cases import SHAPE, plan_of

NF4 = "vLLM's bitsandbytes loader cannot be reloaded in place, and later versions have none"
SILENT = (
    "4-bit activations have no kernel below compute capability 10.0: vLLM runs weight-only instead and says so nowhere"
)
REFUSED = [
    (CUDA, ("nf4",), f"rollout_weights=nf4: engine=vllm (cuda) cannot: {NF4}"),
    (CPU, ("nf4_dq",), f"rollout_weights=nf4_dq: engine=vllm (cpu) cannot: {NF4}"),
    (CUDA, ("mxfp8",), "rollout_weights=mxfp8_rceil: engine=vllm (cuda) cannot: its weights are made online from BF16 "
     "by vLLM's own rule, not sent as codes"),
    (CPU, ("mxfp4",), "rollout_weights=mxfp4_ct: engine=vllm (cpu) cannot: vLLM loads it for mixtures of experts and "
     "for emulation only"),
    (CUDA, ("int2_g32",), "rollout_weights=int2_g32: engine=vllm (cuda) cannot: this build has no kernel for it"),
    (CPU, ("int3_g32_asym",), "rollout_weights=int3_g32_asym: engine=vllm (cpu) cannot: this build has no kernel for "
     "it"),
    (CUDA, ("nvfp4", "nvfp4_act_token"), f"rollout_acts=nvfp4_act_token: engine=vllm (cuda) cannot: {SILENT}"),
    (CUDA, ("nvfp4", "nvfp4_act"), f"rollout_acts=nvfp4_act: engine=vllm (cuda) cannot: {SILENT}"),
    (CPU, ("nvfp4", "nvfp4_act"), "rollout_acts=nvfp4_act: engine=vllm (cpu) cannot: the CPU build has no kernel for "
     "4-bit activations"),
    (CPU, ("nvfp4",), "rollout_weights=nvfp4: engine=vllm (cpu) cannot: weight-only NVFP4 has a Marlin kernel alone, "
     "which is CUDA"),
    (CPU, ("int8_g128",), "rollout_weights=int8_g128: engine=vllm (cpu) cannot: the CPU kernel of weight-only integers "
     "takes 4 bits, not 8"),
    (CPU, ("e4m3_block", "e4m3_1x128"), "rollout_weights=e4m3_block: engine=vllm (cpu) cannot: its CPU kernel needs "
     "AMX tiles"),
    (CPU, ("e4m3_tensor", "e4m3_token"), "rollout_weights=e4m3_tensor: engine=vllm (cpu) cannot: its static "
     "quantization has no operator in the CPU build"),
    (CPU, ("bf16", None, "e5m2_kv"), "rollout_kv=e5m2_kv: engine=vllm (cpu) cannot: not offered; choose e4m3_kv"),
    (CUDA, ("bf16", None, "e5m2_kv"), "rollout_kv=e5m2_kv: nearest: e4m3_kv; valid: e4m3_kv"),
]  # fmt: skip
UNPAIRED = [
    (CUDA, "e4m3_channel", None, "base"),  # weight-only FP8 would need another kernel
    (CUDA, "e4m3_block", "e4m3_token", "e4m3_token"),
    (CUDA, "e4m3_block_ue8m0", "e4m3_1x128", "e4m3_1x128"),
    (CUDA, "int8_channel", "e4m3_token", "e4m3_token"),
    (CPU, "int4_g32_asym", None, "base"),
    (CPU, "int4_g16", None, "base"),
    (CPU, "int4_g32", "int8_token", "int8_token"),
    (CUDA, "nvfp4_torchao", None, "base"),
    (CPU, "bf16", "e4m3_token", "e4m3_token"),
    (CPU, "fp16", "bf16", "bf16"),
    (CPU, None, "e4m3_token", "e4m3_token"),  # no opinion on the weights: BF16
]


@pytest.mark.parametrize(("build", "formats", "said"), REFUSED, ids=[f"{b.name}-{f[-1]}" for b, f, _ in REFUSED])
def test_what_a_build_cannot_is_refused_in_one_line(build: Build, formats: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError) as error:
        check_plan(build, plan_of(*formats))
    assert str(error.value) == said


@pytest.mark.parametrize(("build", "weights", "acts", "shown"), UNPAIRED)
def test_pairs_outside_the_table_are_refused(build: Build, weights: str | None, acts: str | None, shown: str) -> None:
    with pytest.raises(ValueError) as error:
        check_plan(build, plan_of(weights, acts))
    valid = sorted(f"{w} with {a}" for w, a in build.pairs)
    kind = builds.kind_of(weights or "bf16")
    assert str(error.value) == f"rollout_weights={kind} with rollout_acts={shown}: valid pairs: {', '.join(valid)}"


def test_the_tables_pairs_are_these() -> None:
    common = {("bf16", "base"), ("fp16", "base"), ("fp32", "base"), ("e4m3_channel", "e4m3_token"),
              ("e4m3_channel_ct", "e4m3_token"), ("int8_channel", "int8_token"), ("int8_channel_ct", "int8_token"),
              ("int4_group", "base")}  # fmt: skip
    assert common == CPU.pairs
    more = {("e4m3_tensor", "e4m3_token"), ("e4m3_block", "e4m3_1x128"), ("int8_group", "base"), ("nvfp4", "base")}
    assert common | more == CUDA.pairs


@pytest.mark.parametrize("build", [CUDA, CPU], ids=["cuda", "cpu"])
def test_every_pair_of_the_table_is_taken_and_supported(build: Build) -> None:
    for kind, acts in sorted(build.pairs):
        names = [f"{kind[:4]}_g{size}{qat}" for size in (32, 64, 128) for qat in ("", "_qat")]
        for name in names if kind.endswith("_group") else [kind]:
            plan = plan_of(name, None if acts == "base" else acts, "e4m3_kv")
            check_plan(build, plan)
            wanted = {f"rollout_weights:{name}", "rollout_kv:e4m3_kv"} | (
                {f"rollout_acts:{acts}"} - {"rollout_acts:base"}
            )
            assert wanted <= builds.supports(build)
    check_plan(build, plan_of("bf16", "bf16"))
    check_plan(build, plan_of("fp16", "fp16"))
    check_plan(build, Plan())


def test_support_ends_at_the_table() -> None:
    assert {"sampler:cached", "adapters"} <= builds.supports(CPU)
    absent = {"sampler:trainer", "residual", "rollout_weights:nvfp4", "rollout_weights:int8_g128", "rollout_kv:e5m2_kv",
              "rollout_weights:int4_g32_asym", "rollout_acts:int4_group", "rollout_acts:base"}  # fmt: skip
    assert not absent & builds.supports(CPU)
    assert {"rollout_weights:nvfp4", "rollout_weights:int8_g128_qat"} <= builds.supports(CUDA)


def test_a_head_of_another_format_is_refused() -> None:
    config = load(["model=xs128", "method=fp32_head", "precision=fp8_channel"])
    with pytest.raises(ValueError, match=r"^lm_head=fp32: engine=vllm keeps the head in its base format; valid: bf16$"):
        check_plan(CPU, compose(config).plan)
    with pytest.raises(ValueError, match=r"^lm_head=int8_channel: engine=vllm keeps the head in its base format"):
        check_plan(CPU, plan_of("bf16", exceptions=(("lm_head.weight", format_named("int8_channel")),)))
    check_plan(CPU, plan_of("bf16", lm_head=format_named("bf16")))
    check_plan(CPU, plan_of("fp32", lm_head=format_named("fp32")))


@pytest.mark.parametrize("values", [{"sampler": "trainer"}, {"residual": 0.1}], ids=["sampler", "residual"])
def test_what_the_embedded_engine_alone_does_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="sampler=trainer and residual are the embedded engine's alone"):
        check_plan(CPU, plan_of("bf16", **values))


@pytest.mark.parametrize("base", [None, "bf16", "e4m3_channel"])
def test_exceptions_in_another_quantized_format_are_refused(base: str | None) -> None:
    acts = "e4m3_token" if base == "e4m3_channel" else None
    plan = plan_of(base, acts, exceptions=(("*.o_proj.weight", format_named("int4_g32")),))
    said = "exceptions: *.o_proj.weight as int4_g32; engine=vllm takes exceptions in its base format only"
    with pytest.raises(ValueError) as error:
        check_plan(CPU, plan)
    assert str(error.value) == said
    if base == "e4m3_channel":
        with pytest.raises(ValueError, match=r"exceptions: model.layers.0.self_attn.o_proj.weight as int4_g32;"):
            settings.quantization_config(plan, SHAPE)
        check_plan(CPU, replace(plan, exceptions=(("*.o_proj.weight", plan.rollout_weights),)))


SILENTLY_IGNORED = ["int8_per_channel_weight_only", "nvfp4_per_token", "experts_int8", "int8_per_token_head",
                    "int4_per_token_head", "turboquant_4bit_nc"]  # fmt: skip


@pytest.mark.parametrize("name", SILENTLY_IGNORED)
def test_names_that_vllm_accepts_and_ignores_cannot_be_asked_for(name: str) -> None:
    offered = set(CPU.kv.values()) | set(CUDA.kv.values()) | set(builds.supports(CPU)) | set(builds.supports(CUDA))
    assert not [word for word in offered if word.endswith(name)]
    with pytest.raises(ValueError, match=f"={name}: unknown; "):
        plan_of("bf16", None, name)


def test_a_method_is_refused_at_second_0_where_the_build_lacks_its_format() -> None:
    config = load(["model=xs128", "method=qerl", "precision=nvfp4"])
    composed = compose(config)
    check_supported(composed, builds.supports(CUDA), "vllm", frozenset())
    with pytest.raises(ValueError, match=r"engine=vllm: cannot do rollout_weights:nvfp4 of method qerl"):
        check_supported(composed, builds.supports(CPU), "vllm", frozenset())
