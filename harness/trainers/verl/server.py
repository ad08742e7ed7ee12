"""vLLM's server under verl, with our formats, our worker extension, and answers from remote calls."""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from harness.engines.vllm.settings import quantization_config
from harness.numerics.formats import at_rollout
from harness.trainers.verl.job import current_job, current_method
from harness.trainers.verl.settings import ROLLOUT


class Server(vLLMHttpServer):
    """Server of one replica's engine."""

    def _apply_quantization(self) -> tuple[str | None, dict[str, Any]]:
        config = quantization_config(current_method().plan, current_job().shape)
        return (None, {}) if config is None else ("compressed-tensors", {"quantization_config": config})

    def _get_worker_extension_cls(self) -> str:
        return "harness.trainers.verl.extension.Extension"

    def _resolve_sleep_level(self) -> int:
        return 1  # weights wait on the host: what a push does not carry, such as a kernel's locks, survives

    @property
    def lora_as_adapter(self) -> bool:
        """Does every request name the pushed adapter?"""
        return at_rollout(current_method().plan.adapters) is not None

    async def collective_rpc(
        self, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """verl's, with the workers' answers."""
        return await self.engine.collective_rpc(method=method, timeout=timeout, args=args, kwargs=kwargs)

    async def lowbit_calibrate(self, prompts: list[list[int]], protocol: str) -> None:
        """Set the scales of an FP8 cache from one prefill of these prompts, and forget what was cached."""
        from vllm import SamplingParams, TokensPrompt

        await self.engine.reset_prefix_cache()
        await self.engine.collective_rpc("lowbit_calibrate", args=(protocol,))
        sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        for number, prompt in enumerate(prompts):
            async for _ in self.engine.generate(TokensPrompt(prompt_token_ids=prompt), sampling, f"calibrate-{number}"):
                pass
        await self.engine.collective_rpc("lowbit_calibrate", args=(None,))
        await self.engine.reset_prefix_cache()


class Replica(vLLMReplica):
    """verl's replica with our server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(Server)

    def _get_server_name_prefix(self) -> str:
        return f"{ROLLOUT}_"
