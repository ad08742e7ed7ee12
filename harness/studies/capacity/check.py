"""The plan's predictions beside what is committed: memory of every timed engine, whole generations, and, where such
files are in `results/bench`, updates of the local trainer (`harness.devtools.bench.long_sequences`) and whole
steps under verl (`harness.devtools.bench.verl_scaling`).

Left out: what a prediction is made of, such as the timed layer and pushes at 7B, which agree by construction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from harness.foundation.clock import GIB
from harness.foundation.markdown_table import markdown_table
from harness.records.paths import bench_folder, throughput_folder
from harness.studies.capacity.memory import engine_bytes, update_parts
from harness.studies.capacity.place import Work, place
from harness.studies.capacity.seconds import Links, decode_s, prefill_s, step
from harness.studies.stage_rates import Measured, adam_s, operations, read_json, training_s
from harness.studies.throughput.estimates import DEVICE_GIB, kv_tokens_expected
from harness.studies.throughput.plan import Sweep
from harness.studies.throughput.records import read_record
from harness.studies.throughput.shapes import shape_of

UPDATES = {"chunks, bf16 native, compiled": False, "checkpoints, bf16 native, compiled": True}
"""Option of `harness.devtools.bench.long_sequences` that computes as the plan does -> are layers checkpointed?"""
STAGES_OF_VERL = {"generate": ("generate",), "old_logp": ("score",), "update": ("update", "communicate")}
"""Measured stage of a step -> what the plan has for it."""
NO_UPDATE = (
    "Memory and time of a whole update: no measurement is committed "
    "(`python -m harness.devtools.bench long_sequences --size 7b --out results/bench/long_sequences_7b.json` makes one)"
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A prediction beside a measurement."""

    what: str
    where: str
    unit: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative: 0.1 is a tenth too much."""
        return self.predicted / self.measured - 1


def engine_rows(records: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Weights and cache of the last engine of each record that says them."""
    found: list[Row] = []
    for stem, record in records.items():
        engine = next((e for e in reversed(record.get("engines", [])) if e.get("kv_tokens")), None)
        if engine is None or "cells" not in record:
            continue
        size, precision = record["size"], record["precision"]
        weights = engine_bytes(size, precision)[0] / GIB
        cache = kv_tokens_expected(size, precision, DEVICE_GIB)
        found += [
            Row(what="weights", where=stem, unit="GiB", predicted=weights, measured=engine["weights_gib"]),
            Row(what="cache", where=stem, unit="tokens", predicted=cache, measured=engine["kv_tokens"]),
        ]
    return found


def generation_rows(results: Path, found: Measured, sweep: Sweep) -> Iterator[Row]:
    """Whole generations of bare vLLM against the integral of the map."""
    path = bench_folder(results) / "vllm_overhead_7b.json"
    for part in read_json(path)["parts"] if path.is_file() else []:
        for cell in part["cells"]:
            batch, new = cell["batch"], cell["new_tokens"]
            seconds = batch * new / cell["median_tokens_per_s"]["bare"]
            yield from _generation(found, f"{part['size']}-{part['precision']}", batch, sweep.prompt, new, seconds)
    for entry in sweep.checks:
        stem = f"{entry.size}-{entry.precision}"
        check = read_record(throughput_folder(results, sweep.name) / f"{stem}-check.json").get("check", {})
        if "seconds" in check:
            yield from _generation(found, stem, check["batch"], check["prompt"], check["length"], check["seconds"])


def _generation(found: Measured, stem: str, batch: int, prompt: int, new: int, seconds: float) -> Iterator[Row]:
    record = found.records.get(stem, {})
    decoded = decode_s(record, batch, prompt, new)
    if decoded is not None:
        predicted = decoded[0] + prefill_s(record, batch * prompt)
        yield Row(what="generation", where=f"{stem}, {batch} x {new}", unit="s", predicted=predicted, measured=seconds)


def update_rows(results: Path, found: Measured) -> Iterator[Row]:
    """Updates of the local trainer on a GPU, of padded micro-batches."""
    for path in sorted(bench_folder(results).glob("long_sequences_*.json")):
        record = read_json(path)
        for row in record["rows"]:
            if row["option"] in UPDATES and "peak_gib" in row:
                yield from _update(found, record["size"], row)


def _update(found: Measured, size: str, row: Mapping[str, Any]) -> Iterator[Row]:
    config, is_checkpointed = shape_of(size), UPDATES[row["option"]]
    tokens, length = row["num_rows"] * row["length"], row["length"]
    peak = sum(update_parts(size, "bf16", 1, tokens, is_checkpointed).values())
    per_token = training_s(found, config, "bf16", length)[1]
    if is_checkpointed:
        per_token += config.num_layers * operations(config, length)[0] * found.layer_s["bf16"][0]
    where = f"{size}, {row['num_rows']} x {length}" + (", checkpoints" if is_checkpointed else "")
    seconds = tokens * per_token + adam_s(found, config)
    yield Row(what="update, memory", where=where, unit="GiB", predicted=peak, measured=row["peak_gib"])
    yield Row(what="update, time", where=where, unit="s", predicted=seconds, measured=row["s"])


def verl_rows(results: Path, found: Measured) -> Iterator[Row]:
    """Whole steps under verl: memory of a trainer's rank at its peak, and the stages that the plan has too."""
    for path in sorted(bench_folder(results).glob("verl_scaling_*.json")):
        record = read_json(path)
        for row in record["summary"]:
            yield from _verl(found, record["settings"], row)


def work_of(size: str, gpus: int, precision: str, given: Mapping[str, Any]) -> Work:
    """A cell of `harness.devtools.bench.verl_scaling` with these settings, as the plan knows it."""
    return Work(
        size=size, arm=precision, length=given["tokens"], prompt=given["prompt_tokens"],
        pass_tokens=given["pass_tokens"], batch=given["prompts"] * given["group"] * gpus,
    )  # fmt: skip


def _verl(found: Measured, given: Mapping[str, Any], row: Mapping[str, Any]) -> Iterator[Row]:
    gpus = row["gpus"]
    work = work_of(row["size"], gpus, row["precision"], given)
    at = place(work, gpus)
    where = f"{row['size']}, {work.batch // gpus} x {work.length} on each of {gpus}"
    where += ", compiled" if given["compile"] else ""
    where += f", {row['precision']}" if row["precision"] != "bf16" else ""
    peak = sum(at.update.values())
    yield Row(what="verl, memory", where=where, unit="GiB", predicted=peak, measured=row["trainer_gib"])
    if (planned := step(found, work, at, Links())) is None:
        return
    for stage, own in STAGES_OF_VERL.items():
        seconds, measured = sum(planned.seconds[name] for name in own), row["stages"][stage]
        yield Row(what=f"verl, {own[0]}", where=where, unit="s", predicted=seconds, measured=measured)


def section(results: Path, found: Measured, sweep: Sweep) -> list[str]:
    """The lines of the table: every engine, everything else, and what has no measurement."""
    engines = engine_rows(found.records)
    others = [*generation_rows(results, found, sweep), *update_rows(results, found), *verl_rows(results, found)]
    lines = ["## Predicted against measured", "", *(f"- {line}" for line in _summary([*engines, *others])), ""]
    rows = list[tuple[str, ...]]()
    for row in [*others, *engines]:
        shown = (f"{x:.0f}" if row.unit == "tokens" else f"{x:.2f}" for x in (row.predicted, row.measured))
        rows.append((row.what, row.where, row.unit, *shown, f"{row.error:+.1%}"))
    return [*lines, markdown_table(("what", "where", "unit", "predicted", "measured", "error"), rows, align="lllr"), ""]


def _summary(rows: Sequence[Row]) -> Iterator[str]:
    for what in dict.fromkeys(row.what for row in rows):
        errors = {row.where: row.error for row in rows if row.what == what}
        worst = max(errors, key=lambda where: abs(errors[where]))
        middle = median(map(abs, errors.values()))
        yield f"{what}: {len(errors)} measured, {middle:.1%} off in the median, at most {errors[worst]:+.1%} ({worst})"
    if not any(row.what.startswith("update") for row in rows):
        yield NO_UPDATE + "."
    if any(row.what == "verl, update" for row in rows):
        yield (
            "verl's stages were measured on eager layers; the plan scales one compiled layer of 7B by its operations, "
            "which small layers and the head, bound by memory traffic, do not follow."
        )
    yield (
        "Collectives alone, putting an engine to sleep and waking it: nothing is measured; **assumed**. Tensor "
        "parallel engines: one run of 32B on two H200, whose generation took 2.7 times the plan. Memory of the host: "
        "two runs (docs/verl.md)."
    )
