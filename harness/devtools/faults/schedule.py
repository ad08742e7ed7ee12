"""What strikes which cell at which moment: a function of the seed and the round alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.devtools.faults.journal import Fault
from harness.foundation.seeds import stable_seed

FORMS: dict[str, tuple[str, ...]] = {
    "kill": ("import", "build", "step", "saving", "saved", "series", "half", "recorded"),
    "kill_sweep": ("build", "step", "saved", "late"),
    "memory": ("MemoryError", "OutOfMemoryError", "allocator", "limit"),
    "nan": ("loss", "gradient", "logp", "weight", "last"),
    "disk": ("state limit", "state volume", "record limit", "record volume"),
    "hang": ("stop", "sleep"),
    "state": ("truncated", "flipped", "empty", "foreign"),
    "prepared": ("flipped", "truncated"),
    "base": ("flipped", "truncated", "recipe"),
    "record": ("garbage", "empty", "foreign", "other", "truncated", "series", "lost series"),
    "mlflow": ("refused", "error", "dies", "silent"),
    "twin": ("at once",),
}
"""Kind -> its forms. Of `kill` and `kill_sweep` the form is the moment."""
WEIGHTS = {
    "kill": 8, "kill_sweep": 4, "memory": 4, "nan": 3, "disk": 6, "hang": 3, "state": 6,
    "prepared": 1, "base": 2, "record": 8, "mlflow": 2, "twin": 2,
}  # fmt: skip
"""How often a kind is dealt."""
IN_CELL = ("kill", "kill_sweep", "memory", "nan", "disk", "hang", "state")
"""Kinds that a cell's own process brings about; the others come from beside the sweep."""
AT_RECORD = ("series", "half", "recorded", "late", "record limit", "record volume")
"""Forms that strike when the record is written."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """The faults of one round."""

    cells: tuple[tuple[Fault, ...], ...]
    """Per cell, in the order in which they may strike."""
    beside: tuple[Fault, ...]
    """Faults from beside, in the order of the sweep's starts."""


def deal(kinds: Sequence[str], seed: int) -> Iterator[tuple[str, str]]:
    """Endless (kind, form): shuffled decks in which every kind has its weight; forms of a kind take turns."""
    turns = dict.fromkeys(kinds, 0)
    for number in range(1_000_000):
        deck = [kind for kind in kinds for _ in range(WEIGHTS[kind] if number else 1)]
        random.Random(stable_seed(seed, "faults", number)).shuffle(deck)
        for kind in deck:
            yield kind, FORMS[kind][turns[kind] % len(FORMS[kind])]
            turns[kind] += 1


def plan_round(dealt: Iterator[tuple[str, str]], seed: int, number: int, cells: int, steps: int, size: int) -> Round:
    """The next `size` faults over `cells` cells of `steps` steps each, most endings first used up by no single cell."""
    dice = random.Random(stable_seed(seed, "fault round", number))
    hands: list[list[tuple[str, str]]] = [[] for _ in range(cells)]
    beside: list[tuple[str, str]] = []
    for kind, form in (next(dealt) for _ in range(size)):
        if kind not in IN_CELL:
            beside.append((kind, form))
            continue
        free = [hand for hand in hands if kind != "nan" or all(other != "nan" for other, _ in hand)] or hands
        least = min(len(hand) for hand in free)
        dice.choice([hand for hand in free if len(hand) == least]).append((kind, form))
    order = sorted(range(len(beside)), key=lambda i: (beside[i][0] not in ("base", "prepared"), dice.random()))
    return Round(
        cells=tuple(tuple(_ordered(hand, f"{number}.{i}", steps, dice)) for i, hand in enumerate(hands)),
        beside=tuple(Fault(id=f"{number}.b{i}", kind=beside[j][0], form=beside[j][1]) for i, j in enumerate(order)),
    )


def _ordered(hand: list[tuple[str, str]], prefix: str, steps: int, dice: random.Random) -> Iterator[Fault]:
    """A cell's faults: by step, then those of the record; a divergence ends the cell and so comes last of all."""
    nan = next((form for kind, form in hand if kind == "nan"), None)
    rest = [(kind, form) for kind, form in hand if kind != "nan"]
    if nan is not None:  # a cell that diverges writes one record, and no weights before the last step
        rest = [(kind, "step" if form in AT_RECORD and kind != "disk" else form) for kind, form in rest]
    dice.shuffle(rest)
    rest.sort(key=lambda one: (one[1] in AT_RECORD) + (one[1] == "recorded"))
    for i, (kind, form) in enumerate(rest):
        step = 1 + (i + 1) * (steps - 2) // (len(rest) + 1)
        is_first = kind == "state" or form in ("import", "build")  # strikes before the first step
        yield Fault(id=f"{prefix}.{i}", kind=kind, form=form, step=0 if is_first else min(step, steps - 2))
    if nan is not None:
        yield Fault(id=f"{prefix}.nan", kind="nan", form=nan, step=steps - 1 if nan == "last" else steps - 2)
