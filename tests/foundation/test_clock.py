"""Peaks of memory without what a sleeping engine has given back, by counters of an invented GPU."""

from __future__ import annotations

import pytest
import torch

from harness.foundation.clock import GIB, Clock


def test_peaks_leave_out_what_sleeping_engines_gave_back(monkeypatch: pytest.MonkeyPatch) -> None:
    peak, lent = [0.0], [40.0]

    def stats() -> dict[str, dict[str, dict[str, float]]]:
        return {f"{kind}_bytes": {"all": {"peak": (peak[0] + more) * GIB}} for kind, more in
                (("allocated", 0), ("reserved", 5))}  # fmt: skip

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
    peak[0] = 130.0
    clock = Clock("cuda", lambda: lent[0])
    assert clock.peaks == {"allocated": 90.0, "reserved": 95.0}  # asleep since the clock before
    with clock("sleep"):
        lent[0] = 0.0  # it wakes
        peak[0] = 100.0
    with clock("generate"):
        peak[0] = 102.0
    with clock("sleep"):
        lent[0] = 40.0
    with clock("update"):
        peak[0] = 160.0
    assert clock.stage_gib == {"generate": 102.0, "update": 120.0}
    assert clock.peaks == {"allocated": 120.0, "reserved": 125.0}
    assert clock.memory()["memory/reserved_gib"] == 125.0
