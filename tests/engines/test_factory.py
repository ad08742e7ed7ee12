"""The engine factory: the engine of a run, and refusals before anything is loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from harness.config.compose import compose
from harness.config.load import load
from harness.config.schema import Launch
from harness.engines import factory
from harness.engines.vllm import builds, settings
from harness.run.checks import check_device, check_place
from harness.trainers.local.trainer import EXTRAS


def checked(*words: str) -> None:
    config = load(["engine=vllm", *words])
    factory.check_engine(config, compose(config), EXTRAS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("method=bf16", "model=s"), "model.head_dim=16: vLLM's attention (cpu) takes 32, 64"),
        (("method=naive", "precision=nf4", "model=xs128"), "rollout_weights=nf4: engine=vllm (cpu) cannot"),
        (("method=naive", "precision=int8", "model=xs128"), "needs avx512_vnni, which this processor lacks"),
        (("method=zero_mismatch", "precision=fp32", "model=xs128"), "the embedded engine's alone"),
    ],
)
def test_what_vllm_cannot_do_is_one_line_before_anything_is_loaded(words, said, monkeypatch):
    monkeypatch.setattr(settings, "cpu_flags", lambda: frozenset({"avx2"}))
    with pytest.raises(ValueError) as caught:
        checked(*words)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("engine=embedded", "model=s"), "are one fused matrix with one input; all or none of them"),
        (("engine=vllm", "model=xs128", "trainer.device=cuda"), "are one fused matrix; all or none of them"),
    ],
)
def test_an_exception_that_splits_a_fused_matrix_is_refused_before_anything_is_loaded(words, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError) as caught:
        checked("method=flashrl", "precision=int8", 'knobs.Profile.keep_high=["*.q_proj.weight"]', *words)
    names = ", ".join(f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv")
    assert str(caught.value) == f"exceptions: {names} {said}"
    checked("method=flashrl", "precision=int8", 'knobs.Profile.keep_high=["*.self_attn.*"]', *words)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("engine.temperature=0.009",), "engine.temperature"),
        (("evaluations=[{task:sort,num:2},{task:sort,num:2,temperature:0.009}]",), "evaluations.1.temperature"),
    ],
)
def test_a_temperature_that_vllm_would_raise_is_refused(words, field):
    run = ("method=bf16", "model=xs128", "trainer.device=cuda")
    with pytest.raises(ValueError) as caught:
        checked(*run, *words)
    assert str(caught.value) == f"{field}=0.009: engine=vllm raises what is below 0.01 to it; valid: 0.01 or more"
    checked(*run, *(word.replace("0.009", "0.01") for word in words))
    checked(*run, "evaluations=[{task:sort,num:2,k:0,greedy:true,temperature:0.009}]")  # it has no effect there
    checked("engine=embedded", *run, *words)


def test_a_run_for_a_gpu_is_planned_without_one_and_not_started(monkeypatch):
    """The GPU's own table counts: what the CPU build lacks is planned, what no build has is refused."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(settings, "installed_build", lambda: pytest.fail("asked for what is installed here"))
    checked("method=naive", "precision=nvfp4", "model=s128", "trainer.device=cuda")
    checked("method=jet_rl", "precision=fp8_block", "model=m128", "trainer.device=cuda")
    with pytest.raises(ValueError, match=r"rollout_weights=int2.*engine=vllm \(cuda\) cannot"):
        checked("method=naive", "precision=int2", "model=s128", "trainer.device=cuda")
    with pytest.raises(ValueError, match=r"trainer.device=cuda: no CUDA device is visible"):
        check_device(load(["engine=vllm", "trainer.device=cuda"]))


def test_a_run_is_planned_where_no_vllm_is_installed_and_not_started(monkeypatch):
    def absent() -> builds.Build:
        raise ValueError("engine=vllm: vLLM is not installed")

    monkeypatch.setattr(settings, "installed_build", absent)
    config = load(["engine=vllm", "method=bf16", "model=xs128"])
    factory.check_engine(config, compose(config), EXTRAS)
    with pytest.raises(ValueError, match="vLLM is not installed"):
        factory.check_installed(config)
    with pytest.raises(ValueError, match="vLLM is not installed"):
        check_place(config, Launch())
    factory.check_installed(load(["engine=embedded", "method=bf16"]))


@pytest.mark.parametrize(
    ("build", "device", "said"),
    [
        (
            builds.CPU,
            "cuda",
            r"^trainer\.device=cuda: the installed vLLM is the CPU build; valid: trainer\.device=cpu$",
        ),
        (
            builds.CUDA,
            "cpu",
            r"^trainer\.device=cpu: the installed vLLM is the CUDA build; valid: trainer\.device=cuda$",
        ),
    ],
)
def test_a_build_for_another_device_is_not_started(build, device, said, monkeypatch):
    monkeypatch.setattr(settings, "installed_build", lambda: build)
    with pytest.raises(ValueError, match=said):
        factory.check_installed(load(["engine=vllm", "method=bf16", f"trainer.device={device}"]))


def test_what_it_can_do_passes(monkeypatch):
    monkeypatch.setattr(settings, "cpu_flags", lambda: frozenset({"avx2"}))
    checked("method=flashrl", "precision=fp8_channel", "model=xs128")
    monkeypatch.setattr(settings, "cpu_flags", lambda: frozenset({"avx512f", "avx512_vnni"}))
    checked("method=qurl", "precision=int8+kv8", "model=s128")


def test_the_embedded_engine_is_asked_as_before():
    config = load(["method=naive", "precision=int4"])
    factory.check_engine(config, compose(config), EXTRAS)
    composed = compose(config)
    with pytest.raises(ValueError, match=r"engine=embedded: cannot do .*nothing"):
        odd = replace(composed.plan.rollout_weights, name="nothing")
        factory.check_engine(config, replace(composed, plan=replace(composed.plan, rollout_weights=odd)), EXTRAS)
