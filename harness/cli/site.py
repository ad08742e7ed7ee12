"""`lowbit site`: the static site of the results."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from harness.cli.options import add_results


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("sweeps", nargs="*", help="these sweeps alone (default: every sweep with results)")
    add_results(parser)


def run(a: argparse.Namespace) -> int:
    """Write the site."""
    return site(a.results, a.sweeps)


def site(results: Path, sweeps: Sequence[str]) -> int:
    """Write `<results>/site/index.html` and its data files."""
    from harness.cli.results import unpack_all
    from harness.viewers.site import write_site

    unpack_all(results)
    written = write_site(results, sweeps)
    size = sum(path.stat().st_size for path in written)
    print(f"{written[0]}: {len(written)} files, {size / 1e6:.2f} MB; opens in a browser as it is")
    return 0
