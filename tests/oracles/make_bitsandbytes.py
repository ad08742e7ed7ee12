"""NF4 codes and block maxima of bitsandbytes, with and without double quantization -> bitsandbytes.npz."""

from __future__ import annotations

from importlib.metadata import version

import bitsandbytes.functional as bnb
import matrices
import numpy as np
import torch


def inputs() -> dict[str, np.ndarray]:
    """The shared matrices, ragged ones, and one long enough for two blocks of quantized maxima."""
    rng = np.random.default_rng(matrices.SEED + 3)
    long = matrices.bf16(0.02 * rng.standard_normal((300, 64)) * np.exp(rng.standard_normal((300, 1))))
    # Below about 1e-38 the reciprocal of a block maximum overflows.
    return matrices.matrices(smallest=1e-25, largest=1e25) | matrices.ragged() | {"long": long}


def main() -> None:
    answers: dict[str, np.ndarray] = {"dynamic_map": bnb.create_dynamic_map(signed=True).numpy()}
    for case, w in inputs().items():
        answers[f"input/{case}"] = w
        for name, is_double in (("nf4", False), ("nf4_dq", True)):
            x = torch.from_numpy(w)
            packed, state = bnb.quantize_4bit(x, blocksize=64, quant_type="nf4", compress_statistics=is_double)
            key = f"{name}/{case}"
            answers[f"{key}/packed"] = packed.reshape(-1).numpy()
            answers[f"{key}/scale"] = state.absmax.numpy()
            if is_double:
                answers[f"{key}/offset"] = state.offset.numpy()
                answers[f"{key}/outer"] = state.state2.absmax.numpy()
            if case in ("outliers", "zeros", "odd", "long"):
                answers[f"{key}/values"] = bnb.dequantize_4bit(packed, state).numpy()
    matrices.save("bitsandbytes", version("bitsandbytes"), answers)


if __name__ == "__main__":
    main()
