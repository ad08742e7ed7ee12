"""Scores of mathematical answers: what the answer is, and whether math-verify finds it equal to the reference.

math-verify's own timeouts work in a main thread alone: elsewhere it returns nothing, and they cannot stop arithmetic
that runs inside one C call. So formulas are compared in processes (`math_worker`) that a timer ends; plain integers
are compared here, which is most of GSM8K, DAPO and AIME.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

from harness.tasks.contract import Score
from harness.tasks.verl_rules import RULES

WORKER = Path(__file__).with_name("math_worker.py")
TAIL = 2000
"""Characters at the end of a response in which a final answer in prose is looked for."""
INTEGER = re.compile(r"[-+]?\d+")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_NUMBER = re.compile(r"-?\$?-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` (or `\fbox`) whose braces close; None if there is none."""
    found = _last_box(text)
    return None if found is None else found[1]


def _last_box(text: str) -> tuple[int, str] | None:
    """(where it begins, content) of the last box whose braces close."""
    for match in reversed(list(_BOX.finditer(text))):
        depth = 1
        for end in range(match.end(), len(text)):
            is_escaped = text[end - 1] == "\\"
            depth += 0 if is_escaped else (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                return match.start(), text[match.end() : end]
    return None


def last_hashed(text: str) -> str | None:
    """Answer that GSM8K writes after its last `####`: its first word if a number, else the line, without the asterisks
    of bold type around it. None if there is none."""
    _, mark, rest = text.rpartition("####")
    line = rest.strip().split("\n")[0].strip("* \t\r")
    if not mark or not line.strip():  # of other blanks than those above
        return None
    word = line.split()[0].rstrip(".,;:")
    return word.replace("$", "").replace(",", "") if _NUMBER.fullmatch(word) else line


def extract_answer(text: str) -> tuple[str, bool]:
    """(answer, True) from a box or a `####` line, whichever comes last; else (the end of the text, False)."""
    box, hashed = _last_box(text), last_hashed(text)
    if box is not None and (hashed is None or box[0] >= text.rfind("####")):
        return box[1].strip(), True
    return (hashed, True) if hashed is not None else (text[-TAIL:], False)


def compare_integers(reference: str, answer: str) -> Score | None:
    """The score where both are plain integers (thousands separators allowed), else None: a formula to be compared."""
    ours, theirs = (_THOUSANDS.sub("", text.strip().lstrip("$")) for text in (reference, answer))
    if not (INTEGER.fullmatch(ours) and INTEGER.fullmatch(theirs)) or len(theirs) > 1000:
        return None
    return Score(float(int(ours) == int(theirs)), True)


Rule = Literal["own", "verl_gsm8k", "verl_gsm8k_flexible", "dapo", "math_verify", "answer_tag"]
"""own: the box or the `####` line, whichever comes last, by math-verify; the others are those of verl
(`harness.tasks.verl_rules`, `harness.tasks.math_worker`)."""


def voted(score: Score, reference: str, answer: str | None) -> str | None:
    """The vote of an answer: all right ones vote for the reference, wrong ones for their own text without blanks and
    thousands separators. None where the answer could not be read, or is prose that no mark sets off."""
    if score.reward >= 1.0:
        return reference
    return _THOUSANDS.sub("", "".join(answer.split())) if answer is not None and score.is_parsable else None


class MathGrader:
    """Owns the grading processes; they start when a formula first needs them and end with it."""

    def __init__(self, num_workers: int | None = None, timeout_s: float = 3.0, rule: Rule = "own") -> None:
        """`timeout_s` is CPU seconds per answer; wall-clock time may be ten times that."""
        self.rule: Rule = rule
        self.num_workers = num_workers or min(8, os.cpu_count() or 1)
        self.timeout_s = timeout_s
        self.num_killed = 0
        """Answers that ended their process: too slow, or too large."""
        self._idle: SimpleQueue[list[subprocess.Popen[str]]] = SimpleQueue()
        self._slots: list[list[subprocess.Popen[str]]] = [[] for _ in range(self.num_workers)]
        for slot in self._slots:
            self._idle.put(slot)
        self._threads = ThreadPoolExecutor(self.num_workers, thread_name_prefix="math-grader")
        self._stop = weakref.finalize(self, _end, self._slots, self._threads)

    def grade(self, references: Sequence[str], texts: Sequence[str]) -> list[Score]:
        """One score per pair. An answer that hangs, or takes its process down, is unparsable. Any thread may call."""
        if self.rule in RULES:
            return [_by_text(self.rule, reference, text) for reference, text in zip(references, texts, strict=True)]
        stated = [extract_answer(text) for text in texts]
        known = [self._at_once(reference, *read) for reference, read in zip(references, stated, strict=True)]
        is_own = self.rule == "own"
        asked = [
            (reference, answer if is_own else text, is_extracted)
            for score, reference, text, (answer, is_extracted) in zip(known, references, texts, stated, strict=True)
            if score is None
        ]
        graded = iter(list(self._threads.map(self._ask, asked)))
        found = [next(graded) if score is None else score for score in known]
        return [
            replace(score, answer=voted(score, reference, answer if is_extracted else None))
            for score, reference, (answer, is_extracted) in zip(found, references, stated, strict=True)
        ]

    def _at_once(self, reference: str, answer: str, is_extracted: bool) -> Score | None:
        """The score that needs no process; None where one must grade."""
        if self.rule == "math_verify":
            return None
        if not answer.strip():
            return Score(0.0, False)
        return compare_integers(reference, answer) if is_extracted else None

    def close(self) -> None:
        """End the processes. Grading again is an error."""
        self._stop()

    def _ask(self, request: tuple[str, str, bool]) -> Score:
        slot = self._idle.get()
        try:
            if slot and slot[0].poll() is not None:
                slot.clear()
            if not slot:
                slot.append(_start(self.timeout_s, self.rule))
            line = _exchange(slot[0], json.dumps(request))
            if line:
                reward, is_parsable = json.loads(line)
                return Score(reward, is_parsable)
            slot.pop().wait()
            self.num_killed += 1
            return Score(0.0, False)
        finally:
            self._idle.put(slot)


def _by_text(rule: Rule, reference: str, text: str) -> Score:
    """The score by one of verl's rules that compare text."""
    is_right, answer = RULES[rule](text, reference)
    score = Score(float(is_right), answer is not None)
    return replace(score, answer=voted(score, reference, answer))


def _start(timeout_s: float, rule: str) -> subprocess.Popen[str]:
    """A worker that has said it is ready. RuntimeError with its complaint if it does not."""
    # -P: this folder must not come before the installed packages on the module path.
    command = [sys.executable, "-P", str(WORKER), str(timeout_s), rule]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8",
        process_group=0,  # Ctrl-C is for the run, which then ends its processes
    )  # fmt: skip
    assert process.stdout is not None
    if process.stdout.readline().strip() != "ready":
        raise RuntimeError(f"the math grading process ended with status {process.wait()}: see its message above")
    return process


def _exchange(process: subprocess.Popen[str], line: str) -> str:
    """The process's answer to a line; empty if it died."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    return process.stdout.readline()


def _end(slots: list[list[subprocess.Popen[str]]], threads: ThreadPoolExecutor) -> None:
    for process in (process for slot in slots for process in slot):
        process.kill()
        process.communicate()
    threads.shutdown(wait=False)
