"""The FP8 cache of live vLLM engines with CUDA graphs: kernels read the scales that we set, and those are right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.api import KVProtocol, Rollout
from harness.models.decoder import Decoder
from harness.numerics.kv_scales import INFERENCE_DIVISOR, MARGIN, Role, kv_amaxes, scale_names
from tests.engines.engine_cases import weights
from tests.gpu import vllm_cases
from tests.gpu.vllm_cases import FAMILIES, KV8, LONG, Case, gap, greedy, mean_gap, started

pytestmark = [pytest.mark.gpu, vllm_cases.NEEDS_VLLM]
TOLERANCE = {"bf16+kv8": 0.04, "fp8_channel+kv8": 0.10}
"""Relative, of a largest magnitude against the float32 decoder's."""


@dataclass(frozen=True, kw_only=True)
class Live:
    """An engine with an FP8 cache and its weights."""

    case: Case
    engine: Any
    model: Decoder
    eager: Rollout
    """Responses of an engine without graphs under scales that are too small by 16."""


@pytest.fixture(scope="module", params=KV8, ids=lambda case: case.name)
def live(request: pytest.FixtureRequest) -> Iterator[Live]:
    model = vllm_cases.model_of(request.param, 1)
    with started(FAMILIES[request.param.family], request.param.plan, is_eager=True) as engine:
        engine.load_weights(weights(model))
        engine.calibrate_kv(LONG)
        rescale(engine, 1 / 16)
        eager = greedy(engine, LONG)
    with started(FAMILIES[request.param.family], request.param.plan) as engine:
        engine.load_weights(weights(model))
        yield Live(case=request.param, engine=engine, model=model, eager=eager)


def rescale(engine: Any, factor: float) -> None:
    """Multiply the scales of K and V in every layer; what is cached stays."""
    from harness.engines.vllm import kv

    found = kv.all_scales(engine.model)
    for layer, module in kv.attentions(engine.model).items():
        scales = found[layer]
        kv.set_scales(module, {role: scales[role] * factor for role in ("k", "v")})


def read(engine: Any) -> dict[int, dict[Role, float]]:
    """The scales of every layer."""
    from harness.engines.vllm import kv

    return kv.all_scales(engine.model)


@torch.no_grad()
def amaxes(model: Decoder) -> dict[int, dict[Role, Tensor]]:
    """Largest magnitudes by layer and role over LONG in the float32 decoder."""
    ids, seen = torch.tensor(LONG), list[Tensor]()
    found = kv_amaxes(model, ids, torch.full((len(ids),), ids.shape[1]), rows=len(ids))
    handles = [layer.self_attn.core.register_forward_pre_hook(lambda _, args: seen.append(args[0].abs().amax()))
               for layer in model.model.layers]  # fmt: skip
    model.hidden(ids)
    for handle in handles:
        handle.remove()
    names = {layer: scale_names(layer) for layer in range(len(seen))}
    return {layer: {"q": seen[layer], "k": found[own["k"]][0], "v": found[own["v"]][0]} for layer, own in names.items()}


@pytest.mark.parametrize("protocol", ["trainer", "inference"])
def test_calibration_sees_the_magnitudes_of_the_float32_decoder(live: Live, protocol: KVProtocol) -> None:
    live.engine.calibrate_kv(LONG, protocol)
    scales, reference = read(live.engine), amaxes(live.model)
    assert scales.keys() == reference.keys()
    off: dict[tuple[int, Role], float] = {}
    for layer, by_role in reference.items():
        for role, amax in by_role.items():
            wanted = float(amax) * MARGIN / 448 if protocol == "trainer" else float(amax) / INFERENCE_DIVISOR[role]
            if role == "q" and not live.engine.build.quantizes_queries:
                wanted = 1.0
            off[layer, role] = scales[layer][role] / wanted - 1
    worst = max(off.values(), key=abs)
    assert abs(worst) <= TOLERANCE[live.case.name], f"{worst:+.2%} at worst; all: {off}"
    assert min(abs(scale - 1) for own in scales.values() for role, scale in own.items() if role != "q") > 0.5


def test_the_passport_carries_the_scales(live: Live) -> None:
    live.engine.calibrate_kv(LONG)
    passport = live.engine.realized_plan()
    assert passport.kv == "e4m3_kv"
    assert passport.state["kv_scales"] == {str(layer): scales for layer, scales in read(live.engine).items()}


def test_scales_survive_a_push_and_a_given_one_is_taken(live: Live) -> None:
    live.engine.calibrate_kv(LONG)
    before = read(live.engine)
    live.engine.load_weights(weights(live.model))
    assert read(live.engine) == before
    given = [("model.layers.1.self_attn.k_scale", torch.tensor(0.125))]
    live.engine.load_weights(iter([*weights(live.model), *given]))
    assert read(live.engine)[1]["k"] == 0.125
    assert read(live.engine)[0] == before[0] and read(live.engine)[1]["v"] == before[1]["v"]


def test_kernels_read_the_scales_that_are_set(live: Live) -> None:
    """Twice the scale for writing and reading alike is the same number in a float format; twice for reading alone,
    of prefixes that were cached before, doubles K and V."""
    live.engine.calibrate_kv(LONG)
    first = greedy(live.engine, LONG)
    cached = greedy(live.engine, LONG)
    rescale(live.engine, 2.0)
    stale = greedy(live.engine, LONG)
    live.engine.llm.reset_prefix_cache()
    both = greedy(live.engine, LONG)
    again, doubled, alike = (mean_gap(other, first) for other in (cached, stale, both))
    said = f"nats from the first: prefixes cached {again:.4f}, read at twice the scale {doubled:.4f}, both {alike:.4f}"
    assert doubled > 0.1 and doubled > 5 * max(again, alike), said
    assert max(again, alike) < 0.1, said


def test_graphs_read_the_live_scales_as_eager_kernels_do(live: Live) -> None:
    """Scales that are too small by 16 saturate K and V alike with and without graphs."""
    live.engine.calibrate_kv(LONG)
    right = greedy(live.engine, LONG)
    rescale(live.engine, 1 / 16)
    wanted = read(live.engine)
    live.engine.llm.reset_prefix_cache()
    clipped = greedy(live.engine, LONG)
    near, far = mean_gap(clipped, live.eager), mean_gap(clipped, right)
    assert far > 0.1, f"saturated K and V change only {far:.4f} nats"
    assert near < far / 4, f"graphs to eager {near:.4f} nats, wrong scales to right ones {far:.4f}"
    live.engine.calibrate_kv(LONG)
    healed = gap(greedy(live.engine, LONG), right)
    assert healed <= 1e-3, f"calibrated again: {healed:.3g} nats from before"
    live.engine.load_weights(stream_with(live, wanted))
    assert {layer: scales["k"] for layer, scales in read(live.engine).items()} == {
        layer: pytest.approx(scales["k"]) for layer, scales in wanted.items()
    }
    pushed = greedy(live.engine, LONG)
    assert decoded_gap(pushed, clipped) <= 1e-3, f"scales through the stream: {decoded_gap(pushed, clipped):.3g} nats"


def stream_with(live: Live, scales: dict[int, dict[Role, float]]) -> Iterator[tuple[str, Tensor]]:
    """The weights, then scales of K and V."""
    yield from weights(live.model)
    for layer, own in scales.items():
        for role in ("k", "v"):
            yield scale_names(layer)[role], torch.tensor(own[role])


def decoded_gap(a: Rollout, b: Rollout) -> float:
    """`gap` of the tokens that the graphs computed: all but the first."""
    return float(((a.logp - b.logp).abs() * vllm_cases.same_context(a, b))[:, 1:].max())
