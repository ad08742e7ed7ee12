"""verl 0.9.1's colocated FP8 sync, for the sync benchmark: its kernel, its transport's copies, its loader's copies.

The kernel is taken from the one file of an installed verl; importing the package would start Ray's imports.
Left out, in verl's favour: allocating the transport's buffer at every sync, processes and messages between them, the
walk over names and loaders, staging of parameters, post-processing.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from harness.devtools.bench.sync_model import EngineBuffers, LayerRows

BUCKET = 2048 << 20
"""Bytes; verl's default `update_weights_bucket_megabytes`."""
Quantizer = Callable[[Tensor, list[int]], tuple[Tensor, Tensor]]


def version() -> str:
    """Version of the installed verl, or "not installed"."""
    root = _folder()
    return "not installed" if root is None else (root / "version" / "version").read_text(encoding="utf-8").strip()


def quantizer() -> Quantizer | None:
    """verl's `scaled_fp8_blockwise`: bf16 [N, K], [128, 128] -> (e4m3 codes, float32 scales); None without verl."""
    root = _folder()
    if root is None:
        return None
    found = importlib.util.spec_from_file_location("verl_fp8_kernel", root / "utils" / "kernel" / "fp8_kernel.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # Triton looks its functions up by module
    found.loader.exec_module(module)
    return module.scaled_fp8_blockwise


def _folder() -> Path | None:
    spec = importlib.util.find_spec("verl")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def swap(engine: EngineBuffers, to_fp8: Quantizer, bucket: Tensor | None) -> None:
    """Sync as verl does, in its order. `bucket`: uint8, the transport's buffer; None leaves the transport out."""
    loads: list[tuple[Tensor, LayerRows | Tensor]] = [(part.w, part) for part in engine.parts()]
    loads += engine.plain
    pending: list[tuple[Tensor, LayerRows | Tensor]] = []
    offset = 0
    for w, target in loads:
        if bucket is None:
            _load(w, target, to_fp8)
            continue
        if offset + w.nbytes > len(bucket) and pending:
            _flush(pending, to_fp8)
            pending, offset = [], 0
        if w.nbytes <= len(bucket):
            w = bucket[offset : offset + w.nbytes].view(w.dtype).view(w.shape).copy_(w)
            offset += w.nbytes
        pending.append((w, target))
    _flush(pending, to_fp8)


def _flush(pending: Sequence[tuple[Tensor, LayerRows | Tensor]], to_fp8: Quantizer) -> None:
    """A bucket on the receiver's side. Both sides wait for the device before they answer each other."""
    wait = torch.cuda.synchronize if pending and pending[0][0].is_cuda else lambda: None
    wait()
    for w, target in pending:
        _load(w, target, to_fp8)
    wait()


def _load(w: Tensor, target: LayerRows | Tensor, to_fp8: Quantizer) -> None:
    """Quantize, then the weight loader's copy."""
    if isinstance(target, Tensor):
        target.copy_(w)
        return
    codes, scale = to_fp8(w.to(torch.bfloat16), [128, 128])
    target.out.copy_(codes)
    target.scale.copy_(scale.view_as(target.scale))
