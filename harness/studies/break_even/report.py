"""The break-even of a sweep in words, a table and a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from harness.foundation.markdown_table import markdown_table
from harness.foundation.whole_file import write_atomic
from harness.records.arms import Arm, group_arms, label, rank
from harness.records.run_result import RunResult
from harness.records.stats import MIN_RESAMPLED
from harness.report.plots.style import style_name
from harness.studies.break_even.answer import Answer, Crossing, crossings_of
from harness.studies.break_even.costs import StepCost, commonest_machine, emulates, machine, num_sharing, step_cost
from harness.studies.break_even.figure import draw
from harness.studies.break_even.laws import LENGTH_REACH, SIZE_REACH, fewest_alike, fit_speedup, resampled
from harness.studies.break_even.time_to_accuracy import GAIN, race

DRAWS = 200
"""Resamples of the runs, which give a crossing its interval."""
SHARED = 1.5
"""Runs at a time from which on those that can share a GPU are taken to do so: their seconds are then those of a shared
machine, and change with what runs beside them."""
Costs = dict[str, list[StepCost]]
"""Context -> step costs of the runs in it."""


def write(
    results: Sequence[RunResult], tables: Path | None, figures: Path | None, sweep: str, control: str = "bf16"
) -> list[Path]:
    """Write `<sweep>_break_even.md` into `tables` and `break_even.png` into `figures`, where they are not None.

    Nothing for a sweep with one size and one length, without the control, or on an engine that emulates its formats:
    such an engine is slower in them by construction. Where runs could share GPUs there are steps to an accuracy alone,
    no speeds and no figure; nothing where they were evaluated at their start and end only.
    """
    is_shared = bool(results) and _sharing(results) > 0
    found = answers(results, control, draws=1 if is_shared else DRAWS)  # without speeds no interval of one is shown
    if is_shared:
        found, figures = [answer for answer in found if answer.race is not None], None
    written: list[Path] = []
    if found and tables is not None:
        written.append(tables / f"{sweep}_break_even.md")
        write_atomic(written[0], markdown(found, sweep, control, results).encode())
    if found and figures is not None:
        written += draw(found, figures / "break_even.png")
    return written


def answers(results: Sequence[RunResult], control: str, *, draws: int = DRAWS) -> list[Answer]:
    """Arms of coarser precisions that share two sizes or lengths with the control, on the machine of most runs, in runs
    of equal `timed_code`. None where that machine's engine emulates its formats. `draws`: resamples of the speeds."""
    place = commonest_machine(results) if results else None
    if place is None or any(emulates(run) for run in results if machine(run) == place):
        return []
    arms = group_arms(results)
    costs = costs_by_line(arms, place)
    reference = next((line for line in costs if line[1] == control), None)
    if reference is None:
        return []
    found: list[Answer] = []
    for line in costs:
        own, other = _alike(costs[line], costs[reference])
        if rank(line[0]) > rank(reference[0]) and len(own) > 1:
            members = {label(a.context): a for a in arms if (a.precision, style_name(a)) == line}
            others = {label(a.context): a for a in arms if (a.precision, style_name(a)) == reference}
            found.append(_answer(line, members, others, own, other, draws))
    found = [answer for answer in found if answer.crossings]  # contexts may differ in neither size nor length
    return sorted(found, key=lambda a: (rank(a.precision), a.name))


def costs_by_line(arms: Sequence[Arm], place: str) -> dict[tuple[str, str], Costs]:
    """(precision, method and variant) -> context -> step costs of its runs on one machine."""
    found: dict[tuple[str, str], Costs] = {}
    for arm in arms:
        known = [cost for run in arm.runs if machine(run) == place and (cost := step_cost(run)) is not None]
        if known:
            found.setdefault((arm.precision, style_name(arm)), {})[label(arm.context)] = known
    return found


def _alike(own: Costs, other: Costs) -> tuple[Costs, Costs]:
    """Costs that compare: contexts that both have, and of their runs those of a code that both have."""
    found: tuple[Costs, Costs] = ({}, {})
    for context in (c for c in own if c in other):
        codes = {c.code for c in own[context]} & {c.code for c in other[context]}
        for kept, given in zip(found, (own, other), strict=True):
            kept |= {context: [c for c in given[context] if c.code in codes]} if codes else {}
    return found


def _answer(
    line: tuple[str, str], members: dict[str, Arm], others: dict[str, Arm], own: Costs, other: Costs, draws: int
) -> Answer:
    mine, theirs = ([cost for context in own for cost in group[context]] for group in (own, other))
    rng, has_replicates = np.random.default_rng(0), min(map(fewest_alike, (mine, theirs))) > 1
    boots = [fit_speedup(resampled(mine, rng), resampled(theirs, rng)) for _ in range(draws * has_replicates)]
    speedup = fit_speedup(mine, theirs)
    cells = [(_mean(own[c], "size"), _mean(own[c], "length"), _ratio(own[c], other[c]), c) for c in own]
    largest = max(cells)[3]
    return Answer(
        name=f"{line[1]} {line[0]}", precision=line[0], speedup=speedup,
        measured=[cell[:3] for cell in cells],
        crossings=crossings_of(speedup, boots, mine),
        race=race(members[largest], others[largest], np.random.default_rng(0)),
        step_ratio=_ratio(own[largest], other[largest]), setting=largest,
    )  # fmt: skip


def _mean(costs: Sequence[StepCost], name: str) -> float:
    return float(np.mean([getattr(cost, name) for cost in costs]))


def _ratio(own: Sequence[StepCost], other: Sequence[StepCost]) -> float:
    return float(np.median([c.total for c in other]) / np.median([c.total for c in own]))


def sentence(answer: Answer, control: str, has_speeds: bool = True) -> str:
    """Sentence on where an arm pays, then what its learning curve asks of a step."""
    pays = f" {'; '.join(_crossing_words(c) for c in answer.crossings)}." if has_speeds else ""
    return f"{answer.name}:{pays}{_race_words(answer, control, has_speeds)}"


def _crossing_words(c: Crossing) -> str:
    show, unit = (_params, "parameters") if c.axis == "size" else (_tokens, "tokens")
    held = f"at {_tokens(c.at)} tokens" if c.axis == "size" else f"at {_params(c.at)} parameters"
    if c.value is None:
        some = f"; some resamples pay from {show(c.low)} on" if math.isfinite(c.low) else ""
        return f"{held}, does not pay within {show(c.reach)} {unit} (speedup at most {c.best:.2f}{some})"
    beyond = " (extrapolated)" if c.value > c.measured[1] else ""
    if math.isinf(c.high):
        return f"{held}, cannot tell: it may pay from {show(c.value)} {unit} on{beyond}, and some resamples never do"
    if c.high <= c.measured[0]:
        start = f"{held}, pays already at the smallest measured {c.axis}, {show(c.value)} {unit}"
    elif math.isnan(c.high):
        start = f"{held}, pays from {show(c.value)} {unit} on (settings with a single run give no interval)"
    else:
        start = f"{held}, pays from {show(c.value)} {unit} on, 95 % {show(c.low)} to {show(c.high)}"
    return f"{start}{beyond}, up to {c.best:.2f} times as fast"


def _race_words(answer: Answer, control: str, has_speeds: bool) -> str:
    found = answer.race
    if found is None:
        return ""
    setting = answer.setting or "the only one"
    where = f" In the largest setting measured ({setting}), the accuracy to reach, {found.target:.2f} on average,"
    reached = f"reached by {found.reached} of {found.runs} runs"
    if math.isinf(found.ratio):
        return f"{where} is {reached} within their steps: no speed makes up for that."
    high = "no bound" if math.isinf(found.high) else f"{found.high:.2f}"
    told = f"95 % {found.low:.2f} to {high}, {reached}"
    if math.isnan(found.low):
        told = f"{reached}; fewer than {MIN_RESAMPLED} bases give no interval"
    measured = f"; with the measured step it takes {found.ratio / answer.step_ratio:.2f} times as long"
    return (
        f"{where} takes {found.ratio:.2f} times the steps of {control} ({told}), so a step must be at least "
        f"{found.ratio:.2f} times as fast{measured if has_speeds else ''}."
    )


def markdown(found: Sequence[Answer], sweep: str, control: str, results: Sequence[RunResult]) -> str:
    """Sentences, then the table of measured and fitted speedups; of runs that shared GPUs the sentences on steps
    alone."""
    place, sharing = commonest_machine(results), _sharing(results)
    speeds = (
        f"Measured on: {place}, runs of one commit. Speedup: seconds per step of {control} over those of the arm, "
        "evaluation left out. Laws per stage in model size and response length, extended to "
        f"{SIZE_REACH:g} times the largest size and {LENGTH_REACH:g} times the longest response."
    )
    if sharing:
        speeds = (
            f"Ran on: {place}, {sharing:.0f} runs at a time, on GPUs that they could share. The seconds of such a "
            "step depend on what else runs on its GPU, so this page compares numbers of steps and gives no speeds. "
            "`lowbit break-even` has speeds of larger models; for those of a sweep, give every run a GPU "
            "(`--workers`, or `engine.gpu_memory` above 0.5). Arms are left out that share no two sizes or lengths "
            f"with {control} in runs of one commit."
        )
    lines = [
        f"# {sweep}: break-even", "",
        f"{speeds} The accuracy to reach is, on each base, its start plus {GAIN:.0%} of what {control} gains there; "
        f"bases on which {control} gains nothing are left out.", "",
        *(f"- {sentence(answer, control, not sharing)}" for answer in found),
    ]  # fmt: skip
    if sharing:
        return "\n".join(lines) + "\n"
    rows = list[tuple[str, ...]]()
    for answer in found:
        for size, length, ratio in sorted(answer.measured):
            law = float(answer.speedup(np.array(size), np.array(length)))
            rows.append((answer.name, _params(size), _tokens(length), f"{ratio:.2f}", f"{law:.2f}"))
    head = ("arm", "parameters", "response tokens", "speedup, measured", "speedup, law")
    return "\n".join([*lines, "", markdown_table(head, rows, align="lr")]) + "\n"


def _sharing(results: Sequence[RunResult]) -> float:
    """The number of runs at a time on the commonest machine where they shared GPUs, else 0."""
    place = commonest_machine(results)
    number = num_sharing([run for run in results if machine(run) == place])
    return number if number >= SHARED else 0.0


def _params(value: float) -> str:
    for unit, name in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if value >= unit:
            return f"{value / unit:.3g}{name}"
    return "never" if math.isinf(value) else f"{value:.3g}"


def _tokens(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.3g}" if value < 1000 else f"{value:.0f}"
