"""Cells that wait for the host: by the breakdown, and only while the step stays that of the shortest context."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from harness.studies.throughput.factors import MapPoint, factor_at
from harness.studies.throughput.tables import mark
from harness.studies.throughput.waiting import SHARE, device_ms, host_bound_cells, idle_share
from tests.studies.throughput import made


def record(idle: dict[int, float], steps: dict[tuple[int, int], float]) -> dict:
    """Steps (ms) by (batch, context), and breakdowns of a step of 10 ms of which the device idles a share."""
    parts = {
        str(b): {"step_ms": 10.0, "forward_ms": 9.0 - 10 * share, "sampling_ms": 1.0, "host_ms": 10 * share}
        for b, share in idle.items()
    }
    cells = {
        f"{b}x{n}": {"status": "ok", "step_ms": ms, "step_ms_p10": ms, "step_ms_p90": ms, "context": float(n)}
        for (b, n), ms in steps.items()
    }
    return {"breakdown": parts, "cells": cells}


def test_the_share_is_linear_in_the_logarithm_of_the_batch():
    found = record({1: 0.0, 64: 0.6}, {})
    assert idle_share(found, 8) == pytest.approx(0.3)
    assert idle_share(found, 256) == pytest.approx(0.6)  # beyond the measured ones it stays
    assert idle_share({}, 8) == 0.0


def test_a_cell_waits_until_its_context_works_the_device_more():
    steps = {(64, 512): 4.0, (64, 2048): 4.3, (64, 16384): 6.0, (1, 512): 2.0}
    found = record({1: SHARE, 64: 0.5}, steps)
    assert host_bound_cells(found) == {(64, 512), (64, 2048)}
    assert host_bound_cells(record({1: 0.0, 64: 0.05}, steps)) == set()


def test_a_skipped_cell_waits_for_nobody():
    found = record({64: 0.5}, {(64, 512): 4.0})
    found["cells"]["64x2048"] = {"status": "skipped: kv", "kv_tokens": 10}
    assert host_bound_cells(found) == {(64, 512)}


def test_the_devices_part():
    assert device_ms(record({64: 0.5}, {}), 64) == pytest.approx(5.0)
    assert device_ms(record({64: 0.5}, {}), 1) is None


def test_a_number_is_marked_for_either_engine():
    waits, works = record({64: 0.5}, {(64, 512): 4.0}), record({64: 0.0}, {(64, 512): 4.0})
    assert mark(works, waits, [(64, 512)]) == mark(waits, works, [(64, 512)]) == "^"
    assert mark(works, works, [(64, 512)]) == mark(waits, waits, [(64, 2048)]) == ""
    waits["cells"]["64x512"]["step_ms_p90"] = 6.0
    assert mark(waits, works, [(64, 512)]) == "~^"


def test_a_factor_says_that_its_own_cells_wait(tmp_path: Path):
    sweep = made.sweep(tmp_path)
    records = made.records(sweep)
    place = MapPoint(size="7b", precision="int8", length=512, batch=8, measure="decode")
    for stem in ("7b-bf16", "7b-int8"):
        for batch, share in (("1", 0.0), ("8", 0.0), ("64", 0.9)):
            records[stem]["breakdown"][batch] = {
                "step_ms": 1.0,
                "host_ms": share,
                "forward_ms": 1.0,
                "sampling_ms": 0.0,
            }
    assert factor_at(sweep, records, place).is_host_bound is False  # its neighbour at batch 64 does
    records["7b-bf16"]["breakdown"]["8"]["host_ms"] = 0.2
    found = factor_at(sweep, records, place)
    assert found.is_host_bound is True
    assert math.isfinite(found.value)
