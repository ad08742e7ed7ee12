"""The page of seven cases: the committed one is what the committed results make."""

from __future__ import annotations

from pathlib import Path

from harness.studies.advise.accuracy import corrections, read_tables
from harness.studies.advise.cases import CASES, page, write
from harness.studies.advise.question import DEPLOY, FORMATS
from tests.studies.advise.made import RESULTS, evidence


def test_the_committed_page_is_made_again(tmp_path: Path) -> None:
    text = page(evidence(), read_tables(RESULTS))
    committed = (RESULTS / "tables" / "advise.md").read_text(encoding="utf-8")
    assert text == committed
    rows = [line for line in committed.splitlines() if line.startswith("| ")]
    pairs = sum(len(corrections(read_tables(RESULTS)["bf16"], name)) for name in FORMATS)
    assert len(rows) == 1 + len(CASES) + len(DEPLOY) * (2 + pairs)
    assert committed.count("| int4 | IcePop |") == len(DEPLOY)
    assert all(f"| {size}, {length} tokens, {gpus} GPU" in committed for size, length, gpus in CASES)
    path = write(text, tmp_path)
    assert path.name == "advise.md" and path.read_text(encoding="utf-8") == committed
