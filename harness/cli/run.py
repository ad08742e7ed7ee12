"""`lowbit run`: one cell."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from harness.cli.options import OVERRIDES, add_results


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("overrides", nargs="*", default=[], help=OVERRIDES)
    parser.add_argument("--dry-run", action="store_true", help="print the resolved configuration, run nothing")
    add_results(parser)


def run(a: argparse.Namespace) -> int:
    """Run the cell."""
    return run_one(a.overrides, results=a.results, is_dry=a.dry_run)


def run_one(overrides: Sequence[str], *, results: Path, is_dry: bool) -> int:
    """One cell, as a sweep of one. Exit code 1 if it did not end well."""
    from harness.config.load import launch_of, load, run_id, run_name, split_launch, to_json

    overrides, given = split_launch(overrides)
    launch = launch_of(given, results=str(results), sweep="runs")
    load(overrides)  # refuses wrong words before torch is imported
    from harness.config.compose import advice
    from harness.config.resolve import resolve
    from harness.models.checkpoint import content_hash
    from harness.run.checks import check, check_place
    from harness.start.prepare import check_data
    from harness.sweep import Planned, Sweep, finished, run_sweep, with_default_precision

    config = resolve(load(with_default_precision(overrides)), lambda path: content_hash(Path(path)))
    notes = advice(config, check(config))
    check_data(config)
    if is_dry:
        print(json.dumps({"run_id": run_id(config), "name": run_name(config), "config": to_json(config)}, indent=2))
        return 0
    from harness.sweep.progress import Progress, summary_line

    one = Sweep(name="runs", question="", arms=({},), seeds=(config.seed,))
    planned = Planned(sweep=one, cells=(config,), skipped=())
    if (found := finished(config, launch)) is not None:
        print(f"finished before ({found.run_id}): {summary_line(found)}")
        return 0
    for line in notes:
        print(f"note: {line}")
    check_place(config, launch)
    progress = Progress(planned.cells, 1)
    try:
        records, is_interrupted = run_sweep(planned, launch, 1, progress)
    finally:
        progress.close()
    if is_interrupted:
        print("\ninterrupted; the same command goes on from here")
        return 130
    print(f"result: {results}/runs/runs/{run_id(config)}.json")
    return 0 if records[0].status == "ok" else 1
