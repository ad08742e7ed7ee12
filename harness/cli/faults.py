"""`lowbit faults`: a campaign of faults on purpose, its table and its figure."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from harness.cli.options import add_results, add_workers, positive, whole, word_list
from harness.foundation.did_you_mean import nearest


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--count", type=positive, default=200, help="faults to inject, at least (default: 200)")
    parser.add_argument("--seed", type=whole, default=0, help="of the schedule (default: 0)")
    parser.add_argument("--kinds", type=word_list, help="comma-separated kinds of faults (default: all)")
    add_workers(parser, "cells")
    parser.add_argument("--scratch", type=Path, help="new folder for the sweeps, kept (default: a temporary one)")
    add_results(parser)


def run(a: argparse.Namespace) -> int:
    """Run the campaign."""
    return faults(a.count, a.seed, kinds=a.kinds, workers=a.workers, scratch=a.scratch, results=a.results)


def faults(
    count: int, seed: int, *, kinds: Sequence[str] | None, workers: int | None, scratch: Path | None, results: Path
) -> int:
    """Inject faults, audit, and write what came of it below `results`. Exit code 1 where anything is wrong.

    Raises ValueError for an unknown kind, or a scratch folder that is not empty.
    """
    from tqdm import tqdm

    from harness.devtools.faults.campaign import run_campaign
    from harness.devtools.faults.report import to_json, write
    from harness.devtools.faults.rounds import Settings
    from harness.devtools.faults.schedule import FORMS

    for kind in kinds or ():
        if kind not in FORMS:
            raise ValueError(f"kinds={kind}: unknown; {nearest(kind, list(FORMS))}")
    if scratch is not None and scratch.exists() and any(scratch.iterdir()):
        raise ValueError(f"scratch={scratch}: not empty; give a new folder")
    abreast = max(1, (workers or 2) // 2)
    settings = Settings(
        count=count, seed=seed, kinds=tuple(kinds or FORMS), abreast=abreast, workers=max(1, (workers or 2) // abreast)
    )
    started = time.monotonic()
    with ExitStack() as stack:
        folder = scratch or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lowbit-faults-")))
        folder.mkdir(parents=True, exist_ok=True)
        bar = stack.enter_context(tqdm(total=count, unit="fault", disable=not sys.stderr.isatty()))

        def tell(line: str, injected: int) -> None:
            bar.update(injected - bar.n)
            bar.write(f"{(time.monotonic() - started) / 60:5.1f} min  {line}", file=sys.stdout)
            sys.stdout.flush()

        campaign = run_campaign(settings, folder.resolve(), results / "bases", tell)
    data = to_json(settings, campaign, time.monotonic() - started)
    for path in write(results, data):
        print(f"written: {path}")
    for case in campaign.cases:
        print(f"{case.wrong}  {case.where}: {case.words}", file=sys.stderr)
    return 1 if campaign.cases else 0
