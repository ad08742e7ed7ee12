"""`lowbit claims`: published claims tested on our results."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.options import add_results, add_write, always, if_written
from harness.foundation.did_you_mean import nearest

if TYPE_CHECKING:
    from harness.published.claims.schema import Claim, Claims


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help="show these in full (default: a summary of all): a claim's id or the beginning of some, a "
                             "paper (its title or number), or a sweep that tests them")  # fmt: skip
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the table is out of date")
    add_write(parser, "the page")
    add_results(parser, reads=always, writes=if_written, check=_check)


def _check(a: argparse.Namespace) -> None:
    """Raises ValueError for options that exclude each other."""
    if a.names and (a.is_written or a.check):
        raise ValueError(f"claims: {'--write' if a.is_written else '--check'} does not go with the names of claims")
    if a.is_written and a.check:
        raise ValueError("claims: --write does not go with --check")


def run(a: argparse.Namespace) -> int:
    """Judge the claims."""
    _check(a)
    return claims(a.names, a.results, is_check=a.check, is_written=a.is_written)


def claims(
    names: Sequence[str], results: Path, *, is_check: bool = False, is_written: bool = False, path: Path | None = None
) -> int:
    """Print a summary, and write it as `<results>/claims.md` where asked to; with `names` print those claims alone.

    `is_check` returns 1 where the page differs from what would be written. `path`: of the claims file. Raises
    ValueError for a faulty claims file, an unknown name or a damaged result.
    """
    from harness.foundation.whole_file import write_atomic
    from harness.published.claims.page import FURTHER, detailed, judge_all, markdown, terminal
    from harness.published.claims.schema import CLAIMS, read_claims
    from harness.records.paths import claims_page

    known = read_claims(path or CLAIMS)
    if names:
        wanted = {claim.id for name in names for claim in claims_named(name, known)}
        chosen = replace(known, claims=tuple(claim for claim in known.claims if claim.id in wanted))
        print("\n\n".join([*(detailed(one) for one in judge_all(chosen, results)), FURTHER]))
        return 0
    judged = judge_all(known, results)
    page, text = claims_page(results), markdown(known, judged)
    if is_check:
        is_current = page.is_file() and page.read_text(encoding="utf-8") == text
        print(f"{page}: up to date" if is_current else f"FAIL  {page}: out of date; run `lowbit claims --write`")
        return 0 if is_current else 1
    print(terminal(judged))
    if is_written:
        write_atomic(page, text.encode())
        print(f"written: {page}")
    return 0


def claims_named(name: str, known: Claims) -> list[Claim]:
    """The claims that a name means: the one of that id, else those of a sweep or a paper (its title, its number), else
    those whose ids begin so. Raises ValueError for a name that means none."""
    lower = name.lower()
    sweeps = {claim.id: {getattr(test, "sweep", "") for test in claim.tests} - {""} for claim in known.claims}
    titles = {source: {source.lower(), source.lower().rpartition(" ")[2], title.lower()}
              for source, title in known.papers.items()}  # fmt: skip
    for means in (
        lambda claim: claim.id == lower,
        lambda claim: name in sweeps[claim.id],
        lambda claim: lower in titles[claim.source],
        lambda claim: lower and claim.id.startswith(lower),
    ):
        if found := [claim for claim in known.claims if means(claim)]:
            return found
    others = [*known.papers.values(), *sorted(set().union(*sweeps.values()))]
    if (hint := nearest(name, [*sweeps, *others])).startswith("valid"):  # of a hundred ids
        hint = f"`lowbit claims` lists the ids; papers and sweeps: {', '.join(others)}"
    raise ValueError(f"claim {name!r}: unknown; {hint}")
