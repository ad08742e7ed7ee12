"""One FP8 flow for rollout and training: a linear layer of three low-precision products.

Jet-RL (2601.14243, sections 4.1 and 4.2) asks that the inference graph be a subgraph of the trainer's forward graph:
the same tensors quantized under the same rule in the same places. Every operand is rounded along its contraction:

    FProp  Y = X W^T     X 1x128 along K        W 128x128
    DGrad  dX = dY W     dY 1x128 along N       the same W codes: square tiles need no second quantization
    WGrad  dW = dY^T X   dY^T 1x128 along T     X 128x1 along T

What enters is bf16, Y and dX leave as bf16, dW stays float32. Ragged shapes count as padded with zeros: that changes no
tile's largest magnitude. A WGrad tile holds 128 tokens of one micro-batch, so its split shows in the last digits of dW.
By default the products are emulated in float32; `use_kernels` hands them to FP8 units where the shapes allow it
(`fp8_gemm.py`). Left out: E5M2 gradients, and a bf16 fallback for unaligned shapes.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.numerics import fp8_gemm
from harness.numerics.formats import Format
from harness.numerics.fp8_gemm import Kernels
from harness.numerics.quantize import fake_quantize


def along_tokens(acts: Format) -> Format:
    """The format whose runs go down the rows of [T, C] instead of along them: what WGrad contracts over."""
    assert acts.tile is not None
    return replace(acts, name=f"{acts.name}_tokens", tile=(acts.tile[1], 1))


def flow_weight(weight: Tensor, fmt: Format) -> Tensor:
    """The float32 values [N, K] that a rollout engine computes with, of a float32 master [N, K] under `fmt`.

    Codes are made from the bf16 cast that an engine receives; plain casts come from the master.
    """
    return fake_quantize(weight if fmt.tile is None else weight.to(torch.bfloat16), fmt)


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(torch.float32)


class _FP8Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, weights: Format, acts: Format, is_saved_fp8: bool
    ) -> Tensor:
        x16 = x.to(torch.bfloat16)
        xq, wq = fake_quantize(x16, acts), flow_weight(weight, weights)
        # The FP8 form as it comes back from memory: dequantized into bf16, which rounds once more.
        ctx.save_for_backward(xq.to(torch.bfloat16) if is_saved_fp8 else x16, wq)
        ctx.acts = acts
        return _bf16(F.linear(xq, wq, None if bias is None else _bf16(bias)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, wq = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dy = _bf16(grads[0]).flatten(0, -2)
        dx = dw = None
        if wants_x:
            dx = _bf16(fake_quantize(dy, ctx.acts) @ wq).view(x.shape)
        if wants_weight:
            down = along_tokens(ctx.acts)
            dw = fake_quantize(dy, down).t() @ fake_quantize(x.flatten(0, -2), down)
        return dx, dw, dy.sum(0) if wants_bias else None, None, None, None


class FP8Linear(nn.Linear):
    """An nn.Linear that computes by the three products of the module docstring around its float32 master weight.

    The forward value is bit for bit that of `linear.EmulatedLinear` with base bf16. Parameters and their names stay
    those of the layer it stands for. Raises ValueError for input formats whose tiles are no runs along the row.
    """

    kernels: Kernels | None
    """Kernels of the products; None: they are emulated. `use_kernels` sets it."""
    key: str
    """`fp8_gemm.key_of` the kernels; empty without."""
    run: Callable[[FP8Linear, Tensor], Tensor]
    """`emulate`, or what stands for it beside a compiler, which must not look into it (`trainers.local.compiling`)."""

    def __init__(self, linear: nn.Linear, *, weights: Format, acts: Format, fp8_saved_activations: bool = True) -> None:
        """`fp8_saved_activations`: the backward pass gets X as its FP8 1x128 form dequantized into bf16 (Jet-RL);
        False: as bf16 (torchao prototype/blockwise_fp8_training), which rounds dW's operand once instead of twice."""
        if acts.tile is None or acts.tile[0] != 1 or acts.tile[1] == 0:
            raise ValueError(f"acts={acts.name}: its tiles cannot be turned along the tokens; choose e4m3_1x128")
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.weights, self.fmt = weights, acts
        self.fp8_saved_activations = fp8_saved_activations
        self.kernels, self.key, self.run = None, "", FP8Linear.emulate
        self._held: tuple[Tensor, ...] | None = None
        self.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """float32 [..., K] -> float32 [..., N] that a bf16 tensor could hold; with kernels, the dtype of the input."""
        if self.kernels is None:
            return self.run(self, input)
        codes = self._held or fp8_gemm.weight_codes(self.weight.detach(), self.key, self.weights.name)
        y = fp8_gemm.linear(
            input.to(torch.bfloat16), self.weight, cast(Tensor | None, self.bias), codes, kernels=self.key,
            acts=self.fmt.name, is_twice=self.fp8_saved_activations,
        )  # fmt: skip
        return y.to(input.dtype)

    def emulate(self, input: Tensor) -> Tensor:
        """Compute `forward` in float32, without the seam for a compiler."""
        knobs = (self.weights, self.fmt, self.fp8_saved_activations)
        return cast(Tensor, _FP8Product.apply(input, self.weight, cast(Tensor | None, self.bias), *knobs))

    @torch.no_grad()
    def hold(self, is_held: bool) -> None:
        """Make the codes of the weight once for all forward passes from now on, or drop them; see `held_weights`."""
        is_held = is_held and self.kernels is not None
        self._held = fp8_gemm.weight_codes(self.weight.detach(), self.key, self.weights.name) if is_held else None

    def extra_repr(self) -> str:
        """Shape, formats and who computes, for printing."""
        who = "emulated" if self.kernels is None else self.kernels.name
        return f"{super().extra_repr()}, weights={self.weights.name}, acts={self.fmt.name}, {who}"


def use_kernels(model: nn.Module, kernels: Kernels | None) -> dict[str, str]:
    """Let `kernels` compute the FP8 linears of `model` whose shapes fit; None: emulate them all.

    Returns layer name -> the kernels' name or "emulated", for the record of the run. Parameters are not touched.
    """
    found: dict[str, str] = {}
    for name, layer in _layers(model):
        is_fit = kernels is not None and fp8_gemm.fits(layer.weight.shape, layer.weights, layer.fmt)
        layer.kernels = kernels if is_fit else None
        layer.key = "" if layer.kernels is None else fp8_gemm.key_of(layer.kernels)
        found[name] = "emulated" if layer.kernels is None else layer.kernels.name
    return found


@contextmanager
def held_weights(model: nn.Module) -> Generator[None]:
    """Context in which each weight is quantized once for all forward passes: around the micro-batches of one optimizer
    step.

    No weight of `model` may change inside. Two bytes per weight stay allocated; emulated layers are not affected.
    """
    layers = [layer for _, layer in _layers(model)]
    try:
        for layer in layers:
            layer.hold(True)
        yield
    finally:
        for layer in layers:
            layer.hold(False)


def _layers(model: nn.Module) -> list[tuple[str, FP8Linear]]:
    modules: list[tuple[str, nn.Module]] = [*model.named_modules()]
    return [(name, module) for name, module in modules if isinstance(module, FP8Linear)]
