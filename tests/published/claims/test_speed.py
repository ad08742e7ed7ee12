"""Speed tests on a made throughput map: faults, badges, words, and the map's own table of claims."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.published.claims.estimates import estimate
from harness.published.claims.kinds import Speed
from harness.published.claims.page import describe, judge_all, markdown, shown
from harness.published.claims.schema import Claims, read_claims
from harness.published.claims.speed import Map
from harness.published.claims.speed_table import claims_table, compare
from harness.records.paths import throughput_folder
from harness.studies.throughput.records import write_record
from tests.published.claims.test_page import CLAIM, written
from tests.studies.throughput import made

TEST: dict[str, Any] = {
    "kind": "speed", "sweep": "throughput_made", "size": "7b", "precision": "int8", "batch": 8, "length": 1024,
    "measure": "decode", "expect": "above",
}  # fmt: skip


def speed(**changes: Any) -> Speed:
    return Speed(**{key: value for key, value in (TEST | changes).items() if key != "kind"})


@pytest.fixture
def maps(tmp_path: Path) -> dict[str, Map]:
    sweep = made.sweep(tmp_path)
    return {"throughput_made": Map(sweep=sweep, records=made.records(sweep))}


def test_a_speed_test_of_a_toy_is_refused_at_once(tmp_path: Path) -> None:
    text = made.YAML.replace("sizes: [7b, 0.5b]", "sizes: [7b, toy]")
    (tmp_path / "throughput_made.yaml").write_text(text)
    path = written(tmp_path, CLAIM | {"tests": [TEST | {"size": "toy"}]})
    with pytest.raises(ValueError, match=r"claim one: size=toy: unknown; valid: 0\.5b, 1\.5b, 3b, 7b, 14b, 32b$"):
        read_claims(path, tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sweep": "throughput_mad"}, "nearest: throughput_made"),
        ({"size": "8b"}, "throughput_made has no 8b int8; nearest"),
        ({"over": "fp16"}, "throughput_made has no 7b fp16"),
        ({"against_size": "32b"}, "throughput_made has no 32b int8"),
        ({"batch": 9}, r"batch=9: not among \[1, 8, 64\] of throughput_made"),
        ({"length": 100}, r"length=100: not among \[512, 1024, 4096\]"),
        ({"against_length": 100}, "length=100"),
        ({"margin": 1.0}, r"margin=1\.0: must be above 1$"),
        ({"claimed": [1.3, 1.2]}, r"claimed=\[1.3, 1.2\]: two rising factors"),
        ({"measure": "prefill"}, "measure='prefill'"),
        ({"metric": "auc"}, "unknown key metric"),
    ],
)
def test_a_faulty_speed_test_is_one_line(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    made.sweep(tmp_path)
    path = written(tmp_path, CLAIM | {"tests": [TEST | changes]})
    with pytest.raises(ValueError, match=words) as error:
        read_claims(path, tmp_path)
    assert "\n" not in str(error.value) and "claim one" in str(error.value)


def test_the_badge_is_of_the_range_over_neighbouring_cells(maps: dict[str, Map]) -> None:
    # int8 decodes at (4 + c) / (3.2 + c) of BF16, c the context in thousands: 1.216 at 512, 1.110 at 4096.
    got = estimate(speed(), {}, [], maps)
    assert (got.value, got.low, got.high) == pytest.approx((5.024 / 4.224, 8.096 / 7.296, 4.512 / 3.712))
    assert (got.outcome, got.units, got.reason) == ("supported", 8, "")
    assert estimate(speed(threshold=1.15), {}, [], maps).outcome == "undecided"
    assert estimate(speed(threshold=1.15), {}, [], maps).reason == "differs between neighbouring cells"
    assert estimate(speed(threshold=1.15, margin=1.1), {}, [], maps).reason == "equal within the margin"
    assert estimate(speed(expect="below"), {}, [], maps).outcome == "contradicted"
    assert estimate(speed(expect="not_above"), {}, [], maps).outcome == "contradicted"
    assert estimate(speed(expect="equal", threshold=1.16, margin=1.06), {}, [], maps).outcome == "supported"
    assert shown(speed(), got) == "x1.19 [1.11, 1.22], 8 cells"


def test_the_sources_factor_is_a_remark(maps: dict[str, Map]) -> None:
    def remark(low: float, high: float) -> str:
        got = estimate(speed(claimed=(low, high)), {}, [], maps)
        assert got.outcome == "supported"
        return got.reason

    assert remark(1.2, 1.3) == "claimed 1.20 to 1.30: the same here"
    assert remark(1.24, 1.3) == "claimed 1.24 to 1.30: within the range here"
    assert remark(1.4, 1.4) == "claimed 1.40: less here"
    assert remark(1.01, 1.02) == "claimed 1.01 to 1.02: more here"


def test_what_is_not_measured_is_not_tested_yet(maps: dict[str, Map]) -> None:
    far = estimate(speed(batch=64, length=4096), {}, [], maps)
    assert (far.outcome, far.reason) == ("undecided", "throughput_made has not measured this")
    assert estimate(speed(), {}, [], {}).outcome == "undecided"
    records = dict(maps["throughput_made"].records)
    records["7b-bf16"]["cells"]["8x1024"]["step_ms_p90"] *= 2
    assert "disturbed" in estimate(speed(), {}, [], maps).reason


def test_the_page_reads_the_committed_map(tmp_path: Path) -> None:
    sweep = made.sweep(tmp_path)
    for stem, record in made.records(sweep).items():
        write_record(throughput_folder(tmp_path, sweep.name) / f"{stem}.json", record)
    open_batch = TEST | {"batch": None, "against_size": "0.5b", "against_length": 512}
    known = read_claims(written(tmp_path, CLAIM | {"scale": "same", "tests": [TEST, open_batch]}), tmp_path)
    text = markdown(known, judge_all(known, tmp_path, tmp_path))
    assert "decode rate, 7b int8 over bf16, batch 8, a context of 1024; expected above 1 |" in text
    assert "x1.19 [1.11, 1.22], 8 cells | **supported** |" in text
    assert describe(known.claims[0].tests[1]).endswith(
        "7b int8 over bf16, all batches, a context of 1024 divided by 0.5b's divided by that at 512; expected above 1"
    )


def test_the_map_shows_the_same_claims(tmp_path: Path, maps: dict[str, Map]) -> None:
    tests = [TEST | {"claimed": [1.2, 1.3]}, TEST | {"precision": "int4", "batch": None, "length": 4096}]
    known = read_claims(written(tmp_path, CLAIM | {"tests": tests}), tmp_path)
    one = maps["throughput_made"]
    lines = claims_table(compare(one.sweep, one.records, known)).splitlines()
    assert lines[2] == (
        "| arXiv 1 | `one` | 7b int8 over bf16, decode at 1024 | 1.20 to 1.30 | 1.19 at 8 | supported | "
        "claimed 1.20 to 1.30: the same here |"
    )
    assert "| - | 1.31 at 1, 1.17 at 8 |" in lines[3]
    assert compare(one.sweep, one.records, Claims(papers={}, claims=())) == []


def test_steps_that_wait_for_the_host_decide_nothing(maps: dict[str, Map]) -> None:
    waiting = {str(batch): {"step_ms": 10.0, "host_ms": 4.0} for batch in (1, 8, 64)}
    plain = maps["throughput_made"]
    records = {stem: dict(record) | {"breakdown": waiting} for stem, record in plain.records.items()}
    got = estimate(speed(length=512), {}, [], {"throughput_made": Map(sweep=plain.sweep, records=records)})
    assert (got.outcome, got.value) == ("undecided", pytest.approx(4.512 / 3.712))
    assert got.reason == "its steps wait for the host, so it says nothing about the format"
