"""`lowbit browse`: MLflow's pages over the results on this machine."""

from __future__ import annotations

import argparse

from harness.cli.options import add_results, always, port


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("sweep", nargs="?", help="log and open this sweep alone (default: all)")
    parser.add_argument("--compare", nargs="+", default=[], metavar="WORD",
                        help="open the saved comparison of SWEEP with these words: qurl flashrl int8")  # fmt: skip
    parser.add_argument("--port", type=port, default=5000, help="port of the server (default: 5000)")
    add_results(parser, reads=always, check=_check)


def _check(a: argparse.Namespace) -> None:
    from harness.records.folder import check_sweep, some_sweeps

    if a.sweep is not None:
        check_sweep(a.results, a.sweep)
    else:
        some_sweeps(a.results)


def run(a: argparse.Namespace) -> int:
    """Serve until interrupted, packed sweeps too. Raises ValueError where the sweep, or any, has no results."""
    from harness.cli.results import unpack_all
    from harness.records.packed import make_available
    from harness.viewers.mlflow import browse

    _check(a)
    if a.sweep is not None:
        make_available(a.results, a.sweep)
    else:
        unpack_all(a.results)
    return browse(a.results, a.port, a.sweep, a.compare)
