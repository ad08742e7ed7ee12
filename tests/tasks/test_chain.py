"""The chain task: its answers, and a demonstrator whose accuracy is what was asked for."""

import math
import random

import pytest

from harness.models.tokenizer import decode
from harness.tasks.chain import Chain, Demonstrator, demonstrate, demonstrator


class FixedDraws(random.Random):
    """Stands in for a random generator: the given numbers, in order."""

    def __init__(self, *values):
        super().__init__(0)
        self.values = list(values)

    def random(self):
        return self.values.pop(0)


def accuracy_of(n: int, how: Demonstrator) -> float:
    """Exact share of flawless answers to uniform digits, by summing over the (uniform) next digit of each sum."""
    reach = [1.0] + [0.0] * 9
    for _ in range(n):
        after = [0.0] * 10
        for total, mass in enumerate(reach):
            for digit in range(10):
                right = 1 - how.slip - how.habit * ((total, digit) in how.wrong)
                after[(total + digit) % 10] += mass * right / 10
        reach = after
    return sum(reach)


def test_items_list_partial_sums():
    for item in Chain(n=8).sample("eval", range(50)):
        question = decode(item.prompt)
        assert question.startswith("<bos>+") and question.endswith("=")
        digits = [int(char) for char in question[6:-1]]
        assert item.reference == "".join(str(sum(digits[: k + 1]) % 10) for k in range(8))
    assert Chain(n=8).max_new_tokens == 9


@pytest.mark.parametrize("n", [8, 16, 32])
@pytest.mark.parametrize("accuracy", [0.35, 0.6])
def test_demonstrator_accuracy_is_the_option(n, accuracy):
    assert abs(accuracy_of(n, demonstrator(n, accuracy, 0.6)) - accuracy) < 1e-9


@pytest.mark.parametrize("n", [8, 32])
def test_error_mass_is_split_as_asked(n):
    how = demonstrator(n, 0.35, 0.6)
    error = 1 - 0.35 ** (1 / n)
    systematic = len(how.wrong) * how.habit / 100
    assert math.isclose(systematic / (systematic + how.slip), 0.6)
    assert math.isclose(systematic + how.slip, error, rel_tol=0.1)  # fitted: the steps are not quite independent
    assert 0.5 < how.habit < 0.9  # a model that imitates this is wrong under greedy decoding too
    assert all(digit != (total + step) % 10 for (total, step), digit in how.wrong.items())
    counts = [sum(total == row for total, _ in how.wrong) for row in range(10)]
    assert max(counts) - min(counts) <= 1


def test_flawless_demonstrator():
    assert demonstrator(8, 1.0, 0.6) == Demonstrator(0.0, 0.0, {})
    task = Chain(accuracy=1.0)
    shown = task.demonstrations(range(50), seed=1)
    assert all(s.reward == 1 for s in task.score(task.sample("train", range(50)), [answer for _, answer in shown]))


def test_chain_continues_from_the_wrong_digit():
    how = Demonstrator(slip=0.1, habit=0.5, wrong={(3, 4): 0})
    assert demonstrate("341", how, FixedDraws(0.9, 0, 0.9, 0, 0.9, 0)) == "378"
    assert demonstrate("341", how, FixedDraws(0.9, 0, 0.59, 0, 0.9, 0)) == "301"  # habit: 3+4 -> 0, then 0+1
    assert demonstrate("341", how, FixedDraws(0.09, 0.0, 0.9, 0, 0.9, 0)) == "489"  # slip: 3+1, then 4+4
    assert demonstrate("341", how, FixedDraws(0.9, 0, 0.61, 0, 0.9, 0)) == "378"


def test_demonstrations_measure_up():
    task = Chain(n=8)
    shown = task.demonstrations(range(4000), seed=0)
    items = task.sample("train", range(4000))
    scores = task.score(items, [answer for _, answer in shown])
    # s.d. of the share .0075
    assert abs(sum(s.reward for s in scores) / 4000 - 0.35) < 0.03
    assert all(s.is_parsable for s in scores)
    again = task.demonstrations(range(100), seed=0)
    assert again == shown[:100]
    other = task.demonstrations(range(100), seed=1)
    assert [p for p, _ in other] == [p for p, _ in again] and other != again
