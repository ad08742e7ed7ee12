"""Lock files under contention, and the end of a wait."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.foundation.lock_file import folder_held, held


def hold_often(path: Path, times: int) -> None:
    for _ in range(times):
        with held(path, lambda: time.sleep(0.002)):
            assert path.exists()


def test_a_lock_survives_contention(tmp_path: Path) -> None:
    """Its file vanishes between two looks of whoever waits."""
    path = tmp_path / "locks" / "one"
    processes = [multiprocessing.Process(target=hold_often, args=(path, 200)) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 6 and not path.exists()


def test_threads_exclude_each_other(tmp_path: Path) -> None:
    inside, most = list[int](), list[int]()

    def hold(number: int) -> None:
        with held(tmp_path / "lock"):
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.01)
            inside.remove(number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(hold, range(8)))
    assert most == [1] * 8


def test_what_a_pause_raises_ends_the_wait(tmp_path: Path) -> None:
    path, pauses = tmp_path / "lock", list[int]()

    def pause() -> None:
        pauses.append(1)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    with held(path, pause):
        with pytest.raises(KeyboardInterrupt), held(path, pause):
            raise AssertionError("it is held already")
        assert path.exists()
    assert len(pauses) == 3 and not path.exists()


def test_a_folder_is_held_once_and_goes_when_it_is_empty(tmp_path: Path) -> None:
    folder = tmp_path / "work" / "one"
    with folder_held(folder, "first"):
        with pytest.raises(ValueError, match=r"^second: at work$"), folder_held(folder, "second: at work"):
            pass
        assert folder.is_dir()
    assert not folder.exists()
    with folder_held(folder, "again"):
        (folder / "state.pt").touch()
    assert [path.name for path in folder.iterdir()] == ["state.pt"]
