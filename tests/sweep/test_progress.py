"""Lines of a sweep's progress."""

from __future__ import annotations

import pytest

from harness.config.load import run_id, run_name
from harness.config.schema import Launch
from harness.run.record import record
from harness.sweep.launchers.job import Event
from harness.sweep.progress import Progress, summary_line
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


def test_a_run_without_a_last_score_says_why() -> None:
    found = record(small_config("method=bf16"), Launch(), None, {}, "ok", None, None)
    error = f"step 150: OutOfMemoryError: CUDA out of memory.{' words' * 40}"
    said = summary_line(found.model_copy(update={"evaluation_errors": [error]}))
    assert "no score, 0 s; the evaluation failed, step 150: OutOfMemoryError: CUDA out of memory. words" in said
    assert said.endswith(" ...") and len(said) < 320
    scored = found.model_copy(update={"summary": {"final_accuracy": 0.5, "final_accuracy_rollout": 0.25}})
    assert summary_line(scored).endswith(": accuracy 0.500, in rollout format 0.250, 0 s")
