"""Seven questions answered on one page: dense models of 0.5B to 32B on H200, and what word problems say of accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from harness.foundation.markdown_table import markdown_table
from harness.foundation.whole_file import write_atomic
from harness.studies.advise.accuracy import Table
from harness.studies.advise.question import DEPLOY, FORMATS, Question
from harness.studies.advise.recipes import advise
from harness.studies.advise.report import LEGEND, cells, header, speed_words
from harness.studies.advise.speed import Evidence, speed

CASES = (
    ("0.5b", 1024, 1), ("1.5b", 4096, 1), ("7b", 1024, 1), ("7b", 1024, 8), ("7b", 8192, 8), ("14b", 16384, 8),
    ("32b", 16384, 16),
)  # fmt: skip
"""Size, tokens of an answer, GPUs."""
HEAD = """# Advice for seven cases

512 answers a step on H200. `lowbit advise` answers for other models, lengths, batches and GPUs, with the source of each
number (`--explain`).

## How much faster is a step?

Time of a step with BF16 rollouts over its time with the format; the range is that of the errors that the capacity plan
made where something was measured.
"""


def page(evidence: Evidence, tables: Mapping[str, Table]) -> str:
    """Markdown: steps by case and format, then a table of accuracy for each kind of deployed weights."""
    cases = [Question(size=size, length=length, gpus=gpus, mismatch={}) for size, length, gpus in CASES]
    lines = [HEAD, markdown_table(("case", *FORMATS), [_steps(evidence, case) for case in cases])]
    for deploy, deployed in DEPLOY.items():
        asked = Question(size=CASES[0][0], length=CASES[0][1], deploy=deploy, mismatch={})  # type: ignore[arg-type]
        advice = advise(evidence, tables[deploy], asked)
        first, second, _, *rest = header(advice.tokens)
        rows = [(recipe.precision, recipe.correction, *cells(recipe)[3:]) for recipe in advice.recipes]
        lines += ["", f"## What does it cost where {deployed} are deployed?"]
        lines += ["", markdown_table((first, second, *rest), rows)]
    return "\n".join([*lines, "", *LEGEND.splitlines()[1:], ""])


def _steps(evidence: Evidence, case: Question) -> tuple[str, ...]:
    name = f"{case.size}, {case.length} tokens, {case.gpus} GPU{'s' * (case.gpus > 1)}"
    return (name, *(speed_words(speed(evidence, case, precision)) for precision in FORMATS))


def write(text: str, tables: Path) -> Path:
    """Write `advise.md`; the path."""
    path = tables / "advise.md"
    write_atomic(path, text.encode())
    return path
