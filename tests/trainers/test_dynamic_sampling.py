"""Groups that dynamic sampling keeps of its generation batches, by hand; the same rule for both trainers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.config.schema import AlgoConfig
from harness.trainers.dynamic_sampling import chosen_rows, filled, num_drawn

ALGO = AlgoConfig(name="grpo", num_prompts=3, group_size=2, dynamic_sampling=True)
SAME, OTHER = (1.0, 1.0), (0.0, 1.0)


def kept(algo: AlgoConfig, *batches: list[tuple[float, float]]) -> tuple[list[list[int]], int]:
    """(rows kept of each batch, batches that were drawn). A batch is the rewards of its groups."""
    left = list(batches)

    def sample() -> list[float]:
        return [reward for group in left.pop(0) for reward in group]

    return filled(algo, sample), len(batches) - len(left)


def test_rows_of_groups_that_differ() -> None:
    rewards = [1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    assert chosen_rows(rewards, 2, 5) == [2, 3, 6, 7]
    assert chosen_rows(rewards, 2, 1) == [2, 3]
    assert chosen_rows(rewards, 4, 5) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert chosen_rows([0.5] * 8, 2, 5) == []


def test_a_batch_is_filled_from_as_many_as_it_takes_and_the_rest_is_dropped() -> None:
    first, second, third = [SAME, OTHER, SAME], [SAME, SAME, SAME], [OTHER, OTHER, OTHER]
    assert kept(ALGO, first, second, third, third) == ([[2, 3], [], [0, 1, 2, 3]], 3)
    assert kept(ALGO, third, third) == ([[0, 1, 2, 3, 4, 5]], 1)


def test_a_generation_batch_may_be_larger_or_smaller() -> None:
    wide = replace(ALGO, gen_prompts=5)
    assert (num_drawn(ALGO), num_drawn(wide)) == (3, 5)
    assert kept(wide, [OTHER, SAME, OTHER, OTHER, OTHER]) == ([[0, 1, 4, 5, 6, 7]], 1)
    narrow = replace(ALGO, gen_prompts=1)
    assert kept(narrow, [OTHER], [SAME], [OTHER], [OTHER]) == ([[0, 1], [], [0, 1], [0, 1]], 4)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"group_size": 1},
            "group_size=1: dynamic sampling drops prompts whose answers all earn the same, and one answer always does; "
            "valid: 2 or more, or algo.dynamic_sampling=false",
        ),
        (
            {"gen_prompts": 2, "max_gen_batches": 1},
            "max_gen_batches=1: batches of gen_prompts=2 that never fill num_prompts=3; valid: 2 or more, or 0",
        ),
    ],
)
def test_batches_that_could_never_be_filled_are_refused(values: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        replace(ALGO, **values)  # type: ignore[arg-type]
    assert str(caught.value) == said
    replace(ALGO, group_size=1, dynamic_sampling=False)
    replace(ALGO, gen_prompts=2, max_gen_batches=2)
    replace(ALGO, gen_prompts=2, max_gen_batches=0)


def test_without_it_one_batch_is_kept_whole() -> None:
    plain = replace(ALGO, dynamic_sampling=False)
    assert kept(plain, [SAME, SAME, OTHER], [OTHER] * 3) == ([[0, 1, 2, 3, 4, 5]], 1)


@pytest.mark.parametrize(("limit", "drawn"), [(1, 1), (2, 2), (3, 3)])
def test_after_max_gen_batches_it_gives_up_with_the_numbers(limit: int, drawn: int) -> None:
    algo, batches = replace(ALGO, max_gen_batches=limit), [[OTHER, SAME, SAME], [SAME] * 3, [OTHER, SAME, SAME]]
    counted: list[int] = []

    def sample() -> list[float]:
        counted.append(1)
        return [reward for group in batches[len(counted) - 1] for reward in group]

    said = f"algo.max_gen_batches={limit}: only {1 + (limit == 3)} of 3 prompts had samples that differ in reward"
    with pytest.raises(ValueError) as caught:
        filled(algo, sample)
    assert (str(caught.value), len(counted)) == (said, drawn)


def test_a_batch_that_is_full_at_the_last_allowed_draw_is_no_error() -> None:
    assert kept(replace(ALGO, max_gen_batches=2), [OTHER, SAME, OTHER], [OTHER] * 3) == ([[0, 1, 4, 5], [0, 1]], 2)
