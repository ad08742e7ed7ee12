"""The campaign of faults as a command: `python -m harness.devtools.faults`, its table and its figure."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tqdm import tqdm

from harness.devtools.faults.campaign import run_campaign
from harness.devtools.faults.open_round import Settings
from harness.devtools.faults.report import to_json, write
from harness.devtools.faults.schedule import FORMS
from harness.foundation.did_you_mean import nearest
from harness.records.paths import bases_folder


def run(settings: Settings, scratch: Path | None, results: Path) -> int:
    """Inject faults, audit, and write what came of it below `results`.

    Exit code 1 where anything is wrong, or where fewer faults were injected than were asked for.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        folder = scratch or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lowbit-faults-")))
        folder.mkdir(parents=True, exist_ok=True)
        bar = stack.enter_context(tqdm(total=settings.count, unit="fault", disable=not sys.stderr.isatty()))

        def tell(line: str, injected: int) -> None:
            bar.update(injected - bar.n)
            bar.write(f"{(time.monotonic() - started) / 60:5.1f} min  {line}", file=sys.stdout)
            sys.stdout.flush()

        campaign = run_campaign(settings, folder.resolve(), bases_folder(results), tell)
    for path in write(results, to_json(settings, campaign, time.monotonic() - started)):
        print(f"written: {path}")
    for case in campaign.cases:
        print(f"{case.wrong}  {case.where}: {case.words}", file=sys.stderr)
    is_short = len(campaign.outcomes) < settings.count
    if is_short:
        print(
            f"count={settings.count}: only {len(campaign.outcomes)} faults were injected in {campaign.rounds} rounds",
            file=sys.stderr,
        )
    return 1 if campaign.cases or is_short else 0


def main(words: Sequence[str] | None = None) -> int:
    """Parse the words and run the campaign. Exit codes: those of `run`, and 2 for bad words."""
    parser = argparse.ArgumentParser(prog="python -m harness.devtools.faults", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="faults to inject, at least (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule (default: 0)")
    parser.add_argument("--kinds", help="comma-separated kinds of faults (default: all)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="cells at a time (default: cores)")
    parser.add_argument("--scratch", type=Path, help="new folder that keeps what happened (default: a temporary one)")
    parser.add_argument("--results", type=Path, default=Path("results"), help="results folder (default: results)")
    a = parser.parse_args(words)
    for name, value in (("count", a.count), ("workers", a.workers)):
        if value < 1:
            parser.error(f"{name}={value}: must be at least 1")
    kinds = tuple(FORMS) if a.kinds is None else tuple(kind.strip() for kind in a.kinds.split(","))
    for kind in kinds:
        if kind not in FORMS:
            parser.error(f"kinds={kind}: unknown; {nearest(kind, FORMS)}")
    if a.scratch is not None and a.scratch.exists() and (not a.scratch.is_dir() or any(a.scratch.iterdir())):
        parser.error(f"scratch={a.scratch}: not an empty folder; give a new one")
    if a.results.exists() and not a.results.is_dir():
        parser.error(f"results={a.results}: not a folder")
    rounds = max(1, a.workers // 2)
    settings = Settings(
        count=a.count, seed=a.seed, kinds=kinds, rounds_at_a_time=rounds, workers=max(1, a.workers // rounds)
    )
    return run(settings, a.scratch, a.results)


if __name__ == "__main__":
    sys.exit(main())
