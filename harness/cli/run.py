"""`lowbit run`: one cell."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cli.options import OVERRIDES, add_again, add_machine, add_results, check_machine

if TYPE_CHECKING:
    from harness.api import Part
    from harness.config.schema import Launch, RunConfig


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = (
        "Example: lowbit run method=flashrl precision=int4. With a model of your own: lowbit run method=flashrl "
        "precision=int8 model=hf model.path=FOLDER task=gsm8k task.path=FOLDER"
    )
    parser.add_argument("overrides", nargs="*", default=[], help=OVERRIDES)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print configuration, predicted time and memory; run nothing",
    )
    add_again(parser, "a finished cell")
    add_machine(parser)
    add_results(parser, check=_check)


def _check(a: argparse.Namespace) -> None:
    check_machine(a)
    config, launch, _ = resolved(a.overrides, a.results, is_dry=True)
    from harness.run.checks import check_place
    from harness.sweep import finished

    if a.is_again or finished(config, launch) is None:
        check_place(config, launch)


def run(a: argparse.Namespace) -> int:
    """Run the cell, as a sweep of one. Exit code 1 if it did not end well."""
    check_machine(a)
    config, launch, notes = resolved(a.overrides, a.results, is_dry=a.dry_run)
    from harness.config.load import run_id, run_name, to_json
    from harness.engines.vllm.warm import notes as compiling
    from harness.foundation.number_cell import number_cell
    from harness.foundation.project_files import RESULTS
    from harness.records.paths import RUNS, policy_folder, record_path
    from harness.records.policies import has_policy
    from harness.run.checks import check_place
    from harness.sweep import Planned, Sweep, finished, run_sweep

    if a.dry_run:
        from harness.sweep.folder_time import check_named, machine_of
        from harness.sweep.preview import forecast_of

        machine = machine_of(launch, a.gpu, a.memory)
        check_named([config], machine)
        shown = {"run_id": run_id(config), "name": run_name(config), "config": _told(to_json(config))}
        print(json.dumps(shown | forecast_of(config, a.results, machine), indent=2))
        return 0
    from harness.records.packed import make_available
    from harness.sweep.preview import base_lines
    from harness.sweep.progress import Progress, summary_line
    from harness.sweep.queue import put_aside

    make_available(a.results, RUNS)  # else the folder of a new record would hide what is packed
    one = Sweep(name=RUNS, question="", arms=({},), seeds=(config.seed,))
    planned = Planned(sweep=one, cells=(config,), skipped=())
    if not a.is_again and (found := finished(config, launch)) is not None:
        print(f"finished before (--again runs it once more): {summary_line(found, found.name)}")
        if not has_policy(a.results, found, launch.save):
            print(f"note: it kept no policy of launch.save={launch.save}; --again trains it anew and keeps one")
        return 0
    for line in [*notes, *compiling(planned.cells)]:
        print(f"note: {line}")
    check_place(config, launch)
    if a.is_again and (aside := put_aside([config], launch)) is not None:
        print(f"what was there before is in {aside}; after a stop, the same command without --again goes on")
    for line in base_lines(planned.cells, planned.cells, {}, launch):
        print(line, flush=True)
    progress = Progress(planned.cells, planned.cells)
    try:
        records, is_interrupted = run_sweep(planned, launch, 1, progress)
    finally:
        progress.close()
    if is_interrupted:
        print(f"\ninterrupted; the same command {'without --again ' if a.is_again else ''}goes on from here")
        return 130
    if (path := record_path(a.results, RUNS, run_id(config))).exists():  # it was not stopped from outside
        print(f"result: {path}")
    if records[0].status == "ok":
        k3, place = records[0].summary.get("k3_median"), "" if a.results == RESULTS else f" --results {a.results}"
        print(f"mismatch: k3 {number_cell(k3, '.1e')} nats a token, median of the steps")
        print(f"figures: lowbit report {RUNS}{place}; formats in force: lowbit passport {run_id(config)}{place}")
        if launch.save != "none" and has_policy(a.results, records[0], launch.save):
            folder = policy_folder(a.results, RUNS, run_id(config))
            print(f"policy: {folder}; lowbit eval and lowbit export take it by {run_id(config)}")
    return 0 if records[0].status == "ok" else 1


def _told(values: dict[str, Any]) -> dict[str, Any]:
    """A configuration as JSON; where the model is a folder, without shape and base, whose defaults are those of models
    made here."""
    from harness.config.schema import FOLDER_SHAPE

    if values["model"]["path"] is None:
        return values
    left_out = (*FOLDER_SHAPE, "sft_lr")
    model = {name: value for name, value in values["model"].items() if name not in left_out}
    return {name: value for name, value in values.items() if name != "base"} | {"model": model}


def _replaced(config: RunConfig, parts: Sequence[Part]) -> list[str]:
    """Remark on a method's own parts that the `parts` of a configuration leave out."""
    from methods import method_named

    kept = {type(part).__name__ for part in parts}
    gone = [name for part in method_named(config.method).parts if (name := type(part).__name__) not in kept]
    return [f"parts: method {config.method} runs without its own {', '.join(gone)}"] if config.parts and gone else []


def resolved(overrides: Sequence[str], results: Path, *, is_dry: bool) -> tuple[RunConfig, Launch, list[str]]:
    """(configuration, launch, remarks) of one cell; `is_dry`: without reading large weights. Raises ValueError, one
    line, for words that cannot run on whatever machine."""
    from harness.config.load import launch_of, load, split_launch
    from harness.records.paths import RUNS

    overrides, given = split_launch(overrides)
    launch = launch_of(given, results=str(results), sweep=RUNS)
    load(overrides)  # refuses wrong words before torch is imported
    from harness.config.compose import advice
    from harness.config.resolve import resolve
    from harness.models.checkpoint import content_hash, planned_hash
    from harness.run.checks import check, check_launch
    from harness.start.prepare import check_data
    from harness.sweep import with_default_precision

    given = load(with_default_precision(overrides))
    config = resolve(given, planned_hash if is_dry else content_hash)
    composed = check(given)  # not `config`, whose knobs are all given
    notes = [*advice(given, composed), *_replaced(config, composed.parts)]
    check_data(config)
    check_launch(config, launch)
    return config, launch, notes
