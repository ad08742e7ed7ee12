"""`lowbit site`: the static site of the results."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from harness.cli.options import add_results, always


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("sweeps", nargs="*", help="these alone, others leave the site (default: all with results)")
    parser.add_argument("--committed", action="store_true", help="only the sweeps whose results are committed")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the site is not what the "
                                                             "committed results give")  # fmt: skip
    add_results(parser, reads=always, writes=lambda a: not a.check, check=_check)


def _check(a: argparse.Namespace) -> None:
    """Raises ValueError for options that exclude each other, and for a sweep without results."""
    from harness.records.folder import check_sweep

    if a.sweeps and (a.check or a.committed):
        raise ValueError(f"site: {'--check' if a.check else '--committed'} does not go with the names of sweeps")
    for sweep in a.sweeps:
        check_sweep(a.results, sweep)


def run(a: argparse.Namespace) -> int:
    """Write or check the site."""
    from harness.foundation.project_files import committed_sweeps

    _check(a)
    if a.check:
        return check(a.results, committed_sweeps())
    return site(a.results, committed_sweeps() if a.committed else a.sweeps)


def site(results: Path, sweeps: Sequence[str]) -> int:
    """Write `<results>/site/index.html` and its data files."""
    from harness.viewers.site import write_site

    written = write_site(results, sweeps)
    size = sum(path.stat().st_size for path in written)
    print(f"{written[0]}: {len(written)} files, {size / 1e6:.2f} MB; opens in a browser as it is")
    return 0


def check(results: Path, sweeps: Sequence[str]) -> int:
    """Exit code 1, with one line, where the site is not what these sweeps give."""
    from harness.records.paths import site_folder
    from harness.viewers.site import outdated

    folder = site_folder(results)
    if wrong := outdated(results, sweeps):
        names = ", ".join(path.relative_to(folder).as_posix() for path in wrong)
        print(f"FAIL  {folder}: out of date ({names}); run `lowbit site --committed`")
        return 1
    print(f"{folder}: up to date")
    return 0
