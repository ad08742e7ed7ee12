"""Checks of how far the map can be trusted: dummy contexts against real ones, integrals of steps against a whole
generation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.foundation.markdown_table import markdown_table
from harness.foundation.number_cell import number_cell
from harness.foundation.span import span
from harness.studies.throughput.cost import Point, curve, generation_s, integral
from harness.studies.throughput.map_cells import Records
from harness.studies.throughput.plan import Sweep, engine_specs
from harness.studies.throughput.settled import SPREAD, disturbed_cells
from harness.studies.throughput.tables import Rows
from harness.studies.throughput.waiting import SHARE, host_bound_cells

CLOSE = 0.01
"""Share by which a stretch may differ from the map to agree with it."""


def trust_lines(sweep: Sweep, records: Records) -> Iterator[str]:
    """One point per comparison, and a table where a whole generation was measured."""
    for spec in engine_specs(sweep):
        record = records.get(spec.stem, {})
        if spec.check is None and "filled" in record.get("pair", {}):
            pair = record["pair"]
            a, b = pair["filled"]["step_ms"], pair["prefilled"]["step_ms"]
            yield (
                f"* {spec.stem}, batch {pair['batch']}, context {pair['length']}: a step takes {a:.3f} ms with a dummy "
                f"context, {b:.3f} ms after a real prefill ({100 * (a / b - 1):+.1f} %)."
            )
        if spec.check is not None and "seconds" in record.get("check", {}):
            yield from check_lines(f"{spec.size}-{spec.precision}", record["check"], records)
    marked = sum(len(disturbed_cells(record)) for record in records.values())
    if marked:
        yield (
            f"* `~` marks what rests on a disturbed cell ({marked} of them): its steps spread by more than {SPREAD:g} "
            "(90th over 10th percentile), or lie above what the contexts next to it allow. Such a cell is measured "
            "again by the next run, twice at most, and the quieter measurement is kept."
        )
    waiting = sum(len(host_bound_cells(record)) for record in records.values())
    if waiting:
        yield (
            f"* `^` marks what rests on a cell whose steps wait for the host ({waiting} of them): the device idles "
            f"more than {100 * SHARE:.0f} % of a step, so the number says how fast the host was, which differs from "
            "machine to machine and day to day, and a ratio of two such numbers says nothing about the format. What "
            "the device alone would do stands in brackets in the table of the steps."
        )


def check_lines(stem: str, check: Mapping[str, Any], records: Records) -> Iterator[str]:
    """A whole generation against the map: seconds, where they differ, and the step by context."""
    mapped = records.get(stem, {})
    seconds = generation_s(mapped, check["batch"], check["prompt"], check["length"])
    words = (
        "the map does not reach it"
        if seconds is None
        else f"the map says {seconds:.1f} s ({100 * (seconds / check['seconds'] - 1):+.1f} %)"
    )
    yield (
        f"* {stem}, batch {check['batch']}, {check['length']} new tokens generated for real: "
        f"{check['seconds']:.1f} s; {words}."
    )
    if seconds is None or not check["steps"]:
        return
    yield f"  {_where(check, curve(mapped, check['batch']), seconds)}"
    rows = step_rows(check, mapped)
    if rows:
        head = ["context", "generated: mean step, ms", "median", "the map's median", "mean over the map", "median"]
        yield f"\n{markdown_table(head, rows)}\n"


def _where(check: Mapping[str, Any], points: Sequence[Point], seconds: float) -> str:
    """Place where the difference arises, in words."""
    stepping = stepping_s(check)
    outside = check["seconds"] - stepping
    parts = [
        f"Of the difference of {check['seconds'] - seconds:.1f} s, {outside:.1f} s lie outside the steps of the whole "
        f"batch (prefill of the prompts, and kernels at their first use), which the map leaves out, and "
        f"{stepping - seconds:.1f} s within them"
    ]
    if "collecting_s" in check:
        parts.append(f"; {check['collecting_s']:.1f} s went into {check['num_collections']} garbage collections")
    shares = [step["step_ms"] / own for step in check["steps"] if (own := step_at(points, step["context"]))]
    if shares:
        others = [100 * (share - 1) for share in shares if abs(share - 1) >= CLOSE]
        close = len(shares) - len(others)
        parts.append(f". Of {len(shares)} stretches {close} take what the map says within {100 * CLOSE:.0f} %")
        parts += [f", the others {span(min(others), max(others), '+.0f')} %"] if others else []
    parts.append(
        ". The map integrates medians, a generation adds up every step: what a neighbour on the host or the collector "
        "of garbage takes now and then counts in the latter alone. Tokens are not turned into text in either."
    )
    return "".join(parts)


def stepping_s(check: Mapping[str, Any]) -> float:
    """Seconds between the first and the last step of the whole batch, as recorded, else from the mean steps."""
    if "stepping_s" in check:
        return float(check["stepping_s"])
    means = [stretch["step_ms"] for stretch in check["steps"]]
    return sum(means) / len(means) * (check["length"] - 1) / 1e3


def step_rows(check: Mapping[str, Any], mapped: Mapping[str, Any]) -> Rows:
    """The generation's step beside the map's: around the map's contexts, or by stretch where that is all there is."""
    points = curve(mapped, check["batch"])
    rows = Rows()
    for found in check.get("windows") or check["steps"]:
        own = step_at(points, found["context"])
        middle = found.get("median_ms")
        rows.append([
            str(found["context"]), *map(number_cell, (found["step_ms"], middle, own)),
            _over(found["step_ms"], own), _over(middle, own),
        ])  # fmt: skip
    return rows


def step_at(points: Sequence[Point], context: float) -> float | None:
    """The map's step (ms) at a context, linear between the measured ones; None where they do not reach."""
    return integral(points, context - 0.5, context + 0.5)


def _over(step: float | None, own: float | None) -> str:
    return "-" if step is None or own is None else f"{100 * (step / own - 1):+.1f} %"
