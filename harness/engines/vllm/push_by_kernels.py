"""Push by kernels, the fast way: they quantize the trainer's tensors straight into the engine's parameters.

For layouts that are the checkpoint's own up to fusing and transposing (16 bits, FP8 by tensor, channel and 128 x 128
block, INT8 by channel) and a trainer on the same GPU: each weight is read once and its codes are written once, nothing
is allocated. Packed layouts (Marlin's) and experts take the way of `push_by_reload.py`. Assumptions about a layout are
not trusted: the passport asks the kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.api import Plan, base_dtype, weight_format
from harness.engines.vllm.push_by_reload import live_linears
from harness.engines.vllm.settings import is_quantized
from harness.engines.vllm.shards import Shard
from harness.engines.weight_stream import Stream, check_one_scale
from harness.models.decoder import DecoderConfig
from harness.numerics.formats import Format

LAYOUTS = ("row", "block", "tensor")
"""Kinds of `harness.kernels.quantize.kind` whose codes the engine holds as a matrix."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Live tensors of one quantized weight."""

    codes: Tensor
    """[N, K] view of the live parameter."""
    scale: Tensor
    """View of the live scale, shaped as the kernels write it."""


def check(plan: Plan, device: torch.device, config: DecoderConfig) -> None:
    """Refuse a push by kernels that cannot be had: raises ValueError."""
    fmt = plan.rollout_weights
    if config.num_experts:
        raise ValueError("is_direct=True: experts are pushed by vLLM's loaders alone; choose is_direct=False")
    if device.type != "cuda":
        raise ValueError(f"is_direct=True: its kernels need a GPU, the engine's device is {device.type}")
    if fmt is not None and fmt.tile is not None:
        from harness.kernels import quantize

        if quantize.kind(fmt) not in LAYOUTS:
            raise ValueError(f"is_direct=True: {fmt.name} is packed in the engine; choose is_direct=False")


def quantized_places(
    model: nn.Module, plan: Plan, shapes: Mapping[str, tuple[int, ...]], shard: Shard | None = None
) -> dict[str, dict[str, Place]] | None:
    """Fused matrix -> weight's name -> its place; None where the live layout is not the checkpoint's, or where a cut of
    the codes is not the codes of a cut.

    `shapes`: of what is held here, by checkpoint name. `shard`: the share of the model that this is; None: all of it.
    """
    from harness.kernels import quantize

    fmt = plan.rollout_weights
    if fmt is None or fmt.tile is None:
        return {}
    kind = quantize.kind(fmt)
    if kind not in LAYOUTS:
        return None
    found: dict[str, dict[str, Place]] = {}
    for fused, layer, parts in live_linears(model):
        names = [f"{part}.weight" for part in parts]
        if not is_quantized(plan, names[0]):
            continue
        if shard is not None and not _is_cut_by_tiles(shard, names[0], kind):
            return None
        rows = [shapes[name][0] for name in names]
        places = _places_of(layer, names, rows, shapes[names[0]][1], kind)
        if places is None:
            return None
        found[fused] = places
    return found


def _places_of(layer: nn.Module, names: list[str], rows: list[int], width: int, kind: str) -> dict[str, Place] | None:
    weight, scale = layer.weight.data, layer.weight_scale.data  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(weight, Tensor) and isinstance(scale, Tensor)
    total, step = sum(rows), 128 if kind == "block" else 1
    live = weight if kind == "block" else weight.t()
    if live.shape != (total, width) or weight.dtype not in (torch.float8_e4m3fn, torch.int8):
        return None
    wanted = {"row": (total, 1), "block": (total // 128, -(-width // 128))}.get(kind)
    if (wanted is not None and scale.shape != wanted) or any(count % step for count in rows):
        return None
    places: dict[str, Place] = {}
    first = 0
    for name, count in zip(names, rows, strict=True):
        own = scale if kind == "tensor" else scale[first // step : (first + count) // step]
        places[name] = Place(codes=live[first : first + count], scale=own.reshape(()) if kind == "tensor" else own)
        first += count
    return places


def _is_cut_by_tiles(shard: Shard, name: str, kind: str) -> bool:
    """Does every tile of the whole weight lie in one share? A row's does not where columns are cut."""
    span = shard.span(name)
    if span is None or kind == "tensor":
        return True
    return span[0] == 0 if kind == "row" else span[1] % 128 == span[2] % 128 == 0


def gathered(shard: Shard, name: str, place: Place, fmt: Format) -> tuple[Tensor, Tensor]:
    """(codes, scale) of the whole weight, of which every rank holds a share."""
    span = shard.span(name)
    if span is None or fmt.tile is None:
        return place.codes, place.scale
    return shard.gather(name, place.codes), shard.gather(name, place.scale, fmt.tile[span[0]])


class Writer:
    """Owns the live tensors of the fast way, and the launches of the last push.

    A trainer on the same GPU updates its parameters in place: from push to push the same memory is read and written.
    The launches for one such stream are recorded at its second push, as a CUDA graph, and replayed from then on, for
    hundreds of launches cost the host more time than the device needs to run them. Any other stream is launched anew.
    """

    def __init__(
        self, plan: Plan, quantized: Mapping[str, Mapping[str, Place]], plain: Iterable[tuple[str, Tensor]],
        shard: Shard | None = None,
    ) -> None:  # fmt: skip
        """`quantized`: as `quantized_places` gives them; `plain`: (name, live tensor) of everything else; `shard`: as
        there. Streams are of whole tensors."""
        self.shard = shard
        self.plan, self.quantized, self.plain = plan, quantized, tuple(plain)
        codes = [place.codes for places in quantized.values() for place in places.values()]
        self.device = (codes or [live for _, live in self.plain])[0].device
        self.seen: _Memory | None = None
        self.recorded: tuple[_Memory, torch.cuda.CUDAGraph] | None = None

    def write(self, stream: Stream) -> None:
        """Write a whole stream, checked by `check_scales` too, into the live tensors: codes and scales by kernel, plain
        ones by copy."""
        memory = _memory_of(stream, self.device)
        if memory is not None and (self.recorded is None or self.recorded[0] != memory) and self.seen == memory:
            self.recorded = None
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._launch(stream)
            self.recorded = memory, graph
        self.seen = memory
        if self.recorded is not None and self.recorded[0] == memory:
            self.recorded[1].replay()
        else:
            self._launch(stream)

    def write_part(self, stream: Stream) -> None:
        """`write` for some whole fused matrices and some plain tensors, each of which may lie anywhere. Raises
        ValueError for scales that do not fit, before a byte of this part is written."""
        check_scales(stream, self.quantized, self.shard)
        self._launch(stream)

    def forget(self) -> None:
        """Drop what was recorded: the next push is launched anew."""
        self.seen = self.recorded = None

    def _launch(self, stream: Stream) -> None:
        for places in self.quantized.values():
            if next(iter(places)) in stream.tensors:
                _write_fused(stream, self.plan, places, self.shard)
        for name, live in self.plain:
            if name in stream.tensors:
                whole = stream.tensors[name].detach()
                live.copy_(whole if self.shard is None else self.shard.cut(name, whole))


_Memory = tuple[tuple[str, int, torch.dtype, tuple[int, ...], tuple[int, ...]], ...]


def _memory_of(stream: Stream, device: torch.device) -> _Memory | None:
    """Address and layout of every tensor of a stream; None where one lies outside the GPU `device`."""
    held = [*stream.tensors.items(), *((f"{name}_scale", scale) for name, scale in stream.scales.items())]
    if device.type != "cuda" or any(tensor.device != device for _, tensor in held):
        return None
    return tuple((name, t.data_ptr(), t.dtype, tuple(t.shape), t.stride()) for name, t in held)


def check_scales(stream: Stream, quantized: Mapping[str, Mapping[str, Place]], shard: Shard | None = None) -> None:
    """Raises ValueError for scales that do not fit their places, for a part of a fused matrix alone, and for parts that
    do not share the one that they have."""
    for places in quantized.values():
        lacking = [name for name in places if name not in stream.scales]
        if 0 < len(lacking) < len(places):
            raise ValueError(f"{lacking[0]} comes without a scale, other parts of its fused matrix with one")
        for name, place in places.items():
            given = stream.scales.get(name)
            if given is not None and shard is not None and shard.size > 1:
                raise ValueError(f"{name} comes with its scale; several devices of an engine make their own")
            if given is not None and given.numel() != place.scale.numel():
                raise ValueError(f"{name}_scale has {given.numel()} values, the engine holds {place.scale.numel()}")
        if not lacking and all(place.scale.ndim == 0 for place in places.values()):
            check_one_scale([*places], [stream.scales[name] for name in places])


def _write_fused(stream: Stream, plan: Plan, places: Mapping[str, Place], shard: Shard | None) -> None:
    """Write the parts of one fused matrix; where the format has one scale, they share it."""
    from harness.kernels import quantize

    base, level = base_dtype(plan), None
    fmt = weight_format(plan, next(iter(places)))
    assert fmt is not None
    is_given = any(name in stream.scales for name in places)
    if quantize.kind(fmt) == "tensor" and not is_given:
        amax = torch.zeros((), device=next(iter(places.values())).codes.device)
        for name in places:
            quantize.update_amax(stream.tensors[name].detach().to(amax.device), amax, base=base)
        level = quantize.tensor_level(amax, fmt)
    for name, place in places.items():
        if is_given:
            place.scale.copy_(stream.scales[name].reshape(place.scale.shape))
        w = stream.tensors[name].detach()
        w = (w if shard is None else shard.cut(name, w)).to(place.codes.device).contiguous()
        quantize.quantize_into(w, fmt, place.codes, place.scale, base=base, level=level, is_scale_given=is_given)
