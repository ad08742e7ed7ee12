"""Push inside a vLLM worker: our `VLLMWeights` in place of verl's loader, for every format alike.

verl's buckets are taken over as they come, for their memory is used again (`harness.engines.vllm.streamed_push`). The
passport is measured on the live kernels; where several GPUs share an engine's model, each on its own share, and every
rank answers with the passport of the whole.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID, set_death_signal, vLLMColocateWorkerExtension

from harness.api import KVProtocol
from harness.config.compose import check_passport
from harness.engines.vllm import kv, push_by_reload, settings
from harness.engines.vllm.adapters import AdapterSlot
from harness.engines.vllm.shards import shard_here
from harness.engines.vllm.streamed_push import Arrival
from harness.engines.vllm.weights import VLLMWeights
from harness.models.decoder import tensor_shapes
from harness.numerics.formats import at_rollout
from harness.trainers.verl.driver import attempt
from harness.trainers.verl.job import current_job, current_method, own_socket
from harness.trainers.verl.settings import build_of


class ServedSlot(AdapterSlot):
    """The adapter that verl's server names in every request."""

    def next_number(self) -> int:
        """Number of verl's adapter, always the same; the server forgets its caches at every push."""
        return VLLM_LORA_INT_ID


class Extension(vLLMColocateWorkerExtension):
    """Class mixed into vLLM's worker; its methods are RPC names."""

    def __new__(cls, **kwargs: Any) -> Any:
        """Pass over verl's own `__new__`: for its way of loading it patches vLLM's NVFP4 layers and reader of adapters,
        by names that another version of vLLM does not have, and ours needs neither."""
        set_death_signal()
        if current_job().config.trainer.device == "cpu":
            from harness.engines.vllm import cpu_fixes

            cpu_fixes.apply()
        cls._lowbit_gains = push_by_reload.wide_gains(settings.fp32_gains(current_method().plan, current_job().shape))
        cls._lowbit_gains.__enter__()  # for good: the process makes this one model
        return super(vLLMColocateWorkerExtension, cls).__new__(cls)

    @cached_property
    def lowbit_weights(self) -> VLLMWeights:
        """Our `VLLMWeights` of the live model; made at the first push, before anything is generated."""
        runner = self.model_runner  # pyright: ignore[reportAttributeAccessIssue]
        job, plan = current_job(), current_method().plan
        device = torch.device("cpu") if job.config.trainer.device == "cpu" else self.device
        slot = None
        if (adapters := at_rollout(plan.adapters)) is not None:
            engine = SimpleNamespace(
                add_lora=self.add_lora,
                remove_lora=self.remove_lora,  # pyright: ignore[reportAttributeAccessIssue]
                model_executor=SimpleNamespace(driver_worker=SimpleNamespace(worker=self)),
            )
            self.lowbit_folder = tempfile.TemporaryDirectory(prefix="lowbit-adapters-")
            shapes, folder = tensor_shapes(job.shape), Path(self.lowbit_folder.name)
            slot = ServedSlot(SimpleNamespace(llm_engine=engine), adapters, shapes, folder)
        return VLLMWeights(
            runner.get_model(), runner.vllm_config, job.shape, plan, device, slot, None, shard_here(job.shape)
        )

    def _get_zmq_handle(self) -> str:
        return own_socket(current_job(), super()._get_zmq_handle())

    def update_weights_from_ipc(
        self, peft_config: Any = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Receive a push and take it over. A push that is refused raises in the trainer."""
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

        if self.device is None:
            self.device = torch.device("cpu")
        arrival, refused = Arrival(self.lowbit_weights), list[BaseException]()

        def take(weights: list[tuple[str, Tensor]], is_last: bool) -> None:
            # A refusal is raised at the end: until then the trainer waits for an answer to every bucket.
            if not refused and (error := attempt(partial(arrival.take, weights))) is not None:
                refused.append(error)

        BucketedWeightReceiver(zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm).receive_weights(
            on_bucket_received=take
        )
        if refused:
            raise refused[0]
        arrival.end()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # verl wakes vLLM's cache next, which takes its memory from the device

    def lowbit_passport(self) -> str:
        """The realized plan and the numbers of the last push, as JSON. RuntimeError where it is not the plan."""
        plan, build = current_method().plan, build_of(current_job().config.trainer.device)
        found = self.lowbit_weights.realized_plan(build, "verl-vllm")
        check_passport(plan, found)
        return json.dumps({"passport": asdict(found), "metrics": self.lowbit_weights.sync_metrics()})

    def lowbit_calibrate(self, protocol: KVProtocol | None) -> None:
        """Start (a protocol) or end (None) setting the cache's scales from what enters attention."""
        if protocol is None:
            self._lowbit_calibration.__exit__(None, None, None)
            return
        build = build_of(current_job().config.trainer.device)
        fmt = current_method().plan.rollout_kv
        assert fmt is not None
        self._lowbit_calibration = kv.calibrated(
            self.lowbit_weights.model,
            fmt,
            protocol,
            has_queries=build.quantizes_queries,
        )
        self._lowbit_calibration.__enter__()
