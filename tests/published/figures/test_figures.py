"""Paper figures on synthetic results: numbers worked out by hand, and the figure that holds them."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.published.figures import draw
from harness.published.figures.drawn import Drawn
from harness.published.figures.flashrl_throughput import REPORTED
from harness.studies.throughput.plan import read_sweep
from harness.studies.throughput.records import Record, read_records, write_record
from tests.arm_factory import STEPS, Runs, run, write


def row(drawn: Drawn, **keys: Any) -> dict[str, Any]:
    """The only row of the numbers with these values."""
    (found,) = [r for r in drawn.numbers.to_dict("records") if all(r[k] == v for k, v in keys.items())]
    return found


def laid_out(drawn: Drawn) -> None:
    """Legends over no panel, nothing outside the page, no panel's text over another."""
    drawn.figure.draw_without_rendering()
    page = drawn.figure.bbox
    boxes = [ax.get_tightbbox() for ax in drawn.figure.axes]
    panels = [ax.get_window_extent() for ax in drawn.figure.axes]
    for legend in drawn.figure.legends:
        box = legend.get_window_extent()
        is_above, is_beside = box.y0 >= max(p.y1 for p in panels), box.x0 >= max(b.x1 for b in boxes)
        assert is_above or is_beside, "legend over the data"
        assert box.x0 >= page.x0 and box.x1 <= page.x1
    for box in boxes:
        assert box.x0 >= page.x0 - 1 and box.y0 >= page.y0 - 1 and box.x1 <= page.x1 + 1 and box.y1 <= page.y1 + 1
    for a, b in combinations(boxes, 2):
        width, height = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert min(width, height) < 2, "a title or label reaches into another panel"


def y_values(drawn: Drawn) -> np.ndarray:
    """Every y that a line of the figure goes through, and every x: rows lie on their side."""
    points = [np.array(line.get_xydata(), dtype=float) for ax in drawn.figure.axes for line in ax.lines]
    return np.concatenate([p.ravel() for p in points])


def is_drawn(drawn: Drawn, value: float) -> bool:
    return bool(np.isclose(y_values(drawn), value, rtol=1e-6).any())


def rates(results: Path, steps: dict[str, dict[int, float]]) -> Path:
    """Records of the map: engine (`7b-int8`) -> batch -> ms of a step, which grows by a hundredth a context."""
    sweep = read_sweep("throughput_h200")
    for stem, by_batch in steps.items():
        size, precision = stem.split("-")
        record: Record = {"schema_version": 1, "sweep": sweep.name, "size": size, "precision": precision, "engines": []}
        record["cells"] = {
            f"{batch}x{context}": {
                "status": "ok", "step_ms": step * factor, "step_ms_p10": step * factor, "step_ms_p90": step * factor,
                "tokens_per_s": 1e3 * batch / (step * factor), "num_steps": 24, "context": float(context),
            }
            for batch, step in by_batch.items()
            for context, factor in ((1024, 0.99), (2048, 1.0), (4096, 1.01))
        }  # fmt: skip
        (results / "throughput" / sweep.name).mkdir(parents=True, exist_ok=True)
        write_record(results / "throughput" / sweep.name / f"{stem}.json", record)
    return results


def changed(results: Path, stem: str, key: str, **values: Any) -> None:
    """The record of an engine with other values under `key`."""
    sweep = read_sweep("throughput_h200")
    record = read_records(results, sweep)[stem]
    record[key] = record.get(key, {}) | values
    write_record(results / "throughput" / sweep.name / f"{stem}.json", record)


def test_decode_rates_are_relative_to_bf16_of_the_same_size_and_batch(tmp_path: Path) -> None:
    steps = {
        "7b-bf16": {8: 6.0, 64: 9.0, 256: 20.0}, "7b-int8": {8: 5.0, 64: 6.0, 256: 25.0}, "7b-int4": {8: 3.0, 64: 12.0},
        "14b-bf16": {8: 10.0, 64: 18.0}, "14b-int8": {8: 8.0, 64: 12.0}, "32b-int8": {8: 1.0}, "3b-bf16": {8: 4.0},
    }  # fmt: skip
    drawn = draw("flashrl_throughput", rates(tmp_path, steps))
    found = {(r["model"], r["precision"], r["batch"]): r["over bf16"] for r in drawn.numbers.to_dict("records")}
    assert found == pytest.approx({
        ("7b", "int8", 8): 1.2, ("7b", "int8", 64): 1.5, ("7b", "int8", 256): 0.8,
        ("7b", "int4", 8): 2.0, ("7b", "int4", 64): 0.75,
        ("14b", "int8", 8): 1.25, ("14b", "int8", 64): 1.5,
    })  # fmt: skip
    assert drawn.says == (  # up to a batch of 64: 0.8 at 256 is not among them
        "7B: INT8 decodes 1.20 to 1.50 times as fast as BF16 up to a batch of 64; QuRL's authors report 1.2 to 1.3.",
        "14B: INT8 decodes 1.25 to 1.50 times as fast as BF16 up to a batch of 64; QuRL's authors report 1.3 to 1.56.",
    )
    assert drawn.figure.get_suptitle().startswith("INT8 decodes 1.2 to 1.5 (7B), 1.2 to 1.5 (14B) times")
    assert all(is_drawn(drawn, value) for value in found.values())
    for ax in drawn.figure.axes:  # a band per reported size that was measured, from its lowest to its highest
        spans = [(p.get_extents().y0, p.get_extents().y1) for c in ax.collections for p in c.get_paths()]
        assert spans == [REPORTED["7b"], REPORTED["14b"]]
    laid_out(drawn)


def test_decode_rates_that_were_disturbed_or_waited_for_the_host_are_left_out(tmp_path: Path) -> None:
    steps = {f"7b-{name}": {8: 6.0, 64: 9.0} for name in ("bf16", "int8")}
    results = rates(tmp_path, steps)
    assert len(draw("flashrl_throughput", results).numbers) == 2
    cell = read_records(results, read_sweep("throughput_h200"))["7b-bf16"]["cells"]["64x2048"]
    changed(results, "7b-bf16", "cells", **{"64x2048": cell | {"step_ms_p90": 1.31 * cell["step_ms"]}})
    assert list(draw("flashrl_throughput", results).numbers["batch"]) == [8]
    changed(results, "7b-int8", "breakdown", **{"8": {"step_ms": 6.0, "forward_ms": 4.5, "host_ms": 1.5}})
    with pytest.raises(ValueError, match="throughput_h200: no format has an undisturbed rate at a context of 2048"):
        draw("flashrl_throughput", results)


def qurl_runs() -> Runs:
    runs = run("ablate_qurl", "bf16", columns={"train/clip_frac": 0.01, "train/clip_high_frac": 0.005})
    for precision in ("int8", "int4"):
        for method, flips, high in (
            ("naive", 1.0, 0.1),
            ("flashrl", 1.0, 0.1),
            ("qurl_acr", 1.0, 0.05),
            ("qurl_lr", 1.5, 0.05),
        ):
            knobs = {"ACR": {"cap": 2.0, "u_max": None}} if method == "qurl_acr" else {}
            runs += run("ablate_qurl", method, precision, k3=(1e-3, 1e-1), knobs=knobs, auc=0.6,
                        columns=_qurl_columns(flips, high))  # fmt: skip
        for scale in (1.25, 1.5, 2.0):
            runs += run("ablate_qurl", "qurl", precision, k3=(1e-3, 1e-2), knobs={"UAQ": {"s": scale}}, auc=0.65,
                        columns=_qurl_columns(scale**2, 0.05))  # fmt: skip
    return runs


def _qurl_columns(flips: float, high: float) -> dict[str, float]:
    return {
        "sync/code_flip_rate": 0.01 * flips,
        "train/clip_frac": 2 * high,
        "train/clip_high_frac": high,
        "mismatch/logp_absdiff_max": 3.0,
    }


def test_qurl_figures(tmp_path: Path) -> None:
    words = run("main_wordmath", "bf16", task__n=10) + run(
        "main_wordmath", "naive", "int8", k3=(4e-3, 2e-3), task__n=10
    )
    results = write(tmp_path, qurl_runs() + words)
    drawn = draw("qurl_mismatch", results)
    assert row(drawn, panel="int8, word problems, kernels", method="naive")["growth"] < 1
    steps = np.arange(STEPS) / (STEPS - 1)
    tenfold = (0.01**-steps)[-10:].mean() / (0.01**-steps)[:10].mean()
    assert row(drawn, panel="int8, 8 digits, emulated", method="naive")["growth"] == pytest.approx(tenfold)
    assert row(drawn, panel="int4, 8 digits, emulated", method="bf16")["growth"] == pytest.approx(1.0)
    assert row(drawn, panel="int4, 8 digits, emulated", method="qurl")["largest |d| last 10, nats"] == pytest.approx(
        3 * math.sqrt(2)
    )
    assert "12.5" in drawn.says[0]
    laid_out(drawn)

    drawn = draw("qurl_clip", results)
    assert row(drawn, precision="int4", method="flashrl")["clipped tokens"] == pytest.approx(0.3)
    assert row(drawn, precision="int4", method="qurl_acr")["at the upper clip"] == pytest.approx(0.075)
    assert row(drawn, precision="int4", method="qurl_acr")["AUC - bf16"] == pytest.approx(-0.1)
    assert drawn.says[0].startswith("int8: ACR has 0.500 ") and drawn.says[0].endswith("fewer.")
    assert is_drawn(drawn, 0.075)
    laid_out(drawn)

    drawn = draw("qurl_flips", results)
    assert row(drawn, precision="int8", setting="UAQ 2")["over none"] == pytest.approx(4.0)
    assert row(drawn, precision="int8", setting="lr")["over none"] == pytest.approx(1.5)
    assert row(drawn, precision="int4", setting="UAQ 1.5")["AUC - none"] == pytest.approx(0.05)
    assert is_drawn(drawn, 2.25)
    # 4 layers of 64: q, k, v 64, 32, 32, gate and up 192 each, against o 64 and down 192
    assert is_drawn(drawn, 1 + (512 / 768) * (2.0**2 - 1))
    laid_out(drawn)


@pytest.mark.parametrize(
    ("name", "runs", "left"),
    [
        ("qurl_mismatch", ("main_wordmath", "bf16", "naive", "int8", 10), "int8, word problems, kernels"),
        ("fp8_rl_kv", ("main_wordmath", "bf16", "naive", "fp8_block", 10), "word problems, 245 tokens, FP8 kernels"),
    ],
)
def test_a_panel_without_arms_is_left_out(name: str, runs: tuple[Any, ...], left: str, tmp_path: Path) -> None:
    """The first panel's sweep has results of other lengths alone."""
    sweep, control, method, precision, n = runs
    first = {"qurl_mismatch": "ablate_qurl", "fp8_rl_kv": "standard"}[name]
    other = run(first, "bf16", task__n=99) + run(first, "naive", precision, task__n=99)
    with pytest.raises(ValueError, match=f"sweep '{first}' has no scored run of the arms that this figure shows"):
        draw(name, write(tmp_path / "none", other))
    columns = _qurl_columns(1.0, 0.1)
    own = run(sweep, control, columns=columns, task__n=n) + run(sweep, method, precision, columns=columns, task__n=n)
    drawn = draw(name, write(tmp_path / "one", other + own))
    assert set(drawn.numbers["panel" if name == "qurl_mismatch" else "setting"]) == {left}
    with pytest.raises(ValueError, match=f"sweep {first} has no results"):
        draw(name, write(tmp_path / "other", own))
    laid_out(drawn)


def test_a_packed_sweep_without_the_upper_clip_shows_all_clips(tmp_path: Path) -> None:
    runs = [(r, [{k: v for k, v in s.items() if k != "train/clip_high_frac"} for s in rows]) for r, rows in qurl_runs()]
    drawn = draw("qurl_clip", write(tmp_path, runs))
    assert drawn.figure.axes[2].get_xlabel() == "fraction of tokens clipped"
    assert math.isnan(row(drawn, precision="int4", method="flashrl")["at the upper clip"])
    assert "of the clipped tokens" in drawn.says[0]


def aqn(start: float, decay: str = "exponential", stages: int = 10) -> dict[str, Any]:
    return {"AQN": {"sigma_start": start, "sigma_end": 5e-4, "decay": decay, "num_stages": stages, "schedule": "repo"}}


def test_qerl_figures(tmp_path: Path) -> None:
    runs: Runs = []
    for method, auc, entropy in (
        ("bf16", 0.8, 0.3),
        ("bf16_lora", 0.7, 0.2),
        ("qlora", 0.6, 0.2),
        ("aqn_bf16", 0.7, 0.2),
    ):
        runs += run("ablate_aqn", method, auc=auc, columns={"train/entropy": entropy})
    runs += run("ablate_aqn", "qerl_no_aqn", "nvfp4", auc=0.65, columns={"train/entropy": 0.25}, knobs=aqn(0.0))
    for start, auc in ((0.003, 0.66), (0.01, 0.67), (0.03, 0.68), (0.1, 0.5)):
        runs += run("ablate_aqn", "qerl", "nvfp4", auc=auc, columns={"train/entropy": 0.35}, knobs=aqn(start))
    for decay, auc in (("linear", 0.6), ("cosine", 0.61), ("logarithmic", 0.62)):
        runs += run("ablate_aqn", "qerl", "nvfp4", auc=auc, knobs=aqn(0.03, decay))
    runs += run("ablate_aqn", "qerl", "nvfp4", auc=0.3, knobs=aqn(0.03, stages=5))
    results = write(tmp_path, runs)

    drawn = draw("qerl_entropy", results)
    assert row(drawn, method="qerl")["first 20 - noiseless"] == pytest.approx(0.15)  # (0.35 - 0.25) over seeds 1 and 2
    assert row(drawn, method="bf16_lora")["entropy first 20, nats"] == pytest.approx(0.3)
    assert "higher" not in drawn.says[0] or "qerl" in drawn.says[0]
    laid_out(drawn)

    drawn = draw("qerl_reward", results)
    assert row(drawn, method="qerl")["AUC - bf16_lora"] == pytest.approx(-0.03)
    assert "AUC of qerl_no_aqn minus that of bf16_lora: -0.050" in drawn.says[0]
    laid_out(drawn)

    drawn = draw("qerl_decay", results)
    assert row(drawn, decay="linear")["AUC - no noise"] == pytest.approx(-0.05)
    assert row(drawn, **{"sigma start": 0.1})["AUC - no noise"] == pytest.approx(-0.15)
    assert len(drawn.numbers) == 7  # the arm with five stages is another comparison
    schedules = drawn.figure.axes[0].lines
    assert [line.get_ydata()[0] for line in schedules] == [0.0] * 4
    assert all(np.max(line.get_ydata()) == pytest.approx(0.03) for line in schedules)
    assert schedules[0].get_ydata()[-1] == pytest.approx(5e-4)
    laid_out(drawn)


def spread(*words: str, auc: float, **changes: Any) -> Runs:
    """The two runs of an arm, 0.002 apart beyond what all arms share."""
    return [run(*words, auc=auc + shift, **changes)[seed] for seed, shift in enumerate((-0.001, 0.001))]


def test_gap_by_length(tmp_path: Path) -> None:
    runs: Runs = []
    for n in (8, 16, 32):
        runs += run("length", "bf16", auc=0.8, task__n=n)
        runs += spread("length", "naive", "fp8_block", auc=0.8 - n / 160, k3=(n * 1e-4, n * 1e-4), task__n=n)
        runs += run("length", "jet_rl", "fp8_block", auc=0.79, k3=(1e-12, 1e-12), task__n=n)
        runs += run("length", "naive", "int4", auc=0.4, task__n=n)
    drawn = draw("jet_rl_length", write(tmp_path, runs))
    assert row(drawn, method="naive", precision="fp8_block", n=16)["AUC - bf16"] == pytest.approx(-0.1)
    assert row(drawn, method="jet_rl", n=32)["median k3, nats"] == pytest.approx(1e-6)  # float32 noise, not 1e-12
    assert "-0.050" in drawn.says[0] and "-0.200" in drawn.says[0] and "worse" in drawn.says[0]
    laid_out(drawn)


def test_gap_by_length_with_real_kernels(tmp_path: Path) -> None:
    runs = run("length", "bf16", auc=0.8, task__n=8) + run("length", "naive", "fp8_block", auc=0.7, task__n=8)
    usual: dict[str, Any] = {"model__name": "s128", "algo__num_minibatches": 2}
    for n in (64, 256):
        runs += run("main_h200", "bf16", auc=0.5, task__n=n, **usual)
        runs += run("main_h200", "flashrl", "fp8_block", auc=0.5 - n / 1024, task__n=n, **usual)
        runs += run("main_h200", "flashrl", "fp8_block", auc=0.0, task__n=n, **usual | {"algo__num_minibatches": 8})
    drawn = draw("jet_rl_length", write(tmp_path, runs))
    assert row(drawn, sweep="main_h200", n=256)["AUC - bf16"] == pytest.approx(-0.25)  # of two updates a batch alone
    assert [ax.get_title(loc="left") for ax in drawn.figure.axes[:2]] == ["FP8, emulated", "FP8 kernels, H200"]
    assert len(drawn.numbers) == 3 and len(drawn.figure.axes) == 4  # none of 4 bits, which nobody ran
    laid_out(drawn)


def test_fp8_kv_ablation(tmp_path: Path) -> None:
    runs: Runs = []
    for n in (8, 16):
        runs += run("standard", "bf16", auc=0.8, k3=(1e-4, 1e-4), task__n=n)
        runs += run("standard", "naive", "fp8_block", auc=0.7, task__n=n)
        runs += run("standard", "naive", "fp8_block+kv8", auc=0.6, k3=(4e-3, 4e-3), task__n=n)
        runs += run("standard", "fp8_rl", "fp8_block+kv8", auc=0.79, task__n=n)
        runs += run("standard", "fp8_rl_e2e", "fp8_block+kv8", auc=0.79, k3=(1e-4, 1e-4), task__n=n)
    for n in (10, 30):
        runs += run("main_wordmath", "bf16", auc=0.5 + n / 100, task__n=n)
        runs += run("main_wordmath", "naive", "fp8_block", auc=0.595 + n / 500, task__n=n)
    drawn = draw("fp8_rl_kv", write(tmp_path, runs))
    found = row(drawn, arm="FP8 weights and KV, no correction", setting="8 digits, emulated")
    assert found["AUC - bf16"] == pytest.approx(-0.2) and found["k3 over bf16"] == pytest.approx(40)
    assert "-0.100" in drawn.says[0] and "-0.200" in drawn.says[0] and "-0.010" in drawn.says[0]
    words = {n: row(drawn, setting=f"word problems, {n} tokens, FP8 kernels")["AUC - bf16"] for n in (245, 780)}
    assert words == pytest.approx({245: 0.615 - 0.6, 780: 0.655 - 0.8})
    laid_out(drawn)


def test_fp16(tmp_path: Path) -> None:
    largest = "mismatch/logp_absdiff_max"
    runs = run("fp16", "bf16", k3=(2.4e-4, 2.4e-4), auc=0.7, columns={largest: 0.3})
    runs += spread("fp16", "fp16", "fp16", k3=(1e-5, 1e-5), auc=0.71, columns={largest: 0.1})
    runs += run("fp16", "naive", "fp16", k3=(2e-5, 2e-5)) + run(
        "fp16", "zero_mismatch", "fp32", k3=(1e-9, 1e-9), auc=0.72
    )
    drawn = draw("fp16_mismatch", write(tmp_path, runs))
    assert row(drawn, arm="fp16, both sides")["times below bf16"] == pytest.approx(24)
    assert row(drawn, arm="fp16 sampler alone")["times below bf16"] == pytest.approx(12)
    assert drawn.says[0].startswith("FP16 at both sides lowers mean k3 24.0 [24.0, 24.0] times")
    assert "the largest |d| 3.00 [3.00, 3.00] times" in drawn.says[0]
    assert "0.010 [-0.003, 0.023]: equal" in drawn.says[1] and "0.020" in drawn.says[2]
    laid_out(drawn)


def test_qat_start(tmp_path: Path) -> None:
    runs = run("ablate_qat", "bf16", auc=0.8)
    for method, auc, start in (
        ("qat_kd", 0.7, 0.35),
        ("qat_kd_sft", 0.65, 0.3),
        ("qat_no_kd", 0.5, 0.2),
        ("qat_rtn", 0.4, 0.1),
    ):
        runs += run("ablate_qat", method, "int4", auc=auc, start=start)
    drawn = draw("qat_start", write(tmp_path, runs))
    found = row(drawn, method="qat_kd")
    assert found["AUC - bf16"] == pytest.approx(-0.1)
    assert found["start, rollout format"] == pytest.approx(0.255)  # 0.35 - 0.1, and half of seed 1's 0.01
    assert "qat_kd minus qat_kd_sft: 0.050" in drawn.says[0] and "qat_no_kd minus qat_rtn: 0.100" in drawn.says[0]
    laid_out(drawn)


def test_rilq_rank(tmp_path: Path) -> None:
    runs = run("ablate_rilq", "bf16", auc=0.8) + run("ablate_rilq", "naive", "int3", auc=0.4)
    for rank, auc, k3 in ((2, 0.6, 4e-2), (16, 0.7, 2e-2), (8, 0.65, 3e-2)):
        runs += spread(
            "ablate_rilq", "rilq", "int3", auc=auc, k3=(k3, k3), knobs={"RILQ": {"rank": rank, "start": "rilq"}}
        )
    runs += run("ablate_rilq", "rilq", "int3", auc=0.5, knobs={"RILQ": {"rank": 16, "start": "cloq"}})
    drawn = draw("rilq_rank", write(tmp_path, runs))
    assert list(drawn.numbers["rank or setting"]) == ["none", "2", "8", "16", "cloq"]
    assert row(drawn, **{"rank or setting": "cloq"})["AUC - bf16"] == pytest.approx(-0.3)
    assert "rank 2 has 2.00 [2.00, 2.00] times the mismatch of rank 16" in drawn.says[0]
    assert "0.300 [0.287, 0.313]: better" in drawn.says[1] and "10.12 at rank 128" in drawn.says[2]
    laid_out(drawn)


def test_replay_reads_the_committed_records() -> None:
    drawn = draw("replay_corrections")
    found = row(drawn, n=8, sampler="int8")
    assert 0 <= found["bias, TIS"] < found["bias, none"] < 1
    assert "from" in drawn.says[0] and len(drawn.says) == 3
    laid_out(drawn)
