"""Recipes in order: by what word problems say of their accuracy, then by speed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.foundation.did_you_mean import nearest
from harness.studies.advise.accuracy import (
    CONTROL,
    METHODS_OF,
    NONE,
    STANDINGS,
    Accuracy,
    Standing,
    Table,
    accuracy,
    control,
    corrections,
)
from harness.studies.advise.question import Question
from harness.studies.advise.speed import Evidence, Speed, speed


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A rollout format with a correction."""

    precision: str
    correction: str
    speed: Speed
    accuracy: Accuracy

    @property
    def name(self) -> str:
        """Format and correction in words."""
        return self.precision if self.correction == NONE else f"{self.precision} with {self.correction}"

    @property
    def is_control(self) -> bool:
        """Is it BF16 rollouts, which everything is compared with?"""
        return self.precision == CONTROL


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Answer to one question."""

    question: Question
    tokens: tuple[int, ...]
    """Lengths of the word problems, one for each cell of an accuracy."""
    recipes: list[Recipe]
    """BF16 rollouts and every format with its corrections, by `STANDINGS` and then by speed; of equal speed with a
    correction first, and those without a known speed last."""

    def of(self, standing: Standing) -> list[Recipe]:
        """The recipes of which word problems say the same."""
        return [recipe for recipe in self.recipes if recipe.accuracy.standing == standing]


def advise(evidence: Evidence, table: Table, question: Question) -> Advice:
    """Every format of the question with its corrections."""
    speeds = {name: speed(evidence, question, name) for name in question.formats}
    recipes = [
        Recipe(
            precision=name, correction=correction, speed=speeds[name],
            accuracy=accuracy(table, question, name, correction),
        )
        for name in question.formats for correction in corrections(table, name)
    ]  # fmt: skip
    bf16 = Recipe(precision=CONTROL, correction=NONE, speed=speed(evidence, question, CONTROL), accuracy=control(table))
    return Advice(question=question, tokens=tuple(table.tokens.values()), recipes=sorted([bf16, *recipes], key=_place))


def _place(recipe: Recipe) -> tuple[int, float, bool]:
    value = 1.0 if recipe.is_control else recipe.speed.value
    standing = list(STANDINGS).index(recipe.accuracy.standing)
    return standing, math.inf if math.isnan(value) else -value, recipe.correction == NONE


def named(advice: Advice, words: str) -> Recipe:
    """The recipe called `words`: a format, or format:correction. Raises ValueError with the nearest names, and for a
    correction that did not run in the format."""
    every = {f"{r.precision}:{r.correction}".removesuffix(f":{NONE}"): r for r in advice.recipes}
    precision, _, correction = words.partition(":")
    name = words.removesuffix(f":{NONE}")
    if name in every:
        return every[name]
    if precision in every and correction in METHODS_OF:
        ran = ", ".join(r.precision for r in advice.recipes if r.correction == correction)
        raise ValueError(f"--config {words}: {correction} did not run in {precision}; it ran in {ran}")
    raise ValueError(f"--config {words}: unknown; {nearest(words, every)}")
