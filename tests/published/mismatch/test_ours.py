"""k3 of the stand-ins from committed records: medians and pools by hand, and the packed runs read again."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from harness.foundation.project_files import HOME
from harness.published.mismatch.ours import Measured, certain_share, measured, of_sweep, pooled, rows_of
from harness.records.packed import read_packed, read_packed_series
from harness.studies.probe.record import read

RESULTS = HOME / "results"
ONE = Measured(
    task="wordmath", n=10, parameters=1e7, spread=0.0, engine="vllm", format="int8", base="a", k3=1e-3, length=200.0,
    entropy=0.2, by_entropy=((0.0, 1e-4, 90.0), (0.1, 4e-3, 10.0)), by_position=((0.0, 2e-3, 50.0), (64.0, 0.0, 50.0)),
    source="sweep",
)  # fmt: skip


@pytest.fixture(scope="module")
def committed() -> list[Measured]:
    """Everything in the repository."""
    return measured(RESULTS)


def test_a_row_is_the_median_of_its_records_over_bases() -> None:
    others = (replace(ONE, base="b", k3=5e-3, length=220.0, entropy=math.nan), replace(ONE, k3=2e-3, source="probe x"))
    (row, other) = rows_of([ONE, *others, replace(ONE, format="int4", k3=1.0)])
    assert (row.k3, row.k3_low, row.k3_high) == (2e-3, 1e-3, 5e-3)
    assert (row.num_records, row.num_bases, row.length, row.entropy) == (3, 2, 200.0, 0.2)
    assert row.sources == ("sweep", "probe x") and other.format == "int4" and other.num_records == 1


def test_the_share_on_certain_tokens_and_pools_weight_by_tokens() -> None:
    assert certain_share(ONE.by_entropy) == pytest.approx(90e-4 / (90e-4 + 40e-3))
    assert math.isnan(certain_share(((0.0, 0.0, 5.0),)))
    twice = replace(ONE, by_entropy=((0.0, 3e-4, 10.0), (0.5, 1.0, 1.0)))
    (low, high) = pooled([ONE, twice], (0.0, 0.1), by="entropy")
    assert low == (pytest.approx((90e-4 + 30e-4) / 100), 100.0)
    assert high == (pytest.approx((40e-3 + 1.0) / 11), 11.0)
    assert math.isnan(pooled([ONE], (0.0, 64.0, 128.0), by="position")[2][0])


def test_committed_runs_are_read_at_their_first_step() -> None:
    """Independent: the packed series, by hand."""
    path = RESULTS / "packed" / "main_wordmath.zip"
    series = read_packed_series(path, ["mismatch/kl_k3"])
    wanted = {
        run.run_id for run in read_packed(path)
        if run.config["method"] == "naive" and run.config["precision"]["name"] == "int8" and run.run_id in series
    }  # fmt: skip
    found = [one for one in of_sweep(RESULTS, "main_wordmath") if one.format == "int8"]
    assert sorted(one.k3 for one in found) == sorted(series[name]["mismatch/kl_k3"][0] for name in wanted)
    assert len(found) == len(wanted) == 29 and {one.engine for one in found} == {"vllm"}
    assert {one.parameters for one in found} == {9639552.0}
    rebuilt = sum(k3 * count for _, k3, count in found[0].by_entropy) / sum(count for *_, count in found[0].by_entropy)
    assert rebuilt == pytest.approx(found[0].k3, rel=1e-3), "the profile is another batch's"


def test_committed_probes_count_once_and_untrained_ones_not_at_all(committed: list[Measured]) -> None:
    found = [one for one in committed if one.source.startswith("probe")]
    assert {one.parameters < 1e8 for one in found} == {True}, "random weights say nothing of mismatch"
    record = read(RESULTS / "probes" / "e50412ac76cc.json")
    own = [one.k3 for one in found if one.source == "probe e50412ac76cc"]
    assert own == [row["mismatch"]["kl_k3"] for row in record["formats"] if row["name"] != "bf16 again"]


def test_int8_of_word_problems_is_the_same_over_runs_and_probes(committed: list[Measured]) -> None:
    """Golden: the row that documents cite, from the records alone."""
    found = committed
    for n, golden, num_bases in ((10, 4.719e-3, 24), (30, 1.453e-4, 6)):
        where = ("wordmath", n, "vllm", "int8")
        row = next(r for r in rows_of(found) if (r.task, r.n, r.engine, r.format) == where)
        own = [m.k3 for m in found if (m.task, m.n, m.engine, m.format) == where]
        assert row.k3 == median(own) == pytest.approx(golden, rel=1e-2)
        assert row.num_bases == num_bases


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="main_wordmath"):
        measured(tmp_path)
