"""NVFP4 and microscaling codes and scales of torchao on random matrices -> torchao.npz."""

from __future__ import annotations

from importlib.metadata import version

import matrices
import numpy as np
import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, nvfp4_quantize, per_tensor_amax_to_scale

ELEMENTS = {"mxfp4": torch.float4_e2m1fn_x2, "mxfp8": torch.float8_e4m3fn}
RULES = ("floor", "even", "ceil", "rceil")


def nvfp4(w: torch.Tensor) -> dict[str, np.ndarray]:
    """Packed codes, block scales (float32), tensor-level scale and dequantized values."""
    level = per_tensor_amax_to_scale(w.abs().amax())
    scale, packed = nvfp4_quantize(w, per_tensor_scale=level)
    values = NVFP4Tensor.to_nvfp4(w, per_tensor_scale=level).dequantize(torch.float32)
    out = {"codes": packed, "scale": scale.float(), "level": level, "values": values}
    return {key: value.numpy() for key, value in out.items()}


def mx(w: torch.Tensor, kind: str, rule: str) -> dict[str, np.ndarray]:
    """Codes (E2M1 packed) and E8M0 bytes."""
    scale, codes = to_mx(w, ELEMENTS[kind], 32, ScaleCalculationMode(rule))
    return {"codes": codes.view(torch.uint8).numpy(), "scale": scale.view(torch.uint8).numpy()}


def main() -> None:
    answers: dict[str, np.ndarray] = {}
    for case, w in matrices.matrices().items():
        answers[f"input/{case}"] = w
        x = torch.from_numpy(w)
        for key, value in nvfp4(x).items():
            if key != "values" or case in ("outliers", "zeros"):
                answers[f"nvfp4_torchao/{case}/{key}"] = value
        for kind in ELEMENTS:
            for rule in RULES:
                for key, value in mx(x, kind, rule).items():
                    answers[f"{kind}_{rule}/{case}/{key}"] = value
    matrices.save("torchao", version("torchao"), answers)


if __name__ == "__main__":
    main()
