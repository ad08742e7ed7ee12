"""Seven questions answered on one page: dense models of 0.5B to 32B on H200, and one within the studied sizes.

The mismatch of every format is the one that vLLM's kernels had in committed runs on word problems, the nearest to text
that there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from harness.foundation.markdown_table import markdown_table
from harness.foundation.span import span
from harness.records.arms import rank
from harness.records.run_result import write_atomic
from harness.studies.advise.accuracy import curves_of
from harness.studies.advise.question import Mismatch, Question
from harness.studies.advise.recipes import Advice, advise
from harness.studies.advise.report import speed_words
from harness.studies.advise.speed import Evidence
from harness.studies.dose.points import FORMAT, NONE, START, Point, curve_points

CASES = (
    ("3m", 250, 1), ("0.5b", 1024, 1), ("1.5b", 4096, 1), ("7b", 1024, 8), ("7b", 8192, 8), ("14b", 16384, 8),
    ("32b", 16384, 16),
)  # fmt: skip
"""Size, tokens of an answer, GPUs."""
TEXT, KERNELS = "wordmath", "vllm"
"""Task and engine that the mismatch is taken from."""
HEAD = """# Advice for seven cases

512 answers a step on H200, BF16 weights deployed. Step: time of a step with BF16 rollouts over its time with the
format; the range is that of the errors that the capacity plan made where something was measured. Accuracy: the change
against BF16 rollouts. An interval is that of runs that sorted digits at a like dose; a number after "if only the dose
matters" is their curve, far from where they ran. Word problems of 245 tokens lost no more in the mean, but on single
bases up to three times as much; those of 780 tokens (six bases) lost without a correction about twice as much in the
mean in 4 bits and INT8, on single bases up to fifteen times. Block FP8, an FP8 cache, and FP8 and INT8 with TIS lost no
more, where a BF16 run that collapsed counts.

Mismatch (k3, nats a token) as vLLM's kernels had it at the start on word problems of 87 to 780 tokens, most with 10M
parameters: the median over bases, and in brackets the smallest and the largest base:
{mismatch}.
**Your model has another one: `lowbit probe` measures it.**
"""


def text_mismatch(points: Sequence[Point]) -> dict[str, Mismatch]:
    """K3 of every format in the first steps, about what a probe before training sees: its median over bases and its
    range, of each base the median over its uncorrected runs on text with real kernels. Of all runs, for what was
    predicted does not matter here; only weights as they were trained, no channels spread. Raises ValueError without
    one."""
    own = [p for p in points if (p.task, p.engine, p.correction, p.kind, p.spread) == (TEXT, KERNELS, NONE, FORMAT, 0)]
    if not own:
        raise ValueError(f"advise: no packed run of {TEXT} with {KERNELS}")
    first: dict[str, dict[str, list[float]]] = {}
    for p in own:
        first.setdefault(p.precision, {}).setdefault(p.weights, []).append(p.doses[START] / p.doses["length alone"])
    return {name: _over_bases(list(map(median, first[name].values()))) for name in sorted(first, key=rank)}


def _over_bases(k3s: Sequence[float]) -> Mismatch:
    """The mismatch of bases, each with its own."""
    ends = span(min(k3s), max(k3s), ".1g") if len(k3s) > 1 else ""
    source = f"committed runs on {TEXT} with {KERNELS}" + f"; {ends} by base" * bool(ends)
    return Mismatch(k3=median(k3s), source=source, span=ends)


def answered(evidence: Evidence, points: Sequence[Point]) -> list[Advice]:
    """The advice of every case, from all runs that have a dose."""
    mismatch, curves = text_mismatch(points), curves_of(curve_points(points), "bf16")
    return [
        advise(evidence, curves, Question(size=size, length=length, gpus=gpus, mismatch=mismatch))
        for size, length, gpus in CASES
    ]


def page(found: Sequence[Advice]) -> str:
    """Markdown: a row per case and format, the fastest first."""
    mismatch = ", ".join(
        f"{name} {m.k3:.1g}" + f" [{m.span}]" * bool(m.span) for name, m in found[0].question.mismatch.items()
    )
    head, rows = ("case", "format", "step", "accuracy without a correction", "with TIS"), list[tuple[str, ...]]()
    for advice in found:
        q = advice.question
        case = f"{q.size}, {q.length} tokens, {q.gpus} GPU{'s' * (q.gpus > 1)}"
        recipes = {(r.precision, r.correction): r for r in [*advice.answered, *advice.open] if not r.is_control}
        for precision in dict.fromkeys(name for name, _ in recipes):
            plain, weighed = recipes[precision, NONE], recipes[precision, "TIS"]
            rows.append((case, precision, speed_words(plain.speed), plain.accuracy.shown, weighed.accuracy.shown))
    return f"{HEAD.format(mismatch=mismatch)}\n{markdown_table(head, rows)}\n"


def write(found: Sequence[Advice], tables: Path) -> Path:
    """Write `advise.md`; the path."""
    path = tables / "advise.md"
    write_atomic(path, page(found).encode())
    return path
