"""Reasoning-gym tasks: what holds without the library, and with it the data sets themselves."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.models.tokenizer import encode, save_tokenizer
from harness.tasks import Item, Score, build_task
from harness.tasks.reasoning_gym import REVIEWED, GymOptions, GymTask, executes_answers, extract_tagged
from harness.tasks.text_tokens import load_text_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def gym():
    return pytest.importorskip("reasoning_gym", reason="the extra 'tasks' is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder, 128)
    return folder


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>5</answer>", "5"),
        ("first <answer>4</answer>, no: <answer>\n 5 \n</answer> done", "5"),
        ("<answer></answer>", ""),
        ("<answer>4</answer> and <answer>5", None),
        ("5</answer>", None),
        ("", None),
    ],
)
def test_extract_tagged(text, answer):
    assert extract_tagged(text) == answer


@pytest.mark.parametrize(
    ("source", "verdict"),
    [
        ("def score(answer): return eval(answer)", True),
        ("import sympy\nx = sympy.parse_expr(answer)", True),
        ("from sympy.parsing.sympy_parser import parse_expr as p, parse_expr\nparse_expr(a)", True),
        ("def score(answer): return float(answer) == 1", False),
        ("import re\nre.compile(answer)", False),
        ("def evaluate(answer): return retrieval(answer)", False),
    ],
)
def test_executes_answers(source, verdict):
    assert executes_answers(source) is verdict


def test_without_the_library_the_extra_is_named(model):
    code = (
        "import sys; from pathlib import Path; sys.modules['reasoning_gym'] = None\n"
        "from harness.tasks import build_task\n"
        "try: build_task('reasoning_gym:leg_counting', {}, Path(sys.argv[1]))\n"
        "except ValueError as error: print(error)"
    )
    told = subprocess.check_output([sys.executable, "-c", code, str(model)], text=True, cwd=ROOT)
    assert told == "task 'reasoning_gym:leg_counting' needs the extra 'tasks': pip install 'lowbit-rl-bench[tasks]'\n"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("reasoning_gym", {}, "needs the option dataset"),
        ("reasoning_gym:leg_counting", {"sizes": 3}, "has no option 'sizes': nearest: size"),
        ("reasoning_gym:leg_counting", {"size": "x"}, "size='x': input should be a valid integer"),
        ("reasoning_gym:leg_counting", {"size": 0}, "size=0: input should be greater than 0"),
        ("reasoning_gym:leg_counting", {"template": "x"}, "template='x' has no {question}"),
    ],
)
def test_bad_options(name, options, message, model):
    with pytest.raises(ValueError, match=message):
        build_task(name, options, model)


def test_an_answer_that_a_data_set_cannot_read_is_unparsable(model):
    class Halves(dict):
        def score_answer(self, answer, entry):
            return int(answer) / 2 if answer != "boom" else {}["boom"]

    options = GymOptions(dataset="halves")
    task = GymTask(
        name="reasoning_gym:halves", options=options, dataset=Halves({0: {}}), version="1",
        tokens=load_text_tokenizer(model, "halves", options),
    )  # fmt: skip
    item = Item(0, (), '{"position": 0}', "")
    answers = ["1", "2", "two", "boom"]
    scores = task.score([item] * 4, [encode(f"<answer>{answer}</answer>", 128) for answer in answers])
    assert scores == [Score(0.5, True), Score(1.0, True), Score(0.0, False), Score(0.0, False)]
    assert [score.answer for score in scores] == ["1", "2", None, None]


def test_factors_that_are_no_numbers_are_unparsable(gym, model):
    """The data set raises ValueError at them."""
    task = build_task("reasoning_gym:prime_factorization", {"size": 50}, model)
    (item,) = task.sample("train", [0])
    texts = [json.loads(item.reference)["answer"], "two x three"]
    responses = [encode(f"<answer>{text}</answer>", 128) for text in texts]
    assert task.score([item] * 2, responses) == [Score(1.0, True), Score(0.0, False)]


def test_bad_datasets(gym, model):
    with pytest.raises(ValueError, match="no data set 'leg_countin': nearest: leg_counting"):
        build_task("reasoning_gym:leg_countin", {}, model)
    with pytest.raises(ValueError, match=r"task 'reasoning_gym:leg_counting': config=\{'legs': 3\}"):
        build_task("reasoning_gym:leg_counting", {"config": {"legs": 3}}, model)


def test_datasets_that_would_execute_an_answer_are_refused(gym, model):
    for name in ("countdown", "puzzle24", "n_queens", "spiral_matrix", "polynomial_multiplication", "codeio"):
        with pytest.raises(ValueError, match=f"data set '{name}' is refused"):
            build_task("reasoning_gym", {"dataset": name}, model)
    for name in REVIEWED:
        assert build_task("reasoning_gym", {"dataset": name, "size": 50}, model).name == f"reasoning_gym:{name}"


def test_a_pool_without_train_questions_is_refused(gym, model, monkeypatch):
    monkeypatch.setattr("harness.tasks.reasoning_gym.EVAL_SHARE", 1)
    with pytest.raises(ValueError, match=r"size=20: no question of the pool is a train question$"):
        build_task("reasoning_gym:leg_counting", {"size": 20}, model)


def test_items_and_scores(gym, model):
    task = build_task("reasoning_gym:leg_counting", {"size": 400}, model)
    train, evaluated = task.sample("train", range(60)), task.sample("eval", range(30))
    assert {item.key for item in train}.isdisjoint(item.key for item in evaluated)
    assert len({item.reference for item in evaluated}) == 30
    assert train == build_task("reasoning_gym:leg_counting", {"size": 400}, model).sample("train", range(60))
    answers = [json.loads(item.reference)["answer"] for item in train]
    texts = [f"I count.\n<answer>{answer}</answer>" for answer in answers]
    assert task.score(train, [[*encode(text, 128), 1] for text in texts]) == [Score(1.0, True)] * 60
    wrong = task.score(train[:1], [encode("<answer>none</answer>", 128)])[0]
    assert wrong.reward < 1 and wrong.is_parsable
    assert task.score(train[:1], [encode(answers[0], 128)]) == [Score(0.0, False)]
    with pytest.raises(ValueError, match=r"has \d+ eval questions at size=400: index 399 is none"):
        task.sample("eval", [399])
    assert task.content_hash() != build_task("reasoning_gym:leg_counting", {"size": 401}, model).content_hash()
