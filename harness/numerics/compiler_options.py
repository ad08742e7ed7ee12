"""Options that every `torch.compile` of this project takes, so that the compiler's cache gives back what fits.

torch keeps compiled graphs in a folder that processes share, under a key without the width of the CPU's vectors
(torch/_inductor/codecache.py, FxGraphHashDetails; seen in 2.11 and 2.13). Where ATEN_CPU_CAPABILITY differs between two
processes, the second would build loops of the first one's width for its own vectors: NaN, wrong numbers, or a write
behind a buffer. A width that stands in the options is in the key.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from functools import cache
from typing import Any

import torch


def compiler_options(device: torch.device, *, is_dynamic: bool = False) -> dict[str, Any]:
    """Options of `torch.compile` for tensors on `device`; `is_dynamic`: sizes change between calls.

    Of changing sizes one of Triton's analyses knows nothing, and in torch 2.11 it fails: two equal products of sizes
    are not known to be (torch/_inductor/tiling_utils.py, get_pw_red_splits).
    """
    options: dict[str, Any] = {"triton.coalesce_tiling_analysis": False} if is_dynamic else {}
    return options | ({"cpp.simdlen": vector_bits()} if device.type == "cpu" else {})


@cache
def vector_bits() -> int:
    """Width in bits of the vectors that torch's compiler uses on this CPU; 0 where it uses none."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    return pick_vec_isa().bit_width()
