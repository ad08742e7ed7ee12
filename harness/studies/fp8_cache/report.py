"""The page of FP8 caches: rules by policy, magnitudes, accuracies, and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.foundation.markdown_table import markdown_table
from harness.foundation.span import span
from harness.foundation.text_table import text_table
from harness.foundation.whole_file import write_atomic
from harness.studies.fp8_cache.figure import draw
from harness.studies.fp8_cache.record import Record

LEGEND = """\
k3: KL of the sampler to the trainer a token, nats, over the whole vocabulary at the tokens of answers that the exact
policy gave, with its 95 % interval (answers as clusters). top 1 %: part of the sum that a hundredth of the tokens has,
those with the largest k3. |d|: mean absolute gap of a token's log-prob. Shares of stored values: saturated (beyond the
largest code), subnormal (below the smallest normal code; those stored as 0 among them), zero (stored as 0).
Rules: "1" is no calibration. "vllm": amax of K / 200 and of V / 100 over the first prompts. "nemo": 1.05 x amax / 448
over prompts and answers of a calibration batch. "stale": kept from the weights that were loaded first. "heads": a scale
a head. "K", "V": the other one exact. "Q": queries in FP8 too. "QP": softmax weights as well, times 256, as FP8
attention has them. "fresh": calibrated on weights before training (N(0, 0.02); "wide": N(0, 1 / inputs); "dummy":
vLLM's loader without a checkpoint). Everything but the cache is exact float32."""
CALIBRATED = ("vllm", "nemo", "nemo, prompts", "nemo, heads")
"""Rules that look at the weights at hand."""
UNTRAINED = {"vllm, fresh": "N(0, 0.02)", "vllm, fresh wide": "N(0, 1 / inputs)", "vllm, dummy": "dummy"}
GAP = "logp_absdiff_mean"
ROLES = {"k": "K", "v": "V", "q": "Q"}


def rules(record: Record) -> list[dict[str, Any]]:
    """The rows of rules, without those of a scan."""
    return [row for row in record["rows"] if row["factor"] is None]


def row_named(record: Record, name: str) -> dict[str, Any] | None:
    """The row of a rule; None where it was not measured."""
    return next((row for row in record["rows"] if row["name"] == name), None)


RULES = ("policy", "rule", "scales from", "k3", "interval", "top 1 %", "|d|", "saturated K, V", "subnormal K, V",
         "zero K, V")  # fmt: skip


def _rules(records: Sequence[Record]) -> list[tuple[str, ...]]:
    return [
        (record["name"], row["name"], row["words"], f"{row['k3']:.2g}", f"[{row['k3_low']:.2g}, {row['k3_high']:.2g}]",
         f"{100 * row['k3_top_share']:.0f} %", f"{row['logp_absdiff_mean']:.2g}",
         *(_shares(row, kind) for kind in ("saturated", "subnormal", "flushed")))
        for record in records for row in rules(record)
    ]  # fmt: skip


def _shares(row: dict[str, Any], kind: str) -> str:
    return ", ".join(f"{100 * row['stored'][r][kind]:.2g} %" if r in row["stored"] else "-" for r in ("k", "v"))


SIZES = ("policy", "largest K: prompts, answers", "answers over prompts, any layer", "largest V: prompts, answers",
         "answers over prompts, any layer", "median K, V", "largest score", "entropy of attention, nats",
         "largest weight, mean")  # fmt: skip


def _sizes(records: Sequence[Record]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for record in records:
        m = record["magnitudes"]
        cells = [cell for role in ("k", "v") for cell in (
            f"{m[role]['prompts']:.3g}, {m[role]['answers']:.3g}",
            f"{m[role]['ratio_min']:.2f} to {m[role]['ratio_max']:.2f}")]  # fmt: skip
        found.append((
            record["name"], *cells, f"{m['k']['median']:.2g}, {m['v']['median']:.2g}", f"{m['max_score']:.1f}",
            f"{m['attention_entropy']:.2f}", f"{m['top_weight']:.2f}",
        ))  # fmt: skip
    return found


SCAN = ("policy", "rounded", "scale / (amax / 448)", "k3", "|d|", "saturated", "subnormal")


def _scan(records: Sequence[Record]) -> list[tuple[str, ...]]:
    def shares(row: dict[str, Any], kind: str) -> str:
        return ", ".join(f"{100 * own[kind]:.2g} %" for own in row["stored"].values())

    return [
        (record["name"], ", ".join(ROLES[role] for role in row["stored"]), f"{row['factor']:g}", f"{row['k3']:.2g}",
         f"{row['logp_absdiff_mean']:.2g}", shares(row, "saturated"), shares(row, "subnormal"))
        for record in records for row in record["rows"] if row["factor"] is not None
    ]  # fmt: skip


ACCURACIES = ("policy", "rule", "accuracy", "interval", "tokens of an answer")


def _accuracies(records: Sequence[Record]) -> list[tuple[str, ...]]:
    return [
        (record["name"], name, f"{one['accuracy']:.3f}", f"[{one['accuracy_low']:.3f}, {one['accuracy_high']:.3f}]",
         f"{one['length_mean']:.0f}")
        for record in records for name, one in (record["accuracies"] or {}).items()
    ]  # fmt: skip


def text(records: Sequence[Record]) -> str:
    """The table of rules with the legend, for a terminal."""
    return f"{text_table(RULES, _rules(records))}\n\n{LEGEND}\n"


def sentences(records: Sequence[Record]) -> list[str]:
    """Sentences of the records, task by task over its policies."""
    tasks = dict.fromkeys((record["task"], record["n"]) for record in records)
    return [
        f"{task} n={n}: {line}"
        for task, n in tasks for line in _of_task([r for r in records if (r["task"], r["n"]) == (task, n)])
    ]  # fmt: skip


def _of_task(records: Sequence[Record]) -> list[str]:
    found: list[str] = []
    k, v = ([_value(record, name) for record in records] for name in ("1, K", "1, V"))
    found.append(f"With scale 1 k3 is {_range(k)} where keys alone are rounded, "
                 f"{_range(v)} where values alone are.")  # fmt: skip
    top = [row["k3_top_share"] for record in records if (row := row_named(record, "1"))]
    found.append(f"A hundredth of the tokens carries {_range([100 * x for x in top])} % of k3 at scale 1.")
    told = ", ".join(f'"{name}" {_range([_value(r, name) for r in records])}' for name in ("1", *CALIBRATED))
    found.append(f"k3 by rule: {told}.")
    apart = sum(not _overlap(row_named(r, "1"), row_named(r, name)) for r in records for name in CALIBRATED)
    found.append(f"Of {len(records) * len(CALIBRATED)} intervals of calibrated rules {apart} lie apart from that of "
                 "scale 1.")  # fmt: skip
    for record in records:
        for now in ("vllm", "nemo"):
            if row_named(record, f"{now}, stale"):
                stale, renewed = _value(record, f"{now}, stale"), _value(record, now)
                found.append(f'{record["name"]}: scales by "{now}" kept from {record["first"]} have a k3 of '
                             f"{stale:.2g}, renewed ones {renewed:.2g}.")  # fmt: skip
    times = [_value(r, "1, QP") / _value(r, "1") for r in records]
    gaps = [_value(r, "1, QP", GAP) / _value(r, "1", GAP) for r in records]
    found.append(f"FP8 attention (queries and softmax weights too) makes k3 {_range(times)} times and |d| "
                 f"{_range(gaps, 3)} times that of a rounded cache alone.")  # fmt: skip
    for name, words in UNTRAINED.items():
        found.append(f"Scales by vLLM's rule from weights before training ({words}): k3 "
                     f"{_range([_value(r, name) for r in records])}.")  # fmt: skip
    return found


def _value(record: Record, name: str, field: str = "k3") -> float:
    """`field` of the row of a rule; NaN where it was not measured."""
    row = row_named(record, name)
    return float("nan") if row is None else row[field]


def _overlap(a: dict[str, Any] | None, b: dict[str, Any] | None) -> bool:
    return a is None or b is None or (a["k3_low"] <= b["k3_high"] and b["k3_low"] <= a["k3_high"])


def _range(values: Sequence[float], digits: int = 2) -> str:
    return span(min(values), max(values), f".{digits}g")


def page(records: Sequence[Record]) -> str:
    """The Markdown page."""
    told = "\n".join(f"- {line}" for line in sentences(records))
    made = "\n".join(
        f"- {r['name']}: {r['num_answers']} answers, {r['num_tokens']} tokens, task {r['task']} n={r['n']}, "
        f"{r['num_parameters'] / 1e6:.1f}M parameters" + (f", first loaded: {r['first']}" if r["first"] else "")
        for r in records
    )
    parts = [
        f"# FP8 cache\n\n{told}", f"## Rules\n\n{markdown_table(RULES, _rules(records))}", LEGEND,
        f"## Magnitudes\n\n{markdown_table(SIZES, _sizes(records))}",
    ]  # fmt: skip
    if rows := _accuracies(records):
        parts.append(f"## Sampled through the cache\n\n{markdown_table(ACCURACIES, rows)}")
    if rows := _scan(records):
        parts.append(f"## Factors on the scale\n\n{markdown_table(SCAN, rows)}")
    return "\n\n".join([*parts, f"## Made from\n\n{made}"]) + "\n"


def write(records: Sequence[Record], tables: Path, figures: Path) -> list[Path]:
    """Write `fp8_cache.md` and the figure; the paths."""
    path = tables / "fp8_cache.md"
    write_atomic(path, page(records).encode())
    return [path, *draw(records, figures / "fp8_cache.png")]
