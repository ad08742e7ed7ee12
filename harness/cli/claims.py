"""`lowbit claims`: published claims tested on our results."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness.cli.options import add_results, add_write
from harness.foundation.did_you_mean import nearest


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("ids", nargs="*", metavar="ID", help="show these in full (default: a summary of all)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the table is out of date")
    add_write(parser, "the page")
    add_results(parser)


def run(a: argparse.Namespace) -> int:
    """Judge the claims. Raises ValueError for options that exclude each other."""
    if a.is_written and (a.ids or a.check):
        raise ValueError(f"claims: --write does not go with {'--check' if a.check else 'the ids of claims'}")
    return claims(a.ids, a.results, is_check=a.check, is_written=a.is_written)


def claims(
    ids: Sequence[str], results: Path, *, is_check: bool = False, is_written: bool = False, path: Path | None = None
) -> int:
    """Print a summary, and write it as `<results>/claims.md` where asked to; with `ids` print those claims alone.

    `is_check` returns 1 where the page differs from what would be written. `path`: of the claims file. Raises
    ValueError for a faulty claims file, an unknown id or a damaged result.
    """
    from harness.published.claims.page import PAGE, detailed, judge_all, markdown, terminal
    from harness.published.claims.schema import CLAIMS, read_claims
    from harness.records.run_result import write_atomic

    known = read_claims(path or CLAIMS)
    if unknown := [name for name in ids if name not in {claim.id for claim in known.claims}]:
        raise ValueError(f"claim {unknown[0]}: unknown; {nearest(unknown[0], [claim.id for claim in known.claims])}")
    if ids:
        chosen = replace(known, claims=tuple(claim for claim in known.claims if claim.id in ids))
        print("\n\n".join(detailed(one) for one in judge_all(chosen, results)))
        return 0
    judged = judge_all(known, results)
    page, text = results / PAGE, markdown(known, judged)
    if is_check:
        is_current = page.is_file() and page.read_text(encoding="utf-8") == text
        print(f"{page}: up to date" if is_current else f"FAIL  {page}: out of date; run `lowbit claims --write`")
        return 0 if is_current else 1
    print(terminal(judged))
    if is_written:
        write_atomic(page, text.encode())
        print(f"written: {page}")
    return 0
