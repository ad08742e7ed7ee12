"""Sweeps: cells from YAML, nothing runs twice, a killed cell is a failed record and the rest goes on."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cell import work_folder
from harness.config import run_id
from harness.launchers.local import Event
from harness.provenance import ROOT
from harness.run_config import Launch
from harness.sweep import Sweep, estimate_s, finished, plan, read_sweep, run_sweep
from tests.toy import SMALL, small_launch

TINY = (*SMALL, "trainer.steps=2", "trainer.eval_every=2")


def sweep_of(*arms: dict[str, object], seeds: tuple[int, ...] = (0,), **axes: list[object]) -> Sweep:
    return Sweep(name="test", question="", overrides=TINY, arms=arms, seeds=seeds, axes=axes)


def test_lists_and_axes_multiply_and_seeds_are_outermost() -> None:
    planned = plan(
        sweep_of(
            {"method": "bf16"},
            {"method": "naive", "precision": ["int8", "int4"]},
            seeds=(0, 1),
            **{"algo.eps_high": [0.2, 0.28]},
        )
    )
    cells = planned.cells
    assert len(cells) == 3 * 2 * 2
    assert [c.seed for c in cells] == [0] * 6 + [1] * 6
    assert all(c.base_seed == c.seed for c in cells)
    assert {(c.method, c.precision.name) for c in cells} == {("bf16", "bf16"), ("naive", "int8"), ("naive", "int4")}
    assert len({run_id(c) for c in cells}) == len(cells)


def test_impossible_cells_are_listed_with_the_reason() -> None:
    planned = plan(sweep_of({"method": "flashrl", "precision": "int4", "algo.mode": ["decoupled", "bypass_ppo"]}))
    assert len(planned.cells) == 1
    ((words, reason),) = planned.skipped
    assert "bypass_ppo" in words
    assert "TIS" in reason


def test_shipped_sweeps_plan() -> None:
    for path in (ROOT / "sweeps").glob("*.yaml"):
        sweep = read_sweep(path.stem, ROOT / "sweeps")
        first = {key: values[:1] for key, values in sweep.axes.items()}
        planned = plan(replace(sweep, axes=first))
        assert planned.skipped == (), path
        assert len(planned.cells) >= 3 * len(sweep.seeds)
        if path.stem == "quick":
            assert len(planned.cells) == 24


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("question: q\narms: []\nseeds: [0]\ncolour: red\n", ["colour"]),
        ("question: q\nseeds: [0]\n", ["arms"]),
        ("question: q\narms: [{method: bf16}]\nseeds: [a]\n", ["seeds", "'a'"]),
        ("question: [q\n", ["bad.yaml"]),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        read_sweep(str(path))
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_an_unknown_sweep_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="quick"):
        read_sweep("quik", ROOT / "sweeps")


def test_second_start_runs_nothing_and_edited_cells_are_new(tmp_path: Path) -> None:
    launch = small_launch(tmp_path)
    planned = plan(sweep_of({"method": "bf16"}, {"method": "naive", "precision": "int4"}))
    started: list[str] = []

    def note(event: Event) -> None:
        if event.kind == "started":
            started.append(run_id(event.config))

    records, interrupted = run_sweep(planned, launch, 2, note)
    assert not interrupted
    assert [r.status for r in records] == ["ok", "ok"]
    assert len(started) == 2
    assert not work_folder(launch, started[0]).exists()
    run_sweep(planned, launch, 2, note)
    assert len(started) == 2
    edited = plan(sweep_of({"method": "bf16", "algo.eps_high": 0.3}))
    run_sweep(edited, launch, 1, note)
    assert len(started) == 3
    seconds, is_measured = estimate_s(planned.cells[0], records)
    assert is_measured
    assert 0 < seconds < 60


def test_a_killed_cell_fails_alone_and_runs_again(tmp_path: Path) -> None:
    launch = small_launch(tmp_path)
    planned = plan(sweep_of({"method": "bf16", "trainer.steps": [2, 100000]}))
    long = next(c for c in planned.cells if c.trainer.steps > 2)

    pids: list[int] = []

    def kill_the_long_one(event: Event) -> None:
        if event.kind == "started" and event.config is long:
            pids.append(event.pid)
        if event.kind == "progress" and event.config is long and event.step > 0:
            os.kill(pids[0], signal.SIGKILL)

    records, _ = run_sweep(planned, launch, 2, kill_the_long_one)
    by_steps = {r.config["trainer"]["steps"]: r for r in records}
    assert by_steps[2].status == "ok"
    assert by_steps[100000].status == "failed"
    assert "SIGKILL" in (by_steps[100000].reason or "")
    assert finished(long, launch) is None


def test_ctrl_c_leaves_a_resumable_state(tmp_path: Path) -> None:
    launch = small_launch(tmp_path)
    planned = plan(sweep_of({"method": "bf16", "trainer.steps": 60}))

    def interrupt(event: Event) -> None:
        if event.kind == "progress" and event.step > 0:
            raise KeyboardInterrupt

    records, interrupted = run_sweep(planned, launch, 1, interrupt)
    assert interrupted
    assert records == []
    assert (work_folder(launch, run_id(planned.cells[0])) / "state.pt").exists()
    steps: list[int] = []
    records, interrupted = run_sweep(planned, launch, 1, lambda e: steps.append(e.step))
    assert records[0].status == "ok"
    assert records[0].num_steps == 60


def test_two_sweeps_do_not_share_a_results_folder(tmp_path: Path) -> None:
    launch = small_launch(tmp_path)
    planned = plan(sweep_of({"method": "bf16"}))

    def second(event: Event) -> None:
        if event.kind == "started":
            with pytest.raises(ValueError, match=f"a sweep is at work there \\(process {os.getpid()}\\)"):
                run_sweep(planned, launch, 1, lambda e: None)

    run_sweep(planned, launch, 1, second)


def test_an_unwritable_results_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    planned = plan(sweep_of({"method": "bf16"}))
    with pytest.raises(ValueError, match="results="):
        run_sweep(planned, Launch(results=str(tmp_path / "file"), sweep="test"), 1, lambda e: None)
