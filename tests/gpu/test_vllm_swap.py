"""Swaps of weights under live vLLM engines with CUDA graphs: every format of the build, proven on its own kernels."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from harness.api import Rollout
from harness.engines.vllm.push_by_reload import live_experts
from harness.models.decoder import Decoder
from tests.engines.engine_cases import arrive, weights
from tests.gpu import vllm_cases
from tests.gpu.vllm_cases import (
    BIASED,
    FAMILIES,
    FORMATS,
    KV8,
    MIXTURES,
    Case,
    checkpoint_of,
    contents,
    gap,
    greedy,
    started,
)

pytestmark = [pytest.mark.gpu, vllm_cases.NEEDS_VLLM]
SAME_NATS = 1e-3
"""Greedy log-probs of one set of weights in two engines."""
GROWTH = 4096
"""Bytes: twenty tensors of the smallest size that the allocator gives would be more."""


@dataclass(frozen=True, kw_only=True)
class Live:
    """An engine that started with weights A, and what a fresh one says with weights B."""

    case: Case
    engine: Any
    a: Decoder
    b: Decoder
    first: Rollout
    """Responses after A, the first push."""
    fresh: Rollout | None
    """Responses after B by another engine that has seen nothing else."""


@pytest.fixture(scope="module", params=(*FORMATS, *KV8, *BIASED, *MIXTURES), ids=lambda case: case.name)
def live(request: pytest.FixtureRequest) -> Iterator[Live]:
    case, fresh = request.param, None
    a, b = vllm_cases.model_of(case, 1), vllm_cases.model_of(case, 2)
    if case in (*FORMATS, *MIXTURES):
        with started(FAMILIES[case.family], case.plan) as engine:
            engine.load_weights(weights(b))
            fresh = greedy(engine)
    with started(FAMILIES[case.family], case.plan) as engine:
        engine.load_weights(weights(a))
        engine.calibrate_kv(vllm_cases.PROMPTS)
        yield Live(case=case, engine=engine, a=a, b=b, first=greedy(engine), fresh=fresh)


def test_after_a_swap_it_is_the_engine_that_began_with_those_weights(live: Live) -> None:
    live.engine.load_weights(weights(live.b))
    swapped = greedy(live.engine)
    assert gap(swapped, live.first) > 0.05, f"A and B differ by {gap(swapped, live.first):.3g} nats alone"
    if live.fresh is not None:
        assert gap(swapped, live.fresh) <= SAME_NATS, f"{gap(swapped, live.fresh):.3g} nats from a fresh engine"
        same = (swapped.token_ids == live.fresh.token_ids).float().mean()
        assert same == 1.0, f"{float(same):.1%} of the greedy tokens are those of a fresh engine"
    live.engine.load_weights(weights(live.a))
    back = gap(greedy(live.engine), live.first)
    assert back <= SAME_NATS, f"back at A: {back:.3g} nats from the first time"


def test_generations_are_near_the_emulation(live: Live) -> None:
    live.engine.load_weights(weights(live.b))
    ours = vllm_cases.embedded(live.b, live.case.plan)
    for engine in (live.engine, ours):
        engine.calibrate_kv(vllm_cases.PROMPTS)
    near, far = (vllm_cases.mean_gap(greedy(live.engine), other) for other in (greedy(ours), live.first))
    live.engine.load_weights(weights(live.a))
    live.engine.calibrate_kv(vllm_cases.PROMPTS)
    bound = 0.3 if live.case in MIXTURES else 0.15  # a router that is nearly undecided takes another expert
    assert near < bound and near < far / 2, f"{near:.4f} nats from the emulation, {far:.4f} from other weights"


@pytest.mark.parametrize("count", [1, 7])
def test_a_push_in_pieces_is_a_whole_one(live: Live, count: int) -> None:
    live.engine.load_weights(weights(live.b))
    whole = contents(live.engine)
    live.engine.load_weights(weights(live.a))
    arrive(live.engine, weights(live.b), count)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in contents(live.engine).items())
    live.engine.load_weights(weights(live.a))


def test_nothing_moves_in_memory(live: Live) -> None:
    before = vllm_cases.pointers(live.engine)
    for model in (live.b, live.a):
        live.engine.load_weights(weights(model))
        after = vllm_cases.pointers(live.engine)
        moved = [f"{name}: {before.get(name)} -> {after.get(name)}" for name in before.keys() | after.keys()
                 if before.get(name) != after.get(name)]  # fmt: skip
        assert not moved, f"{len(moved)} of {len(before)} tensors moved: {'; '.join(sorted(moved)[:4])}"


def test_the_same_weights_again_change_no_bit(live: Live) -> None:
    live.engine.load_weights(weights(live.b))
    held, said = contents(live.engine), greedy(live.engine)
    live.engine.load_weights(weights(live.b))
    changed = {name: int((bits != held[name]).sum()) for name, bits in contents(live.engine).items()
               if not torch.equal(bits, held[name])}  # fmt: skip
    assert not changed, f"bytes that changed: {changed}"
    assert gap(greedy(live.engine), said) <= SAME_NATS
    flips = live.engine.sync_metrics()["code_flip_rate"]
    assert flips == 0.0 if live.case.is_quantized else flips != flips


def test_the_passport_is_the_plan_with_the_codes_of_the_emulation(live: Live) -> None:
    live.engine.load_weights(weights(live.b))
    passport = live.engine.realized_plan()
    ours = {record.name: record for record in vllm_cases.embedded(live.b, live.case.plan).realized_plan().weights}
    theirs = {record.name: record for record in passport.weights}
    assert ours.keys() == theirs.keys(), f"only in one: {sorted(ours.keys() ^ theirs.keys())}"
    other = {name: (ours[name], theirs[name]) for name in ours
             if (ours[name].hash, ours[name].format) != (theirs[name].hash, theirs[name].format)}  # fmt: skip
    assert not other, f"{len(other)} of {len(ours)} differ from the quantizer's: {list(other.values())[:2]}"
    linears = {name: record for name, record in theirs.items() if name.endswith("_proj.weight")}
    assert {record.format for record in linears.values()} == {live.case.weights}
    assert all(record.kernel for record in linears.values()), "a linear layer without the name of its kernel"
    base = "fp16" if live.case.weights == "fp16" else "bf16"
    assert set(passport.acts.values()) == {live.case.acts or base}, passport.acts
    assert passport.kv == live.case.kv
    assert passport.state["batch_invariant"] is False
    if vllm_cases.DEVICE == "cuda":
        assert passport.state["deep_gemm_e8m0"] is False, "scales would be rounded to powers of two"


def test_a_live_weight_that_was_changed_is_found(live: Live) -> None:
    live.engine.load_weights(weights(live.b))
    before = {record.name: record.hash for record in live.engine.realized_plan().weights}
    name = corrupt(live.engine)
    try:
        if live.case.is_quantized:
            with pytest.raises(RuntimeError, match="weights that were asked for differ"):
                live.engine.realized_plan()
        else:
            after = {record.name: record.hash for record in live.engine.realized_plan().weights}
            assert [changed for changed in before if after[changed] != before[changed]] == [f"{name}.weight"]
    finally:
        live.engine.load_weights(weights(live.a))
    live.engine.realized_plan()


def test_an_expert_that_was_changed_is_found(live: Live) -> None:
    if live.case not in MIXTURES:
        return
    live.engine.load_weights(weights(live.b))
    live.engine.realized_plan()
    name, layer = next(live_experts(live.engine.model))
    for fused in ("w13", "w2"):
        held = [p.data for key, p in layer.named_parameters() if key.startswith(f"{fused}_weight")]
        codes = max(held, key=lambda p: p.numel() * p.element_size())
        flip(codes, every=64, first=codes.element_size() - 1)  # of 16 bits the exponent: the lowest are within rounding
        with pytest.raises(RuntimeError, match=rf"{name}\.\d\.gate_proj.weight and its up and down are not the"):
            live.engine.realized_plan()
        live.engine.load_weights(weights(live.b))
        live.engine.realized_plan()
    live.engine.load_weights(weights(live.a))


def flip(codes: torch.Tensor, every: int, first: int = 0) -> None:
    """Flip one bit in so many bytes of a live tensor, from its byte `first` on."""
    with torch.inference_mode():
        memory = torch.empty(0, dtype=torch.uint8, device=codes.device).set_(codes.untyped_storage())
        start, size = codes.storage_offset() * codes.element_size(), codes.numel() * codes.element_size()
        memory[start + first : start + size : every].bitwise_xor_(4)


def corrupt(engine: Any) -> str:
    """Flip one bit in every 4096 bytes of the first o_proj, in the engine's memory; its name."""
    from harness.engines.vllm.push_by_reload import live_linears

    layer, name = next((layer, parts[0]) for _, layer, parts in live_linears(engine.model) if "o_proj" in parts[0])
    flip(max((p.data for p in layer.parameters()), key=lambda p: p.numel() * p.element_size()), every=4096)
    return name


def test_twenty_swaps_take_no_memory(live: Live) -> None:
    used: list[int] = []
    for i in range(22):
        live.engine.load_weights(weights((live.a, live.b)[i % 2]))
        gc.collect()
        used.append(torch.cuda.memory_allocated() if vllm_cases.DEVICE == "cuda" else 0)
    live.engine.load_weights(weights(live.a))
    growth = used[-1] - used[1]
    assert growth <= GROWTH, f"{growth} bytes more after 20 swaps: {[n - used[1] for n in used]}"
    assert gap(greedy(live.engine), live.first) <= SAME_NATS


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_half_a_swap_is_never_served(live: Live, share: float) -> None:
    pushed = checkpoint_of(live.engine, live.b)
    with pytest.raises(RuntimeError, match="layers got no or only part of their tensors"):
        live.engine.weights.swap(pushed[: int(share * len(pushed))])
    for refused in (lambda: greedy(live.engine), live.engine.realized_plan):
        with pytest.raises(RuntimeError, match=r"^the last push did not end: call load_weights first$"):
            refused()
    live.engine.load_weights(weights(live.a))
    live.engine.realized_plan()
    whole = gap(greedy(live.engine), live.first)
    assert whole <= SAME_NATS, f"after a torn swap and a whole one: {whole:.3g} nats from the first time"


def test_a_stream_that_lacks_a_tensor_leaves_the_old_weights(live: Live) -> None:
    live.engine.load_weights(weights(live.a))
    with pytest.raises(ValueError, match="missing"):
        live.engine.load_weights(iter(list(weights(live.b))[:-3]))
    assert gap(greedy(live.engine), live.first) <= SAME_NATS


def test_draws_repeat_and_sleep_changes_nothing(live: Live) -> None:
    words: dict[str, Any] = {"num_samples": 2, "max_new_tokens": 8, "temperature": 1.0}
    one, two = (live.engine.generate(vllm_cases.PROMPTS[:4], **words, seed=seed) for seed in (3, 4))
    assert not torch.equal(one.token_ids, two.token_ids)
    live.engine.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        greedy(live.engine)
    live.engine.wake()
    again = live.engine.generate(vllm_cases.PROMPTS[:4], **words, seed=3)
    assert torch.equal(one.token_ids, again.token_ids)
    assert float((one.logp - again.logp).abs().max()) <= SAME_NATS


@pytest.mark.parametrize("name", ["int4", "fp8_channel+kv8"])
def test_sleep_gives_memory_back_and_moves_nothing(name: str) -> None:
    words = [sys.executable, "-m", "tests.gpu.sleep_case", name]
    done = subprocess.run(words, capture_output=True, text=True, check=False)  # one such engine per process
    assert done.returncode == 0, done.stderr[-2000:]
    freed, moved, nats, refused, changed = done.stdout.splitlines()[-1].split("|")
    assert float(freed) > 1.0, f"{freed} GiB came back"
    assert (moved, changed) == ("0", "0")
    assert float(nats) <= SAME_NATS
    assert refused.startswith("can_sleep=True: this process has had another engine that can sleep")
