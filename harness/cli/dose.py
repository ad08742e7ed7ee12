"""`lowbit dose`: lost accuracy against mismatch times length, over all committed records."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.cli.options import add_results, add_write


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--predict", metavar="SWEEP", help="write what the curve says of a sweep before it runs")
    parser.add_argument("--probe", type=Path, metavar="FILE", help="with --predict: the probe of the sweep's base")
    parser.add_argument("--outcome", metavar="SWEEP", help="predictions beside the packed runs of that sweep")
    add_write(parser, "the table and the figure")
    add_results(parser)


def run(a: argparse.Namespace) -> int:
    """Print the findings. Raises ValueError where too few runs are packed."""
    from harness.records.paths import figures_folder, tables_folder
    from harness.studies.dose.points import read_points
    from harness.studies.dose.report import sentences, write
    from harness.studies.dose.study import study

    if a.outcome is not None:
        return _outcome(a)
    if (a.predict is None) != (a.probe is None):
        raise ValueError("dose: --predict SWEEP and --probe FILE go together")
    found = study(read_points(a.results))
    if a.predict is not None:
        from harness.studies.dose.predictions import predict, write_predictions
        from harness.studies.probe.record import read
        from harness.sweep.planning import plan, read_sweep

        sweep = read_sweep(a.predict)
        said = predict(found, read(a.probe), sweep.name, plan(sweep).cells)
        print(f"written: {write_predictions(a.results, said)}")
        return 0
    print("\n".join(f"- {line}" for line in sentences(found)))
    if a.is_written:
        written = write(found, tables_folder(a.results), figures_folder(a.results))
        print("written: " + ", ".join(str(path) for path in written))
    return 0


def _outcome(a: argparse.Namespace) -> int:
    from harness.records.paths import tables_folder
    from harness.records.run_result import write_atomic
    from harness.studies.dose.predictions import outcome_page, read_outcomes

    page = outcome_page(a.outcome, read_outcomes(a.results, a.outcome))
    print(page)
    if a.is_written:
        path = tables_folder(a.results) / f"{a.outcome}_predictions.md"
        write_atomic(path, page.encode())
        print(f"written: {path}")
    return 0
