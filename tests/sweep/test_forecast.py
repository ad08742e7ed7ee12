"""Costs: a known law is found again, left-out errors equal refits, what is unknown falls back to the guess."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.config.load import load, to_json
from harness.foundation.provenance import ROOT
from harness.records.packed import pack
from harness.records.run_result import write_result
from harness.sweep import forecast
from harness.sweep.folder_time import num_evaluations
from harness.sweep.forecast import Sample, features, fit, guess, read_samples
from tests.result_factory import config as config_of
from tests.result_factory import result

METHODS = {"bf16": 1.0, "naive": 1.1, "flashrl": 1.3, "mis": 1.4, "qurl": 1.7}
SIZES = {"xs": 0.5, "s": 1.0, "m": 2.5}
HOME, AWAY = "cpu here", "cpu there"


@cache
def composed(*words: str) -> dict[str, Any]:
    return to_json(load(words))


def settings(method: str, model: str, n: int, seed: int = 0, steps: int = 80) -> dict[str, Any]:
    """Four evaluations after the first, whatever the number of steps."""
    words = [f"method={method}", f"model={model}", f"task.n={n}", f"trainer.steps={steps}"]
    words += [f"trainer.eval_every={steps // 4}", f"precision={'bf16' if method == 'bf16' else 'int8'}"]
    return composed(*words) | {"seed": seed}


def law_s(method: str, model: str, n: int, place: str = HOME) -> float:
    """Seconds per step: factors of method, size, length and machine."""
    return 0.3 * METHODS[method] * SIZES[model] * (n / 8) ** 1.2 * (3.0 if place == AWAY else 1.0)


def sampled(
    noise: float, seeds: int, methods: Sequence[str] = tuple(METHODS), models: Sequence[str] = tuple(SIZES)
) -> list[Sample]:
    rng = np.random.default_rng(0)
    return [
        Sample(
            config=settings(method, model, n, seed), place=place, num_steps=80,
            step_s=law_s(method, model, n, place) * math.exp(noise * rng.standard_normal()), rest_s=6.0,
        )
        for method in methods for model in models for n in (8, 16, 32) for place in (HOME, AWAY)
        for seed in range(seeds)
    ]  # fmt: skip


def off(model: forecast.CostModel, config: Mapping[str, Any], place: str, truth_s: float) -> float:
    return abs(model.estimate(config, place).seconds / truth_s - 1)


def test_a_law_of_factors_is_found_again() -> None:
    model = fit(sampled(0.02, 3))
    for method in METHODS:
        for size in SIZES:
            truth = 80 * law_s(method, size, 16) + 6
            found = model.estimate(settings(method, size, 16, seed=99), HOME)
            assert found.level == "like"
            assert found.seconds == pytest.approx(truth, rel=0.06)
            assert found.low < found.seconds < found.high
    short, long = (model.estimate(settings("naive", "s", 8, steps=steps), HOME).seconds for steps in (20, 200))
    assert (long - 6) / (short - 6) == pytest.approx(10, rel=0.1)


def test_new_combinations_of_known_factors_are_predicted() -> None:
    known = [
        s for s in sampled(0.02, 3)
        if (s.config["method"], s.config["model"]["name"]) != ("qurl", "m")
        if (s.place, s.config["task"]["n"]) != (AWAY, 32)
    ]  # fmt: skip
    model = fit(known)
    new_arm = settings("qurl", "m", 16)
    assert model.estimate(new_arm, HOME).level == "arm"
    assert off(model, new_arm, HOME, 80 * law_s("qurl", "m", 16) + 6) < 0.15
    new_setting = settings("naive", "s", 32)
    assert model.estimate(new_setting, AWAY).level == "new"
    assert off(model, new_setting, AWAY, 80 * law_s("naive", "s", 32, AWAY) + 6) < 0.25
    guessed = sum(guess(new_setting)) * 80
    assert abs(guessed / (80 * law_s("naive", "s", 32, AWAY) + 6) - 1) > 0.25


def test_the_past_error_is_that_of_the_noise() -> None:
    """Under lognormal noise sigma, |ratio - 1| has median 0.674 sigma; a mean over few others adds a little."""
    for noise in (0.05, 0.2):
        error = fit(sampled(noise, 5)).errors["like"]
        assert error.count == 5 * 5 * 3 * 3 * 2
        assert error.median == pytest.approx(0.674 * noise, rel=0.35)
        assert error.p90 == pytest.approx(1.645 * noise, rel=0.4)
        assert error.low == pytest.approx(math.exp(-1.28 * noise), rel=0.1)
        assert error.high == pytest.approx(math.exp(1.28 * noise), rel=0.1)


def test_errors_grow_with_what_is_left_out() -> None:
    errors = fit(sampled(0.1, 3)).errors
    assert errors["like"].median < errors["new"].median
    assert errors["arm"].median < errors["new"].median


def test_effects_are_those_of_a_ridge_regression_on_every_sample() -> None:
    samples = sampled(0.2, 2, methods=("bf16", "naive"), models=("xs", "s"))[1:]  # one arm has one seed, others two
    rows = [features(s.config, s.place) for s in samples]
    names = sorted({name for row in rows for name in row})
    x = np.array([[row.get(name, 0.0) for name in names] for row in rows])
    y = np.log([[s.step_s / g[0], s.rest_s / g[1]] for s in samples if (g := guess(s.config))])
    penalty = np.diag([0.01 if name == "one" else forecast.PENALTY for name in names])
    step, rest = np.linalg.solve(x.T @ x + penalty, x.T @ y).T
    model = fit(samples)
    assert len(samples) == 47 and len({tuple(row.items()) for row in rows}) == 24
    assert [model.step[name] for name in names] == pytest.approx(step, abs=1e-9)
    assert [model.rest[name] for name in names] == pytest.approx(rest, abs=1e-9)


@pytest.mark.parametrize("level", ["like", "arm", "new"])
def test_left_out_errors_are_those_of_refits(level: forecast.Level) -> None:
    samples = sampled(0.2, 2, methods=("bf16", "naive"), models=("xs", "s"))
    groups = {
        "like": [str(i) for i in range(len(samples))],
        "arm": [forecast.arm_key(s.config, s.place) for s in samples],
        "new": [forecast.setting_key(s.config, s.place) for s in samples],
    }[level]
    predicted = np.empty(len(samples))
    for group in set(groups):
        kept = fit([s for s, own in zip(samples, groups, strict=True) if own != group])
        for i in (i for i, own in enumerate(groups) if own == group):
            predicted[i] = kept.estimate(samples[i].config, samples[i].place).seconds
    actual = np.array([s.num_steps * s.step_s + s.rest_s for s in samples])
    refitted = np.abs(predicted / actual - 1)
    error = fit(samples).errors[level]
    assert error.median == pytest.approx(float(np.median(refitted)), rel=1e-6)
    assert error.p90 == pytest.approx(float(np.quantile(refitted, 0.9)), rel=1e-6)


def test_without_samples_the_guess_remains() -> None:
    model, config = fit([]), settings("naive", "m", 8)
    step, rest = guess(config)
    found = model.estimate(config, HOME)
    assert (found.level, found.seconds) == ("new", pytest.approx(80 * step + rest))
    assert (found.low, found.high) == (pytest.approx(found.seconds / 3), pytest.approx(found.seconds * 3))
    assert guess(settings("naive", "l", 8))[0] > 2 * guess(settings("naive", "s", 8))[0]


def test_an_unknown_machine_gets_the_factors_of_the_known_ones() -> None:
    model = fit(sampled(0.02, 2))
    here, unknown = (
        [model.estimate(settings(method, "s", 16), place).seconds for method in ("bf16", "qurl")]
        for place in (HOME, "cpu elsewhere")
    )
    assert unknown[1] / unknown[0] == pytest.approx(here[1] / here[0], rel=0.1)
    assert model.estimate(settings("bf16", "s", 16), "cpu elsewhere").level == "new"
    cuda = to_json(load(["trainer.device=cuda"]))
    assert model.estimate(cuda).level == "new"


def test_features_name_seeds_and_paths_nowhere() -> None:
    first, second = (features(settings("bf16", "s", 8, seed), HOME) for seed in (0, 1))
    assert first == second
    assert first != features(settings("bf16", "s", 8), AWAY)


def test_records_are_read_packed_or_not_and_other_files_are_passed_by(tmp_path: Path) -> None:
    hardware = {"device": "cpu", "cpu": "a CPU", "gpu": None, "threads": 1}
    times = {"generate": 6.0, "update": 8.0, "reward": 0.0, "sync": 1.0, "old_logp": 0.0, "other": 1.0, "eval": 2.0}
    base = to_json(load([]))
    for sweep in ("one", "two"):
        for seed, status in enumerate(("ok", "ok", "diverged", "failed")):
            found, rows = result("bf16", "bf16", seed=seed, status=status, sweep=sweep)
            changes = {"hardware": hardware, "time_s": times | {"total": 21.0}, "config": base | {"seed": seed}}
            write_result(tmp_path / "runs" / sweep, found.model_copy(update=changes), rows)
    pack(tmp_path, "two")
    for path in (tmp_path / "runs" / "two").iterdir():
        path.unlink()
    (tmp_path / "runs" / "two").rmdir()
    (tmp_path / "packed" / "bad.zip").write_bytes(b"PK")
    for name, text in (("torn.json", '{"run_id": '), ("list.json", "[1]"), ("else.json", '{"time_s": {"total": 1}}')):
        (tmp_path / "runs" / "one" / name).write_text(text)
    whole = (tmp_path / "runs" / "one" / f"{result('bf16', 'bf16', sweep='one')[0].run_id}.json").read_text()
    lacking = json.loads(whole)
    del lacking["config"]["trainer"]["eval_every"]  # which the guess rests on
    (tmp_path / "runs" / "one" / "lacking.json").write_text(json.dumps(lacking))
    (tmp_path / "runs" / "one" / "listed.json").write_text(json.dumps(json.loads(whole) | {"time_s": [1.0]}))
    found = read_samples(tmp_path)
    assert len(fit(found).arms) == 1
    assert len(found) == 4
    assert {(s.place, s.num_steps, s.step_s, s.rest_s) for s in found} == {("cpu a CPU", 80, 16 / 80, 5.0)}
    assert read_samples(tmp_path / "nowhere") == []


def test_the_error_on_the_committed_records_is_told() -> None:
    """The `corrections` and `standard` sweeps, on a shared CPU and on a GPU: seconds of 19 to 175."""
    samples = read_samples(ROOT / "results")
    samples = [s for s in samples if s.config["model"]["name"] == "s"]
    assert len(samples) >= 600
    errors = fit(samples).errors
    assert errors["like"].median < 0.2
    assert errors["arm"].median < 0.2
    assert errors["new"].median < 0.5
    guessed = [abs((s.num_steps * g[0] + g[1]) / s.total_s - 1) for s in samples if (g := guess(s.config))]
    assert errors["arm"].median < float(np.median(guessed))


def test_a_gpu_is_guessed_by_its_own_constants_until_one_was_measured() -> None:
    """Long answers cost their decoding steps; what CPUs taught about methods stays out."""
    short, long = (
        to_json(load(["engine=vllm", "trainer.device=cuda", "model=s128", f"task.n={n}"])) for n in (64, 512)
    )
    (step, _), (long_step, long_rest) = guess(short), guess(long)
    assert 6 < (long_step - 0.2) / (step - 0.2) < 9 and 1 < long_step < 10
    assert guess(to_json(load(["trainer.device=cuda", "task.n=512"])))[0] != long_step
    taught = fit(sampled(0.02, 2))
    assert taught.estimate(long).seconds == pytest.approx(80 * long_step + long_rest)
    assert taught.estimate(long).level == "new"


def test_a_cell_of_another_trainer_or_engine_is_no_like_cell() -> None:
    own = {"trainer": {"name": "local", "steps": 10, "eval_every": 5, "lr": 1e-4}, "engine": {"name": "vllm"}}
    config = config_of("naive", "int8") | own
    config["algo"] |= {"num_epochs": 1}
    more = config | {"trainer": {**own["trainer"], "steps": 99, "eval_every": 50, "lr": 1.0}, "seed": 7}
    verl = config | {"trainer": {**own["trainer"], "name": "verl"}}
    embedded = config | {"engine": {"name": "embedded"}}
    for key in (forecast.arm_key, forecast.setting_key):
        assert key(config, "gpu") == key(more, "gpu")
        assert len({key(one, "gpu") for one in (config, verl, embedded)}) == 3


@pytest.mark.parametrize(("steps", "every"), [(150, 150), (80, 20), (10, 4), (3, 100), (1, 1)])
def test_evaluations_are_counted_as_the_loop_makes_them(steps: int, every: int) -> None:
    made = len([step for step in range(steps) if step % every == 0]) + 1
    assert num_evaluations(steps, every) == made
