"""`lowbit claims`: claims.yaml on the results, as a page and a summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness.foundation.did_you_mean import nearest
from harness.published.claims.page import PAGE, detailed, judge_all, markdown, terminal
from harness.published.claims.schema import CLAIMS, read_claims
from harness.records.run_result import write_atomic


def claims(ids: Sequence[str], results: Path, *, is_check: bool = False, path: Path = CLAIMS) -> int:
    """Write `<results>/claims.md` and print a summary; with `ids` print those claims alone.

    `is_check` writes nothing and returns 1 where the page differs from what would be written. Raises ValueError for a
    faulty claims file, an unknown id or a damaged result.
    """
    known = read_claims(path)
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
        print(f"{page}: {'up to date' if is_current else 'out of date; run `lowbit claims`'}")
        return 0 if is_current else 1
    write_atomic(page, text.encode())
    print(terminal(judged))
    print(f"written: {page}")
    return 0
