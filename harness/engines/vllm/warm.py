"""DeepGEMM's kernels for block FP8, compiled before a run by several processes.

DeepGEMM, the library behind vLLM's block FP8 on Hopper, compiles a kernel when it first meets a shape of a layer with a
number of rows, seconds each and one after the other, in the middle of sampling. They stay in a folder
(`DG_JIT_CACHE_DIR`, `~/.cache/vllm/deep_gemm` unless set). The numbers of rows that are tried are those at which its
choice of a kernel can change: the rule of vllm/model_executor/warmup/deep_gemm_warmup.py, VLLM_DEEP_GEMM_WARMUP=relax.
Left out: grouped products of mixtures of experts, and products of FP8 trainers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from harness.config.schema import RunConfig
from harness.engines.vllm.settings import ENVIRONMENT
from harness.engines.vllm.shards import check_shards
from harness.models.checkpoint import CONFIG, load_config
from harness.models.decoder import DecoderConfig

Shape = tuple[int, int]
"""(N, K): outputs and inputs of a linear layer."""
TILE = 128
ROWS = 16384
"""Tokens that vLLM takes into one pass on a Hopper GPU unless told otherwise."""
PART = 24
"""Numbers of rows of one task: neighbours share kernels, so that few are compiled twice."""
STAMP = "lowbit.json"
"""File in DeepGEMM's folder that says what was warmed."""


def layer_shapes(config: DecoderConfig, tensor_parallel: int = 1) -> list[Shape]:
    """Shapes of vLLM's linear layers that DeepGEMM multiplies: N a multiple of 64, K of 128 (vllm/utils/deep_gemm.py,
    should_use_deepgemm_for_fp8_linear), without the head, which stays in 16 bits. Raises ValueError
    where `tensor_parallel` GPUs cannot share the model, and for mixtures of experts."""
    if config.num_experts:
        raise ValueError(
            f"num_experts={config.num_experts}: nothing to warm; kernels of experts are compiled when first used"
        )
    check_shards(config, tensor_parallel, f"tensor-parallel={tensor_parallel}")
    heads, pairs = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    pairs = max(pairs // tensor_parallel, config.head_dim)  # a key-value head is not cut, but copied
    wide, own = config.intermediate_size // tensor_parallel, heads // tensor_parallel
    hidden = config.hidden_size
    shapes = [(own + 2 * pairs, hidden), (hidden, own), (2 * wide, hidden), (hidden, wide)]
    return [(n, k) for n, k in dict.fromkeys(shapes) if n % 64 == 0 and k % TILE == 0]


def row_counts(n: int, most: int, num_sms: int) -> list[int]:
    """Numbers of rows up to `most` at which DeepGEMM's kernel for N outputs can change, ascending."""
    found = {1, 2, 4, *range(8, 65, 8)}
    for rows in (64, 128, 256):
        found |= set(range(rows, most + 1, rows))
        for columns in range(16, min(256, n) + 1, 16):
            found |= {wave * num_sms * rows // -(-n // columns) for wave in range(1, 11)}
    return sorted(m for m in found if 1 <= m <= most)


def tasks(shapes: Iterable[Shape], most: int, num_sms: int) -> list[tuple[Shape, list[int]]]:
    """Work for a pool: a shape and some neighbouring numbers of rows; the shapes take turns."""
    found = [
        (first, (n, k), counts[first : first + PART])
        for n, k in shapes
        for counts in [row_counts(n, most, num_sms)]
        for first in range(0, len(counts), PART)
    ]
    return [(shape, counts) for _, shape, counts in sorted(found)]


def cache_folder() -> Path:
    """The folder in which vLLM has DeepGEMM keep its kernels."""
    root = os.environ.get("VLLM_CACHE_ROOT", "~/.cache/vllm")
    return Path(os.environ.get("DG_JIT_CACHE_DIR", f"{root}/deep_gemm")).expanduser()


def num_kernels(folder: Path) -> int:
    """Compiled kernels in DeepGEMM's folder."""
    return sum(1 for _ in folder.glob("**/*.cubin"))


def check_here() -> None:
    """Raises ValueError, one line, where there is no GPU of the right kind or no DeepGEMM."""
    if not torch.cuda.is_available():
        raise ValueError("warm: no CUDA device is visible; DeepGEMM compiles for the GPU that it will run on")
    if (found := torch.cuda.get_device_capability())[0] != 9:
        raise ValueError(f"warm: this GPU has compute capability {found[0]}.{found[1]}; valid: 9.0 (Hopper)")
    try:
        from vllm.utils.import_utils import has_deep_gemm
    except ImportError:
        raise ValueError("warm: vLLM is not installed; pip install 'lowbit-rl-bench[gpu]'") from None
    if not has_deep_gemm():
        raise ValueError("warm: this vLLM brings no DeepGEMM; pip install 'lowbit-rl-bench[gpu]'")


def warm(shapes: Sequence[Shape], most: int, workers: int) -> Iterator[tuple[int, int]]:
    """Compile with `workers` processes: (calls done, all calls) after each task. At the end the stamp is written."""
    check_here()
    todo = tasks(shapes, most, torch.cuda.get_device_properties(0).multi_processor_count)
    total, done = sum(len(counts) for _, counts in todo), 0
    with get_context("spawn").Pool(min(workers, len(todo)), initializer=_prepare) as pool:
        for count in pool.imap_unordered(_multiply, todo):
            done += count
            yield done, total
    _stamp(shapes, most)


def _prepare() -> None:
    os.environ.update(ENVIRONMENT)


def _multiply(task: tuple[Shape, list[int]]) -> int:
    """One product for every number of rows, as vLLM's layers make it; how many there were."""
    from vllm.utils.deep_gemm import fp8_gemm_nt

    (n, k), counts = task
    codes = {"dtype": torch.float8_e4m3fn, "device": "cuda"}
    w, w_scale = torch.zeros(n, k, **codes), torch.ones(-(-n // TILE), k // TILE, device="cuda")
    x, x_scale = torch.zeros(max(counts), k, **codes), torch.ones(max(counts), k // TILE, device="cuda")
    out = torch.empty(max(counts), n, dtype=torch.bfloat16, device="cuda")
    for m in counts:
        fp8_gemm_nt((x[:m], x_scale[:m]), (w, w_scale), out[:m], is_deep_gemm_e8m0_used=False)
    torch.cuda.synchronize()
    return len(counts)


def _stamp(shapes: Iterable[Shape], most: int) -> None:
    """Add to the file what was warmed; a stamp of another GPU or vLLM is replaced."""
    from harness.foundation.whole_file import write_atomic

    path, here = cache_folder() / STAMP, _here()
    held = _read(path)
    rows: dict[str, int] = held["rows"] if held.get("here") == here else {}
    for n, k in shapes:
        rows[f"{n}x{k}"] = max(most, rows.get(f"{n}x{k}", 0))
    write_atomic(path, json.dumps({"here": here, "rows": rows}, indent=1).encode())


def _here() -> list[str]:
    """The GPU and the version of vLLM that kernels are compiled for."""
    try:
        found = version("vllm")
    except PackageNotFoundError:
        found = "none"
    return [torch.cuda.get_device_name(), found]


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("rows"), dict) else {}


def cold_shapes(shapes: Iterable[Shape], here: Sequence[str]) -> list[Shape]:
    """Those shapes whose kernels were not compiled beforehand for this GPU and vLLM; none where DeepGEMM is off."""
    if os.environ.get("VLLM_USE_DEEP_GEMM") == "0":
        return []
    held = _read(cache_folder() / STAMP)
    known: dict[str, int] = held["rows"] if held.get("here") == list(here) else {}
    return [(n, k) for n, k in shapes if f"{n}x{k}" not in known]


def notes(cells: Iterable[RunConfig]) -> list[str]:
    """A line for every folder of a dense model with which cells would compile while they sample."""
    wanted = {
        cell.model.path
        for cell in cells
        if cell.engine.name == "vllm" and cell.trainer.device == "cuda" and cell.precision.name.startswith("fp8_block")
    } - {None}
    if not wanted or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return []
    found: list[str] = []
    for folder in sorted(path for path in map(str, wanted) if (Path(path) / CONFIG).exists()):
        config = load_config(folder)
        if not config.num_experts and (cold := cold_shapes(layer_shapes(config), _here())):
            found.append(
                f"DeepGEMM will compile kernels for {len(cold)} layer shapes of {folder} while it samples, seconds "
                f"each; before a run: lowbit warm {folder}"
            )
    return found
