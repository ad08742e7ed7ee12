"""The share of time that states to resume from take."""

from itertools import pairwise

import pytest

from harness.config.load import launch_of, split_launch
from harness.config.schema import Launch
from harness.trainers import checkpoint_clock
from harness.trainers.checkpoint_clock import CheckpointClock


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


@pytest.mark.parametrize("asked", [{"checkpoint_every_s": 20}, {"checkpoint_every_steps": 2}])
@pytest.mark.parametrize("share", [0.05, 0.3])
@pytest.mark.parametrize(("step_s", "save_s"), [(30.0, 120.0), (1.0, 60.0), (300.0, 16.0)])
def test_dear_states_take_at_most_their_share(
    time: Time, step_s: float, save_s: float, share: float, asked: dict[str, int]
) -> None:
    found = saves(time, Launch(checkpoint_share=share, **asked), step_s, save_s, 10_000)
    periods = [(b - a) * step_s + save_s for a, b in pairwise(found)]
    waits = asked.get("checkpoint_every_steps", 1) * step_s
    assert len(found) > 3
    assert all(save_s <= share * period + 1e-6 for period in periods)
    longest = max(20.0, save_s * (1 / share - 1)) + waits  # and no later than the next moment after that
    assert all(period - save_s < longest + 1e-6 for period in periods)


def test_a_moment_by_steps_that_comes_too_early_is_left_out(time: Time) -> None:
    """A save of 1e4 s may be a tenth of the time: the next comes 9e4 s later, at a step of its own."""
    launch = Launch(checkpoint_every_steps=3, checkpoint_share=0.1)
    assert saves(time, launch, 1e4, 1e4, 30) == [3, 12, 21, 30]
    assert saves(time, Launch(checkpoint_every_steps=3, checkpoint_share=0.09), 1e4, 1e4, 30) == [3, 15, 27]


def test_no_bound_and_zero_are_taken_at_their_word(time: Time) -> None:
    assert saves(time, Launch(checkpoint_every_steps=3, checkpoint_share=1), 1.0, 1e4, 9) == [3, 6, 9]
    assert saves(time, Launch(checkpoint_every_s=20, checkpoint_share=1), 5.0, 1e4, 12) == [4, 8, 12]
    assert saves(time, Launch(checkpoint_every_s=0), 1.0, 1e4, 4) == [1, 2, 3, 4]


@pytest.mark.parametrize("wrong", ["0", "1.5", "-0.1"])
def test_a_share_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"launch\.checkpoint_share="):
        launch_of(split_launch([f"launch.checkpoint_share={wrong}"])[1])
