"""The grading process: reads one JSON request per line, answers one JSON line, runs math-verify with its timeouts off.

Started by `math_reward` as a script, so it imports nothing of this package. A request that overruns its time ends the
process by an alarm whose default action is to kill: it also stops arithmetic inside one C call, where no Python
handler would run. Memory is bounded. Model output is parsed, never executed: math-verify turns LaTeX into sympy by a
grammar, and hands Python's own parser only strings of digits and the operators + - * / ^ ( ).
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import resource
import signal
import sys
from functools import cache
from typing import Any

MEMORY_BYTES = 4 << 30
WALL_PER_CPU = 10
"""Wall-clock limit over CPU limit: a busy machine must not turn right answers into unparsable ones."""


def grade(reference: str, answer: str, is_extracted: bool) -> tuple[float, bool]:
    """(reward, is_parsable). `answer` is the content of a box, or else prose to search for a stated final answer.

    Parsable: equal to the reference as text, or a value that sympy knows. A fragment math-verify only quotes is not.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    if is_extracted:
        if _unspaced(answer) == _unspaced(reference):
            return 1.0, True
        found = _parse_formula(answer)
    else:
        anchored = (LatexExtractionConfig(try_extract_without_anchor=False), ExprExtractionConfig(False))
        found = parse(answer, anchored, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    if verify(_parse_reference(reference), found, timeout_seconds=None):
        return 1.0, True
    return 0.0, any(not isinstance(value, str) for value in found)


@cache
def _parse_reference(reference: str) -> list[Any]:
    return _parse_formula(reference)


def _parse_formula(text: str) -> list[Any]:
    """Sympy values of one formula, then its text. As inline LaTeX, where alone a percent sign is understood."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    inline = "$" + re.sub(r"(?<!\\)\$", "", text).replace("\n", " ") + "$"
    configs = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    return parse(inline, configs, parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def grade_as_verl(reference: str, answer: str, is_extracted: bool) -> tuple[float, bool]:
    """(reward, is_parsable) by verl's rule (verl/utils/reward_score/math_verify.py of verl 0.9.1): the reference in a
    box, any value of `answer` against any of the reference's. `answer` is the whole response."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    gold = parse("\\boxed{" + reference + "}", (LatexExtractionConfig(),), parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    targets = (ExprExtractionConfig(), LatexExtractionConfig())
    found = parse(answer, targets, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    is_right = any(verify(g, value, timeout_seconds=None) for value in found for g in gold)
    return float(is_right), bool(found)


GRADERS = {"own": grade, "math_verify": grade_as_verl}
"""Functions that a process grades with, by the name of the rule."""


def _unspaced(text: str) -> str:
    return re.sub(r"\s+", "", text)


def serve(timeout_s: float, rule: str = "own") -> None:
    """Answer requests [reference, answer, is_extracted] from stdin until it closes."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever a library prints must not look like an answer
    import math_verify  # noqa: F401 - the import takes a second and is no request's fault

    logging.disable(logging.WARNING)
    with contextlib.suppress(ValueError, OSError):  # a stricter limit is in force, or the system has none
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, timeout_s)
        signal.setitimer(signal.ITIMER_REAL, timeout_s * WALL_PER_CPU)
        try:
            result = GRADERS[rule](*json.loads(line))
        except (MemoryError, RecursionError):
            result = (0.0, False)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    serve(float(sys.argv[1]), *sys.argv[2:])
