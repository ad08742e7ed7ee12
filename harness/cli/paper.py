"""`lowbit paper`: published recipes, with what this machine lacks for them; launched, their numbers beside ours."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.options import (
    OVERRIDES,
    add_again,
    add_machine,
    add_results,
    add_tracking,
    add_workers,
    check_machine,
    check_named_folder,
    check_trackers,
)
from harness.foundation.text_table import text_table

if TYPE_CHECKING:
    from harness.cli.sweep import Way
    from harness.published.recipes.recipe import Recipe
    from harness.sweep import Planned, Sweep

MARKS = """\
source: code: read in released code; paper: in the paper's text; notes: in summaries by others; ours: no source gives
it.  Scores are in percent, speeds a multiple of BF16's."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("name", nargs="?", help="a recipe; without it, every recipe in a line")
    parser.add_argument("overrides", nargs="*", default=[], help=f"{OVERRIDES}; they apply to every cell and come last")
    parser.add_argument("--model", nargs="+", action="extend", default=[], metavar="NAME=DIR",
                        help="folders of models, by their names in the recipe")  # fmt: skip
    parser.add_argument("--data", nargs="+", action="extend", default=[], metavar="NAME=DIR",
                        help="files or folders of data sets, by their names in the recipe")  # fmt: skip
    parser.add_argument("--tiny", action="store_true", dest="is_tiny",
                        help="the small twin: a random model and questions made here, two steps on a CPU")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="list cells, memory, hours and what is missing")
    add_again(parser, "finished cells")
    add_machine(parser)
    add_tracking(parser)
    add_workers(parser, "cells")
    add_results(parser, writes=lambda a: bool(a.model or a.data or a.is_tiny), check=_check)


def _check(a: argparse.Namespace) -> None:
    if (asked := _asked(a)) is not None and not a.is_tiny:
        from harness.cli.sweep import check_start
        from harness.published.recipes.recipe import bound

        if a.model or a.data:
            check_start(_whole(bound(*asked)), a.overrides, a.results, _way(a))


def _asked(a: argparse.Namespace) -> tuple[Recipe, dict[str, Path], dict[str, Path]] | None:
    """(recipe, its models, its data) of a call; None where all recipes are listed. Raises ValueError for wrong
    input."""
    check_machine(a)
    check_trackers(a.trackers)
    from harness.published.recipes.recipe import read_recipe

    if a.name is None:
        for option, value in (
            ("--model", a.model), ("--data", a.data), ("--tiny", a.is_tiny), ("--dry-run", a.dry_run),
            ("--again", a.is_again),
        ):  # fmt: skip
            if value:
                raise ValueError(f"{option}: of which recipe? lowbit paper lists them, lowbit paper NAME {option} ...")
        return None
    recipe = read_recipe(a.name)
    models, data = _folders("model", a.model), _folders("data", a.data)
    from harness.config.load import check_overrides, load, of_folder, split_launch

    check_overrides(a.overrides)
    check_named_folder(a.overrides)
    load([*of_folder("model"), *split_launch(a.overrides)[0]])  # as every model of a recipe is a folder's
    if a.is_tiny and (models or data):
        raise ValueError(f"--tiny makes model and data itself: leave --{'model' if models else 'data'} out")
    if (a.overrides or a.dry_run or a.is_again) and not (models or data or a.is_tiny):
        raise ValueError(
            f"lowbit paper {a.name}: a launch or a dry run needs --model NAME=FOLDER and --data NAME=FOLDER, or "
            "--tiny for the small twin"
        )
    return recipe, models, data


def run(a: argparse.Namespace) -> int:
    """List, show or launch."""
    if (asked := _asked(a)) is None:
        return _list()
    recipe, models, data = asked
    if not (models or data or a.is_tiny):
        return _show(recipe)
    from harness.config.load import split_launch
    from harness.published.recipes.recipe import bound

    way = _way(a)
    if a.is_tiny:
        from harness.published.recipes.twin import twin
        from harness.records.paths import work_folder

        results = work_folder(a.results, "twins")
        return _launch(recipe, twin(recipe, results / "made"), results, way, a)
    sweeps = bound(recipe, models, data)  # a twin needs no GPU, and none of the paper's memory
    print("\n".join(_missing(recipe, models, data, split_launch(a.overrides)[1].get("gpus"))))
    return _launch(recipe, sweeps, a.results, way, a)


def _way(a: argparse.Namespace) -> Way:
    from harness.cli.sweep import Way

    trackers = () if a.is_tiny else a.trackers
    return Way(workers=a.workers, trackers=trackers, gpu=a.gpu, memory_gib=a.memory, is_again=a.is_again)


def _whole(sweeps: dict[str, Sweep]) -> Sweep:
    """The arms of a recipe as one sweep."""
    from dataclasses import replace

    return replace(next(iter(sweeps.values())), arms=tuple(arm for sweep in sweeps.values() for arm in sweep.arms))


def _launch(recipe: Recipe, sweeps: dict[str, Sweep], results: Path, way: Way, a: argparse.Namespace) -> int:
    from harness.cli.sweep import sweep_of
    from harness.config.load import split_launch
    from harness.published.recipes.beside import table
    from harness.records.paths import runs_folder
    from harness.records.run_result import read_result
    from harness.sweep import plan

    whole = _whole(sweeps)
    code = sweep_of(whole, a.overrides, results=results, way=way, is_dry=a.dry_run, is_shown=not a.is_tiny)
    if a.dry_run:
        return code
    folder = runs_folder(results, whole.name)
    words = split_launch(a.overrides)[0]
    records = {
        label: [read_result(path) for cell in _cells(plan(sweep, words)) if (path := folder / f"{cell}.json").exists()]
        for label, sweep in sweeps.items()
    }
    ours = "this twin" if a.is_tiny else "ours"
    print(text_table(("metric", "arm", "published", ours), table(recipe, records, folder)))
    if a.is_tiny:
        print("\nEvery arm ran. The twin's numbers say nothing of the paper: its model is random and takes two steps."
              if code == 0 else "\nNot every arm of the twin ran.")  # fmt: skip
    return code


def _cells(planned: Planned) -> list[str]:
    from harness.config.load import run_id

    return [run_id(cell) for cell in (*planned.cells, *(cell for cell, _ in planned.impossible))]


def _folders(what: str, words: Sequence[str]) -> dict[str, Path]:
    """NAME -> DIR. Raises ValueError for a word of another form, a name that comes twice, and what does not exist."""
    found: dict[str, Path] = {}
    for given in words:
        name, separator, path = given.partition("=")
        if not separator or not name or not path:
            raise ValueError(f"--{what} {given}: NAME=DIR is expected; other overrides stand before --{what}")
        if name in found:
            raise ValueError(f"--{what} {given}: {name}={found[name]} is given, too; valid: one of them")
        if not Path(path).exists():
            raise ValueError(f"--{what} {given}: {path} does not exist")
        found[name] = Path(path)
    return found


def _list() -> int:
    from harness.published.recipes.lacks import of_machine
    from harness.published.recipes.recipe import read_recipe, recipe_names

    recipes = [read_recipe(name) for name in recipe_names()]
    rows = [
        (r.name, r.paper.id, "+".join(r.models), str(len(r.arms)), "; ".join(of_machine(r)) or "nothing")
        for r in recipes
    ]
    print(text_table(("recipe", "paper", "models", "arms", "lacking here"), rows))
    print("\nlowbit paper NAME shows a recipe; lowbit paper NAME --tiny runs its small twin.")
    return 0


def _missing(recipe: Recipe, models: Collection[str], data: Collection[str], gpus: int | None = None) -> list[str]:
    """Lines on what a launch with these models, data sets and GPUs lacks, needs and does unlike the paper."""
    from harness.published.recipes.lacks import memory_gib, of_machine, of_verl

    chosen = {key: model for key, model in recipe.models.items() if key in models} or recipe.models
    lines = [f"missing  {line}" for line in of_machine(recipe, gpus)]
    lines += [f"missing  evaluation on {e['data']}: no --data {e['data']}=DIR" for e in recipe.evaluations
              if e["data"] not in data]  # fmt: skip
    lines += [f"verl     {line}" for line in of_verl(recipe)]
    room = recipe.scale.gpus * recipe.scale.nodes * recipe.scale.memory_gib
    lines += [
        f"memory   {key}: {memory_gib(model.parameters_b):.0f} GiB of masters, gradients and moments over all GPUs, 16 "
        f"bytes a parameter; the published scale has {room} GiB"
        for key, model in chosen.items()
    ]
    return [*lines, *(f"differs  {line}" for line in recipe.differs)]


def _show(recipe: Recipe) -> int:
    from harness.published.recipes.beside import settings_table, table

    scale = recipe.scale
    print(f"{recipe.paper.title} ({recipe.paper.id}): {recipe.paper.experiment}\n{recipe.question}\n")
    print(f"scale    {scale.nodes} x {scale.gpus} GPUs ({scale.gpu}), {scale.memory_gib} GiB each [{scale.mark}]")
    for what, hubs in (("model", recipe.models), ("data", recipe.data)):
        for key, value in hubs.items():
            print(f"{what:<8} {key}={value.hub}")
    print("\n".join(_missing(recipe, recipe.models, recipe.data)), end="\n\n")
    print(text_table(("setting", "value", "source"), settings_table(recipe)), end="\n\n")
    print(MARKS, end="\n\n")
    rows = [(label, " ".join(f"{key}={value}" for key, value in arm.items())) for label, arm in recipe.arms.items()]
    print(text_table(("arm", "overrides"), rows), end="\n\n")
    print(text_table(("metric", "arm", "published", "ours"), table(recipe, {}, Path())))
    words = " ".join([f"{key}=DIR" for key in recipe.data])
    print(f"\nlowbit paper {recipe.name} --model {next(iter(recipe.models))}=DIR --data {words} [--dry-run]")
    return 0
