"""The page of natural mismatch: ours and published, by entropy and by position, and what they say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pandas as pd

from harness.foundation.markdown_table import markdown_table
from harness.foundation.span import span
from harness.foundation.text_table import text_table
from harness.foundation.whole_file import write_atomic
from harness.published.mismatch.figure import draw
from harness.published.mismatch.ours import CERTAIN, Measured, Row, pooled, rows_of
from harness.published.mismatch.values import Published

REAL = "vllm"
WORDS = "wordmath"
ENTROPIES = (0.0, 0.01, 0.1, 0.5, 1.0)
POSITIONS = (0, 16, 64, 128, 192)
LEGEND = f"""\
k3: mean of exp(d) - d - 1 a token, nats, d = log-prob of the trainer less that of the sampler, before any update;
median over the records with the smallest and the largest. entropy: of the trainer, nats a token. certain: part of the
sum of k3 on tokens with an entropy below {CERTAIN}. vllm: vLLM's kernels; embedded: emulated. spread: artificial spread
of the channels. Published values are of trained models during RL; notes: read second-hand."""
OURS = ("task", "n", "tokens", "parameters", "spread", "engine", "format", "k3", "range", "entropy", "certain", "bases",
        "records", "from")  # fmt: skip
THEIRS = ("model", "parameters", "format", "unit", "value", "what", "source", "read", "ours: word problems, 10M",
          "ours: sorting, 3M")  # fmt: skip


def cells(row: Row) -> tuple[str, ...]:
    """The cells of one of our rows."""
    ends = "-" if row.num_records == 1 else f"{row.k3_low:.1e} to {row.k3_high:.1e}"
    sweeps = [source for source in row.sources if not source.startswith("probe")]
    probes = [source.removeprefix("probe ") for source in row.sources if source.startswith("probe")]
    made = [*sweeps, *([f"probe {', '.join(probes)}"] if probes else [])]
    return (
        row.task, str(row.n), f"{row.length:.0f}", size(row.parameters), f"{row.spread:g}", row.engine, row.format,
        f"{row.k3:.1e}", ends, _or_dash(row.entropy, ".2f"), _percent(row.certain_share), str(row.num_bases),
        str(row.num_records), "; ".join(made),
    )  # fmt: skip


def size(parameters: float | None) -> str:
    """Parameters in words."""
    if parameters is None or not math.isfinite(parameters):
        return "-"
    return f"{parameters / 1e9:.3g}B" if parameters >= 1e9 else f"{parameters / 1e6:.2g}M"


def _or_dash(value: float, digits: str) -> str:
    return f"{value:{digits}}" if math.isfinite(value) else "-"


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %" if math.isfinite(value) else "-"


def theirs(values: Sequence[Published], rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Published values with ours of the same formats beside them, in the same unit."""
    found: list[tuple[str, ...]] = []
    for value in values:
        beside = [", ".join(_beside(value, rows, task)) or "-" for task in (WORDS, "sort")]
        found.append((value.model, size(value.parameters), ", ".join(value.formats), value.unit,
                      span(value.low, value.high, ".3g"), value.place,
                      value.source, value.read, *beside))  # fmt: skip
    return found


def stand_ins(rows: Sequence[Row], task: str) -> list[Row]:
    """Our rows on real kernels of the largest model of a task, or of 3M where it sorts."""
    own = [row for row in rows if row.task == task and row.engine == REAL]
    if not own:
        return []
    chosen = (max if task == WORDS else min)(row.parameters for row in own)
    return [row for row in own if row.parameters == chosen]


def _beside(value: Published, rows: Sequence[Row], task: str) -> list[str]:
    own = stand_ins(rows, task)
    found: list[str] = []
    for row in own:
        if row.format not in value.formats:
            continue
        if value.unit == "token":
            found.append(f"{row.format} {row.k3:.1e} ({row.length:.0f} tokens)")
        elif value.unit == "sequence":
            found.append(f"{row.format} {row.k3 * row.length:.1e} ({row.length:.0f} tokens)")
        else:
            floor = [one.k3 for one in own if one.format == "bf16" and one.n == row.n]
            found += [f"{row.format} {row.k3 / one:.0f} ({row.length:.0f} tokens)" for one in floor]
    return found


def sentences(rows: Sequence[Row], values: Sequence[Published]) -> list[str]:
    """Word problems on real kernels beside every published value a token of their formats."""
    found: list[str] = []
    for value in values:
        for row in stand_ins(rows, WORDS) if value.unit == "token" else ():
            if row.format in value.formats:
                found.append(f"{row.format}, {row.length:.0f} tokens: k3 {row.k3:.1e}, {placed(row.k3, value)} the "
                             f"{span(value.low, value.high, 'g')} of {value.model} ({value.source}).")  # fmt: skip
    return found


def placed(k3: float, value: Published) -> str:
    """Place of a k3 beside a published value, in words: within, or its ratio to the nearer end."""
    if value.low <= k3 <= value.high:
        return "within"
    return f"{k3 / value.high:.2g} times" if k3 > value.high else f"1/{value.low / k3:.2g} of"


def headline(rows: Sequence[Row], values: Sequence[Published]) -> str:
    """The finding: FP8 of both stand-ins beside a published bound, and BF16's floor beside a published value."""
    words, sort = (stand_ins(rows, task) for task in (WORDS, "sort"))
    fp8, digits = ([row.k3 for row in own if row.format == "fp8_block"] for own in (words, sort))
    floor = [row.k3 for row in words if row.format == "bf16"]
    bound = next((v for v in values if v.unit == "token" and "fp8_block" in v.formats), None)
    model = next((v for v in values if v.unit == "token" and "bf16" in v.formats and v.low == v.high), None)
    if not (fp8 and digits and floor and bound and model):
        return f"k3 of {len(rows)} combinations of task, length, size, engine and format"
    return (
        f"FP8 has a k3 of {_ends(fp8)} on word problems and {_ends(digits)} on sorting digits, {bound.model} less than "
        f"{bound.high:.0e} ({bound.source.partition(',')[0]}); BF16's floor on word problems is "
        f"1/{model.low / max(floor):.0f} of {model.model}'s"
    )


def _ends(values: Sequence[float]) -> str:
    return span(min(values), max(values), ".0e")


def profile(found: Sequence[Measured], edges: Sequence[float], by: str) -> list[tuple[str, ...]]:
    """k3 of word problems on real kernels by format, in buckets; the last row is the share of the tokens."""
    own = [one for one in found if one.task == WORDS and one.engine == REAL]
    names = [row.format for row in rows_of(own)]
    table = [
        (name, *(_or_dash(k3, ".1e") for k3, _ in pooled([m for m in own if m.format == name], edges, by=by)))
        for name in dict.fromkeys(names)
    ]
    counts = [count for _, count in pooled(own, edges, by=by)]
    total = sum(counts)
    return [*table, ("tokens", *(f"{100 * count / total:.1f} %" for count in counts))] if total else []


def _header(edges: Sequence[float], unit: str) -> tuple[str, ...]:
    ends = [*(f"{a:g} to {b:g}" for a, b in pairwise(edges)), f"from {edges[-1]:g}"]
    return ("format", *(f"{end} {unit}" for end in ends))


def text(rows: Sequence[Row]) -> str:
    """The table of ours for a terminal."""
    return text_table(OURS[:-1], [cells(row)[:-1] for row in rows])


def page(found: Sequence[Measured], values: Sequence[Published]) -> str:
    """The Markdown page."""
    rows = rows_of(found)
    told = "\n".join(f"- {line}" for line in sentences(rows, values))
    parts = [
        f"# Natural mismatch\n\n{headline(rows, values)}.",
        f"## Beside published values\n\n{markdown_table(THEIRS, theirs(values, rows))}\n\n{told}",
        f"## Ours\n\n{markdown_table(OURS, [cells(row) for row in rows])}\n\n{LEGEND}",
    ]
    for title, edges, unit, by in (("entropy of the token", ENTROPIES, "nats", "entropy"),
                                   ("place in the answer", POSITIONS, "tokens", "position")):  # fmt: skip
        if table := profile(found, edges, by):
            parts.append(f"## Word problems, vLLM's kernels, by {title}\n\n"
                         f"{markdown_table(_header(edges, unit), table)}")  # fmt: skip
    return "\n\n".join(parts) + "\n"


def as_csv(rows: Sequence[Row]) -> str:
    """Ours as CSV, numbers unrounded."""
    names = ["task", "n", "length", "parameters", "spread", "engine", "format", "k3", "k3_low", "k3_high", "entropy",
             "certain_share", "num_bases", "num_records", "sources"]  # fmt: skip
    values = [vars(row) | {"sources": " ".join(s.replace(" ", ":") for s in row.sources)} for row in rows]
    return pd.DataFrame(values, columns=names, dtype=object).to_csv(index=False)


def write(found: Sequence[Measured], values: Sequence[Published], tables: Path, figures: Path) -> list[Path]:
    """Write `mismatch.md`, `mismatch.csv` and the figure; the paths."""
    rows = rows_of(found)
    files = {"mismatch.md": page(found, values), "mismatch.csv": as_csv(rows)}
    for name, body in files.items():
        write_atomic(tables / name, body.encode())
    return [*(tables / name for name in files), *draw(rows, values, headline(rows, values), figures / "mismatch.png")]
