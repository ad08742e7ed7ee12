"""The map in tables: Markdown for readers, one row per cell in CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from harness.foundation.markdown_table import markdown_table
from harness.foundation.number_cell import number_cell
from harness.studies.throughput.cost import (
    baseline_of,
    decode_ratios,
    decode_tokens_per_s,
    falls_below,
    generation_tokens_per_s,
    ratio,
    reached,
)
from harness.studies.throughput.map_cells import MapCell, Records, cell_key, entry, measured
from harness.studies.throughput.plan import BASELINE, EngineSpec, Sweep, cells, engine_specs
from harness.studies.throughput.settled import disturbed_cells
from harness.studies.throughput.shapes import in_order
from harness.studies.throughput.waiting import device_ms, host_bound_cells

Rows = list[list[str]]
NONE = "-"
COLUMNS = (
    "size", "precision", "batch", "length", "status", "context", "step_ms", "step_ms_p10", "step_ms_p90",
    "tokens_per_s", "ratio_to_bf16", "generation_tokens_per_s", "generation_ratio_to_bf16", "num_steps",
    "admission_s", "kv_tokens", "load_s", "weights_gib", "device", "vllm", "torch", "measured_at", "note",
)  # fmt: skip


def shown_length(sweep: Sweep) -> int:
    """The context of tables with one: 2048 tokens, or the nearest there is."""
    return min(sweep.lengths, key=lambda length: abs(length - 2048))


def shown_batch(sweep: Sweep) -> int:
    """The batch of tables with one: 64, or the nearest there is."""
    return min(sweep.batches, key=lambda batch: abs(batch - 64))


def map_specs(sweep: Sweep) -> list[EngineSpec]:
    """Every size in every precision, checks left out, in the order of the model's size."""
    order = in_order(sweep.sizes)
    wanted = {(spec.size, spec.precision): spec for spec in engine_specs(sweep) if spec.check is None}
    extra = {size: [entry.precision for entry in sweep.extra if entry.size == size] for size in order}
    return [wanted[size, precision] for size in order for precision in (*sweep.precisions, *extra[size])]


def measured_specs(sweep: Sweep, records: Records) -> list[EngineSpec]:
    """The engines with a measured cell; why others have none is told once, by `missing_table`."""
    return [spec for spec in map_specs(sweep) if measured(records.get(spec.stem, {}))]


def csv_text(sweep: Sweep, records: Records) -> str:
    """One row per cell of the sweep, measured or not."""
    sink = io.StringIO()
    writer: csv.DictWriter[str] = csv.DictWriter(sink, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for spec in map_specs(sweep):
        for batch, length in cells(sweep):
            writer.writerow(_row(sweep, records, spec, batch, length))
    return sink.getvalue()


def _row(sweep: Sweep, records: Records, spec: EngineSpec, batch: int, length: int) -> dict[str, Any]:
    record, base = records.get(spec.stem, {}), baseline_of(records, spec.size)
    cell = entry(record, batch, length)
    row: dict[str, Any] = {"size": spec.size, "precision": spec.precision, "batch": batch, "length": length}
    row["status"] = cell.get("status") or _whole(record) or "not measured"
    row |= {key: cell[key] for key in COLUMNS if key in cell and key != "status"}
    row["note"] = cell.get("note") or cell.get("reason") or ""
    if "needed_tokens" in cell:
        row["note"] = f"needs {cell['needed_tokens']} tokens of cache"
    if cell.get("status") == "ok":
        engine = record["engines"][cell["engine"]]
        row |= {key: engine[key] for key in ("kv_tokens", "load_s", "weights_gib", "device")} | engine["versions"]
        pair = [generation_tokens_per_s(each, batch, sweep.prompt, length) for each in (record, base)]
        row["ratio_to_bf16"] = number_cell(ratio(cell["tokens_per_s"], decode_tokens_per_s(base, batch, length)), ".4f")
        row["generation_tokens_per_s"] = number_cell(pair[0], ".1f")
        row["generation_ratio_to_bf16"] = number_cell(ratio(*pair), ".4f")
    return row


def _whole(record: Mapping[str, Any]) -> str:
    """Reason why an engine measured nothing, or ""."""
    if "skipped" in record:
        return f"skipped: {record['skipped']}"
    return f"failed: {record['failed']}" if "failed" in record else ""


def mark(record: Mapping[str, Any], base: Mapping[str, Any], used: Collection[MapCell]) -> str:
    """Mark before a number that rests on the cells `used` of two engines: `~` disturbed, `^` the host's."""
    disturbed = (disturbed_cells(record) | disturbed_cells(base)) & set(used)
    waiting = (host_bound_cells(record) | host_bound_cells(base)) & set(used)
    return "~" * bool(disturbed) + "^" * bool(waiting)


def decode_table(sweep: Sweep, records: Records) -> str:
    """Tokens/s and ratio to BF16 at one context, by batch."""
    length, rows = shown_length(sweep), Rows()
    for spec in measured_specs(sweep, records):
        record, base = records[spec.stem], baseline_of(records, spec.size)
        row = [spec.size, spec.precision]
        for batch in sweep.batches:
            rate, over = decode_tokens_per_s(record, batch, length), decode_tokens_per_s(base, batch, length)
            row.append(_with_ratio(rate, over, spec.precision, mark(record, base, [(batch, length)])))
        rows.append(row)
    return markdown_table(["size", "precision", *(f"batch {batch}" for batch in sweep.batches)], rows)


def generation_table(sweep: Sweep, records: Records) -> str:
    """Tokens/s of a whole generation and its ratio to BF16 at one batch, by length."""
    batch, rows = shown_batch(sweep), Rows()
    for spec in measured_specs(sweep, records):
        record, base = records[spec.stem], baseline_of(records, spec.size)
        row = [spec.size, spec.precision]
        for length in sweep.lengths:
            pair = [generation_tokens_per_s(each, batch, sweep.prompt, length) for each in (record, base)]
            used = [(batch, at) for at in sweep.lengths if at <= reached(sweep, length)]
            row.append(_with_ratio(pair[0], pair[1], spec.precision, mark(record, base, used)))
        rows.append(row)
    return markdown_table(["size", "precision", *(f"{length} tokens" for length in sweep.lengths)], rows)


def _with_ratio(rate: float | None, base: float | None, precision: str, marked: str = "") -> str:
    over = ratio(rate, base)
    return (
        (marked if rate is not None else "")
        + number_cell(rate, ",.0f")
        + (f" ({over:.2f})" if over is not None and precision != BASELINE else "")
    )


def crossing_table(sweep: Sweep, records: Records) -> str:
    """The batch at which each format falls below BF16, at the shortest, the shown and the longest context."""
    lengths = sorted({sweep.lengths[0], shown_length(sweep), sweep.lengths[-1]})
    rows = Rows()
    for spec in measured_specs(sweep, records):
        if spec.precision == BASELINE:
            continue
        record, base = records[spec.stem], baseline_of(records, spec.size)
        row = [spec.size, spec.precision]
        for length in lengths:
            found = decode_ratios(record, base, sweep.batches, length)
            row.append(mark(record, base, [(batch, length) for batch, _ in found]) + crossing_words(found))
        rows.append(row)
    return markdown_table(["size", "precision", *(f"context {length}" for length in lengths)], rows)


def crossing_words(found: Sequence[tuple[int, float]]) -> str:
    """Batch from which a format falls below BF16, in words."""
    if not found:
        return NONE
    at = falls_below(found)
    if at is None:
        return f"never up to {found[-1][0]}"
    return f"from {found[0][0]} on" if at <= found[0][0] else f"at {at:.0f}"


def engine_table(sweep: Sweep, records: Records) -> str:
    """Table of engines: load time and how much of it compiled, weights, cache, prefill, kernels."""
    rows = Rows()
    for spec in map_specs(sweep):
        record = records.get(spec.stem, {})
        if not record.get("engines"):
            continue
        engine, base = record["engines"][0], baseline_of(records, spec.size)
        prefill = record.get("prefill", {}).get("tokens_per_s")
        rows.append([
            spec.size, spec.precision, number_cell(engine["load_s"], ".1f"), _compiling_words(engine),
            number_cell(engine["weights_gib"], ".1f"),
            number_cell(engine["kv_tokens"] / 1e6, ".2f"),
            _with_ratio(prefill, base.get("prefill", {}).get("tokens_per_s"), spec.precision), _kernel(engine["log"]),
        ])  # fmt: skip
    head = [
        "size",
        "precision",
        "load, s",
        "DeepGEMM compiling, s",
        "weights, GiB",
        "cache, M tokens",
        "prefill, tokens/s",
        "kernel",
    ]
    return markdown_table(head, rows)


def _compiling_words(engine: Mapping[str, Any]) -> str:
    found = engine.get("compiling")
    return NONE if not found else f"{found['seconds']:.1f} ({found['calls']} kernels)"


def compiling_words(sweep: Sweep, records: Records) -> str:
    """Sentence on the cost of DeepGEMM's first use, after which later engines find its kernels; empty without two such
    engines."""
    pairs: list[str] = []
    for size in dict.fromkeys(spec.size for spec in map_specs(sweep)):
        found = [
            e for name in ("fp8_block", "fp8_block+kv8") for e in records.get(f"{size}-{name}", {}).get("engines", [])
        ]
        loads = [engine["load_s"] for engine in sorted(found, key=lambda engine: engine["started_at"])]
        if len(loads) > 1:
            pairs.append(f"{loads[0]:.0f} s and then {min(loads[1:]):.0f} s at {size.upper()}")
    if not pairs:
        return ""
    return (
        "DeepGEMM compiles a kernel per shape of a block-FP8 layer at its first use, into the folder of "
        "`DG_JIT_CACHE_DIR` (`~/.cache/vllm/deep_gemm` unless set), where later engines with these shapes find it; the "
        f"cache's format does not matter. Loading takes {', '.join(pairs)}. Every batch runs before the first cell's "
        "clock starts, so no cell pays for it; an RL job pays once per machine."
    )


def _kernel(log: Sequence[str]) -> str:
    """The log line that names the kernel of the linear layers."""
    found = [line for line in log if any(word in line for word in ("Linear", "GEMM", "Gemm", "Marlin", "Kernel"))]
    return found[0].removeprefix("Using ").removeprefix("Selected ")[:80].replace("|", "/") if found else ""


def breakdown_table(sweep: Sweep, records: Records) -> str:
    """Table of the parts of a decode step, ms, by batch, and the speed of the device's part against BF16."""
    rows = Rows()
    for spec in map_specs(sweep):
        record, base = records.get(spec.stem, {}), baseline_of(records, spec.size)
        found: Mapping[str, Any] = record.get("breakdown", {})
        if found:
            row = [spec.size, spec.precision]
            for batch in sweep.breakdown:
                over = ratio(device_ms(base, batch), device_ms(record, batch))
                words = "" if over is None or spec.precision == BASELINE else f" ({over:.2f})"
                row.append(_step_words(found.get(str(batch), {})) + words)
            rows.append(row)
    return markdown_table(["size", "precision", *(f"batch {batch}" for batch in sweep.breakdown)], rows)


def _step_words(parts: Mapping[str, Any]) -> str:
    if "step_ms" not in parts:
        return str(parts.get("reason", NONE))
    names = ("forward_ms", "sampling_ms", "host_ms")
    return f"{parts['step_ms']:.2f} = " + " + ".join(f"{parts[name]:.2f}" for name in names).replace("+ -", "- ")


def missing_table(sweep: Sweep, records: Records) -> str:
    """Table of what has no number, with the reason."""
    rows = Rows()
    for spec in map_specs(sweep):
        record = records.get(spec.stem, {})
        groups: dict[str, list[str]] = {}
        for batch, length in cells(sweep):
            cell = entry(record, batch, length)
            status = cell.get("status") or _whole(record) or "not measured"
            if status == "failed":
                status = f"failed: {cell['reason']}"
            if status == "skipped: kv":
                status = f"skipped: kv (the cache holds {cell['kv_tokens']:,} tokens)"
            if status != "ok":
                groups.setdefault(status, []).append(cell_key(batch, length))
        everything = len(cells(sweep))
        for status, keys in groups.items():
            rows.append([spec.size, spec.precision, status, "all" if len(keys) == everything else ", ".join(keys)])
    return markdown_table(["size", "precision", "why", "batch x context"], rows)
