"""From a YAML file of values to cells: axes that multiply, arms, exclude rules, included arms, seeds.

A word that is wrong beside anything (an unknown name, a value that its field or knob cannot have) is an error; words
that do not go together, such as a method and a precision of two axes, make an impossible cell, which is skipped.
Nothing is loaded and nothing runs. Left out: which cells have a result, and running them (`harness.sweep.queue`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from harness.config.compose import advice
from harness.config.load import check_overrides, load, parse, quoted, read_yaml, run_id, run_name, split_launch, to_json
from harness.config.resolve import known_parts, resolve
from harness.config.schema import Name, RunConfig, Whole
from harness.foundation.did_you_mean import nearest
from harness.foundation.progress_bar import progress_bar
from harness.foundation.project_files import STARTS
from harness.models.checkpoint import content_hash, planned_hash
from harness.records.arms import arm_names, arms_of
from harness.records.paths import RUNS
from harness.records.sweep_file import (
    BASELINES,
    CONTROL,
    ENDPOINTS,
    RECIPE,
    SWEEPS,
    Endpoint,
    Expectation,
    Purpose,
    Sizes,
    Until,
)
from harness.run.checks import check
from harness.start.prepare import check_data
from harness.sweep.rules import OPEN, Rule, check_rule, in_words, matches, open_keys, values_of
from methods import method_named, registry

SEEDS = ("seeds", "base_seeds")
"""Keys of an arm that are no overrides."""
SHOWN = 3
"""Different reasons that an error names where no cell can run."""
NO_ARM = "no arm of the sweep, METHOD PRECISION with a variant where it has one"
"""Error of an expectation, before the valid names."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One YAML file of `sweeps/`. With `like: NAME` a file says only what differs from NAME's."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: Name
    question: str
    """Question that the sweep answers."""
    control: str = CONTROL
    """Method of the reference arm."""
    endpoints: tuple[Endpoint, ...] = ENDPOINTS
    """Policies that verdicts are about. The first ranks the arms."""
    baselines: tuple[str, ...] = BASELINES
    """Methods that the others are also compared with, one by one; the last one corrects nothing."""
    expectations: tuple[Expectation, ...] = ()
    """Outcomes known before, which its table checks."""
    overrides: tuple[str, ...] = ()
    """Overrides of every cell; `launch.NAME=VALUE` sets how they run."""
    axes: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    """Override key -> values; the product of all axes."""
    arms: tuple[dict[str, Any], ...]
    """Override key -> value or list of values (which multiply)."""
    exclude: tuple[dict[str, Any], ...] = ()
    """Rules, override key -> value or list of values: a cell that agrees with all of one is left out."""
    include: tuple[dict[str, Any], ...] = ()
    """Further arms, which no axis multiplies and no rule excludes."""
    later: tuple[dict[str, Any], ...] = ()
    """Further arms, which run once every seed of the others is done."""
    until: Until | None = None
    """Looks and limits of `lowbit sweep NAME --until-decided`."""
    looks: Sizes = ()
    """Bases, or seeds, of an arm each time that somebody read its verdict and then added runs, and now. Its tables are
    judged at the level of one of so many looks."""
    base_seeds: tuple[Whole, ...] = ()
    """Seeds of the bases, each with every run seed; base by base, so that a base's comparisons finish early. Empty: a
    run's base has the run's seed, for base variance is as large as the effects."""
    seeds: tuple[Whole, ...]
    """Run seeds. An arm may name its own (`seeds: [0, 1, 2]`): a control of several runs on a base enters a comparison
    by their mean. So may it name its own `base_seeds`, as bases of other recipes do."""

    @property
    def purpose(self) -> Purpose:
        """The part of it that reports need."""
        return Purpose(**{name.name: getattr(self, name.name) for name in fields(Purpose)})


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Plan of a sweep: cells to run, and combinations left out with the reason."""

    sweep: Sweep
    cells: tuple[RunConfig, ...]
    skipped: tuple[tuple[str, str], ...]
    """(arm in words, reason) of impossible combinations."""
    notes: tuple[tuple[str, str], ...] = ()
    """(arm in words, remark) of what is allowed and pointless."""
    excluded: tuple[tuple[str, str], ...] = ()
    """(arm in words, rule and seeds) of what the file leaves out."""
    impossible: tuple[tuple[RunConfig, str], ...] = ()
    """(cell, reason) of what `skipped` lists by arm: each leaves a record."""


def names_of(cells: Sequence[RunConfig]) -> dict[str, str]:
    """Run id -> name of the run, and what sets its arm apart among these cells, as their table names it."""
    arms = arms_of([to_json(cell) for cell in cells])
    apart = [arm.label.removeprefix(f"{arm.method} {arm.precision}") for arm in arms]
    return {run_id(cell): f"{run_name(cell)} {words}".rstrip() for cell, words in zip(cells, apart, strict=True)}


@dataclass(frozen=True, kw_only=True)
class _Arm:
    listed: Mapping[str, Any]
    """The arm as the file lists it."""
    words: str
    config: RunConfig
    """Configuration of the arm, resolved where it can work."""
    reason: str | None
    """Reason why the arm cannot work."""
    notes: tuple[str, ...]
    starts: tuple[tuple[int, int], ...]
    """(base seed, run seed) of its runs, bases outermost."""
    is_included: bool
    is_late: bool


def sweep_names(folder: Path = SWEEPS, command: str = "sweep") -> list[str]:
    """Every file of a folder that `lowbit COMMAND` runs, by name."""
    return sorted(path.stem for path in folder.glob("*.yaml") if _command_of(path) == command)


def _command_of(path: Path) -> str:
    return next((command for command, start in STARTS.items() if path.stem.startswith(start)), "sweep")


def file_of(name: str, folder: Path, command: str = "sweep") -> Path:
    """The file `name`.yaml of a folder, or the one that a path names. Raises ValueError, one line, for one that is not
    there or that another command than `lowbit COMMAND` runs."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if path.is_file() and (other := _command_of(path)) != command:
        own = f"; a file of lowbit {command} is called {STARTS[command]}*.yaml" if command in STARTS else ""
        raise ValueError(f"{path.stem} is run by another command: lowbit {other} {name}{own}")
    if not path.is_file() and Path(name).exists():
        raise ValueError(f"{name or repr(name)}: a name of sweeps/ is expected, or a path to a .yaml file")
    if not path.is_file() and path == Path(name):
        raise ValueError(f"{name}: no such file")
    if not path.is_file():
        names = sweep_names(folder, command)
        hint = nearest(name, names)
        everything = "" if "valid: " in hint else f"; valid: {', '.join(names)}"
        raise ValueError(f"{command} {name!r} not found; {hint}{everything}")
    return path


def read_sweep(name: str, folder: Path = SWEEPS) -> Sweep:
    """The sweep `name`, or a path to a YAML file. Raises ValueError, one line, for unknown names, keys or values."""
    path = file_of(name, folder)
    given = read_yaml(path)
    values, known = _values(path, given), registry().methods
    try:
        sweep = parse(Sweep, {"name": path.stem} | values)
        _check_taken(sweep.name, path, "name" in given)
        for key, name in (("control", sweep.control), *(("baselines", name) for name in sweep.baselines)):
            if name not in known:
                raise ValueError(f"{key}: {name!r} is no method; {nearest(name, known)}")
        check_overrides(sweep.overrides)
        for rule in sweep.exclude:
            check_rule(rule)
        arms = (*sweep.arms, *sweep.include, *sweep.later)
        for arm in arms:
            arm_starts(sweep, arm)
        for settings in (sweep.axes, *arms):
            if empty := next((key for key, found in settings.items() if found == []), None):
                raise ValueError(f"{empty}=[]: at least one value is expected")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not sweep.arms or not sweep.seeds or not sweep.endpoints:
        raise ValueError(f"{path}: arms, seeds and endpoints need at least one entry each")
    if sweep.until is not None and sweep.until.max_seeds < len(sweep.seeds):
        raise ValueError(f"{path}: until.max_seeds={sweep.until.max_seeds}: fewer than the {len(sweep.seeds)} of seeds")
    return sweep


def _check_taken(name: str, path: Path, is_given: bool) -> None:
    """Raises ValueError for a name whose folder another command fills, and for a file elsewhere that has a shipped
    sweep's name without giving it."""
    starts = {"paper": RECIPE} | STARTS
    if other := next((c for c, start in starts.items() if name.startswith(start)), "run" if name == RUNS else None):
        raise ValueError(f"name={name}: the results of lowbit {other} are kept under such a name; choose another name")
    taken = SWEEPS / f"{name}.yaml"
    if not is_given and name in sweep_names() and path.resolve() != taken.resolve():
        raise ValueError(
            f"its name is that of sweeps/{name}.yaml, whose results it would join; rename the file, or write "
            f"`name: {name}` into it to add to them"
        )


def arm_starts(sweep: Sweep, arm: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """(base seed, run seed) of the runs of an arm as its file lists it, bases outermost.

    Raises ValueError for its own seeds where they are no whole numbers, or where it alone has `base_seeds`.
    """
    if "base_seeds" in arm and not sweep.base_seeds:
        raise ValueError(f"base_seeds={arm['base_seeds']} of an arm: valid where the sweep has base_seeds")
    bases, seeds = (_own(arm, name, getattr(sweep, name)) for name in ("base_seeds", "seeds"))
    return tuple((base, seed) for base in bases for seed in seeds) or tuple((seed, seed) for seed in seeds)


def _own(arm: Mapping[str, Any], name: str, usual: Sequence[int]) -> Sequence[int]:
    """Seeds of an arm, each once, or the sweep's."""
    own = arm.get(name, usual)
    if name in arm and (not isinstance(own, list) or not own or any(type(x) is not int or x < 0 for x in own)):
        raise ValueError(f"{name}={own} of an arm: a list of whole numbers from 0 on is expected, such as [0, 1]")
    return list(dict.fromkeys(own))


def with_seeds(sweep: Sweep, seeds: tuple[int, ...]) -> Sweep:
    """The sweep with these run seeds in every arm."""

    def plain(arms: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
        return tuple({key: value for key, value in arm.items() if key != "seeds"} for arm in arms)

    arms, include, later = plain(sweep.arms), plain(sweep.include), plain(sweep.later)
    return replace(sweep, seeds=seeds, arms=arms, include=include, later=later)


def _values(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a sweep file that gives these; with `like: NAME` on top of those of NAME, which lies beside it or
    comes with the project, its overrides behind those."""
    values = dict(given)
    if "like" not in values:
        return values
    name = str(values.pop("like"))
    beside, shipped = path.with_name(f"{name}.yaml"), SWEEPS / f"{name}.yaml"
    other = beside if beside.is_file() else shipped
    if not other.is_file():
        known = sorted({*sweep_names(path.parent), *sweep_names()})
        raise ValueError(f"{path}: like={name}: neither beside it nor in sweeps/; {nearest(name, known)}")
    if "like" in read_yaml(other):
        raise ValueError(f"{path}: like={name}: is itself like another; name that one")
    shared = read_sweep(name, other.parent)
    own = values.get("overrides", [])
    overrides = [*shared.overrides, *own] if isinstance(own, list) else own
    return vars(shared) | {"name": path.stem} | values | {"overrides": overrides}


def _settings(arm: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Every combination of {key: value or list} as overrides; seeds are none. Text stays as it is: it may be a list or
    a mapping in Hydra's words."""
    values = {key: value for key, value in arm.items() if key not in SEEDS}
    lists = [v if isinstance(v, list) else [v] for v in values.values()]
    for combination in itertools.product(*lists):
        pairs = zip(values, combination, strict=True)
        yield tuple(f"{key}={value if isinstance(value, str) else quoted(value)}" for key, value in pairs)


def _arms(sweep: Sweep, extra: Sequence[str], *, is_preview: bool) -> Iterator[_Arm]:
    hash_of, shared = planned_hash if is_preview else content_hash, split_launch(sweep.overrides)[0]
    settings = [
        ((*a, *s), {"listed": arm, "starts": arm_starts(sweep, arm), "is_included": False, "is_late": is_late})
        for is_late, listed in ((False, sweep.arms), (True, sweep.later))
        for a in _settings(sweep.axes) for arm in listed for s in _settings(arm)
    ]  # fmt: skip
    settings += [
        (s, {"listed": arm, "starts": arm_starts(sweep, arm), "is_included": True, "is_late": False})
        for arm in sweep.include for s in _settings(arm)
    ]  # fmt: skip
    for setting, kind in progress_bar(settings, "arm"):
        words = " ".join(setting)
        try:
            config = load(with_default_precision([*shared, *setting, *extra]))
            known_parts(config)
        except ValueError as error:
            raise ValueError(f"{sweep.name}: arm {words}: {error}") from None
        try:
            composed = check(config)
        except ValueError as error:
            yield _Arm(words=words, config=config, reason=str(error), notes=(), **kind)
        else:
            found = resolve(config, hash_of)
            notes = tuple(advice(config, composed))
            yield _Arm(words=words, config=found, reason=None, notes=notes, **kind)


def plan(sweep: Sweep, extra: Sequence[str] = (), *, is_preview: bool = False) -> Planned:
    """The cells of a sweep, bases and seeds outermost so that whole comparisons finish early, and `later` arms behind
    all others. `extra` overrides come last. `is_preview`: no large weights are read, so that ids may be stand-ins.

    Raises ValueError, one line, for a word that is wrong beside anything, and for a seed among the overrides or arms.
    """
    listed = [arm for arms in (sweep.arms, sweep.include, sweep.later) for arm in arms]
    _refuse_seeds([*extra, *sweep.overrides, *sweep.axes, *itertools.chain.from_iterable(listed)])
    cells, impossible = dict[str, RunConfig](), dict[str, tuple[RunConfig, str]]()
    skipped, notes = dict[tuple[str, str], None](), dict[tuple[str, str], None]()
    excluded: dict[tuple[str, str], list[tuple[int, int]]] = {}
    tasks: set[str] = set()
    used = dict[str, RunConfig]()
    arms = list(_arms(sweep, extra, is_preview=is_preview))
    for arm in listed:
        _check_own_knobs(sweep.name, arm, [found for found in arms if found.listed is arm])
    if not any(word.lstrip("+").startswith(("method=", "precision")) for word in extra):
        _check_expectations(sweep, arms)
    every = _in_order(sweep, arms)
    for _, (base_seed, seed), arm in [
        (late, start, a) for late in (False, True) for start in every for a in arms
        if a.is_late == late and start in a.starts
    ]:  # fmt: skip
        cell = replace(arm.config, seed=seed, base_seed=base_seed)
        rule = next((r for r in sweep.exclude if not arm.is_included and matches(cell, r)), None)
        if rule is not None:
            excluded.setdefault((arm.words, in_words(rule)), []).append((base_seed, seed))
            continue
        used.setdefault(arm.words, cell)
        if arm.reason is not None:
            skipped[arm.words, arm.reason] = None
            impossible.setdefault(run_id(cell), (cell, arm.reason))
        else:
            cells.setdefault(run_id(cell), cell)
            notes |= dict.fromkeys((arm.words, line) for line in arm.notes)
            engine = cell.engine
            room = (cell.model, engine.name, engine.max_new_tokens, engine.max_model_len, cell.algo.overlong_buffer)
            if (data := str((cell.task, cell.evaluations, cell.base, room))) not in tasks:
                _check_data(cell, f"{sweep.name}: arm {arm.words}")
                tasks.add(data)
    if not extra:  # an override may rightly leave a rule without a cell, or an arm without its variant
        _check_variants(sweep, [to_json(cell) for cell in used.values()])
        unused = [in_words(rule) for rule in sweep.exclude if in_words(rule) not in {r for _, r in excluded}]
        notes |= dict.fromkeys((f"exclude {rule}", "agrees with no cell") for rule in unused)
    return Planned(
        sweep=sweep, cells=tuple(cells.values()), skipped=tuple(skipped), notes=tuple(notes),
        excluded=tuple(
            (words, rule + _where(sweep, found, next(arm.starts for arm in arms if arm.words == words)))
            for (words, rule), found in excluded.items()
        ),
        impossible=tuple(impossible.values()),
    )  # fmt: skip


def _in_order(sweep: Sweep, arms: Sequence[_Arm]) -> list[tuple[int, int]]:
    """(base seed, run seed) of all runs: the sweep's bases, then further ones, each with the run seeds in order."""
    every = [start for arm in arms for start in arm.starts]
    if not sweep.base_seeds:
        return list(dict.fromkeys([*((seed, seed) for seed in sweep.seeds), *every]))
    bases, seeds = dict.fromkeys([*sweep.base_seeds, *(b for b, _ in every)]), [*sweep.seeds, *(s for _, s in every)]
    return [(base, seed) for base in bases for seed in dict.fromkeys(seeds)]


def narrowed(planned: Planned, rule: Rule) -> Planned:
    """The plan with the cells that agree with all of a rule. Raises ValueError, one line, where none does."""
    cells, known = tuple(cell for cell in planned.cells if matches(cell, rule)), open_keys(planned.cells)
    if unknown := next((key for key in rule if key.startswith(OPEN) and key not in known), None):
        raise ValueError(f"where: no cell of {planned.sweep.name} has {unknown}; {nearest(unknown, known)}")
    if not cells:
        lone = [key for key in rule if not any(matches(cell, {key: rule[key]}) for cell in planned.cells)]
        valid = f"valid {lone[0]}: {', '.join(values_of(planned.cells, lone[0]))}" if lone else ""
        words = f"no cell of {planned.sweep.name} has {in_words(rule)}"
        raise ValueError(f"where: {words}; {valid or 'each alone agrees with some'}")
    impossible = tuple((cell, reason) for cell, reason in planned.impossible if matches(cell, rule))
    return replace(planned, cells=cells, impossible=impossible)


def check_possible(planned: Planned) -> None:
    """Raises ValueError, one line, with the reasons, where a plan has no cell that can run."""
    if planned.cells:
        return
    first = dict[str, str]()
    for words, reason in planned.skipped or planned.excluded:
        first.setdefault(reason, words)
    shown = "; ".join(f"arm {words}: {reason}" for reason, words in list(first.items())[:SHOWN])
    what = "impossible" if planned.skipped else "excluded"
    raise ValueError(f"{planned.sweep.name}: no cell can run, every arm is {what}: {shown}")


def seed_words(words: Iterable[str]) -> list[str]:
    """The overrides (or keys of some) that set a seed."""
    return [word for word in words if word.partition("=")[0].lstrip("+") in ("seed", "base_seed")]


def _refuse_seeds(words: Iterable[str]) -> None:
    for word in seed_words(words):
        key, _, value = word.partition("=")
        valid = f"{key.lstrip('+')}s: [{value or 0}] in the sweep's file"
        valid += f", or lowbit sweep --seeds {value or 0}" if "base" not in key else ""
        raise ValueError(f"{word}: a sweep gives every run its seeds; valid: {valid}")


def _check_own_knobs(name: str, listed: Mapping[str, Any], arms: Sequence[_Arm]) -> None:
    """Raises ValueError for an arm that sets a knob of a part which it has in no combination."""
    parts = {type(part).__name__ for arm in arms for part in known_parts(arm.config)}
    for key in listed:
        if key.startswith("knobs.") and key.split(".")[1] not in parts:
            raise ValueError(f"{name}: arm {arms[0].words}: {arms[0].reason}")


def _check_expectations(sweep: Sweep, arms: Sequence[_Arm]) -> None:
    """Raises ValueError for an expectation of an arm whose method and precision none of the sweep's arms has."""
    known = list(dict.fromkeys(f"{arm.config.method} {arm.config.precision.name}" for arm in arms))
    for place, name in _expected(sweep):
        if _plain(name) not in known:
            raise ValueError(f"{place}={name}: {NO_ARM}; {nearest(name, known)}")


def _check_variants(sweep: Sweep, configs: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError for an expectation of an arm whose variant none of these configs makes."""
    known = arm_names(configs) if sweep.expectations else []
    for place, name in _expected(sweep):
        if name not in known:
            alike = [other for other in known if _plain(other) == _plain(name)]
            raise ValueError(f"{place}={name}: {NO_ARM}; {nearest(name, alike or known)}")


def _expected(sweep: Sweep) -> Iterator[tuple[str, str]]:
    """(sweep and field, arm) of every arm that the expectations name."""
    for i, expected in enumerate(sweep.expectations):
        yield f"{sweep.name}: expectations.{i}.low", expected.low
        yield f"{sweep.name}: expectations.{i}.high", expected.high


def _plain(name: str) -> str:
    """Method and precision of an arm's name."""
    return " ".join(name.split(" ")[:2])


def _check_data(cell: RunConfig, words: str) -> None:
    try:
        check_data(cell)
    except ValueError as error:
        raise ValueError(f"{words}: {error}") from None


def _where(sweep: Sweep, found: Sequence[tuple[int, int]], own: Sequence[tuple[int, int]]) -> str:
    """The runs of an arm that a rule leaves out, in words; nothing where it is all of them."""
    if len(found) == len(own):
        return ""
    return ", seeds " + ", ".join(f"b{base}-s{seed}" if sweep.base_seeds else str(seed) for base, seed in found)


def with_default_precision(overrides: Sequence[str]) -> list[str]:
    """A method without a precision runs at its own default, the first it lists."""
    keys = {word.partition("=")[0]: word.partition("=")[2] for word in overrides}
    if "method" in keys and "precision" not in keys:
        return [*overrides, f"precision={method_named(keys['method']).precisions[0]}"]
    return list(overrides)
