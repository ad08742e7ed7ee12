"""Weights under a live vLLM: swapped in place many times, refused, interrupted, damaged; and an engine's two ends."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from harness.api import Rollout
from harness.engines.embedded.engine import EmbeddedEngine
from harness.engines.vllm import kv, passport, push_by_reload, settings
from harness.engines.vllm.engine import VLLMEngine, start
from harness.engines.vllm.push_by_reload import IncompleteSwap
from harness.engines.vllm.weights import VLLMWeights
from tests.engines.engine_cases import EOS, PAD
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
    pointers,
    pushed_by,
    stream,
)

pytestmark = needs_vllm
A, B = model_of(0), model_of(1)


def fp8(live: LiveEngine) -> VLLMEngine:
    """The FP8 engine with the weights of A."""
    engine = live(plan_of(*FP8))
    engine.load_weights(stream(A))
    return engine


def sampled(engine: VLLMEngine) -> Rollout:
    return engine.generate(PROMPTS, num_samples=4, max_new_tokens=8, temperature=1.0, seed=2)


def same(a: Rollout, b: Rollout) -> bool:
    return torch.equal(a.token_ids, b.token_ids) and torch.equal(a.logp, b.logp)


def test_twenty_swaps_leave_memory_pointers_and_numbers_alone(live: LiveEngine) -> None:
    engine = live(plan_of(*FP8))
    engine.load_weights(stream(B))  # the first load into this process: nothing old to be left over
    fresh, addresses = sampled(engine), pointers(engine)
    passport_of_b = engine.realized_plan()
    for _ in range(4):
        for model in (A, B):
            engine.load_weights(stream(model))
    gc.collect()
    memory = psutil.Process().memory_info().rss
    for _ in range(10):
        for model in (A, B):
            engine.load_weights(stream(model))
    gc.collect()
    assert (psutil.Process().memory_info().rss - memory) / 2**20 < 4.0
    assert pointers(engine) == addresses
    assert same(sampled(engine), fresh)
    assert engine.realized_plan() == passport_of_b
    engine.load_weights(stream(A))
    assert not same(sampled(engine), fresh)


def test_the_same_weights_again_change_nothing_and_flips_are_the_embedded_engines(live: LiveEngine) -> None:
    engine, ours = fp8(live), EmbeddedEngine(SHAPE, plan_of(*FP8), eos_id=EOS, pad_id=PAD)
    before = sampled(engine)
    engine.load_weights(stream(A))
    assert engine.sync_metrics() == {"code_flip_rate": 0.0, "saturated_frac": 0.0}
    assert same(sampled(engine), before)
    ours.load_weights(stream(A))
    near = model_of(0)
    with torch.no_grad():
        for tensor in near.parameters():
            tensor.mul_(1 + 0.02 * torch.rand(tensor.shape, generator=torch.Generator().manual_seed(1)))
    for each in (engine, ours):
        each.load_weights(stream(near))
    flips = engine.sync_metrics()["code_flip_rate"]
    assert 0.05 < flips < 0.9
    assert flips == pytest.approx(ours.sync_metrics()["code_flip_rate"], abs=1e-9)


def test_a_bad_stream_leaves_the_old_weights_working(live: LiveEngine) -> None:
    engine = fp8(live)
    before, tensors = sampled(engine), list(stream(B))
    wrong = bad_streams(tensors) | {r"is in the stream twice": [*tensors, tensors[3]]}
    for said, bad in wrong.items():
        with pytest.raises(ValueError, match=said):
            engine.load_weights(iter(bad))
        assert engine.weights.state == "ready"
    assert same(sampled(engine), before)


@pytest.mark.parametrize("count", [1, 7, -1])
def test_an_interrupted_swap_is_never_sampled_from(live: LiveEngine, count: int) -> None:
    engine = fp8(live)
    before, addresses = sampled(engine), pointers(engine)
    with pytest.raises(IncompleteSwap, match="got no or only part of their tensors, the first is "):
        engine.weights.swap(list(pushed_by(engine.plan, B)[0].items())[:count])
    refused = r"^the last push did not end: call load_weights first$"
    for ask in (lambda: sampled(engine), engine.realized_plan, lambda: engine.calibrate_kv(PROMPTS)):
        with pytest.raises(RuntimeError, match=refused):
            ask()
    engine.load_weights(stream(A))
    assert same(sampled(engine), before) and pointers(engine) == addresses
    engine.realized_plan()


def test_a_stream_that_breaks_off_is_never_sampled_from(live: LiveEngine) -> None:
    engine = fp8(live)
    before = sampled(engine)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(pushed_by(engine.plan, B)[0].items())[:9]
        raise ConnectionError("the sender is gone")

    with pytest.raises(ConnectionError):
        engine.weights.swap(broken())  # pyright: ignore[reportArgumentType]
    with pytest.raises(RuntimeError, match=r"^the last push did not end: call load_weights first$"):
        sampled(engine)
    engine.load_weights(stream(A))
    assert same(sampled(engine), before)


def test_a_swap_whole_or_not_leaves_the_caches_scales_alone(live: LiveEngine) -> None:
    engine = fp8(live)
    modules = kv.attentions(engine.model)
    for layer, module in modules.items():
        kv.set_scales(module, {"k": 0.5 + layer, "v": 0.25})
    engine.load_weights(stream(B))
    wanted = {layer: {"q": 1.0, "k": 0.5 + layer, "v": 0.25} for layer in modules}
    assert kv.all_scales(engine.model) == wanted
    with pytest.raises(IncompleteSwap):
        engine.weights.swap(list(pushed_by(engine.plan, B)[0].items())[:7])
    engine.load_weights(stream(A))
    assert kv.all_scales(engine.model) == wanted
    for module in modules.values():
        kv.set_scales(module, dict.fromkeys(kv.ROLES, 1.0))


def test_a_push_that_does_not_arrive_is_found(live: LiveEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fp8(live)
    monkeypatch.setattr(push_by_reload, "swap", lambda model, config, tensors: None)
    with pytest.raises(RuntimeError, match=r"^model.embed_tokens.weight did not reach the engine: \d+ elements"):
        engine.load_weights(stream(B))
    with pytest.raises(RuntimeError, match=r"^the last push did not end: call load_weights first$"):
        sampled(engine)
    monkeypatch.setattr(VLLMWeights, "_compare", lambda *args: None)
    engine.load_weights(stream(B))
    with pytest.raises(RuntimeError, match=r"q_proj.weight is not the e4m3_channel tensor that was loaded: \d+ of \d+"):
        engine.realized_plan()


def test_live_weights_that_someone_changes_are_found(live: LiveEngine) -> None:
    engine = fp8(live)
    engine.realized_plan()
    layer: Any = dict(engine.model.named_modules())["model.layers.1.mlp.down_proj"]
    layer.weight_scale.data[5] *= 1.05
    with pytest.raises(RuntimeError, match=r"layers.1.mlp.down_proj.weight is not the e4m3_channel tensor that was lo"):
        engine.realized_plan()
    engine.load_weights(stream(A))
    engine.realized_plan()


def test_asleep_it_does_not_generate(live: LiveEngine) -> None:
    engine = fp8(live)
    before = sampled(engine)
    engine.sleep()
    with pytest.raises(RuntimeError, match=r"the engine is asleep: call wake\(\) first"):
        sampled(engine)
    engine.wake()
    assert same(sampled(engine), before)


def test_an_engine_ends_and_the_next_one_starts_in_the_same_process(live: LiveEngine) -> None:
    live.close()
    gc.collect()
    process = psutil.Process()
    before = {child.pid for child in process.children(recursive=True)}  # of tests that ran in this process earlier
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state()  # pyright: ignore
    threads, memory = torch.get_num_threads(), process.memory_info().rss
    engine = live(plan_of("bf16"))
    assert random.getstate() == states[0] and np.random.get_state()[1].tolist() == states[1]  # pyright: ignore
    assert torch.equal(torch.random.get_rng_state(), states[2]) and torch.get_num_threads() == threads
    with pytest.raises(RuntimeError, match=r"^the engine has no weights: call load_weights first$"):
        sampled(engine)
    engine.load_weights(stream(A))
    sampled(engine)
    held, folder = process.memory_info().rss, engine.folder.name
    assert {child.pid for child in process.children(recursive=True)} <= before
    engine.close()
    engine.close()
    gc.collect()
    assert {child.pid for child in process.children(recursive=True)} <= before
    assert not torch.distributed.is_initialized()
    assert process.memory_info().rss < held - 0.9 * (held - memory)
    assert held - memory > 2**29  # or there was nothing to give back
    assert not Path(folder).exists()
    with pytest.raises(RuntimeError, match=r"^the engine is closed$"):
        sampled(engine)
    live.engine = live.key = None


def test_a_failed_start_names_its_cause_and_harms_no_later_engine(live: LiveEngine, tmp_path: Any) -> None:
    live.close()
    settings.write_model_folder(tmp_path, SHAPE, plan_of("bf16"))
    arguments = settings.llm_arguments(tmp_path, SHAPE, plan_of("bf16"), live(plan_of("bf16")).build)
    live.close()
    with pytest.raises(
        ValueError, match=r"^engine=vllm: the engine died at start: ValidationError: .*; Input should be"
    ) as error:
        start(arguments | {"kv_cache_dtype": "no_such_cache"}, is_cpu=True)
    assert "\n" not in str(error.value)
    live(plan_of("bf16")).load_weights(stream(A))


def test_formats_that_vllm_takes_and_ignores_are_refused_by_what_its_kernels_answer(live: LiveEngine, tmp_path) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    live.close()
    plan = plan_of("bf16")
    settings.write_model_folder(tmp_path, SHAPE, plan)
    asked = settings.llm_arguments(tmp_path, SHAPE, plan, settings.installed_build(), max_batch=8)
    silent = {"quantization": "int8_per_channel_weight_only"}
    if not lacking("avx512f"):  # else vLLM itself refuses the cache
        silent["kv_cache_dtype"] = "int8_per_token_head"
    llm = start(asked | silent, is_cpu=True)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    model = worker.model_runner.get_model()
    with torch.no_grad(), set_current_vllm_config(worker.vllm_config):
        push_by_reload.swap(model, worker.vllm_config.model_config, pushed_by(plan, A)[0].items())
    everything = torch.arange(SHAPE.intermediate_size)
    down = dict(model.named_modules())["model.layers.0.mlp.down_proj"]
    exact = dict(A.named_parameters())["model.layers.0.mlp.down_proj.weight"].detach().bfloat16().float()
    assert torch.equal(passport.probe_weights(down, everything, torch.bfloat16), exact)  # nothing was quantized
    _, quantized = pushed_by(plan_of("int8_channel", "int8_token"), A)
    sent = {name: passport.sent_of(q, torch.bfloat16) for name, q in quantized.items()}
    with pytest.raises(RuntimeError, match="is not the int8_channel tensor that was loaded"):
        list(passport.weight_records(model, sent, torch.bfloat16))
    for module in kv.attentions(model).values():
        module.kv_cache_dtype = "int8_per_token_head"  # what vLLM itself calls it where it takes the name
    with pytest.raises(RuntimeError, match="kv_cache_dtype=int8_per_token_head, which is no format of a plan"):
        kv.cache_format(model, {"e4m3_kv": "fp8_e4m3"})
    llm.llm_engine.engine_core.shutdown()
    del llm, worker, model, down
    cleanup_dist_env_and_memory()
