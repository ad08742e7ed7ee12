"""Domains: where a test lies, why that is outside, and which test is nearest."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from harness.published.claims.domains import Domain, Place, domain_text, domains_of, outside, place_of, place_words
from harness.published.claims.estimates import estimate
from harness.published.claims.kinds import Contrast, Level, NotTestable, Replay, Speed
from harness.published.claims.page import judge_all
from harness.published.claims.schema import read_claims
from harness.records.run_result import write_result
from tests.published.claims.hand_made import BF16, NAIVE, of, run
from tests.published.claims.test_page import CLAIM, TEST, written

HERE = Place(
    kernels="real", formats=frozenset({"int8"}), mismatch=0.02, rate_ratio=1.0, rate=5e-6, length=257,
    parameters=3.2e6, steps=60,
)  # fmt: skip


@pytest.mark.parametrize(
    ("domain", "words"),
    [
        (Domain(), {}),
        (Domain(formats=("int8", "fp8_block")), {}),
        (Domain(formats=("fp8_block", "fp8_tensor")), {"formats": "int8 instead of fp8_block, fp8_tensor"}),
        (Domain(mismatch=(1e-4, 0.01)), {}),  # 0.02 is within the factor 2
        (Domain(mismatch=(1e-4, 0.009)), {"mismatch": "k3 0.02 instead of 0.0001 to 0.009"}),
        (Domain(mismatch=(0.041, 0.1)), {"mismatch": "k3 0.02 instead of 0.041 to 0.1"}),
        (Domain(rate_ratio=2), {"rate_ratio": "learning rates 1 to 1 instead of 2 to 1"}),
        (Domain(rate=(1e-6, 2e-6)), {"rate": "learning rate of 5e-06 instead of 1e-06 to 2e-06"}),
        (Domain(length=(8192, math.inf)), {"length": "257 tokens instead of 8192 or more"}),
        (Domain(parameters=(0, 1e6)), {"parameters": "3.2M parameters instead of at most 1M"}),
        (Domain(steps=(150, math.inf)), {"steps": "60 steps instead of 150 or more"}),
    ],
)
def test_what_lies_outside_is_said_in_words(domain: Domain, words: dict[str, str]):
    assert outside(domain, HERE) == words


def test_what_is_not_known_binds_only_where_mismatch_is_declared():
    unknown = Place(kernels="emulated", formats=frozenset({"int4"}))
    assert outside(Domain(kernels="any", length=(8192, math.inf), rate=(0, 1)), unknown) == {}
    assert outside(Domain(mismatch=(0, 1)), unknown) == {
        "kernels": "emulated kernels", "mismatch": "k3 not recorded instead of at most 1",
    }  # fmt: skip
    assert place_words(unknown) == "emulated kernels, int4"


def test_a_place_is_read_from_the_runs():
    runs = [run("naive", seed) for seed in (0, 1, 2)] + [run("bf16", seed) for seed in (0, 1, 2)]
    k3 = [[0.1] * 5 + [9.0]] * 2 + [[0.5] * 5 + [9.0]] + [[1e-3] * 6] * 3
    test = Contrast(sweep="standard", a=NAIVE, b=BF16, expect="above")
    place = place_of(test, {"standard": of(*runs, kl_k3=k3)})
    assert place is not None
    config = runs[0].config
    assert (place.kernels, place.formats) == ("emulated", {"int8"})
    assert place.mismatch == pytest.approx(0.1)  # the median of runs, of the larger arm, before training changed it
    assert (place.rate_ratio, place.length) == (1.0, config["task"]["n"] + 1)
    assert place.steps == config["trainer"]["steps"]
    assert place_of(test, {}) is None
    assert place_of(NotTestable(reason="none"), {}) is None


def test_other_tasks_are_as_long_as_their_answers_were():
    one = run("naive", 0, {0: [1, 0], 4: [1, 1]})
    lengths = (200.0, 220.0, 260.0, None)
    evals = [e.model_copy(update={"length_mean": length}) for e, length in zip(one.evals, lengths, strict=True)]
    config = one.config | {"task": one.config["task"] | {"name": "wordmath"}}
    test = Contrast(sweep="standard", a=NAIVE, b=BF16, expect="above")
    other = one.model_copy(update={"config": config, "evals": evals})
    place = place_of(test, {"standard": of(other, run("bf16", 0))})
    assert place is not None and place.length == pytest.approx(680 / 3)


def test_adapters_train_at_their_own_rate():
    lora = run("bf16_lora", 0, precision="bf16", knobs={"LoRA.lr_scale": 10.0})
    evidence = {"standard": of(lora, run("bf16", 0))}
    test = Contrast(sweep="standard", a={"method": "bf16_lora"}, b=BF16, expect="above")
    place = place_of(test, evidence)
    assert place is not None and place.rate_ratio == pytest.approx(10)
    assert place.formats == {"bf16"}  # a 16-bit format counts where there is no other


def test_speed_is_of_real_kernels_and_replay_of_emulated_ones():
    speed = Speed(sweep="t", size="0.5b", precision="int8", length=512, expect="above")
    assert place_of(speed, {}) == Place(kernels="real", formats=frozenset({"int8"}), length=512, parameters=5e8)
    replay = Replay(context="s", sampler="int8", arm="mis", column="bias", against="none", expect="below")
    assert place_of(replay, {}) == Place(kernels="emulated", formats=frozenset({"int8"}))


def results(folder: Path) -> Path:
    """INT4 loses some 3/4 of 40 answers in each of 3 seeds, INT8 hardly any; both kernels emulated."""
    for seed in range(3):
        for one in (
            run("naive", seed, {20: [1] * 39 + [seed % 2]}),
            run("naive", seed, {20: [1] * 10 + [seed % 2] + [0] * 29}, precision="int4"),
            run("bf16", seed, {20: [1] * 40}),
        ):
            write_result(folder / "runs" / "standard", one, None)
    return folder


@pytest.mark.parametrize(
    ("domain", "badge", "nearest"),
    [
        ({"kernels": "any", "formats": ["int8"]}, "contradicted in its own domain", "int8"),
        ({"kernels": "any", "formats": ["int4"]}, "direction supported", "int4"),
        ({"kernels": "any", "formats": ["fp8_block"]}, "out of domain", "int8"),
        ({"formats": ["int4"]}, "out of domain", "int4"),  # real kernels are declared
    ],
)
def test_the_nearest_test_decides(tmp_path: Path, domain: dict[str, Any], badge: str, nearest: str):
    int4 = TEST | {"a": {"method": "naive", "precision": "int4"}, "threshold": -0.25, "margin": 0.1}
    tests = [TEST | {"threshold": -0.25, "margin": 0.1}, int4, int4 | {"is_side": True, "metric": "accuracy"}]
    known = read_claims(written(tmp_path, CLAIM | {"domain": domain, "tests": tests}))
    judged = judge_all(known, results(tmp_path))[0]
    assert judged.badge == badge
    assert judged.answers[0].test.a["precision"] == nearest
    assert judged.answers[-1].test.is_side


def test_a_claim_with_side_tests_alone_is_out_of_domain(tmp_path: Path):
    row = CLAIM | {"domain": {"kernels": "any"}, "tests": [TEST | {"is_side": True}]}
    assert judge_all(read_claims(written(tmp_path, row)), results(tmp_path))[0].badge == "out of domain"


def test_arms_that_never_left_their_start_say_nothing():
    still = [run("naive", seed, {0: [1, 0], 20: [1, 0]}) for seed in range(3)]
    moving = [run("bf16", seed, {0: [1, 0], 20: [1, 1]}) for seed in range(3)]
    test = Contrast(sweep="standard", a=NAIVE, b=BF16, expect="below")
    found = estimate(test, {"standard": of(*still, *moving)}, [])
    assert not found.has_data and found.reason == "no signal: naive never left its start"
    gain = Level(sweep="standard", a=BF16, metric="gain", expect="above", threshold=0)
    assert estimate(gain, {"standard": of(*still, *moving)}, []).value == 0.5


def test_domains_of_a_paper_in_words(tmp_path: Path) -> None:
    """Each once, in the order of the file; a paper as others read it has its own."""
    path = written(
        tmp_path,
        CLAIM | {"id": "a", "domain": {"formats": ["int8"], "mismatch": [1e-4, 0.01]}, "tests": [TEST]},
        CLAIM | {"id": "b", "domain": {"formats": ["int8"], "mismatch": [1e-4, 0.01]}, "tests": [TEST]},
        CLAIM | {"id": "c", "domain": {"rate": [1e-6, 1e-6], "steps": [150, math.inf]}, "tests": [TEST]},
        CLAIM | {"id": "d", "domain": {}, "tests": [TEST]},
    )
    words = ["int8, k3 0.0001 to 0.01", "learning rate 1e-06, 150 or more steps", "any setting"]
    assert [domain_text(domain) for domain in domains_of(CLAIM["source"], path)] == words
    assert domains_of(f"{CLAIM['source']} as in slime", path) == domains_of(CLAIM["source"], path)
    assert domains_of("arXiv 0", path) == []
