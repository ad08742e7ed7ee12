"""`VLLMEngine.load_weights` as a trainer on the same device calls it: time, memory, the bandwidth limit, a broken push.

The trainer is a dictionary of random BF16 tensors. Left out: its own step, and what makes tensors whole in a sharded
one. The limit is a device copy that reads and writes, together, as many bytes as a push must.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from harness.api import Plan
from harness.devtools.bench import timing as clock
from harness.engines.vllm import memory, passport
from harness.engines.vllm import weights as live_weights
from harness.engines.vllm.engine import VLLMEngine
from harness.engines.weight_stream import read_stream
from harness.models.decoder import DecoderConfig, tensor_shapes
from harness.studies.throughput.shapes import plan_of, shape_of

REPEATS = 5
"""Repeats of every part that is timed alone."""
BROKEN_AT = 50
"""Call of the kernel at which a push is broken."""
PROMPTS = [[3 + (7 * i + j) % 200 for j in range(64)] for i in range(8)]


def trainer_tensors(config: DecoderConfig, device: str) -> dict[str, Tensor]:
    """Checkpoint name -> BF16 tensor: gains near 1, everything else normal with a deviation of 0.02."""
    g = torch.Generator(device).manual_seed(0)
    found: dict[str, Tensor] = {}
    for name, shape in tensor_shapes(config).items():
        draw = torch.randn(shape, generator=g, device=device, dtype=torch.bfloat16).mul_(0.02)
        found[name] = draw.add_(1.0) if name.endswith("norm.weight") else draw
    return found


def moved_bytes(config: DecoderConfig, plan: Plan) -> int:
    """Bytes that a push must read (BF16) and write (what the engine holds)."""
    return 2 * memory.num_parameters(config) + memory.weight_bytes(config, plan)


def limit(num_bytes: int, device: str) -> list[float]:
    """Seconds of a few copies on the device, of which each reads and writes `num_bytes` together."""
    source, target = (torch.empty(num_bytes // 2, dtype=torch.uint8, device=device).fill_(1) for _ in range(2))
    target.copy_(source)
    return [clock.seconds(lambda: target.copy_(source), device) for _ in range(REPEATS)]


def new_engine(size: str, precision: str, device: str, **options: Any) -> VLLMEngine:
    """An engine that ends no response by itself, 1024 tokens long at most. `options`: those of `VLLMEngine`."""
    given: dict[str, Any] = {"eos_id": -1, "pad_id": 0, "device": device, "max_length": 1024, "gpu_memory": 0.5}
    return VLLMEngine(shape_of(size), plan_of(precision), **(given | options))


def measure(size: str, precision: str, device: str, is_direct: bool | None, pushes: int) -> dict[str, Any]:
    """One engine, `pushes` timed pushes and what is asked of it afterwards. Raises ValueError as `VLLMEngine` does."""
    started = time.perf_counter()
    engine = new_engine(size, precision, device, max_batch=64, is_direct=is_direct)
    start_s = time.perf_counter() - started
    tensors = trainer_tensors(shape_of(size), device)

    def push() -> None:
        engine.load_weights(iter(tensors.items()))

    is_direct = engine.weights.writer is not None
    first_s = clock.seconds(push, device)
    found = timed_pushes(push, device, pushes)
    num_bytes = moved_bytes(shape_of(size), plan_of(precision))
    copies = limit(num_bytes, device)
    if device == "cuda":
        torch.cuda.empty_cache()
    found |= {
        "precision": precision, "way": "direct" if is_direct else "reload", "start_s": start_s, "first_s": first_s,
        "num_bytes": num_bytes, "limit": clock.summary(copies),
        "x_limit": found["push"]["median_ms"] / clock.summary(copies)["median_ms"],
        "inside_ms": inside(engine, push, device),
        "write": write_alone(engine, tensors, device) if is_direct else None,
        **answers(engine),
    }  # fmt: skip
    if engine.weights.writer is not None and engine.weights.writer.quantized:
        found["half_done"] = half_done(engine, tensors)
    engine.close()
    return found


def timed_pushes(push: Any, device: str, count: int) -> dict[str, Any]:
    """Wall time of every push, and the memory that the process holds after each."""
    times: list[float] = []
    held: list[int] = []
    is_cuda = device == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if is_cuda else 0
    for _ in range(count):
        times.append(clock.seconds(push, device))
        held.append(torch.cuda.memory_allocated() if is_cuda else 0)
    return {
        "push": clock.summary(times),
        "push_ms": [1e3 * value for value in times],
        "allocated_bytes": held if is_cuda else None,
        "grown_bytes": held[-1] - before if is_cuda else None,
        "is_flat": max(held[count // 2 :]) <= max(held[: count // 2]) if is_cuda else None,
        "peak_bytes": torch.cuda.max_memory_allocated() - before if is_cuda else None,
    }


def inside(engine: VLLMEngine, push: Any, device: str) -> dict[str, float]:
    """Milliseconds by stage of a push; the stages are waited for, so their sum exceeds that of an undisturbed one."""
    weights = engine.weights
    targets: dict[str, tuple[Any, str]] = {
        "read the stream": (live_weights, "read_stream"),
        "reference of a block or of all": (live_weights, "export"),
        "remember what was sent": (passport, "sent_of"),
        "forget prefixes": (engine.llm, "reset_prefix_cache"),
        "count flips": (weights, "_count"),
    }
    if weights.writer is not None:
        targets["write in place"] = (weights.writer, "write")
    else:
        targets |= {"reload": (weights, "swap"), "compare": (weights, "_compare")}
    totals: list[float] = []
    stages: list[Mapping[str, float]] = []
    for _ in range(3):
        with clock.watched(targets, device) as spent:
            totals.append(clock.seconds(push, device))
        stages.append(spent)
    return {"all": 1e3 * sorted(totals)[1]} | clock.breakdown(totals, stages)


def write_alone(engine: VLLMEngine, tensors: Mapping[str, Tensor], device: str) -> dict[str, Any]:
    """`Writer.write` by itself, its launches replayed: until it returns, until the device is done, the device's part;
    and until it returns with its launches made one by one."""
    weights, writer = engine.weights, engine.weights.writer
    assert writer is not None
    stream = read_stream(iter(tensors.items()), weights.shapes, weights.plan)

    def call() -> None:
        writer.write(stream)

    def launch() -> None:
        writer.forget()
        writer.write(stream)

    queued = [spent for _ in range(REPEATS) if (spent := clock.queued_seconds(call, device)) is not None]
    return {
        "host": clock.summary([clock.host_seconds(call, device) for _ in range(REPEATS)]),
        "whole": clock.summary([clock.seconds(call, device) for _ in range(REPEATS)]),
        "device": clock.summary(queued) if queued else None,
        "launched": clock.summary([clock.host_seconds(launch, device) for _ in range(REPEATS)]),
    }


def answers(engine: VLLMEngine) -> dict[str, Any]:
    """The passport, timed, and whether a generation has finite log-probs."""
    started = time.perf_counter()
    realized = engine.realized_plan()
    passport_s = time.perf_counter() - started
    return {"passport_s": passport_s, "passport_tensors": len(realized.weights),
            "formats": sorted({record.format for record in realized.weights}),
            "acts": sorted(set(realized.acts.values())), "kernels": sorted({r.kernel for r in realized.weights}),
            "has_finite_logp": has_finite_logp(engine)}  # fmt: skip


def has_finite_logp(engine: VLLMEngine) -> bool:
    """Check that the log-probs of one generation are finite."""
    rollout = engine.generate(PROMPTS, num_samples=1, max_new_tokens=16, temperature=1.0, seed=0)
    return bool(torch.isfinite(rollout.logp).all()) and bool((rollout.logp < 0).any())


def half_done(engine: VLLMEngine, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """A push whose kernel raises on its way: is it refused, and does a whole push give the same weights as before?"""
    from harness.kernels import quantize

    before = engine.realized_plan().weights
    write, calls = quantize.quantize_into, 0
    writer = engine.weights.writer
    assert writer is not None
    last = min(BROKEN_AT, sum(map(len, writer.quantized.values())) // 2)
    writer.forget()

    def breaking(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls >= last:
            raise RuntimeError("broken on purpose")
        write(*args, **kwargs)

    said = ["nothing", "nothing"]
    with patch.object(quantize, "quantize_into", breaking):
        try:
            engine.load_weights(iter(tensors.items()))
        except RuntimeError as error:
            said[0] = str(error)
    try:
        has_finite_logp(engine)
    except RuntimeError as error:
        said[1] = str(error)
    engine.load_weights(iter(tensors.items()))
    return {"broken_at": last, "push_said": said[0], "generate_said": said[1],
            "is_refused": said[0] == "broken on purpose" and "did not end" in said[1],
            "is_healed": engine.realized_plan().weights == before and has_finite_logp(engine)}  # fmt: skip
