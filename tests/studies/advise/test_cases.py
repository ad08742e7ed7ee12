"""The page of seven cases: the committed one is what the committed records make."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.studies.advise.cases import CASES, answered, page, text_mismatch, write
from harness.studies.advise.question import FORMATS
from harness.studies.dose.points import START, read_all_points
from tests.studies.advise.made import RESULTS, evidence
from tests.studies.dose import made


def on_text(k3: float, precision: str = "int8", base: str = "one", **values: object):
    """A run that starts at `k3` and ends far above it."""
    doses = {"k3 x length": 1.0, START: 250 * k3, "k3 alone": 1.0, "length alone": 250.0}
    return made.point(0.0, 1.0, base, task="wordmath", engine="vllm", precision=precision, doses=doses, **values)


def test_the_mismatch_of_text_is_the_median_of_uncorrected_runs_on_real_kernels() -> None:
    rows = [on_text(k3) for k3 in (1e-3, 2e-3, 9e-3)] + [on_text(5e-4, "nvfp4")]
    rows += [on_text(1e-5, base="another")] * 9  # one base, however many runs it has
    rows += [on_text(4e-3, base=f"model wordmath {n} 0 third", length=n) for n in (10, 30)]  # two sizes of one base
    rows += [on_text(1.0, correction="TIS"), on_text(1.0, spread=0.5), made.point(0.0, 1.0, task="wordmath")]
    found = text_mismatch(rows)
    assert {name: m.k3 for name, m in found.items()} == {"int8": 2e-3, "nvfp4": 5e-4}
    assert {name: m.span for name, m in found.items()} == {"int8": "1e-05 to 0.004", "nvfp4": ""}
    assert found["int8"].source == "committed runs on wordmath with vllm; 1e-05 to 0.004 by base"
    with pytest.raises(ValueError, match="no packed run of wordmath with vllm"):
        text_mismatch(made.cloud())


def test_the_committed_page_is_made_again(tmp_path: Path) -> None:
    found = answered(evidence(), read_all_points(RESULTS))
    committed = (RESULTS / "tables" / "advise.md").read_text(encoding="utf-8")
    assert page(found) == committed
    assert [(a.question.size, a.question.length, a.question.gpus) for a in found] == list(CASES)
    rows = [line for line in committed.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(CASES) * len(FORMATS)
    assert any("times, assumed" in row and "if only the dose matters" in row for row in rows), "every kind of answer"
    assert any("[" in row.split("|")[4] and " runs" in row for row in rows)
    path = write(found, tmp_path)
    assert path.name == "advise.md" and path.read_text(encoding="utf-8") == committed
