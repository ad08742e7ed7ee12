"""The sort task and what it shares with chain: drawing, splitting, scoring, building."""

import subprocess
import sys
from collections import Counter

import pytest

from harness.models.tokenizer import DIGIT_0_ID, EOS_ID, PAD_ID, decode, encode
from harness.tasks import TASKS, Score, build_task
from harness.tasks.digits import EVAL_SHARE, draw_digits, split_of
from harness.tasks.sort import Sort


def test_golden_items():
    """Fixed for good: a changed question is a changed experiment (bump RULE)."""
    items = Sort().sample("eval", [0, 1, 511])
    assert [decode(item.prompt) for item in items] == GOLDEN_EVAL
    assert [decode(item.prompt) for item in Sort(n=4).sample("train", [0, 1, 10**12])] == GOLDEN_TRAIN


GOLDEN_EVAL = ["<bos>69716875=", "<bos>92099011=", "<bos>81625862="]
GOLDEN_TRAIN = ["<bos>7327=", "<bos>3859=", "<bos>7385="]


@pytest.mark.parametrize("n", [2, 8, 16, 33, 64])
def test_items_are_sorted_digits(n):
    task = Sort(n=n)
    assert task.max_new_tokens == n + 1
    for split in ("train", "eval"):
        for item in task.sample(split, range(50)):
            question = decode(item.prompt)
            assert question.startswith("<bos>") and question.endswith("=") and len(question) == n + 6
            assert item.reference == "".join(sorted(question[5:-1]))
            assert split_of("sort", question[5:-1]) == split


@pytest.mark.parametrize("name", ["sort", "chain"])
def test_splits_share_no_question(name):
    """n=2 has 100 questions in all, so every one of them is drawn many times."""
    for n, count in ((2, 2000), (8, 1000)):
        task = build_task(name, {"n": n})
        train = {item.key for item in task.sample("train", range(count))}
        evaluation = {item.key for item in task.sample("eval", range(count))}
        assert train and evaluation and not train & evaluation
        if n == 2:
            assert len(train) + len(evaluation) == 100
            assert {item.prompt for item in task.sample("train", range(count))}.isdisjoint(
                item.prompt for item in task.sample("eval", range(count))
            )


def test_digits_are_uniform_and_indices_independent():
    drawn = [draw_digits("sort", 8, "train", index) for index in range(2000)]
    assert len(set(drawn)) == 2000
    counts = Counter("".join(drawn))
    assert set(counts) == set("0123456789")
    # 16000 draws, s.d. of a count 38: five of them
    assert all(abs(count - 1600) < 190 for count in counts.values())
    assert draw_digits("sort", 8, "train", 7) == drawn[7]
    share = sum(split_of("sort", str(value)) == "eval" for value in range(10**4, 2 * 10**4)) / 10**4
    assert abs(share - 1 / EVAL_SHARE) < 0.015


def test_score_is_exact_and_counts_unparsable_apart():
    task = Sort(n=4)
    item = task.sample("train", [3])[0]
    right = encode(item.reference)
    wrong = [*right[:-1], DIGIT_0_ID + (right[-1] - DIGIT_0_ID + 1) % 10]
    cases = [
        ([*right, EOS_ID], Score(1.0, True)),
        ([*wrong, EOS_ID], Score(0.0, True)),
        ([*right[:-1], EOS_ID], Score(0.0, True)),  # too short
        (right, Score(0.0, False)),  # no EOS
        ([*right, right[0]], Score(0.0, False)),  # EOS not at its place
        ([*right, EOS_ID, PAD_ID], Score(0.0, False)),
        ([EOS_ID], Score(0.0, False)),
        ([], Score(0.0, False)),
        ([*right[:-1], 3, EOS_ID], Score(0.0, False)),
    ]
    assert task.score([item] * len(cases), [response for response, _ in cases]) == [score for _, score in cases]
    with pytest.raises(ValueError, match="zip"):
        task.score([item], [])


def test_demonstrations_are_right_whatever_the_seed():
    task = Sort(n=16)
    shown = task.demonstrations(range(20), seed=5)
    items = task.sample("train", range(20))
    assert [prompt for prompt, _ in shown] == [item.prompt for item in items]
    assert {score.reward for score in task.score(items, [response for _, response in shown])} == {1.0}
    assert shown == task.demonstrations(range(20), seed=6)


def test_a_large_batch_is_scored_response_by_response():
    task = Sort()
    items = task.sample("train", range(256))
    right = [[*encode(item.reference), EOS_ID] for item in items]
    spoilt = [[*response[:-2], DIGIT_0_ID, EOS_ID] if i % 2 else response for i, response in enumerate(right)]
    rewards = [score.reward for score in task.score(items, spoilt)]
    assert rewards == [float(response == answer) for response, answer in zip(spoilt, right, strict=True)]
    assert 128 <= sum(rewards) <= 150  # an odd item is still right where its last digit is a 0


def test_content_hash_follows_what_is_asked():
    hashes = {Sort(n=8).content_hash(), Sort(n=16).content_hash(), build_task("chain", {"n": 8}).content_hash()}
    assert len(hashes) == 3
    assert Sort(n=8, vocab_size=128).content_hash() == Sort(n=8).content_hash()
    assert build_task("chain", {"accuracy": 0.5}).content_hash() not in hashes


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("srot", {}, f"task 'srot' is unknown: nearest: sort; valid: {', '.join(TASKS)}$"),
        ("sort", {"m": 8}, "task 'sort' has no option 'm': valid: n, vocab_size"),
        ("sort", {"name": "x"}, "has no option 'name'"),
        ("chain", {"acuracy": 1}, "nearest: accuracy; valid: n, accuracy"),
        ("sort", {"n": 1}, "n=1 is not an integer from 2 to 1024"),
        ("sort", {"n": "8"}, "n='8' is not an integer"),
        ("sort", {"vocab_size": 33}, "vocab_size 33"),
        ("chain", {"accuracy": 0}, "accuracy=0 is not a number from 0.01 to 1"),
        ("chain", {"n": 2, "accuracy": 0.01, "misconceptions": 1.0}, "accuracy=0.01 is too low for n=2"),
    ],
)
def test_bad_options_are_named_in_one_line(name, options, message):
    with pytest.raises(ValueError, match=message) as error:
        build_task(name, options)
    assert "\n" not in str(error.value)


def test_embedded_tasks_import_no_text_library():
    code = (
        "import sys; from harness.tasks import build_task; build_task('sort', {}); build_task('chain', {}); "
        "print([m for m in ('tokenizers', 'transformers', 'datasets', 'pandas', 'math_verify') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
