"""Records of layers, `layers/<name>.json`, one policy and format each, and their page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.foundation import provenance
from harness.foundation.digits import significant
from harness.foundation.markdown_table import markdown_table
from harness.foundation.text_table import text_table
from harness.foundation.whole_file import write_atomic
from harness.foundation.writable import check_writable
from harness.models.checkpoint import content_hash
from harness.records.json_rows import read_json_records, write_json_rows
from harness.records.paths import layers_folder
from harness.run.checks import check
from harness.studies.fp8_cache.answers import policy_of
from harness.studies.layers.study import ALL, REST, Tell, compare

Record = dict[str, Any]
DIGITS = 5
"""Significant digits of a number in a record."""
LEGEND = """\
k3: KL of the sampler to the trainer a token, nats, over the whole vocabulary at the tokens of answers that the exact
policy gave. alone: with this place in the format and all else in exact float32. all: every linear layer in the format.
lost: of the inputs that are not 0, the share that becomes 0. error in, error out: root mean square of the error of the
place's inputs, and of its outputs through exact weights, over that of the inputs and outputs themselves. Where errors
of single inputs are independent, the second is about as large as the first."""
WORST = ("policy", "format", "k3, all", "worst place", "alone", "all but the worst", "lost", "error in",
         "error out")  # fmt: skip


def measure(
    folder: Path, overrides: Sequence[str], *, name: str | None, num_answers: int, tell: Tell, results: Path
) -> Record:  # fmt: skip
    """The record of one model folder. Raises ValueError for a bad folder or override, and for a results folder that
    cannot be written, before anything is measured."""
    config, task, model = policy_of(folder, ["method=naive", "precision=int8", *overrides])
    plan = check(config).plan
    check_writable(layers_folder(results), "--results")
    rows, num_tokens = compare(model, task, plan, num_answers=num_answers, tell=tell)
    head, is_dirty = provenance.commit()
    return significant({
        "name": name or f"{folder.resolve().name}-{config.precision.name}", "policy": folder.resolve().name,
        "hash": content_hash(folder), "precision": config.precision.name, "task": task.name, "n": config.task.n,
        "num_parameters": sum(p.numel() for p in model.parameters()), "num_answers": num_answers,
        "num_tokens": num_tokens, "rows": rows, "commit": head, "is_dirty": is_dirty,
        "packages": provenance.packages(), "hardware": provenance.hardware("cpu"),
    }, DIGITS)  # fmt: skip


def keep(results: Path, record: Record) -> Path:
    """Write the record; its path."""
    path = layers_folder(results) / f"{record['name']}.json"
    write_json_rows(path, record, "rows")
    return path


def read_all(results: Path) -> list[Record]:
    """Every record, by name. Raises ValueError where there is none, and for a damaged file."""
    return read_json_records(layers_folder(results))


def row_named(record: Record, name: str) -> dict[str, Any]:
    """The row of a place, of all or of all but the worst."""
    return next(row for row in record["rows"] if row["name"] == name)


def worst(record: Record) -> dict[str, Any]:
    """The row of the place that has the largest k3 alone."""
    return max(_places(record), key=lambda row: row["k3"])


def text(records: Sequence[Record]) -> str:
    """The worst place of every policy with the legend, for a terminal."""
    return f"{text_table(WORST, _worst(records))}\n\n{LEGEND}\n"


def sentences(records: Sequence[Record]) -> list[str]:
    """One a policy: where its mismatch arises."""
    return [
        f"{r['policy']}, {r['precision']}: {worst(r)['name']} alone has a k3 of {worst(r)['k3']:.2g}, all layers "
        f"{row_named(r, ALL)['k3']:.2g}, all but that one {row_named(r, REST)['k3']:.2g}."
        for r in records
    ]  # fmt: skip


def page(records: Sequence[Record]) -> str:
    """The Markdown page."""
    parts = [
        "# Layers\n\nWhere in a policy does the mismatch of a rollout format arise? `lowbit layers FOLDER` asks it of "
        "one linear layer after the other.", markdown_table(WORST, _worst(records)), LEGEND,
    ]  # fmt: skip
    for record in records:
        rows = [
            (row["name"], f"{row['k3']:.2g}", f"[{row['k3_low']:.2g}, {row['k3_high']:.2g}]", *_rounding(row))
            for row in record["rows"]
        ]
        size = "" if record["n"] is None else f" n={record['n']}"
        made = (f"{record['num_answers']} answers, {record['num_tokens']} tokens, task {record['task']}{size}, "
                f"{record['num_parameters'] / 1e6:.1f}M parameters")  # fmt: skip
        table = markdown_table(("layer and modules", "k3", "interval", "lost", "error in", "error out"), rows)
        parts.append(f"## {record['policy']}, {record['precision']}\n\n{made}.\n\n{table}")
    return "\n\n".join(parts) + "\n"


def write(records: Sequence[Record], tables: Path) -> Path:
    """Write `layers.md`; its path."""
    path = tables / "layers.md"
    write_atomic(path, page(records).encode())
    return path


def _places(record: Record) -> list[dict[str, Any]]:
    return [row for row in record["rows"] if row["name"] not in (ALL, REST)]


def _worst(records: Sequence[Record]) -> list[tuple[str, ...]]:
    return [
        (record["policy"], record["precision"], f"{row_named(record, ALL)['k3']:.2g}", worst(record)["name"],
         f"{worst(record)['k3']:.2g}", f"{row_named(record, REST)['k3']:.2g}", *_rounding(worst(record)))
        for record in records
    ]  # fmt: skip


def _rounding(row: dict[str, Any]) -> tuple[str, str, str]:
    if "lost" not in row:
        return "-", "-", "-"
    return f"{100 * row['lost']:.0f} %", f"{100 * row['error_in']:.1f} %", f"{100 * row['error_out']:.1f} %"
