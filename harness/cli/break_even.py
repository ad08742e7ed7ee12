"""`lowbit break-even`: from which size and length on a precision pays for a whole step."""

from __future__ import annotations

import argparse

from harness.cli.options import add_results, add_write, always, if_written, positive_list, tell_written


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--batches", type=positive_list, default=(64, 256), help="responses per step (default: 64,256)")
    add_write(parser, "the table and the figures")
    add_results(parser, reads=always, writes=if_written)


def run(a: argparse.Namespace) -> int:
    """Print where each precision pays, from what was measured on the GPU."""
    from harness.studies.break_even.hardware import report, write

    page, found = report(a.results, a.batches)
    for part in page.split("| arm | size |")[:-1]:
        print(part.partition("## ")[1] + part.partition("## ")[2].strip())
    if a.is_written:
        tell_written(write(a.results, page, found))
    return 0
