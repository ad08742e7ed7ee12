"""Probes in words and tables: one row per folder and format, what each correction would do, and a page of all."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any

from harness.foundation.markdown_table import markdown_table
from harness.foundation.number_cell import number_cell
from harness.foundation.text_table import text_table
from harness.foundation.whole_file import write_atomic
from harness.studies.probe.figure import draw
from harness.studies.probe.record import FLOOR, Record

SHARED_GIB = 1.0
"""GPU memory of other processes beyond which a probe was not alone; a process without tensors holds half of it."""
NAMES_WIDTH = 48
"""Columns of a list of names, in a terminal."""
LEGEND = """\
k3: mean of exp(d) - d - 1 a token with its 95 % interval (prompts as clusters), d = log-prob of the trainer less that
of the sampler, nats. k1: mean of -d. dose: k3 x mean length. ESS: of the first tokens' weights, at the longest length
that a quarter of the answers has. Weights and cache: as vLLM would hold them, from the shape. beyond: share of tokens
that a correction rejects, or whose weight is neither 1 nor the plain ratio (of the token or its answer)."""

_number = partial(number_cell, form=".2g")


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table, as text or Markdown."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def text(self) -> str:
        """Columns of plain text below the title; a long list of names in the first goes on in further rows."""
        rows: list[tuple[str, ...]] = []
        for first, *others in self.rows:
            head, *more = wrap(first, NAMES_WIDTH, break_long_words=False, break_on_hyphens=False)
            rows += [(head, *others), *((line, *[""] * len(others)) for line in more)]
        return f"{self.title}\n{text_table(self.header, rows)}"

    def markdown(self) -> str:
        """A section with a table."""
        return f"## {self.title}\n\n{markdown_table(self.header, self.rows)}"


def sentences(record: Record) -> list[str]:
    """Findings of a probe, the noise floor first."""
    rows, name = record["formats"], record["folder"]
    floor = [row["mismatch"]["kl_k3"] for row in rows if row["precision"] == FLOOR]
    found = [f"{name}: untrained, so costs alone count: its mismatch says nothing of a trained model."]
    found = found if record["is_untrained"] else []
    if (others := max(row.get("others_gib", 0.0) for row in rows)) > SHARED_GIB:
        found.append(
            f"{name}: other processes held {others:.0f} GiB of the GPU, so its rates are not those of a GPU alone."
        )
    found.append(f"{name}: the floor, {FLOOR} sampled twice, has a k3 of {' and '.join(f'{x:.2g}' for x in floor)}.")
    above = {row["name"]: row["mismatch"]["kl_k3"] for row in rows if is_above_floor(row, record)}
    below = [row["name"] for row in rows if is_below_floor(row, record)]
    alike = [row["name"] for row in rows if row["precision"] != FLOOR and row["name"] not in (*above, *below)]
    if below:
        found.append(f"{name}: below the floor: {', '.join(below)}.")
    if alike:
        found.append(f"{name}: not told apart from the floor: {', '.join(alike)}.")
    if above:
        ordered = sorted(above, key=lambda row: above[row])
        if max(floor) > 0:
            told = ", ".join(f"{row} {_times(above[row] / max(floor))}" for row in ordered)
            found.append(f"{name}: k3 over the floor's: {told}.")
        else:
            told = ", ".join(f"{row} {above[row]:.2g}" for row in ordered)
            found.append(f"{name}: k3, where the floor has none: {told}.")
    told = [
        f"sigma {row['sigma']:g} (k3 {row['kl_k3']:.2g}) is like {row['precision']}" for row in record.get("noise", ())
    ]
    if told:
        found.append(f"{name}: noise in the weights (method weight_noise): {', '.join(told)}.")
    return found


def is_above_floor(row: Mapping[str, Any], record: Record) -> bool:
    """Is the whole interval of a format's k3 above that of every floor row? Without intervals the values decide."""
    if row["precision"] == FLOOR:
        return False
    floor = [_or(other["k3_high"], other["mismatch"]["kl_k3"]) for other in record["formats"]
             if other["precision"] == FLOOR]  # fmt: skip
    return _or(row["k3_low"], row["mismatch"]["kl_k3"]) > max(floor)


def is_below_floor(row: Mapping[str, Any], record: Record) -> bool:
    """Is the whole interval of a format's k3 below that of every floor row? Without intervals the values decide."""
    if row["precision"] == FLOOR:
        return False
    floor = [_or(other["k3_low"], other["mismatch"]["kl_k3"]) for other in record["formats"]
             if other["precision"] == FLOOR]  # fmt: skip
    return _or(row["k3_high"], row["mismatch"]["kl_k3"]) < min(floor)


def tables(records: Sequence[Record]) -> list[Table]:
    """The mismatch, the costs, and of each folder the corrections."""
    pairs = [(record, row) for record in records for row in record["formats"]]
    mismatch = Table(
        title="Sampler against trainer",
        header=("folder", "format", "k3", "interval", "k1", "mean |d|", "p99 |d|", "max |d|", "dose", "ESS",
                "accuracy"),
        rows=[(record["folder"], row["name"], *_mismatch(row)) for record, row in pairs],
    )  # fmt: skip
    costs = Table(
        title="Costs",
        header=("folder", "format", "realized", "tokens/s", "push", "bits a weight", "weights", "cache a token",
                "cache tokens", "memory"),
        rows=[(record["folder"], row["name"], *_costs(row)) for record, row in pairs],
    )  # fmt: skip
    return [mismatch, costs, *(table for record in records if (table := _corrections(record)).rows)]


def asked(record: Record) -> str:
    """The questions and the engine of a probe in words."""
    row, config = record["formats"][0], record["config"]
    return (
        f"{record['folder']}: {row['num_answers']} answers of {row['num_prompts']} prompts each, task "
        f"{config['task']['name']}, engine {config['engine']['name']}, probe {record['id']}"
    )


def page(records: Sequence[Record]) -> str:
    """Markdown of several probes."""
    told = "\n".join(f"- {line}" for record in records for line in sentences(record))
    made = "\n".join(f"- {asked(record)}" for record in records)
    body = "\n\n".join(table.markdown() for table in tables(records))
    return f"# Probe\n\n{told}\n\n{body}\n\n{LEGEND}\n\n{made}\n"


def name_of(records: Sequence[Record]) -> str:
    """Name of the files of several probes: `probe_<id>`."""
    ids = [record["id"] for record in records]
    return f"probe_{ids[0] if len(ids) == 1 else hashlib.sha256(' '.join(ids).encode()).hexdigest()[:12]}"


def write(records: Sequence[Record], tables_folder: Path, figures_folder: Path) -> list[Path]:
    """Write the page and the figure; the paths."""
    name = name_of(records)
    path = tables_folder / f"{name}.md"
    write_atomic(path, page(records).encode())
    return [path, *draw(records, figures_folder / f"{name}.png")]


def _mismatch(row: Mapping[str, Any]) -> tuple[str, ...]:
    m = row["mismatch"]
    return (
        _number(m["kl_k3"]), _range(row["k3_low"], row["k3_high"], ".2g"), _number(m["kl_k1"]),
        _number(m["logp_absdiff_mean"]), _number(m["logp_absdiff_p99"]), _number(m["logp_absdiff_max"]),
        _number(m["kl_k3"] * row["length_mean"]), _ess(row),
        "-" if row["accuracy"] is None
        else f"{row['accuracy']:.3f} {_range(row['accuracy_low'], row['accuracy_high'], '.3f')}",
    )  # fmt: skip


def _costs(row: Mapping[str, Any]) -> tuple[str, ...]:
    passport = row["passport"]
    weights = [f"{count} {name}" for name, count in passport["weights"].items()]
    acts = [f"inputs {name}" for name in passport["acts"]]
    cache = [f"cache {passport['kv']}"] if passport["kv"] else []
    gib = row["memory_gib"].get("allocated")
    return (
        ", ".join((*weights, *acts, *cache)), f"{row['tokens_per_s']:,.0f}", f"{row['push_s']:.3g} s",
        f"{row['effective_bits']:.3f}", f"{row['weights_gib']:.3g} GiB", f"{row['cache_kib_per_token']:.3g} KiB",
        "-" if row["cache_tokens"] is None else f"{row['cache_tokens']:,}", "-" if gib is None else f"{gib:.2f} GiB",
    )  # fmt: skip


def _corrections(record: Record) -> Table:
    """Rows: corrections that do the same to every format are one row. Columns: formats."""
    rows = record["formats"]
    same: dict[tuple[str, ...], list[str]] = {}
    for name in rows[0]["corrections"]:
        same.setdefault(tuple(_effect(row["corrections"][name]) for row in rows), []).append(name)
    return Table(
        title=f"Corrections on the rollouts of {record['folder']}: beyond, kept, ESS of the weights",
        header=("correction", *(row["name"] for row in rows)),
        rows=[(", ".join(names), *cells) for cells, names in same.items()],
    )


def _effect(found: Mapping[str, Any]) -> str:
    return f"{_share(found['beyond_frac'])} {_share(found['token_kept_frac'])} {_number(found['ess'])}"


def _ess(row: Mapping[str, Any]) -> str:
    found = row["ess_by_length"]
    usable = [i for i, count in enumerate(found["count"]) if count >= row["num_answers"] / 4]
    return f"{_number(found['ess'][usable[-1]])} at {found['length'][usable[-1]]:.0f}" if usable else "-"


def _range(low: float | None, high: float | None, digits: str) -> str:
    return "-" if low is None or high is None else f"[{low:{digits}}, {high:{digits}}]"


def _times(value: float) -> str:
    return f"{value:,.0f} times" if value >= 10 else f"{value:.1f} times"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3g}%"


def _or(value: float | None, other: float) -> float:
    return other if value is None else value
