"""vLLM as `harness.api.RolloutEngine`, in this process.

    load_weights  -> check the stream, quantize, write in place, compare (`weights.py`); forget cached prefixes
    generate      -> token ids in, token ids and log-probs of the sampled distribution out
    realized_plan -> what the live kernels answer (`weights.py`, `passport.py`)

One process holds one engine: no copies of weights between processes, nothing left behind by a crash, and a trainer on
the same device hands its tensors over as they are. Draws come from torch's generator, seeded per call, so a batch is
reproducible as a whole. Left out: several GPUs (`harness.trainers.verl` drives vLLM's servers).
"""

from __future__ import annotations

import gc
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from harness.api import KVProtocol, Passport, Plan, Rollout, WeightStream
from harness.engines.adapter_shapes import adapter_shapes
from harness.engines.requests import requests_of
from harness.engines.vllm import kv, push_by_kernels, push_by_reload, settings
from harness.engines.vllm.adapters import AdapterSlot
from harness.engines.vllm.builds import BUILDS, check_plan, supports
from harness.engines.vllm.decoding import sample
from harness.engines.vllm.device_loop import DeviceLoop
from harness.engines.vllm.memory import check_allocator, check_fits, small_cache
from harness.engines.vllm.samples import Samples
from harness.engines.vllm.weights import CLOSED, READY, VLLMWeights
from harness.foundation.root_cause import root_cause
from harness.foundation.seeds import stable_seed
from harness.models.decoder import DecoderConfig, tensor_shapes
from harness.numerics.formats import at_rollout
from harness.numerics.kv_scales import Role


class VLLMEngine:
    """`harness.api.RolloutEngine` on one device."""

    supports: ClassVar[frozenset[str]] = frozenset[str]().union(*map(supports, BUILDS.values()))

    def __init__(
        self,
        config: DecoderConfig,
        plan: Plan,
        *,
        eos_id: int,
        pad_id: int,
        stop_ids: Sequence[int] = (),
        device: torch.device | str = "cpu",
        max_batch: int = 256,
        max_length: int | None = None,
        gpu_memory: float = 0.5,
        is_eager: bool = False,
        keeps_log_probs: bool = False,
        is_direct: bool | None = None,
        can_sleep: bool = False,
    ) -> None:
        """`stop_ids` end a response as `eos_id` does; `max_length`: prompt and response in tokens; `gpu_memory`: share
        of the device's memory for weights and cache; `is_eager`: no CUDA graphs; `keeps_log_probs`: rollouts carry the
        whole distribution of every token; `is_direct`: how weights are pushed (`weights.py`); `can_sleep`: `sleep`
        gives the GPU's memory to others.

        Raises ValueError, one line: no such vLLM, device or format, a model that does not fit, a second engine that can
        sleep, or the cause of an engine that died at start.
        """
        self.build = settings.installed_build()
        self.config, self.plan, self.device = config, plan, torch.device(device)
        self.end_ids = sorted({eos_id, *stop_ids} - {-1})
        self.pad_id, self.keeps_log_probs = pad_id, keeps_log_probs
        check_plan(self.build, plan)
        settings.check_device(self.build, self.device.type, plan)
        settings.check_shape(self.build, config, plan)
        check_fits(config, plan, self.device, gpu_memory, max_length)
        if is_direct:
            push_by_kernels.check(plan, self.device, config)
        self.can_sleep = can_sleep and self.device.type == "cuda"
        if self.can_sleep:
            check_allocator()
        self.shapes = tensor_shapes(config)
        if plan.adapters is not None:
            adapter_shapes(plan.adapters, self.shapes)
        self.folder = tempfile.TemporaryDirectory(prefix="lowbit-vllm-")
        settings.write_model_folder(Path(self.folder.name), config, plan)
        arguments = settings.llm_arguments(
            Path(self.folder.name), config, plan, self.build, max_batch=max_batch, max_length=max_length,
            gpu_memory=gpu_memory, is_eager=is_eager, can_sleep=can_sleep,
        )  # fmt: skip
        arguments |= small_cache(config, plan, arguments)
        self.llm = start(arguments, settings.fp32_gains(plan, config), is_cpu=self.device.type == "cpu")
        worker = self.llm.llm_engine.model_executor.driver_worker.worker
        self.vllm_config, self.model = worker.vllm_config, worker.model_runner.get_model()
        self.weights = VLLMWeights(self.model, self.vllm_config, config, plan, self.device, self._slot(), is_direct)
        adapts = at_rollout(plan.adapters) is not None
        self.loop = None if adapts else DeviceLoop(worker.model_runner, len(self.end_ids))
        self.is_awake, self._scales = True, dict[int, dict[Role, float]]()

    def load_weights(self, weights: WeightStream) -> None:
        """Quantize and take over a whole stream. ValueError leaves the old weights in place; a swap that fails half-way
        raises, and the engine then refuses to generate until a whole one succeeds."""
        self.weights.load(weights)
        self.llm.reset_prefix_cache()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        num_samples: int,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        top_p: float = 1.0,
    ) -> Rollout:
        """`num_samples` responses per prompt, adjacent; token ids as wide as the longest. Temperature 0 is greedy.

        Raises ValueError for requests that do not fit the model and temperatures that vLLM would raise, RuntimeError
        while asleep, before the first load or after a swap that did not end.
        """
        self._check_ready()
        settings.check_temperature("temperature", temperature)
        requests = requests_of(prompts, num_samples, max_new_tokens, temperature, self.config, top_p)
        limit = self.vllm_config.model_config.max_model_len
        if (longest := max(map(len, requests.prompts)) + max_new_tokens) > limit:
            raise ValueError(f"a prompt and max_new_tokens need {longest} positions; the engine's max_length={limit}")
        samples = Samples(
            len(requests.rows), max_new_tokens, end_ids=self.end_ids, pad_id=self.pad_id,
            vocab_size=self.config.vocab_size if self.keeps_log_probs else None,
        )  # fmt: skip
        repeated = [prompt for prompt in prompts for _ in range(num_samples)]
        loop = None if self.keeps_log_probs or top_p < 1.0 else self.loop  # it samples the whole distribution
        if loop is not None:
            loop.prepare(len(repeated))
        with seeded(stable_seed(seed, "vllm"), self.device):
            sampling = self._sampling(max_new_tokens, temperature, top_p)
            sample(self.llm, repeated, sampling, samples, lora_request=self._adapter(), loop=loop)
        return self._rollout(samples)

    def _slot(self) -> AdapterSlot | None:
        """Slot for the rollout's adapters; None where the plan has none."""
        adapters = at_rollout(self.plan.adapters)
        return None if adapters is None else AdapterSlot(self.llm, adapters, self.shapes, Path(self.folder.name))

    def _adapter(self) -> Any:
        """vLLM's request for the pushed adapters; None without any."""
        return None if self.weights.adapters is None else self.weights.adapters.request

    def _sampling(self, max_new_tokens: int, temperature: float, top_p: float) -> Any:
        from vllm import SamplingParams  # pyright: ignore[reportAttributeAccessIssue]

        return SamplingParams(
            temperature=temperature, max_tokens=max_new_tokens, top_p=top_p, detokenize=False,
            stop_token_ids=self.end_ids or None, ignore_eos=True,
            logprobs=-1 if self.keeps_log_probs else 0,
        )  # fmt: skip

    def _rollout(self, samples: Samples) -> Rollout:
        """Samples as tensors on the device, as wide as the longest response."""
        width = int(samples.lengths.max())
        whole = samples.log_probs
        return Rollout(
            token_ids=self._tensor(samples.ids[:, :width]), logp=self._tensor(samples.logp[:, :width]),
            lengths=self._tensor(samples.lengths), truncated=self._tensor(~samples.has_ended),
            log_probs=None if whole is None else self._tensor(whole[:, :width]),
        )  # fmt: skip

    def _tensor(self, values: Any) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def calibrate_kv(self, prompts: Sequence[Sequence[int]], protocol: KVProtocol = "trainer") -> None:
        """Set every layer's scales from one prefill of these prompts; nothing to do without a quantized cache."""
        self._check_ready()
        fmt = self.plan.rollout_kv
        if fmt is None:
            return
        from vllm import SamplingParams  # pyright: ignore[reportAttributeAccessIssue]

        self.llm.reset_prefix_cache()
        has_queries = self.build.quantizes_queries
        with kv.calibrated(self.model, fmt, protocol, has_queries=has_queries), seeded(0, self.device):
            sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
            self.llm.generate(
                [{"prompt_token_ids": list(prompt)} for prompt in prompts], sampling, use_tqdm=False,
                lora_request=self._adapter(),
            )  # fmt: skip
        self.llm.reset_prefix_cache()

    def calibrate_residual(self, prompts: Sequence[Sequence[int]]) -> None:
        """Nothing to do: vLLM has no second pass, and a plan that wants one is refused at the start."""

    def realized_plan(self) -> Passport:
        """Passport measured on the live kernels. RuntimeError where a format is not in force."""
        self._check_ready()
        return self.weights.realized_plan(self.build, "vllm")

    def sync_metrics(self) -> dict[str, float]:
        """Numbers of the last load: "code_flip_rate" since the load before, "saturated_frac"."""
        return self.weights.sync_metrics()

    def sleep(self) -> None:
        """Give memory back: with `can_sleep` weights go to the host and the cache is dropped, addresses stay."""
        self.llm.reset_prefix_cache()
        if self.can_sleep and self.is_awake:
            self._scales = kv.all_scales(self.model)
            self.llm.sleep(level=1)
        self.is_awake = False

    def wake(self) -> None:
        """The opposite of `sleep`. vLLM sets the scales of a quantized cache to 1 then; they become what they were."""
        if self.can_sleep and not self.is_awake:
            self.llm.wake_up()
            for layer, module in kv.attentions(self.model).items():
                kv.set_scales(module, self._scales[layer])
        self.is_awake = True

    def close(self) -> None:
        """Free everything; the engine cannot be used afterwards."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        if self.weights.state == CLOSED:
            return
        self.weights.state = CLOSED
        with suppress(RuntimeError):  # too little room to wake: the process is about to end
            self.wake()  # memory that lies elsewhere cannot be freed
        self.llm.llm_engine.engine_core.shutdown()
        del (
            self.llm,
            self.loop,
            self.model,
            self.vllm_config,
            self.weights.model,
            self.weights.adapters,
            self.weights.writer,
        )
        cleanup_dist_env_and_memory()
        gc.collect()
        self.folder.cleanup()

    def _check_ready(self) -> None:
        if not self.is_awake:
            raise RuntimeError("the engine is asleep: call wake() first")
        if self.weights.state != READY:
            raise RuntimeError(self.weights.state)


def start(arguments: dict[str, Any], wide: Sequence[str] = (), *, is_cpu: bool) -> Any:
    """`vllm.LLM(**arguments)` with the norm gains `wide` in float32, the host's random state kept.

    Raises ValueError with the first cause of a failure.
    """
    settings.prepare_environment()
    import numpy as np

    if is_cpu:
        from harness.engines.vllm import cpu_fixes

        cpu_fixes.apply()
    python, legacy = random.getstate(), np.random.get_state()
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng():
            from vllm import LLM  # pyright: ignore[reportAttributeAccessIssue]

            with push_by_reload.wide_gains(wide):
                return LLM(**arguments)
    except (RuntimeError, ValueError, AssertionError, ImportError, OSError, AttributeError) as error:
        raise ValueError(f"engine=vllm: the engine died at start: {root_cause(error)}") from error
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        torch.set_num_threads(threads)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Context in which torch's default generators start from `seed`; they are as before afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
