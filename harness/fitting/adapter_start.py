"""Adapters for every linear layer of a model at once, from its weights and what quantization makes of them.

Over `low_rank`, which knows one matrix: here layers that share a tensor-level scale are quantized together, and factors
carry the adapter's scale, y = x W_hat^T + scale (x A^T) B^T. LoftQ's base is q(W - shift) with a low-rank shift, which
is kept as factors beside the adapters, so that later weights can be shifted alike (2310.08659, alg. 1):

    W_hat_t = q(W - B_{t-1} A_{t-1}),  B_t A_t = SVD_r(W - W_hat_t),  B_0 A_0 = 0

Left out: fits over more than one layer (`adapter_fit`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from harness.api import Plan, WeightStream
from harness.fitting.low_bit_decoder import LORA_A, LORA_B, low_bit_weights
from harness.numerics.low_rank import cloq, svd_residual

Local = Literal["none", "svd", "loftq", "cloq"]
SHIFT_A, SHIFT_B = ".shift_A.weight", ".shift_B.weight"
"""LoftQ's shift B A of a module: [r, K] and [N, r]."""
ERROR = ".weight_error"
"""W - q(W) of a module, [N, K] float32."""


def modules_of(weights: Iterable[str], targets: tuple[str, ...]) -> list[str]:
    """The modules among checkpoint names that end in one of `targets`."""
    modules = [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]
    return [module for module in modules if module.rpartition(".")[2] in targets]


def gaussian_start(
    weights: Mapping[str, Tensor], modules: Iterable[str], rank: int, source: Callable[[str], torch.Generator]
) -> dict[str, Tensor]:
    """A ~ N(0, 1 / rank^2) and B = 0 (peft's "gaussian"), float32; `source` gives a CPU generator by tensor name."""
    found: dict[str, Tensor] = {}
    for module in modules:
        rows, columns = weights[f"{module}.weight"].shape
        noise = torch.randn(rank, columns, generator=source(f"{module}{LORA_A}"))
        found |= {f"{module}{LORA_A}": noise / rank, f"{module}{LORA_B}": torch.zeros(rows, rank)}
    return found


@torch.no_grad()
def local_start(
    kind: Local, weights: Mapping[str, Tensor], modules: Iterable[str], plan: Plan, given: Mapping[str, Tensor],
    rank: int, scale: float, steps: int = 1, grams: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Adapters of `modules` by "svd", "loftq" (with its shifts; `steps` alternations) or "cloq" (needs `grams`).

    weights: every checkpoint tensor, float32; given: scales that tensors come with, as `low_bit_weights` takes them;
    grams: as `input_grams` gives them; a module without one, an expert, gets "svd".
    Raises ValueError for a rank that a matrix does not have, and for "none", which computes nothing.
    """
    modules = list(modules)
    if kind == "none":
        raise ValueError("start=none has no factors to compute; choose svd, loftq or cloq")
    shift: dict[str, Tensor] = {}
    for _ in range(steps - 1 if kind == "loftq" else 0):
        values, shift = shifted_values(weights, shift, plan, given), {}
        for module in modules:
            name = f"{module}.weight"
            shift[f"{module}{SHIFT_A}"], shift[f"{module}{SHIFT_B}"] = svd_residual(weights[name], values[name], rank)
    values, found = shifted_values(weights, shift, plan, given), dict(shift)
    for module in modules:
        w, w_hat = weights[f"{module}.weight"], values[f"{module}.weight"]
        assert kind != "cloq" or grams is not None
        if grams is not None and module in grams and kind == "cloq":  # no text may reach an expert
            a, b = cloq(w, w_hat, grams[module], rank)
        else:
            a, b = svd_residual(w, w_hat, rank)
        found |= {f"{module}{LORA_A}": a, f"{module}{LORA_B}": b / scale}
    return found


def without_shift(name: str, tensor: Tensor, fixed: Mapping[str, Tensor]) -> Tensor:
    """One checkpoint tensor less its shift, where `fixed` has one."""
    a, b = (fixed.get(f"{name.removesuffix('.weight')}{end}") for end in (SHIFT_A, SHIFT_B))
    return tensor if a is None or b is None else tensor.detach() - b.to(tensor) @ a.to(tensor)


def shifted_values(
    weights: Mapping[str, Tensor], held: Mapping[str, Tensor], plan: Plan, given: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """`low_bit_weights` of checkpoint tensors less the shifts that `held` has for them."""
    return low_bit_weights({name: without_shift(name, w, held) for name, w in weights.items()}, plan, given)


def compensated(weights: WeightStream, fixed: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """A weight stream less the shifts in `fixed`, then the adapters in it."""
    for name, tensor in weights:
        yield name, without_shift(name, tensor, fixed)
    yield from ((name, tensor) for name, tensor in fixed.items() if name.endswith((LORA_A, LORA_B)))


@torch.no_grad()
def errors_of(
    weights: Mapping[str, Tensor], held: Mapping[str, Tensor], plan: Plan, given: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """ "<module>.weight_error": W - q(W - shift), [N, K] float32, of every module that has an adapter in `held`."""
    values = shifted_values(weights, held, plan, given)
    modules = [name.removesuffix(LORA_A) for name in held if name.endswith(LORA_A)]
    return {f"{m}{ERROR}": weights[f"{m}.weight"].detach().float() - values[f"{m}.weight"] for m in modules}


@torch.no_grad()
def relative_change(now: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> float:
    """Frobenius norm of (now - before) over that of `before`, all tensors of `now` together; 0 where both vanish."""
    pairs = [(tensor, before[name].to(tensor)) for name, tensor in now.items()]
    moved = torch.stack([(a - b).square().sum() for a, b in pairs]).sum()
    size = torch.stack([b.square().sum() for _, b in pairs]).sum()
    return float((moved / size).sqrt()) if float(size) else (0.0 if not float(moved) else float("inf"))
