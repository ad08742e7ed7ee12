"""Kernels of the trainer's linear layers: FP8 kernels where the device has them, read back from the live modules.

Left out: the products themselves (`harness.numerics.linear`, `fp8_flow`) and their kernels
(`harness.kernels.fp8_flow`).
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from harness.engines.vllm.settings import prepare_environment
from harness.fitting.fake_quant import FakeQuantLinear
from harness.numerics.fp8_flow import FP8Linear, use_kernels
from harness.numerics.fp8_gemm import Kernels
from harness.numerics.linear import CastLinear


def use_fp8(model: nn.Module, device: str, wanted: str) -> None:
    """Let FP8 units compute the FP8 linears of `model`. `wanted`: as in `Launch.fp8_kernels`.

    Raises ValueError, one line, where the model has such layers and `wanted` names kernels that are not here.
    """
    if wanted == "emulated" or not any(isinstance(module, FP8Linear) for module in model.modules()):
        return
    kernels = kernels_of(torch.device(device), wanted)
    if kernels is None and wanted != "best":
        raise ValueError(
            f"launch.fp8_kernels={wanted}: needs a Hopper GPU, Triton and, but for scaled_mm, vLLM; valid here: best, "
            "emulated"
        )
    use_kernels(model, kernels)


def kernels_of(device: torch.device, wanted: str) -> Kernels | None:
    """The kernels called `wanted`, or the best of the device; None where they cannot run."""
    if device.type != "cuda":
        return None
    try:
        from harness.kernels import fp8_flow
    except ImportError:  # no Triton
        return None
    prepare_environment()  # before the first import of vLLM, which asks for DeepGEMM
    best = fp8_flow.best(device)
    if best is None or wanted in ("best", best.name):
        return best
    is_here = wanted == "scaled_mm" or fp8_flow.has_deep_gemm()
    return fp8_flow.kernels_named(wanted) if is_here else None


def products(model: nn.Module) -> dict[str, int]:
    """Kind of product -> number of linear layers computed so, read from the live modules."""
    return dict(sorted(Counter(_said(m) for m in model.modules() if isinstance(m, nn.Linear)).items()))


def _said(layer: nn.Linear) -> str:
    if isinstance(layer, FP8Linear):
        who = "emulated" if layer.kernels is None else layer.kernels.name
        return f"{layer.weights.name} x {layer.fmt.name}, {who}"
    if isinstance(layer, CastLinear):
        return f"{layer.fmt.name}, {'native' if layer.is_native else 'emulated'}"
    if isinstance(layer, FakeQuantLinear):
        return "fake-quantized"
    return str(layer.weight.dtype).removeprefix("torch.")
