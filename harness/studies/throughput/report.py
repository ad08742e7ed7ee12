"""The report of a throughput sweep: results/tables/<sweep>.md and .csv, results/figures/<sweep>/*.png."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from harness.foundation.whole_file import write_atomic
from harness.records.paths import figures_folder, tables_folder
from harness.studies.throughput import tables
from harness.studies.throughput.map_cells import Records, measured
from harness.studies.throughput.plan import Sweep, missing
from harness.studies.throughput.trust import trust_lines


def check_measured(sweep: Sweep, records: Records) -> None:
    """Raises ValueError where nothing is measured."""
    if not any(map(measured, records.values())):
        raise ValueError(f"{sweep.name}: nothing is measured; lowbit throughput {sweep.name} measures it")


def write(sweep: Sweep, records: Records, page: str, results: Path) -> list[Path]:
    """Write the page, the numbers and the figures; the paths."""
    from harness.studies.throughput.figures import draw_all
    from harness.studies.throughput.headline import draw_decode, quiet_ratios

    text, data = (tables_folder(results) / f"{sweep.name}.{kind}" for kind in ("md", "csv"))
    write_atomic(text, page.encode())
    write_atomic(data, tables.csv_text(sweep, records).encode())
    more = {"decode": draw_decode} if quiet_ratios(sweep, records) else {}
    return [text, data, *draw_all(sweep, records, figures_folder(results, sweep.name), more)]


def markdown(sweep: Sweep, records: Records, claimed: str = "") -> str:
    """The whole text. `claimed`: a table of claims beside what was measured, left out where empty."""
    return "\n".join(_parts(sweep, records, claimed)) + "\n"


def _parts(sweep: Sweep, records: Records, claimed: str) -> Iterator[str]:
    length, batch = tables.shown_length(sweep), tables.shown_batch(sweep)
    yield f"# Throughput of bare vLLM: {sweep.name}\n"
    yield setting(sweep, records) + "\n"
    yield f"## Decoding at a context of {length} tokens, tokens/s (ratio to BF16)\n"
    yield "Engines without a number are left out here and stand with the reason under *Not measured*.\n"
    yield tables.decode_table(sweep, records)
    yield f"\n## A whole generation at batch {batch}, tokens/s (ratio to BF16)\n"
    yield (
        f"After a prompt of {sweep.prompt} tokens: batch x length over the integral of the step over its contexts "
        "(trapezoid between the measured ones); the whole batch starts and ends together.\n"
    )
    yield tables.generation_table(sweep, records)
    yield "\n## The batch at which a format falls below BF16\n"
    yield "Decode rates, interpolated in the logarithm of the batch; within 3 % of BF16 is no fall.\n"
    yield tables.crossing_table(sweep, records)
    trust = list(trust_lines(sweep, records))
    if trust:
        yield "\n## How far to trust it\n"
        yield from trust
    if claimed:
        yield "\n## Claimed and measured\n"
        yield (
            "The speed tests of `claims.yaml`; `lowbit claims` says how verdicts follow. A claim without a batch is "
            "answered by every batch of the map; other hardware, models and loads, so a difference refutes nothing by "
            "itself.\n"
        )
        yield claimed
    yield "\n## Engines\n"
    yield tables.engine_table(sweep, records)
    compiling = tables.compiling_words(sweep, records)
    if compiling:
        yield f"\n{compiling}"
    yield f"\n## Where a decode step goes at a context of {sweep.lengths[0]} tokens, ms\n"
    yield (
        "The model's forward + head, sampling and log-probabilities + what the device waits for the host; in brackets "
        "how much faster than BF16 the device's part is, whatever the host does.\n"
    )
    yield tables.breakdown_table(sweep, records)
    yield "\n## Not measured\n"
    yield tables.missing_table(sweep, records)


def setting(sweep: Sweep, records: Records) -> str:
    """Paragraph on how and on what it was measured."""
    engines = [engine for record in records.values() for engine in record.get("engines", [])]
    devices = sorted({engine["device"] for engine in engines})
    versions = sorted({f"vLLM {e['versions']['vllm']}, torch {e['versions']['torch']}" for e in engines})
    days = sorted({engine["started_at"][:10] for engine in engines})
    found = [cell.get("status") for record in records.values() for cell in record.get("cells", {}).values()]
    counts = f"{found.count('ok')} cells measured, {found.count('skipped: kv')} beyond the cache"
    incomplete = sum(bool(missing(sweep, spec, records.get(spec.stem))) for spec in tables.map_specs(sweep))
    rest = f", {incomplete} engines incomplete" if incomplete else ""
    context = "filled with dummy values" if sweep.context == "filled" else "prefilled"
    return (
        f"{', '.join(devices)}; {'; '.join(versions)}; {', '.join(days)}. {counts}{rest}. Shapes of Qwen2.5, dummy "
        f"weights, one device per engine; temperature 1, log-probability of the sampled token on. A number is the "
        f"median over {sweep.min_steps} to {sweep.max_steps} steps in which every sequence got a token, at a context "
        f"that is {context}."
    )
