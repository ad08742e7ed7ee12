"""Random word problems of `wordmath`, and solutions written out for them.

A quantity is (name, item). A chain of n quantities: the first is given, each later one follows from the one before by
adding or taking away a constant, twice, thrice, half, or the sum or difference with another known quantity. Statements
that nobody needs stand between those of the chain. The layouts:

    shuffled   all statements in any order; the solution first plans backwards from the question, then calculates
    ordered    the chain in its order, small numbers, no second quantities, no plan: for models of a laptop

Only `rng.random()` is drawn from: a problem is the same on every Python version. Left out: seeds and splits
(`harness.tasks.wordmath`).
"""

from __future__ import annotations

import hashlib
import random
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain as joined
from typing import NamedTuple

from harness.models.tokenizer import BOS_ID, EOS_ID
from harness.tasks.wordmath_language import (
    ADD,
    ANSWER,
    DIFFERENCE,
    DOUBLE,
    GIVEN,
    HALVE,
    ID,
    LIMITS,
    LINK_ENDS,
    LINKS,
    NUMBERS,
    OPS,
    PLANS,
    QUESTION,
    SIGNS,
    SLOTS,
    START,
    STATEMENTS,
    STEPS,
    SUBTRACT,
    SUM,
    TRIPLE,
    WORDS,
    Form,
    Layout,
    choose,
    render,
)  # fmt: skip

REUSE = 0.12
"""Share of quantities whose name stands in the problem already, with another item. Where most names do, nothing is
learnt."""
RECENT = 0.4
"""Share of second quantities that were stated on their own, and are none of the chain."""
SHARES = {
    "shuffled": (
        (0.27, 0.54, 0.61, 0.66, 0.72, 0.86, 1.0),
        (ADD, SUBTRACT, DOUBLE, TRIPLE, HALVE, SUM, DIFFERENCE),
    ),
    "ordered": ((0.4, 0.8, 0.9, 1.0), (ADD, SUBTRACT, DOUBLE, HALVE)),
}
"""Cumulative probabilities of the operations; one that does not fit the value is drawn again."""
MOST = {"shuffled": (2, 98), "ordered": (1, 9)}
"""(least, number of values) of constants and of given numbers."""
_SUMS, _DIFFERENCES, _CONSTANTS = frozenset((ADD, SUM)), frozenset((SUBTRACT, DIFFERENCE)), frozenset((ADD, SUBTRACT))
_SIGN_IDS = tuple((ID[sign],) if sign else () for sign in SIGNS)


class Step(NamedTuple):
    """A quantity and how it comes about. Names and items are token ids; 0 where there is none."""

    who: int
    what: int
    op: int
    number: int
    """The constant, the factor, the other quantity's value, or the given number."""
    from_who: int
    from_what: int
    other_who: int
    other_what: int
    value: int


class Problem(NamedTuple):
    """Statements in the order of the prompt, and the chain from the given quantity to the one that is asked for."""

    statements: list[Step]
    chain: list[Step]
    key: str
    """Hash of what is stated and asked, whatever the order and the wording."""


class Rules(NamedTuple):
    """Rules by which a problem is made."""

    n: int
    layout: Layout
    distractors: int | None
    """Statements that nobody needs; None: 1 to n / 2."""
    names: Sequence[int]
    items: Sequence[int]


def draw_problem(rng: random.Random, rules: Rules) -> Problem:
    """A random problem."""
    r = rng.random
    is_shuffled = rules.layout == "shuffled"
    take = _quantities(rng, rules)
    leaves = [_given(rng, rules, next(take)) for _ in range(1 + rules.n // 5)] if is_shuffled else []
    chain = [_given(rng, rules, next(take))]
    while len(chain) < rules.n:
        early = len(chain) < 3 or r() < RECENT
        others = leaves if early else chain[:-1] + leaves
        chain.append(_derived(rng, rules, chain[-1], others, next(take)))
    statements = leaves + chain
    count = 1 + int(r() * rules.n / 2) if rules.distractors is None else rules.distractors
    for _ in range(count):
        known = statements if is_shuffled else chain
        source = known[int(r() * len(known))]
        extra = _derived(rng, rules, source, leaves, next(take))
        if is_shuffled:
            statements.append(extra)
        else:
            statements.insert(int(r() * (len(statements) + 1)), extra)
    key = _key(statements, chain[-1])
    if is_shuffled:
        for i in range(len(statements) - 1, 0, -1):
            j = int(r() * (i + 1))
            statements[i], statements[j] = statements[j], statements[i]
    return Problem(statements, chain, key)


def _quantities(rng: random.Random, rules: Rules) -> Iterator[tuple[int, int]]:
    """New quantities (name, item) without end, each once."""
    r, names, items = rng.random, rules.names, rules.items
    is_shuffled, num_names = rules.layout == "shuffled", len(rules.names)
    num_items = 3 + int(r() * (3 + rules.n // 12)) if is_shuffled else 1
    some = [items[int(r() * len(items))] for _ in range(num_items)]
    used, order, seen = set[int](), list[int](), set[tuple[int, int]]()
    while True:
        if order and is_shuffled and r() < REUSE:
            name = order[int(r() * len(order))]
        else:
            name = names[int(r() * num_names)]
            if name in used:
                continue
        quantity = (name, some[int(r() * num_items)])
        if quantity not in seen:
            seen.add(quantity)
            if name not in used:
                used.add(name)
                order.append(name)
            yield quantity


def _given(rng: random.Random, rules: Rules, quantity: tuple[int, int]) -> Step:
    least, count = MOST[rules.layout]
    value = least + int(rng.random() * count * (1 if rules.layout == "shuffled" else 2))
    return Step(*quantity, GIVEN, value, 0, 0, 0, 0, value)


def _derived(rng: random.Random, rules: Rules, source: Step, others: Sequence[Step], quantity: tuple[int, int]) -> Step:
    """A step from `source` to `quantity`, where need be with one of `others`."""
    r, limit, value = rng.random, LIMITS[rules.layout], source.value
    ends, ops = SHARES[rules.layout]
    least, count = MOST[rules.layout]
    other_who = other_what = 0
    while True:
        op = ops[bisect_right(ends, r())]
        if op in _CONSTANTS:
            number = least + int(r() * count)
        elif op >= SUM:
            other = others[int(r() * len(others))]
            if other.who == source.who and other.what == source.what:
                continue
            number, other_who, other_what = other.value, other.who, other.what
        else:
            number = 3 if op == TRIPLE else 2
        result = applied(op, value, number)
        if result is not None and 0 <= result <= limit:
            break
        other_who = other_what = 0
    return Step(*quantity, op, number, source.who, source.what, other_who, other_what, result)


def applied(op: int, value: int, number: int) -> int | None:
    """Result of an operation on a value and a number; None where it has no whole result."""
    if op in _SUMS:
        return value + number
    if op in _DIFFERENCES:
        return value - number
    if op == HALVE:
        return value // number if value and value % number == 0 else None
    return value * number


def _key(statements: Sequence[Step], asked: Step) -> str:
    stated = [
        (who, what, op, 0 if op >= SUM else number, from_who, from_what, other_who, other_what)
        for who, what, op, number, from_who, from_what, other_who, other_what, _ in statements
    ]
    stated.sort()
    content = array("h", joined.from_iterable(stated))
    content.extend(asked[:2])
    return hashlib.blake2b(content.tobytes(), digest_size=8).hexdigest()


def prompt_of(rng: random.Random, problem: Problem, layout: Layout) -> list[int]:
    """Token ids of a problem's statements and its question."""
    out, numbers = [BOS_ID], NUMBERS[layout]
    for who, what, op, number, from_who, from_what, other_who, other_what, _ in problem.statements:
        slots = ((who,), (what,), numbers[number], (from_who,), (from_what,), (other_who,), (other_what,))
        render(choose(STATEMENTS[op], rng.random()), slots, out)
    asked = problem.chain[-1]
    render(QUESTION, ((asked.who,), (asked.what,)), out)
    return out


def solution_of(rng: random.Random, chain: Sequence[Step], layout: Layout) -> list[int]:
    """Token ids of one of the right responses, EOS included: plan (not in the ordered layout), calculations, answer."""
    r, out, numbers = rng.random, list[int](), NUMBERS[layout]
    names = [
        ((who,), (what,), numbers[number], (from_who,), (from_what,), (other_who,), (other_what,))
        for who, what, _, number, from_who, from_what, other_who, other_what, _ in chain
    ]
    if layout == "shuffled":
        for i in range(len(chain) - 1, 0, -1):
            render(choose(PLANS[chain[i].op >= SUM], r()), names[i], out)
    before = 0
    for s, slots in zip(chain, names, strict=True):
        link = LINKS[bisect_right(LINK_ENDS, r())]
        filled = (*slots, numbers[before], _SIGN_IDS[s.op], numbers[s.value], link)
        render(START if s.op == GIVEN else choose(STEPS, r()), filled, out)
        before = s.value
    return [*out, ANSWER, *numbers[before], EOS_ID]


def longest_solution(n: int, layout: Layout) -> int:
    """Tokens of the longest response that `solution_of` can give to a chain of n, EOS included."""
    digits = len(NUMBERS[layout][-1])
    plan = max(_length(form, digits) for _, form in PLANS[1]) if layout == "shuffled" else 0
    step = max(_length(form, digits) for _, form in STEPS)
    return (n - 1) * (plan + step) + _length(START, digits) + digits + 2


def _length(form: Form, digits: int) -> int:
    pairs, end = form
    numbers = {SLOTS.index(slot) for slot in ("number", "first", "value")}
    return len(end) + sum(len(run) + (digits if slot in numbers else 1) for run, slot in pairs)


def written(chain: Sequence[Step]) -> str:
    """A chain as text, one step per semicolon: `Balan pears add 5 from Dorik pears = 12`."""
    found: list[str] = []
    for s in chain:
        names = f"{WORDS[s.who]} {WORDS[s.what]} {OPS[s.op]} {s.number}"
        names += f" from {WORDS[s.from_who]} {WORDS[s.from_what]}" if s.from_who else ""
        names += f" with {WORDS[s.other_who]} {WORDS[s.other_what]}" if s.other_who else ""
        found.append(f"{names} = {s.value}")
    return "; ".join(found)


def read_chain(text: str) -> list[Step]:
    """The chain that `written` made a text of."""
    chain: list[Step] = []
    for line in text.split("; "):
        said, _, value = line.partition(" = ")
        words = said.split()
        from_who, from_what = words[5:7] if "from" in words else ("<pad>", "<pad>")
        other_who, other_what = words[8:10] if "with" in words else ("<pad>", "<pad>")
        own, sources = (ID[words[0]], ID[words[1]]), (ID[from_who], ID[from_what], ID[other_who], ID[other_what])
        chain.append(Step(*own, OPS.index(words[2]), int(words[3]), *sources, int(value)))
    return chain
