"""`lowbit fp8-cache`: what the scales of an FP8 KV cache do to a policy's log-probs, rule by rule."""

from __future__ import annotations

import argparse
import re

from harness.cli.options import (
    add_results,
    add_write,
    check_exact_policy,
    file_name,
    named_path,
    positive,
    tell_written,
)

SAMPLES = re.compile(r"([1-9]\d*)x([1-9]\d*)")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("folder", nargs="?", type=named_path, metavar="FOLDER",
                        help="a model folder to measure; without one all records are shown")  # fmt: skip
    parser.add_argument("overrides", nargs="*", default=[], metavar="OVERRIDE",
                        help="its task, e.g. task=wordmath task.n=10")  # fmt: skip
    parser.add_argument("--name", type=file_name, help="name of the record (default: the folder's)")
    parser.add_argument("--first-load", type=named_path, metavar="FOLDER",
                        help="an earlier policy: rules that keep its scales are measured too")  # fmt: skip
    parser.add_argument("--answers", type=positive, help="answers to score (default: 32)")
    parser.add_argument("--scan", action="store_true", help="also a range of factors on the scale, for K, V and both")
    parser.add_argument("--accuracy", type=samples, metavar="QxK",
                        help="also accuracies of K answers to each of Q questions, e.g. 64x4")  # fmt: skip
    add_write(parser, "the table and the figure")
    add_results(parser, reads=lambda a: a.folder is None, writes=lambda a: a.folder is not None or a.is_written,
                check=_check)  # fmt: skip


def _check(a: argparse.Namespace) -> None:
    from harness.models.checkpoint import check_folder

    check_exact_policy(a, "name", "first_load", "answers", "scan", "accuracy", counted=("task",))
    if a.first_load is not None:
        check_folder(a.first_load)


def samples(text: str) -> tuple[int, int]:
    """Questions and answers to each, as in 64x4."""
    match = SAMPLES.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: questions x answers are expected, such as 64x4")
    return int(match[1]), int(match[2])


def run(a: argparse.Namespace) -> int:
    """Measure a folder and print what was found; without one print all records. Raises ValueError for bad input."""
    from harness.records.paths import figures_folder, tables_folder
    from harness.studies.fp8_cache.record import measure, read_all
    from harness.studies.fp8_cache.record import write as keep
    from harness.studies.fp8_cache.report import sentences, text, write

    _check(a)
    measured = None
    if a.folder is not None:
        measured = measure(
            a.folder, a.overrides, name=a.name or a.folder.resolve().name, first=a.first_load,
            num_answers=a.answers or 32, is_scanned=a.scan, samples=a.accuracy, results=a.results,
            tell=lambda line: print(line, flush=True),
        )  # fmt: skip
        print(f"record: {keep(a.results, measured)}")
    records = read_all(a.results)
    shown = records if measured is None else [measured]
    print(text(shown))
    print("\n".join(f"- {line}" for line in sentences(shown)))
    if a.is_written:
        tell_written(write(records, tables_folder(a.results), figures_folder(a.results)))
    return 0
