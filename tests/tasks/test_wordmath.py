"""Word problems: what they say, the splits, solutions and scores, and the first thing that goes wrong."""

import hashlib
import random
import re

import pytest

from harness.models.tokenizer import BOS_ID, EOS_ID, PAD_ID
from harness.tasks import Worded, build_task, failure_shares
from harness.tasks.wordmath import EVAL_SHARE, POSITIONS, Wordmath
from harness.tasks.wordmath_check import FAILURES, failure
from harness.tasks.wordmath_language import ID, ITEMS, NAMES, SIZES, WORDS, text_of
from harness.tasks.wordmath_problems import Rules, draw_problem, read_chain, written

ORDERED = {"layout": "ordered", "vocab_size": 160, "num_names": 12, "distractors": 1, "reward": "path"}
NUMBER = r"(\d+(?: \d)*)"


def number(text):
    return int(text.replace(" ", ""))


def solved(prompt):
    """The answer to a prompt, read and computed from its text alone: an independent solver."""
    *facts, question = re.split(r" [.?] ?", text_of(prompt).removeprefix("<bos> "))[:-1]
    known, waiting = {}, []
    for fact in facts:
        who = r"(\w+) 's (\w+)"
        if found := re.fullmatch(rf"(\w+) (?:has|owns) {NUMBER} (\w+)", fact):
            known[found[1], found[3]] = number(found[2])
        elif found := re.fullmatch(rf"There are {NUMBER} (\w+) at (\w+) 's house", fact):
            known[found[3], found[2]] = number(found[1])
        elif found := re.fullmatch(rf"(\w+) has {NUMBER} (more|fewer) (\w+) than (\w+) has (\w+)", fact):
            sign = 1 if found[3] == "more" else -1
            shift = sign * number(found[2])
            waiting.append(((found[1], found[4]), [(found[5], found[6])], lambda v, s=shift: v + s))
        elif found := re.fullmatch(rf"{who} outnumber {who} by {NUMBER}", fact):
            shift = number(found[5])
            waiting.append(((found[1], found[2]), [(found[3], found[4])], lambda v, s=shift: v + s))
        elif found := re.fullmatch(r"(\w+) has (twice|thrice|half) as many (\w+) as (\w+) has (\w+)", fact):
            factor = {"twice": 2, "thrice": 3, "half": 0.5}[found[2]]
            waiting.append(((found[1], found[3]), [(found[4], found[5])], lambda v, f=factor: v * f))
        elif found := re.fullmatch(r"(\w+) has as many (\w+) as (\w+) has (\w+) and (\w+) has (\w+) together", fact):
            waiting.append(((found[1], found[2]), [(found[3], found[4]), (found[5], found[6])], lambda a, b: a + b))
        else:
            found = re.fullmatch(rf"The number of {who} is the difference between {who} and {who}", fact)
            assert found, fact
            waiting.append(((found[1], found[2]), [(found[3], found[4]), (found[5], found[6])], lambda a, b: a - b))
    while waiting:
        left = []
        for own, sources, rule in waiting:
            if all(source in known for source in sources):
                known[own] = rule(*(known[source] for source in sources))
            else:
                left.append((own, sources, rule))
        assert len(left) < len(waiting)
        waiting = left
    asked = re.fullmatch(r"How many (\w+) does (\w+) have", question)
    return known[asked[2], asked[1]]


@pytest.mark.parametrize("options", [{"n": 2}, {"n": 4}, {"n": 10}, {"n": 30}, {"n": 4, **ORDERED}])
def test_an_independent_solver_finds_the_reference(options):
    task = build_task("wordmath", options)
    for item in [*task.sample("train", range(40)), *task.sample("eval", range(20))]:
        assert item.prompt[0] == BOS_ID and max(item.prompt) < task.vocab_size
        assert solved(item.prompt) == int(item.reference.rpartition(" = ")[2])
        assert len(read_chain(item.reference)) == options["n"]


def test_golden_items():
    """Fixed for good: a changed question is a changed experiment (bump RULE)."""
    assert text_of(Wordmath(n=3).sample("eval", [1])[0].prompt) == GOLDEN_SHUFFLED
    item = Wordmath(n=3, layout="ordered", distractors=1, num_names=8).sample("train", [10**12])[0]
    assert (text_of(item.prompt), item.reference) == GOLDEN_ORDERED


GOLDEN_SHUFFLED = (
    "<bos> Sulan has twice as many kites as Kilan has kites . Godan owns 2 7 quilts . Vodan has as many quilts as "
    "Sulan has kites and Godan has quilts together . Jomo has 8 2 more boxes than Godan has quilts . Sarik has 4 6 "
    "fewer boxes than Sulan has kites . Kilan has 8 0 kites . How many quilts does Vodan have ?"
)
GOLDEN_ORDERED = (
    "<bos> Balan has 13 books . Fudan 's books outnumber Balan 's books by 3 . Lilan has twice as many books as Fudan "
    "has books . Hirik has 4 fewer books than Balan has books . How many books does Lilan have ?",
    "Balan books given 13 = 13; Fudan books add 3 from Balan books = 16; Lilan books double 2 from Fudan books = 32",
)


@pytest.mark.parametrize("options", [{"n": 2}, {"n": 10}, {"n": 2, "layout": "ordered", "num_names": 2}])
def test_splits_share_no_problem(options):
    """Two names and two steps of small numbers: problems are drawn many times over."""
    task = build_task("wordmath", options)
    train, evaluation = task.sample("train", range(1500)), task.sample("eval", range(300))
    assert {item.key for item in train}.isdisjoint(item.key for item in evaluation)
    assert {item.prompt for item in train}.isdisjoint(item.prompt for item in evaluation)
    assert {int(item.key, 16) % EVAL_SHARE == 0 for item in evaluation} == {True}
    if options.get("num_names"):
        assert len({item.key for item in train}) < 1400
    else:
        assert len({item.key for item in train}) == 1500
    assert task.sample("train", [7, 3]) == [train[7], train[3]]


def test_the_order_of_statements_makes_no_other_problem():
    rng = random.Random(0)
    rules = Rules(6, "shuffled", None, NAMES, ITEMS)
    problem = draw_problem(rng, rules)
    again = draw_problem(random.Random(0), rules)
    assert problem == again and draw_problem(rng, rules).key != problem.key
    stated = sorted(problem.statements)
    assert set(stated) >= set(problem.chain) and problem.statements != stated


@pytest.mark.parametrize("options", [{"n": 4}, {"n": 10}, {"n": 75}, {"n": 6, **ORDERED}])
def test_demonstrations_are_right_and_within_the_limit(options):
    task = build_task("wordmath", options)
    count = 400 // options["n"]
    shown, items = task.demonstrations(range(count), seed=5), task.sample("train", range(count))
    assert [prompt for prompt, _ in shown] == [item.prompt for item in items]
    for responses in ([response for _, response in shown], task.answers(items)):
        scores = task.score(items, responses)
        assert {(s.reward, s.is_parsable, s.failure) for s in scores} == {(1.0, True, None)}
        assert max(map(len, responses)) <= task.max_new_tokens
        assert {response[-1] for response in responses} == {EOS_ID}
    assert all(len(prompt) + task.max_new_tokens <= POSITIONS for prompt, _ in shown)
    other = task.demonstrations(range(count), seed=6)
    assert [prompt for prompt, _ in other] == [prompt for prompt, _ in shown]
    assert sum(a != b for (_, a), (_, b) in zip(shown, other, strict=True)) > 0.9 * count


def test_lengths_are_those_of_the_length_axis():
    """Mean tokens of prompts and responses as measured over 4000 problems."""
    for n, prompt, response in ((4, 77, 88), (10, 184, 246)):
        shown = Wordmath(n=n).demonstrations(range(200), seed=0)
        assert abs(sum(len(p) for p, _ in shown) / 200 - prompt) < 5
        assert abs(sum(len(r) for _, r in shown) / 200 - response) < 5


CHAIN = "Balan pears given 5 = 5; Dorik coins add 12 from Balan pears = 17; " \
    "Falan pears difference 3 from Dorik coins with Dumo cups = 14"  # fmt: skip
PLAN = "For Falan 's pears we need Dorik 's coins and Dumo 's cups . Dorik 's coins depends on Balan 's pears . "
STEPS = "So Balan has 5 pears . Then Dorik 's coins : 5 + 1 2 = 1 7 . 1 7 - 3 = 1 4 , so Falan has 1 4 pears . "


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (PLAN + STEPS + "#### 1 4 <eos>", None),
        (PLAN.replace("Dumo", "Balan") + STEPS + "#### 1 4 <eos>", "plan"),
        (PLAN.replace("depends on Balan 's pears", "depends on Balan 's cups") + STEPS + "#### 1 4 <eos>", "plan"),
        (PLAN.partition(". ")[0] + ". " + STEPS + "#### 1 4 <eos>", "plan"),
        (PLAN + PLAN + STEPS + "#### 1 4 <eos>", "plan"),
        (PLAN + STEPS.replace("5 + 1 2", "5 - 1 2") + "#### 1 4 <eos>", "operation"),
        (PLAN + STEPS.replace("has 5 pears", "has 5 + 1 = 6 pears") + "#### 1 4 <eos>", "operation"),
        (PLAN + STEPS.replace("Balan has", "Dumo has") + "#### 1 4 <eos>", "operand"),
        (PLAN + STEPS.replace(": 5 + 1 2 = 1 7", ": 6 + 1 2 = 1 8") + "#### 1 4 <eos>", "operand"),
        (PLAN + STEPS.replace("1 7 - 3 = 1 4", "1 7 - 4 = 1 3") + "#### 1 3 <eos>", "operand"),
        (PLAN + STEPS.replace("5 + 1 2 = 1 7", "5 + 1 3 = 1 8") + "#### 1 4 <eos>", "constant"),
        (PLAN + STEPS.replace("has 5 pears", "has 6 pears") + "#### 1 4 <eos>", "constant"),
        (PLAN + STEPS.replace("1 2 = 1 7", "1 2 = 1 8") + "#### 1 4 <eos>", "arithmetic"),
        (PLAN + STEPS.replace("has 1 4", "has 1 5") + "#### 1 4 <eos>", "arithmetic"),
        (PLAN + STEPS + "#### 1 5 <eos>", "arithmetic"),
        (PLAN + STEPS + "#### 1 4", "form"),
        (PLAN + STEPS + "#### 0 1 4 <eos>", "form"),
        (PLAN + STEPS + "1 4 <eos>", "form"),
        (PLAN + STEPS.replace("So Balan has", "So has Balan") + "#### 1 4 <eos>", "form"),
        (PLAN + STEPS + "So Balan has 5 pears . #### 1 4 <eos>", "form"),
        (PLAN + STEPS.replace("1 7 ", "17 ") + "#### 1 4 <eos>", "form"),
        (PLAN, "form"),
        ("", "form"),
    ],
    ids=lambda value: "" if value is None or " " in value else value,
)  # fmt: skip
def test_first_failure_of_responses_worked_out_by_hand(response, expected):
    assert failure(CHAIN, [ID[word] for word in response.split()], "shuffled") == expected
    assert expected is None or expected in FAILURES


def test_written_chains_read_back():
    chain = read_chain(CHAIN)
    assert written(chain) == CHAIN and [step.value for step in chain] == [5, 17, 14]
    assert WORDS[chain[2].other_who] == "Dumo" and chain[1].other_who == PAD_ID


def test_reward_is_the_answer_or_the_whole_path():
    """A slip that is made good: the answer is right, the path is not."""
    for name, path_reward in (("answer", 1.0), ("path", 0.0)):
        task = Wordmath(n=3, reward=name)
        item = task.sample("train", [0])[0]
        right = list(task.answers([item])[0])
        end = right.index(ID["####"])
        slipped = [ID["house"], *right]
        wrong = [*right[: end + 1], ID["9"], ID["9"], ID["9"], EOS_ID]
        scores = task.score([item] * 4, [right, slipped, wrong, right[:-1]])
        assert [s.reward for s in scores] == [1.0, path_reward, 0.0, 0.0]
        assert [s.is_parsable for s in scores] == [True, True, True, False]
        assert [s.failure for s in scores] == [None, "form", "arithmetic", "form"]
        assert failure_shares(scores) == {"arithmetic": 0.25, "form": 0.5}
        assert failure_shares([scores[0]] * 3) == {}


def test_wordings_have_the_shares_that_they_say():
    responses = [text_of(response) for _, response in Wordmath(n=10).demonstrations(range(300), seed=1)]
    steps = [line for response in responses for line in response.split(" . ") if "=" in line]
    assert len(steps) == 300 * 9
    # 2700 draws: s.d. of a share below 0.01
    for pattern, share in ((r"\w+ \w+ has .*", 0.45), (r"\w+ \w+ 's .*", 0.3), (r"\w+ the number .*", 0.15)):
        assert abs(sum(bool(re.fullmatch(pattern, step)) for step in steps) / len(steps) - share) < 0.04


def test_vocabulary_is_one_with_a_prefix():
    assert len(WORDS) == SIZES[1] == len(set(WORDS)) and isinstance(Wordmath(), Worded)
    small = Wordmath(n=4, layout="ordered", vocab_size=160)
    assert small.words == WORDS[:160] and len(Wordmath().words) == 512
    assert {*small.firm_ids} == {ID[str(value)] for value in range(40)}
    shown = [token for pair in small.demonstrations(range(200), 0) for part in pair for token in part]
    assert max(shown) < 160 and not any(WORDS[token].startswith("<unused") for token in shown)
    assert text_of(ID[word] for word in ("How", "many", "pears", "?")) == "How many pears ?" and len(NAMES) > 250


def test_content_hash_follows_what_is_asked():
    small = {"n": 4, "layout": "ordered"}
    changed = [{}, {"n": 4}, {"reward": "path"}, {"distractors": 2}, small, small | {"num_names": 8}]
    changed += [small | {"distractors": 1}]
    assert len({build_task("wordmath", options).content_hash() for options in changed}) == len(changed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 1}, "n=1 is not an integer from 2 to 75"),
        ({"n": 11, "layout": "ordered"}, "n=11 is not an integer from 2 to 10"),
        ({"layout": "sorted"}, "layout='sorted': valid: shuffled, ordered"),
        ({"reward": "paths"}, "reward='paths': valid: answer, path"),
        ({"vocab_size": 160}, r"vocab_size=160: valid: 512 \(model=words_10m\)"),
        (
            {"n": 4, "layout": "ordered", "vocab_size": 32},
            r"vocab_size=32: valid: 160 \(model=words_s\), 512 \(model=words_10m\)",
        ),
        ({"n": 4, "layout": "ordered", "num_names": 3}, "num_names=3 is not an integer from 4 to 349"),
        ({"n": 4, "distractors": 5}, "distractors=5 is not an integer from 0 to 4"),
        ({"n": 67, "distractors": 67}, "distractors=67 is not an integer from 0 to 66"),
        ({"n": 75, "distractors": 75}, "distractors=75 is not an integer from 0 to 33"),
        ({"n": "x"}, "task 'wordmath': n='x' is not an integer from 2 to 75"),
        ({"n": None}, "task 'wordmath': n=None is not an integer from 2 to 75"),
        ({"distractors": "x"}, "task 'wordmath': distractors='x' is not an integer from 0 to 10"),
        ({"distractors": True}, "task 'wordmath': distractors=True is not an integer from 0 to 10"),
        ({"num_names": 17}, "task 'wordmath': num_names=17 is not an integer from 18 to 349"),
        ({"distractors": 0, "num_names": 12}, "num_names=12 is not an integer from 13 to 349"),
        ({"rewards": "path"}, "task 'wordmath' has no option 'rewards': nearest: reward"),
    ],
)
def test_bad_options_are_named_in_one_line(options, message):
    with pytest.raises(ValueError, match=message) as error:
        build_task("wordmath", options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("n", "most"), [(66, 66), (70, 54), (75, 33)])
def test_the_most_distractors_still_fit(n: int, most: int) -> None:
    """With more, no prompt leaves room for its answer, and drawing a problem would not end."""
    task = Wordmath(n=n, distractors=most)
    statements = [item.prompt.count(ID["."]) for item in task.sample("train", range(30))]
    assert set(statements) == {n + most + 1 + n // 5}


@pytest.mark.parametrize(("n", "names"), [(2, 4), (10, 18), (75, 129)])
def test_the_fewest_names_are_enough(n: int, names: int) -> None:
    """With fewer, drawing a problem need not end."""
    assert len({item.key for item in Wordmath(n=n, num_names=names).sample("train", range(30))}) == 30


def test_a_seed_makes_the_problems_it_always_made() -> None:
    """Prompts, chains and wordings of five kinds of problem, as they were when the first bases were trained."""
    found = hashlib.sha256()
    for task in (
        Wordmath(n=4), Wordmath(n=10), Wordmath(n=30),
        Wordmath(n=4, layout="ordered", num_names=12, distractors=1), Wordmath(n=6, layout="ordered"),
    ):  # fmt: skip
        found.update(repr(task.demonstrations(range(150), 3)).encode())
        found.update(repr(task.sample("eval", range(100))).encode())
    assert found.hexdigest() == "93accdd0b1b8744ec102b043664f7e5084bfc5c05e72d794410a50065c824ccb"
