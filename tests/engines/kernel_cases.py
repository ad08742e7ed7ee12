"""Weights, formats and buffers that the quantization kernels must reproduce bit for bit, on a GPU or interpreted.

    TRITON_INTERPRET=1 python -m tests.engines.kernel_cases

prints one JSON object: case -> the number of codes and scales that differ from the reference.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.numerics.formats import Format, format_named
from harness.numerics.packing import pack
from harness.numerics.quantize import Quantized, quantize
from tests.source_tree import ROOT

FORMATS = ("e4m3_block", "e4m3_block_verl", "e4m3_block_verl_torch", "e4m3_channel", "e4m3_channel_ct", "e4m3_tensor",
           "int8_channel", "int8_channel_ct", "int4_g32", "int4_g128", "nvfp4")  # fmt: skip
SHAPES = ((16, 256), (3, 40), (41, 128))
TWO_TILES = ((200, 336), (128, 256), (130, 130))
LONG = (3, 9000)
"""More columns than a program of the row kernel keeps."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One tensor through one kernel."""

    fmt: str
    values: str
    """A key of `VALUES`."""
    shape: tuple[int, int] = (17, 336)
    """Ragged in every tile of every format."""
    source: torch.dtype = torch.bfloat16
    base: torch.dtype = torch.bfloat16
    layout: str = "plain"
    """Layout of the outputs in memory: "plain", "slice" (rows of a fused matrix) or "transposed"."""

    @property
    def name(self) -> str:
        """A readable test id."""
        of = f"{str(self.source).removeprefix('torch.')}_as_{str(self.base).removeprefix('torch.')}"
        return f"{self.fmt}-{self.values}-{self.shape[0]}x{self.shape[1]}-{of}-{self.layout}"


def values(kind: str, shape: tuple[int, int]) -> Tensor:
    """float32 weights of one kind; the same on every machine."""
    g = torch.Generator().manual_seed(sum(map(ord, kind)) + shape[0] * shape[1])
    w = torch.randn(shape, generator=g) * 0.02
    if kind == "zeros":
        w[:, : shape[1] // 2] = 0.0
        w[: shape[0] // 2] *= torch.tensor(-0.0)
        w[: min(130, shape[0])] = torch.where(w[: min(130, shape[0])] == 0, -0.0, 0.0)
    elif kind == "magnitudes":
        w *= 2.0 ** torch.randint(-30, 30, (shape[0], 1), generator=g) * 2.0 ** torch.randint(
            -12, 3, shape, generator=g
        )
    elif kind == "tiny":
        w = torch.randint(-40, 41, shape, generator=g) * 2.0**-149 * 2.0 ** torch.randint(0, 24, shape, generator=g)
    elif kind == "huge":
        w = w * 2.0**100 * 2.0**31  # up to 2^127.5
    elif kind == "poison":
        w[1, 2], w[-1, -1] = torch.nan, -torch.inf
    elif kind in ("ties", "near_ties"):
        # Multiples of a half step under scales that are powers of two: every second one is a tie.
        w = torch.randint(-896, 897, shape, generator=g).float() / 2.0
        w[:, ::8] = 448.0
        w = w * 2.0 ** torch.randint(-9, 1, shape, generator=g)
        # Under other scales it is the last bit of the quotient that decides.
        w = w * 1.1 if kind == "near_ties" else w
    else:
        assert kind == "normal"
    return w


def cases() -> Iterator[Case]:
    """All of them: every format on every kind of value, every shape, every dtype and every layout."""
    for fmt in FORMATS:
        yield from (Case(fmt=fmt, values=kind) for kind in ("zeros", "magnitudes", "ties"))
        # Subnormal in fp32 alone; a rule whose factor is a reciprocal overflows there, in the reference too.
        yield from (
            Case(fmt=fmt, values=kind, source=torch.float32, base=torch.float32)
            for kind in ("tiny", "huge", "near_ties")
        )
        yield from (Case(fmt=fmt, values="normal", shape=shape) for shape in SHAPES)
        yield Case(fmt=fmt, values="normal", source=torch.float32)
        yield Case(fmt=fmt, values="normal", source=torch.float32, base=torch.float16)
        yield Case(fmt=fmt, values="ties", source=torch.float16, base=torch.float32)
        yield from (Case(fmt=fmt, values="normal", layout=layout) for layout in ("slice", "transposed"))
    blocks = [fmt for fmt in FORMATS if "block" in fmt]
    yield from (
        Case(fmt=fmt, values=kind, shape=shape) for fmt in blocks for kind in ("normal", "zeros") for shape in TWO_TILES
    )
    yield from (Case(fmt=fmt, values="poison") for fmt in FORMATS if fmt.startswith("e4m3"))
    yield from (Case(fmt=fmt, values="normal", shape=LONG) for fmt in ("e4m3_channel", "int8_channel", "e4m3_tensor"))


def named(q: Quantized) -> tuple[Tensor, Tensor]:
    """(codes as packed, scales) of the reference."""
    tensors = pack(q)
    codes = next(tensors[name] for name in ("weight_packed", "weight") if name in tensors)
    return codes, next(tensors[name] for name in ("weight_scale", "weight_scale_inv") if name in tensors)


def buffer(like: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """(a view shaped as `like`, the bytes around it that nothing may touch); filled with 0x5A."""
    if like.ndim < 2:
        whole = torch.empty_like(like)
        return whole, whole.new_empty(0)
    n, k = like.shape
    if layout == "transposed":
        whole = torch.empty((k, n), dtype=like.dtype, device=like.device)
        view, around = whole.T, whole.new_empty(0)
    elif layout == "slice":
        whole = torch.empty((n + 5, k + 8), dtype=like.dtype, device=like.device)
        view, around = whole[3 : 3 + n, :k], whole[n + 3 :]
    else:
        whole = torch.empty((n, k), dtype=like.dtype, device=like.device)
        view, around = whole, whole.new_empty(0)
    whole.view(torch.uint8).fill_(0x5A)
    return view, around.view(torch.uint8)


def level_of(w: Tensor, fmt: Format, base: torch.dtype) -> Tensor | None:
    """Tensor-level scale that a kernel is given, computed by the kernels' own module; None without one."""
    from harness.kernels.quantize import kind, tensor_level, update_amax

    if kind(fmt) not in ("tensor", "nvfp4"):
        return None
    amax = torch.zeros((), device=w.device)
    update_amax(w, amax, base=base)
    return tensor_level(amax, fmt)


def differing(a: Tensor, b: Tensor) -> int:
    """Number of elements that differ in their bits; NaN of any sign and payload are one value."""
    assert a.shape == b.shape and a.dtype == b.dtype, f"{a.dtype} {a.shape} against {b.dtype} {b.shape}"
    if a.dtype == torch.float8_e4m3fn:
        x, y = a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
        same = (x == y) | (((x & 0x7F) == 0x7F) & ((y & 0x7F) == 0x7F))
    else:
        same = (a == b) | ((a != a) & (b != b))
    return int((~same).sum())


def mismatches(case: Case, device: str) -> int:
    """Codes and scales of the kernel that differ from the reference, and bytes written beside the outputs."""
    from harness.kernels.quantize import quantize_into

    fmt = format_named(case.fmt)
    w = values(case.values, case.shape).to(case.source)
    codes, scale = (found.to(device) for found in named(quantize(w.to(case.base), fmt)))
    (out, around), (out_scale, around_scale) = buffer(codes, case.layout), buffer(scale, case.layout)
    w = w.to(device)
    quantize_into(w, fmt, out, out_scale, base=case.base, level=level_of(w, fmt, case.base))
    beside = int((around != 0x5A).sum()) + int((around_scale != 0x5A).sum())
    return differing(out, codes) + differing(out_scale, scale) + beside


def given_mismatches(name: str, device: str) -> int:
    """Codes under scales that another made and that clip a part of the values: 2/3 of the tensor's own ones."""
    from harness.kernels.quantize import quantize_into

    fmt = format_named(name)
    w = values("normal", (17, 336)).to(torch.bfloat16)
    own = quantize(w, fmt).scale
    assert own is not None
    scale = own * (2.0 / 3.0)
    codes = named(quantize(w, fmt, scale=scale))[0].to(device)
    out, scale = torch.empty_like(codes), scale.to(device)
    kept = scale.clone()
    quantize_into(w.to(device), fmt, out, kept, base=torch.bfloat16, is_scale_given=True)
    return differing(out, codes) + differing(kept, scale)


def every_bf16(device: str) -> int:
    """All 65536 bf16 numbers under a scale of 1: how many of their e4m3 codes differ from torch's clamped cast."""
    from harness.kernels.quantize import quantize_into

    w = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256).to(device)
    out = torch.empty(w.shape, dtype=torch.float8_e4m3fn, device=device)
    fmt, one = format_named("e4m3_block"), torch.ones(2, 2, device=device)
    quantize_into(w, fmt, out, one, base=torch.bfloat16, is_scale_given=True)
    return differing(out.cpu(), w.cpu().float().clamp(-448.0, 448.0).to(torch.float8_e4m3fn))


def other_rule(device: str) -> int:
    """The control, which must not be 0: codes under one rule against those of another, whose scales are the same."""
    from harness.kernels.quantize import quantize_into

    w = values("near_ties", (256, 256))
    theirs = quantize(w, format_named("e4m3_block_verl"))
    assert theirs.scale is not None
    out, scale = torch.empty_like(theirs.codes, device=device), torch.empty_like(theirs.scale, device=device)
    quantize_into(w.to(device), format_named("e4m3_block"), out, scale, base=torch.float32)
    assert differing(scale.cpu(), theirs.scale) == 0
    return differing(out.cpu(), theirs.codes)


def differences(device: str) -> dict[str, int]:
    """Every case on `device`: its name -> how much differs from the reference; all 0 but the control."""
    found = {case.name: mismatches(case, device) for case in cases()}
    found |= {f"{name}-given": given_mismatches(name, device) for name in FORMATS if name != "nvfp4"}
    return found | {"every_bf16": every_bf16(device), "other_rule": other_rule(device)}


def run_interpreted(module: str) -> dict[str, int]:
    """Output of a module of cases in its own process: the interpreter is chosen when Triton is imported."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def main() -> None:
    """Run every case on the CPU."""
    json.dump(differences("cpu"), sys.stdout)


if __name__ == "__main__":
    main()
