"""Advice in words: a table of recipes, their evidence, and configurations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from harness.foundation.text_table import text_table
from harness.studies.advise.configurations import Configuration, ours, shown, trl, verl
from harness.studies.advise.question import Question
from harness.studies.advise.recipes import Advice, Recipe
from harness.studies.advise.speed import Speed, placement

HEADER = ("format", "correction", "step", "accuracy against BF16 rollouts")
LEGEND = """\
step: time of a step with BF16 rollouts over its time with these; the range is that of the plan's measured errors.
accuracy: mean over the evaluations during training. A change with an interval (simultaneous, 95 %) is that of runs that
sorted digits at a like dose; one without is their curve read at this dose, far from where they ran. Speed and accuracy
are answered apart: neither says anything of the other."""


def words(advice: Advice, *, is_explained: bool) -> str:
    """Everything but the configurations; with `is_explained` the source of each number."""
    q = advice.question
    deployed = "BF16 weights" if q.deploy == "bf16" else "the rollout format"
    lines = [
        f"{q.size}, answers of {q.length} tokens, {q.batch} a step, {q.gpus} x {q.gpu}, {deployed} deployed", "",
        "Accuracy measured on a like case:", _table(advice.answered), "",
        "Accuracy not known for your model:", _table(advice.open), "", LEGEND,
    ]  # fmt: skip
    lines += ["", *_shared([*advice.answered, *advice.open], "if: ", lambda r: r.speed.conditions)]
    lines += _shared([*advice.answered, *advice.open], "changes: ", lambda r: r.accuracy.changes)
    if is_explained:
        lines += ["", *(line for recipe in [*advice.answered, *advice.open] for line in explained(recipe))]
    return "\n".join(lines)


def explained(recipe: Recipe) -> list[str]:
    """The sources of a recipe's numbers."""
    found = [f"{recipe.name}:"]
    found.append(f"  step: {recipe.speed.words}")
    return [*found, f"  accuracy: {recipe.accuracy.words}"]


def speed_words(found: Speed) -> str:
    """A cell of the column of speeds."""
    if found.kind == "not known":
        return f"not known: {found.words}"
    return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}] times, {found.kind}"


def configurations(question: Question, recipe: Recipe) -> str:
    """The three configurations of a recipe, or why there is none."""
    at = placement(question, recipe.precision)
    ways = 1 if at is None else at.ways
    lines = [f"# {recipe.name}", "", "## lowbit", ""]
    try:
        lines.append("lowbit run " + " ".join(ours(question, recipe.precision, recipe.correction)))
    except ValueError as error:
        lines.append(f"none: {error}")
    lines += ["", "## verl 0.9.1, on top of your own keys", ""]
    lines += _values(verl(question, recipe.precision, recipe.correction, ways), lambda k, v: f"{k}={shown(v)}")
    lines += ["", "## TRL 1.16.0, arguments of GRPOConfig", ""]
    lines += _values(trl(question, recipe.precision, recipe.correction, ways), lambda k, v: f"{k}={v!r},")
    return "\n".join(lines)


def _values(found: Configuration, line: Callable[[str, Any], str]) -> Iterator[str]:
    if found.values is None:
        yield f"none: {found.reason}"
        return
    for key, value in found.values.items():
        yield line(key, value)


def _table(recipes: Sequence[Recipe]) -> str:
    rows = [
        (r.precision, r.correction, *(("1, the control", "0, the control") if r.is_control
         else (speed_words(r.speed), r.accuracy.shown)))
        for r in recipes
    ]  # fmt: skip
    return text_table(HEADER, rows)


def _shared(recipes: Sequence[Recipe], head: str, of: Callable[[Recipe], Sequence[str]]) -> Iterator[str]:
    """Every line once, with the recipes that it goes for."""
    found: dict[str, list[str]] = {}
    for recipe in recipes:
        for line in of(recipe) if not recipe.is_control else ():
            found.setdefault(line, []).append(recipe.name)
    num = sum(not recipe.is_control for recipe in recipes)
    for line, names in found.items():
        yield f"{head}{line} ({'all' if len(names) == num else ', '.join(names)})"
