"""`lowbit advise`: rollout format and correction for a model, a length and some GPUs, with the evidence."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cli.options import add_results, add_write, always, if_written, named_path, positive, tell_written
from harness.foundation.project_files import HOME, RESULTS

if TYPE_CHECKING:
    from harness.studies.advise.accuracy import Table
    from harness.studies.advise.speed import Evidence

USUAL: Mapping[str, Any] = {"batch": 512, "gpu": "h200", "gpus": 1, "deploy": "bf16"}
"""Options of a question that have a default."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = "Example: lowbit advise --size 14b --length 8192 --batch 512 --gpu h200 --gpus 8"
    parser.add_argument("--size", help="0.5b to 32b as Qwen2.5 has them, or any number such as 3m")
    parser.add_argument("--length", type=positive, help="tokens of an answer")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--k3", help="mismatch, nats a token: a number, or fp8_block=2e-3,int8=1e-4 (default: none)")
    source.add_argument(
        "--probe", type=named_path, metavar="FILE", help="the record of `lowbit probe`, for the k3 of each"
    )
    parser.add_argument("--batch", type=positive, help="answers of a step (default: 512)")
    parser.add_argument("--gpu", help="kind of GPU (default: h200, the one that was measured)")
    parser.add_argument("--gpus", type=positive, help="number of GPUs (default: 1)")
    parser.add_argument("--deploy", choices=("bf16", "rollout"),
                        help="deployed weights: BF16, or those of the rollout format (default: bf16)")  # fmt: skip
    parser.add_argument("--explain", action="store_true", help="print the source of each number")
    parser.add_argument("--config", metavar="FORMAT[:CORRECTION]",
                        help="print ready configurations, e.g. of fp8_block:TIS or int8")  # fmt: skip
    parser.add_argument("--cases", action="store_true", help="answer seven fixed questions on one page instead")
    add_write(parser, "the page of --cases, and the grid of answers that the site reads")
    add_results(parser, reads=always, writes=if_written, check=_check)


def _check(a: argparse.Namespace) -> None:
    """Raises ValueError for options that do not go together."""
    own = ("size", "length", "k3", "probe", *USUAL, "explain", "config")
    if a.cases and (given := next((name for name in own if getattr(a, name)), None)):
        raise ValueError(f"--cases answers questions of its own: leave --{given} out")
    if not a.cases and (a.size is None or a.length is None):
        raise ValueError("advise: --size and --length are needed, such as --size 7b --length 8192; or --cases")
    if a.is_written and not a.cases:
        raise ValueError("--write goes with --cases alone")


def run(a: argparse.Namespace) -> int:
    """Print the recipes. Raises ValueError for a question that cannot be."""
    _check(a)
    return _cases(a) if a.cases else _one(a)


def _evidence(results: Path) -> tuple[Evidence, dict[str, Table]]:
    """The measurements in a folder, or the committed ones where it lacks any, with a note. Raises ValueError, one line,
    where those lack one."""
    from harness.studies.advise.accuracy import read_tables
    from harness.studies.advise.speed import read_evidence

    committed = HOME / RESULTS
    try:
        return read_evidence(results), read_tables(results)
    except ValueError as error:
        if results.resolve() == committed.resolve():
            raise
        print(f"note: --results {results}: {error}; the committed ones in {committed} are read", file=sys.stderr)
    return read_evidence(committed), read_tables(committed)


def _cases(a: argparse.Namespace) -> int:
    from harness.records.paths import tables_folder
    from harness.studies.advise.answers import answers, write_answers
    from harness.studies.advise.cases import page, write

    evidence, tables = _evidence(a.results)
    text = page(evidence, tables)
    print(text)
    if a.is_written:
        folder = tables_folder(a.results)
        tell_written([write(text, folder), write_answers(answers(evidence, tables), folder)])
    return 0


def _one(a: argparse.Namespace) -> int:
    from harness.studies.advise.question import Question, given_mismatch, probed_mismatch, read_probe, size_warning
    from harness.studies.advise.recipes import advise, named
    from harness.studies.advise.report import configurations, words

    probe = None if a.probe is None else read_probe(a.probe)
    mismatch = given_mismatch(a.k3) if a.k3 is not None else probed_mismatch(probe) if probe else {}
    usual = {name: value if (given := getattr(a, name)) is None else given for name, value in USUAL.items()}
    usual["gpu"] = usual["gpu"].lower()
    question = Question(size=a.size.lower(), length=a.length, mismatch=mismatch, **usual)
    if probe and (warning := size_warning(probe, question)):
        print(f"warning: --probe {a.probe}: {warning}", file=sys.stderr)
    evidence, tables = _evidence(a.results)
    advice = advise(evidence, tables[question.deploy], question)
    if a.config is not None:
        print(configurations(question, named(advice, a.config)))
        return 0
    print(words(advice, is_explained=a.explain))
    return 0
