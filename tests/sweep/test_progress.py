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
def test_cells_of_one_name_are_told_apart_by_their_arms(status: str, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [small_config("method=bf16", f"trainer.lr={rate}") for rate in (1e-3, 1e-4)]
    assert run_name(cells[0]) == run_name(cells[1])
    progress = Progress(cells[:1], cells)
    found = record(cells[0], Launch(), None, {}, status, "out of luck", None)
    progress(Event(kind="started", config=cells[0]))
    progress(Event(kind="finished", config=cells[0], result=found))
    progress(Event(kind="started", config=cells[0]))
    progress.close()
    ended, again = capsys.readouterr().out.splitlines()
    shown = f"{run_id(cells[0])}  {run_name(cells[0])}  lr=0.001"
    assert ended.startswith("[2/2] ") and f" left  {status}  {shown}: " in ended
    assert again == f"again  {shown}"


def test_the_time_left_counts_no_cell_that_another_sweep_has_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [small_config("method=bf16", "trainer.steps=6", f"seed={seed}") for seed in range(4)]
    seconds = iter([0.0, 6.0, 120.0])
    monkeypatch.setattr("harness.sweep.progress.time.perf_counter", lambda: next(seconds))
    progress = Progress(cells, cells)
    found = [record(cell, Launch(), None, {}, "ok", None, None) for cell in cells]
    progress(Event(kind="finished", config=cells[0], result=found[0]))
    progress(Event(kind="started", config=cells[1]))
    progress(Event(kind="finished", config=cells[1], result=found[1]))
    progress.close()
    taken, ran = capsys.readouterr().out.splitlines()
    assert taken.startswith("[1/4]  ok  ")
    assert ran.startswith("[2/4]   2.0 min, 4.0 min left  ok  ")  # two of the three cells that run here


def test_the_time_left_counts_no_step_of_before_a_resume(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [small_config("method=bf16", "trainer.steps=6", f"seed={seed}") for seed in range(2)]
    seconds = iter([0.0, 120.0])
    monkeypatch.setattr("harness.sweep.progress.time.perf_counter", lambda: next(seconds))
    progress = Progress(cells, cells)
    progress(Event(kind="started", config=cells[0]))
    for step in (4, 5):
        progress(Event(kind="progress", config=cells[0], step=step))
    progress(Event(kind="finished", config=cells[0], result=record(cells[0], Launch(), None, {}, "ok", None, None)))
    progress.close()
    assert capsys.readouterr().out.startswith("[1/2]   2.0 min, 6.0 min left  ok  ")  # two steps took a minute each


def test_a_line_about_a_base_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    cells = [small_config("method=bf16", f"seed={seed}") for seed in range(2)]
    progress = Progress(cells, cells)
    for cell, note in ((0, "a: step 5"), (1, "b: step 5"), (0, "a: step 5"), (0, "a: step 10"), (1, None)):
        progress(Event(kind="progress", config=cells[cell], note=note))
    progress.close()
    assert capsys.readouterr().out == "a: step 5\nb: step 5\na: step 10\n"


def test_a_run_without_a_last_score_says_why() -> None:
    found = record(small_config("method=bf16"), Launch(), None, {}, "ok", None, None)
    error = f"step 150: OutOfMemoryError: CUDA out of memory.{' words' * 40}"
    said = summary_line(found.model_copy(update={"evaluation_errors": [error]}), found.name)
    assert "no score, 0 s; the evaluation failed, step 150: OutOfMemoryError: CUDA out of memory. words" in said
    assert said.endswith(" ...") and len(said) < 320
    scored = found.model_copy(update={"summary": {"final_accuracy": 0.5, "final_accuracy_rollout": 0.25}})
    assert summary_line(scored, found.name).endswith(": accuracy 0.500, in rollout format 0.250, 0 s")
