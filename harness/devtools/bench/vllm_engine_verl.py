"""verl 0.9.1's own push into a live vLLM engine, in one process: its code, called as its worker is.

The engine is vLLM started as `rollout.quantization=fp8` starts it, with verl's worker extension and verl's patches.
    EXTENSION: `update_weights_from_ipc` of the extension through vLLM's `collective_rpc`, fed by verl's
        `BucketedWeightSender` from a second thread over ZMQ: copies into a 2 GiB bucket, quantizer, loaders, staging
        and post-processing before and after, cache reset.
    FUNCTIONS: its quantizer, loaders, staging and post-processing behind copies into a bucket that is there already;
        no ZMQ, no threads.
Left out, all in verl's favour: Ray's calls, a second process, opening CUDA IPC handles (a bucket's handle is passed on
as the tensor), the cast of float32 master weights, making sharded tensors whole, waking the engine.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from harness.devtools.bench import timing as clock
from harness.devtools.bench.runner import read_found
from harness.devtools.bench.vllm_engine_push import trainer_tensors
from harness.engines.vllm import settings
from harness.engines.vllm.engine import start
from harness.models.decoder import DecoderConfig
from harness.numerics.formats import format_named
from harness.numerics.quantize import quantize
from harness.studies.throughput.shapes import plan_of, shape_of

BUCKET = 2048 << 20
"""Bytes; verl's default `update_weights_bucket_megabytes`."""
WARM_UP, REPEATS = 2, 5
PATIENCE_MS = 60_000
"""That one side of the transport waits for the other, which may have died."""
EXTENSION, FUNCTIONS = "worker extension, sender in a thread", "its functions behind buckets by hand"
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
"""verl/workers/rollout/vllm_rollout/vllm_async_server.py, `_apply_quantization`."""
TRANSPORT = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer"
WORKER = "verl.workers.rollout.vllm_rollout.utils"
QUANT = "verl.utils.vllm.vllm_quant_utils"
Save = Callable[[dict[str, Any]], None]


def measure(size: str, device: str, save: Save) -> dict[str, Any]:
    """One engine, both ways. `save`: is given what there is after each. Raises ValueError where verl, or the device,
    is not there."""
    package = find_spec("verl")
    if package is None or package.origin is None:
        raise ValueError("verl is not importable; install the extra gpu, or put the folder of verl first on PYTHONPATH")
    if device != "cuda" or not torch.cuda.is_available():
        raise ValueError("--device: verl's FP8 way needs cuda")
    settings.prepare_environment()
    os.environ["VERL_RAY_JOB_ID"] = str(os.getpid())  # part of the socket's name
    version = (Path(package.origin).parent / "version" / "version").read_text(encoding="utf-8").strip()
    found: dict[str, Any] = {"verl": version, "how": __doc__, "rows": [], "notes": []}
    quant = imported(QUANT)
    try:
        worker: Any = import_module(WORKER)
        worker.set_death_signal = lambda: None  # it would end this process with its parent
        has_extension = True
    except ImportError as error:
        found["notes"].append(f"no worker extension: {type(error).__name__}: {error}")
        has_extension = False
    quant.apply_vllm_quant_patches()
    with tempfile.TemporaryDirectory(prefix="lowbit-verl-") as folder:
        llm = start(llm_arguments(shape_of(size), Path(folder), has_extension), is_cpu=False)
    tensors = trainer_tensors(shape_of(size), device)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    found["patched_layers"] = sum(hasattr(layer, "_verl_fp8_pristine") for layer in runner.get_model().modules())
    bucket = torch.empty(BUCKET, dtype=torch.uint8, device=device)
    found["rows"].append(timed(FUNCTIONS, partial(by_functions, llm, runner, quant, tensors, bucket), runner, tensors))
    save(found)
    del bucket
    torch.cuda.empty_cache()
    if has_extension:
        found["rows"].append(timed(EXTENSION, partial(by_extension, llm, tensors), runner, tensors))
    found["has_finite_logp"] = has_finite_logp(llm)
    llm.llm_engine.engine_core.shutdown()
    return found


def imported(name: str) -> Any:
    """A module of verl. Raises ValueError, one line, where something that it needs is not there."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ValueError(f"verl is not importable: {name}: {type(error).__name__}: {error}") from error


def llm_arguments(config: DecoderConfig, folder: Path, has_extension: bool) -> dict[str, Any]:
    """Arguments of verl's server for `rollout.quantization=fp8`; sizes, graphs and executor are our engine's."""
    settings.write_model_folder(folder, config, plan_of("bf16"))
    arguments = settings.llm_arguments(
        folder, config, plan_of("bf16"), settings.installed_build(), max_batch=64, max_length=1024, gpu_memory=0.5
    )
    gates = [f"model.layers.{layer}.mlp.gate" for layer in range(config.num_layers)]
    arguments |= {"quantization": "fp8", "hf_overrides": {"quantization_config": FP8 | {"ignored_layers": gates}}}
    return arguments | ({"worker_extension_cls": f"{WORKER}.vLLMColocateWorkerExtension"} if has_extension else {})


def timed(what: str, call: Callable[[], None], runner: Any, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Row of one way: times after the warm-up, stages of one more call, share of wrong codes."""
    weight = runner.get_model().model.layers[0].self_attn.qkv_proj.weight
    weight.data.view(torch.uint8).fill_(0x5A)
    first = [clock.seconds(call, "cuda") for _ in range(WARM_UP)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    times = [clock.seconds(call, "cuda") for _ in range(REPEATS)]
    grown, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    quant, worker = import_module(QUANT), import_module(WORKER) if what == EXTENSION else None
    targets: dict[str, tuple[Any, str]] = {
        "stage": (quant, "prepare_quanted_weights_for_loading"),
        "quantize and load": (worker or quant, "load_quanted_weights"),
        "post-process": (quant, "process_quanted_weights_after_loading"),
    }
    with clock.watched(targets, "cuda") as spent:
        total = clock.seconds(call, "cuda")
    return {"what": what, "push": clock.summary(times), "push_ms": [1e3 * value for value in times],
            "warm_up_ms": [1e3 * value for value in first], "grown_bytes": grown, "peak_bytes": peak,
            "inside_ms": {"all": 1e3 * total} | clock.breakdown([total], [spent]),
            "wrong_codes": wrong_codes(weight, tensors)}  # fmt: skip


def wrong_codes(weight: Tensor, tensors: Mapping[str, Tensor]) -> float:
    """Share of the first layer's query codes that are not those of verl's rule."""
    expected = quantize(tensors["model.layers.0.self_attn.q_proj.weight"], format_named("e4m3_block_verl")).codes
    live = weight.data[: len(expected)]
    if live.shape != expected.shape:
        return 1.0
    return float((live.view(torch.uint8) != expected.view(torch.uint8)).float().mean())


def by_functions(llm: Any, runner: Any, quant: Any, tensors: Mapping[str, Tensor], bucket: Tensor) -> None:
    """One push by verl's functions (FUNCTIONS)."""
    state = quant.prepare_quanted_weights_for_loading(runner.model)
    for weights in buckets(tensors, bucket):
        torch.cuda.synchronize()
        quant.load_quanted_weights(weights, runner)
        torch.cuda.synchronize()
    quant.process_quanted_weights_after_loading(runner.model, state)
    llm.reset_prefix_cache()


def buckets(tensors: Mapping[str, Tensor], bucket: Tensor) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors copied into `bucket`, uint8, as often as it is full; what does not fit into it alone as it is."""
    held: list[tuple[str, Tensor]] = []
    offset = 0
    for name, w in tensors.items():
        if offset + w.nbytes > len(bucket) and held:
            yield held
            held, offset = [], 0
        if w.nbytes <= len(bucket):
            w = bucket[offset : offset + w.nbytes].view(w.dtype).view(w.shape).copy_(w)
            offset += w.nbytes
        held.append((name, w))
    yield held


def by_extension(llm: Any, tensors: Mapping[str, Tensor]) -> None:
    """One push: EXTENSION. RuntimeError where the sender failed."""
    failed: list[BaseException] = []
    transport: Any = import_module(TRANSPORT)
    transport.zmq.Context.instance().setsockopt(transport.zmq.RCVTIMEO, PATIENCE_MS)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    sender = transport.BucketedWeightSender(zmq_handle=worker._get_zmq_handle(), bucket_size_mb=BUCKET >> 20)

    def send() -> None:
        try:
            asyncio.run(sender.async_send_weights(iter(tensors.items())))
        except (RuntimeError, OSError, AssertionError, torch.OutOfMemoryError) as error:
            failed.append(error)

    with handed_over(transport):
        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        try:
            llm.collective_rpc("update_weights_from_ipc", kwargs={"base_sync_done": True, "use_shm": False})
        except transport.zmq.ZMQError as error:
            raise RuntimeError(f"verl's receiver: {error}; its sender: {failed or 'still at it'}") from error
        thread.join()
    llm.reset_prefix_cache()
    if failed:
        raise RuntimeError(f"verl's sender: {failed[0]}")


@contextmanager
def handed_over(transport: Any) -> Iterator[None]:
    """Tensors handed over as they are: CUDA opens no IPC handle in the process that made it."""
    shared: dict[str, Tensor] = {}

    def reduce(tensor: Tensor) -> str:
        shared[key := f"tensor {len(shared)}"] = tensor
        return key

    with ExitStack() as stack:
        stack.enter_context(patch.object(transport, "reduce_tensor", reduce))
        stack.enter_context(patch.object(transport, "rebuild_ipc", lambda handle, device=None: shared[handle]))
        yield


def has_finite_logp(llm: Any) -> bool:
    """Check that the log-probs of one generation are finite."""
    from vllm import SamplingParams  # pyright: ignore[reportAttributeAccessIssue]

    sampling = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0, detokenize=False, flat_logprobs=True)
    outputs = llm.generate([{"prompt_token_ids": list(range(3, 67))}], sampling, use_tqdm=False)
    return bool(torch.isfinite(torch.tensor(outputs[0].outputs[0].logprobs.logprobs)).all())


def own_push_ms(path: Path) -> float:
    """Median of our direct push of 128 x 128 block FP8, in a file of `sync`. Raises ValueError where it has none."""
    for part in read_found(path).get("parts", ()):
        if (part.get("precision"), part.get("way")) == ("fp8_block", "direct") and "push" in part:
            return part["push"]["median_ms"]
    raise ValueError(f"--ours {path}: no direct push of fp8_block in it; run `sync --formats fp8_block` first")


def against(found: Mapping[str, Any], own_ms: float) -> dict[str, float]:
    """verl's median over that of our push, by way."""
    return {row["what"]: row["push"]["median_ms"] / own_ms for row in found["rows"]}
