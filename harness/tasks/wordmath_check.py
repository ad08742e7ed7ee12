"""Checks of a `wordmath` response: the final answer, the whole path, and what goes wrong first.

The path is right where every sentence says what the demonstrated solution says, in its order, in any of the wordings.
Text is compared, nothing is evaluated. Left out: rewards (`harness.tasks.wordmath`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Literal, get_args

from harness.models.tokenizer import EOS_ID
from harness.tasks.wordmath_language import (
    DIFFERENCE,
    GIVEN,
    NUMBER_PATTERN,
    SIGNS,
    SUM,
    WORDS,
    Layout,
    readers,
    sentences,
)  # fmt: skip
from harness.tasks.wordmath_problems import Step, applied, read_chain

Failure = Literal["plan", "operation", "operand", "constant", "arithmetic", "form"]
"""First mistake in a response:

    plan        a plan line names other quantities than those that are needed next, or a line is missing or too many
    operation   a calculation uses another operation than the statement says
    operand     a calculation is about another quantity, or starts from or takes in another quantity's value
    constant    a number of the problem's text is copied wrongly
    arithmetic  the result is not what the calculation gives, or is not copied as it was found
    form        a sentence that is none of the known ones, calculations missing or too many, no answer, no end
"""
FAILURES: tuple[str, ...] = get_args(Failure)

_chain = lru_cache(maxsize=4096)(read_chain)
_readers = cache(readers)


def stated_answer(response: Sequence[int], layout: Layout) -> str | None:
    """The number that stands alone between `####` and EOS at the response's end, as text; None where there is none."""
    if not response or response[-1] != EOS_ID:
        return None
    rest = sentences(response)[1]
    found = re.fullmatch(f"#### ({NUMBER_PATTERN[layout]})", rest)
    return None if found is None else found[1]


def failure(reference: str, response: Sequence[int], layout: Layout) -> Failure | None:
    """First mistake in a response to the problem whose chain is `reference` (`wordmath_problems.written`);
    None where the whole path is right. A response is token ids without padding, its EOS included if sampled."""
    chain = _chain(reference)
    lines, _ = sentences(response)
    plans, steps = _readers(layout)
    planned = list(reversed(chain[1:])) if layout == "shuffled" else []
    for number, step in enumerate(planned):
        said = _match(plans, lines[number]) if number < len(lines) else None
        if said is None:
            is_step = number < len(lines) and _match(steps, lines[number]) is not None
            return "plan" if is_step else "form"
        if said != _planned(step):
            return "plan"
    calculations = lines[len(planned) :]
    before = 0
    for number, step in enumerate(chain):
        said = _match(steps, calculations[number]) if number < len(calculations) else None
        if said is None:
            is_plan = number < len(calculations) and _match(plans, calculations[number]) is not None
            return "plan" if is_plan else "form"
        if wrong := _wrong_step(step, said, before):
            return wrong
        before = step.value
    if len(calculations) > len(chain):
        return "form"
    answer = stated_answer(response, layout)
    return "form" if answer is None else None if _number(answer) == before else "arithmetic"


def _match(patterns: Sequence[re.Pattern[str]], line: str) -> dict[str, str] | None:
    for pattern in patterns:
        if found := pattern.fullmatch(line):
            return found.groupdict()
    return None


def _planned(step: Step) -> dict[str, str]:
    """Names that a plan line for `step` must have."""
    names = {"who": step.who, "what": step.what, "from_who": step.from_who, "from_what": step.from_what}
    if step.op in (SUM, DIFFERENCE):
        names |= {"other_who": step.other_who, "other_what": step.other_what}
    return {slot: WORDS[word] for slot, word in names.items()}


def _wrong_step(step: Step, said: Mapping[str, str], before: int) -> Failure | None:
    """Mistake in one calculation; `before` is the value that it must start from."""
    if said["who"] != WORDS[step.who] or said.get("what", WORDS[step.what]) != WORDS[step.what]:
        return "operand"
    if (step.op == GIVEN) != ("sign" not in said):
        return "operation"
    number = _number(said["number"])
    if step.op == GIVEN:
        return None if number == step.number else "constant"
    if said["sign"] != SIGNS[step.op]:
        return "operation"
    if _number(said["first"]) != before:
        return "operand"
    if number != step.number:
        return "operand" if step.op in (SUM, DIFFERENCE) else "constant"
    values = {_number(said[slot]) for slot in ("value", "value_again") if slot in said}
    return None if values == {applied(step.op, before, number)} else "arithmetic"


def _number(text: str) -> int:
    return int(text.replace(" ", ""))
