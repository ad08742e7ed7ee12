"""The share of time that states to resume from take."""

import pytest

from harness.config.schema import Launch
from harness.trainers import checkpoint_clock
from harness.trainers.checkpoint_clock import SHARE, CheckpointClock


class Time:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    found = Time()
    monkeypatch.setattr(checkpoint_clock, "time", found)
    return found


def saves(time: Time, launch: Launch, step_s: float, save_s: float, steps: int) -> list[int]:
    """Steps after which a state was saved."""
    clock, found = CheckpointClock(launch), list[int]()
    for step in range(1, steps + 1):
        time.now += step_s
        if clock.is_due(step):
            found.append(step)
            with clock.saving():
                time.now += save_s
    return found


def test_cheap_states_come_as_often_as_asked(time: Time) -> None:
    assert saves(time, Launch(checkpoint_every_s=20), 5.0, 0.01, 12) == [4, 8, 12]


@pytest.mark.parametrize(("step_s", "save_s"), [(30.0, 120.0), (1.0, 60.0), (300.0, 16.0)])
def test_dear_states_take_at_most_their_share(time: Time, step_s: float, save_s: float) -> None:
    found = saves(time, Launch(checkpoint_every_s=20), step_s, save_s, 10_000)
    training = step_s * (found[-1] - found[0])
    assert len(found) > 3 and save_s * (len(found) - 1) <= SHARE * (training + save_s * (len(found) - 1)) + 1e-6


def test_steps_and_zero_are_taken_at_their_word(time: Time) -> None:
    assert saves(time, Launch(checkpoint_every_steps=3), 1.0, 1e4, 9) == [3, 6, 9]
    assert saves(time, Launch(checkpoint_every_s=0), 1.0, 1e4, 4) == [1, 2, 3, 4]
