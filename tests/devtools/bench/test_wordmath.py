"""The bench of the problem generator: rates and ratios."""

from __future__ import annotations

import pytest

from harness.devtools.bench import wordmath


def test_rates_and_ratios_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A problem costs as many draws as draws are made in its time."""
    monkeypatch.setattr(wordmath, "PROBLEMS", 5)
    monkeypatch.setattr(wordmath, "REPEATS", 1)
    rows = wordmath.run()
    assert [row["n"] for row in rows] == [4, 10, 30] and [row["problems per s, at least"] for row in rows] == [
        None,
        10_000,
        None,
    ]
    for row in rows:
        for name in ("problem", "demonstration"):
            rate, ratio = row[f"{name}s per s"], row[f"draws a {name}"]
            assert isinstance(rate, float) and isinstance(ratio, float) and isinstance(row["draws per s"], float)
            assert rate * ratio == pytest.approx(row["draws per s"])
