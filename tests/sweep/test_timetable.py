"""Timetables by hand: workers, GPUs that are shared or not, and what they cost."""

from __future__ import annotations

import pytest

from harness.sweep.timetable import Demand, Timetable, timetable


def on_cores(seconds: list[float], workers: int) -> float:
    return timetable([Demand(seconds=s) for s in seconds], workers, 0).wall_s


def test_cells_on_cores_start_in_order_on_whichever_worker_is_free_first() -> None:
    assert on_cores([], 3) == 0
    assert on_cores([5, 1, 1, 1], 2) == 5
    assert on_cores([1, 1, 1, 5], 2) == 6
    assert on_cores([2.0] * 7, 3) == 6
    assert on_cores([2.0] * 7, 1) == 14
    assert timetable([Demand(seconds=1.0)] * 3, 8, 4) == Timetable(wall_s=1.0, gpu_s=0.0, at_once=3, gpus=0)


@pytest.mark.parametrize("workers", [2, 8, 64])
def test_whole_gpus_bound_the_time_and_cost_every_second_of_every_cell(workers: int) -> None:
    """Six cells of an hour and two GPUs each, on four GPUs: two at a time, twelve GPU-hours."""
    found = timetable([Demand(seconds=3600.0, gpus=2, share=1.0)] * 6, workers, 4)
    assert found == Timetable(wall_s=3 * 3600.0, gpu_s=12 * 3600.0, at_once=2, gpus=4)


def test_engines_share_a_gpu_as_far_as_their_memory_goes_and_it_is_paid_for_once() -> None:
    cells = [Demand(seconds=100.0, gpus=1, share=0.3)] * 12
    assert timetable(cells, 64, 1) == Timetable(wall_s=400.0, gpu_s=400.0, at_once=3, gpus=1)
    assert timetable(cells, 64, 2) == Timetable(wall_s=200.0, gpu_s=400.0, at_once=6, gpus=2)
    assert timetable(cells, 2, 2) == Timetable(wall_s=600.0, gpu_s=1200.0, at_once=2, gpus=2)  # one to a GPU
    assert timetable(cells, 1, 2) == Timetable(wall_s=1200.0, gpu_s=1200.0, at_once=1, gpus=1)


def test_a_gpu_costs_while_it_has_a_cell_and_no_cell_overtakes() -> None:
    """0 to 10 and 0 to 4 share one GPU; the whole one waits until 10, and so does the small one behind it."""
    small, whole = Demand(seconds=4.0, gpus=1, share=0.5), Demand(seconds=5.0, gpus=1, share=1.0)
    found = timetable([Demand(seconds=10.0, gpus=1, share=0.5), small, whole, small], 8, 1)
    assert (found.wall_s, found.gpu_s, found.at_once) == (19.0, 19.0, 2)
