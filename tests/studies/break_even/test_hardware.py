"""A whole step put together from rates, pushes and one layer: every term by hand, and what decides nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.engines.vllm.memory import num_parameters
from harness.foundation.provenance import ROOT
from harness.studies.break_even import hardware
from harness.studies.break_even.hardware import Compared, StepCost, pays_from, step_cost, table_of
from harness.studies.stage_rates import RATES, Measured, operations, read_measured
from harness.studies.throughput.plan import read_sweep
from harness.studies.throughput.shapes import shape_of


def record(step_ms: float, idle_ms: float = 0.0) -> dict[str, object]:
    """A step of constant cost at contexts 512 and 1024, batch 64."""
    cells = {f"64x{n}": {"status": "ok", "context": n, "step_ms": step_ms, "tokens_per_s": 1.0} for n in (512, 1024)}
    part = {"forward_ms": step_ms - idle_ms, "sampling_ms": 0.0, "host_ms": idle_ms, "step_ms": step_ms}
    return {"cells": cells, "breakdown": {"64": part}}


FOUND = Measured(
    records={"7b-bf16": record(10.0), "7b-int8": record(5.0), "0.5b-bf16": record(2.0), "0.5b-int8": record(1.0)},
    push_s={"int8": 0.02, "fp8_block": 0.03},
    layer_s={"bf16": (1e-15, 2e-15), "fp8": (0.5e-15, 1e-15)},
    bytes_per_s=1e12,
)


def test_a_step_is_the_sum_of_its_terms() -> None:
    cost = step_cost(FOUND, "7b", "int8", "bf16", batch=64, prompt=24, length=1000)
    assert cost is not None
    shape, tokens = shape_of("7b"), 64 * 1024
    weights = 3584 * (2 * 3584 + 2 * 512 + 3 * 18944)
    forward, both = operations(shape, 1024)
    assert forward == 2 * weights + 2 * 1024 * 3584 and both == 6 * weights + 7 * 1024 * 3584
    head = 152064 * 3584
    rest = tokens * (28 * forward * 1e-15 + 2 * head * 1e-15 + 28 * both * 2e-15 + 6 * head * 2e-15)
    rest += num_parameters(shape) * 28 / 1e12
    assert cost.seconds == pytest.approx({"generate": 5.0, "sync": 0.02, "rest": rest})
    flow = step_cost(FOUND, "7b", "int8", "fp8", batch=64, prompt=24, length=1000)
    assert flow is not None
    assert cost.seconds["rest"] - flow.seconds["rest"] == pytest.approx(tokens * 28 * (forward * 0.5 + both) * 1e-15)
    small = step_cost(FOUND, "0.5b", "bf16", "bf16", batch=64, prompt=24, length=1000)
    assert small is not None  # never pushed: as the slowest, by parameters
    assert small.seconds["sync"] == pytest.approx(0.03 * num_parameters(shape_of("0.5b")) / num_parameters(shape))
    assert step_cost(FOUND, "7b", "int8", "bf16", batch=64, prompt=24, length=4000) is None
    assert step_cost(FOUND, "7b", "nvfp4", "bf16", batch=64, prompt=24, length=1000) is None


def cell(ratio: float, *, is_host_bound: bool = False) -> Compared:
    own = StepCost(size=1.0, length=1.0, seconds={"generate": 1.0, "sync": 0.0, "rest": 0.0})
    base = StepCost(size=1.0, length=1.0, seconds={"generate": ratio, "sync": 0.0, "rest": 0.0})
    return Compared(own=own, base=base, is_host_bound=is_host_bound)


def test_where_it_pays_rests_on_what_did_not_wait_for_the_host() -> None:
    cells = {("7b", 512): cell(0.9), ("7b", 1024): cell(1.1), ("7b", 2048): cell(1.2)}
    assert pays_from(cells, "7b") == "from 1024 tokens (0.90 to 1.20)"
    assert pays_from(cells | {("7b", 2048): cell(0.8)}, "7b") == "never (0.80 to 1.10)"
    assert pays_from(cells | {("7b", 512): cell(0.9, is_host_bound=True)}, "7b") == "always (1.10 to 1.20)"
    assert pays_from({("7b", 512): cell(2.0, is_host_bound=True)}, "7b") == "waits for the host"
    assert pays_from(cells, "32b") == "-"


def test_what_is_committed_makes_the_committed_page(tmp_path: Path) -> None:
    """Everything but the figures; a missing file is one line that names it."""
    plan = read_sweep(RATES)
    found = read_measured(ROOT / "results", plan)
    assert found.bytes_per_s == pytest.approx(30462466048 / 7.10611e-3, rel=1e-6)  # the pushes' fastest copy, BF16's
    costs = table_of(found, ["7b"], [512, 1024], batch=256, prompt=64)
    flow, plain = costs["one FP8 flow"]["7b", 512], costs["fp8_block"]["7b", 512]
    assert flow.ratio > plain.ratio > 1.0 and flow.own.seconds["generate"] == plain.own.seconds["generate"]
    page = (ROOT / "results" / "tables" / "break_even_h200.md").read_text(encoding="utf-8")
    assert f"| one FP8 flow | 7b | 512 | {flow.own.seconds['generate']:.1f} |" in page
    with pytest.raises(ValueError, match=r"cannot read .*fp8_layers_7b.json: No such file or directory; python"):
        read_measured(tmp_path, plan)
    with pytest.raises(ValueError, match=r"batch=7 was not measured; valid: 1, 8, 32"):
        hardware.report(tmp_path, [7])
    (tmp_path / "bench").mkdir()
    for name in ("fp8_layers_7b.json", "vllm_sync_7b.json"):
        source = json.loads((ROOT / "results" / "bench" / name).read_text(encoding="utf-8"))
        (tmp_path / "bench" / name).write_text(json.dumps(source), encoding="utf-8")
    with pytest.raises(ValueError, match="no measured rates; lowbit throughput throughput_h200"):
        read_measured(tmp_path, plan)
