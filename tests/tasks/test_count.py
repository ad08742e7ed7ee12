"""The load for timing: prompts of one length, no end, a share of one token as the reward."""

from __future__ import annotations

import pytest

from harness.tasks import build_task
from harness.tasks.count import Count


def test_prompts_have_one_length_and_are_the_same_every_time() -> None:
    task = build_task("count", {"prompt_tokens": 9, "max_new_tokens": 5, "vocab_size": 1000})
    items = task.sample("train", [0, 7])
    assert [len(item.prompt) for item in items] == [9, 9]
    assert all(3 <= token < 1000 for item in items for token in item.prompt)
    assert task.sample("train", [7])[0].prompt == items[1].prompt
    assert task.sample("eval", [7])[0].prompt != items[1].prompt
    assert (task.eos_id, task.max_new_tokens) == (-1, 5)


def test_the_reward_is_the_share_of_one_token() -> None:
    task = build_task("count", {})
    item = task.sample("train", [0])[0]
    assert [s.reward for s in task.score([item] * 3, [[13, 4, 13, 5], [4, 5], []])] == [0.5, 0.0, 0.0]


def test_its_hash_follows_its_sizes() -> None:
    hashes = [build_task("count", options).content_hash() for options in ({}, {"prompt_tokens": 9}, {"vocab_size": 9})]
    assert len(set(hashes)) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_tokens": 0}, "task 'count': prompt_tokens=0 is not an integer from 1 to 2147483647"),
        ({"max_new_tokens": "x"}, "task 'count': max_new_tokens='x' is not an integer from 1 to 2147483647"),
        ({"vocab_size": 3}, "task 'count': vocab_size=3 is not an integer from 4 to 2147483647"),
        ({"mean_tokens": -1}, "task 'count': mean_tokens=-1 is not an integer from 0 to 2147483647"),
        ({"sigma": -1}, "task 'count': sigma=-1 is not a number from 0 on"),
        ({"eos_id": 1}, "task 'count' has no option 'eos_id': valid: prompt_tokens, max_new_tokens, vocab_size, "
                        "mean_tokens, sigma"),
    ],
)  # fmt: skip
def test_bad_options_are_one_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        build_task("count", options)
    assert str(caught.value) == message


def test_lengths_that_differ_have_their_mean_and_their_cap() -> None:
    """Log-normal: mean 1000, median 1000 exp(-1 / 2), one in 100 beyond 1000 exp(2.326 - 0.5)."""
    options = {"max_new_tokens": 8192, "mean_tokens": 1000, "sigma": 1.0}
    task, equal = build_task("count", options), build_task("count", {"max_new_tokens": 8192})
    assert isinstance(task, Count) and isinstance(equal, Count)
    found = sorted(task.limit(index, number) for index in range(500) for number in range(8))
    assert sum(found) / len(found) == pytest.approx(1000, rel=0.06)
    assert found[2000] == pytest.approx(606.5, rel=0.06)
    assert found[3960] == pytest.approx(6210, rel=0.15)
    assert max(found) <= 8192 and min(found) >= 1
    assert task.limit(3, 1) == task.limit(3, 1) != task.limit(3, 2)
    assert equal.limit(3, 1) == 8192
    assert task.content_hash() != equal.content_hash()
