"""The break-even on synthetic records whose laws, and so whose crossing points, are known."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.records.arms import group_arms
from harness.records.run_result import EvalRecord, RunResult
from harness.studies.break_even import costs, laws, report
from harness.studies.break_even.time_to_accuracy import race, steps_to

SIZES = {"s": (4, 256), "m": (8, 512), "l": (16, 1024)}
STEPS, SAMPLES = 10, 32


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough for intervals that are only compared with a known truth."""
    monkeypatch.setattr(report, "DRAWS", 60)


def config(precision: str, size: str, n: int, seed: int, engine: str) -> dict[str, Any]:
    layers, width = SIZES[size]
    model = {"name": size, "family": "qwen3", "num_layers": layers, "hidden_size": width, "num_heads": 8,
             "num_kv_heads": 4, "head_dim": 32, "intermediate_size": 3 * width, "vocab_size": 1000}  # fmt: skip
    return {
        "method": "bf16" if precision == "bf16" else "naive", "precision": {"name": precision}, "model": model,
        "task": {"name": "math", "n": n}, "algo": {"num_prompts": 4, "group_size": 8}, "engine": {"name": engine},
        "trainer": {"steps": STEPS, "eval_every": 5}, "seed": seed, "base_seed": seed, "knobs": {},
    }  # fmt: skip


def record(
    precision: str, size: str, n: int, seed: int, *, noise: float = 0.0, engine: str = "vllm", curve: tuple = (0.2, 0.6)
) -> RunResult:
    """bf16: 1e-9 s x L N to generate, 1 s besides. Others: half of that, 8 s dearer to push."""
    values = config(precision, size, n, seed, engine)
    bare = RunResult.model_validate({
        "run_id": f"{precision}{size}{n}{seed}", "name": "x", "sweep": "b", "status": "ok", "config": values,
        "method": {"name": values["method"]}, "seed": seed, "base_seed": seed,
    })  # fmt: skip
    params = costs.num_parameters(bare)
    assert params is not None
    luck = math.exp(noise * np.random.default_rng([seed, n, len(precision), SIZES[size][1]]).standard_normal())
    generate = 1e-9 * n * params * (1.0 if precision == "bf16" else 0.5) * luck
    sync = 0.5 if precision == "bf16" else 8.5
    evals = [
        EvalRecord(step=step, precision="fp32", site="reference", accuracy=a, question_hash="q")
        for step, a in zip((0, 5, 10), (curve[0], sum(curve) / 2, curve[1]), strict=True)
    ]
    return bare.model_copy(update={
        "num_steps": STEPS, "time_s": {"generate": generate * STEPS, "sync": sync * STEPS, "update": 5.0, "eval": 99.0},
        "tokens_per_s": {"rollout": SAMPLES * n / generate}, "evals": evals, "hardware": {"gpu": "a GPU"},
    })  # fmt: skip


def sweep(lengths: tuple[int, ...] = (32, 64, 128), sizes: str = "sml", **changes: Any) -> list[RunResult]:
    return [
        record(p, size, n, seed, **changes) for p in ("bf16", "fp8_block") for size in sizes for n in lengths
        for seed in range(3)
    ]  # fmt: skip


def test_parameters_are_those_of_the_decoder() -> None:
    from harness.config.load import load
    from harness.foundation.provenance import ROOT
    from harness.models.checkpoint import load_decoder

    base = next((ROOT / "results" / "bases").glob("s-sort8-b0-*"))
    model = load_decoder(base)
    values = vars(load(["method=bf16", "model=s", "task=sort", "precision=bf16"]).model)
    run = record("bf16", "s", 8, 0).model_copy(update={"config": {"model": values}})
    assert costs.num_parameters(run) == sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    told = run.model_copy(update={"config": {"model": {"name": "hf"}}, "summary": {"num_parameters": 7e9}})
    assert costs.num_parameters(told) == 7e9
    assert costs.num_parameters(run.model_copy(update={"config": {"model": {"name": "hf"}}})) is None


def test_step_cost_by_hand() -> None:
    run = record("fp8_block", "s", 100, 0)
    found = costs.step_cost(run)
    assert found is not None
    assert found.length == pytest.approx(100) and found.seconds["sync"] == 8.5
    assert found.seconds["rest"] == pytest.approx(0.5)  # the update; evaluation is no part of a step
    assert found.total == pytest.approx(found.seconds["generate"] + 9.0)
    assert costs.step_cost(run.model_copy(update={"tokens_per_s": {}})) is None
    assert costs.step_cost(run.model_copy(update={"status": "failed"})) is None


def test_runs_at_a_time_by_hand() -> None:
    day = "2026-01-01T00:{}:00+00:00"
    spans = [("00", "10"), ("05", "15"), ("30", "40"), ("32", "34")]
    runs = [
        sweep()[0].model_copy(update={"started_at": day.format(a), "ended_at": day.format(b)}) for a, b in spans
    ]  # fmt: skip
    assert costs.at_a_time(runs) == (10 + 10 + 10 + 2) / (15 + 10)
    assert costs.at_a_time(runs[:1]) == 1 and costs.at_a_time([runs[0].model_copy(update={"ended_at": None})]) == 0
    whole = [run.model_copy(update={"config": run.config | {"engine": {"name": "vllm", "gpu_memory": 0.6}}})
             for run in runs]  # fmt: skip
    assert costs.num_sharing([*runs, *whole]) == costs.at_a_time(runs) and costs.num_sharing(whole) == 0


def test_runs_that_share_a_gpu_have_steps_and_no_speeds(tmp_path: Path) -> None:
    span = {"started_at": "2026-01-01T00:00:00+00:00", "ended_at": "2026-01-01T01:00:00+00:00"}
    runs = [run.model_copy(update=span) for run in sweep(lengths=(64, 128))]
    (path,) = report.write(runs, tmp_path, tmp_path, "size")
    text = path.read_text()
    assert "36 runs at a time, on GPUs that they could share" in text and "| arm |" not in text and "pays" not in text
    assert "- naive fp8_block: In the largest setting measured (l n=128)" in text
    told = "takes 1.00 times the steps of bf16 (reached by 3 of 3 runs; fewer than 6 bases give no interval), so a step"
    assert told in text
    assert text.rstrip().endswith("so a step must be at least 1.00 times as fast.")
    ends = [run.model_copy(update={"evals": [run.evals[0], run.evals[-1]]}) for run in runs]
    assert report.write(ends, tmp_path, tmp_path, "ends") == []  # nobody saw when they arrived


def test_a_law_is_found_exactly_and_never_falls() -> None:
    n, length = (x.ravel() for x in np.meshgrid([1e6, 1e7, 1e8], [100.0, 300.0, 1000.0]))
    found = laws.fit(n, length, 2.0 + 1e-3 * length + 3e-9 * n * length + 1e-6 * length**2)
    assert dict(found.coefficients) == pytest.approx({"1": 2.0, "L": 1e-3, "NL": 3e-9, "LL": 1e-6}, rel=1e-6)
    falling = laws.fit(n, length, 10 - 1e-3 * length)
    assert all(value >= 0 for value in falling.coefficients.values())
    assert laws.fit(n[:3], length[:3], 1 + 1e-7 * n[:3], "sync").coefficients == pytest.approx({"1": 1.0, "N": 1e-7})


def test_crossing_by_hand() -> None:
    assert laws.crossing(lambda x: x / 50, 10, 400) == pytest.approx(50, rel=1e-9)
    assert laws.crossing(lambda x: x / 5, 10, 400) == 10
    assert laws.crossing(lambda x: x / 500, 10, 400) is None
    assert laws.crossing(lambda x: 60 / x, 10, 400) is None  # pays at first and not for long
    humped = laws.crossing(lambda x: np.where(x < 20, 2.0, x / 100), 10, 400)
    assert humped == pytest.approx(100, rel=1e-6)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_known_crossing_is_found(noise: float) -> None:
    """The step costs 1 + 1e-9 L N against 9 + 0.5e-9 L N: it pays where L N > 1.6e10."""
    (found,) = report.answers(sweep(noise=noise), "bf16")
    by_axis = {c.axis: c for c in found.crossings}
    largest = max(size for size, _, _ in found.measured)
    for axis, truth in (("size", 1.6e10 / by_axis["size"].at), ("length", 1.6e10 / largest)):
        c = by_axis[axis]
        assert c.value == pytest.approx(truth, rel=1e-3 if noise == 0 else 0.15)
        assert c.low <= truth * 1.001 and c.high >= truth * 0.999
    size, length, ratio = max(found.measured)
    assert ratio == pytest.approx((1 + 1e-9 * size * length) / (9 + 0.5e-9 * size * length), rel=1e-6 + 3 * noise)


def test_sentences_say_where_it_pays_and_where_not() -> None:
    (found,) = report.answers(sweep(), "bf16")
    said = report.sentence(found, "bf16")
    assert "naive fp8_block: at 128 tokens, pays from 125 M parameters on" in said
    assert "parameters, pays from 97.2 tokens on, 95 % 97.2 to 97.2, up to " in said and "hardware" not in said
    short = report.answers(sweep(lengths=(2, 4, 8), sizes="s"), "bf16")[0]
    (line,) = short.crossings
    assert line.axis == "length" and line.value is None and line.best < 1
    assert "does not pay within 32 tokens" in report.sentence(short, "bf16")


def test_where_resamples_disagree_it_cannot_tell() -> None:
    """Steps of equal cost with noise of half their size: the sign of the difference is luck."""
    runs = [record("bf16", "l", n, s, noise=0.5) for n in (64, 128) for s in range(8)]
    halves = [
        run
        if run.seed < 4
        else run.model_copy(update={"config": run.config | {"method": "naive", "precision": {"name": "int8"}}})
        for run in runs
    ]
    said = report.sentence(report.answers(halves, "bf16")[0], "bf16")
    assert "cannot tell" in said or "some resamples pay" in said


def test_one_slow_run_moves_no_law() -> None:
    known = [c for run in sweep() if run.config["method"] == "bf16" and (c := costs.step_cost(run))]
    slow = replace(known[0], seconds={stage: 50 * value for stage, value in known[0].seconds.items()})
    found, want = laws.typical([slow, *known[1:]]), laws.typical(known)
    assert [c.total for c in found] == pytest.approx([c.total for c in want])


def test_extrapolation_is_marked() -> None:
    small = report.answers(sweep(lengths=(64, 128, 256), sizes="sm"), "bf16")[0]
    line = next(c for c in small.crossings if c.axis == "length")
    assert line.value is not None and line.value > line.measured[1]
    assert line.value * line.at == pytest.approx(1.6e10, rel=1e-3)
    assert "(extrapolated)" in report.sentence(small, "bf16")


def test_one_setting_or_no_control_is_no_break_even(tmp_path: Path) -> None:
    assert report.answers(sweep(lengths=(512,), sizes="s"), "bf16") == []
    assert report.answers(sweep(), "flashrl") == [] and report.answers([], "bf16") == []
    assert report.write(sweep(lengths=(512,), sizes="s"), tmp_path, tmp_path, "x") == []


def test_settings_that_differ_in_neither_size_nor_length_are_no_break_even() -> None:
    longer = [run.model_copy(update={"config": run.config | {"trainer": {"steps": 20, "eval_every": 5}},
              "run_id": f"x{run.run_id}"}) for run in sweep(lengths=(64,), sizes="s")]  # fmt: skip
    assert report.answers([*sweep(lengths=(64,), sizes="s"), *longer], "bf16") == []


def test_an_engine_that_emulates_its_formats_has_no_break_even() -> None:
    emulated = [run.model_copy(update={"run_id": f"e{run.run_id}"}) for run in sweep(engine="embedded")]
    assert report.answers(emulated, "bf16") == []
    few = [run for run in emulated if run.config["model"]["name"] == "s"]
    (real,) = report.answers([*sweep(), *few], "bf16")  # most runs are of the other engine
    (alone,) = report.answers(sweep(), "bf16")
    assert real.measured == alone.measured


def test_other_machines_do_not_compare() -> None:
    mixed = [
        run.model_copy(update={"hardware": {"gpu": "another"}}) if run.config["precision"]["name"] == "bf16" else run
        for run in sweep()
    ]
    assert report.answers([*mixed, record("fp8_block", "s", 64, 9)], "bf16") == []


def test_speeds_compare_in_runs_of_one_commit() -> None:
    """At 128 tokens the arm ran on a later commit, of a faster engine."""
    late = {run.run_id for run in sweep((128,), "m") if run.config["precision"]["name"] == "fp8_block"}
    runs = [run.model_copy(update={"commit": "b" if run.run_id in late else "a"}) for run in sweep(sizes="m")]
    assert len(late) == 3
    (found,) = report.answers(runs, "bf16")
    assert [round(length) for _, length, _ in sorted(found.measured)] == [32, 64]


def test_steps_to_an_accuracy_by_hand() -> None:
    points = np.array([[0, 0.2], [20, 0.4], [40, 0.3], [60, 0.8]])
    assert steps_to(points, 0.3) == pytest.approx(10) and steps_to(points, 0.55) == pytest.approx(50)
    assert steps_to(points, 0.8) == pytest.approx(60) and steps_to(points, 0.1) == 0
    assert math.isinf(steps_to(points, 0.9))


def test_a_slow_learner_must_be_faster() -> None:
    runs = [record("bf16", "s", n, s) for n in (512, 1024) for s in range(6)]
    runs += [record("fp8_block", "s", n, s, curve=(0.2, 0.57)) for n in (512, 1024) for s in range(6)]
    arms = {arm.label: arm for arm in group_arms(runs) if arm.fields["task.n"] == 1024}
    control, arm = arms["bf16 bf16 n=1024"], arms["naive fp8_block n=1024"]
    found = race(arm, control, np.random.default_rng(0))
    assert found is not None and found.target == pytest.approx(0.56)
    assert found.steps == pytest.approx(10 * 0.36 / 0.37)
    assert (found.ratio, found.low, found.high) == pytest.approx([found.steps / 9] * 3)
    few = race(replace(arm, runs=arm.runs[:5]), control, np.random.default_rng(0))
    assert few is not None and few.ratio == found.ratio and math.isnan(few.low) and math.isnan(few.high)
    answer = report.answers(runs, "bf16")[0]
    said = report.sentence(answer, "bf16")
    assert "takes 1.08 times the steps of bf16 (95 % 1.08 to 1.08, reached by 6 of 6 runs)" in said
    assert f"takes {found.ratio / answer.step_ratio:.2f} times as long" in said
    never = [r for r in runs if r.config["precision"]["name"] == "bf16"]
    never += [record("fp8_block", "s", n, s, curve=(0.2, 0.3)) for n in (512, 1024) for s in range(3)]
    assert "reached by 0 of 3 runs within their steps: no speed makes up" in report.sentence(
        report.answers(never, "bf16")[0], "bf16"
    )


def test_every_base_has_a_target_of_its_own() -> None:
    """Bases far apart, each with two runs of the control; the third learns nothing, the fourth the control lacks."""
    curves = {0: (0.1, 0.3), 1: (0.5, 0.9), 2: (0.6, 0.5)}
    control = [record("bf16", "s", 64, base, curve=curve) for base, curve in curves.items()]
    control += [run.model_copy(update={"seed": 7, "run_id": f"{run.run_id}again"}) for run in control]
    arm = [record("fp8_block", "s", 64, base, curve=curve) for base, curve in (curves | {3: (0.2, 0.9)}).items()]
    arms = group_arms([*control, *arm])
    found = race(arms[1], arms[0], np.random.default_rng(0))
    assert arms[0].fields["method"] == "bf16" and found is not None
    assert found.target == pytest.approx((0.28 + 0.86) / 2)
    assert (found.reached, found.runs) == (2, 2)
    assert (found.steps, found.ratio) == pytest.approx((9, 1))
    split = [
        record("bf16", "s", 64, 0, curve=(0.1, end)).model_copy(update={"seed": seed, "run_id": f"split{seed}"})
        for seed, end in enumerate((0.3, 0.3, 0.9))
    ]  # one of three arrives at 0.46
    arms = group_arms([*split, *arm])
    assert race(arms[1], arms[0], np.random.default_rng(0)) is None


def test_a_run_that_diverged_at_once_never_arrives() -> None:
    """Five runs reach the accuracy and one diverges after its first evaluation: it counts among the runs."""
    control = [record("bf16", "s", 64, base) for base in range(6)]
    arm = [record("fp8_block", "s", 64, base) for base in range(6)]
    first = arm[5].evals[:1]
    arm[5] = arm[5].model_copy(update={"status": "diverged", "evals": first})
    arms = group_arms([*control, *arm])
    found = race(arms[1], arms[0], np.random.default_rng(0))
    assert found is not None and (found.reached, found.runs, found.ratio) == (5, 6, pytest.approx(1))
    assert math.isinf(found.high)


def test_single_runs_give_a_crossing_no_interval() -> None:
    alone = [run for run in sweep(noise=0.02) if run.seed == 0]
    (found,) = report.answers(alone, "bf16")
    assert all(math.isnan(c.low) and math.isnan(c.high) for c in found.crossings)
    said = report.sentence(found, "bf16")
    assert said.count(" on (settings with a single run give no interval), up to ") == 2 and "nan" not in said


def test_files_are_written(tmp_path: Path) -> None:
    written = report.write(sweep(), tmp_path / "tables", tmp_path / "figures", "size")
    assert [path.name for path in written] == ["size_break_even.md", "break_even.png"]
    text = written[0].read_text()
    assert text.count("| naive fp8_block |") == 9 and "pays from" in text
    assert written[1].read_bytes()[:4] == b"\x89PNG"
    one_axis = report.write(sweep(sizes="l"), tmp_path / "tables", tmp_path / "one", "length")
    assert one_axis[1].exists()
