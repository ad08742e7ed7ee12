"""Operands of the FP8 training flow that its GPU quantizers must reproduce byte for byte, on a GPU or interpreted.

    TRITON_INTERPRET=1 python -m tests.engines.flow_cases

prints one JSON object: case -> the number of codes and scales that differ from the reference's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.foundation.seeds import generator
from harness.numerics import fp8_gemm
from harness.numerics.formats import format_named
from harness.numerics.fp8_flow import FP8Linear
from harness.numerics.fp8_gemm import Operand
from harness.numerics.quantize import quantize
from tests.engines.kernel_cases import differing, values

KINDS = ("normal", "zeros", "magnitudes", "tiny", "huge", "poison", "ties", "near_ties")
"""Kinds of `kernel_cases.values`; "tiny" lies below the floor of the scales."""
SHAPES = ((128, 128), (200, 256), (5, 384))
WEIGHTS, ACTS = format_named("e4m3_block"), format_named("e4m3_1x128")


def randn(*shape: int, name: str, std: float = 1.0, device: str = "cpu") -> Tensor:
    """Gaussian numbers of their own stream, the same on every device."""
    return torch.randn(*shape, generator=generator("cpu", 0, name, *shape)).mul_(std).to(device)


def emulated(n: int, k: int, *, has_bias: bool = False, is_saved_fp8: bool = True, device: str = "cpu") -> FP8Linear:
    """An emulated layer with weights as large as a trained one's."""
    layer = nn.Linear(k, n, bias=has_bias, device=device)
    with torch.no_grad():
        layer.weight.copy_(randn(n, k, name="w", std=0.02))
    return FP8Linear(layer, weights=WEIGHTS, acts=ACTS, fp8_saved_activations=is_saved_fp8)


def products(layer: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Y and the gradients of input, weight and, where there is one, bias."""
    x = x.clone().requires_grad_()
    y = layer(x)
    return [y, *torch.autograd.grad(y, [x, *layer.parameters()], dy.to(y.dtype))]


def relative(a: Tensor, b: Tensor) -> float:
    """Relative Frobenius error."""
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())


@dataclass(frozen=True, kw_only=True)
class Case:
    """One activation, or one weight, through its quantizer."""

    kind: str
    shape: tuple[int, int]
    source: torch.dtype = torch.bfloat16
    what: str = "both"
    """Quantizer: of an activation "rows", "columns", "both", "twice" or "square"; of a weight "weight"."""
    is_strided: bool = False
    """A slice of a wider tensor, as the parts of a fused projection are."""
    is_turned: bool = False
    """A transposed tensor: its rows do not lie together."""

    @property
    def name(self) -> str:
        """A readable test id."""
        layout = "-strided" if self.is_strided else "-turned" if self.is_turned else ""
        size = f"{self.shape[0]}x{self.shape[1]}{layout}"
        return f"{self.what}-{self.kind}-{size}-{str(self.source).removeprefix('torch.')}"


def cases() -> Iterator[Case]:
    """All of them."""
    for kind in KINDS:
        yield Case(kind=kind, shape=(200, 256), what="square")
        for what in ("both", "twice"):
            yield Case(kind=kind, shape=(200, 256), what=what)
            yield Case(kind=kind, shape=(200, 256), what=what, source=torch.float32)
        yield Case(kind=kind, shape=(256, 384), what="weight", source=torch.float32)
        if kind != "tiny":  # the interpreter reads a subnormal bf16 number wrongly
            yield Case(kind=kind, shape=(256, 384), what="weight")
    for shape in SHAPES:
        for what in ("rows", "columns", "both", "twice"):
            yield Case(kind="magnitudes", shape=shape, what=what)
            yield Case(kind="normal", shape=shape, what=what, is_strided=True)
            yield Case(kind="normal", shape=shape, what=what, is_turned=True)


def tensor(case: Case) -> Tensor:
    """The input, on the CPU; near-zero negatives and -0 among it."""
    rows, columns = case.shape
    x = values(case.kind, (rows, columns + 128) if case.is_strided else case.shape).to(case.source)
    if case.is_turned:
        x = x.t().contiguous().t()
    return x[:, 64:-64] if case.is_strided else x


def operands(kernels: fp8_gemm.Kernels, case: Case, x: Tensor) -> list[Operand]:
    """Operands that the kernels make of `x`."""
    if case.what == "weight":
        return list(kernels.weight(x, WEIGHTS))
    has_rows, has_columns = case.what != "columns", case.what != "rows"
    found = kernels.runs(x, ACTS, has_rows=has_rows, has_columns=has_columns, is_twice=case.what in ("twice", "square"),
                         is_square=case.what == "square")  # fmt: skip
    assert [operand is not None for operand in found] == [has_rows, has_columns]
    return [operand for operand in found if operand is not None]


def mismatches(case: Case, device: str, is_twice_alike: bool = False) -> int:
    """Codes and scales that differ from the reference; a scale of other strides counts as one.

    `is_twice_alike`: compare with the reference of "twice" instead, a control.
    """
    from harness.kernels import fp8_flow

    own = fp8_gemm.Kernels(name="quantizers", weight=fp8_flow.quantize_weight, runs=fp8_flow.quantize_runs,
                           by_tiles=lambda a, b: a.codes, by_runs=lambda a, b: a.codes)  # fmt: skip
    x = tensor(case)
    found = operands(own, case, x.to(device))
    wanted = Case(kind=case.kind, shape=case.shape, what="twice") if is_twice_alike else case
    count = 0
    for a, b in zip(found, operands(fp8_gemm.reference(), wanted, x), strict=True):
        count += differing(a.codes.cpu(), b.codes) + differing(a.scale.cpu(), b.scale)
        count += int(_strides(a.scale) != _strides(b.scale)) + int(not a.codes.is_contiguous())
    return count


def _strides(x: Tensor) -> list[int]:
    """Strides of the axes longer than one element; those of the others mean nothing."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def engine_mismatches(device: str, shape: tuple[int, int] = (384, 512)) -> int:
    """W's codes and scales that differ from those that the rollout engine's own kernel writes into its buffers."""
    from harness.kernels import fp8_flow
    from harness.kernels.quantize import quantize_into

    w = values("magnitudes", shape).to(device)
    own, turned = fp8_flow.quantize_weight(w, WEIGHTS)
    out, scale = torch.empty_like(own.codes), torch.empty_like(own.scale)
    quantize_into(w, WEIGHTS, out, scale, base=torch.bfloat16)
    q = quantize(w.cpu().bfloat16(), WEIGHTS)
    assert q.scale is not None
    pairs = ((own.codes, out), (own.codes, turned.codes.t()), (own.scale, scale), (own.scale, turned.scale.t()))
    return sum(differing(a.cpu(), b.cpu()) for a, b in (*pairs, (own.codes, q.codes), (own.scale, q.scale)))


def differences(device: str) -> dict[str, int]:
    """Every case on `device`: its name -> how much differs from the reference; all 0 but the control."""
    found = {case.name: mismatches(case, device) for case in cases()}
    control = Case(kind="normal", shape=(256, 256))
    return found | {"engine": engine_mismatches(device), "control": mismatches(control, device, is_twice_alike=True)}


def main() -> None:
    """Run every case on the CPU."""
    json.dump(differences("cpu"), sys.stdout)


if __name__ == "__main__":
    main()
