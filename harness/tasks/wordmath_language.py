"""The language of `wordmath`: its vocabulary, its wordings, and the one place where both are written down.

A wording is a template of words and slots. `render` fills one in as token ids; `reader` makes the regular expression
that reads it back out of a response. Digits are tokens of their own; the numbers up to 39 are single
tokens too, for the ordered layout. Left out: what is said (`harness.tasks.wordmath_problems`) and whether it is right
(`harness.tasks.wordmath_check`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Literal

from harness.models.tokenizer import EOS_ID, SPECIAL

SIZES = (160, 512)
"""Sizes of the vocabulary. The ids of the smaller one are the same in the larger one."""
_WORDS = """+ - * / = . , ? : #### 's has owns have does There are at house more fewer than as many twice thrice half
outnumber by and together The the number difference between of is How For To we need depends on get find first so"""
_LINKS = "So Then Thus Hence Next Now Therefore Finally"
_ITEMS = """apples pears plums books coins stamps shells cards pens cups hats rings nuts figs toys bags
keys boxes ropes bells drums flags lamps masks nails ovens pots quilts rugs socks tents urns vases wheels beads chips
dolls eggs gems hooks jars kites leaves maps owls pins roses seeds tiles vans wands axes bowls combs darts forks gloves
jugs knives"""
NUM_FEW_ITEMS, NUM_FEW_NAMES = 16, 40
"""Items and names of the smaller vocabulary."""
_NAMES = ["".join(parts) for parts in product("BDFGHJKLMNPRSTVZ", "aeiou", ("lan", "rik", "mo", "zet", "dan"))]
_SPREAD = [_NAMES[(i * 37) % len(_NAMES)] for i in range(len(_NAMES))]
"""37 is prime to 400: every name once, and neighbours differ in their first letters."""
_FEW = [*SPECIAL, *map(str, range(40)), *_WORDS.split(), *_LINKS.split(), *_ITEMS.split()[:NUM_FEW_ITEMS]]
_FEW += _SPREAD[:NUM_FEW_NAMES]
_FEW += [f"<unused{i}>" for i in range(SIZES[0] - len(_FEW))]
WORDS = (*_FEW, *_ITEMS.split()[NUM_FEW_ITEMS:], *_SPREAD[NUM_FEW_NAMES:])[: SIZES[1]]
"""The larger vocabulary, by id."""
ID = {word: i for i, word in enumerate(WORDS)}
assert len(ID) == SIZES[1] and len(_FEW) == SIZES[0]

NAMES = tuple(ID[name] for name in _SPREAD if name in ID)
ITEMS = tuple(ID[item] for item in _ITEMS.split())
ZERO = ID["0"]
Layout = Literal["shuffled", "ordered"]
LIMITS = {"shuffled": 999, "ordered": 39}
"""Largest number of a problem."""
NUMBERS = {
    "shuffled": [[ZERO + int(digit) for digit in str(value)] for value in range(LIMITS["shuffled"] + 1)],
    "ordered": [[ZERO + value] for value in range(LIMITS["ordered"] + 1)],
}
"""Token ids of every number: digit by digit, or as one token."""
NUMBER_PATTERN = {"shuffled": r"0|[1-9](?: \d){0,2}", "ordered": r"[12]?\d|3\d"}
ANSWER = ID["####"]

OPS = ("given", "add", "subtract", "double", "triple", "halve", "sum", "difference")
GIVEN, ADD, SUBTRACT, DOUBLE, TRIPLE, HALVE, SUM, DIFFERENCE = range(len(OPS))
SIGNS = ("", "+", "-", "*", "*", "/", "+", "-")
"""The sign of an operation in a calculation."""

SLOTS = (
    "who", "what", "number", "from_who", "from_what", "other_who", "other_what", "first", "sign", "value", "link",
)  # fmt: skip
Form = tuple[tuple[tuple[tuple[int, ...], int], ...], tuple[int, ...]]
"""A compiled wording: (token ids, number of the slot after them) in order, and the token ids at its end."""
Forms = tuple[tuple[float, Form], ...]
"""(cumulative probability, wording)."""


def compiled(template: str) -> Form:
    """A template such as `{who} has {number} {what} .` as token ids and slots."""
    pairs, run = list[tuple[tuple[int, ...], int]](), list[int]()
    for word in template.split():
        if word.startswith("{"):
            pairs.append((tuple(run), SLOTS.index(word[1:-1])))
            run = []
        else:
            run.append(ID[word])
    return tuple(pairs), tuple(run)


def render(form: Form, slots: Sequence[Sequence[int]], out: list[int]) -> None:
    """Append the token ids of a wording to `out`; `slots` holds the ids of every slot, in the order of SLOTS."""
    pairs, end = form
    for run, slot in pairs:
        out += run
        out += slots[slot]
    out += end


def choose(forms: Forms, chance: float) -> Form:
    """The wording that a number from [0, 1) falls on."""
    for end, form in forms:
        if chance < end:
            return form
    return forms[-1][1]


def weighted(*options: tuple[float, str]) -> Forms:
    """Wordings with their shares, which add up to 1."""
    total, found = 0.0, list[tuple[float, Form]]()
    for share, template in options:
        total += share
        found.append((total, compiled(template)))
    assert abs(total - 1) < 1e-9
    return tuple(found)


STATEMENTS: tuple[Forms, ...] = (
    weighted(
        (0.5, "{who} has {number} {what} ."),
        (0.25, "{who} owns {number} {what} ."),
        (0.25, "There are {number} {what} at {who} 's house ."),
    ),
    weighted(
        (0.7, "{who} has {number} more {what} than {from_who} has {from_what} ."),
        (0.3, "{who} 's {what} outnumber {from_who} 's {from_what} by {number} ."),
    ),
    weighted((1.0, "{who} has {number} fewer {what} than {from_who} has {from_what} .")),
    weighted((1.0, "{who} has twice as many {what} as {from_who} has {from_what} .")),
    weighted((1.0, "{who} has thrice as many {what} as {from_who} has {from_what} .")),
    weighted((1.0, "{who} has half as many {what} as {from_who} has {from_what} .")),
    weighted(
        (1.0, "{who} has as many {what} as {from_who} has {from_what} and {other_who} has {other_what} together .")
    ),
    weighted(
        (1.0, "The number of {who} 's {what} is the difference between {from_who} 's {from_what} and "
              "{other_who} 's {other_what} .")
    ),
)  # fmt: skip
"""By operation: how a problem states a quantity. The quantity that the chain goes through is always named first."""
QUESTION = compiled("How many {what} does {who} have ?")

_PLAN = (
    (0.5, "For {who} 's {what} we need {from_who} 's {from_what}{more} ."),
    (0.3, "{who} 's {what} depends on {from_who} 's {from_what}{more} ."),
    (0.2, "To get {who} 's {what} find {from_who} 's {from_what}{more} first ."),
)
PLANS: tuple[Forms, Forms] = (
    weighted(*((share, text.replace("{more}", "")) for share, text in _PLAN)),
    weighted(*((share, text.replace("{more}", " and {other_who} 's {other_what}")) for share, text in _PLAN)),
)
"""Plan lines for one quantity and for two."""
_SUM = "{first} {sign} {number} = {value}"
_STEP = (
    (0.45, "{link} {who} has " + _SUM + " {what} ."),
    (0.3, "{link} {who} 's {what} : " + _SUM + " ."),
    (0.15, "{link} the number of {who} 's {what} is " + _SUM + " ."),
    (0.1, _SUM + " , so {who} has {value} {what} ."),
)
STEPS = weighted(*_STEP)
_START = "{link} {who} has {number} {what} ."
START = compiled(_START)
LINKS = tuple([ID[word]] for word in _LINKS.split())
LINK_ENDS = (0.30, 0.50, 0.64, 0.75, 0.84, 0.91, 0.96, 1.0)
"""Cumulative shares of the words that begin a calculation: an entropy of 1.9 nats that has nothing to do with being
right."""


def reader(template: str, layout: Layout) -> re.Pattern[str]:
    """A pattern that matches a whole sentence of this wording and names what stands in its slots."""
    parts, seen = list[str](), set[str]()
    for word in template.split():
        slot = word[1:-1] if word.startswith("{") else ""
        if not slot:
            parts.append(re.escape(word))
        elif slot in seen:
            parts.append(f"(?P<{slot}_again>{NUMBER_PATTERN[layout]})")
        elif slot in ("number", "first", "value"):
            parts.append(f"(?P<{slot}>{NUMBER_PATTERN[layout]})")
        elif slot == "link":
            parts.append("(?:" + "|".join(WORDS[link[0]] for link in LINKS) + ")")
        else:
            parts.append(rf"(?P<{slot}>\S+)")
        seen.add(slot)
    return re.compile(" ".join(parts))


def readers(layout: Layout) -> tuple[list[re.Pattern[str]], list[re.Pattern[str]]]:
    """(patterns of plan lines, patterns of calculations) of a layout."""
    more = " and {other_who} 's {other_what}"
    plans = [reader(text.replace("{more}", end), layout) for _, text in _PLAN for end in (more, "")]
    return plans, [reader(text, layout) for text in (*(text for _, text in _STEP), _START)]


def text_of(ids: Iterable[int]) -> str:
    """Words joined by spaces, special tokens included. Any id of the larger vocabulary has a word."""
    return " ".join(map(WORDS.__getitem__, ids))


def sentences(response: Sequence[int]) -> tuple[list[str], str]:
    """(sentences with their full stops, what stands after the last one without its EOS) of a response as text."""
    ids = response[:-1] if response and response[-1] == EOS_ID else response
    *whole, rest = (text_of(ids) + " ").split(" . ")
    return [f"{sentence} ." for sentence in whole], rest.strip()
