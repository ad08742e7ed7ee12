"""`lowbit warm MODEL`: DeepGEMM's kernels for block FP8, compiled before a run."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from harness.cli.options import positive
from harness.foundation.did_you_mean import nearest

WORKERS = 16


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("model", help="a model folder, or a shape of `lowbit throughput`: 7b, 32b, ...")
    parser.add_argument("--rows", type=positive, default=None, metavar="N",
                        help="tokens of a pass up to which kernels are compiled (default: 16384)")  # fmt: skip
    parser.add_argument(
        "--tensor-parallel", type=positive, default=1, metavar="N", help="GPUs that share a layer (default: 1)"
    )
    parser.add_argument("--workers", type=positive, default=min(WORKERS, os.cpu_count() or 1),
                        help="processes that compile at a time (default: cores, at most 16)")  # fmt: skip


def run(a: argparse.Namespace) -> int:
    """Compile. Raises ValueError where the model is unknown, or no GPU or no DeepGEMM is here."""
    from tqdm import tqdm

    from harness.engines.vllm.warm import ROWS, cache_folder, check_here, layer_shapes, num_kernels, warm
    from harness.models.checkpoint import check_folder, load_config
    from harness.studies.throughput.shapes import SIZES, shape_of

    is_folder = os.sep in a.model or Path(a.model).exists()
    if not is_folder and a.model not in SIZES:
        raise ValueError(f"model={a.model}: neither a model folder nor a shape; {nearest(a.model, SIZES)}")
    if is_folder:
        check_folder(Path(a.model))
    config = load_config(Path(a.model)) if is_folder else shape_of(a.model)
    shapes = layer_shapes(config, a.tensor_parallel)
    if not shapes:
        raise ValueError(f"model={a.model}: no layer has the sizes of DeepGEMM; valid: N % 64 = 0 and K % 128 = 0")
    check_here()
    before, started = num_kernels(cache_folder()), time.monotonic()
    print(f"{a.model}: layers " + ", ".join(f"{n} x {k}" for n, k in shapes) + f"; {a.workers} processes", flush=True)
    with tqdm(unit="call") as bar:
        for done, total in warm(shapes, a.rows or ROWS, a.workers):
            bar.total = total
            bar.update(done - bar.n)
    new, seconds = num_kernels(cache_folder()) - before, time.monotonic() - started
    print(f"{new} kernels compiled in {seconds:.0f} s, {before} were there: {cache_folder()}")
    return 0
