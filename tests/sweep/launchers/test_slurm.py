"""Cells as jobs by submitit's executor for this machine: preempted, stopped, refused; what a cluster would be told."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from harness.config.load import run_id
from harness.foundation.state_files import load_state
from harness.records.run_result import RunResult, read_result, read_series
from harness.run.cell import record_path, work_folder
from harness.sweep.launchers import slurm
from harness.sweep.launchers.job import Event
from tests.sweep.launchers.stand_in import gone, job_of, jobs_of

needs_submitit = pytest.mark.skipif(find_spec("submitit") is None, reason="the slurm extra is not installed")
HERE = {"cluster": "local"}


def tasks() -> list[psutil.Process]:
    """Processes in which submitit calls a function."""
    children = psutil.Process().children(recursive=True)
    return [process for process in children if "submitit.core._submit" in process.cmdline()]


def results(events: list[Event]) -> list[RunResult]:
    return [event.result for event in events if event.result is not None]


@needs_submitit
def test_a_preempted_job_saves_its_state_and_goes_on(tmp_path: Path) -> None:
    job = job_of(tmp_path, "trainer.steps=40", "trainer.eval_every=20", checkpoint_every_s=0.0)
    state, events, saved = work_folder(job.launch, run_id(job.config)) / "state.pt", list[Event](), dict[str, object]()
    for event in slurm.run_cells([job], 1, HERE):
        events.append(event)
        if event.kind == "progress" and 0 < event.step < 30 and state.exists() and not saved:
            (task,) = tasks()
            task.send_signal(signal.SIGUSR2)  # as Slurm does before a job's end, and at a preemption
            assert gone(event_pid(events))
            saved = load_state(state)
            assert not record_path(job.launch, run_id(job.config)).exists()
    (result,) = results(events)
    assert (result.status, result.num_steps) == ("ok", 40)
    assert [event.kind for event in events if event.kind != "progress"] == ["started", "finished"]
    path = record_path(job.launch, result.run_id)
    assert read_result(path) == result
    series, before = read_series(path.parent, result.run_id)["time/generate_s"], saved["series"]
    assert isinstance(before, list) and 0 < len(before) < 40
    kept = [row["time/generate_s"] for row in before]
    assert series[: len(kept)] == pytest.approx(kept, rel=1e-6)  # it went on, not started again
    assert not state.exists() and not slurm.job_folder(job).exists()


def event_pid(events: list[Event]) -> int:
    """The process of the one cell."""
    return next(event.pid for event in events if event.kind == "started")


@needs_submitit
def test_closing_stops_the_running_and_the_same_call_goes_on(tmp_path: Path) -> None:
    running, waiting = (job_of(tmp_path, "trainer.steps=100000", f"seed={seed}") for seed in (0, 1))
    events, pids = slurm.run_cells([running, waiting], 1, HERE), [0]
    for event in events:
        pids += [event.pid, *(task.pid for task in tasks())] if event.kind == "started" else []
        if event.step:
            break
    events.close()
    assert len(pids) == 3 and all(gone(pid) for pid in pids[1:])
    state = work_folder(running.launch, run_id(running.config)) / "state.pt"
    assert load_state(state)["step"] > 0
    assert not record_path(running.launch, run_id(running.config)).exists()
    assert (slurm.job_folder(running) / "stop").exists() and not slurm.job_folder(waiting).exists()


@needs_submitit
def test_a_cell_that_cannot_start_or_fails_says_why(tmp_path: Path) -> None:
    """A foreign file stands in its way here; a damaged base fails it on its node."""
    foreign, damaged = job_of(tmp_path), job_of(tmp_path, "seed=5")
    path = record_path(foreign.launch, run_id(foreign.config))
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    (weights,) = (tmp_path / "bases").glob("xs-chain8-b0-*/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    first, second = results(list(slurm.run_cells([foreign, damaged], 2, HERE)))
    assert (first.status, second.status) == ("failed", "failed")
    assert (first.reason or "").startswith(f"not started: {path}: not a result file")
    assert f"base folder {weights.parent} is damaged" in (second.reason or "")
    assert path.read_text() == "mine"
    assert list(slurm.run_cells([foreign, damaged], 2, HERE, admit=lambda job: False)) == []


@needs_submitit
def test_a_job_that_dies_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from submitit.core import core

    monkeypatch.setattr(core.Job, "_results_timeout_s", 1)  # that a slow file system has to show a result
    job = job_of(tmp_path, "trainer.steps=100000")
    found: list[RunResult] = []
    for event in slurm.run_cells([job], 1, HERE):
        found += [] if event.result is None else [event.result]
        if event.kind == "started":
            for process in psutil.Process().children(recursive=True):
                if process.pid == event.pid or "submitit" in " ".join(process.cmdline()):
                    os.kill(process.pid, signal.SIGKILL)
    (result,) = found
    assert result.status == "failed"
    assert (result.reason or "").startswith("lost: Slurm job ") and "ended as INTERRUPTED" in (result.reason or "")


def test_what_a_cluster_is_asked_for(tmp_path: Path) -> None:
    (job,) = jobs_of(tmp_path, threads=3, gpus=2)
    options = slurm.options_of(["partition=gpu", "time=30", "memory=64", "exclude=node1,node2"])
    asked = slurm.parameters(job, options)
    assert asked == {
        "name": f"lowbit-test-{run_id(job.config)}", "timeout_min": 30, "mem_gb": 64, "nodes": 1, "tasks_per_node": 1,
        "cpus_per_task": 3, "gpus_per_node": 0, "slurm_signal_delay_s": 120, "slurm_partition": "gpu",
        "slurm_exclude": "node1,node2",
    }  # fmt: skip
    on_gpu = replace(job, config=replace(job.config, trainer=replace(job.config.trainer, device="cuda")))
    plain = slurm.parameters(on_gpu, {})
    assert (plain["gpus_per_node"], plain["timeout_min"], plain["mem_gb"]) == (2, 240, None)


@needs_submitit
def test_sbatch_reads_what_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that sbatch would get, by a script in its place; a number it answers becomes the job's."""
    for name in ("srun", "sacct"):
        (tmp_path / name).write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").write_text(f'#!/bin/sh\ncp "$1" {tmp_path}/seen\necho Submitted batch job 4711\n')
    for name in ("sbatch", "srun", "sacct"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (job,) = jobs_of(tmp_path / "results", threads=3)
    slurm.check({})
    cell = slurm.SlurmJob(job, None, slurm.options_of(["account=lab", "qos=high", "constraint=h100"]))
    assert cell.submitted.job_id == "4711"
    lines = (tmp_path / "seen").read_text().splitlines()
    expected = ("--account=lab", "--qos=high", "--constraint=h100", "--time=240", "--cpus-per-task=3", "--nodes=1",
                "--signal=USR2@120", f"--job-name=lowbit-test-{run_id(job.config)}")  # fmt: skip
    assert {f"#SBATCH {word}" for word in expected} <= set(lines)
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho invalid partition >&2\nexit 1\n")
    with pytest.raises(ValueError, match=r"^sbatch: .*invalid partition") as caught:
        slurm.SlurmJob(job, None, {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("partition", "slurm=partition: valid: NAME=VALUE, such as partition=gpu"),
        ("partition=", "slurm=partition=: valid: NAME=VALUE"),
        ("partitoin=gpu", "slurm=partitoin=gpu: no option 'partitoin'; nearest: partition"),
        ("time=1:00", "slurm=time=1:00: valid: a whole number above 0, in minutes"),
        (
            "time=2",
            "slurm=time=2: a cell saves its state 2 minutes before its job's time is up and would never get "
            "further; valid: 3 or more",
        ),
        ("memory=0", "slurm=memory=0: valid: a whole number above 0, in GiB"),
        ("memory=\u0665", "valid: a whole number above 0"),
        ("cluster=pbs", "slurm=cluster=pbs: valid: slurm, local"),
        ("qos=low", "slurm=qos=low: qos=high is given, too; valid: one of them"),
    ],
)
def test_a_wrong_setting_is_one_line(word: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        slurm.options_of(["qos=high", word])
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert slurm.options_of(["time=2", "cluster=local"])["time"] == "2"  # which gives no signal before the end


def test_a_machine_without_slurm_or_submitit_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(slurm.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match=r"launcher=slurm: no sbatch on this machine; .* --slurm cluster=local; valid"):
        next(slurm.run_cells(jobs_of(tmp_path), 1, {}))
    slurm.check(HERE)
    monkeypatch.setattr(slurm.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"submitit is not installed; pip install 'lowbit-rl-bench\[slurm\]'"):
        next(slurm.run_cells(jobs_of(tmp_path), 1, HERE))


@pytest.mark.parametrize(
    ("state", "error", "said"),
    [
        ("OUT_OF_MEMORY", "", "MemoryError: Slurm job 7 was killed for its memory; --slurm memory=GIB asks for more"),
        ("OUT_OF_ME+", "", "MemoryError: Slurm job 7"),
        ("NODE_FAIL", "Job 7 has no result file", "lost: Slurm job 7: it ended as NODE_FAIL"),
        ("TIMEOUT", "Job not requeued because: timed-out too many times.",
         "lost: Slurm job 7: its time was up 100 times"),
        ("FAILED", "x\nTraceback (most recent call last):\n  y\nOSError: disk full\n",
         "not started: Slurm job 7: OSError: disk full"),
        ("FAILED", "Traceback\nsubmitit.core.utils.UncompletedJobError: gone", "lost: Slurm job 7: it ended as FAILED"),
    ],
)  # fmt: skip
def test_what_slurm_says_becomes_a_reason(state: str, error: str, said: str) -> None:
    assert slurm.reason("7", state, error).startswith(said)
