"""Contents of a results folder: its sweeps, their readable results, and the comparisons worth a link.

MLflow and the static site show the same list. A file that is no result is named and left alone, so that one bad file
hides no good ones. Left out: numbers, which are the leaderboard's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from harness.foundation.did_you_mean import nearest
from harness.foundation.project_files import SWEEPS
from harness.records.packed import read_packed, read_packed_series
from harness.records.paths import packed_path, packed_paths, runs_folder, sweep_folders
from harness.records.run_result import RunResult, read_result, read_results, read_series

MIN_SETTINGS = 3
"""A method with at least this many settings at one precision gets a comparison of its own."""
EVERYTHING, AT_PRECISION, PAIRS, PAIRS_OVER, SETTINGS = (
    "Everything", "All methods at one precision", "Method against method", "Method against method over contexts",
    "Settings of one method",
)  # fmt: skip
"""Headings, in their order."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Arms of one sweep that belong side by side."""

    title: str
    group: str
    """Heading of the list it stands in."""
    arms: tuple[str, ...]
    """Labels of the arms."""
    methods: tuple[str, ...]
    """Methods that are compared, two or one; empty: all."""
    precision: str
    """Rollout precision; empty: several."""
    context: str
    """Context; empty: all, or the sweep has one."""


def sweeps_in(results: Path) -> list[str]:
    """The sweeps that have a folder with results, by name."""
    return [folder.name for folder in sweep_folders(results) if any(folder.glob("*.json"))]


def readable(folder: Path) -> tuple[list[RunResult], list[str]]:
    """(results of a sweep's folder in order of path, one line per file that is none of its results)."""
    found: list[RunResult] = []
    problems: list[str] = []
    for path in sorted(folder.glob("*.json")):
        try:
            result = read_result(path)
        except ValueError as error:
            problems.append(str(error))
            continue
        if result.sweep == folder.name:
            found.append(result)
        else:
            problems.append(f"{path}: belongs to the sweep {result.sweep!r}")
    return found, problems


def place_of(results: Path, sweep: str) -> Path:
    """The folder of a sweep, which counts as the whole sweep where it is there, else its packed file; the folder where
    there is neither."""
    folder, packed = runs_folder(results, sweep), packed_path(results, sweep)
    return packed if packed.is_file() and not folder.is_dir() else folder


def read_place(place: Path) -> list[RunResult]:
    """The results of a sweep's folder or of its packed file. Raises ValueError for a damaged one."""
    return read_packed(place) if place.is_file() else read_results(place)


def all_sweeps(results: Path) -> list[str]:
    """The sweeps that have results in a folder or in a packed file, by name."""
    packed = (path.stem for path in packed_paths(results))
    return sorted({*sweeps_in(results), *(name for name in packed if place_of(results, name).is_file())})


def some_sweeps(results: Path) -> list[str]:
    """`all_sweeps`. Raises ValueError, with the way to make some, where there is none."""
    if not (known := all_sweeps(results)):
        raise ValueError(f"no sweep has results in {results}; lowbit sweep quick makes some")
    return known


def check_sweep(results: Path, sweep: str) -> None:
    """Raises ValueError, with the way to run it or the nearest names, where the sweep has no results, packed or not."""
    if sweep not in (known := all_sweeps(results)):
        hint = nearest(sweep, known) if known else "no sweep has any; lowbit sweep quick makes some"
        if (SWEEPS / f"{sweep}.yaml").is_file():
            hint = f"lowbit sweep {sweep} runs it; lowbit runs lists the sweeps that have some"
        raise ValueError(f"sweep {sweep!r} has no results in {results}; {hint}")


def check_is_packed(results: Path, sweep: str, asked: str) -> None:
    """Raises ValueError, with the nearest names, where no packed sweep is called so; its words begin with `asked`."""
    if sweep not in (known := [path.stem for path in packed_paths(results)]):
        raise ValueError(f"{asked}: no packed sweep {sweep!r}; {nearest(sweep, known) if known else 'none is'}")


def runs_of(results: Path, sweep: str) -> tuple[list[RunResult], list[str]]:
    """(results of a sweep, one line per file that is none of them): of its folder where it has one, else of its packed
    file, which is read as it is."""
    place = place_of(results, sweep)
    if not place.is_file():
        return readable(place)
    try:
        return read_packed(place), []
    except ValueError as error:
        return [], [str(error)]


Series = Mapping[str, Mapping[str, Sequence[Any]]]
"""Run id -> column -> one value per step, NaN where a step has none."""


def load_series(folder: Path, results: Sequence[RunResult]) -> Series:
    """The series of every run that has one, read from `<folder>/<run_id>.parquet`."""
    runs = [run for run in results if run.num_steps and (folder / f"{run.run_id}.parquet").exists()]
    return {run.run_id: read_series(folder, run.run_id) for run in runs}


def series_of(results: Path, sweep: str, columns: Sequence[str]) -> tuple[Series, list[str]]:
    """(these columns of every run, one line per file that cannot be read) of the sweep's folder where it has one, else
    of its packed file. A run without a series, and a column that it does not have, are left out."""
    place = place_of(results, sweep)
    if place.is_file():
        try:
            return read_packed_series(place, columns), []
        except ValueError as error:
            return {}, [str(error)]
    found: dict[str, dict[str, list[Any]]] = {}
    problems: list[str] = []
    for path in sorted(place.glob("*.parquet")):
        try:
            series = read_series(place, path.stem)
        except ValueError as error:
            problems.append(str(error))
            continue
        found[path.stem] = {name: series[name] for name in columns if name in series}
    return found, problems


def saved_comparisons(rows: Sequence[Mapping[str, Any]], baselines: Sequence[str]) -> list[Comparison]:
    """The comparisons of a leaderboard (`arm`, `method`, `precision`, `variant`, `context` of every row).

    Per context: every arm; all methods at a precision; every method against each of `baselines`; a method's settings.
    """
    contexts = list(dict.fromkeys(str(row["context"]) for row in rows))
    found: list[Comparison] = []
    for context in contexts:
        inside = [row for row in rows if row["context"] == context]
        found.append(_comparison(_words("every arm", context), EVERYTHING, inside, "", context))
        for precision in dict.fromkeys(str(row["precision"]) for row in inside):
            found += _at(precision, context, [row for row in inside if row["precision"] == precision], baselines)
    if len(contexts) > 1:
        found += _over_contexts(rows, baselines)
    order = (EVERYTHING, AT_PRECISION, PAIRS_OVER, PAIRS, SETTINGS)
    return sorted((c for c in found if len(c.arms) > 1), key=lambda comparison: order.index(comparison.group))


def _at(precision: str, context: str, rows: Sequence[Mapping[str, Any]], baselines: Sequence[str]) -> list[Comparison]:
    """The comparisons within one precision of one context."""
    where = _words(f"at {precision}", context)
    found = [_comparison(f"all methods {where}", AT_PRECISION, rows, precision, context)]
    for one, other in _pairs(rows, baselines):
        both = [row for row in rows if row["method"] in (one, other) and not row["variant"]]
        title = f"{pair_words((one, other))} {where}"
        found.append(_comparison(title, PAIRS, both, precision, context, (one, other)))
    for method in dict.fromkeys(str(row["method"]) for row in rows):
        own = [row for row in rows if row["method"] == method]
        if len(own) >= MIN_SETTINGS:
            title = f"settings of {method} {where}"
            found.append(_comparison(title, SETTINGS, own, precision, context, (method,)))
    return found


def _over_contexts(rows: Sequence[Mapping[str, Any]], baselines: Sequence[str]) -> list[Comparison]:
    """Method against method at one precision over all sizes and lengths."""
    found: list[Comparison] = []
    for precision in dict.fromkeys(str(row["precision"]) for row in rows):
        inside = [row for row in rows if row["precision"] == precision and not row["variant"]]
        for one, other in _pairs(inside, baselines):
            both = [row for row in inside if row["method"] in (one, other)]
            title = f"{pair_words((one, other))} at {precision}, every context"
            found.append(_comparison(title, PAIRS_OVER, both, precision, "", (one, other)))
    return found


def _pairs(rows: Sequence[Mapping[str, Any]], baselines: Sequence[str]) -> list[tuple[str, str]]:
    """(method, baseline) of the plain settings; two baselines once against each other."""
    names = list(dict.fromkeys(str(row["method"]) for row in rows if not row["variant"]))
    ordered = [name for name in names if name not in baselines] + [name for name in baselines if name in names]
    return [(one, other) for one, other in combinations(ordered, 2) if other in baselines]


def _comparison(
    title: str,
    group: str,
    rows: Sequence[Mapping[str, Any]],
    precision: str,
    context: str,
    methods: tuple[str, ...] = (),
) -> Comparison:
    arms = tuple(str(row["arm"]) for row in rows)
    return Comparison(title=title, group=group, arms=arms, methods=methods, precision=precision, context=context)


def pair_words(methods: Sequence[str]) -> str:
    """Title of a pair of methods."""
    return " against ".join(methods)


def _words(words: str, context: str) -> str:
    return f"{words}, {context}" if context else words
