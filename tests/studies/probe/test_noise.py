"""Sigma of the noise that has the k3 of a format: found on known curves, and held by a measurement of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from harness.config.schema import Launch
from harness.run.build import build
from harness.studies.dose.points import NOISE
from harness.studies.probe.measure import k3_and_length, measure
from harness.studies.probe.noise import DRAWS, TOLERANCE, noise_config, sigma_of
from harness.studies.probe.record import configs, noised, probe
from harness.studies.probe.report import sentences
from tests.studies.probe import made


@pytest.mark.parametrize(
    "curve",
    [lambda x: 3 * x**2, lambda x: 0.7 * x**1.2, lambda x: 10 * math.expm1(min(4 * x, 50)) ** 3],
    ids=["square", "flat", "steep"],
)
def test_sigma_of_a_known_curve(curve: Callable[[float], float]) -> None:
    for sigma in (0.0123, 0.2, 0.9):
        at = Mock(side_effect=curve)
        found = sigma_of(curve(sigma), at)
        assert curve(found) == pytest.approx(curve(sigma), rel=TOLERANCE) and at.call_count < 14
        assert found == float(f"{found:.3g}")


def test_a_k3_that_no_noise_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a k3 of 1e-06 is outside of 0.0001 to 4"):
        sigma_of(1e-6, lambda x: x**2)
    with pytest.raises(ValueError, match=r"no sigma from .* has a k3 of 0.1 within 3%"):
        sigma_of(0.1, lambda x: 0.01 if x < 0.3 else 1.0)


def test_a_probe_finds_the_noise_of_a_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = Mock(side_effect=build)
    monkeypatch.setattr("harness.studies.probe.noise.build", built)
    folder, words = made.qwen2(tmp_path / "qwen2"), [*made.WORDS, "trainer.compute=fp32"]
    runs, _ = configs(folder, ["int4=int4_g32"], words)
    like = ("int4", "1e-3")
    noise = noised(folder, runs, like, words)
    assert noise is not None
    launch = Launch(results=str(tmp_path))
    record = probe(folder, runs, launch, noise=noise, like=like)
    assert built.call_count == 1  # every sigma and seed is a push into one engine
    int4, number = record["noise"]
    wanted = next(row for row in record["formats"] if row["precision"] == "int4")["mismatch"]["kl_k3"]
    assert (int4["precision"], int4["k3"], number["k3"]) == ("int4", wanted, 1e-3)
    assert int4["kl_k3"] == pytest.approx(wanted, rel=TOLERANCE) and int4["draws"] == DRAWS
    full = [measure(replace(noise, seed=k, knobs={NOISE: {**noise.knobs[NOISE], "sigma": int4["sigma"]}}), launch).row
            for k in range(DRAWS)]  # fmt: skip
    assert int4["kl_k3"] == pytest.approx(float(np.mean([row["mismatch"]["kl_k3"] for row in full])), rel=1e-5)
    assert int4["length_mean"] == pytest.approx(float(np.mean([row["length_mean"] for row in full])), rel=1e-5)
    assert full[0]["passport"]["weights"].keys() == {"bf16"}
    assert any(f"sigma {int4['sigma']:g} (k3 {int4['kl_k3']:.2g}) is like int4" in line for line in sentences(record))
    plain = probe(folder, runs, launch)
    assert (
        "noise" not in plain
        and plain["id"] != record["id"]
        and plain["formats"][0]["mismatch"] == record["formats"][0]["mismatch"]
    )
    run, _ = build(runs[0], launch)
    assert k3_and_length(run)[0] == pytest.approx(plain["formats"][0]["mismatch"]["kl_k3"], rel=1e-5)


def test_a_search_without_an_answer_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: object) -> None:
        raise ValueError("no sigma has it")

    monkeypatch.setattr("harness.studies.probe.record.noise_like", none)
    folder = made.qwen2(tmp_path / "qwen2")
    runs, _ = configs(folder, ["int4"], made.WORDS)
    noise, said = noised(folder, runs, ("int4",), made.WORDS), list[str]()
    record = probe(folder, runs, Launch(results=str(tmp_path)), noise=noise, like=("int4",), tell=said.append)
    assert [row["precision"] for row in record["formats"]] == ["bf16", "bf16", "int4"] and "noise" not in record
    assert said[-1] == "qwen2 noise like int4: none, no sigma has it"


def test_noise_like_something_else_is_refused(tmp_path: Path) -> None:
    folder = made.qwen2(tmp_path / "qwen2")
    runs, _ = configs(folder, ["int4=int4_g32"], made.WORDS)
    for word in ("int8", "-1", "nan"):
        with pytest.raises(ValueError, match=f"--noise-like={word}: neither a format of this probe nor a k3"):
            noised(folder, runs, [word], made.WORDS)
    assert noised(folder, runs, (), made.WORDS) is None
    assert noise_config(0.1, ["model=xs", "task=sort"]).knobs[NOISE] == {"sigma": 0.1, "draw": "fixed"}
