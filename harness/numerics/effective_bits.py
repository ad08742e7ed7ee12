"""Effective bits per weight: what an engine stores for the quantized matrices of a model, over their number of weights.

Counted: codes, the scales of tiles, mantissas of macro-blocks, zero points, the scale of a tensor (NVFP4, NF4's second
level) and low-rank adapters in 16 bits. Left out: embeddings, norms and the head, which stay as they are; padding; the
KV cache.
Scales of integers in groups count 16 bits: vLLM makes `weight_scale` in the dtype of the model, whatever is sent
(compressed_tensors_wNa16.py, `params_dtype`). With 32 bits the count would be more than engines of 14B and 32B hold on
an H200; with 16 it is 0.1 GiB less, as for other formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from harness.numerics.formats import MACRO, Adapters, Format, at_rollout
from harness.numerics.nf4 import OUTER_BLOCK
from harness.numerics.rounding import INT_BITS
from harness.numerics.tiles import stored_shape

ELEMENT_BITS: dict[str, int] = {
    "fp32": 32, "bf16": 16, "fp16": 16, "e4m3": 8, "e5m2": 8, "e2m1": 4, "nf4": 4, **INT_BITS,
}  # fmt: skip
SCALE_BITS = {"fp32": 32, "e4m3": 8, "e8m0": 8, "e8m0_m8": 8}
WIDE = 16
"""Bits of an unquantized weight, of a group's scale and of an adapter's weight."""
Shape = tuple[int, int]


def stored_bits(shape: tuple[int, ...], fmt: Format | None) -> int:
    """Bits of one matrix of (rows, columns) under `fmt`, its scales and zero points included; None: 16 bits each.
    Of a plain cast any shape."""
    count = prod(shape)
    if fmt is None:
        return WIDE * count
    bits = ELEMENT_BITS[fmt.element] * count
    if fmt.tile is None:
        return bits
    if fmt.element == "nf4":  # blocks run along the flattened matrix
        tiles = -(-count // fmt.tile[1])
    else:
        tiles = prod(stored_shape(fmt.tile, shape))
    if fmt.double_quant:
        return bits + 8 * tiles + 32 * -(-tiles // OUTER_BLOCK) + 32
    has_groups = fmt.element in INT_BITS and fmt.tile[1] > 0
    bits += tiles * (WIDE if has_groups else SCALE_BITS[fmt.scale_dtype])
    if fmt.scale_dtype == "e8m0_m8":
        bits += 8 * shape[0] * -(-shape[1] // MACRO)
    bits += 0 if fmt.symmetric else ELEMENT_BITS[fmt.element] * tiles
    return bits + (32 if fmt.element == "e2m1" and fmt.scale_dtype == "e4m3" else 0)


def adapter_bits(shapes: Mapping[str, Shape], adapters: Adapters | None) -> int:
    """Bits of the adapters that the rollout computes with, over the matrices called by their targets."""
    held = at_rollout(adapters)
    if held is None:
        return 0
    named = [shape for name, shape in shapes.items() if any(f".{target}." in f".{name}." for target in held.targets)]
    return WIDE * held.rank * sum(sum(shape) for shape in named)


def effective_bits(
    shapes: Mapping[str, Shape], formats: Mapping[str, Format | None], adapters: Adapters | None = None
) -> float:
    """Bits per weight over the matrices that `formats` names: name -> format, None for 16 bits.

    `shapes`: (rows, columns) of every such matrix. Raises ValueError for no matrix.
    """
    if not formats:
        raise ValueError("formats={}: effective bits are of at least one matrix")
    own = {name: shapes[name] for name in formats}
    stored = sum(stored_bits(own[name], fmt) for name, fmt in formats.items())
    return (stored + adapter_bits(own, adapters)) / sum(prod(shape) for shape in own.values())
