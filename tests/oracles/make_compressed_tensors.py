"""Codes, scales and packed words of compressed-tensors on random matrices -> compressed_tensors.npz."""

from __future__ import annotations

from importlib.metadata import version

import matrices
import numpy as np
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
GRIDS = {
    "int8_channel_ct": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "e4m3_channel_ct": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "e4m3_block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    "int8_g128": {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 128},
    "int4_g128": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
    "int4_g32_asym": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
    "int3_g32": {"num_bits": 3, "type": "int", "strategy": "group", "group_size": 32},
    "int3_g64_asym": {"num_bits": 3, "type": "int", "strategy": "group", "group_size": 64, "symmetric": False},
    "int2_g16": {"num_bits": 2, "type": "int", "strategy": "group", "group_size": 16},
    "int2_g16_asym": {"num_bits": 2, "type": "int", "strategy": "group", "group_size": 16, "symmetric": False},
    "nvfp4": NVFP4 | {"scale_dtype": torch.float8_e4m3fn},
    "mxfp4_ct": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
    "mxfp8_ct": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
}


def extremes(w: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """(min, max) of the tiles that share a scale, in the shape of the scale."""
    if args.strategy == "channel":
        return w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)
    if args.strategy == "block":
        rows, columns = args.block_structure
        tiles = [
            [w[i : i + rows, j : j + columns] for j in range(0, w.shape[1], columns)]
            for i in range(0, w.shape[0], rows)
        ]
        return (
            torch.stack([torch.stack([t.amin() for t in row]) for row in tiles]),
            torch.stack([torch.stack([t.amax() for t in row]) for row in tiles]),
        )
    groups = w.unflatten(-1, (-1, args.group_size))
    return groups.amin(-1), groups.amax(-1)


def answer(w: torch.Tensor, grid: dict[str, object]) -> dict[str, np.ndarray]:
    """Codes (E2M1 packed two per byte), scale, zero point, global scale and dequantized values of one matrix."""
    args = QuantizationArgs(**grid)
    low, high = extremes(w, args)
    level = generate_gparam(w.amin(), w.amax()) if args.strategy == "tensor_group" else None
    scale, zero = calculate_qparams(low, high, args, global_scale=level)
    zero = None if args.symmetric else zero
    codes = quantize(w, scale, zero, args, global_scale=level)
    values = dequantize(codes, scale, zero, args, dtype=torch.float32, global_scale=level)
    if args.num_bits == 4 and args.type == "float":
        packed = pack_fp4_to_uint8(codes)
    elif args.type == "float":
        packed = codes.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        packed = codes.to(torch.int8)
    out = {"codes": packed, "scale": scale, "values": values}
    if zero is not None:
        out["zero"] = zero
    if level is not None:
        out["level"] = level
    return {key: value.numpy() for key, value in out.items()}


def main() -> None:
    answers: dict[str, np.ndarray] = {}
    cases = matrices.matrices()
    cases["wide"] = matrices.ragged()["wide"]
    cases["odd"] = matrices.ragged()["odd"]
    for case, w in cases.items():
        answers[f"input/{case}"] = w
        for name, grid in GRIDS.items():
            if w.shape[1] % grid.get("group_size", 1) == 0:
                for key, value in answer(torch.from_numpy(w), grid).items():
                    # Values follow from codes and scales: two matrices are enough to pin the formula.
                    if key != "values" or case in ("outliers", "zeros"):
                        answers[f"{name}/{case}/{key}"] = value
    rng = np.random.default_rng(matrices.SEED + 2)
    for bits in (2, 3, 4, 8):
        codes = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (37, 45), dtype=np.int8)
        answers[f"pack{bits}/codes"] = codes
        for dim in (0, 1):
            answers[f"pack{bits}/dim{dim}"] = pack_to_int32(torch.from_numpy(codes), bits, packed_dim=dim).numpy()
    matrices.save("compressed_tensors", version("compressed-tensors"), answers)


if __name__ == "__main__":
    main()
