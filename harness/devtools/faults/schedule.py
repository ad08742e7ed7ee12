"""The schedule of faults, by cell and step: a function of the seed and the round alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

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
"""Number of times that a kind comes in a shuffled list of kinds."""
IN_CELL = ("kill", "kill_sweep", "memory", "nan", "disk", "hang", "state")
"""Kinds that a cell's own process brings about; the others come from outside its processes."""
AT_RECORD = ("series", "half", "recorded", "late", "record limit", "record volume")
"""Forms that are injected when the record is written."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """The faults of one round."""

    cells: tuple[tuple[Fault, ...], ...]
    """Per cell, in the order in which they may be injected."""
    outside: tuple[Fault, ...]
    """Faults from outside, in the order of the sweep's starts."""


def endless(kinds: Sequence[str], seed: int) -> Iterator[tuple[str, str]]:
    """Endless (kind, form): shuffled lists in which every kind has its weight; forms of a kind take turns."""
    turns = dict.fromkeys(kinds, 0)
    for number in count():
        listed = [kind for kind in kinds for _ in range(WEIGHTS[kind] if number else 1)]
        random.Random(stable_seed(seed, "faults", number)).shuffle(listed)
        for kind in listed:
            yield kind, FORMS[kind][turns[kind] % len(FORMS[kind])]
            turns[kind] += 1


def plan_round(
    following: Iterator[tuple[str, str]], seed: int, number: int, cells: int, steps: int, size: int
) -> Round:
    """The next `size` faults of `following`, dealt out evenly over `cells` cells of `steps` steps each."""
    rng = random.Random(stable_seed(seed, "fault round", number))
    by_cell: list[list[tuple[str, str]]] = [[] for _ in range(cells)]
    outside: list[tuple[str, str]] = []
    for kind, form in (next(following) for _ in range(size)):
        if kind not in IN_CELL:
            outside.append((kind, form))
            continue
        free = [
            of_cell for of_cell in by_cell if kind != "nan" or all(other != "nan" for other, _ in of_cell)
        ] or by_cell
        least = min(len(of_cell) for of_cell in free)
        rng.choice([of_cell for of_cell in free if len(of_cell) == least]).append((kind, form))
    order = sorted(range(len(outside)), key=lambda i: (outside[i][0] not in ("base", "prepared"), rng.random()))
    return Round(
        cells=tuple(tuple(_ordered(of_cell, f"{number}.{i}", steps, rng)) for i, of_cell in enumerate(by_cell)),
        outside=tuple(Fault(id=f"{number}.b{i}", kind=outside[j][0], form=outside[j][1]) for i, j in enumerate(order)),
    )


def _ordered(of_cell: list[tuple[str, str]], prefix: str, steps: int, rng: random.Random) -> Iterator[Fault]:
    """A cell's faults: by step, then those of the record; a divergence ends the cell and so comes last of all."""
    nan = next((form for kind, form in of_cell if kind == "nan"), None)
    rest = [(kind, form) for kind, form in of_cell if kind != "nan"]
    if nan is not None:  # a cell that diverges writes one record, and no weights before the last step
        rest = [(kind, "step" if form in AT_RECORD and kind != "disk" else form) for kind, form in rest]
    rng.shuffle(rest)
    rest.sort(key=lambda one: (one[1] in AT_RECORD) + (one[1] == "recorded"))
    for i, (kind, form) in enumerate(rest):
        step = 1 + (i + 1) * (steps - 2) // (len(rest) + 1)
        is_first = kind == "state" or form in ("import", "build")  # before the first step
        yield Fault(id=f"{prefix}.{i}", kind=kind, form=form, step=0 if is_first else min(step, steps - 2))
    if nan is not None:
        yield Fault(id=f"{prefix}.nan", kind="nan", form=nan, step=steps - 1 if nan == "last" else steps - 2)
