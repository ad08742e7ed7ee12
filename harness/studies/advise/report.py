"""Advice in words: a table of recipes, their evidence, and configurations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from harness.config.load import quoted
from harness.foundation.text_table import text_table
from harness.studies.advise.accuracy import STANDINGS
from harness.studies.advise.configurations import ours, trl, verl
from harness.studies.advise.question import DEPLOY, Question
from harness.studies.advise.recipes import Advice, Recipe
from harness.studies.advise.speed import GPU, Speed, placement
from harness.studies.capacity.place import GpuSplit

LEGEND = """\
step: time of a step with BF16 rollouts over its time with these; the range is that of the plan's measured errors.
estimated: on one GPU, from what was measured on it. assumed: on several GPUs, whose links were not measured.
tokens: the verdict on word problems with answers of so many tokens, models of 10M parameters, 150 steps, vLLM's
kernels. equal: within 0.03 of BF16 rollouts. falls 1/6: one run of six collapsed; falls ≤22%: none did, 95 % bound.
below on x/n, lower on x/n bases: it loses on so many bases, and the mean is open.
(+n): with n more bases the chance of a verdict is 80 %, if they vary as these do.
k3 there: mismatch of those bases before training, nats a token, the smallest and the largest.
What your own model would lose is not known. Speed and accuracy are answered apart."""


def words(advice: Advice, *, is_explained: bool) -> str:
    """Everything but the configurations; with `is_explained` the source of each number."""
    q = advice.question
    place = f"{q.gpus} x {q.gpu}, {DEPLOY[q.deploy]} deployed"
    lines = [f"{q.size}, answers of {q.length} tokens, {q.batch} a step, {place}"]
    reason = _one_reason(advice.recipes)
    if reason:
        lines.append(f"The time of a step is not known: {reason}.")
    for standing, title in STANDINGS.items():
        if found := advice.of(standing):
            lines += ["", f"{title}:", text_table(header(advice.tokens), [cells(recipe, reason) for recipe in found])]
    lines += ["", LEGEND, "", *_shared(advice.recipes, "if: ", lambda r: r.speed.conditions)]
    if is_explained:
        lines += ["", *(line for recipe in advice.recipes for line in explained(recipe))]
    return "\n".join(lines)


def header(tokens: Sequence[int]) -> tuple[str, ...]:
    """Headings of a table of recipes, with the lengths of the word problems."""
    return ("format", "correction", "step", *(f"{n} tokens" for n in tokens), "k3 there")


def cells(recipe: Recipe, reason: str = "") -> tuple[str, ...]:
    """A row of that table; `reason`: why speeds are not known, where it is told above the table."""
    step = "1, the control" if recipe.is_control else speed_words(recipe.speed)
    if reason and not recipe.is_control:
        step = "not known"
    return (recipe.precision, recipe.correction, step, *recipe.accuracy.cells, recipe.accuracy.k3)


def explained(recipe: Recipe) -> list[str]:
    """The sources of a recipe's numbers."""
    return [f"{recipe.name}:", f"  step: {recipe.speed.words}", f"  accuracy: {recipe.accuracy.words}"]


def speed_words(found: Speed) -> str:
    """A cell of the column of speeds."""
    if found.kind == "not known":
        return f"not known: {found.words}"
    return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}] times, {found.kind}"


def configurations(question: Question, recipe: Recipe) -> str:
    """The three configurations of a recipe, or why there is none, and whether the step fits the memory."""
    at = placement(question, recipe.precision)
    ways = 1 if at is None else at.ways
    what = (question, recipe.precision, recipe.correction)
    room = {} if at is None else {"pass_tokens": at.tokens, "is_checkpointed": at.is_checkpointed}
    written: dict[str, Callable[[], list[str]]] = {
        "lowbit, with your own task behind it, such as task=gsm8k task.path=FOLDER": lambda: [
            "lowbit run " + " ".join(ours(*what, ways=ways, **room))
        ],
        "verl 0.9.1, on top of your own keys": lambda: [f"{k}={quoted(v)}" for k, v in verl(*what, ways).items()],
        "TRL 1.16.0, arguments of GRPOConfig": lambda: [f"{k}={v!r}," for k, v in trl(*what, ways).items()],
    }
    lines = [f"# {recipe.name}", f"# memory: {memory_words(question, at)}"]
    for title, write in written.items():
        try:
            lines += ["", f"## {title}", "", *write()]
        except ValueError as error:
            lines += ["", f"## {title}", "", f"none: {error}"]
    return "\n".join(lines)


def memory_words(question: Question, at: GpuSplit | None) -> str:
    """Does a step placed so fit the GPUs, by the plan of `lowbit capacity`, which knows one kind of GPU?"""
    if at is None:
        return f"not checked, for no plan knows {question.size} in this format"
    tail = f": {at.reason}" if at.reason else ", with checkpointed layers" * at.is_checkpointed
    line = f"on {question.gpus} x {GPU} it {at.verdict}{tail} (the plan of lowbit capacity)"
    if question.gpu == GPU:
        return line
    return f"not checked on {question.gpu}, try the first command with --dry-run --gpu {question.gpu}; {line}"


def _one_reason(recipes: Sequence[Recipe]) -> str:
    """Reason why no recipe's speed is known, where all have the same, else ""."""
    speeds = [recipe.speed for recipe in recipes if not recipe.is_control]
    reasons = {found.words for found in speeds if found.kind == "not known"}
    return reasons.pop() if len(reasons) == 1 and all(found.kind == "not known" for found in speeds) else ""


def _shared(recipes: Sequence[Recipe], head: str, of: Callable[[Recipe], Sequence[str]]) -> Iterator[str]:
    """Every line once, with the recipes that it goes for."""
    found: dict[str, list[str]] = {}
    for recipe in recipes:
        for line in of(recipe) if not recipe.is_control else ():
            found.setdefault(line, []).append(recipe.name)
    num = sum(not recipe.is_control for recipe in recipes)
    for line, names in found.items():
        yield f"{head}{line} ({'all' if len(names) == num else ', '.join(names)})"
