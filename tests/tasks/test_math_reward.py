"""Math scores: extraction, equality, unparsable apart from wrong, and answers that hang or explode."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from harness.tasks import Score
from harness.tasks.math_reward import MathGrader, compare_integers, extract_answer, last_boxed, last_hashed
from harness.tasks.math_worker import grade

ROOT = Path(__file__).parents[2]
RIGHT, WRONG, UNPARSABLE = Score(1.0, True), Score(0.0, True), Score(0.0, False)
ENDLESS = r"\boxed{9^{9^{9^{9}}}}"


@pytest.fixture(scope="module")
def grader():
    owner = MathGrader(num_workers=2, timeout_s=10.0)
    yield owner
    owner.close()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed {3}", "3"),
        (r"\fbox{4}", "4"),
        (r"\boxed{7} and cut off \boxed{\frac{1", "7"),
        (r"\boxed{", None),
        ("no box {5}", None),
        ("", None),
    ],
)
def test_last_boxed(text, answer):
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("5 - 2 = 3\n#### 3", "3"),
        ("#### 1\n#### 1,234", "1234"),
        ("#### $1,250.50 in total", "1250.50"),
        ("#### -$3", "-3"),
        ("#### -7\nThat is all 8.", "-7"),
        ("####5 dollars.", "5"),
        ("#### **18**", "18"),
        ("**#### 18**", "18"),
        ("#### **\\frac12**\nso", "\\frac12"),
        ("#### **", None),
        ("#### 12.", "12"),
        ("#### 1/2", "1/2"),
        ("#### x + 1", "x + 1"),
        ("####", None),
        ("3", None),
        ("#### *\u3000*", None),
    ],
)
def test_last_hashed(text, answer):
    assert last_hashed(text) == answer


def test_the_later_of_box_and_hashes_is_the_answer():
    assert extract_answer("#### 3\n" + r"\boxed{4}") == ("4", True)
    assert extract_answer(r"\boxed{4}" + "\n#### 3") == ("3", True)
    assert extract_answer("#### 3\n" + r"\fbox{4}") == ("4", True)
    assert extract_answer(r"\boxed{4} #### 3 \boxed{5") == ("3", True)  # the last box is cut off
    assert extract_answer("x" * 3000 + "the answer is 5") == ("x" * 1985 + "the answer is 5", False)


def test_integers_are_compared_without_sympy():
    assert compare_integers("1234", "1,234") == RIGHT
    assert compare_integers("1234", " $1234 ") == RIGHT
    assert compare_integers("007", "7") == RIGHT
    assert compare_integers("-5", "5") == WRONG
    assert compare_integers("12", "1,2") is None
    assert compare_integers("5", "5.0") is None
    assert compare_integers("5", "9" * 1001) is None


CASES = [
    ("72", r"\boxed{72.0}", RIGHT),
    ("72", r"\boxed{73}", WRONG),
    ("72", "#### 72", RIGHT),
    ("1250.5", "#### $1,250.50", RIGHT),
    (r"\frac{1}{2}", r"thus \boxed{0.5}", RIGHT),
    (r"\frac{1}{2}", r"\boxed{\frac{2}{4}}", RIGHT),
    (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}", WRONG),
    (r"\frac{1}{2}", r"\boxed{1/2}", RIGHT),
    (r"(x+1)^2", r"\boxed{x^2+2x+1}", RIGHT),
    (r"(x+1)^2", r"\boxed{x^2+2x}", WRONG),
    (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3,\pi/2)}", RIGHT),
    (r"10\%", r"\boxed{10}", RIGHT),
    (r"\$32,348", r"\boxed{32348}", RIGHT),
    (r"90^\circ", r"\boxed{90}", RIGHT),
    (r"\text{Evelyn}", r"\boxed{Evelyn}", RIGHT),
    (r"\text{Evelyn}", r"\boxed{Bob}", WRONG),
    ("5", "Therefore the final answer is 5. I hope it is correct.", RIGHT),
    ("34", "Answer: $34$", RIGHT),
    ("34", "Answer: $35$", WRONG),
    ("5", "and so we get 5", UNPARSABLE),
    ("5", "", UNPARSABLE),
    ("5", r"\boxed{}", UNPARSABLE),
    ("5", r"\boxed{?}", UNPARSABLE),
    ("5", r"\boxed{\frac{5", UNPARSABLE),
]


def test_scores(grader):
    scores = grader.grade([case[0] for case in CASES], [case[1] for case in CASES])
    assert [(case, score) for case, score in zip(CASES, scores, strict=True) if score != case[2]] == []


def test_scores_from_another_thread_are_the_same(grader):
    """A thread other than the main one, where math-verify's own timeouts would make it return nothing."""
    found = []
    thread = threading.Thread(target=lambda: found.extend(grader.grade([r"\frac{1}{2}"] * 3, [r"\boxed{0.5}"] * 3)))
    thread.start()
    thread.join()
    assert found == [RIGHT] * 3


def test_a_hanging_answer_ends_only_its_process():
    owner = MathGrader(num_workers=2, timeout_s=1.0)
    try:
        assert owner.grade(["x"], [r"\boxed{x}"]) == [RIGHT]
        start = time.monotonic()
        scores = owner.grade(["x+1"] * 5, [ENDLESS, r"\boxed{1+x}", r"\boxed{x}", ENDLESS, r"\boxed{x+1}"])
        assert scores == [UNPARSABLE, RIGHT, WRONG, UNPARSABLE, RIGHT]
        assert owner.num_killed == 2
        assert time.monotonic() - start < 60
    finally:
        owner.close()


def test_a_killed_process_costs_one_answer():
    owner = MathGrader(num_workers=1)
    try:
        assert owner.grade(["x"], [r"\boxed{y}"]) == [WRONG]
        (process,) = owner._slots[0]
        os.kill(process.pid, signal.SIGSTOP)
        killer = threading.Timer(0.2, process.kill)
        killer.start()
        assert owner.grade(["x", "x+x"], [r"\boxed{1x}", r"\boxed{2x}"]) == [UNPARSABLE, RIGHT]
        (second,) = owner._slots[0]
        second.kill()
        second.wait()
        assert owner.grade(["x+x"], [r"\boxed{2x}"]) == [RIGHT]  # found dead before it was asked: nothing lost
    finally:
        owner.close()
    assert process.poll() is not None


def test_ctrl_c_is_for_the_run_alone():
    """A terminal sends it to the whole group, where every grading process would print a traceback."""
    code = (
        "import os, signal, time; from harness.tasks.math_reward import MathGrader; owner = MathGrader(1); "
        "ask = lambda: owner.grade(['x+x'], [r'\\boxed{2x}'])[0].reward; ask(); "
        "signal.signal(signal.SIGINT, signal.SIG_IGN); os.killpg(0, signal.SIGINT); time.sleep(1); "
        "print(ask(), owner.num_killed, owner._slots[0][0].poll()); owner.close()"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, start_new_session=True, cwd=ROOT
    )
    assert (told.stdout, told.stderr) == ("1.0 0 None\n", "")


def test_model_output_is_never_executed(grader, tmp_path):
    mark = tmp_path / "executed"
    code = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    texts = [rf"\boxed{{{code}}}", f"#### {code}", f"The final answer is {code}. I hope", rf"\boxed{{\text{{{code}}}}}"]
    texts += [f"Answer: ({code})", f"$ {code} $", f"Answer: 1+({code})"]
    assert all(score.reward == 0 for score in grader.grade(["5"] * len(texts), texts))
    assert not mark.exists()


def test_the_process_keeps_its_protocol_when_a_library_prints():
    code = (
        "import builtins, runpy, sys; loud = builtins.__import__; sys.argv = ['worker', '10']; "
        "builtins.__import__ = lambda name, *a, **k: "
        "(name == 'math_verify' and print('noise'), loud(name, *a, **k))[1]; "
        f"runpy.run_path({WORKER!r}, run_name='__main__')"
    )
    request = '["5", "4+1", true]\n["5", "6", true]\n'
    told = subprocess.run([sys.executable, "-c", code], input=request, capture_output=True, text=True, check=True)
    assert "noise" in told.stderr
    assert told.stdout.split("\n") == ["ready", "[1.0, true]", "[0.0, true]", ""]


WORKER = str(ROOT / "harness" / "tasks" / "math_worker.py")


def test_worker_function_directly():
    assert grade(r"\frac{3}{56}", r"The answer is $\frac{3}{56}$.", False) == (1.0, True)
    assert grade("5", "?", True) == (0.0, False)
    assert grade("a b", "ab", True) == (1.0, True)


def test_close_ends_the_processes():
    owner = MathGrader(num_workers=2)
    owner.grade(["x"] * 4, [r"\boxed{2x}"] * 4)
    processes = [process for slot in owner._slots for process in slot]
    assert processes and all(process.poll() is None for process in processes)
    owner.close()
    assert all(process.poll() is not None for process in processes)
