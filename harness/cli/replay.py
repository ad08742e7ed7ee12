"""`lowbit replay collect | evaluate | report`: stored rollouts, every correction on them, tables and figures."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.options import (
    add_results,
    add_write,
    always,
    if_written,
    named_path,
    number_list,
    positive,
    positive_list,
    tell_written,
    whole,
    word_list,
)
from harness.records.paths import figures_folder, replay_folder, tables_folder, work_folder

if TYPE_CHECKING:
    from tqdm import tqdm

    from harness.studies.replay.sampling import Demand

FOLDER = "folder of the batches (default: work/replay of the results)"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the three actions and their options."""
    actions = parser.add_subparsers(metavar="action", required=True)
    line = "sample one policy exactly and in every format"
    collect = actions.add_parser("collect", help=line, description=f"{line.capitalize()}.")
    collect.set_defaults(action=_collect)
    collect.add_argument(
        "overrides", nargs="*", default=[], help="Hydra overrides of model, task, base, algo, engine, seed"
    )
    collect.add_argument("--precisions", type=word_list, metavar="A,B,...",
                         default=("int8", "fp8_block", "nvfp4", "int4"),
                         help="formats of the sampler (default: int8,fp8_block,nvfp4,int4)")  # fmt: skip
    collect.add_argument(
        "--lengths", type=positive_list, default=(), metavar="N,M,...", help="values of task.n (default: its own)"
    )
    collect.add_argument("--prompts", type=positive, default=512,
                         help="prompts per sampler, a multiple of algo.num_prompts (default: 512)")  # fmt: skip
    collect.add_argument("--reference-factor", type=positive, default=4,
                         help="how many times as many prompts the exact reference gets (default: 4)")  # fmt: skip
    collect.add_argument("--warmup", type=whole, default=0, help="training steps with bf16 rollouts first (default: 0)")
    collect.add_argument("--out", type=named_path, help=FOLDER)
    add_results(collect, check=_check_collect)

    line = "every correction on the stored batches; what has no record yet is evaluated and recorded"
    evaluate = actions.add_parser("evaluate", help=line, description=f"{line.capitalize()}.")
    evaluate.set_defaults(action=_evaluate)
    evaluate.add_argument("--methods", type=word_list, default=(), metavar="A,B,...", help="these alone (default: all)")
    evaluate.add_argument("--modes", type=word_list, default=("decoupled",), metavar="A,B,...",
                          help="correction modes of methods that fix none: decoupled, bypass_ppo, bypass_pg "
                               "(default: decoupled)")  # fmt: skip
    evaluate.add_argument("--ages", type=number_list, default=(0, 1), metavar="0,1",
                          help="optimizer steps since the batches were sampled (default: 0,1)")  # fmt: skip
    evaluate.add_argument("--stored", type=named_path, help=FOLDER)
    add_write(evaluate, "the tables and the figures")
    add_results(evaluate, check=_check_evaluate)

    line = "the tables from the records alone"
    report = actions.add_parser("report", help=line, description=f"{line.capitalize()}.")
    report.set_defaults(action=_report)
    add_write(report, "the tables and the figures")
    add_results(report, reads=always, writes=if_written)


def run(a: argparse.Namespace) -> int:
    """Collect, evaluate or report."""
    return a.action(a)


def _demand(a: argparse.Namespace) -> tuple[Demand, Path]:
    """(what is collected, folder for it)."""
    from harness.config.load import check_overrides

    check_overrides(a.overrides)
    from harness.studies.replay.sampling import Demand

    demand = Demand(
        overrides=tuple(a.overrides), precisions=a.precisions, lengths=a.lengths, num_prompts=a.prompts,
        reference_factor=a.reference_factor, warmup=a.warmup,
    )  # fmt: skip
    return demand, a.out or work_folder(a.results, "replay")


def _check_collect(a: argparse.Namespace) -> None:
    from harness.config.schema import Launch
    from harness.run.checks import check_place
    from harness.studies.replay.sampling import missing, plan

    for context in plan(*_demand(a)):
        for _, config, _ in missing(context):
            check_place(config, Launch())


def _stored(a: argparse.Namespace) -> Path:
    """Folder of the stored rollouts."""
    return a.stored or work_folder(a.results, "replay")


def _check_evaluate(a: argparse.Namespace) -> None:
    from harness.studies.replay.store import contexts

    contexts(_stored(a))


def _collect(a: argparse.Namespace) -> int:
    """Sample what is missing; a second start goes on."""
    from tqdm import tqdm

    from harness.config.schema import Launch
    from harness.foundation.writable import check_writable
    from harness.studies.replay.sampling import collect_context, plan
    from harness.studies.replay.store import REFERENCE, read_meta, samplers

    launch, (demand, place) = Launch(results=str(a.results)), _demand(a)
    contexts = plan(demand, place)
    check_writable(place, "--out" if a.out else "--results")
    for context in contexts:
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


def _evaluate(a: argparse.Namespace) -> int:
    """Evaluate what has no record yet, record it, then tables and figures."""
    from tqdm import tqdm

    from harness.config.schema import Launch
    from harness.studies.replay.evaluation import Question, evaluate_context
    from harness.studies.replay.store import contexts

    launch, question = Launch(results=str(a.results)), Question(methods=a.methods, modes=a.modes, ages=a.ages)
    skipped: dict[str, str] = {}
    for folder in contexts(_stored(a)):
        started = time.perf_counter()
        with tqdm(unit="batch", desc=folder.name, disable=not sys.stderr.isatty()) as bar:

            def progress(what: str, count: float, bar: tqdm = bar) -> None:  # pyright: ignore[reportMissingTypeArgument]
                bar.set_postfix_str(what, refresh=False)
                bar.update(count)

            skipped |= evaluate_context(folder, replay_folder(a.results), question, launch, progress)
        print(f"{folder.name}: evaluated, {time.perf_counter() - started:.0f} s", flush=True)
    for name, reason in skipped.items():
        print(f"skipped  {name}: {reason}")
    return _report(a)


def _report(a: argparse.Namespace) -> int:
    """Tables from the records alone, printed; written with the figures where asked to."""
    from harness.studies.replay.tables import markdown, read_records, write_tables

    records = read_records(replay_folder(a.results))
    print(markdown(records))
    if not a.is_written:
        return 0
    from harness.studies.replay.figure import draw

    tables, figures = tables_folder(a.results), figures_folder(a.results, "replay")
    tell_written([*write_tables(records, tables), *draw(records, figures)])
    return 0
