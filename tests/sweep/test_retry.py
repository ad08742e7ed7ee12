"""Retries and the time limit, on a launcher that runs nothing: every attempt, start and stop is counted."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import pytest

from harness.config.load import load, run_id
from harness.config.schema import Launch, settings
from harness.records.run_result import RunResult
from harness.run.cell import work_folder
from harness.sweep.launchers.job import Admit, Event, Job
from harness.sweep.retry import LOST, MAX_LOST, MAX_MEMORY, MEMORY, Limit, failure_class, in_rounds, next_launch
from tests.sweep.stand_in import Ending, Seen, launcher, result_of


def jobs_of(folder: Path, seeds: Sequence[int]) -> list[Job]:
    launch = Launch(results=str(folder), sweep="test")
    return [Job(config=load([f"seed={seed}", "trainer.steps=10"]), launch=launch) for seed in seeds]


def finals(events: Sequence[Event]) -> dict[int, RunResult]:
    return {e.result.seed: e.result for e in events if e.result is not None}


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        (("failed", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"), MEMORY),
        (("failed", "MemoryError: killed by the kernel's out-of-memory killer"), MEMORY),
        (("failed", "MemoryError: "), MEMORY),
        (("failed", "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory"), MEMORY),
        (("failed", "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), MEMORY),
        (("failed", "AcceleratorError: CUDA error: out of memory"), MEMORY),
        (("failed", "RuntimeError: CUDA Error: out of memory at cumem_allocator.cpp:139"), MEMORY),
        (("failed", "OSError: [Errno 12] Cannot allocate memory"), MEMORY),
        (("failed", "lost: killed by SIGKILL"), LOST),
        (("failed", "lost: node 10.0.0.7"), LOST),
        (("failed", "hung: no progress for 1800 s after step 3; killed"), LOST),
        (("failed", "RuntimeError: DistNetworkError: port: 35397, code: -98, name: EADDRINUSE"), LOST),
        (("failed", "ValueError: engine=vllm: the engine died at start: ValueError: Free memory on device cuda:0 "
          "(2.92/139.8 GiB) on startup is less than desired GPU memory utilization (0.05, 6.99 GiB)."), LOST),
        (("failed", "MemoryError: OutOfMemoryError: 6 were killed due to the node running low on memory"), LOST),
        (("failed", "crashed: killed by SIGSEGV"), None),
        (("failed", "RuntimeError: a tensor of 3 elements; see MemoryError above"), None),
        (("failed", "ValueError: lost: x"), None),
        (("failed", "the process ended with exit code 1"), None),
        (("diverged", "step 4: the loss is not finite"), None),
        (("ok", None), None),
        (("cancelled", "lost: interest"), None),
    ],
)  # fmt: skip
def test_classes(tmp_path: Path, ending: Ending, expected: str | None) -> None:
    (job,) = jobs_of(tmp_path, [0])
    assert failure_class(result_of(job, ending)) == expected


def test_a_cell_without_memory_checkpoints_layers_then_halves_its_micro_batch(tmp_path: Path) -> None:
    (job,) = jobs_of(tmp_path, [0])
    full, lost = result_of(job, ("failed", "MemoryError: x")), result_of(job, ("failed", "lost: killed by SIGKILL"))
    launch: Launch | None = job.launch
    steps = ((True, 32768), (True, 16384), (True, 8192))
    for expected in steps:
        launch = next_launch(full, launch)
        assert launch is not None and (launch.checkpoint_layers, launch.micro_batch_tokens) == expected
    assert launch.retries == (
        "out of memory: MemoryError: x; checkpoint_layers False -> True",
        "out of memory: MemoryError: x; micro_batch_tokens 32768 -> 16384",
        "out of memory: MemoryError: x; micro_batch_tokens 16384 -> 8192",
    )
    assert len(steps) == MAX_MEMORY and next_launch(full, launch) is None
    for attempt in range(MAX_LOST):
        launch = next_launch(lost, launch)
        assert launch is not None
        assert launch.retries[3:] == ("lost: killed by SIGKILL; started again",) * (attempt + 1)
        assert launch.micro_batch_tokens == 8192
    assert next_launch(lost, launch) is None
    assert settings(launch) == {"micro_batch_tokens": 8192, "checkpoint_layers": True}
    assert next_launch(full, Launch(micro_batch_tokens=511, checkpoint_layers=True)) is None
    again = next_launch(full, Launch(micro_batch_tokens=512, checkpoint_layers=True))
    assert again is not None and again.micro_batch_tokens == 256


def test_rounds_run_again_what_is_worth_it_and_nothing_else(tmp_path: Path) -> None:
    attempts: dict[int, int] = {}

    def ending(job: Job) -> Ending:
        seed = job.config.seed
        attempts[seed] = attempts.get(seed, 0) + 1
        if seed == 1 and attempts[seed] < 3:
            return "failed", "lost: killed by SIGTERM"
        if seed == 2 and job.launch.micro_batch_tokens > 16384:  # checkpoints alone do not save it
            return "failed", "OutOfMemoryError: CUDA out of memory"
        return ("failed", "KeyError: 'x'") if seed == 3 else ("ok", None)

    seen = Seen()
    found = finals(list(in_rounds(jobs_of(tmp_path, range(4)), launcher(seen, 2, ending=ending))))
    assert attempts == {0: 1, 1: 3, 2: 3, 3: 1}
    assert [found[seed].status for seed in range(4)] == ["ok", "ok", "ok", "failed"]
    assert [len(found[seed].retries) for seed in range(4)] == [0, 2, 2, 0]
    assert [len(jobs) for jobs in seen.rounds] == [4, 2, 2]


def limited(
    folder: Path, seeds: Sequence[int], end: float, workers: int, predicted: Callable[[int], float],
    actual: Callable[[int], float],
) -> tuple[Seen, dict[int, RunResult]]:  # fmt: skip
    seen = Seen()
    limit = Limit(end=end, predict=lambda config: predicted(config.seed), clock=seen.clock)
    run = launcher(seen, workers, lambda job: actual(job.config.seed))
    return seen, finals(list(in_rounds(jobs_of(folder, seeds), run, limit)))


def test_no_cell_starts_that_would_not_end_in_time(tmp_path: Path) -> None:
    seen, found = limited(tmp_path, range(10), 32, 2, lambda seed: 10, lambda seed: 10)
    assert sorted(found) == [0, 1, 2, 3, 4, 5]
    assert seen.stopped == [] and seen.clock() == 30
    seen, found = limited(tmp_path, range(10), 30, 2, lambda seed: 10, lambda seed: 10)
    assert sorted(found) == [0, 1, 2, 3]  # a margin of a tenth
    seen, found = limited(tmp_path, range(10), 9, 2, lambda seed: 10, lambda seed: 10)
    assert found == {} and seen.starts == []


def test_short_cells_fit_in_behind_long_ones(tmp_path: Path) -> None:
    seen, found = limited(tmp_path, range(6), 12, 1, lambda s: 20 if s < 4 else 5, lambda s: 20 if s < 4 else 5)
    assert sorted(found) == [4, 5]
    assert len(seen.rounds) == 1


def test_slower_than_predicted_starts_fewer_and_stops_none_early(tmp_path: Path) -> None:
    seen, found = limited(tmp_path, range(10), 50, 2, lambda seed: 10, lambda seed: 15 + seed % 2)
    starts = [(0, 0), (1, 0), (2, 15), (3, 16), (4, 30), (5, 32)]
    assert [(job.config.seed, begin) for job, begin in seen.starts] == starts
    assert sorted(found) == [0, 1, 2, 3, 4, 5]
    assert seen.stopped == [] and seen.clock() == 48


@pytest.mark.parametrize(("late", "ended", "stopped"), [(140, 40, []), (170, 36, [36, 37, 38, 39])])
def test_a_slower_pace_withholds_cells_and_stops_none_that_runs(
    tmp_path: Path, late: int, ended: int, stopped: list[int]
) -> None:
    """36 at a time, 73 s predicted, 140 to 175 s taken, 5 minutes: 4 of the other 24 cells end in time by the pace of
    those that ended, 20 are withheld; of those that run, only what the limit meets is stopped."""
    seen, found = limited(tmp_path, range(60), 300, 36, lambda s: 73, lambda s: 140 + s if s < 36 else late)
    assert [job.config.seed for job, _ in seen.starts] == list(range(40))  # each once
    assert [begin for _, begin in seen.starts] == [0] * 36 + [140, 141, 142, 143]
    assert [(job.config.seed, when - job.config.seed) for job, when in seen.ends][:36] == [(s, 140) for s in range(36)]
    assert sorted(found) == list(range(ended)) and len(seen.rounds) == 1
    assert [(job.config.seed, when) for job, when in seen.stopped] == [(seed, 300) for seed in stopped]


def test_faster_than_predicted_starts_more_and_what_was_withheld(tmp_path: Path) -> None:
    seen, found = limited(tmp_path, range(20), 45, 1, lambda seed: 10, lambda seed: 5)
    assert len(found) == 8 and seen.clock() == 40
    seen, found = limited(tmp_path, range(6), 36, 4, lambda seed: 30, lambda seed: 5 + seed)
    assert [begin for _, begin in seen.starts] == [0, 0, 0, 0, 7, 7]  # at 5 and at 6 they were predicted to be late
    assert len(found) == 6 and seen.stopped == []


def test_begun_cells_go_first_whatever_the_limit_and_tell_nothing_of_the_pace(tmp_path: Path) -> None:
    jobs, seen, seconds = jobs_of(tmp_path, range(7)), Seen(), {1: 2, 3: 2, 5: 100}
    names = {1: "state.pt", 3: "verl/checkpoints/global_step_9", 5: "state.pt", 6: "progress.json"}
    for seed, name in names.items():
        state = work_folder(jobs[seed].launch, run_id(jobs[seed].config)) / name
        state.parent.mkdir(parents=True)
        state.touch()
    limit = Limit(end=24, predict=lambda config: 100.0 if config.seed == 5 else 10.0, clock=seen.clock)
    list(in_rounds(jobs, launcher(seen, 2, lambda job: seconds.get(job.config.seed, 10)), limit))
    assert [(job.config.seed, begin) for job, begin in seen.starts] == [(1, 0), (3, 0), (5, 2), (0, 2), (2, 12)]
    assert [(job.config.seed, when) for job, when in seen.stopped] == [(5, 24)]
    assert limit.ratios == [1.0, 1.0]


def test_at_the_limit_running_cells_are_stopped_and_keep_their_state(tmp_path: Path) -> None:
    seen, found = limited(tmp_path, range(5), 25, 2, lambda seed: 10, lambda seed: 1000)
    assert found == {}
    assert [(job.config.seed, when) for job, when in seen.stopped] == [(0, 25), (1, 25)]
    assert set(seen.progress) == {run_id(job.config) for job, _ in seen.stopped}
    assert min(seen.progress.values()) >= 24


def test_a_running_cell_goes_on_while_the_next_is_refused(tmp_path: Path) -> None:
    """The cell of 40 s runs; the others take 12 s where 8 were predicted, so the fourth would be late."""
    seen, found = limited(tmp_path, range(5), 44, 2, lambda s: 40 if s == 0 else 8, lambda s: 40 if s == 0 else 12)
    assert sorted(found) == [0, 1, 2, 3]
    assert [(job.config.seed, begin) for job, begin in seen.starts] == [(0, 0), (1, 0), (2, 12), (3, 24)]
    assert seen.stopped == [] and seen.clock() == 40


def test_closing_stops_the_running_cells(tmp_path: Path) -> None:
    seen = Seen()
    events = in_rounds(jobs_of(tmp_path, range(3)), launcher(seen, 2, seconds=lambda job: 10))
    for event in events:
        if event.step == 3:
            break
    events.close()
    assert [job.config.seed for job, _ in seen.stopped] == [0, 1]
    assert seen.ends == []


def test_a_cell_that_could_not_be_started_is_finished_all_the_same(tmp_path: Path) -> None:
    (job,) = jobs_of(tmp_path, [0])
    seen: list[int] = []

    def run(jobs: Sequence[Job], *, admit: Admit) -> Generator[Event, None, None]:
        seen.append(len(jobs))
        yield Event(kind="finished", config=jobs[0].config, result=result_of(jobs[0], ("failed", "not started: x")))

    limit = Limit(end=5, predict=lambda config: 1.0, clock=lambda: 0.0)
    assert finals(list(in_rounds([job], run, limit)))[0].reason == "not started: x"
    assert seen == [1]
