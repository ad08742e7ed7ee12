"""`lowbit layers`: the linear layers of a policy in which the mismatch of a rollout format arises."""

from __future__ import annotations

import argparse

from harness.cli.options import add_results, add_write, check_exact_policy, file_name, named_path, positive


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("folder", nargs="?", type=named_path, metavar="FOLDER",
                        help="a model folder to measure; without one all records are shown")  # fmt: skip
    parser.add_argument("overrides", nargs="*", default=[], metavar="OVERRIDE",
                        help="its task, and the format, e.g. task=wordmath task.n=10 precision=int8 "
                             "(default: int8)")  # fmt: skip
    parser.add_argument("--name", type=file_name, help="name of the record (default: the folder's with the format)")
    parser.add_argument("--answers", type=positive, help="answers to score (default: 32)")
    add_write(parser, "the table")
    add_results(parser, reads=lambda a: a.folder is None, writes=lambda a: a.folder is not None or a.is_written,
                check=_check)  # fmt: skip


def _check(a: argparse.Namespace) -> None:
    check_exact_policy(a, "name", "answers", counted=("task", "precision", "method", "parts", "knobs"))


def run(a: argparse.Namespace) -> int:
    """Measure a folder and print what was found; without one print all records. Raises ValueError for bad input."""
    from harness.records.paths import tables_folder
    from harness.studies.layers.report import keep, measure, read_all, sentences, text, write

    _check(a)
    measured = None
    if a.folder is not None:
        measured = measure(
            a.folder, a.overrides, name=a.name, num_answers=a.answers or 32, results=a.results,
            tell=lambda line: print(line, flush=True),
        )  # fmt: skip
        print(f"record: {keep(a.results, measured)}")
    records = read_all(a.results)
    shown = records if measured is None else [measured]
    print(text(shown))
    print("\n".join(f"- {line}" for line in sentences(shown)))
    if a.is_written:
        print(f"written: {write(records, tables_folder(a.results))}")
    return 0
