"""`lowbit throughput`: the speed of bare vLLM by size, precision, batch and context."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cli.options import add_results, add_write, check_beside, minutes, positive, tell_written
from harness.records.paths import throughput_folder

if TYPE_CHECKING:
    from harness.studies.throughput.plan import EngineSpec, Sweep


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("name", help="a file sweeps/throughput_*.yaml without its ending, or a path to a YAML file")
    parser.add_argument("--gpus", type=positive, default=1, help="GPUs to use, one engine on each (default: 1)")
    parser.add_argument("--minutes", type=minutes, metavar="M",
                        help="start no engine that has too little time left, and end those that run after so many "
                             "minutes; everything measured stays")  # fmt: skip
    parser.add_argument("--only", metavar="KEY=VALUE,...",
                        help="these engines alone: size=7b,precision=int8; a key twice means either value")  # fmt: skip
    parser.add_argument("--retry", action="store_true", help="also try engines again that died before")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--dry-run", action="store_true", help="list what is missing and about how long it takes")
    way.add_argument(
        "--report", action="store_true", dest="is_report", help="run nothing; show the tables of what is measured"
    )
    add_write(parser, "tables and figures (with --report)")
    add_results(parser, reads=lambda a: a.is_report, writes=lambda a: a.is_written or not a.is_report, check=_check)


def _check(a: argparse.Namespace) -> None:
    """Raises ValueError for a wrong name, for --write without --report, for an option of measuring beside it, and where
    something is to be measured, without vLLM or with fewer GPUs than asked for."""
    from harness.studies.throughput.plan import engine_specs, read_only, read_sweep, todo

    if a.is_written and not a.is_report:
        raise ValueError("throughput: --write goes with --report alone; measurements are always kept")
    if a.is_report:
        check_beside(a, "--report, which measures nothing", gpus=1, minutes=None, only=None, retry=False)
    sweep = read_sweep(a.name)
    wanted = engine_specs(sweep, read_only(a.only))
    if sweep.device == "cpu":
        check_beside(a, f"{sweep.name}, which runs on the CPU", gpus=1)
    if a.is_report or a.dry_run:
        return
    from harness.engines.vllm.settings import installed_build
    from harness.studies.throughput.driver import first_gpus
    from harness.studies.throughput.records import read_records

    if todo(sweep, read_records(a.results, sweep), wanted, is_retried=a.retry):
        installed_build()
        if sweep.device == "cuda":
            first_gpus(a.gpus)


def run(a: argparse.Namespace) -> int:
    """Measure, or report."""
    _check(a)
    if a.is_report:
        return report(a.name, a.results, is_written=a.is_written)
    return throughput(
        a.name, a.results, num_gpus=a.gpus, minutes=a.minutes, only=a.only, is_retried=a.retry, is_dry=a.dry_run
    )


def throughput(
    name: str, results: Path, *, num_gpus: int, minutes: float | None, only: str | None, is_retried: bool, is_dry: bool
) -> int:
    """Measure. Exit code 0 when nothing is missing any more, 1 when something is."""
    from tqdm import tqdm

    from harness.studies.throughput.plan import engine_specs, read_only, read_sweep, todo
    from harness.studies.throughput.records import read_records

    sweep = read_sweep(name)
    records = read_records(results, sweep)
    wanted = engine_specs(sweep, read_only(only))
    queue = todo(sweep, records, wanted, is_retried=is_retried)
    if is_dry:
        return _dry_run(sweep, queue, wanted, records, num_gpus)
    if not queue:
        print(f"{sweep.name}: nothing is missing")
        return 0
    from harness.studies.throughput.driver import drive, first_gpus, refuse

    if sweep.device == "cpu":  # on a GPU the engine's process asks the device
        queue = refuse(sweep, queue, results, print)
    gpus: Sequence[str | None] = first_gpus(num_gpus) if sweep.device == "cuda" else [None]
    deadline_s = math.inf if minutes is None else time.monotonic() + 60 * minutes
    with tqdm(total=len(queue), unit="engine", disable=not sys.stderr.isatty()) as bar:

        def tell(line: str) -> None:
            bar.update(1)
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

        drive(sweep, queue, results, gpus, deadline_s, tell)
    left = todo(sweep, read_records(results, sweep), wanted, is_retried=is_retried)
    folder = throughput_folder(results, sweep.name)
    print(f"{sweep.name}: {len(left)} of {len(wanted)} engines still lack something; results in {folder}")
    return 1 if left else 0


def report(name: str, results: Path, *, is_written: bool) -> int:
    """The tables, printed; written with the figures where asked to."""
    from harness.published.claims.speed_table import claimed_table
    from harness.studies.throughput.plan import read_sweep
    from harness.studies.throughput.records import read_records
    from harness.studies.throughput.report import check_measured, markdown, write

    sweep = read_sweep(name)
    records = read_records(results, sweep)
    check_measured(sweep, records)
    page = markdown(sweep, records, claimed_table(sweep, records))
    print(page)
    if is_written:
        tell_written(write(sweep, records, page, results))
    return 0


def _dry_run(
    sweep: Sweep,
    queue: Sequence[EngineSpec],
    wanted: Sequence[EngineSpec],
    records: Mapping[str, Mapping[str, Any]],
    num_gpus: int,
) -> int:
    """List of what is missing, per engine, with the estimate of its cache and of its time."""
    from harness.foundation.duration import duration
    from harness.studies.throughput.estimates import DEVICE_GIB, expected_s, kv_tokens_expected
    from harness.studies.throughput.plan import missing
    from harness.studies.throughput.settled import SPREAD

    device_gib = sweep.memory_gib or DEVICE_GIB
    total, num_again = 0.0, 0
    for spec in wanted:
        keys = missing(sweep, spec, records.get(spec.stem))
        if spec not in queue:
            print(f"{spec.stem:<22}{'died before' if keys else 'measured'}")
            continue
        again = [key for key in keys if key in records.get(spec.stem, {}).get("cells", {})]
        num_again += len(again)
        words = f" ({len(again)} of them disturbed, to be measured again)" if again else ""
        seconds = expected_s(sweep, spec, keys, device_gib)
        total += seconds
        tokens = kv_tokens_expected(spec.size, spec.precision, device_gib)
        print(
            f"{spec.stem:<22}{len(keys):3d} missing{words}, about {seconds:4.0f} s, "
            f"cache of about {tokens / 1e6:.2f}M tokens"
        )
    place = f"{num_gpus} GPU{'s' * (num_gpus > 1)} of" if sweep.device == "cuda" else "the CPU with"
    print(
        f"{sweep.name}: {len(queue)} of {len(wanted)} engines to start, about {duration(total / num_gpus)} on "
        f"{place} {device_gib:.0f} GiB"
    )
    if num_again:
        print(
            f"{num_again} measured cells count as missing: their steps spread by more than {SPREAD:g} (p90/p10), or "
            "lie above what the contexts next to them allow"
        )
    return 0
