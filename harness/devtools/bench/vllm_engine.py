"""The vLLM engine on its device: weight pushes, overhead against bare vLLM, verl's push beside ours.

    python -m harness.devtools.bench vllm_engine sync [--size 7b] [--formats fp8_block int8 bf16] --out sync.json
    python -m harness.devtools.bench vllm_engine verl [--size 7b] [--ours sync.json] --out verl.json
    python -m harness.devtools.bench vllm_engine overhead [--size 7b] [--cells 64x512 256x512] --out overhead.json
    ... --size toy --device cpu

One process holds one engine, so every engine is a child of its own; what it found is in the file before the next one
starts, and a child that dies leaves its last words instead. Left out: what a push costs a trainer, and several GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.devtools.bench.runner import add_device_and_out, add_numbers, check_device, check_positive, save
from harness.foundation.own_process import code_path, exit_code, module_command
from harness.foundation.process_log import last_words
from harness.foundation.provenance import commit, cpu_name, packages
from harness.foundation.whole_file import write_atomic
from harness.studies.throughput.shapes import plan_of, shape_of

FORMATS = {"cuda": ("fp8_block", "fp8_channel", "int8", "bf16"), "cpu": ("bf16",)}
RELOADED = "fp8_block"
"""Format whose push by a reload is timed, too, beside that by kernels."""
OVERHEAD = {"cuda": ("bf16", "fp8_block"), "cpu": ("bf16",)}
RELOADS = 3
LIMIT_S = 540
"""A child that takes longer is ended."""
ChildArguments = dict[str, Any]
"""Arguments of a child process, JSON."""


def children(given: argparse.Namespace) -> Iterator[ChildArguments]:
    """The children of a command, the one that matters most first."""
    base: ChildArguments = {"what": given.what, "size": given.size, "device": given.device}
    is_cuda = given.device == "cuda"
    if given.what == "verl":
        yield base
    elif given.what == "overhead":
        for precision in given.formats or OVERHEAD[given.device]:
            yield base | {"precision": precision, "cells": given.cells, "repeats": given.repeats}
    else:
        for precision in given.formats or FORMATS[given.device]:
            yield base | {"precision": precision, "is_direct": True if is_cuda else None, "pushes": given.pushes}
            if is_cuda and precision == RELOADED:
                yield base | {"precision": precision, "is_direct": False, "pushes": RELOADS}


def child(asked: ChildArguments, path: Path) -> int:
    """One engine in this process; its findings in `path`."""
    import torch

    size, device = asked["size"], asked["device"]

    def keep(found: Mapping[str, Any]) -> None:
        name = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
        write_atomic(path, json.dumps(asked | dict(found) | {"device_name": name}, allow_nan=False).encode())

    try:
        if asked["what"] == "sync":
            from harness.devtools.bench.vllm_engine_push import measure as push

            found = push(size, asked["precision"], device, asked["is_direct"], asked["pushes"])
        elif asked["what"] == "overhead":
            from harness.devtools.bench.vllm_engine_overhead import measure as overhead

            cells = [cell_of(text) for text in asked["cells"]]
            found = overhead(size, asked["precision"], device, cells, asked["repeats"], keep)
        else:
            from harness.devtools.bench.vllm_engine_verl import measure as verl

            found = verl(size, device, keep)
        keep(found)
    except (ValueError, torch.OutOfMemoryError) as error:
        print(f"vllm_engine: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    return 0


def cell_of(text: str) -> tuple[int, int]:
    """ "64x512" -> (batch, new tokens). Raises ValueError."""
    batch, _, new = text.partition("x")
    if not (batch.isdigit() and new.isdigit() and int(batch) and int(new)):
        raise ValueError(f"--cells {text!r}: not BATCHxNEW_TOKENS, such as 64x512")
    return int(batch), int(new)


def run_child(asked: ChildArguments) -> ChildArguments:
    """Findings of a child, or `asked` with "failed"; both where it died after its first findings."""
    with tempfile.TemporaryDirectory(prefix="lowbit-bench-") as folder:
        path, log = Path(folder) / "found.json", Path(folder) / "errors"
        words = module_command("harness.devtools.bench.vllm_engine", json.dumps(asked), str(path))
        with log.open("wb") as errors:
            environment = os.environ | code_path()
            code = exit_code(words, LIMIT_S, stdout=subprocess.DEVNULL, stderr=errors, env=environment)
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else dict(asked)
        if code != 0:
            text = log.read_text(encoding="utf-8", errors="replace")
            print(text[-4000:], file=sys.stderr)
            found["failed"] = last_words(text, f"exit code {code}" if code else f"no end after {LIMIT_S} s")
        return found


def report(part: Mapping[str, Any]) -> list[str]:
    """Findings of a child as lines of text."""
    name = " ".join(str(part[key]) for key in ("what", "size", "precision", "way") if key in part)
    lines = [f"{name}: FAILED: {part['failed']}"] if "failed" in part else []
    if "push" in part:
        lines += [
            f"{name}: {_times(part['push'])}, {part['x_limit']:.2f} x the copy ({part['limit']['median_ms']:.2f} ms)",
            f"  inside, ms: {_cells(part['inside_ms'])}",
            f"  write alone: {_write(part['write'])}; passport {part['passport_s']:.2f} s of "
            f"{part['passport_tensors']} tensors; finite: {part['has_finite_logp']}",
            f"  memory flat: {part['is_flat']}, grown {part['grown_bytes']} B, peak {part['peak_bytes']} B",
        ]
    if (broken := part.get("half_done")) is not None:
        lines.append(f"  half done: refused {broken['is_refused']}, healed {broken['is_healed']}")
    for cell in part.get("cells", ()) if part["what"] == "overhead" else ():
        if isinstance(cell, Mapping):
            lines.append(
                f"{name} {cell['batch']}x{cell['new_tokens']}, tokens/s: {_cells(cell['median_tokens_per_s'])}"
            )
            lines.append(f"  ours over: {_cells(cell['ratio'])}")
    for row in part.get("rows", ()):
        lines += [
            f"{name} ({row['what']}): {_times(row['push'])}; wrong codes {row['wrong_codes']:.3g}",
            f"  inside, ms: {_cells(row['inside_ms'])}",
        ]
    lines += [f"  {key}: {part[key]}" for key in ("notes", "ratio") if part.get(key)]
    return lines


def _times(times: Mapping[str, float]) -> str:
    return f"median {times['median_ms']:.2f} ms, p90 {times['p90_ms']:.2f}, of {times['count']}"


def _cells(values: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {value:.4g}" for key, value in values.items())


def _write(write: Mapping[str, Any] | None) -> str:
    if write is None:
        return "-"
    return ", ".join(f"{key} {value['median_ms']:.2f} ms" for key, value in write.items() if value is not None)


def run(given: argparse.Namespace) -> int:
    """All children of a command, one after the other."""
    from harness.devtools.bench.vllm_engine_verl import against, own_push_ms

    own_ms = None if given.ours is None else own_push_ms(given.ours)
    check_device(given.device)
    found: dict[str, Any] = {"what": given.what, "size": given.size, "commit": commit()[0], "packages": packages(),
                             "parts": []}  # fmt: skip
    for asked in children(given):
        print(f"{asked['what']} {asked['size']} {asked.get('precision', '')} ...", file=sys.stderr, flush=True)
        part = run_child(asked)
        if own_ms is not None and part.get("rows"):
            part["ratio"] = against(part, own_ms)
        found["parts"].append(part)
        save(given.out, found)
        print("\n".join(report(part)), flush=True)
    return 1 if any("failed" in part for part in found["parts"]) else 0


def options(parser: argparse.ArgumentParser) -> None:
    """The options of the bench."""
    parser.add_argument("what", choices=("sync", "overhead", "verl"))
    add_device_and_out(parser)
    parser.add_argument("--size", default="7b", help="Qwen2.5's shape of that size (default: 7b)")
    usual = (f"{what} {', '.join(formats['cuda'])}" for what, formats in (("sync", FORMATS), ("overhead", OVERHEAD)))
    parser.add_argument("--formats", nargs="+", metavar="PRECISION",
                        help=f"not of verl (default on a GPU: {'; '.join(usual)})")  # fmt: skip
    parser.add_argument("--cells", nargs="+", default=["64x512", "256x512"], metavar="BATCHxNEW",
                        help="of overhead: responses at a time, tokens of each (default: 64x512 256x512)")  # fmt: skip
    add_numbers(parser, ("pushes", 20, "of sync"), ("repeats", 3, "of overhead, of every side"))
    parser.add_argument("--ours", type=Path, help="of verl: JSON of sync, for the ratio")


def command(given: argparse.Namespace) -> int:
    """Check the options, then run every child. 0, 1 where a child failed. Raises ValueError for bad input."""
    shape_of(given.size)
    if given.formats and given.what == "verl":
        raise ValueError("--formats: verl has one, block FP8; valid with sync, overhead")
    if given.ours is not None and given.what != "verl":
        raise ValueError(f"--ours: {given.what} has no ratio; valid with verl")
    for precision in given.formats or ():
        plan_of(precision)
    for cell in given.cells:
        cell_of(cell)
    check_positive(given, "pushes", "repeats")
    return run(given)


if __name__ == "__main__":
    sys.exit(child(json.loads(sys.argv[1]), Path(sys.argv[2])))
