"""QeRL's rollout on live kernels: adapters over a 4-bit base, and noise on norm gains that 16 bits could not hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.api import Plan, Step
from harness.engines.embedded.engine import EmbeddedEngine
from harness.models.decoder import Decoder, tensor_shapes
from harness.numerics.formats import Adapters
from methods.qerl import AQN
from methods.qlora import NORMS
from tests.engines.engine_cases import weights
from tests.gpu import vllm_cases
from tests.gpu.vllm_cases import FORMATS, PROMPTS, QWEN3, Case, greedy, mean_gap, started

pytestmark = [pytest.mark.gpu, vllm_cases.NEEDS_VLLM]
ADAPTERS = Adapters(rank=8, alpha=16.0)
CASES = [case for case in FORMATS if case.name in ("nvfp4", "int4")]


@dataclass(frozen=True, kw_only=True)
class Live:
    """An engine with adapters and float32 gains, which keeps whole distributions."""

    case: Case
    plan: Plan
    engine: Any
    model: Decoder


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def live(request: pytest.FixtureRequest) -> Iterator[Live]:
    plan = replace(request.param.plan, adapters=ADAPTERS, exceptions=AQN().plan(Plan()).exceptions)
    with started(QWEN3, plan, keeps_log_probs=True) as engine:
        yield Live(case=request.param, plan=plan, engine=engine, model=vllm_cases.model_of(request.param, 1))


def adapters(scale: float) -> dict[str, Tensor]:
    """Random adapters of every linear; `scale` 0: none that act."""
    draws, out = torch.Generator().manual_seed(5), dict[str, Tensor]()
    for name, shape in tensor_shapes(QWEN3).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in ADAPTERS.targets:
            out[f"{module}.lora_A.weight"] = torch.randn(ADAPTERS.rank, shape[1], generator=draws) * 0.1
            out[f"{module}.lora_B.weight"] = scale * torch.randn(shape[0], ADAPTERS.rank, generator=draws) * 0.03
    return out


def first_distributions(engine: Any) -> Tensor:
    """[prompts, V] log-probs after the prompts alone."""
    out = engine.generate(PROMPTS, num_samples=1, max_new_tokens=2, temperature=1.0, seed=0)
    return out.log_probs[:, 0].cpu()


def emulated(live: Live, scale: float) -> EmbeddedEngine:
    """The emulation with the same adapters."""
    engine = EmbeddedEngine(QWEN3, live.plan, eos_id=vllm_cases.EOS, pad_id=vllm_cases.PAD, keeps_log_probs=True)
    engine.load_weights(iter([*weights(live.model), *adapters(scale).items()]))
    return engine


def test_every_push_serves_its_own_adapters(live: Live) -> None:
    plain = first_distributions(emulated(live, 0.0))
    for scale in (1.0, 2.0, 0.0, 1.0):
        live.engine.load_weights(iter([*weights(live.model), *adapters(scale).items()]))
        wanted, said = first_distributions(emulated(live, scale)), first_distributions(live.engine)
        near, effect = float((said - wanted).abs().mean()), float((wanted - plain).abs().mean())
        assert near < 0.1 * effect + 0.03, f"scale {scale}: {near:.4f} nats from the emulation, effect {effect:.4f}"
        assert (effect > 0.2) == (scale > 0), f"scale {scale}: an effect of {effect:.4f} nats"


def test_decoding_reads_the_same_gains_as_prompts_do(live: Live) -> None:
    """A graph that was captured before the gains were widened would read their old memory from the second token on."""
    live.engine.load_weights(iter([*weights(live.model), *adapters(1.0).items()]))
    said = {scale: greedy(emulated(live, scale)) for scale in (1.0, 0.0)}
    near, far = (mean_gap(greedy(live.engine), said[scale]) for scale in (1.0, 0.0))
    assert near < 0.15 and near < far / 2, f"{near:.4f} nats from the emulation, {far:.4f} from other adapters"


def test_the_base_below_keeps_its_codes(live: Live) -> None:
    live.engine.load_weights(iter([*weights(live.model), *adapters(1.0).items()]))
    theirs = {record.name: record for record in live.engine.realized_plan().weights}
    ours = {record.name: record for record in emulated(live, 1.0).realized_plan().weights}
    assert ours.keys() == theirs.keys(), f"only in one: {sorted(ours.keys() ^ theirs.keys())}"
    base = [name for name in ours if ".lora_" not in name]
    other = [(ours[name], theirs[name]) for name in base if ours[name].hash != theirs[name].hash]
    assert not other, f"{len(other)} of {len(base)} differ from the quantizer's: {other[:2]}"
    assert {theirs[name].format for name in base if name.endswith("_proj.weight")} == {live.case.weights}
    assert {theirs[name].format for name in base if name.endswith(NORMS)} == {"fp32"}


def test_twenty_pushes_of_adapters_take_no_memory(live: Live) -> None:
    used: list[int] = []
    for i in range(22):
        live.engine.load_weights(iter([*weights(live.model), *adapters(float(i % 2)).items()]))
        used.append(torch.cuda.memory_allocated() if vllm_cases.DEVICE == "cuda" else 0)
    growth = used[-1] - used[1]
    assert growth <= 4096, f"{growth} bytes more after 20 pushes: {[n - used[1] for n in used]}"


@pytest.mark.parametrize("index", [10, 50, 99])
def test_planned_noise_on_the_gains_is_what_arrives(live: Live, index: int) -> None:
    part, memory, step = AQN(), dict[str, float](), Step(index=index, total=100, seed=7)
    live.engine.load_weights(iter([*weights(live.model), *adapters(0.0).items()]))
    clean = first_distributions(live.engine)
    stream = part.sync(weights(live.model), step, live.plan, {}, memory)
    live.engine.load_weights(iter([*stream, *adapters(0.0).items()]))
    held, sent = dict(live.engine.model.named_parameters()), dict(weights(live.model))
    noise = {
        name: held[name].detach().cpu().double() - sent[name].double() for name in sent if name.endswith("norm.weight")
    }
    acting = torch.cat([z for name, z in noise.items() if name.endswith(NORMS)])
    sigma, planned = float(acting.std(correction=0)), part.sigma(step)
    assert abs(sigma / planned - 1) < 0.08, f"sigma {sigma:.4g} in the engine, {planned:.4g} planned"
    assert abs(sigma / memory["sigma_realized"] - 1) < 1e-3, f"{sigma:.6g} in the engine, {memory} logged"
    assert all(not z.any() for name, z in noise.items() if not name.endswith(NORMS)), "noise on other norms"
    change = float((first_distributions(live.engine) - clean).abs().mean())
    assert 0 < change < 1, f"sigma {planned:.2g} changes log-probs by {change:.4g} nats"
