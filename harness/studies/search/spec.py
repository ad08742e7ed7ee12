"""A search as its YAML file says it: knobs, seeds, objectives, constraint, budget, pruning, what is confirmed.

Values only. What Optuna makes of it is in `harness.studies.search.store`, what a trial runs in
`harness.studies.search.space`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from harness import NUMERICS_VERSION
from harness.config.load import parse, read_yaml
from harness.config.schema import Name, NotNegative, Whole
from harness.foundation.did_you_mean import nearest
from harness.records.run_result import summarise
from harness.records.stats import DELTA
from harness.sweep import SWEEPS, file_of

METRICS = (*summarise([], []), "time_s")
"""Names that an objective may have: a number of a record's summary, or the seconds of a cell."""
ACCURACIES = tuple(name for name in METRICS if "accuracy" in name or name.startswith("auc"))
"""Those that are accuracies, as fractions."""
Chance = Annotated[float, Field(ge=0, lt=1)]
_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True)
class Knob:
    """One dimension of the space: a range, or choices. Its name is an override key, or is used as {name}."""

    __pydantic_config__ = _STRICT
    low: int | float | None = None
    high: int | float | None = None
    """Two whole numbers make a whole-numbered range; write 1.0 for a real one."""
    log: bool = False
    step: int | float | None = None
    choices: list[Any] | dict[str, list[str]] | None = None
    """Values; or names, each with the overrides that it stands for, in which {other} is the value of another knob."""
    when: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    """Knobs above this one and the values of them at which it exists."""

    @property
    def is_whole(self) -> bool:
        """Is it a range of whole numbers?"""
        return isinstance(self.low, int) and isinstance(self.high, int)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Number that is optimised; a trial's value is the mean over its seeds, a geometric one with `log`."""

    __pydantic_config__ = _STRICT
    metric: str
    direction: Literal["maximize", "minimize"]
    log: bool = False
    """Averages and compares logarithms: for mismatch, whose spread grows with its size."""
    resolution: NotNegative = 0.0
    """The sampler sees values rounded to multiples of it, so that it does not chase noise; 0 does not round."""


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """A trial is feasible where the mean over its seeds is at most the bound."""

    __pydantic_config__ = _STRICT
    metric: str
    at_most: float


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits of a search; the first that is reached ends it. All are counted over finished and pruned trials."""

    __pydantic_config__ = _STRICT
    trials: int | None = None
    cells: int | None = None
    core_seconds: float | None = None
    per: str | None = None
    """A knob with choices: each is searched by a sampler of its own and gets an equal share."""


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Optuna sampler that proposes trials."""

    __pydantic_config__ = _STRICT
    name: Literal["tpe", "nsga2", "random", "grid"] = "tpe"
    """grid: every combination of the choices once in every share, in the file's order (likely ones first)."""
    seed: int = 0
    startup: Whole = 10
    """Random trials before TPE begins; population size of NSGA-II."""


@dataclass(frozen=True, kw_only=True)
class Pruner:
    """Pruning of trials; the rules and their error rates are in `harness.studies.search.pruning`."""

    __pydantic_config__ = _STRICT
    alpha: Chance = 0.01
    """Chance per look to give up a trial that is as good as the best one. 0 turns the rule off."""
    min_trials: Whole = 5
    """Complete trials before trials are compared."""
    collapse_alpha: Chance = 0.001
    """Chance to give up a cell whose reward has not moved, taken for one that fell. 0 turns the rule off."""
    reward_quantile: Chance = 0.0
    """A cell whose reward half-way is in this lowest share of its seed's finished cells is given up. 0: off."""
    halving: int = 0
    """After every seed a trial goes on only among the best 1/halving of its share's. 0: off."""


@dataclass(frozen=True, kw_only=True)
class Confirm:
    """Runs that are repeated on fresh seeds when the search has ended: baselines, references and the best trial."""

    __pydantic_config__ = _STRICT
    seeds: tuple[Whole, ...] = ()
    margin: float | None = None
    """Difference in the first objective, in its unit, below which two are equal (null takes 0.03 for an accuracy); a
    factor above 1 where the objective compares logarithms."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """One file `sweeps/search_*.yaml`."""

    __pydantic_config__ = _STRICT
    name: Name
    question: str
    overrides: tuple[str, ...] = ()
    space: dict[str, Knob]
    seeds: tuple[Whole, ...]
    """Seeds of every trial, one after another; each seeds the base and the run together."""
    objectives: tuple[Objective, ...]
    """The first one ranks trials; all together make the Pareto front."""
    constraint: Constraint | None = None
    budget: Budget
    sampler: Sampler = field(default_factory=Sampler)
    pruner: Pruner = field(default_factory=Pruner)
    baselines: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """Name -> knobs: trials that run first, such as a paper's defaults. What the best is compared with."""
    references: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Name -> overrides outside the space, run on the seeds of `confirm` for comparison."""
    confirm: Confirm = field(default_factory=Confirm)

    @property
    def margin(self) -> float:
        """Difference of the first objective's `scaled` values below which two are equal."""
        margin = DELTA if self.confirm.margin is None else self.confirm.margin
        return math.log(margin) if self.objectives[0].log else margin

    def is_log(self, metric: str) -> bool:
        """Does an objective average and compare the logarithms of this metric?"""
        return any(objective.metric == metric and objective.log for objective in self.objectives)

    @property
    def shares(self) -> tuple[str, ...]:
        """The choices of `budget.per`, or one share without a name."""
        knob = self.space[self.budget.per] if self.budget.per else None
        return ("",) if knob is None else tuple(str(choice) for choice in knob.choices or ())


def read_search(name: str, folder: Path = SWEEPS) -> Search:
    """The search `name`, or a path to a YAML file. Raises ValueError, one line, for unknown names, keys or values."""
    path = file_of(name, folder, "search")
    try:
        search = parse(Search, {"name": path.stem} | read_yaml(path))
        check_search(search)
    except ValueError as error:
        words = str(error)
        raise ValueError(words if words.startswith(str(path)) else f"{path}: {words}") from None
    return search


def check_search(search: Search) -> None:
    """Raises ValueError, one line, naming what cannot be searched."""
    if not search.space or not search.seeds or not search.objectives:
        raise ValueError("space, seeds and objectives need at least one entry each")
    for objective in (*search.objectives, *([search.constraint] if search.constraint else [])):
        if objective.metric not in METRICS:
            raise ValueError(f"unknown metric {objective.metric}; {nearest(objective.metric, METRICS)}")
    if len({o.metric for o in search.objectives}) < len(search.objectives):
        raise ValueError("objectives: the same metric twice")
    for where, seeds in (("seeds", search.seeds), ("confirm.seeds", search.confirm.seeds)):
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"{where}={list(seeds)}: the same seed twice")
    if again := sorted(set(search.seeds) & set(search.confirm.seeds)):
        raise ValueError(f"confirm.seeds={again}: seeds of the search are not fresh")
    _check_margin(search)
    if search.pruner.halving not in (0, *range(2, 11)):
        raise ValueError(f"pruner.halving={search.pruner.halving}: choose 0 (off) or 2 to 10")
    _check_budget(search)
    if search.sampler.name == "grid":
        _check_grid(search)
    above: dict[str, Knob] = {}
    for name, knob in search.space.items():
        _check_knob(name, knob, above)
        above[name] = knob
    _check_names(search)
    for name, values in search.baselines.items():
        _check_baseline(name, values, search.space)


def best_name(share: str) -> str:
    """Name of a share's best trial beside baselines and references: "best" where there are no shares."""
    return f"best {share}".strip()


def _check_names(search: Search) -> None:
    """Raises ValueError for a baseline or reference whose name another of the confirmation has."""
    taken = {best_name(share) for share in search.shares}
    for kind, names in (("baselines", search.baselines), ("references", search.references)):
        for name in names:
            if name in taken:
                raise ValueError(f"{kind}.{name}: the best of a share or a baseline is called so; give another name")
        taken |= set(names)


def _check_margin(search: Search) -> None:
    margin, metric = search.confirm.margin, search.objectives[0].metric
    if search.objectives[0].log:
        if (search.confirm.seeds or margin is not None) and not 1 < (margin or 0) < math.inf:
            given = "null" if margin is None else margin
            raise ValueError(
                f"confirm.margin={given}: logarithms of {metric} are compared; give the factor, above 1 and finite, "
                "below which two settings are equal"
            )
        return
    if margin is not None and not (0 < margin < math.inf):
        raise ValueError(f"confirm.margin={margin}: above 0 and finite")
    if search.confirm.seeds and margin is None and metric not in ACCURACIES:
        raise ValueError(
            f"confirm.margin=null: {metric} is no accuracy, for which {DELTA:g} is taken; give the difference in "
            f"{metric} below which two settings are equal"
        )


def _check_budget(search: Search) -> None:
    budget = search.budget
    limits = [budget.trials, budget.cells, budget.core_seconds]
    if all(limit is None for limit in limits) or any(limit is not None and limit <= 0 for limit in limits):
        raise ValueError("budget: at least one of trials, cells and core_seconds, each above 0")
    if budget.per is not None:
        knob = search.space.get(budget.per)
        if knob is None or knob.choices is None or knob.when:
            valid = [name for name, knob in search.space.items() if knob.choices is not None and not knob.when]
            raise ValueError(f"budget.per={budget.per}: not an unconditional knob with choices; valid: {valid}")


def _check_grid(search: Search) -> None:
    ranges = [name for name, knob in search.space.items() if knob.choices is None or knob.when]
    if ranges:
        raise ValueError(f"sampler.name=grid: space.{ranges[0]} is a range or conditional; give unconditional choices")
    size = math.prod(len(knob.choices or ()) for knob in search.space.values())
    if search.baselines or search.budget.trials != size:
        raise ValueError(f"sampler.name=grid: no baselines, and budget.trials={size}, the number of combinations")


def _check_knob(name: str, knob: Knob, above: Mapping[str, Knob]) -> None:
    where = f"space.{name}"
    if (knob.choices is None) == (knob.low is None or knob.high is None):
        raise ValueError(f"{where}: either choices, or low and high")
    if knob.choices is not None:
        if len(knob.choices) < 1:
            raise ValueError(f"{where}.choices: at least one is needed")
        for key in ("low", "high", "log", "step"):
            if (value := getattr(knob, key)) not in (None, False):
                raise ValueError(f"{where}.{key}={value}: of a range, and does not go with choices")
    if knob.low is not None and knob.high is not None:
        if not knob.low < knob.high:
            raise ValueError(f"{where}: low={knob.low} is not below high={knob.high}")
        if knob.log and knob.low <= 0:
            raise ValueError(f"{where}.low={knob.low}: a logarithmic range is above 0")
        if knob.step is not None and (knob.step <= 0 or knob.log):
            raise ValueError(f"{where}.step={knob.step}: above 0, and not with log")
        if knob.is_whole and knob.step is not None and knob.step != int(knob.step):
            raise ValueError(f"{where}.step={knob.step}: a range of whole numbers; write low={knob.low}.0 for others")
    for key, values in knob.when.items():
        if key not in above:
            raise ValueError(f"{where}.when: {key} is not a knob above this one; {nearest(key, above)}")
        choices = above[key].choices
        if choices is None or any(value not in choices for value in values):
            raise ValueError(f"{where}.when.{key}={values}: valid: {list(choices or ())}")


def is_active(knob: Knob, values: Mapping[str, Any]) -> bool:
    """Does a knob exist beside these values of the knobs above it?"""
    return all(values.get(key) in allowed for key, allowed in knob.when.items())


def _check_baseline(name: str, values: Mapping[str, Any], space: Mapping[str, Knob]) -> None:
    for key in values:
        if key not in space:
            raise ValueError(f"baselines.{name}: unknown knob {key}; {nearest(key, space)}")
    for key, knob in space.items():
        if is_active(knob, values) != (key in values):
            verb = "is missing" if key not in values else "does not exist beside the other values"
            raise ValueError(f"baselines.{name}: {key} {verb}")
        value = values.get(key)
        if key in values and knob.choices is not None and value not in knob.choices:
            raise ValueError(f"baselines.{name}.{key}={value}: valid: {list(knob.choices)}")
        if key in values and knob.low is not None and knob.high is not None:
            is_inside = isinstance(value, (int, float)) and knob.low <= value <= knob.high
            if not is_inside:
                raise ValueError(f"baselines.{name}.{key}={value}: outside {knob.low} to {knob.high}")
            if knob.is_whole and not isinstance(value, int):
                raise ValueError(f"baselines.{name}.{key}={value}: the range is of whole numbers")


def identity(search: Search) -> dict[str, Any]:
    """Settings that decide whether trials can be compared, as plain JSON; the budget may grow and is not part of it."""
    values = asdict(search)
    kept = ("overrides", "space", "seeds", "objectives", "constraint", "pruner")
    if not search.pruner.halving:
        del values["pruner"]["halving"]  # studies from before it are the same search
    found = {key: values[key] for key in kept} | {"budget.per": search.budget.per, "numerics_version": NUMERICS_VERSION}
    return json.loads(json.dumps(found))


def changes(stored: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> list[str]:
    """One line per key at which two identities differ."""
    lines: list[str] = []
    for key in sorted({*stored, *wanted}):
        old, new = stored.get(key, "absent"), wanted.get(key, "absent")
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += changes(old, new, f"{prefix}{key}.")
        elif old != new:
            lines.append(f"{prefix}{key}: {old} in the study, {new} in the file")
    return lines
