"""Update tests on made records: the factor, its badge, and files that are missing, damaged or of another size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.published.claims.estimates import estimate
from harness.published.claims.kinds import Update
from harness.published.claims.page import describe, judge_all, shown
from harness.published.claims.schema import read_claims
from harness.published.claims.update import seconds_of
from harness.records.paths import bench_folder
from tests.published.claims.test_page import CLAIM, written

TEST: dict[str, Any] = {"kind": "update", "file": "x.json", "size": "7b", "precision": "fp8_block", "option": "fp8",
                        "over": "bf16", "expect": "above"}  # fmt: skip
ROWS = [{"option": "bf16", "s": 4.8}, {"option": "fp8", "s": 3.2}, {"option": "wide", "failed": "out of memory"}]


def update(**changes: Any) -> Update:
    return Update(**{key: value for key, value in (TEST | changes).items() if key != "kind"})


def record(results: Path, **changes: Any) -> Path:
    path = bench_folder(results) / "x.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"size": "7b", "rows": ROWS} | changes))
    return path


def test_the_factor_is_the_slower_one_over_the_faster_one(tmp_path: Path) -> None:
    record(tmp_path)
    seconds = seconds_of([update()], tmp_path)
    assert seconds == {"x.json": {"bf16": 4.8, "fp8": 3.2}}
    got = estimate(update(claimed=(1.41, 1.41)), {}, [], seconds=seconds)
    assert (got.value, got.outcome, got.reason) == (pytest.approx(1.5), "supported", "claimed 1.41: more here")
    assert shown(update(), got) == "x1.50, measured once"
    assert "7b, 'fp8' over 'bf16'; expected above 1" in describe(update())
    assert estimate(update(option="bf16", over="fp8"), {}, [], seconds=seconds).outcome == "contradicted"
    flat = estimate(update(margin=1.6), {}, [], seconds=seconds)
    assert (flat.outcome, flat.reason) == ("undecided", "equal within the margin")


def test_what_was_not_measured_is_undecided(tmp_path: Path) -> None:
    assert estimate(update(), {}, [], seconds=seconds_of([update()], tmp_path)).reason == "x.json has not measured this"
    record(tmp_path)
    seconds = seconds_of([update()], tmp_path)
    assert not estimate(update(option="wide"), {}, [], seconds=seconds).has_data


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": [{"s": 1.0}]}, "option is missing"),
        ({"size": "1.5b"}, "says size=7b"),
    ],
)
def test_a_faulty_file_is_one_line_that_names_it(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = record(tmp_path, **changes)
    with pytest.raises(ValueError, match=words) as error:
        seconds_of([update()], tmp_path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_size_outside_the_claims_domain_does_not_decide(tmp_path: Path) -> None:
    record(tmp_path)
    domain = {"formats": ["fp8_block"], "parameters": [8e9, float("inf")]}
    claims = read_claims(written(tmp_path, CLAIM | {"scale": "same", "domain": domain, "tests": [TEST]}), tmp_path)
    assert [one.badge for one in judge_all(claims, tmp_path, tmp_path)] == ["out of domain"]
    wide = read_claims(written(tmp_path, CLAIM | {"scale": "same", "tests": [TEST]}), tmp_path)
    assert [one.badge for one in judge_all(wide, tmp_path, tmp_path)] == ["supported"]


def test_a_faulty_update_test_is_one_line(tmp_path: Path) -> None:
    faults = (({"margin": 1.0}, r"margin=1\.0: must be above 1$"), ({"precision": "int9"}, "int9: unknown"))
    for changes, words in faults:
        with pytest.raises(ValueError, match=words):
            read_claims(written(tmp_path, CLAIM | {"tests": [TEST | changes]}), tmp_path)
