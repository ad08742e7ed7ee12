"""Push by vLLM's loaders, which swap the weights of a live model: checkpoint-format tensors in, kernel-format tensors
in the same storage.

    swap: wrap every loader -> model.load_weights(stream) -> refuse what is incomplete -> let each layer finish

vLLM's layerwise reload (`vllm.model_executor.model_loader.reload`) does the work and silently accepts a layer that got
only part of its tensors; `swap` does not. It buffers by reference, so whoever reuses a transport buffer passes clones.
A mixture's experts are one layer each, complete when every expert has got its tensors; kernels of them that a reload
makes anew, around memory that is thrown away, give place to the old ones. Left out: several pipeline stages, and
transports (`engine.py` calls it in-process, a trainer may over IPC).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from harness.api import LINEAR

PACKED = dict(zip(("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), LINEAR, strict=True))
"""vLLM's linear -> the checkpoint's that it fuses, by rows."""


EXPERT_KERNELS = ("moe_kernel", "moe_quant_config")
"""Attributes of a mixture's method that are made of its weights."""
SHARDS = {"w13": 2, "w2": 1}
"""Beginning of the name of a fused tensor of experts -> how many tensors of each expert are in it."""
UNLOADED = ("g_idx", "weight_shape", "input", "zero_point")
"""Parts of names of parameters of experts that no push brings."""


class IncompleteSwap(RuntimeError):  # noqa: N818 - says what the weights are
    """Error of a swap that ended with layers which got only a part of their tensors."""


def swap(model: nn.Module, model_config: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Load a stream of checkpoint tensors into the live model, storage and pointers kept.

    Call under vLLM's configuration (`set_current_vllm_config`). Raises IncompleteSwap where a linear layer or an
    embedding got nothing or a part of its tensors; layers that were complete are then new, the others old.
    """
    from vllm.model_executor.model_loader import reload

    scratch = list(scratch_tensors(model))
    kernels = take_kernels(model)
    reload.initialize_layerwise_reload(model)
    lacking: list[str] | None = None
    try:
        model.load_weights(wrapped_names(model, tensors))  # pyright: ignore[reportCallIssue]
        lacking = incomplete(model)
    finally:
        if lacking is None or lacking:
            _give_back(model)
            _restore_all(scratch)
            _put_kernels_back(kernels)
    if lacking:
        raise IncompleteSwap(
            f"weight swap: {len(lacking)} layers got no or only part of their tensors, the first is {lacking[0]}; "
            "load a whole stream before generating"
        )
    reload.finalize_layerwise_reload(model, model_config)
    _restore_all(scratch)
    _put_kernels_back(kernels)


def scratch_tensors(model: nn.Module) -> Iterator[tuple[Any, str, Tensor]]:
    """(owner, attribute, tensor) of everything that kernels read beside parameters and buffers, such as Marlin's locks.

    vLLM makes new ones at every reload, while a captured CUDA graph goes on using the old memory: on locks that
    another tensor has overwritten a kernel waits for ever.
    """
    for layer in model.modules():
        scheme = getattr(layer, "scheme", None)
        owners = (layer, getattr(layer, "quant_method", None), scheme)
        for owner in (*owners, *(getattr(scheme, name, None) for name in ("kernel", "fp8_linear"))):
            for name, value in vars(owner).items() if owner is not None else ():
                if isinstance(value, Tensor):
                    yield owner, name, value


def _restore_all(scratch: Iterable[tuple[Any, str, Tensor]]) -> None:
    """Put the old tensors back with the new values."""
    for owner, name, tensor in scratch:
        fresh = getattr(owner, name)
        if fresh is not tensor:
            tensor.copy_(fresh)
            setattr(owner, name, tensor)


def take_kernels(model: nn.Module) -> list[tuple[Any, str, Any]]:
    """(owner, attribute, object) of the kernels of a mixture's experts, which their owners no longer have then: vLLM
    makes others at a reload, and only where there is none it brings weights into the order of the kernel."""
    owners = [layer.quant_method for _, layer in live_experts(model)]
    found = [(owner, name, vars(owner)[name]) for owner in owners for name in EXPERT_KERNELS if name in vars(owner)]
    for owner, name, _ in found:
        setattr(owner, name, None)
    return found


def _put_kernels_back(kernels: Iterable[tuple[Any, str, Any]]) -> None:
    """Put back what `take_kernels` took: it reads the memory in which the new values are."""
    for owner, name, kernel in kernels:
        setattr(owner, name, kernel)


def incomplete(model: nn.Module) -> list[str]:
    """Layers of a swap in progress that still wait for tensors of the checkpoint."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    is_tied = bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))
    lacking: list[str] = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or not layer._parameters or type(layer).__name__ == "Attention":
            continue
        if is_experts(layer) and not missing_experts(layer, info.loaded_weights):
            continue
        # A vocabulary padded to whole tiles has rows that no checkpoint fills; a tied head is filled by its embedding.
        is_filled = hasattr(layer, "org_vocab_size") and info.load_numel > 0
        if not is_filled and not (is_tied and name.endswith("lm_head")):
            lacking.append(name)
    return lacking


def _give_back(model: nn.Module) -> None:
    """Put the live tensors back into every layer that waits, so that the model can be loaded again."""
    from vllm.model_executor.model_loader.reload.layerwise import (
        LOADING_LAYERS,
        _place_kernel_tensors,
        get_layerwise_info,
    )

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
        info.reset()
    LOADING_LAYERS.clear()


def wrapped_names(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The stream by the names that the live model has: beside adapters a linear is called `<linear>.base_layer`,
    unless the wrapper passes tensors on by itself, as from vLLM 0.31 on."""
    wrapped = {name for name, m in model.named_modules() if hasattr(m, "base_layer") and not hasattr(m, "load_weights")}
    fused = {part: whole for whole, parts in PACKED.items() for part in parts}
    for name, tensor in tensors:
        module, _, leaf = name.rpartition(".")
        stem, _, last = module.rpartition(".")
        live = f"{stem}.{fused.get(last, last)}"
        yield (f"{module}.base_layer.{leaf}" if live in wrapped else name), tensor


def live_linears(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[str, ...]]]:
    """(name, module, the checkpoint's linears in it by rows) of every linear layer of the blocks, adapters looked
    through."""
    for name, module in model.named_modules():
        stem, _, last = name.rpartition(".")
        if last in PACKED:
            yield name, getattr(module, "base_layer", module), tuple(f"{stem}.{part}" for part in PACKED[last])


def is_experts(layer: nn.Module) -> bool:
    """Is it the module that holds all experts of a mixture?"""
    return hasattr(layer, "expert_map_manager") and hasattr(layer, "quant_method")


def live_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name of a mixture's experts in the checkpoint, the live module that holds them all)."""
    for name, module in model.named_modules():
        if is_experts(module):
            yield name.removesuffix(".routed_experts"), module


def missing_experts(layer: Any, loaded: Iterable[tuple[str, Any]]) -> list[str]:
    """Parameters of a layer of experts that not every expert has got. `loaded`: (parameter, its loader's bound
    arguments), as vLLM's reload keeps them."""
    got: dict[str, set[tuple[int, str]]] = {}
    for name, call in loaded:
        got.setdefault(name, set()).add((call.arguments["expert_id"], call.arguments["shard_id"]))
    needed = [name for name in layer._parameters if not any(part in name for part in UNLOADED)]
    return [name for name in needed
            if len(got.get(name, ())) < layer.local_num_experts * SHARDS[name.partition("_")[0]]]  # fmt: skip


@contextmanager
def wide_gains(names: Sequence[str]) -> Iterator[None]:
    """Context in which models that vLLM makes with dummy weights hold these norm gains in float32 from the start.

    An existing model is too late: CUDA graphs that were captured of it go on reading the memory of the old gains.
    """
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    theirs = DummyModelLoader.load_model

    def load_model(*args: Any, **options: Any) -> nn.Module:
        model = theirs(*args, **options)
        widen_gains(model, names)
        return model

    DummyModelLoader.load_model = load_model
    try:
        yield
    finally:
        DummyModelLoader.load_model = theirs


def widen_gains(model: nn.Module, names: Iterable[str]) -> None:
    """Hold these norm gains in float32 in a model of 16 bits, and compute their norm in float32 up to the result.

    vLLM's own kernel takes a gain of the input's dtype alone, in which small noise on a gain near 1 is rounded away.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import capture_layer_to_meta

    modules = dict(model.named_modules())
    for name in names:
        norm = modules[name.removesuffix(".weight")]
        loader = getattr(norm.weight, "weight_loader", None)
        norm.weight = nn.Parameter(cast(Tensor, norm.weight).data.float(), requires_grad=False)
        if loader is not None:
            norm.weight.weight_loader = loader  # pyright: ignore[reportAttributeAccessIssue]
        norm._forward_method = _wide_norm(norm)
        get_layerwise_info(norm).restore_metadata = capture_layer_to_meta(norm)


def _wide_norm(norm: nn.Module) -> Any:
    eps = float(norm.variance_epsilon)  # pyright: ignore[reportArgumentType]

    def forward(x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        wide = x.float() if residual is None else x.float() + residual.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * cast(Tensor, norm.weight)
        return normed.to(x.dtype) if residual is None else (normed.to(x.dtype), wide.to(x.dtype))

    return forward
