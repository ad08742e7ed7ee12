"""A push that arrives in pieces: the same engine as after a whole one, from memory that is used again at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.api import Passport, Plan, Rollout
from harness.engines.vllm import push_by_kernels
from harness.engines.vllm.engine import VLLMEngine
from harness.engines.vllm.streamed_push import Arrival, unit_of
from harness.models.adapters import named_weights
from harness.models.decoder import tensor_shapes
from harness.numerics.formats import format_named
from harness.numerics.quantize import quantize
from tests.engines.engine_cases import arrive, pieces
from tests.engines.vllm.vllm_cases import (
    FP8,
    PROMPTS,
    SHAPE,
    LiveEngine,
    bad_streams,
    lacking,
    model_of,
    needs_vllm,
    plan_of,
    stream,
)

pytestmark = needs_vllm
A, B = model_of(0), model_of(1)
NO_INT4, NO_INT8 = lacking("avx512f"), lacking("avx512_vnni")
BLOCK = sum(math.prod(s) for n, s in tensor_shapes(SHAPE).items() if n.startswith("model.layers.0."))


def seen(engine: VLLMEngine) -> tuple[Passport, Mapping[str, float], Rollout]:
    """Passport, calibration and responses of an engine."""
    rollout = engine.generate(PROMPTS, num_samples=4, max_new_tokens=8, temperature=1.0, seed=2)
    return engine.realized_plan(), engine.sync_metrics(), rollout


def assert_same(a: tuple[Passport, Mapping[str, float], Rollout], b: tuple[Passport, Mapping[str, float], Rollout]):
    assert a[0] == b[0] and a[1] == b[1]
    assert torch.equal(a[2].token_ids, b[2].token_ids) and torch.equal(a[2].logp, b[2].logp)


@pytest.mark.parametrize(
    "names",
    [(None,), FP8,
     pytest.param(("int8_channel", "int8_token"), marks=pytest.mark.skipif(bool(NO_INT8), reason=NO_INT8 or "it has")),
     pytest.param(("int4_g32",), marks=pytest.mark.skipif(bool(NO_INT4), reason=NO_INT4 or "it has"))],
    ids=["bf16", "fp8", "int8", "int4"],
)  # fmt: skip
@pytest.mark.parametrize("count", [1, 5, 100])
def test_it_ends_where_a_whole_push_ends(live: LiveEngine, names: tuple[str, ...], count: int) -> None:
    engine = live(plan_of(*names))
    engine.load_weights(stream(A))
    engine.load_weights(stream(B))
    wanted = seen(engine)
    engine.load_weights(stream(A))
    most = arrive(engine, stream(B), count)
    assert_same(seen(engine), wanted)
    assert most <= BLOCK


def test_given_scales_are_taken_as_they_are(live: LiveEngine) -> None:
    engine = live(plan_of(*FP8))
    scales = {name: 1.5 * quantize(tensor.to(torch.bfloat16), format_named(FP8[0])).scale
              for name, tensor in stream(A) if name.endswith("_proj.weight")}  # fmt: skip
    given: list[tuple[str, torch.Tensor]] = []
    for name, tensor in stream(B):
        given += [(f"{name}_scale", scales[name])] if name in scales else []
        given.append((name, tensor))
    engine.load_weights(iter(given))
    wanted = seen(engine)
    engine.load_weights(stream(A))
    arrive(engine, given, 3)
    passport, metrics, rollout = seen(engine)
    assert metrics["saturated_frac"] == wanted[1]["saturated_frac"] > 0
    assert_same((passport, wanted[1], rollout), wanted)


def test_a_bad_stream_leaves_the_old_weights_working(live: LiveEngine) -> None:
    engine = live(plan_of(*FP8))
    engine.load_weights(stream(A))
    before, tensors = seen(engine), list(stream(B))
    late = ("model.layers.0.mlp.up_proj.weight_scale", torch.ones(384, 1))
    wrong = bad_streams(tensors) | {
        r"missing model.layers.1.mlp.up_proj.weight; unexpected none":
            [(n, t) for n, t in tensors if n != "model.layers.1.mlp.up_proj.weight"],
        r"is in the stream twice": [*tensors[:4], tensors[3]],
        r"missing none; unexpected model.layers.0.mlp.up_proj.weight_scale": [*tensors, late],
    }  # fmt: skip
    for said, bad in wrong.items():
        with pytest.raises(ValueError, match=said):
            arrive(engine, bad, 100)
        assert engine.weights.state == "ready"
    assert_same(seen(engine), before)


def test_where_it_is_written_at_once_a_bad_stream_is_never_sampled_from(live: LiveEngine) -> None:
    plan = Plan()
    engine = live(plan)
    engine.load_weights(stream(B))
    wanted = seen(engine)
    engine.load_weights(stream(A))
    first = seen(engine)
    engine.weights.writer = push_by_kernels.Writer(plan, {}, engine.weights.plain())
    try:
        assert arrive(engine, stream(B), 2) <= BLOCK
        passport, _, rollout = seen(engine)
        assert_same((passport, wanted[1], rollout), wanted)
        with pytest.raises(ValueError, match=r"missing model.norm.weight; unexpected none"):
            arrive(engine, list(stream(A))[:-1], 2)
        with pytest.raises(RuntimeError, match=r"^the last push did not end: call load_weights first$"):
            seen(engine)
        arrive(engine, stream(A), 100)
        passport, _, rollout = seen(engine)
        assert_same((passport, first[1], rollout), first)
    finally:
        engine.weights.writer = None


def test_companions_follow_their_weights() -> None:
    names = [name for name, _ in named_weights(A)]
    assert names == [name for name, _ in stream(A)]
    A.model.layers[0].mlp.up_proj.register_buffer("weight_scale", torch.ones(384, 1))
    try:
        beside = [name for name, _ in named_weights(A)]
    finally:
        del A.model.layers[0].mlp.up_proj.weight_scale
    at = beside.index("model.layers.0.mlp.up_proj.weight_scale")
    assert beside[at - 1] == "model.layers.0.mlp.up_proj.weight" and len(beside) == len(names) + 1


@pytest.mark.parametrize(
    ("name", "unit"),
    [("model.layers.11.self_attn.q_proj.weight_scale", "model.layers.11"), ("model.norm.weight", "model.norm"),
     ("lm_head.weight_scale", "lm_head"), ("model.embed_tokens.weight", "model.embed_tokens")],
)  # fmt: skip
def test_units(name: str, unit: str) -> None:
    assert unit_of(name) == unit


@pytest.mark.parametrize("is_late", [False, True])
def test_adapters_and_scales_of_the_cache_may_come_with_their_block_or_behind_all(is_late: bool) -> None:
    plan, taken = plan_of(*FP8[:2], "e4m3_kv"), list[Any]()
    weights: Any = SimpleNamespace(
        plan=plan, shapes=tensor_shapes(SHAPE), writer=None, device=torch.device("cpu"),
        plain=lambda: ((name, tensor) for name, tensor in stream(A)),
        check_beside=lambda rest: taken.append(dict(rest.adapters)), take_over=lambda *given: taken.append(given),
    )  # fmt: skip
    small = {
        "model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(2, 128),
        "model.layers.1.mlp.up_proj.lora_B.weight": torch.ones(384, 2),
        "model.layers.0.self_attn.k_scale": torch.tensor(0.5),
        "model.layers.1.self_attn.v_scale": torch.tensor(0.25),
    }
    first = next(n for n, (name, _) in enumerate(stream(B)) if name.startswith("model.layers.1."))
    given = list(stream(B))
    block = [(name, tensor) for name, tensor in small.items() if ".0." in name]
    rest = [(name, tensor) for name, tensor in small.items() if ".0." not in name]
    order = [*given, *small.items()] if is_late else [*given[:first], *block, *rest, *given[first:]]
    arrival = Arrival(weights)
    for piece in pieces(order, 3):
        arrival.take(piece)
    arrival.end()
    (adapters, (pushed, others)) = taken
    assert {name: tensor.tolist() for name, tensor in {**adapters, **others.kv}.items()} == {
        name: tensor.tolist() for name, tensor in small.items()
    }
    assert sorted(pushed.quantized) == sorted(name for name in weights.shapes if name.endswith("_proj.weight"))


def test_what_waits_is_copied_once_and_in_the_bits_that_the_engine_holds() -> None:
    """Weights of an FP8 block wait as they come, what is not quantized in the engine's bfloat16."""
    weights: Any = SimpleNamespace(
        plan=plan_of(*FP8), shapes=tensor_shapes(SHAPE), writer=None, device=torch.device("cpu"),
        plain=lambda: ((name, t.to(torch.bfloat16)) for name, t in stream(A) if not name.endswith("_proj.weight")),
    )  # fmt: skip
    arrival, lent = Arrival(weights), [(n, t.detach().clone()) for n, t in stream(B) if n.startswith("model.layers.0.")]
    arrival.take(lent[:3])
    first = [tensor.data_ptr() for _, tensor in arrival.waiting]
    arrival.take(lent[3:])
    assert [tensor.data_ptr() for _, tensor in arrival.waiting][:3] == first
    whole = {name: tensor.clone() for name, tensor in lent}
    for _, tensor in lent:
        tensor.zero_()
    assert [name for name, _ in arrival.waiting] == list(whole)
    for name, tensor in arrival.waiting:
        assert tensor.dtype == (torch.float32 if name.endswith("_proj.weight") else torch.bfloat16)
        assert torch.equal(tensor, whole[name].to(tensor.dtype))
