"""A published recipe: its file, and the sweep that it becomes with models and data of this machine.

A file of `sweeps/papers/` has every setting under the mark of its source, so that what is ours never passes for
theirs. Models and data are bound when a recipe is launched. Left out: PPO with a critic, which runs as GRPO and is
said so under `differs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict

from harness.config.load import parse, quoted, read_yaml
from harness.foundation.did_you_mean import nearest
from harness.records.sweep_file import RECIPE, SWEEPS
from harness.sweep import Sweep

PAPERS = SWEEPS / "papers"
Mark = Literal["code", "paper", "notes", "ours"]
"""Read in released code; in the paper's text; in summaries by others; our choice, for no source gives it."""
_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True)
class Paper:
    """The publication."""

    __pydantic_config__ = _STRICT
    title: str
    id: str
    experiment: str
    """The experiment of it that the recipe repeats."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Hardware of the publication, or a guess where it names none."""

    __pydantic_config__ = _STRICT
    gpus: int
    """In one node."""
    nodes: int = 1
    gpu: str
    memory_gib: int
    """Memory of one GPU."""
    mark: Mark


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model that the publication trains."""

    __pydantic_config__ = _STRICT
    hub: str
    family: Literal["qwen2", "qwen3", "llama"]
    template: Literal["qwen2.5", "qwen3", "llama3", "r1", "none"]
    """Chat template that its tokenizer brings."""
    parameters_b: float
    """In billions."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """A data set by its place on the hub, and the task that reads it."""

    __pydantic_config__ = _STRICT
    hub: str
    task: str


@dataclass(frozen=True, kw_only=True)
class Published:
    """Numbers of the publication: one metric, by arm."""

    __pydantic_config__ = _STRICT
    metric: str
    mark: Mark
    source: str
    values: dict[str, float | str]
    """Arm -> value; text where it says what no number does. Names that are no arm are shown without ours."""
    ours: str | None = None
    """Our measure beside it (`harness.published.recipes.beside.measured`); null: none."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One file of `sweeps/papers/`."""

    __pydantic_config__ = _STRICT
    name: str
    question: str
    paper: Paper
    scale: Scale
    models: dict[str, Model]
    data: dict[str, Data]
    train: str
    """The data set that is trained on, a key of `data`."""
    settings: dict[Mark, dict[str, Any]]
    """Mark -> override key -> value, of every arm."""
    arms: dict[str, dict[str, Any]]
    """Name -> override key -> value."""
    control: str = "bf16"
    """Method of the reference arm."""
    evaluations: tuple[dict[str, Any], ...] = ()
    """Evaluations beside the task's own; `data` names the set in place of a path."""
    published: tuple[Published, ...] = ()
    differs: tuple[str, ...] = ()
    """Sentences on what is not as published."""
    tiny: dict[str, Any] = field(default_factory=dict[str, Any])
    """Values of the small twin for keys that arms set."""
    seeds: tuple[int, ...] = (0, 1, 2)

    def __post_init__(self) -> None:
        keys = [key for settings in self.settings.values() for key in settings]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise ValueError(f"settings: {', '.join(sorted(twice))} stands under two marks")
        if self.train not in self.data:
            raise ValueError(f"train={self.train}: no such data; {nearest(self.train, self.data)}")
        for evaluation in self.evaluations:
            if evaluation.get("data") not in self.data:
                raise ValueError(f"evaluations: data={evaluation.get('data')} is none of {', '.join(self.data)}")

    @property
    def sweep_name(self) -> str:
        """Folder of its records."""
        return RECIPE + self.name

    @property
    def hardware(self) -> tuple[int, int]:
        """(nodes, GPUs of each) that a run takes: those of the publication under verl, else one GPU."""
        return (self.scale.nodes, self.scale.gpus) if self.values.get("trainer") == "verl" else (1, 1)

    @property
    def values(self) -> dict[str, Any]:
        """Override key -> value, whatever its mark."""
        return {key: value for settings in self.settings.values() for key, value in settings.items()}

    def overrides(self) -> list[str]:
        """Every setting as an override; choices of groups first, for they bring values of their own."""
        ordered = sorted(self.values.items(), key=lambda item: "." in item[0])
        return [f"{key}={quoted(value)}" for key, value in ordered]


def recipe_names(folder: Path = PAPERS) -> list[str]:
    """Every recipe."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def read_recipe(name: str, folder: Path = PAPERS) -> Recipe:
    """The recipe `name`. Raises ValueError, one line, for an unknown name, key or value."""
    path = folder / f"{name}.yaml"
    if not path.is_file():
        raise ValueError(f"paper {name!r} not found; {nearest(name, recipe_names(folder))}")
    values = read_yaml(path)
    try:
        return parse(Recipe, {"name": path.stem} | values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def bound(recipe: Recipe, models: Mapping[str, Path], data: Mapping[str, Path]) -> dict[str, Sweep]:
    """Arm -> its sweep of one arm, with the folders given for `models` and `data`.

    Raises ValueError, one line, for names that the recipe does not have, and where no model or not the training data
    are given. An evaluation whose data are not given is left out.
    """
    for what, given, known in (("model", models, recipe.models), ("data", data, recipe.data)):
        for key in given:
            if key not in known:
                raise ValueError(f"{what}: {recipe.name} has no {key!r}; {nearest(key, known)}")
    if not models:
        wanted = " or ".join(f"{key}=DIR ({model.hub})" for key, model in recipe.models.items())
        raise ValueError(f"model: {recipe.name} needs a folder: --model {wanted}")
    if recipe.train not in data:
        raise ValueError(f"data: {recipe.name} trains on {recipe.data[recipe.train].hub}: --data {recipe.train}=DIR")
    nodes, gpus = recipe.hardware
    overrides = [*recipe.overrides(), f"task.path={quoted(str(data[recipe.train]))}"]
    overrides += [f"launch.nodes={nodes}", f"launch.gpus={gpus}"]
    if found := evaluations(recipe, data):
        overrides.append(f"evaluations={quoted(found)}")
    return {
        label: Sweep(
            name=recipe.sweep_name, question=recipe.question, control=recipe.control,
            overrides=("model=hf", *overrides),
            arms=tuple({**arm, "model.name": key, "model.path": quoted(str(path))} for key, path in models.items()),
            seeds=recipe.seeds,
        )
        for label, arm in recipe.arms.items()
    }  # fmt: skip


def evaluations(recipe: Recipe, data: Mapping[str, Path]) -> list[dict[str, Any]]:
    """The recipe's evaluations whose data are given, with their paths."""
    return [
        {"task": recipe.data[e["data"]].task, "path": str(data[e["data"]])}
        | {key: value for key, value in e.items() if key != "data"}
        for e in recipe.evaluations
        if e["data"] in data
    ]
