"""`lowbit dose`: lost accuracy against mismatch times length, over all committed records."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from harness.cli.options import add_results, add_write, always, named_path, tell_written

if TYPE_CHECKING:
    from harness.studies.dose.study import Study


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--predict", metavar="SWEEP", help="write what the curve says of a sweep before it runs")
    asked.add_argument("--outcome", metavar="SWEEP", help="predictions beside the packed runs of that sweep")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--probe",
        type=named_path,
        nargs="+",
        metavar="FILE",
        help="with --predict: the probe of the sweep's base, or one for each of its channel spreads",
    )
    source.add_argument(
        "--doses-of",
        metavar="SWEEP",
        help="with --predict: a packed sweep whose uncorrected runs say the doses, not a probe",
    )
    add_write(parser, "the table and the figure")
    add_results(parser, reads=always, writes=lambda a: a.is_written or a.predict is not None, check=_check)


def _check(a: argparse.Namespace) -> None:
    """Raises ValueError for options that exclude each other, and for a sweep or a probe that is none."""
    from harness.records.folder import check_is_packed
    from harness.studies.probe.record import read
    from harness.sweep.planning import read_sweep

    if (a.predict is None) != (a.probe is None and a.doses_of is None):
        raise ValueError("dose: --predict SWEEP goes with one of --probe FILE and --doses-of SWEEP")
    if a.predict is not None and a.is_written:
        raise ValueError("--write: dose --predict always writes its predictions and no table; leave --write out")
    if a.predict is not None:
        read_sweep(a.predict)
    for path in a.probe or ():
        read(path)
    if a.doses_of is not None:
        check_is_packed(a.results, a.doses_of, "dose --doses-of")


def run(a: argparse.Namespace) -> int:
    """Print the findings. Raises ValueError where too few runs are packed."""
    from harness.records.paths import figures_folder, tables_folder
    from harness.studies.dose.points import read_all_points
    from harness.studies.dose.report import sentences, write
    from harness.studies.dose.study import study

    _check(a)
    if a.outcome is not None:
        return _outcome(a)
    found = study(read_all_points(a.results))
    if a.predict is not None:
        return _predict(a, found)
    print("\n".join(f"- {line}" for line in sentences(found)))
    if a.is_written:
        tell_written(write(found, tables_folder(a.results), figures_folder(a.results)))
    return 0


def _predict(a: argparse.Namespace, found: Study) -> int:
    from harness.records.packed import read_packed
    from harness.records.paths import packed_path, packed_paths
    from harness.studies.dose.points import sweep_points
    from harness.studies.dose.predictions import known_dose, predict, probed_dose, write_predictions
    from harness.studies.probe.record import read
    from harness.sweep.planning import plan, read_sweep

    sweep = read_sweep(a.predict)
    if a.probe is not None:
        records = [read(path) for path in a.probe]
        dose, ids = probed_dose(records, sweep.name), [record["id"] for record in records]
        source = {"folder": records[0]["folder"]} | ({"probe": ids[0]} if len(ids) == 1 else {"probes": ids})
    else:
        dose = known_dose(sweep_points(packed_path(a.results, a.doses_of)), a.doses_of)
        source = {"doses_of": a.doses_of}
    done = {run.run_id for path in packed_paths(a.results) for run in read_packed(path)}
    said = predict(found, sweep.name, plan(sweep).cells, dose, source, done)
    print(f"written: {write_predictions(a.results, said)}")
    return 0


def _outcome(a: argparse.Namespace) -> int:
    from harness.foundation.whole_file import write_atomic
    from harness.records.paths import tables_folder
    from harness.studies.dose.predictions import outcome_page, read_outcomes

    page = outcome_page(*read_outcomes(a.results, a.outcome))
    print(page)
    if a.is_written:
        path = tables_folder(a.results) / f"{a.outcome}_predictions.md"
        write_atomic(path, page.encode())
        print(f"written: {path}")
    return 0
