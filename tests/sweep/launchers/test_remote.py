"""The queue of launchers whose cells run elsewhere, with played cells: who starts, who waits, who is stopped."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness.config.load import run_id
from harness.records.run_result import RunResult
from harness.sweep.launchers import bases, remote
from harness.sweep.launchers.job import Event, Job
from tests.sweep.launchers.stand_in import jobs_of
from tests.sweep.stand_in import result_of


@dataclass
class Played:
    """A cell that ends at its second look, and tells its step at each."""

    job: Job
    trains: Path | None
    said: list[str]
    looks: int = 0
    is_endless: bool = False
    is_long: bool = False
    """It trains its base at the first look, and ends at the fourth."""

    def news(self) -> Iterator[Event]:
        self.looks += 1
        yield Event(kind="progress", config=self.job.config, step=self.looks)

    def outcome(self) -> RunResult | None:
        if self.trains is not None and self.looks >= (1 if self.is_long else 2):
            self.trains.mkdir(exist_ok=True)
        if self.looks < (4 if self.is_long else 2) or self.is_endless:
            return None
        return result_of(self.job, ("ok", None))

    def ask_to_stop(self) -> None:
        self.said.append(f"asked {self.job.config.seed}")

    def stop(self, deadline: float) -> None:
        assert deadline > time.monotonic()
        self.said.append(f"stopped {self.job.config.seed}")


@dataclass
class Cluster:
    """Starts played cells; `seen` has the seeds that run after every start."""

    bases: dict[int, Path | None]
    """Seed -> its base."""
    refuses: tuple[int, ...] = ()
    is_endless: bool = False
    is_long: bool = False
    seen: list[list[int]] = field(default_factory=list[list[int]])
    cells: list[Played] = field(default_factory=list[Played])
    said: list[str] = field(default_factory=list[str])

    def start(self, job: Job, base: Path | None) -> Played:
        assert base == self.bases[job.config.seed]
        if job.config.seed in self.refuses:
            raise ValueError("no room")
        own = Played(job, bases.untrained(base), self.said, is_endless=self.is_endless, is_long=self.is_long)
        self.cells.append(own)
        self.seen.append([cell.job.config.seed for cell in self.cells if cell.outcome() is None])
        return own


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "POLL_S", 0.0)


def cluster_of(
    monkeypatch: pytest.MonkeyPatch, jobs: list[Job], *folders: Path | None, refuses: tuple[int, ...] = (),
    is_endless: bool = False,
) -> Cluster:  # fmt: skip
    cluster = Cluster({job.config.seed: base for job, base in zip(jobs, folders, strict=True)}, refuses, is_endless)
    known = {run_id(job.config): base for job, base in zip(jobs, folders, strict=True)}
    monkeypatch.setattr(bases, "base_folder", lambda config, launch: known[run_id(config)])
    return cluster


def ended(events: list[Event]) -> list[tuple[int, str]]:
    return [(event.config.seed, event.result.status) for event in events if event.result is not None]


@pytest.mark.usefixtures("at_once")
def test_jobs_run_in_order_so_many_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = jobs_of(tmp_path, 4)
    cluster = cluster_of(monkeypatch, jobs, None, None, None, None)
    events = list(remote.run_remote(jobs, 2, lambda job: True, cluster.start))
    assert cluster.seen == [[0], [0, 1], [2], [2, 3]]
    assert ended(events) == [(seed, "ok") for seed in range(4)]
    assert [event.step for event in events if event.kind == "progress"] == [1, 1, 2, 2] * 2
    assert cluster.said == []


@pytest.mark.usefixtures("at_once")
def test_a_base_is_trained_by_one_cell_and_the_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell behind them that has its base, or needs none, goes before them."""
    jobs, shared, made = jobs_of(tmp_path, 5), tmp_path / "shared", tmp_path / "made"
    made.mkdir()
    cluster = cluster_of(monkeypatch, jobs, shared, shared, made, None, shared)
    list(remote.run_remote(jobs, 3, lambda job: True, cluster.start))
    assert cluster.seen == [[0], [0, 2], [0, 2, 3], [1], [1, 4]]
    assert [cell.trains for cell in cluster.cells] == [shared, None, None, None, None]


@pytest.mark.usefixtures("at_once")
def test_the_others_wait_for_the_base_and_for_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a base that appears while its cell goes on, as on a shared disk."""
    jobs, shared = jobs_of(tmp_path, 3), tmp_path / "shared"
    cluster = cluster_of(monkeypatch, jobs, shared, shared, shared)
    cluster.is_long = True
    list(remote.run_remote(jobs, 2, lambda job: True, cluster.start))
    assert cluster.seen == [[0], [0, 1], [1, 2]]
    assert [cell.trains for cell in cluster.cells] == [shared, None, None]


@pytest.mark.usefixtures("at_once")
def test_cells_that_cannot_start_and_cells_that_may_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = jobs_of(tmp_path, 4)
    cluster = cluster_of(monkeypatch, jobs, None, None, None, None, refuses=(1,))
    events = list(remote.run_remote(jobs, 4, lambda job: job.config.seed != 2, cluster.start))
    assert sorted(ended(events)) == [(0, "ok"), (1, "failed"), (3, "ok")]
    (failed,) = (event.result for event in events if event.result is not None and event.result.status == "failed")
    assert failed.reason == "not started: no room"


@pytest.mark.usefixtures("at_once")
def test_a_base_that_nobody_can_name_is_left_to_the_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = jobs_of(tmp_path)
    cluster = cluster_of(monkeypatch, jobs, None)

    def unknown(config: object, launch: object) -> Path:
        raise ValueError("no such model")

    monkeypatch.setattr(bases, "base_folder", unknown)
    assert ended(list(remote.run_remote(jobs, 1, lambda job: True, cluster.start))) == [(0, "ok")]


@pytest.mark.usefixtures("at_once")
def test_closing_asks_all_first_and_then_waits_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = jobs_of(tmp_path, 3)
    cluster = cluster_of(monkeypatch, jobs, None, None, None, is_endless=True)
    events = remote.run_remote(jobs, 2, lambda job: True, cluster.start)
    assert next(events).kind == "progress"
    events.close()
    assert cluster.said == ["asked 0", "asked 1", "stopped 0", "stopped 1"]
