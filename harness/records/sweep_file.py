"""A sweep's YAML file as reports read it: its question, and the methods that the others are compared with.

`harness.sweep.planning.Sweep` is the whole file; a report needs no cells, and results may have no file at all. Where
`sweeps/` does not tell the purpose of a sweep that ran (its file was given by a path), it is kept beside the records.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, ConfigDict, Field

from harness.config.load import parse, read_yaml, to_json
from harness.foundation.project_files import SWEEPS
from harness.foundation.whole_file import write_atomic
from harness.records.paths import purpose_path
from harness.records.stats.verdicts import MIN_SEEDS

RECIPE = "paper_"
"""Beginning of the name of a sweep that a paper's recipe makes."""
CONTROL = "bf16"
Endpoint = Literal["reference", "deployed"]
Score = Literal["accuracy", "auc", "rollout_accuracy", "deployed_auc", "reward"]
ENDPOINTS: tuple[Endpoint, ...] = get_args(Endpoint)
"""Policies that verdicts are about: in BF16, in their own rollout format. The first that a sweep declares ranks the
arms."""
BASELINES = ("flashrl", "naive")
"""Baselines of a sweep whose file names none: a plain correction, and no correction."""


def _rising(sizes: tuple[int, ...]) -> tuple[int, ...]:
    if any(a >= b for a, b in zip((0, *sizes), sizes, strict=False)):
        raise ValueError("numbers of seeds or bases that rise from at least 1 are expected")
    return sizes


Sizes = Annotated[tuple[int, ...], AfterValidator(_rising)]
"""Seeds or bases of an arm at each of several looks."""


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """One comparison of arms whose outcome was known before the sweep ran."""

    text: str
    score: Score
    """Column of the leaderboard."""
    low: str
    """The arm that scores lower: method, precision and, where it has one, variant ("naive int4 bypass_ppo")."""
    high: str
    is_close: bool = False
    """The two are nearly equal instead."""


@dataclass(frozen=True, kw_only=True)
class Until:
    """Rule of a sweep that runs until its arms are decided: its looks, and when it gives an arm up.

    It looks once every arm has `first` seeds, and again after every `batch` of further seeds.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    max_seeds: Annotated[int, Field(ge=2)]
    """Most seeds of an arm: the sweep's own, then those that follow the largest of them."""
    first: Annotated[int, Field(ge=2)] = MIN_SEEDS
    batch: Annotated[int, Field(ge=1)] = 1
    hopeless: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """An arm is given up where all the seeds it may still get would decide it with a smaller chance; 0: never."""

    def __post_init__(self) -> None:
        if self.first > self.max_seeds:
            raise ValueError(f"first={self.first}: more than max_seeds={self.max_seeds}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Seeds of an arm at each look that it may see."""
        return (*range(self.first, self.max_seeds, self.batch), self.max_seeds)


@dataclass(frozen=True, kw_only=True)
class Purpose:
    """Purpose of a sweep; fields are those of `harness.sweep.planning.Sweep`."""

    question: str = ""
    control: str = CONTROL
    endpoints: tuple[Endpoint, ...] = ENDPOINTS
    baselines: tuple[str, ...] = BASELINES
    expectations: tuple[Expectation, ...] = ()
    looks: Sizes = ()


def keep_purpose(sweep: str, meant: Purpose, results: Path, folder: Path = SWEEPS) -> None:
    """Keep the purpose of a sweep that runs beside its records, where its file does not tell the same."""
    path = purpose_path(results, sweep)
    if _of_file(sweep, folder) == meant:
        path.unlink(missing_ok=True)
    else:
        write_atomic(path, f"{json.dumps(to_json(meant), indent=2, ensure_ascii=False)}\n".encode())  # JSON is YAML


def purpose(sweep: str, results: Path, folder: Path = SWEEPS) -> Purpose:
    """The purpose of a sweep, or of a paper's recipe: the one that its results keep, else by its file; the defaults
    where there is no file. Raises ValueError for a wrong value."""
    kept = purpose_path(results, sweep)
    return read_purpose(kept) if kept.is_file() else _of_file(sweep, folder)


def _of_file(sweep: str, folder: Path) -> Purpose:
    path = folder / f"{sweep}.yaml"
    if sweep.startswith(RECIPE):
        path = folder / "papers" / f"{sweep.removeprefix(RECIPE)}.yaml"
    return read_purpose(path) if path.is_file() else Purpose()


def read_purpose(path: Path) -> Purpose:
    """The purpose in a file. The `baselines` of a search are a mapping of trials, no methods: the defaults stand in.
    Raises ValueError for a wrong value."""
    values = read_yaml(path)
    names = [field.name for field in fields(Purpose) if field.name in values]
    own = {name: values[name] for name in names if not isinstance(values[name], dict)}
    try:
        return parse(Purpose, own)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
