"""Passport of a live vLLM model: the weights and input formats that it computes with, measured on its own kernels.

Each linear layer is asked: unit vectors give its weights back as the kernel applies them, and one random input tells
which rounding its inputs go through, for the answer is nearer to that format's than to any other's. So a layout need
not be known (Marlin's, oneDNN's), and a format that is accepted and not in force is found out: weights that were
quantized a second time, inputs that were left alone. Everything else is read from its memory. Large models are asked
at some of their columns. Experts of a mixture are asked by `experts.py`. Left out: attention, whose cache is described
by its dtype and scales.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harness.api import TensorRecord
from harness.engines.vllm.push_by_reload import live_linears
from harness.engines.vllm.shards import Shard
from harness.numerics.formats import Format, format_named
from harness.numerics.quantize import Quantized, dequantize, fake_quantize
from harness.numerics.rounding import cast_name, decode
from harness.numerics.scales import stored_multiplier

WEIGHT_TOLERANCE = 1.125 * 2.0**-8
"""Relative tolerance: two roundings to bf16. One step of the widest code, 1 / 127, is more than its double."""
ACTS_TRIED = ("e4m3_token", "int8_token", "e4m3_1x128", "e4m3_1x128_ue8m0", "e4m3_tensor", "nvfp4_act", "mxfp8")
"""Formats that an input may turn out to have, besides its own dtype."""
PROBE_ROWS = 8
SAMPLE = 2**20
"""Elements of a plain tensor that are hashed."""
ALL_COLUMNS = 1024
"""Layers up to this many inputs are asked for every column, wider ones for SOME_COLUMNS of them."""
SOME_COLUMNS = 64
RUN = 4
"""Neighbouring columns among those: alone in its group of any size, an input is the group's maximum, which no rounding
moves."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """The sender's memory of a tensor: its codes at the columns that the passport asks for."""

    format: Format
    dtype: str
    scale_shape: tuple[int, ...] | None
    values: Tensor
    """[N, C] float32: what codes and scales stand for at `columns`, scales as the engine holds them."""
    codes: Tensor
    """[N, C] of the codes' dtype."""
    scales: tuple[Tensor, ...]
    """Scales, zero points and tensor-level scales, those that there are."""
    columns: Tensor
    """[C] int64, ascending."""


def columns_of(width: int, device: torch.device) -> Tensor:
    """Columns [C] int64, ascending, that a layer with `width` inputs is asked for; where not all, runs of RUN that
    begin at multiples of it, evenly spread."""
    if width <= ALL_COLUMNS:
        return torch.arange(width, device=device)
    starts = torch.linspace(0, width // RUN - 1, SOME_COLUMNS // RUN, dtype=torch.float64, device=device).long() * RUN
    return (starts[:, None] + torch.arange(RUN, device=device)).flatten()


def sent_of(q: Quantized, dtype: torch.dtype) -> Sent:
    """The memory of a quantized weight [N, K]. `dtype`: the engine's, in which it holds 32-bit group scales."""
    columns = columns_of(q.shape[-1], q.codes.device)
    return Sent(
        format=q.fmt, dtype=str(q.codes.dtype).removeprefix("torch."), columns=columns,
        scales=tuple(part for part in (q.scale, q.zero_point, q.global_scale) if part is not None),
        scale_shape=None if q.scale is None else tuple(q.scale.shape), values=values_at(as_held(q, dtype), columns),
        codes=q.codes[:, columns].contiguous(),
    )  # fmt: skip


def as_held(q: Quantized, dtype: torch.dtype) -> Quantized:
    """A quantized weight as an engine of `dtype` holds it: scales of integer groups in that dtype."""
    if q.scale is None or not q.fmt.element.startswith("int") or q.fmt.tile == (1, 0):
        return q
    scale = q.scale.to(dtype).to(q.scale.dtype)
    return Quantized(codes=q.codes, scale=scale, zero_point=q.zero_point, global_scale=q.global_scale, fmt=q.fmt,
                     shape=q.shape)  # fmt: skip


def values_at(q: Quantized, columns: Tensor) -> Tensor:
    """[N, C] float32: what codes and scales of a weight [N, K] stand for at `columns` [C]."""
    if q.scale is None or q.zero_point is not None or q.fmt.tile is None:
        return dequantize(q)[:, columns].contiguous()
    rows, width = q.fmt.tile
    multiplier = stored_multiplier(q.scale, q.global_scale, q.fmt)
    if multiplier.ndim == 2:
        multiplier = multiplier[:, columns // width if width else torch.zeros_like(columns)]
        multiplier = multiplier.repeat_interleave(rows or len(q.codes), 0)[: len(q.codes)]
    return decode(q.codes[:, columns], q.fmt.element) * multiplier


def weight_records(
    model: nn.Module, sent: Mapping[str, Sent], dtype: torch.dtype, shard: Shard | None = None
) -> list[TensorRecord]:
    """One line per quantized linear of the checkpoint, from what its kernel answers. `shard`: the share of the model
    that is asked, `sent` being of whole tensors; None: all of it.

    Raises RuntimeError naming the first tensor whose kernel does not compute with the codes that were sent. A GPU is
    waited for twice, not once per tensor: on one that is shared every wait may last as long as another's turn.
    """
    asked: list[tuple[str, str, nn.Module, int]] = []  # the checkpoint's tensor, the layer's name, the layer, weights
    differences: list[Tensor] = []
    for name, layer, parts in live_linears(model):
        first = sent.get(f"{parts[0]}.weight")
        if first is None:
            continue
        columns, _ = columns_here(f"{parts[0]}.weight", first.columns, shard)
        answered = probe_weights(layer, columns, dtype)
        told = [values_here(f"{part}.weight", sent[f"{part}.weight"], shard) for part in parts]
        for part, values, live in zip(parts, told, answered.split([len(values) for values in told]), strict=True):
            gap = (live - values).abs()
            wrong = ~(gap <= WEIGHT_TOLERANCE * values.abs() + 1e-12)  # NaN too
            differences.append(torch.stack([wrong.sum().double(), gap.max().double()]))
            asked.append((f"{part}.weight", name, layer, values.numel()))
    if not asked:
        return []
    for (part, name, layer, total), (count, gap) in zip(asked, torch.stack(differences).tolist(), strict=True):
        if count:
            raise RuntimeError(
                f"{part} is not the {sent[part].format.name} tensor that was loaded: {count:.0f} of {total} weights "
                f"that were asked for differ in {kernel_name(layer)} of {name}, by up to {gap:.3g}"
            )
    hashes = hashes_of([(sent[part].codes, *sent[part].scales) for part, *_ in asked])
    return [
        TensorRecord(
            name=part, format=sent[part].format.name, dtype=sent[part].dtype, scale_shape=sent[part].scale_shape,
            hash=code, kernel=kernel_name(layer),
        )
        for (part, _, layer, _), code in zip(asked, hashes, strict=True)
    ]  # fmt: skip


def columns_here(name: str, columns: Tensor, shard: Shard | None) -> tuple[Tensor, Tensor]:
    """(those of `columns` [C] that a share of the weight `name` has, by its own count; which they are, [C] bool)."""
    span = None if shard is None else shard.span(name)
    if span is None or span[0] == 0:
        return columns, torch.ones_like(columns, dtype=torch.bool)
    inside = (columns >= span[1]) & (columns < span[2])
    return columns[inside] - span[1], inside


def values_here(name: str, sent: Sent, shard: Shard | None) -> Tensor:
    """[N', C'] float32: a share's rows of what was sent, at the columns that it has."""
    span = None if shard is None else shard.span(name)
    if span is None:
        return sent.values
    if span[0] == 0:
        return sent.values[span[1] : span[2]]
    return sent.values[:, columns_here(name, sent.columns, shard)[1]]


def width_of(layer: nn.Module) -> int:
    """Inputs of a live linear layer, of its share where it has one."""
    width: Any = getattr(layer, "input_size_per_partition", None) or layer.input_size
    return int(width)


def probe_weights(layer: nn.Module, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, C] float32: the weights of a live linear layer at `columns`, as its kernel applies them to unit vectors."""
    width = width_of(layer)
    unit = torch.zeros(len(columns), width, dtype=dtype, device=columns.device)
    unit[torch.arange(len(columns), device=columns.device), columns] = 1.0
    return apply(layer, unit).float().T.contiguous()


def probe_bias(layer: nn.Module, device: torch.device) -> Tensor:
    """[N]: the bias of a live linear layer, of its dtype, as its kernel adds it to the products of zeros."""
    bias = layer.bias
    assert isinstance(bias, Tensor)
    nothing = torch.zeros(1, width_of(layer), dtype=bias.dtype, device=device)
    return apply(layer, nothing, bias)[0]


def apply(layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """[R, K] -> [R, N] by the layer's own kernel; `bias` as the layer holds it."""
    with torch.inference_mode():
        return layer.quant_method.apply(layer, x, bias)  # pyright: ignore


def input_formats(
    model: nn.Module, sent: Mapping[str, Sent], dtype: torch.dtype, device: torch.device, planned: str | None,
    shard: Shard | None = None,
) -> dict[str, str]:  # fmt: skip
    """Formats of the inputs of the blocks' linear layers, by the weight's name: the format whose rounding explains its
    answer to a random input best; of formats that round it alike the `planned` one. Where not every column of a layer
    is known, those that are answer for it. `shard`: as in `weight_records`. Raises RuntimeError where an answer is not
    finite."""
    base, found = cast_name(dtype), dict[str, str]()
    asked: list[tuple[list[str], tuple[str, ...]]] = []  # the tensors of a layer, the formats that its inputs may have
    gaps: list[Tensor] = []
    for _, layer, parts in live_linears(model):
        names = [f"{part}.weight" for part in parts]
        if names[0] not in sent:
            found |= dict.fromkeys(names, base)
            continue
        span = None if shard is None else shard.span(names[0])
        whole, at = width_of(layer), 0
        if shard is not None and span is not None and span[0] == 1:
            whole, at = max(end for *_, end in (shard.span(names[0], r) or span for r in range(shard.size))), span[1]
        x, formats, readings = _probe(whole, at, width_of(layer), dtype, device, (planned or base, base))
        weights = torch.cat([values_here(name, sent[name], shard) for name in names])
        gaps.append((readings @ weights.T - apply(layer, x).float()).flatten(1).norm(dim=1))
        asked.append((names, formats))
    told = iter(torch.cat(gaps).nan_to_num(torch.inf).tolist() if gaps else [])
    for names, formats in asked:
        by_gap = [(next(told), name) for name in formats]
        gap, nearest = min(by_gap, key=lambda pair: pair[0])
        if gap == torch.inf:
            raise RuntimeError(f"inputs of {names[0]}: its kernel answers a finite input with NaN or infinity")
        found |= dict.fromkeys(names, nearest)
    return found


@cache
def _probe(
    whole: int, at: int, width: int, dtype: torch.dtype, device: torch.device, first: tuple[str, ...]
) -> tuple[Tensor, tuple[str, ...], Tensor]:
    """An input of a layer [PROBE_ROWS, width], always the same: magnitudes spread over some octaves at `columns_of` the
    layer, zero elsewhere; names of F formats, the `first` ones and then those of ACTS_TRIED that fit; and the C columns
    as these read them, [F, PROBE_ROWS, C] float32. Of a layer with `whole` inputs those from `at` on, `width` of them,
    are a share's."""
    columns, draws = columns_of(whole, device), torch.Generator("cpu").manual_seed(whole)
    shape = PROBE_ROWS, len(columns)
    x = torch.zeros(PROBE_ROWS, whole, dtype=dtype)
    values = torch.randn(shape, generator=draws) * torch.exp(torch.randn(shape, generator=draws))
    x[:, columns.cpu()] = values.to(dtype)
    x = x[:, at : at + width].to(device)
    columns = columns[(columns >= at) & (columns < at + width)] - at
    formats = {name: format_named(name) for name in (*first, *ACTS_TRIED)}
    fitting = {name: fmt for name, fmt in formats.items() if fmt.tile is None or width % max(fmt.tile[1], 1) == 0}
    readings = [fake_quantize(x.float(), fmt)[:, columns] for fmt in fitting.values()]
    return x, tuple(fitting), torch.stack(readings)


def plain_records(held: Iterable[tuple[str, Tensor]], kernels: Mapping[str, str]) -> list[TensorRecord]:
    """A line for every (name, live tensor) that is held as it is: CRC-32 of its memory, of an even sample where it is
    large. `kernels`: the kernel by name, where one multiplies. A sample is a copy, so that a tensor that was gathered
    from shares does not outlive its line: a view would keep all of a 32B model at once."""
    sampled = {name: x if x.numel() <= SAMPLE else x.reshape(-1)[:: x.numel() // SAMPLE].clone() for name, x in held}
    return [
        TensorRecord(name=name, format=cast_name(x.dtype), dtype=str(x.dtype).removeprefix("torch."), scale_shape=None,
                     hash=code, kernel=kernels.get(name, ""))
        for (name, x), code in zip(sampled.items(), hashes_of([(x,) for x in sampled.values()]), strict=True)
    ]  # fmt: skip


def kernel_name(layer: nn.Module) -> str:
    """The class that multiplies, as vLLM chose it: its scheme's kernel, else its quantization method."""
    scheme: Any = getattr(layer, "scheme", None)
    for name in ("kernel", "fp8_linear"):
        if scheme is not None and getattr(scheme, name, None) is not None:
            return type(getattr(scheme, name)).__name__
    return type(scheme or layer.quant_method).__name__


def engine_state(model: nn.Module) -> dict[str, Any]:
    """Switches that change what is computed: the attention kernel, DeepGEMM's rounding of scales, the batch-invariant
    mode."""
    from vllm import envs  # pyright: ignore[reportAttributeAccessIssue]

    backends = {type(m.impl).__name__ for m in model.modules() if hasattr(m, "impl") and hasattr(m, "_k_scale")}
    state: dict[str, Any] = {"attention": sorted(backends), "batch_invariant": bool(envs.VLLM_BATCH_INVARIANT)}
    if next(model.parameters()).is_cuda:
        from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

        state["deep_gemm_e8m0"] = bool(is_deep_gemm_e8m0_used())
    return state


def hashes_of(groups: Sequence[Sequence[Tensor]]) -> list[str]:
    """CRC-32 of the bytes of each group's tensors, one after the other. All of them come from a device in one copy."""
    parts = [[_bytes(tensor) for tensor in tensors] for tensors in groups]
    if not parts:
        return []
    whole = torch.cat([part for group in parts for part in group]).cpu().numpy()
    ends = np.cumsum([sum(map(len, group)) for group in parts])
    return [f"{zlib.crc32(piece.tobytes()):08x}" for piece in np.split(whole, ends[:-1])]


def _bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)
