"""FP8 KV cache: one float32 scale per attention layer for K, for V and (with FP8 attention) for Q.

K is taken after q/k-norm and RoPE. Two protocols renew the scales after every weight change: on the inference side
from the first forward (vLLM <= 0.27.1: amax over a constant), on the trainer's side from a percentile of the
micro-batch maxima (NeMo-RL models/policy/workers/megatron_policy_worker.py `calibrate_qkv_fp8_scales`, described in
2601.18150). `kv_amaxes` records those maxima from a module's own attention. Left out: where an engine keeps the scales
(device buffer and host copies), per-token-head caches, and Q, which the embedded engine does not quantize.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn

from harness.numerics.formats import Format
from harness.numerics.quantize import fake_quantize
from harness.numerics.rounding import FLOAT_MAX, constant
from harness.numerics.scales import RULES

Role = Literal["q", "k", "v"]
KV: tuple[Role, Role] = ("k", "v")
ENDINGS = tuple(f".self_attn.{role}_scale" for role in KV)
"""Endings of the scales' names in a weight stream."""
INFERENCE_DIVISOR: dict[Role, float] = {"q": 200.0, "k": 200.0, "v": 100.0}
"""vLLM's defaults of Q_SCALE_CONSTANT, K_SCALE_CONSTANT, V_SCALE_CONSTANT: not 448."""
MARGIN = RULES["kv"].margin
"""NeMo-RL's head room over the calibrated maximum."""
PERCENTILE = 0.999
SMALLEST_SCALE = RULES["kv"].scale_floor
"""Smallest scale; engines reject 0."""
CORE = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.core$")
"""The modules called with (q, k, v, at) after the norms and the rotation."""


def kv_scale(amax: Tensor, fmt: Format, *, margin: float = MARGIN, divisor: float | None = None) -> Tensor:
    """max(amax * margin / divisor, 1e-6), float32 of `amax`'s shape; `divisor` None: the largest code of `fmt`."""
    top = FLOAT_MAX[fmt.element] if divisor is None else divisor
    amax = amax.to(torch.float32)
    return (amax / constant(top, amax) * margin).clamp(min=SMALLEST_SCALE)


def inference_scale(amax: Tensor, fmt: Format, role: Role) -> Tensor:
    """The scale that vLLM's own calibration of the first forward gives: amax over a constant, no margin."""
    return kv_scale(amax, fmt, margin=1.0, divisor=INFERENCE_DIVISOR[role])


def quantize_kv(x: Tensor, fmt: Format, scale: Tensor) -> Tensor:
    """Values read back after storing `x` (K, V or Q, any shape and float dtype) under one `scale` float32 []:
    cast(clamp(x / scale)) * scale, float32. Values beyond scale times the largest code saturate."""
    return fake_quantize(x, fmt, scale=scale)


def percentile_amax(amaxes: Sequence[float] | Tensor, percentile: float = PERCENTILE) -> Tensor:
    """The `percentile` of the maxima of n micro-batches: the sorted value at round(percentile * (n - 1)), float32 [].

    For n <= 500 at 0.999 this is the maximum itself. Raises ValueError where there is none.
    """
    values = torch.as_tensor(amaxes, dtype=torch.float32).reshape(-1)
    if values.numel() == 0:
        raise ValueError("amaxes is empty: no micro-batch was recorded")
    return values.sort().values[round(percentile * (values.numel() - 1))]


def trainer_scales(
    amaxes: Mapping[str, Sequence[float] | Tensor],
    fmt: Format,
    *,
    margin: float = MARGIN,
    percentile: float = PERCENTILE,
) -> dict[str, Tensor]:
    """Scales float32 [] by name from recorded micro-batch maxima by name, over all heads. Of several ranks each takes
    its `percentile_amax`; `kv_scale` of the largest of these is the scale."""
    return {name: kv_scale(percentile_amax(values, percentile), fmt, margin=margin) for name, values in amaxes.items()}


def scale_names(layer: int) -> dict[Role, str]:
    """The checkpoint names under which vLLM loads the scales of decoder layer `layer` (global index)."""
    prefix = f"model.layers.{layer}.self_attn"
    return {"q": f"{prefix}.attn.q_scale", "k": f"{prefix}.k_scale", "v": f"{prefix}.v_scale"}


class _AllSeen(Exception):  # noqa: N818 - no error: nothing that follows in the forward pass is read
    pass


@torch.no_grad()
def kv_amaxes(model: nn.Module, ids: Tensor, lengths: Tensor, *, rows: int) -> dict[str, list[Tensor]]:
    """Largest magnitudes of K and of V, float32 [], per layer and micro-batch of `rows` rows, by `scale_names`.

    `ids` [B, L] int64, right padded; of each row only the first `lengths` [B] int64 positions count. Runs the module up
    to the attention of its last layer. Raises ValueError where it has no attention `core` to look into, or no rows.
    """
    modules: list[tuple[str, nn.Module]] = list(model.named_modules())
    cores = {int(m.group(1)): core for name, core in modules if (m := CORE.search(name))}
    if not cores or not len(ids):
        raise ValueError(f"KV scales: {len(cores)} attention cores to look into, {len(ids)} rows")
    found: dict[str, list[Tensor]] = {scale_names(layer)[role]: [] for layer in sorted(cores) for role in KV}
    last, device = max(cores), next((p.device for p in model.parameters()), ids.device)
    ids, lengths = ids.to(device), lengths.to(device)
    counts = torch.empty(0)  # [b, 1, L, 1] bool of the micro-batch under way

    def recorder(layer: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        names = scale_names(layer)

        def record(module: nn.Module, args: tuple[Any, ...]) -> None:
            for role, x in zip(KV, args[1:3], strict=True):
                found[names[role]].append(torch.where(counts, x.abs(), 0.0).amax())
            if layer == last:
                raise _AllSeen

        return record

    handles = [core.register_forward_pre_hook(recorder(layer)) for layer, core in cores.items()]
    run = getattr(model, "hidden", model)
    try:
        for part, ends in zip(ids.split(rows), lengths.split(rows), strict=True):
            part = part[:, : int(ends.max())]
            counts = (torch.arange(part.shape[1], device=ids.device) < ends[:, None])[:, None, :, None]
            with suppress(_AllSeen):
                run(part)
    finally:
        for handle in handles:
            handle.remove()
    return found
