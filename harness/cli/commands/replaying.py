"""`lowbit replay collect | evaluate | report`: stored rollouts, every correction on them, tables and figures."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tqdm import tqdm

from harness.config.schema import Launch
from harness.studies.replay.evaluation import Question, evaluate_context
from harness.studies.replay.sampling import Demand, collect_context, plan
from harness.studies.replay.store import REFERENCE, contexts, read_meta, samplers
from harness.studies.replay.tables import read_records, write_tables

RECORDS = "replay"
"""Folder of the records below the results folder."""


def replay_collect(demand: Demand, out: Path, results: Path) -> int:
    """Sample what is missing; a second start goes on."""
    launch = Launch(results=str(results))
    planned = plan(demand, out)
    for context in planned:
        started = time.perf_counter()
        total = sum(count for name, _, count in context.samplers() if read_meta(context.folder, name) is None)
        with tqdm(total=total, unit="batch", desc=context.folder.name, disable=not sys.stderr.isatty()) as bar:

            def on_batch(name: str, bar: tqdm = bar) -> None:  # pyright: ignore[reportMissingTypeArgument]
                bar.set_postfix_str(name, refresh=False)
                bar.update(1)

            written = collect_context(context, launch, on_batch)
        seconds = time.perf_counter() - started
        print(
            f"{context.folder}: {written} files written, {seconds:.0f} s" if written else f"{context.folder}: complete"
        )
        for name in (REFERENCE, *samplers(context.folder)):
            meta = read_meta(context.folder, name) or {}
            k3, ess = meta["mismatch"]["kl_k3"], meta["mismatch"]["ess_token_raw"]
            size = f"{meta['num_batches']:3d} batches of {meta['num_prompts']} x {meta['group_size']}"
            print(f"  {name:<12} {size}  accuracy {meta['accuracy']:.3f}  k3 {k3:.2e} nats  raw ESS {ess:.3f}")
    return 0


def replay_evaluate(stored: Path, question: Question, results: Path) -> int:
    """Evaluate what has no record yet, then tables and figures."""
    launch = Launch(results=str(results))
    skipped: dict[str, str] = {}
    for folder in contexts(stored):
        started = time.perf_counter()
        with tqdm(unit="batch", desc=folder.name, disable=not sys.stderr.isatty()) as bar:

            def progress(what: str, count: float, bar: tqdm = bar) -> None:  # pyright: ignore[reportMissingTypeArgument]
                bar.set_postfix_str(what, refresh=False)
                bar.update(count)

            skipped |= evaluate_context(folder, results / RECORDS, question, launch, progress)
        print(f"{folder.name}: evaluated, {time.perf_counter() - started:.0f} s", flush=True)
    for name, reason in skipped.items():
        print(f"skipped  {name}: {reason}")
    return replay_report(results)


def replay_report(results: Path) -> int:
    """Tables and figures from the records alone."""
    from harness.studies.replay.figure import draw

    records = read_records(results / RECORDS)
    written = [*write_tables(records, results / "tables"), *draw(records, results / "figures" / "replay")]
    print("written: " + ", ".join(str(path) for path in written))
    return 0
