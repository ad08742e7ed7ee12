"""The table of parity: every format on every device that was measured, or why it could not be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness.foundation.markdown_table import markdown_table
from harness.foundation.number_cell import number_cell
from harness.studies.parity.record import FORMATS, Record
from harness.studies.parity.statistics import PAIRS, key

HEAD = (
    "format", "device", "kernel", "vLLM - embedded", "p50 / p90 / p99", "within 0.01", "vLLM - fp32",
    "embedded - fp32", "k3 of the three, x 1000", "correlation", "ratio",
)  # fmt: skip
WORDS = """\
Tokens sampled by vLLM, scored again by the embedded engine's emulation of the same formats and by the float32 decoder.
Columns of differences: mean |difference of log-probs| per token in nats, and for vLLM - embedded its percentiles and
the share of tokens within 0.01. k3: vLLM - embedded, vLLM - fp32, embedded - fp32. Correlation: of vLLM - fp32 with
embedded - fp32, token by token. Ratio: |vLLM - embedded| / |embedded - fp32|; well below 1, the laptop's number is
the format's, and above 1 kernels and base precision differ by more than the format costs.
"""


def markdown(records: Mapping[str, Record]) -> str:
    """Title, what was measured where, and the table, rows by format, then device."""
    lines = ["# Parity: the emulation against vLLM's kernels", "", WORDS]
    lines += [f"* {device}: {_setting(record)}" for device, record in sorted(records.items())]
    return "\n".join([*lines, "", markdown_table(HEAD, rows(records), align="lllr")]) + "\n"


def rows(records: Mapping[str, Record]) -> Iterator[list[str]]:
    """Cells of the table, row by row."""
    for name in FORMATS:
        for device, record in sorted(records.items()):
            if (row := record["formats"].get(name)) is not None:
                yield [name, device, *(_measured(row) if row["status"] == "ok" else _lacking(row))]


def _measured(row: Mapping[str, Any]) -> list[str]:
    own, kernel, emulated = (row["pairs"][key(pair)] for pair in PAIRS)
    return [
        ", ".join(row["kernels"]),
        _nats(own["mean_abs"]),
        " / ".join(_nats(own[level]) for level in ("p50", "p90", "p99")),
        f"{own['within_0.01']:.1%}",
        _nats(kernel["mean_abs"]),
        _nats(emulated["mean_abs"]),
        " / ".join(f"{1000 * part['k3']:.3g}" for part in (own, kernel, emulated)),
        number_cell(row["correlation"]),
        number_cell(row["ratio"], ".2f"),
    ]


def _lacking(row: Mapping[str, Any]) -> list[str]:
    reason = " ".join(str(row["reason"]).split())
    return [f"{row['status']}: {reason}", *["-"] * (len(HEAD) - 3)]


def _setting(record: Record) -> str:
    place = record["hardware"].get("gpu") or record["hardware"]["cpu"]
    return (
        f"{record['engine']} (torch {record['packages'].get('torch')}) on {place}; {record['model']} on "
        f"{record['task']}, {record['num_responses']} responses at temperature {record['temperature']:g}"
    )


def _nats(value: float) -> str:
    return f"{value:.4f}" if value >= 0.0001 else f"{value:.1e}"
