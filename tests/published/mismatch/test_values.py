"""Published values of mismatch: every row has a source, and wrong ones are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.published.mismatch.values import read_values


def test_the_file_says_what_its_sources_say() -> None:
    values = read_values()
    found = {(v.source, v.formats[0], v.unit, v.low, v.high) for v in values}
    assert ("arXiv 2510.11370", "bf16", "token", 6.4e-4, 6.4e-4) in found
    assert ("arXiv 2602.13953", "int8", "token", 2e-3, 2.5e-2) in found
    assert ("arXiv 2510.26788", "fp16", "sequence", 0.32, 0.32) in found
    assert all(v.source and v.place and v.read for v in values)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            "{model: a, formats: [bf16], unit: nats, low: 1, high: 2, source: s, place: p, read: text}",
            "values.0.unit='nats': must be 'token', 'sequence' or 'ratio'",
        ),
        (
            "{model: a, formats: [bf16], unit: token, low: 3, high: 2, source: s, place: p, read: text}",
            "values.0: low=3.0: more than high=2.0",
        ),
        (
            "{model: a, formats: [bf16], unit: token, low: 1, high: 2, source: '', place: p, read: text}",
            "values.0.source='': some text is expected",
        ),
        (
            "{model: a, formats: [bf16], unit: token, low: 1, high: 2, place: p, read: text}",
            "values.0.source is missing",
        ),
    ],
)
def test_a_row_that_is_no_value_is_named(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(f"values:\n  - {row}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"^{path}: {message}$"):
        read_values(path)
