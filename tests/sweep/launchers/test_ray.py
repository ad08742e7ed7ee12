"""Cells on a real Ray cluster of this machine, with workers killed and stopped under them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.config.load import run_id
from harness.foundation.state_files import load_state
from harness.records.run_result import RunResult, read_result, read_series
from harness.run.cell import record_path, run_cell, work_folder
from harness.start.base_model import read_record
from harness.start.prepare import base_folder
from harness.sweep.launchers import ray as launcher
from harness.sweep.launchers.job import Event, Job
from tests.sweep.launchers.stand_in import gone, job_of, jobs_of
from tests.toy import small_launch

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="the ray extra is not installed")
VOLATILE = ("time_s", "tokens_per_s", "peak_memory_gib", "started_at", "ended_at")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cluster for the module, ended as a sweep ends it; what it was given to keep is gone then."""
    jobs, patch = jobs_of(tmp_path_factory.mktemp("cluster")), pytest.MonkeyPatch()
    patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("scratch")))  # a killed worker leaves its folder behind
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with launcher._cluster(jobs, 2, None) as folder:
        assert folder is not None
        patch.undo()
        yield Path(folder)
        started = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
        heard = {ip for process in started for ip in listens(process)}
    assert {ip.removeprefix("::ffff:") for ip in heard} == {"127.0.0.1"}
    assert psutil.wait_procs(started, timeout=0)[1] == []
    assert not Path(folder).exists()


def listens(process: psutil.Process) -> set[str]:
    """Addresses that a process listens on; none where it has ended meanwhile, as idle workers do."""
    try:
        return {c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    except psutil.NoSuchProcess:
        return set()


def worker(pid: int) -> int:
    """The Ray worker that runs the cell `pid`."""
    return psutil.Process(pid).ppid()


def record_of(job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    """The record and the series as files tell them, without what a clock decides; and without the code flips, which
    compare with the push before and are not known at the first push after a resume."""
    path = record_path(job.launch, run_id(job.config))
    series = read_series(path.parent, run_id(job.config))
    whole = {k: v for k, v in read_result(path).model_dump().items() if k not in VOLATILE}
    whole["summary"].pop("num_nonfinite")
    unlike = ("time/", "_per_s", "code_flip_rate")
    return whole, {k: repr(v) for k, v in series.items() if not any(word in k for word in unlike)}  # NaN is like NaN


def finished(events: list[Event]) -> dict[str, RunResult]:
    return {event.result.run_id: event.result for event in events if event.result is not None}


def test_a_lost_worker_is_marked_and_its_cell_goes_on_elsewhere(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "STATE_EVERY_S", 0.0)
    hit = job_of(tmp_path, "trainer.steps=60", "trainer.eval_every=20", checkpoint_every_s=0.0)
    trains = job_of(tmp_path, "base.target_accuracy=0", "base.eval_every=1", "base.max_steps=2")
    base = base_folder(trains.config, trains.launch)
    assert base is not None
    assert not base.exists()
    state, pid, events = work_folder(hit.launch, run_id(hit.config)) / "state.pt", 0, list[Event]()
    for event in launcher.run_cells([hit, trains], workers=2):
        events.append(event)
        is_hit = event.config == hit.config
        pid = event.pid if is_hit and event.kind == "started" else pid
        if is_hit and event.kind == "progress" and state.exists() and psutil.pid_exists(pid):
            os.kill(worker(pid), signal.SIGKILL)
    lost, other = finished(events)[run_id(hit.config)], finished(events)[run_id(trains.config)]
    assert (lost.status, (lost.reason or "")[:26]) == ("failed", "lost: the Ray worker died:")
    assert read_result(record_path(hit.launch, lost.run_id)) == lost
    assert gone(pid)
    assert other.status == "ok"
    assert base.is_dir()  # trained on the node, brought home
    saved = load_state(state)
    assert 0 < saved["step"] < 60

    again = replace(hit, launch=replace(hit.launch, retries=(lost.reason or "",)))
    (result,) = finished(list(launcher.run_cells([again], workers=1))).values()
    assert (result.status, result.retries) == ("ok", [lost.reason])
    assert not state.parent.exists()
    path = record_path(hit.launch, result.run_id)
    first = read_series(path.parent, result.run_id)["time/generate_s"][0]
    assert first == pytest.approx(saved["series"][0]["time/generate_s"], rel=1e-6)  # it went on, not started again

    straight = Job(
        config=hit.config,
        launch=replace(small_launch(tmp_path / "here"), retries=again.launch.retries, checkpoint_every_s=0.0),
    )
    run_cell(straight.config, straight.launch)
    (told, curves), (straight_told, straight_curves) = record_of(again), record_of(straight)
    assert {k: v for k, v in told.items() if v != straight_told[k]} == {}
    assert curves == straight_curves


def test_a_base_comes_home_as_soon_as_it_is_trained(cluster: Path, tmp_path: Path) -> None:
    """So a worker that is lost afterwards takes it from nobody, and the other cells of that base begin."""
    recipe = ("base.target_accuracy=0", "base.eval_every=1", "base.max_steps=2")
    trains = job_of(tmp_path, *recipe, "trainer.steps=100000")
    waits = job_of(tmp_path, *recipe, "algo.eps_low=0.1")
    base, pid, events = base_folder(trains.config, trains.launch), 0, list[Event]()
    assert base is not None and base == base_folder(waits.config, waits.launch) and not base.exists()
    for event in launcher.run_cells([trains, waits], workers=2):
        events.append(event)
        pid = event.pid if event.config == trains.config and event.kind == "started" else pid
        if event.config == waits.config and event.kind == "started":
            os.kill(worker(pid), signal.SIGKILL)
    lost, other = finished(events)[run_id(trains.config)], finished(events)[run_id(waits.config)]
    assert (lost.status, (lost.reason or "")[:26]) == ("failed", "lost: the Ray worker died:")
    assert other.status == "ok" and other.hashes["model"] == read_record(base)["content_hash"]


def test_a_silent_worker_is_killed_and_closing_brings_states_home(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr(launcher, "SILENCE_S", -1794.0)
    silent, closed = (job_of(tmp_path, "trainer.steps=100000", f"seed={seed}") for seed in (0, 1))
    events, pids, steps, results = launcher.run_cells([silent, closed], workers=2), dict[str, int](), set[str](), []
    for event in events:
        cell = run_id(event.config)
        if event.kind == "started":
            pids[cell] = event.pid
            if event.config == silent.config:
                os.kill(worker(event.pid), signal.SIGSTOP)
        steps |= {cell} if event.step else set()
        results += [event.result] if event.result is not None else []
        if results and run_id(closed.config) in steps:
            break
    events.close()
    (result,) = results
    assert result.reason == "hung: its Ray worker did not answer for 6 s; killed"
    assert load_state(work_folder(closed.launch, run_id(closed.config)) / "state.pt")["step"] > 0
    assert not record_path(closed.launch, run_id(closed.config)).exists()
    assert all(gone(pid) for pid in pids.values())
    assert ray.is_initialized()  # who started it ends it


def test_foreign_files_and_damaged_bases_are_told_before_anything_runs(cluster: Path, tmp_path: Path) -> None:
    foreign, damaged = job_of(tmp_path), job_of(tmp_path, "seed=5")
    path = record_path(foreign.launch, run_id(foreign.config))
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    (weights,) = (tmp_path / "bases").glob("xs-chain8-b0-*/model.safetensors")
    events = list(launcher.run_cells([foreign], workers=1))
    weights.write_bytes(weights.read_bytes()[:-1])
    events += list(launcher.run_cells([damaged], workers=1))
    assert [event.kind for event in events] == ["finished", "finished"]
    reasons = [event.result.reason or "" for event in events if event.result is not None]
    assert reasons[0].startswith(f"not started: {path}: not a result file")
    assert f"base folder {weights.parent} is damaged" in reasons[1]
    assert path.read_text() == "mine"
    assert list(launcher.run_cells([foreign, damaged], workers=2, admit=lambda job: False)) == []


def test_a_cell_that_no_node_can_hold_is_refused(cluster: Path, tmp_path: Path) -> None:
    wide = job_of(tmp_path, threads=64)
    with pytest.raises(ValueError, match="threads=64: the largest node of the Ray cluster has 2 CPUs"):
        next(launcher.run_cells([wide], workers=1))
    on_gpu = replace(wide.config, trainer=replace(wide.config.trainer, device="cuda"))
    job = Job(config=on_gpu, launch=replace(wide.launch, threads=1))
    with pytest.raises(ValueError, match=r"trainer\.device=cuda: the Ray cluster has no GPU"):
        next(launcher.run_cells([job], workers=1))


@pytest.mark.parametrize(("workers", "gpus", "share"), [(1, 1, 1.0), (2, 4, 1.0), (3, 1, 0.3333), (7, 2, 0.25)])
def test_workers_share_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, gpus: int, share: float
) -> None:
    import ray

    nodes = [{"Alive": True, "Resources": {"CPU": 8, "GPU": gpus}}, {"Alive": False, "Resources": {"GPU": 9}}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert launcher._gpu_share(jobs_of(tmp_path), workers) == share
    assert int(1 / share) * gpus >= workers


def test_a_cell_asks_for_the_gpus_of_its_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU is shared by the workers, several are whole ones of one node, and a CPU's cell asks for none."""
    import ray

    (here,) = jobs_of(tmp_path)
    on_gpu = replace(here.config, trainer=replace(here.config.trainer, device="cuda"))
    jobs = [here, *(Job(config=on_gpu, launch=replace(here.launch, gpus=gpus)) for gpus in (1, 2, 4))]
    assert [launcher.gpus_asked(job, 0.25) for job in jobs] == [0.0, 0.25, 2.0, 4.0]
    nodes = [{"Alive": True, "Resources": {"CPU": 8, "GPU": 2}}, {"Alive": True, "Resources": {"CPU": 8, "GPU": 3}}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert launcher._gpu_share(jobs[:3], 2) == 1.0
    with pytest.raises(ValueError, match=r"launch\.gpus=4: the largest node of the Ray cluster has 3 GPUs"):
        launcher._gpu_share(jobs, 2)
    assert launcher._gpu_share([replace(here, launch=replace(here.launch, gpus=9))], 2) == 1.0  # none on a CPU


def test_what_ray_says_becomes_a_reason() -> None:
    from ray.exceptions import ActorUnschedulableError, OutOfMemoryError, RaySystemError, RayTaskError

    full = RayTaskError("run", "Traceback ...", OSError(28, "No space left on device"))
    assert launcher._reason(full) == "not started: OSError: [Errno 28] No space left on device"
    assert launcher._reason(OutOfMemoryError("too much")).startswith("MemoryError: too much")
    assert launcher._reason(ActorUnschedulableError("no node")).startswith("not started: ")
    dead = RaySystemError("x\n\tpid: 4\nThe actor is dead because its node died. Some common causes include: y")
    assert launcher._reason(dead) == "lost: the Ray worker died: its node died."


def test_ray_that_is_missing_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"Ray is not installed; pip install 'lowbit-rl-bench\[ray\]'"):
        next(launcher.run_cells(jobs_of(tmp_path), workers=1))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:port"])
def test_an_address_where_nobody_listens_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ValueError, match=f"address={address}: no Ray cluster answers there: "):
        next(launcher.run_cells(jobs_of(tmp_path), workers=1, address=address))
