"""The queue: nothing runs twice, a killed cell goes on or fails alone, wrong files stop a sweep before it starts."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from harness.config.load import parse, run_id
from harness.config.schema import Launch, RunConfig
from harness.foundation.provenance import ROOT
from harness.records.paths import policy_folder, rollouts_path
from harness.records.policies import last_policy
from harness.records.run_result import read_result, read_results, series_bytes, write_result
from harness.records.sweep_file import purpose
from harness.report.leaderboard import board_of
from harness.report.tables import markdown
from harness.run.cell import Cancelled, Stages, run_cell, work_folder
from harness.run.loop import train
from harness.run.run import Run
from harness.sweep import finished, plan, queue, run_sweep, stored
from harness.sweep.launchers.job import Event, Job
from harness.sweep.queue import check_owner, put_aside
from harness.sweep.retry import Limit
from tests.sweep.stand_in import Ending, Seen, launcher, result_of
from tests.sweep.tiny import sweep_of
from tests.toy import small_config, small_launch


def nothing(event: Event) -> None:
    pass


def test_second_start_runs_nothing_and_edited_cells_are_new(tmp_path: Path) -> None:
    launch = small_launch(tmp_path)
    planned = plan(sweep_of({"method": "bf16"}, {"method": "naive", "precision": "int4"}, seeds=(0, 1)))
    seen = Seen()
    records, interrupted = run_sweep(planned, launch, 1, nothing, run=launcher(seen))
    assert not interrupted
    assert [r.status for r in records] == ["ok"] * 4
    assert len(seen.starts) == 4
    again, _ = run_sweep(planned, launch, 1, nothing, run=launcher(seen))
    assert {r.run_id for r in again} == {r.run_id for r in records}
    assert len(seen.starts) == 4
    edited = plan(sweep_of({"method": "bf16", "algo.eps_high": 0.3}))
    run_sweep(edited, launch, 1, nothing, run=launcher(seen))
    assert len(seen.starts) == 5


def test_fields_outside_of_the_id_do_not_part_a_record_from_its_cell(tmp_path: Path) -> None:
    launch, seen = small_launch(tmp_path), Seen()
    for extra in ({}, {"engine.sleep": True}, {"engine.gpu_memory": 0.3}):
        planned = plan(sweep_of({"method": "bf16"} | extra))
        run_sweep(planned, launch, 1, nothing, run=launcher(seen))
    assert len(seen.starts) == 1


def test_committed_records_are_those_of_the_cells_that_they_name(tmp_path: Path) -> None:
    """So that a sweep goes on from them: some of each; the ids of all are tests/config/test_load's."""
    lines: list[str] = []
    for pack in sorted((ROOT / "results" / "packed").glob("*.zip")):
        with zipfile.ZipFile(pack) as archive:
            found = archive.read("records.jsonl").decode().splitlines()
        lines += found[:: max(1, len(found) // 5)]
    assert len(lines) > 150
    for line in lines:
        record = json.loads(line)
        cell = parse(RunConfig, record["config"])
        path = tmp_path / f"{run_id(cell)}.json"
        path.write_text(line, encoding="utf-8")
        path.with_suffix(".parquet").write_bytes(series_bytes([{"train/loss": 1.0}]))
        result = read_result(path)
        assert result.run_id == path.stem
        check_owner(path, result, Launch(sweep=result.sweep), cell)


def test_what_a_killed_sweep_left_of_a_finished_cell_goes(tmp_path: Path) -> None:
    launch, planned = small_launch(tmp_path), plan(sweep_of({"method": "bf16"}, seeds=(0, 1)))
    ending: dict[int, Ending] = {0: ("ok", None), 1: ("diverged", "step 1: the loss is nan")}
    run_sweep(planned, launch, 1, nothing, run=launcher(Seen(), ending=lambda job: ending[job.config.seed]))
    works = [work_folder(launch, run_id(cell)) for cell in planned.cells]
    for work in works:
        work.mkdir(parents=True, exist_ok=True)
        (work / "state.pt").write_bytes(b"x")
    run_sweep(planned, launch, 1, nothing, run=launcher(Seen()))
    # The last good state of a divergence stays.
    assert [(work / "state.pt").exists() for work in works] == [False, True]


def test_a_cell_that_another_sweep_finished_is_taken_over_and_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.sweep.queue.commit", lambda: ("c0ffee", False))
    first, second = small_launch(tmp_path), replace(small_launch(tmp_path), sweep="second")
    seen, events = Seen(), list[Event]()
    run_sweep(plan(sweep_of({"method": "bf16"}, seeds=(0,))), first, 1, nothing, run=launcher(seen))
    planned = plan(sweep_of({"method": "bf16"}, seeds=(0, 1)))
    records, _ = run_sweep(planned, second, 1, events.append, run=launcher(seen))
    assert len(seen.starts) == 2
    assert {r.sweep for r in records} == {"second"}
    assert sorted(e.config.seed for e in events if e.kind == "finished") == [0, 1]
    old, new = (tmp_path / "runs" / name / f"{run_id(planned.cells[0])}.json" for name in (first.sweep, "second"))
    assert old.with_suffix(".parquet").read_bytes() == new.with_suffix(".parquet").read_bytes()
    assert new.read_text() == old.read_text().replace(f'"sweep": "{first.sweep}"', '"sweep": "second"')


def test_drafts_failures_and_unreadable_files_of_other_sweeps_are_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.sweep.queue.commit", lambda: ("c0ffee", False))
    first, second = small_launch(tmp_path), replace(small_launch(tmp_path), sweep="second")
    planned, seen = plan(sweep_of({"method": "bf16"}, seeds=(0, 1))), Seen()
    run = launcher(seen, ending=lambda job: ("failed", "ValueError: x") if job.config.seed else ("ok", None))
    run_sweep(planned, first, 1, nothing, run=run)
    (tmp_path / "runs" / first.sweep / f"{run_id(planned.cells[0])}.json").write_text("{")
    run_sweep(planned, second, 1, nothing, run=launcher(seen))
    assert len(seen.starts) == 4
    monkeypatch.setattr("harness.sweep.queue.commit", lambda: ("c0ffee", True))
    other = plan(sweep_of({"method": "bf16"}, seeds=(7,)))
    for name in ("draft", "after a draft"):
        run_sweep(other, replace(first, sweep=name), 1, nothing, run=launcher(seen))
    assert len(seen.starts) == 6


@pytest.mark.parametrize(
    ("ending", "attempts", "micro_batch"),
    [
        (("failed", "ValueError: a bug"), 1, 32768),
        (("diverged", "step 3: loss is not finite"), 1, 32768),
        (("failed", "lost: killed by SIGKILL"), 3, 32768),
        (("failed", "MemoryError: killed by the kernel's out-of-memory killer"), 4, 8192),
    ],
)
def test_a_failed_cell_is_tried_again_as_its_class_says(
    tmp_path: Path, ending: Ending, attempts: int, micro_batch: int
) -> None:
    launch, seen = small_launch(tmp_path), Seen()
    planned = plan(sweep_of({"method": "bf16"}, {"method": "naive", "precision": "int4"}))
    run = launcher(seen, ending=lambda job: ending if job.config.method == "naive" else ("ok", None))
    records, _ = run_sweep(planned, launch, 1, nothing, run=run)
    starts = [job for job, _ in seen.starts if job.config.method == "naive"]
    assert len(starts) == attempts and len(seen.starts) == attempts + 1
    assert starts[-1].launch.micro_batch_tokens == micro_batch
    by_method = {r.config["method"]: r for r in records}
    assert (by_method["bf16"].status, by_method["bf16"].retries) == ("ok", [])
    assert (by_method["naive"].status, len(by_method["naive"].retries)) == (ending[0], attempts - 1)
    run_sweep(planned, launch, 1, nothing, run=run)
    assert len(seen.starts) == (attempts + 1 if ending[0] == "diverged" else 2 * attempts + 1)


def test_a_time_limit_leaves_cells_without_a_record(tmp_path: Path) -> None:
    launch, seen = small_launch(tmp_path), Seen()
    planned = plan(sweep_of({"method": "bf16"}, seeds=tuple(range(6))))
    limit = Limit(end=35.0, predict=lambda config: 10.0, clock=seen.clock)
    run = launcher(seen, seconds=lambda job: 10)
    records, interrupted = run_sweep(planned, launch, 1, nothing, run=run, limit=limit)
    assert not interrupted
    assert [r.seed for r in records] == [0, 1, 2]
    assert seen.clock() == 30


def test_a_cell_that_ended_while_it_was_stopped_is_found_and_told(tmp_path: Path) -> None:
    launch, seen, events = small_launch(tmp_path), Seen(), list[Event]()
    planned = plan(sweep_of({"method": "bf16"}, seeds=(0, 1)))

    def end_unheard(event: Event) -> None:
        events.append(event)
        if seen.clock() == 5:
            result = result_of(Job(config=planned.cells[1], launch=launch), ("ok", None))
            write_result(tmp_path / "runs" / launch.sweep, result, [{"train/loss": 0.0}])

    limit = Limit(end=5, predict=lambda config: 1.0, clock=seen.clock)
    records, _ = run_sweep(planned, launch, 2, end_unheard, run=launcher(seen, 2, lambda job: 100), limit=limit)
    assert [r.seed for r in records] == [1] and [job.config.seed for job, _ in seen.stopped] == [0, 1]
    assert [event.result for event in events if event.kind == "finished"] == records


def test_a_killed_cell_goes_on_and_a_hopeless_one_fails_alone(tmp_path: Path) -> None:
    launch = small_launch(tmp_path, checkpoint_every_s=0.0)
    planned = plan(sweep_of({"method": "bf16", "trainer.steps": [2, 100000]}))
    long = next(c for c in planned.cells if c.trainer.steps > 2)
    pids: list[int] = []

    def kill_the_long_one(event: Event) -> None:
        if event.kind == "started" and event.config is long:
            pids.append(event.pid)
        if event.kind == "progress" and event.config is long and event.step > 0:
            with suppress(ProcessLookupError):
                os.kill(pids[-1], signal.SIGKILL)

    records, _ = run_sweep(planned, launch, 2, kill_the_long_one)
    by_steps = {r.config["trainer"]["steps"]: r for r in records}
    assert by_steps[2].status == "ok"
    assert by_steps[2].retries == []
    assert by_steps[100000].status == "failed"
    assert "SIGKILL" in (by_steps[100000].reason or "")
    assert len(set(pids)) == 3
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
    launch, seen = small_launch(tmp_path), Seen()
    planned = plan(sweep_of({"method": "bf16"}))
    refused: list[Event] = []

    def second(event: Event) -> None:
        with pytest.raises(ValueError, match=f"a sweep is at work there \\(process {os.getpid()}\\)"):
            run_sweep(planned, launch, 1, nothing)
        refused.append(event)

    run_sweep(planned, launch, 1, second, run=launcher(seen))
    assert [event.kind for event in refused] == ["started", "finished"]


def test_a_sweep_that_sweeps_does_not_know_keeps_its_purpose(tmp_path: Path) -> None:
    launch, seen = small_launch(tmp_path), Seen()
    planned = plan(replace(sweep_of({"method": "bf16"}), question="Does it?", control="fp16"))
    run_sweep(planned, launch, 1, nothing, run=launcher(seen))
    assert purpose("test", tmp_path) == planned.sweep.purpose
    assert (purpose("test", tmp_path).question, purpose("test", tmp_path).control) == ("Does it?", "fp16")
    run_sweep(plan(sweep_of({"method": "bf16"})), launch, 1, nothing, run=launcher(seen))
    assert not (tmp_path / "runs" / "test" / "purpose.yaml").exists()


def test_every_impossible_cell_leaves_a_record_and_runs_once_it_can(tmp_path: Path) -> None:
    launch = small_launch(tmp_path)
    sweep = sweep_of({"method": "flashrl", "precision": "int4", "algo.mode": "bypass_ppo"}, seeds=(0, 1))
    planned = plan(sweep)
    records, _ = run_sweep(planned, launch, 1, nothing)
    assert [(r.status, r.seed, r.num_steps) for r in records] == [("skipped", 0, 0), ("skipped", 1, 0)]
    assert all("TIS" in (r.reason or "") for r in records)
    assert {r.run_id for r in read_results(tmp_path / "runs")} == {r.run_id for r in records}
    board = board_of(records)
    assert board.table["status"].tolist() == ["2 skipped"]
    assert "would count it twice" in markdown(board, "test")
    path = tmp_path / "runs" / "test" / f"{records[0].run_id}.json"
    before = path.stat().st_mtime_ns
    run_sweep(planned, launch, 1, nothing)
    assert path.stat().st_mtime_ns == before
    assert finished(planned.impossible[0][0], launch) is None


def test_wrong_files_are_named_and_left_alone(tmp_path: Path) -> None:
    launch = small_launch(tmp_path)
    planned = plan(sweep_of({"method": "bf16"}, {"method": "naive", "precision": "int4"}))
    folder = tmp_path / "runs" / "test"
    records, _ = run_sweep(planned, launch, 1, nothing, run=launcher(Seen()))
    assert set(stored(launch, planned.cells)) == {r.run_id for r in records}
    good = {path.name: path.read_bytes() for path in folder.iterdir()}
    first, second = sorted(r.run_id for r in records)
    text = good[f"{first}.json"].decode()
    wrong = {
        "notes.json": '{"a": 1}',
        f"{first}.json": text[: len(text) // 2],
        f"{second}.json": text.replace(first, second),
        "0123456789ab.json": text.replace(first, "0123456789ab").replace('"sweep": "test"', '"sweep": "other"'),
    }
    for name, content in wrong.items():
        (folder / name).write_text(content)
    events: list[Event] = []
    with pytest.raises(ValueError) as caught:
        run_sweep(planned, launch, 1, events.append)
    words = str(caught.value)
    assert all(name in words for name in wrong) and "\n" not in words
    assert "configuration is not that of" in words and "of the sweep 'other'" in words
    assert events == []
    assert {name: (folder / name).read_text() for name in wrong} == wrong
    for name in wrong:
        (folder / name).unlink()
        if name in good:
            (folder / name).write_bytes(good[name])
    series = folder / f"{first}.parquet"
    series.write_bytes(series.read_bytes()[:-9])
    with pytest.raises(
        ValueError, match=rf"{first}\.parquet: not a Parquet file.*nothing was started: .*record"
    ) as told:
        run_sweep(planned, launch, 1, events.append)
    assert "\n" not in str(told.value) and events == []
    series.unlink()
    with pytest.raises(ValueError, match=f"series {first}.parquet is missing"):
        stored(launch, planned.cells)


def test_a_cell_on_another_number_of_gpus_is_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "commit", lambda: ("0" * 40, False))  # records of a changed tree never are
    one, planned, seen = small_launch(tmp_path), plan(sweep_of({"method": "bf16"})), Seen()
    run_sweep(planned, one, 1, nothing, run=launcher(seen))
    two = replace(one, sweep="other", gpus=2)
    run_sweep(planned, two, 1, nothing, run=launcher(seen))
    assert len(seen.starts) == 2
    again = replace(two, sweep="third")
    records, _ = run_sweep(planned, again, 1, nothing, run=launcher(seen))
    assert len(seen.starts) == 2
    assert [record.launch for record in records] == [{"gpus": 2}]


def test_a_policy_goes_along_with_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "commit", lambda: ("0" * 40, False))
    one, planned, seen = small_launch(tmp_path, save="hf"), plan(sweep_of({"method": "bf16"})), Seen()
    run_sweep(planned, one, 1, nothing, run=launcher(seen))
    second = replace(one, sweep="second")
    run_sweep(planned, second, 1, nothing, run=launcher(seen))
    assert len(seen.starts) == 2  # the stand-in has kept no policy
    name = run_id(planned.cells[0])
    (tmp_path / "policies" / "second" / name / "step-4").mkdir(parents=True)
    (tmp_path / "policies" / "second" / name / "step-4" / "config.json").write_text("{}")
    run_sweep(planned, replace(one, sweep="third"), 1, nothing, run=launcher(seen))
    run_sweep(planned, replace(one, sweep="fourth", save="none"), 1, nothing, run=launcher(seen))
    assert len(seen.starts) == 2
    assert last_policy(tmp_path, "third", name).joinpath("config.json").read_text() == "{}"
    assert not (tmp_path / "policies" / "fourth").exists()


def test_a_policy_that_is_not_copied_whole_leaves_neither_policy_nor_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "commit", lambda: ("0" * 40, False))
    one, planned, seen = small_launch(tmp_path, save="hf"), plan(sweep_of({"method": "bf16"})), Seen()
    run_sweep(planned, one, 1, nothing, run=launcher(seen))
    name = run_id(planned.cells[0])
    theirs = policy_folder(tmp_path, one.sweep, name) / "step-4"
    theirs.mkdir(parents=True)
    (theirs / "config.json").write_text("{}")

    def full(source: Path, target: Path, **_: object) -> None:
        (target / "step-4").mkdir(parents=True)
        raise OSError(28, "No space left on device")

    second = replace(one, sweep="second")
    with monkeypatch.context() as patched:
        patched.setattr("harness.sweep.queue.shutil.copytree", full)
        with pytest.raises(OSError, match="No space left"):
            run_sweep(planned, second, 1, nothing, run=launcher(seen))
    assert [*(tmp_path / "policies" / "second").iterdir()] == [] and stored(second) == {}
    run_sweep(planned, second, 1, nothing, run=launcher(seen))
    assert len(seen.starts) == 1 and last_policy(tmp_path, "second", name).joinpath("config.json").read_text() == "{}"


def test_a_cell_is_run_once_more_only_where_its_responses_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record is no file of responses, and a run that wrote some counts as any other where none are asked for."""
    monkeypatch.setattr(queue, "commit", lambda: ("0" * 40, False))
    one, planned, seen = small_launch(tmp_path), plan(sweep_of({"method": "bf16"})), Seen()
    run_sweep(planned, one, 1, nothing, run=launcher(seen))
    (record,), _ = run_sweep(planned, replace(one, sweep="second", dump_rollouts=8), 1, nothing, run=launcher(seen))
    assert len(seen.starts) == 2 and record.launch == {"dump_rollouts": 8}
    run_sweep(planned, replace(one, sweep="third"), 1, nothing, run=launcher(seen))
    assert len(seen.starts) == 2


def test_what_is_put_aside_starts_anew_and_is_resumed_from_its_own_state(tmp_path: Path) -> None:
    config, launch, begun = small_config("method=bf16"), small_launch(tmp_path), list[int]()

    def train_from(run: Run, after_step: Callable[[Run], None]) -> None:
        begun.append(run.step)
        train(run, after_step)

    stages = Stages(train=train_from)
    assert put_aside([config], launch) is None
    for is_again in (False, True):
        if is_again:
            aside = put_aside([config], launch)
            assert aside is not None and [path.name for path in aside.rglob("*.pt")] == ["state.pt"]
            assert not work_folder(launch, run_id(config)).exists()
        with pytest.raises(Cancelled):
            run_cell(config, launch, should_stop=lambda: True, stages=stages)
    assert run_cell(config, launch, stages=stages).num_steps == 4
    assert begun == [0, 0, 1]


def test_a_divergence_and_its_state_are_put_aside_together(tmp_path: Path) -> None:
    launch, planned = small_launch(tmp_path), plan(sweep_of({"method": "bf16"}, seeds=(0, 1)))
    run_sweep(planned, launch, 1, nothing, run=launcher(Seen(), ending=lambda job: ("diverged", "step 1: nan")))
    first, second = (run_id(cell) for cell in planned.cells)
    for name in (first, second):
        work_folder(launch, name).mkdir(parents=True)
    aside = put_aside(planned.cells[:1], launch)
    assert aside is not None and {path.name for path in aside.iterdir()} == {first, f"{first}.json"}
    assert {i: r.status for i, r in stored(launch).items()} == {first: "cancelled", second: "diverged"}
    assert work_folder(launch, second).is_dir()


def test_what_is_put_aside_runs_again_although_another_sweep_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the command that put it aside was stopped before the cell started, and the next does not say so."""
    monkeypatch.setattr(queue, "commit", lambda: ("0" * 40, False))
    one, planned, seen = small_launch(tmp_path), plan(sweep_of({"method": "bf16"}, seeds=(0, 1))), Seen()
    second = replace(one, sweep="second")
    run_sweep(planned, one, 1, nothing, run=launcher(seen))
    run_sweep(replace(planned, cells=planned.cells[:1]), second, 1, nothing, run=launcher(seen))
    assert len(seen.starts) == 2
    assert put_aside(planned.cells, second) is not None  # the other cell has no record there yet
    assert {result.status for result in stored(second).values()} == {"cancelled"} and len(stored(second)) == 2
    put_aside(planned.cells, second)
    assert len([*(tmp_path / "replaced").rglob("*.json")]) == 1, "what stands for a result stays where it is"
    run_sweep(planned, second, 1, nothing, run=launcher(seen))
    assert len(seen.starts) == 4
    run_sweep(planned, second, 1, nothing, run=launcher(seen))
    assert len(seen.starts) == 4


def test_policies_and_responses_are_put_aside_with_their_record(tmp_path: Path) -> None:
    launch, planned = small_launch(tmp_path), plan(sweep_of({"method": "bf16"}))
    name = run_id(planned.cells[0])
    run_sweep(planned, launch, 1, nothing, run=launcher(Seen()))
    policy, responses = (policy_folder(tmp_path, launch.sweep, name), rollouts_path(tmp_path, launch.sweep, name))
    for path in (policy / "step-4" / "model.safetensors", responses):
        path.parent.mkdir(parents=True)
        path.write_text("old")
    aside = put_aside(planned.cells, launch)
    assert aside is not None and not policy.exists() and not responses.exists()
    assert (aside / "policies" / name / "step-4" / "model.safetensors").read_text() == "old"
    assert (aside / f"{name}.jsonl").read_text() == "old" and read_result(aside / f"{name}.json").status == "ok"


@pytest.mark.parametrize("place", ["", "verl"])
def test_a_cell_that_outlives_its_launcher_ends_before_it_is_put_aside(tmp_path: Path, place: str) -> None:
    """Else its last state would be that of its successor."""
    config, launch = small_config("method=bf16"), small_launch(tmp_path)
    work = work_folder(launch, run_id(config))
    (work / place).mkdir(parents=True)
    held = os.open(work / place, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)

    def end() -> None:
        (work / "state.pt").write_bytes(b"x")
        os.close(held)

    threading.Timer(0.3, end).start()
    aside = put_aside([config], launch)
    assert aside is not None and (aside / run_id(config) / "state.pt").exists() and not work.exists()
