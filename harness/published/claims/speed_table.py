"""Published claims on rollout speed beside this map: the speed tests of `claims.yaml`, verdicts as `lowbit claims` has.

Nothing is stated here: sources, factors and places are those of the file.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.foundation.markdown_table import markdown_table
from harness.foundation.span import span
from harness.published.claims.estimates import ClaimEstimate, estimate
from harness.published.claims.kinds import Speed
from harness.published.claims.schema import CLAIMS, Claims, read_claims
from harness.published.claims.speed import Map, answer
from harness.studies.throughput.map_cells import Records
from harness.studies.throughput.plan import Sweep
from harness.studies.throughput.tables import NONE, Rows


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A speed test and what the map answers."""

    source: str
    claim: str
    """Its id in `claims.yaml`."""
    test: Speed
    estimate: ClaimEstimate
    by_batch: tuple[tuple[int, float], ...]
    """(batch, factor) of the place itself; empty where it is not measured."""


def claimed_table(sweep: Sweep, records: Records) -> str:
    """The comparison with the claims of `claims.yaml`; empty without it or a test on this sweep.

    Raises ValueError for a faulty file.
    """
    compared = compare(sweep, records, read_claims(CLAIMS)) if CLAIMS.is_file() else []
    return claims_table(compared) if compared else ""


def compare(sweep: Sweep, records: Records, claims: Claims) -> list[Compared]:
    """Every speed test on this sweep, in the order of the file."""
    maps = {sweep.name: Map(sweep=sweep, records=records)}
    found: list[Compared] = []
    for claim in claims.claims:
        for test in claim.tests:
            if isinstance(test, Speed) and test.sweep == sweep.name:
                factor = answer(test, maps)
                found.append(
                    Compared(
                        source=claim.source, claim=claim.id, test=test, estimate=estimate(test, {}, [], maps),
                        by_batch=factor.by_batch if factor else (),
                    )
                )  # fmt: skip
    return found


def claims_table(compared: list[Compared]) -> str:
    """Claimed beside measured."""
    rows = Rows()
    for each in compared:
        test = each.test
        claimed = NONE if test.claimed is None else span(*test.claimed, ".2f")
        what = f"{test.length} tokens" if test.measure == "generation" else f"decode at {test.length}"
        against = "".join(f", over {at}'s" for at in (test.against_size, test.against_length) if at is not None)
        cell = f"{test.size} {test.precision} over {test.over}, {what}{against}"
        factors = ", ".join(f"{factor:.2f} at {batch}" for batch, factor in each.by_batch) or NONE
        rows.append([
            each.source, f"`{each.claim}`", cell, claimed, factors, each.estimate.outcome,
            "; ".join(filter(None, [test.note, each.estimate.reason])),
        ])  # fmt: skip
    return markdown_table(["source", "claim", "cell here", "claimed", "factor at batch", "verdict", "remark"], rows)
