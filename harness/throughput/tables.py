"""The map in tables: Markdown for readers, one row per cell in CSV, claimed beside measured."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.throughput.claimed import Compared
from harness.throughput.cost import (
    baseline_of,
    decode_ratios,
    decode_tokens_per_s,
    falls_below,
    generation_s,
    generation_tokens_per_s,
    ratio,
)
from harness.throughput.plan import BASELINE, Job, Sweep, cells, jobs

Records = Mapping[str, Mapping[str, Any]]
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


def engine_jobs(sweep: Sweep) -> list[Job]:
    """Every size in every precision, checks left out, in the order of the model's size."""
    order = sorted(sweep.sizes, key=lambda size: float(size.removesuffix("b")) if size[0].isdigit() else 0.0)
    wanted = {(job.size, job.precision): job for job in jobs(sweep) if job.check is None}
    extra = {size: [entry.precision for entry in sweep.extra if entry.size == size] for size in order}
    return [wanted[size, precision] for size in order for precision in (*sweep.precisions, *extra[size])]


def csv_text(sweep: Sweep, records: Records) -> str:
    """One row per cell of the sweep, measured or not."""
    sink = io.StringIO()
    writer: csv.DictWriter[str] = csv.DictWriter(sink, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for job in engine_jobs(sweep):
        for batch, length in cells(sweep):
            writer.writerow(_row(sweep, records, job, batch, length))
    return sink.getvalue()


def _row(sweep: Sweep, records: Records, job: Job, batch: int, length: int) -> dict[str, Any]:
    record, base = records.get(job.stem, {}), baseline_of(records, job.size)
    cell = dict(record.get("cells", {}).get(f"{batch}x{length}", {}))
    row: dict[str, Any] = {"size": job.size, "precision": job.precision, "batch": batch, "length": length}
    row["status"] = cell.get("status") or _whole(record) or "not measured"
    row |= {key: cell[key] for key in COLUMNS if key in cell and key != "status"}
    row["note"] = cell.get("note") or cell.get("reason") or ""
    if "needed_tokens" in cell:
        row["note"] = f"needs {cell['needed_tokens']} tokens of cache"
    if cell.get("status") == "ok":
        engine = record["engines"][cell["engine"]]
        row |= {key: engine[key] for key in ("kv_tokens", "load_s", "weights_gib", "device")} | engine["versions"]
        pair = [generation_tokens_per_s(each, batch, sweep.prompt, length) for each in (record, base)]
        row["ratio_to_bf16"] = number(ratio(cell["tokens_per_s"], decode_tokens_per_s(base, batch, length)), ".4f")
        row["generation_tokens_per_s"] = number(pair[0], ".1f")
        row["generation_ratio_to_bf16"] = number(ratio(*pair), ".4f")
    return row


def _whole(record: Mapping[str, Any]) -> str:
    """Why an engine measured nothing, or ""."""
    if "skipped" in record:
        return f"skipped: {record['skipped']}"
    return f"failed: {record['failed']}" if "failed" in record else ""


def number(value: float | None, form: str) -> str:
    """Formatted, a dash where there is none."""
    return NONE if value is None else format(value, form)


def table(head: Sequence[str], rows: Rows) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(cells_) + " |" for cells_ in [list(head), ["---"] * len(head), *rows]]
    return "\n".join(lines)


def decode_table(sweep: Sweep, records: Records) -> str:
    """Tokens/s and ratio to BF16 at one context, by batch."""
    length, rows = shown_length(sweep), Rows()
    for job in engine_jobs(sweep):
        record, base = records.get(job.stem, {}), baseline_of(records, job.size)
        row = [job.size, job.precision]
        for batch in sweep.batches:
            rate, over = decode_tokens_per_s(record, batch, length), decode_tokens_per_s(base, batch, length)
            row.append(_with_ratio(rate, over, job.precision))
        rows.append(row)
    return table(["size", "precision", *(f"batch {batch}" for batch in sweep.batches)], rows)


def generation_table(sweep: Sweep, records: Records) -> str:
    """Tokens/s of a whole generation and its ratio to BF16 at one batch, by length."""
    batch, rows = shown_batch(sweep), Rows()
    for job in engine_jobs(sweep):
        record, base = records.get(job.stem, {}), baseline_of(records, job.size)
        row = [job.size, job.precision]
        for length in sweep.lengths:
            pair = [generation_tokens_per_s(each, batch, sweep.prompt, length) for each in (record, base)]
            row.append(_with_ratio(pair[0], pair[1], job.precision))
        rows.append(row)
    return table(["size", "precision", *(f"{length} tokens" for length in sweep.lengths)], rows)


def _with_ratio(rate: float | None, base: float | None, precision: str) -> str:
    over = ratio(rate, base)
    return number(rate, ",.0f") + (f" ({over:.2f})" if over is not None and precision != BASELINE else "")


def crossing_table(sweep: Sweep, records: Records) -> str:
    """The batch at which each format falls below BF16, at the shortest, the shown and the longest context."""
    lengths = sorted({sweep.lengths[0], shown_length(sweep), sweep.lengths[-1]})
    rows = Rows()
    for job in engine_jobs(sweep):
        if job.precision == BASELINE:
            continue
        row = [job.size, job.precision]
        for length in lengths:
            found = decode_ratios(records.get(job.stem, {}), baseline_of(records, job.size), sweep.batches, length)
            row.append(crossing_words(found))
        rows.append(row)
    return table(["size", "precision", *(f"context {length}" for length in lengths)], rows)


def crossing_words(found: Sequence[tuple[int, float]]) -> str:
    """Where a format falls below BF16, in words."""
    if not found:
        return NONE
    at = falls_below(found)
    if at is None:
        return f"never up to {found[-1][0]}"
    return f"from {found[0][0]} on" if at <= found[0][0] else f"at {at:.0f}"


def engine_table(sweep: Sweep, records: Records) -> str:
    """What each engine took and left: load time, weights, cache, prefill, kernels."""
    rows = Rows()
    for job in engine_jobs(sweep):
        record = records.get(job.stem, {})
        if not record.get("engines"):
            continue
        engine, base = record["engines"][0], baseline_of(records, job.size)
        prefill = record.get("prefill", {}).get("tokens_per_s")
        rows.append([
            job.size, job.precision, number(engine["load_s"], ".1f"), number(engine["weights_gib"], ".1f"),
            number(engine["kv_tokens"] / 1e6, ".2f"),
            _with_ratio(prefill, base.get("prefill", {}).get("tokens_per_s"), job.precision), _kernel(engine["log"]),
        ])  # fmt: skip
    head = ["size", "precision", "load, s", "weights, GiB", "cache, M tokens", "prefill, tokens/s", "kernel"]
    return table(head, rows)


def _kernel(log: Sequence[str]) -> str:
    """The log line that names the kernel of the linear layers."""
    found = [line for line in log if any(word in line for word in ("Linear", "GEMM", "Gemm", "Marlin", "Kernel"))]
    return found[0].removeprefix("Using ").removeprefix("Selected ")[:80].replace("|", "/") if found else ""


def breakdown_table(sweep: Sweep, records: Records) -> str:
    """Where a decode step goes, ms, by batch."""
    rows = Rows()
    for job in engine_jobs(sweep):
        found: Mapping[str, Any] = records.get(job.stem, {}).get("breakdown", {})
        if found:
            parts = [found.get(str(batch), {}) for batch in sweep.breakdown]
            rows.append([job.size, job.precision, *(_step_words(part) for part in parts)])
    return table(["size", "precision", *(f"batch {batch}" for batch in sweep.breakdown)], rows)


def _step_words(parts: Mapping[str, Any]) -> str:
    if "step_ms" not in parts:
        return str(parts.get("reason", NONE))
    names = ("forward_ms", "sampling_ms", "host_ms")
    return f"{parts['step_ms']:.2f} = " + " + ".join(f"{parts[name]:.2f}" for name in names).replace("+ -", "- ")


def trust_lines(sweep: Sweep, records: Records) -> Iterator[str]:
    """How the map's two shortcuts compare with the real thing: dummy contexts, and integrals."""
    for job in jobs(sweep):
        record = records.get(job.stem, {})
        if job.check is None and "filled" in record.get("pair", {}):
            pair = record["pair"]
            a, b = pair["filled"]["step_ms"], pair["prefilled"]["step_ms"]
            yield (
                f"* {job.stem}, batch {pair['batch']}, context {pair['length']}: a step takes {a:.3f} ms with a dummy "
                f"context, {b:.3f} ms after a real prefill ({100 * (a / b - 1):+.1f} %)."
            )
        if job.check is not None and "seconds" in record.get("check", {}):
            check = record["check"]
            mapped = records.get(f"{job.size}-{job.precision}", {})
            seconds = generation_s(mapped, check["batch"], check["prompt"], check["length"])
            words = (
                "the map does not reach it"
                if seconds is None
                else f"the map says {seconds:.1f} s ({100 * (seconds / check['seconds'] - 1):+.1f} %)"
            )
            yield (
                f"* {job.size}-{job.precision}, batch {check['batch']}, {check['length']} new tokens generated for "
                f"real: {check['seconds']:.1f} s; {words}."
            )


def claims_table(compared: Sequence[Compared]) -> str:
    """Claimed beside measured."""
    rows = Rows()
    for each in compared:
        claim = each.claimed
        span = f"{claim.low:.2f}" if claim.low == claim.high else f"{claim.low:.2f} to {claim.high:.2f}"
        cell = f"{claim.size} {claim.precision}, " + ("decode" if claim.batch == 1 else f"{claim.length} tokens")
        found = ", ".join(f"{factor:.2f} at {batch}" for batch, factor in each.factors) or NONE
        rows.append([claim.source, claim.where, span, cell, found, each.verdict, claim.remark])
    return table(["source", "setting there", "claimed", "cell here", "factor at batch", "verdict", "remark"], rows)


def missing_table(sweep: Sweep, records: Records) -> str:
    """What has no number, and why."""
    rows = Rows()
    for job in engine_jobs(sweep):
        record = records.get(job.stem, {})
        groups: dict[str, list[str]] = {}
        for batch, length in cells(sweep):
            cell = record.get("cells", {}).get(f"{batch}x{length}", {})
            status = cell.get("status") or _whole(record) or "not measured"
            if status == "failed":
                status = f"failed: {cell['reason']}"
            if status == "skipped: kv":
                status = f"skipped: kv (the cache holds {cell['kv_tokens']:,} tokens)"
            if status != "ok":
                groups.setdefault(status, []).append(f"{batch}x{length}")
        everything = len(cells(sweep))
        for status, keys in groups.items():
            rows.append([job.size, job.precision, status, "all" if len(keys) == everything else ", ".join(keys)])
    return table(["size", "precision", "why", "batch x context"], rows)
