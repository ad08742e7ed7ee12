"""The dose study in words and tables."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from statistics import fmean

from harness.foundation.markdown_table import markdown_table
from harness.foundation.number_cell import number_cell, with_interval
from harness.foundation.whole_file import write_atomic
from harness.records.stats import LEVEL, MIN_CLUSTERS
from harness.studies.dose.beyond import Addition
from harness.studies.dose.curve import Bin
from harness.studies.dose.figure import draw
from harness.studies.dose.points import DOSE, FIRST, FORMAT, NONE, START, Point, correction_words
from harness.studies.dose.study import NAMED, TASK, Study, finding, prediction


def sentences(s: Study) -> list[str]:
    """Findings in words, one a line."""
    said = [finding(s) + f". Brackets: {LEVEL:.0%}, bases resampled.".replace("%", " %")]
    harmless = [b for b in s.bins if b.correction == NONE and b.loss_high < 0.03]
    if harmless:
        last = max(harmless, key=lambda b: b.high)
        said.append(
            f"The largest range of the dose in which uncorrected runs lose less than 0.03 for sure is {last.name}: "
            f"{_loss(last)}, {last.num_runs} runs on {last.num_bases} bases."
        )
    for row in s.reached:
        if row.correction != NONE and row.loss == NAMED and math.isfinite(row.ratio):
            said.append(
                f"{row.correction} bears {row.ratio:.1f} times the dose"
                + ("" if math.isnan(row.ratio_low) else f" [{row.ratio_low:.1f}, {row.ratio_high:.1f}]")
                + f" before it loses {row.loss:g}."
            )
    for name, found in s.additions.items():
        adding = [a for a in found if a.p_holm < 1 - LEVEL]
        rest = [a.factor for a in found if a.p_holm >= 1 - LEVEL]
        said.append(
            f"Beyond the dose, {correction_words(name)}: "
            + (
                "; ".join(
                    f"{a.factor} adds (p = {a.p_holm:.3f}, explained variance {a.r2_dose:.2f} to {a.r2_both:.2f}, from "
                    f"{a.lowest[1]:+.3f} at {a.lowest[0]} to {a.highest[1]:+.3f} at {a.highest[0]})"
                    for a in adding
                )
                or "nothing adds that these runs show"
            )
            + (f"; not shown for {', '.join(rest)}" if adding and rest else "")
            + "."
        )
    for name, found in s.candidates.items():
        best, own = found[0], next(c for c in found if c.name == DOSE)
        start = next((c for c in found if c.name == START), None)
        worse = [c.name for c in found if c.worse_low > 0]
        said.append(
            f"Doses, {correction_words(name)}: on sizes and lengths left out {DOSE} errs by "
            f"{own.rmse:.3f} a run, the best, {best.name}, by {best.rmse:.3f}"
            + (f", k3 of the first {FIRST} steps by {start.rmse:.3f}" if start else "")
            + (
                f"; worse than {DOSE} for sure: {'; '.join(worse)}."
                if worse
                else f"; none is worse than {DOSE} for sure."
            )
        )
    for (task, name), found in s.kinds.items():
        told = [
            f"{k.kind} {with_interval(k.beyond, k.low, k.high, '+.3f')} ({k.num_runs} runs, "
            f"{k.num_collapsed} collapsed)"
            for k in found
            if k.kind != FORMAT and not math.isnan(k.low)
        ]
        if told:
            which = correction_words(name)
            said.append(f"Loss beyond that of formats at an equal dose, {task}, {which}: {'; '.join(told)}.")
    return said


OTHERS = ("task", "correction", "format", "runs", "loss", "smallest", "largest", "the curve says")


def _other_tasks(s: Study) -> list[str]:
    """A table of the losses on other tasks beside the mean of what the curve says; nothing without such runs."""
    groups: dict[tuple[str, str, str], list[Point]] = {}
    for point in s.others:
        groups.setdefault((point.task, point.correction, point.precision), []).append(point)
    if not groups:
        return []
    rows: list[tuple[str, ...]] = []
    for (task, correction, precision), points in sorted(groups.items()):
        losses = [point.loss for point in points]
        expected = fmean(prediction(s, correction, point.dose) for point in points)
        told = (fmean(losses), min(losses), max(losses), expected)
        rows.append((task, correction, precision, str(len(points)), *(f"{value:+.3f}" for value in told)))
    return ["## Other tasks, in none of the numbers above", markdown_table(OTHERS, rows)]


def page(s: Study) -> str:
    """The page `dose_curve.md`."""
    engines = Counter(p.engine for p in s.points)
    about = (
        f"{len(s.points)} runs of `{TASK}` on {len({p.base for p in s.points})} bases, packed sweeps but searches, "
        f"decoupled mode: {engines['embedded']} with emulated formats (embedded engine), {engines['vllm']} with "
        "vLLM's kernels. Loss: accuracy of BF16 rollouts less the run's, mean of the evaluations during training, BF16 "
        "policy, equal base, seed and setting. Dose: median over the steps of k3 a token times the mean "
        "length of responses."
    )
    blocks = [
        "# Dose: lost accuracy against mismatch x length", about, "\n".join(f"- {line}" for line in sentences(s)),
        "## Loss by dose",
        markdown_table(
            ("correction", "dose", "median dose", "runs", "bases", "loss", "collapsed"),
            [
                (b.correction, b.name, f"{b.dose:.2g}", str(b.num_runs), str(b.num_bases), _loss(b), str(b.collapsed))
                for b in s.bins
            ],
        ),
        "## Dose at which a loss is reached",
        markdown_table(
            ("correction", "loss", "dose", "times no correction's"),
            [
                (r.correction, f"{r.loss:g}",
                 with_interval(r.dose, r.low, r.high, ".2g") if math.isfinite(r.dose) else "not reached",
                 "-" if r.correction == NONE or not math.isfinite(r.ratio)
                 else with_interval(r.ratio, r.ratio_low, r.ratio_high, ".1f"))
                for r in s.reached
            ],
        ),
        "## What adds to the dose",
        markdown_table(
            ("correction", *ADDED), [(name, *_added(a)) for name, found in s.additions.items() for a in found]
        ),
        *_kinds(s),
        "## Candidate doses",
        markdown_table(
            ("correction", "dose", "runs", "error", "variance explained", f"squared error less that of {DOSE}, 1e-4"),
            [
                (name, c.name, str(c.num_runs), f"{c.rmse:.4f}", number_cell(c.r2, ".2f"),
                 "-" if c.name == DOSE else with_interval(c.worse, c.worse_low, c.worse_high, "+.1f"))
                for name, found in s.candidates.items() for c in found
            ],
        ),
        *_other_tasks(s),
        "## How to read it", "\n".join(f"- {line}" for line in READING),
    ]  # fmt: skip
    return "\n\n".join(blocks) + "\n"


ADDED = ("factor", "levels", "runs", "bases", "variance explained by dose", "with the factor", "p", "p, Holm", "least",
         "most")  # fmt: skip


def _added(a: Addition) -> tuple[str, ...]:
    return (
        a.factor, str(a.num_levels), str(a.num_runs), str(a.num_bases),
        *map(number_cell, (a.r2_dose, a.r2_both, a.p, a.p_holm)),
        f"{a.lowest[0]} {a.lowest[1]:+.3f}", f"{a.highest[0]} {a.highest[1]:+.3f}",
    )  # fmt: skip


def _kinds(s: Study) -> list[str]:
    """The kinds of dose and what they add; nothing where no base has several."""
    if not s.kinds and not s.within:
        return []
    return [
        "## Kinds of dose",
        markdown_table(
            ("task", "correction", "kind", "dose", "runs", "bases", "collapsed", "loss", "beyond formats"),
            [
                (task, name, k.kind, number_cell(k.dose, ".2g"), str(k.num_runs), str(k.num_bases),
                 str(k.num_collapsed), number_cell(k.loss, "+.3f"),
                 "-" if k.kind == FORMAT else with_interval(k.beyond, k.low, k.high, "+.3f"))
                for (task, name), found in s.kinds.items() for k in found
            ],
        ),
        markdown_table(
            ("task", "correction", *ADDED),
            [(task, name, *_added(a)) for (task, name), found in s.within.items() for a in found],
        ),
        KINDS,
    ]  # fmt: skip


KINDS = (
    "Only bases with several kinds (or spreads); runs that predictions are for count here. fixed noise: one draw of "
    "Gaussian noise in the sampler's weights for the whole run; fresh noise: a new one at every push; staleness: BF16 "
    "weights of earlier steps. beyond formats: least squares on a curve of the dose, a level for every base and one "
    "for every kind, 95 %, bases as clusters. Among B bases p is hardly below 1 in 2^(B-1). Doses are those of the "
    "runs, over the runs that did not collapse; collapsed ones are counted alone."
)


READING = (
    "A run has collapsed where it ends below half of the accuracy it started from, or diverged. Collapses are a rate "
    "with its 95 % interval (Clopper and Pearson); every other number is over the runs that did not collapse. A run "
    "that stands where its BF16 run collapsed is left out: its loss would be the control's.",
    f"Intervals of the table by dose hold together, over all its rows, with {100 * LEVEL:g} % (Bonferroni; "
    f"cluster-robust, bases as clusters, Student's t); below {MIN_CLUSTERS} bases there is none.",
    "The dose of a loss is where a never-falling least-squares curve over all runs of the correction reaches it.",
    "What adds: a curve of the dose against the same with a mean for every level of the factor, by a wild bootstrap "
    "over bases. A base has one length and one size, so these are told apart between bases alone; least and most are "
    "mean residuals of levels beyond the dose.",
    "Candidate doses: a curve is fitted without one size, length and engine, and predicts those runs. `spread of "
    "log-ratio` takes token log-ratios as independent and normal. The dose is measured during the run, so a run that "
    f"goes wrong may raise its own; `{START}` is free of most of that.",
    "Exploratory: the shape and the doses were chosen on these records. A prediction made before its runs counts more.",
)


def write(s: Study, tables: Path, figures: Path) -> list[Path]:
    """Write `dose_curve.md` and `dose_curve.png`; the paths."""
    path = tables / "dose_curve.md"
    write_atomic(path, page(s).encode())
    return [path, *draw(s, figures / "dose_curve.png")]


def _loss(b: Bin) -> str:
    return with_interval(b.loss, b.loss_low, b.loss_high, "+.3f")
