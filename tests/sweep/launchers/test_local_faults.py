"""Cells that hang, die or leave a mess, as the local launcher sees them; the processes are stand-ins."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.config.load import run_id
from harness.records.run_result import read_result
from harness.run.cell import record_path, work_folder
from harness.sweep.launchers import deaths, local
from harness.sweep.launchers.deaths import OUT_OF_MEMORY
from harness.sweep.launchers.job import Job
from tests.sweep.launchers.stand_in import LEAVE_RECORD, jobs_of, made, play, results, run

HANG = """
(work / "progress.json").write_text(json.dumps({"step": 3}))
def stuck_here():
    time.sleep(60)
stuck_here()
"""
SLOW = (
    """
for step in range(18):
    (work / "progress.part").write_text(json.dumps({"step": step}))
    os.replace(work / "progress.part", work / "progress.json")
    time.sleep(0.15)
"""
    + LEAVE_RECORD
)

SAMPLING = (
    """
for _ in range(18):
    (work / "alive").touch()
    time.sleep(0.15)
"""
    + LEAVE_RECORD
)


TRAINING = (
    """
(work / "progress.json").write_text(json.dumps({"step": 0, "note": "a base: step 5 of at most 400"}))
time.sleep(0.6)
(work / "progress.json").write_text(json.dumps({"step": 1}))
time.sleep(0.6)
"""
    + LEAVE_RECORD
)


def path_of(job: Job) -> Path:
    return record_path(job.launch, run_id(job.config))


def test_a_cell_without_progress_is_killed_and_one_with_progress_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = jobs_of(tmp_path, 3, stall_s=2, retries=("an earlier attempt",))
    made(jobs[1])
    made(jobs[2])
    events = run(monkeypatch, jobs, HANG, SLOW, SAMPLING)  # the others take longer than stall_s in all
    hung, slow, sampling = results(events)
    assert hung.reason == "hung: no progress for 2 s after step 3 of 4; killed"
    assert hung.status == "failed"
    assert "stuck_here" in (hung.error or "")
    assert read_result(path_of(jobs[0])) == hung
    assert hung.retries == ["an earlier attempt"]
    assert (slow.status, sampling.status) == ("ok", "ok")
    (pid,) = [event.pid for event in events if event.pid and event.config == jobs[0].config]
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "lost: killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "lost: killed by SIGTERM"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed: killed by SIGSEGV"),
        ("raise LookupError('a word')", "the process ended with exit code 1: LookupError: a word"),
        ("print('disk gone'); sys.exit(4)", "the record could not be written: disk gone"),
        ("sys.exit(0)", "the process ended well and left no record"),
    ],
)
def test_how_a_process_ended_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, reason: str
) -> None:
    (job,) = jobs_of(tmp_path)
    (result,) = results(run(monkeypatch, [job], line))
    assert (result.status, result.reason) == ("failed", reason)
    assert read_result(path_of(job)) == result


def test_the_half_of_a_record_that_a_kill_leaves_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, other = jobs_of(tmp_path, 2)
    path_of(job).parent.mkdir(parents=True)
    halves = [path.with_name(f"{path.name}.0123abcd.tmp") for path in (path_of(job), path_of(other))]
    for half in (*halves, path_of(job).with_name(f"{run_id(job.config)}.parquet.89abcdef.tmp")):
        half.write_bytes(b"{ half a rec")
    (result,) = results(run(monkeypatch, [job], "os.kill(os.getpid(), signal.SIGKILL)"))
    assert result.reason == "lost: killed by SIGKILL"
    assert set(path_of(job).parent.iterdir()) == {path_of(job), halves[1]}  # another cell's may still be at work


def test_a_cell_that_stops_by_itself_leaves_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = jobs_of(tmp_path)
    (result,) = results(run(monkeypatch, [job], "sys.exit(3)"))
    assert result.status == "cancelled"
    assert not path_of(job).exists()


def test_one_count_of_the_kernel_explains_one_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("oom 9\noom_kill 7\noom_group_kill 0\n")
    monkeypatch.setattr(deaths, "_counters", lambda: iter([tmp_path / "absent", counter]))
    (job,) = jobs_of(tmp_path / "before")
    (before,) = results(run(monkeypatch, [job], "os.kill(os.getpid(), signal.SIGKILL)"))
    assert before.reason == "lost: killed by SIGKILL"
    line = f"pathlib.Path({str(counter)!r}).write_text('oom_kill 8'); os.kill(os.getpid(), signal.SIGKILL)"
    reasons = [result.reason for result in results(run(monkeypatch, jobs_of(tmp_path / "during", 2), line))]
    assert sorted(filter(None, reasons)) == [OUT_OF_MEMORY, "lost: killed by SIGKILL"]


def test_the_counter_of_this_machine_is_a_number() -> None:
    assert local.oom_kills() >= 0


def test_a_record_survives_the_death_of_who_wrote_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = jobs_of(tmp_path)
    made(job)
    (result,) = results(run(monkeypatch, [job], LEAVE_RECORD + "os.kill(os.getpid(), signal.SIGKILL)"))
    assert result.status == "ok"
    assert not work_folder(job.launch, run_id(job.config)).exists()


def test_a_record_of_an_earlier_attempt_is_not_taken_for_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = jobs_of(tmp_path)
    path_of(job).parent.mkdir(parents=True)
    made(job, status="failed").rename(path_of(job))
    (result,) = results(run(monkeypatch, [job], "os.kill(os.getpid(), signal.SIGKILL)"))
    assert result.reason == "lost: killed by SIGKILL"


def test_a_record_that_an_orphan_finished_in_the_meantime_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = jobs_of(tmp_path)
    path_of(job).parent.mkdir(parents=True)
    made(job).rename(path_of(job))
    before = path_of(job).read_bytes()
    for line in ("sys.exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"):
        (result,) = results(run(monkeypatch, [job], line))
        assert result.status == "ok"
        assert path_of(job).read_bytes() == before


def test_a_foreign_file_in_the_place_of_a_record_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = jobs_of(tmp_path)
    path_of(job).parent.mkdir(parents=True)
    path_of(job).write_bytes(b"{ half a rec")
    events = run(monkeypatch, [job], "sys.exit(0)")
    assert [event.kind for event in events] == ["finished"]
    (result,) = results(events)
    assert (result.reason or "").startswith(f"not started: {path_of(job)}: not a result file")
    assert path_of(job).read_bytes() == b"{ half a rec"


def test_a_record_that_turns_out_damaged_is_a_failure_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = jobs_of(tmp_path)
    line = "path.parent.mkdir(parents=True); path.write_bytes(b'garbage')"
    (result,) = results(run(monkeypatch, [job], line))
    assert result.status == "failed"
    assert f"left no record: {path_of(job)}: not a result file" in (result.reason or "")
    assert path_of(job).read_bytes() == b"garbage"


def test_a_full_or_blocked_disk_does_not_end_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").write_text("a file where a folder is needed")
    (result,) = results(run(monkeypatch, jobs_of(tmp_path), "os.kill(os.getpid(), signal.SIGKILL)"))
    assert (result.reason or "").startswith("lost: killed by SIGKILL; no record of that: ")
    assert "cannot be written" in (result.reason or "")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "work").write_text("and here")
    (result,) = results(run(monkeypatch, jobs_of(tmp_path / "two"), "sys.exit(0)"))
    assert (result.reason or "").startswith("not started: ")


@pytest.mark.parametrize("garbage", [b"", b'{"step": 1', b"[]", b'{"step": null}', b"\xff\xfe", b'{"other": 1}'])
def test_a_damaged_progress_file_is_no_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, garbage: bytes
) -> None:
    (job,) = jobs_of(tmp_path)
    made(job)
    line = f"(work / 'progress.json').write_bytes({garbage!r}); time.sleep(0.5)" + LEAVE_RECORD
    events = run(monkeypatch, [job], line)
    assert {event.step for event in events} == {0}
    assert results(events)[0].status == "ok"


def test_leftovers_go_and_what_was_set_aside_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = jobs_of(tmp_path)
    made(job)
    line = "(work / 'state.part').write_bytes(b'x'); (work / 'state.pt.corrupt').write_bytes(b'y')" + LEAVE_RECORD
    (result,) = results(run(monkeypatch, [job], line))
    assert result.status == "ok"
    left = work_folder(job.launch, run_id(job.config)).iterdir()
    assert [path.name for path in left] == ["state.pt.corrupt"]


def test_closing_ends_also_what_does_not_listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "GRACE_S", 0.5)
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); (work / 'progress.json').write_text('{\"step\": 1}'); "
    play(monkeypatch, deaf + "time.sleep(60)")
    events = local.run_cells(jobs_of(tmp_path), workers=1)
    pid = next(events).pid
    assert any(event.step == 1 for event in events)
    assert Path(f"/proc/{pid}").exists()
    events.close()
    assert not Path(f"/proc/{pid}").exists()
    assert not (tmp_path / "runs").exists()


def test_jobs_start_in_order_as_they_are_admitted_and_others_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed 1 may start once another cell has ended, seed 2 never."""
    jobs, seeds = jobs_of(tmp_path, 4), {"started": list[int](), "progress": list[int](), "finished": list[int]()}
    for job in jobs:
        made(job)
    play(monkeypatch, LEAVE_RECORD)
    admitted = {0: lambda: True, 1: lambda: bool(seeds["finished"]), 2: lambda: False, 3: lambda: True}
    for event in local.run_cells(jobs, workers=2, admit=lambda job: admitted[job.config.seed]()):
        seeds[event.kind].append(event.config.seed)
    assert seeds["started"] == [0, 3, 1]
    assert sorted(seeds["finished"]) == [0, 1, 3]


def test_what_a_cell_does_before_its_first_step_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = jobs_of(tmp_path)
    made(job)
    seen = [(event.step, event.note) for event in run(monkeypatch, [job], TRAINING) if event.step or event.note]
    assert list(dict.fromkeys(seen)) == [(0, "a base: step 5 of at most 400"), (1, None)]
