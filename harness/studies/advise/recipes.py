"""Recipes in order: those whose risk is answered by speed, then those whose risk is not."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.foundation.did_you_mean import nearest
from harness.studies.advise.accuracy import CORRECTIONS, Accuracy, Curves, accuracy
from harness.studies.advise.question import Question
from harness.studies.advise.speed import Evidence, Speed, speed
from harness.studies.dose.points import NONE

CONTROL = "bf16"


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
    """Answer to one question, each list fastest first; recipes without a known speed come last."""

    question: Question
    answered: list[Recipe]
    """BF16 rollouts, and recipes whose change of accuracy has an interval."""
    open: list[Recipe]
    """Recipes whose change of accuracy is not known."""


def advise(evidence: Evidence, curves: Curves, question: Question) -> Advice:
    """Every format of the question with every correction."""
    speeds = {name: speed(evidence, question, name) for name in question.formats}
    recipes = [
        Recipe(
            precision=name, correction=correction, speed=speeds[name],
            accuracy=accuracy(curves, question, name, correction),
        )
        for name in question.formats for correction in CORRECTIONS
    ]  # fmt: skip
    control = Recipe(
        precision=CONTROL, correction=NONE, speed=speed(evidence, question, CONTROL),
        accuracy=Accuracy(kind="known", change=0.0, low=0.0, high=0.0, words="BF16 rollouts are what is compared with"),
    )  # fmt: skip
    is_answered = [recipe.accuracy.kind == "known" for recipe in recipes]
    return Advice(
        question=question,
        answered=_ordered([control, *(r for r, yes in zip(recipes, is_answered, strict=True) if yes)]),
        open=_ordered([r for r, yes in zip(recipes, is_answered, strict=True) if not yes]),
    )


def _ordered(recipes: list[Recipe]) -> list[Recipe]:
    """Fastest first; at equal speed the smaller expected loss first."""

    def place(recipe: Recipe) -> tuple[float, float]:
        value, change = 1.0 if recipe.is_control else recipe.speed.value, recipe.accuracy.change
        return (math.inf if math.isnan(value) else -value, math.inf if math.isnan(change) else -change)

    return sorted(recipes, key=place)


def named(advice: Advice, words: str) -> Recipe:
    """The recipe called `words`: a format, or format:correction. Raises ValueError with the nearest names."""
    every = {f"{r.precision}:{r.correction}".removesuffix(f":{NONE}"): r for r in [*advice.answered, *advice.open]}
    if words not in every:
        raise ValueError(f"--config {words}: unknown; {nearest(words, every)}")
    return every[words]
