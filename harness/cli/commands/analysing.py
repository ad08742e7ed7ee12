"""`lowbit early-warning | break-even | capacity`: read results, write tables and figures, say what they show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.foundation.did_you_mean import nearest
from harness.records.packed import make_available
from harness.records.run_result import read_results

SWEEPS = ("standard", "corrections")
"""The sweeps with enough collapsed runs to learn from."""


def early_warning(sweeps: Sequence[str], results: Path) -> int:
    """Signals against collapses over the named sweeps. Raises ValueError for a sweep without results."""
    from harness.studies.early_warning import Trace, traces, write

    runs: list[Trace] = []
    for name in sweeps or SWEEPS:
        make_available(results, name)
        folder = results / "runs" / name
        if not folder.is_dir():
            known = sorted(path.name for path in (results / "runs").glob("*") if path.is_dir())
            raise ValueError(f"sweep {name!r} has no results in {results}; {nearest(name, known)}")
        print(f"early-warning: reading {name}")
        runs += traces(folder, read_results(folder))
    written = write(runs, results / "tables", results / "figures" / "early_warning")
    text = written[0].read_text().partition("\n## ")[0]
    print(text.partition("\n\n")[2])
    print("written: " + ", ".join(str(path) for path in written))
    return 0


def break_even(results: Path, batches: Sequence[int]) -> int:
    """Where each precision pays for a whole step, from what was measured on the GPU."""
    from harness.studies.break_even import hardware

    written = hardware.write(results, batches)
    for part in written[0].read_text(encoding="utf-8").split("| arm | size |")[:-1]:
        print(part.partition("## ")[1] + part.partition("## ")[2].strip())
    print("written: " + ", ".join(str(path) for path in written))
    return 0


def capacity(
    results: Path, gpus: Sequence[int], work: Mapping[str, int], links: Mapping[str, float], sizes: Sequence[str],
    lengths: Sequence[int],
) -> int:  # fmt: skip
    """Memory and time of a step by size, length and precision on so many GPUs."""
    from harness.studies.capacity import report
    from harness.studies.capacity.place import Work
    from harness.studies.capacity.seconds import Links

    base = Work(size=report.SMALLEST, arm="bf16", length=1, **work)
    written = report.write(results, gpus, base, Links(**links), sizes, lengths)
    page = written[0].read_text(encoding="utf-8")
    print(page[page.index("## ") : page.index("| what | where |")].strip())
    print("written: " + ", ".join(str(path) for path in written))
    return 0
