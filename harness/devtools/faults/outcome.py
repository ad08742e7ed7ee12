"""Outcome of every fault, read off the journal: who got the cell going again, and how long that took."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from harness.devtools.faults.audit import WRONGS, Case
from harness.devtools.faults.journal import Fault, Mark
from harness.records.statuses import FINISHED

OUTCOMES = ("went on", "retried by the sweep", "resumed by the next start", "reported")
"""The same process went on; the running sweep started the cell again; somebody started the sweep again; refused, failed
or diverged by name."""


@dataclass(frozen=True, kw_only=True)
class FaultOutcome:
    """A fault that was injected and what became of it."""

    fault: Fault
    became: str
    """One of OUTCOMES; empty where nothing did."""
    recovery_s: float | None
    """Until the cell's next step or its record, or until the report."""


def outcome(fault: Fault, marks: Sequence[Mark]) -> FaultOutcome | None:
    """Outcome of a fault; None where it was not injected."""
    injected = next((mark for mark in marks if mark.what == "inject" and mark.fault == fault.id), None)
    if injected is None:
        return None
    told = next((mark for mark in marks if mark.what == "told" and mark.fault == fault.id), None)
    if told is not None:
        return FaultOutcome(fault=fault, became=told.status, recovery_s=told.at_s - injected.at_s)
    if not injected.cell:  # from outside, and nobody noticed: a server that nobody asked, sweeps that did not overlap
        return None
    later = [mark for mark in marks if mark.at_s > injected.at_s and mark.cell == injected.cell]
    sign = next((mark for mark in later if _goes_on(mark, injected, fault)), None)
    if sign is None:  # the record was there already
        is_there = any(m.what == "end" and m.cell == injected.cell and m.at_s <= injected.at_s for m in marks)
        return FaultOutcome(fault=fault, became="went on" if is_there else "", recovery_s=None)
    if fault.kind == "nan":
        became = "reported"
    elif sign.pid == injected.pid:
        became = "went on"
    else:
        became = "retried by the sweep" if sign.parent == injected.parent else "resumed by the next start"
    return FaultOutcome(fault=fault, became=became, recovery_s=sign.at_s - injected.at_s)


def _goes_on(mark: Mark, injected: Mark, fault: Fault) -> bool:
    """Does this mark show that the cell is past the fault? A failed record or an orphan's next step does not."""
    if mark.what == "end":
        return mark.status in FINISHED
    if mark.what != "step" or (mark.pid == injected.pid and mark.step < injected.step):
        return False
    return (
        mark.parent != injected.parent
        if fault.kind == "kill_sweep"
        else not (fault.is_ending and mark.pid == injected.pid)
    )


def summary(outcomes: Iterable[FaultOutcome], kinds: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Per kind: injected, recovered, retried, how many of each outcome and form, median seconds to recovery."""
    table: dict[str, dict[str, Any]] = {}
    listed = list(outcomes)
    for kind in kinds:
        own = [one for one in listed if one.fault.kind == kind]
        seconds = [one.recovery_s for one in own if one.recovery_s is not None]
        forms = sorted({one.fault.form for one in own})
        table[kind] = {
            "injected": len(own),
            "recovered": sum(bool(one.became) for one in own),
            "retried": sum(one.became == OUTCOMES[1] for one in own),
            "became": {name: sum(one.became == name for one in own) for name in OUTCOMES},
            "forms": {form: sum(one.fault.form == form for one in own) for form in forms},
            "recovery_s": sorted(round(one, 2) for one in seconds),
            "recovery_s_median": round(median(seconds), 2) if seconds else None,
        }
    return table


def totals(kinds: Mapping[str, Mapping[str, Any]], cases: Sequence[Case], records: int) -> dict[str, int]:
    """Sums over all kinds, and how many cases of each wrong."""
    sums = {name: sum(kind[name] for kind in kinds.values()) for name in ("injected", "recovered", "retried")}
    return sums | {"records": records} | {wrong: sum(case.wrong == wrong for case in cases) for wrong in WRONGS}
