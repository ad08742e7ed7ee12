"""Tracking while a sweep runs: samples of a process that lives, bounded in number, and logged with their cell."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.records.run_result import RunResult, read_results
from harness.viewers import trackers
from harness.viewers.tracking import facts, live
from harness.viewers.tracking.live import Live, Sampler
from tests import result_factory as factory
from tests.viewers.cases import new_results, runs


def sleeper() -> subprocess.Popen[bytes]:
    """A process that holds 64 MiB and waits."""
    code = "import time; x = b'x' * 2**26; print(flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    return process


def event(kind: str, pid: int = 0, result: RunResult | None = None) -> Any:
    return SimpleNamespace(kind=kind, config=None, pid=pid, result=result)


def test_samples_are_bounded_and_a_process_that_ends_is_dropped() -> None:
    sampler = Sampler()
    sampler.watch("elsewhere", 0)
    with sleeper() as process:
        sampler.watch("here", process.pid)
        assert list(sampler.processes) == ["here"]
        for _ in range(live.MAX_SAMPLES + 1):
            sampler.sample()
        assert len(sampler.samples["here"]) == 51 and sampler.skip["here"] == 2  # every second one of 101 is kept
        for _ in range(20):
            sampler.sample()
        assert len(sampler.samples["here"]) == 51 + 10  # at half the rate from there on
        process.kill()
        process.wait()
        for _ in range(2):
            sampler.sample()
    assert not sampler.processes
    points = sampler.take("here")
    assert {point.step for point in points} == set(range(61)) and sampler.take("here") == []
    memory = [point.value for point in points if point.name == "system/cell_memory_mib"]
    assert len(memory) == 61 and all(64 < value < 1000 for value in memory)
    sampler.watch("gone", process.pid)
    assert "gone" not in sampler.processes


def followed(results: Path, result: RunResult, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> Live:
    """The thread, after a cell that was sampled three times."""
    monkeypatch.setattr(live, "PERIOD_S", 0.02)
    monkeypatch.setattr(live, "run_id", lambda config: result.run_id)
    with sleeper() as cell:
        with trackers.follow(results, "quick", names, {result.run_id: {"trial": "7"}}) as follow:
            follow(event("started", cell.pid))
            deadline = time.monotonic() + 60
            while len(follow.sampler.samples[result.run_id]) < 3 and follow.thread.is_alive():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            follow(event("progress"))
            follow(event("finished", result=result))
        cell.terminate()
    return follow


def test_cells_are_logged_while_the_sweep_runs(
    tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cell is a process that sleeps; its arm is renamed when the sweep is known as a whole."""
    results = new_results(tmp_path, empty_store, seeds=1)
    (result,) = [r for r in read_results(results / "runs" / "quick") if r.method.name == "flashrl"]
    follow = followed(results, result, ("mlflow",), monkeypatch)
    assert follow.num_logged == 1 and not follow.thread.is_alive()
    found = runs(results)
    assert sorted(found) == ["flashrl int4 s n=8", "flashrl int4 s n=8, seed 0"]
    run = found["flashrl int4 s n=8, seed 0"][0]
    assert run.data.tags["system_metrics"] == facts.LIVE and run.data.tags["trial"] == "7"
    assert run.data.metrics["system/cell_memory_mib"] > 64 and run.data.metrics["system/cell_threads"] >= 1
    assert 0 < run.data.metrics["system/system_memory_usage_percentage"] <= 100
    assert trackers.track(results, "quick", ("mlflow",)) == 2
    after = runs(results)
    assert after["flashrl int4, seed 0"][0].info.run_id == run.info.run_id
    assert after["flashrl int4"][0].info.run_id == found["flashrl int4 s n=8"][0].info.run_id


def test_a_tracker_that_cannot_start_warns_and_the_other_goes_on(
    tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    results = new_results(tmp_path, empty_store, seeds=1)
    (result,) = [r for r in read_results(results / "runs" / "quick") if r.method.name == "bf16"]
    (results / "wandb").write_text("where its folder would be")
    follow = followed(results, result, ("wandb", "mlflow"), monkeypatch)
    assert follow.num_logged == 1 and sorted(runs(results)) == ["bf16 bf16 s n=8", "bf16 bf16 s n=8, seed 0"]
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("warning: W&B is off, runs go on: [Errno 17] File exists")
    assert line.endswith("(later: lowbit results import --tracking wandb)")


def test_without_a_tracker_that_works_the_thread_ends(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wandb").write_text("where its folder would be")
    (tmp_path / "mlflow").write_text("where its folder would be")
    with trackers.follow(tmp_path, "quick", ("wandb", "mlflow")) as follow:
        follow.thread.join(60)
        assert not follow.thread.is_alive()
        follow(event("finished"))
    lines = capfd.readouterr().err.splitlines()
    assert follow.num_logged == 0 and [line.split(" is off")[0] for line in lines] == [
        "warning: W&B", "warning: MLflow"]  # fmt: skip


def test_a_slow_store_gets_the_cell_at_hand_and_no_other_once_the_patience_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is logged afterwards by another tracker, which must not meet this one at work."""
    monkeypatch.setattr(live, "PATIENCE_S", 0.1)
    monkeypatch.setattr(live, "run_id", lambda config: "a")
    (tmp_path / "runs" / "quick").mkdir(parents=True)
    (tmp_path / "runs" / "quick" / "a.json").touch()
    closed = list[str]()

    def log_slowly(*_: object, **__: object) -> int:
        time.sleep(0.5)
        return 1

    monkeypatch.setattr(live, "log_cell", log_slowly)
    slow: Any = SimpleNamespace(is_on=True, close=lambda: closed.append("slow"))
    with Live(tmp_path, "quick", [lambda: slow]) as follow:
        for _ in range(3):
            follow(event("finished", result=factory.result()[0]))
        time.sleep(0.1)
    assert not follow.thread.is_alive() and follow.num_logged == 1 and closed == ["slow"]
