"""Sweeps that run until their arms are decided: a look at the verdicts, seeds for the arms that need them, again.

    records -> look: judge every arm -> the next seeds of those that go on, and of their controls -> run -> look ...

The rule is the sweep's `until` (`harness.records.sweep_file.Until`); what a look says of an arm is `stats.next_step` at
the level of a look. Everything is read from the records anew at every look, so an interrupted sweep goes on, and one
that is finished runs nothing. Left out: running cells, which the caller does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from harness.config.load import run_id
from harness.config.schema import Launch, RunConfig
from harness.foundation.number_cell import with_interval
from harness.foundation.text_table import text_table
from harness.records import stats
from harness.records.looks import LookRow, Looks, look_level, read_looks, write_looks
from harness.records.run_result import RunResult, read_results
from harness.records.stats.verdicts import MIN_SEEDS
from harness.records.statuses import FINISHED
from harness.records.sweep_file import Until
from harness.report.leaderboard import judge_arms
from harness.report.scores import score_arms
from harness.sweep.planning import Planned, Sweep
from harness.sweep.queue import elsewhere, records_folder, stored

Run = Callable[[Planned], tuple[list[RunResult], bool]]
"""Run the cells that have no record: (all their records, whether it was interrupted)."""
Step = stats.Step | Literal["control", "no control", "failed"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One arm at a look."""

    arm: str
    key: str
    """Run id of its cell with seed 0, which the arm's cells have in common."""
    control: str | None
    """Key of its control."""
    seeds: int
    found: stats.Judged
    step: Step


@dataclass(frozen=True, kw_only=True)
class Ending:
    """End of a sweep that runs until it is decided."""

    reason: str | None
    """None where it was interrupted."""
    failed: tuple[RunResult, ...] = ()


@dataclass(frozen=True, kw_only=True)
class State:
    """State of the records: the rows of a look, and the cells that come next."""

    rows: tuple[Row, ...]
    cells: tuple[RunConfig, ...]
    is_look: bool
    """False where arms are between two sizes of the rule, or runs lack their control: then nothing is judged yet."""


def with_all_seeds(sweep: Sweep) -> Sweep:
    """The sweep with `until.max_seeds` seeds: its own, then those that follow the largest of them. Raises ValueError
    where its file has no `until`."""
    if sweep.until is None:
        raise ValueError(f"sweep {sweep.name}: its file has no `until`, which --until-decided needs; such as "
                         f"until: {{max_seeds: {max(2 * len(sweep.seeds), MIN_SEEDS)}}}")  # fmt: skip
    if sweep.base_seeds:
        raise ValueError("until: gives seeds of base and run together; valid without base_seeds")
    start = max(sweep.seeds) + 1
    return replace(sweep, seeds=(*sweep.seeds, *range(start, start + sweep.until.max_seeds - len(sweep.seeds))))


def until_decided(planned: Planned, launch: Launch, run: Run, say: Callable[[str], None] = print) -> Ending:
    """Run a plan with all seeds (`with_all_seeds`) look by look; the record of looks is kept up to date.

    Ends where no arm goes on, where the time limit of `run` withheld cells, or where it was interrupted. An arm with a
    failed cell gets no further seed, and neither do the arms of a failed control.
    """
    results, until = Path(launch.results), _rule(planned.sweep)
    kept = _looks(launch, until)
    write_looks(results, kept)
    failed, has_run = dict[str, RunResult](), False
    impossible = tuple(found for found in planned.impossible if found[0].seed in planned.sweep.seeds[: until.first])
    taken = [cell for cell, _ in elsewhere(planned.cells, launch)]
    while True:
        state = current(planned, read_results(records_folder(launch)), kept.level, failed.keys())
        if state.is_look:
            lines = tuple(_line(row, until) for row in state.rows)
            if not kept.looks or kept.looks[-1] != lines:
                kept = kept.model_copy(update={"looks": (*kept.looks, lines)})
            say(f"look {len(kept.looks)}, level {kept.level:.2g}")
            say(table(lines))
        if not state.cells and not taken:
            reason = why_stopped(state.rows)
            write_looks(results, kept.model_copy(update={"stopped": reason}))
            say(f"stopped: {reason}" if has_run else f"{launch.sweep}: nothing to run: {reason}")
            return Ending(reason=reason, failed=tuple(failed.values()))
        write_looks(results, kept.model_copy(update={"stopped": None}))
        cells = {run_id(cell): cell for cell in (*taken, *state.cells)}
        records, is_interrupted = run(replace(planned, cells=tuple(cells.values()), impossible=impossible))
        if is_interrupted:
            return Ending(reason=None, failed=tuple(failed.values()))
        found = {record.run_id: record for record in records}
        failed |= {key_of(cells[i]): found[i] for i in cells if i in found and found[i].status not in FINISHED}
        if left := len(cells.keys() - found.keys()):
            reason = f"time limit: {left} cells of this look are left"
            write_looks(results, kept.model_copy(update={"stopped": reason}))
            return Ending(reason=reason, failed=tuple(failed.values()))
        taken, has_run = [], True


def preview(planned: Planned, launch: Launch, say: Callable[[str], None] = print) -> list[RunConfig]:
    """Print the look at what is finished here and in other sweeps, at the level that `until_decided` judges at, and
    return the cells that would run next. Writes nothing."""
    until, known = _rule(planned.sweep), stored(launch, planned.cells)
    missing = [cell for cell in planned.cells if run_id(cell) not in known]
    taken = [found for _, found in elsewhere(missing, launch)]
    state = current(planned, [*known.values(), *taken], _looks(launch, until).level)
    if state.is_look:
        say(table([_line(row, until) for row in state.rows]))
        say(f"next: {len(state.cells)} cells" if state.cells else f"nothing to run: {why_stopped(state.rows)}")
    else:
        say(
            f"next: {len(state.cells)} cells before a look: arms are judged at {', '.join(map(str, until.sizes))} seeds"
        )
    return list(state.cells)


def current(
    planned: Planned, results: Sequence[RunResult], level: float, failed: Collection[str] = frozenset()
) -> State:
    """Judge the planned arms that have results, and choose the next cells; `failed` are keys of arms that end."""
    until, arms = _rule(planned.sweep), _by_arm(planned.cells)
    keys = {run_id(cell): key for key, cells in arms.items() for cell in cells.values()}
    done: dict[str, set[int]] = {key: set() for key in arms}
    for result in results:
        if result.run_id in keys and result.status in FINISHED:
            done[keys[result.run_id]].add(result.seed)
    judged_arms, scores = score_arms(results)
    judged = judge_arms(scores, judged_arms, planned.sweep.control, planned.sweep.endpoints, level)
    own = {arm.label: next((keys[run.run_id] for run in arm.runs if run.run_id in keys), None) for arm in judged_arms}
    rows: list[Row] = []
    for arm in judged_arms:
        reference, found = judged[arm.label].control, judged[arm.label].ranking
        key, control = own[arm.label], None if reference is None else own[reference.label]
        if key is None:
            continue
        seeds = len(done[key])
        if found.verdict == "control":
            step: Step = "control"
        elif control is None:
            step = "no control"
        elif not {key, control}.isdisjoint(failed):
            step = "failed"
        else:
            step = stats.next_step(found, seeds, len(arms[key]), until.hopeless)
        rows.append(Row(arm=arm.label, key=key, control=control, seeds=seeds, found=found, step=step))
    wanted = _before_look(arms, done, rows, until, failed)
    is_look = bool(rows) and not wanted
    if is_look:
        for row in (row for row in rows if row.step == "more seeds"):
            wanted |= {(row.key, seed) for seed in _more(arms[row.key], done[row.key], until.batch)}
        wanted |= {(row.control, seed) for row in rows for key, seed in wanted if key == row.key and row.control
                   and seed in arms[row.control] and seed not in done[row.control]}  # fmt: skip
    cells = tuple(cell for cell in planned.cells if (key_of(cell), cell.seed) in wanted)
    return State(rows=tuple(rows), cells=cells, is_look=is_look)


def _looks(launch: Launch, until: Until) -> Looks:
    """The record of a sweep's looks under a rule, where there is none a new one. A rule with fewer looks than that of
    the record does not lift the level of what was looked at."""
    kept = read_looks(Path(launch.results), launch.sweep)
    if kept is not None and kept.until == until:
        return kept
    level = min(look_level(until), kept.level if kept else 1.0)
    return Looks(sweep=launch.sweep, until=until, level=level, looks=kept.looks if kept else ())


def _rule(sweep: Sweep) -> Until:
    assert sweep.until is not None, "with_all_seeds refuses a sweep without"
    return sweep.until


def key_of(cell: RunConfig) -> str:
    """The run id of a cell with seed 0, which the cells of an arm have in common."""
    return run_id(replace(cell, seed=0, base_seed=0))


def _by_arm(cells: Sequence[RunConfig]) -> dict[str, dict[int, RunConfig]]:
    """Key of an arm -> seed -> cell, seeds in their order."""
    found: dict[str, dict[int, RunConfig]] = {}
    for cell in cells:
        found.setdefault(key_of(cell), {})[cell.seed] = cell
    return found


def _before_look(
    arms: Mapping[str, Mapping[int, RunConfig]], done: Mapping[str, set[int]], rows: Sequence[Row], until: Until,
    failed: Collection[str],
) -> set[tuple[str, int]]:  # fmt: skip
    """(key, seed) of what is missing before a look: the first seeds of every arm, those up to the next size of the rule
    where an arm is between two, and the control of every run."""
    controls = {row.control for row in rows}
    found: set[tuple[str, int]] = set()
    for key, cells in arms.items():
        sizes = (until.first,) if key in controls else until.sizes
        size = min((size for size in sizes if size >= len(done[key])), default=0)
        found |= {(key, seed) for seed in _more(cells, done[key], size - len(done[key]))}
    paired = {(row.control, seed) for row in rows if row.control for seed in arms[row.control]
              if seed not in done[row.control] and (seed in done[row.key] or (row.key, seed) in found)}  # fmt: skip
    return {(key, seed) for key, seed in found | paired if key not in failed}


def _more(cells: Mapping[int, RunConfig], done: set[int], count: int) -> list[int]:
    """The next `count` seeds of an arm."""
    return [seed for seed in cells if seed not in done][: max(count, 0)]


def _line(row: Row, until: Until) -> LookRow:
    mean, low, high = stats.difference(row.found)
    left = until.max_seeds - row.seeds
    words = {
        "control": "-",
        "no control": "given up: the sweep has no control for it",
        "failed": "given up: a cell failed",
        "decided": "decided",
        "no signal": "given up: no signal",
        "hopeless": f"given up: {stats.chance_to_decide(row.found, left):.0%} chance with {until.max_seeds} seeds",
        "out of seeds": "out of seeds",
        "more seeds": "goes on",
    }[row.step]
    return LookRow(
        arm=row.arm, seeds=row.seeds, difference=mean, low=low, high=high, verdict=row.found.verdict, next=words
    )


def table(lines: Sequence[LookRow]) -> str:
    """The rows of a look as text."""
    rows: list[tuple[str, ...]] = []
    for line in lines:
        numbers = with_interval(line.difference, line.low, line.high, "+.3f", "+.2f")
        rows.append((line.arm, str(line.seeds), numbers, line.verdict, line.next))
    return text_table(("arm", "seeds", "to control", "verdict", "next"), rows)


def why_stopped(rows: Sequence[Row]) -> str:
    """The reason why no arm goes on, in words."""
    counts = Counter(row.step for row in rows if row.step != "control")
    if set(counts) <= {"decided", "no signal"}:
        return "every arm is decided or shows no signal"
    return "no arm may get a further seed: " + ", ".join(f"{count} {step}" for step, count in counts.most_common())
