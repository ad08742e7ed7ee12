"""Lines of a sweep's progress."""

from __future__ import annotations

import pytest

from harness.config.load import run_id, run_name
from harness.config.schema import Launch
from harness.run.record import record
from harness.sweep.launchers.job import Event
from harness.sweep.progress import Progress
from tests.toy import small_config


@pytest.mark.parametrize("status", ["ok", "failed"])
def test_cells_of_one_name_are_told_apart_by_their_ids(status: str, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [small_config("method=bf16", f"trainer.lr={rate}") for rate in (1e-3, 1e-4)]
    assert run_name(cells[0]) == run_name(cells[1])
    progress = Progress(cells, num_all=2)
    for cell in cells:
        found = record(cell, Launch(), None, {}, status, "out of luck", None)
        progress(Event(kind="finished", config=cell, result=found))
    progress(Event(kind="started", config=cells[1]))
    progress.close()
    *ended, again = capsys.readouterr().out.splitlines()
    assert [line.partition("left  ")[2].partition(":")[0] for line in ended] == [
        f"{status}  {run_id(cell)}  {run_name(cell)}" for cell in cells
    ]
    assert again == f"again  {run_id(cells[1])}  {run_name(cells[1])}"
