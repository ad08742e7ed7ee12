"""The grid that the values of a weight lie on, found from the values alone.

Two signs, neither of which ordinary weights have: a format of ours leaves the values where they are; or runs of
neighbours share few distinct values, as on any grid of 4 bits and fewer, whoever made its scales. Left out: 8-bit grids
with scales that no format of ours would make.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.numerics.effective_bits import ELEMENT_BITS
from harness.numerics.formats import FORMATS, Format
from harness.numerics.quantize import fake_quantize, quantize
from harness.numerics.rounding import INT_BITS

RUN = 32
"""Neighbours in a row whose distinct values are counted."""
FEW = 0.75
"""Share of distinct values in a run below which the values are a grid's: normal weights have 0.98 in BF16 and 1 in
float32, 4-bit grids at most 0.5, and 0.6 where a run spans two scales."""
SAME = 1e-6
"""Largest change, over the largest value, with which a format leaves a tensor where it is."""


def bits_of(fmt: Format | None) -> int:
    """Bits of an element; 16 where nothing is planned."""
    return 16 if fmt is None else ELEMENT_BITS[fmt.element]


def grid_of(w: Tensor, below: int) -> str | None:
    """The coarser grid that `w` [N, K] lies on: the name of a format of fewer than `below` bits, or "few values" where
    none of ours fits; None for ordinary weights, and for those that are all zero or have no run to look at."""
    w = w.detach().float()
    if not bool(w.any()):
        return None
    names = [
        name
        for name, fmt in FORMATS.items()
        if fmt.tile is not None and fmt.rule not in ("kv", "ct_token") and bits_of(fmt) < below
        and (fmt.tile[1] == 0 or w.shape[1] % fmt.tile[1] == 0)
    ]  # fmt: skip
    for name in sorted(names, key=lambda name: bits_of(FORMATS[name])):
        if _is_left_alone(w, FORMATS[name]):
            return name
    return "few values" if below > 4 and distinct_share(w) < FEW else None


def _is_left_alone(w: Tensor, fmt: Format) -> bool:
    """Does the format leave `w` where it is? Rule "ct" puts the largest value half a step beyond the largest code, so
    its own values come back under another scale: of the code that they begin with, on either side of zero."""
    largest, rows = w.abs().max(), fmt.tile is not None and fmt.tile[0] == 1
    moved = (fake_quantize(w, fmt) - w).abs()
    if fmt.rule == "ct" and fmt.element in INT_BITS and fmt.symmetric and rows:
        scale, half = quantize(w, fmt).scale, 2.0 ** (INT_BITS[fmt.element] - 1)
        assert scale is not None
        for code in (half - 1.0, half):
            again = (fake_quantize(w, fmt, scale=scale * ((half - 0.5) / code)) - w).abs()
            groups = (len(w), scale.shape[1], -1)
            is_better = again.view(groups).amax(-1, keepdim=True) < moved.view(groups).amax(-1, keepdim=True)
            moved = torch.where(is_better, again.view(groups), moved.view(groups)).view_as(w)
    return float(moved.max() / largest) <= SAME


def distinct_share(w: Tensor) -> float:
    """Mean share of distinct values among the nonzero ones, over runs of `RUN` columns of `w` [N, K]; 1 without one."""
    columns = w.shape[1] // RUN * RUN
    if columns == 0:
        return 1.0
    runs = w[:, :columns].reshape(-1, RUN).sort(dim=-1).values
    is_nonzero = runs != 0
    is_new = torch.cat([is_nonzero[:, :1], is_nonzero[:, 1:] & (runs[:, 1:] != runs[:, :-1])], 1)
    return float(is_new.sum() / is_nonzero.sum().clamp(min=1))
