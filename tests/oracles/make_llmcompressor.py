"""GPTQ by llm-compressor on random weights and correlated inputs -> llmcompressor.npz."""

from __future__ import annotations

from importlib.metadata import version

import matrices
import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
from llmcompressor.modifiers.gptq.helpers import accumulate_hessian

N, K, TOKENS = 12, 256, 288
GRIDS = {
    "int8_channel_ct": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "e4m3_channel_ct": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "e4m3_block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    "int4_g128": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
    "int4_g32_asym": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
    "int3_g64_asym": {"num_bits": 3, "type": "int", "strategy": "group", "group_size": 64, "symmetric": False},
    "int2_g16": {"num_bits": 2, "type": "int", "strategy": "group", "group_size": 16},
    "nvfp4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
              "scale_dtype": torch.float8_e4m3fn},
}  # fmt: skip


def extremes(w: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """(min, max) of the tiles that share a scale; a block is never taller than the matrix here."""
    if args.strategy == "channel":
        return w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)
    if args.strategy == "block":
        blocks = w.unflatten(-1, (-1, args.block_structure[1]))
        return blocks.amin((0, 2))[None], blocks.amax((0, 2))[None]
    groups = w.unflatten(-1, (-1, args.group_size))
    return groups.amin(-1), groups.amax(-1)


def answer(w: torch.Tensor, h: torch.Tensor, grid: dict[str, object], order: str | None) -> dict[str, np.ndarray]:
    """Values, scale, zero point and loss of one weight; block 64, so that errors cross blocks."""
    args = QuantizationArgs(**grid, actorder=order)
    low, high = extremes(w, args)
    level = generate_gparam(w.amin(), w.amax()) if args.strategy == "tensor_group" else None
    scale, zero = calculate_qparams(low, high, args, global_scale=level)
    values, loss, is_fallback = quantize_weight(
        w[None].clone(), h[None].clone(), scale[None], zero[None], None if level is None else level.reshape(1),
        args, blocksize=64, percdamp=0.01,
    )  # fmt: skip
    assert not is_fallback.any()
    out = {"values": values[0], "scale": scale.float(), "loss": loss[0]}
    if not args.symmetric:
        out["zero"] = zero
    return {key: value.numpy() for key, value in out.items()}


def main() -> None:
    rng = np.random.default_rng(matrices.SEED + 4)
    w = (0.05 * rng.standard_normal((N, K))).astype(np.float32)
    gains = np.exp(rng.standard_normal(K))
    x = (
        rng.standard_normal((TOKENS, 64)) @ rng.standard_normal((64, K)) / 8 + rng.standard_normal((TOKENS, K))
    ) * gains
    x[:, [5, 130]] = 0.0
    x = x.astype(np.float16)
    linear = torch.nn.Linear(K, N)
    total, count = torch.zeros(K, K), torch.zeros(())
    for rows in x.reshape(4, 1, -1, K):
        total, count = accumulate_hessian(torch.from_numpy(rows).float(), linear, total, count)
    # It counts sequences where this project counts tokens: a factor that the damping follows.
    h = total / TOKENS
    answers: dict[str, np.ndarray] = {"w": w, "x": x, "h": h.numpy()}
    for name, grid in GRIDS.items():
        for order in (None, "static"):
            for key, value in answer(torch.from_numpy(w), h, grid, order).items():
                answers[f"{name}/{order or 'none'}/{key}"] = value
    matrices.save("llmcompressor", version("llmcompressor"), answers)


if __name__ == "__main__":
    main()
