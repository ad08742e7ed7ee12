"""The statistics of a comparison: intervals over few seeds, paired differences, and what may be concluded.

    intervals.py     interquartile mean, bootstrap, Student's t
    differences.py   paired differences of two arms, over seeds, questions or both
    improvement.py   the probability that a run of one arm beats a run of another
    replicates.py    bases and runs that are replicated: the unit of a comparison, and what varies in it
    moderation.py    variances that the arms of a setting lend each other
    outcomes.py      outcomes of the runs of an arm, and the kind of verdict that they allow
    single_bases.py  what an arm does on each base, by the noise of runs alone
    collapse.py      the rate of collapse with its interval, and whether an arm's runs collapse sooner
    decisions.py     verdicts of a whole setting at once
    looks.py         looks while seeds arrive: the level of each, and which arms go on
    verdicts.py      many comparisons, verdicts, missing seeds

Scores of an arm form a matrix [S seeds, Q questions]. A seed is a whole training run, so its questions rise and fall
together: seeds are resampled as rows and never question by question, which would call 3 runs 1500 independent trials.
Random generators are passed in. `tests/records/stats` holds every rule against closed forms and scipy, and
`python -m harness.devtools.bench coverage` simulates how often every interval holds the truth and verdicts are wrong.
"""

from harness.records.stats.collapse import Fall, LogRank, Rate, fall, is_collapsed, log_rank, rate
from harness.records.stats.decisions import ALPHA, Contrast, Decision, decide
from harness.records.stats.differences import (
    MAX_EXACT,
    Answers,
    Crossed,
    Difference,
    crossed,
    mcnemar,
    paired,
    sign_flip_p,
    sign_test_p,
)
from harness.records.stats.improvement import Improvement, Stratum, improvement, won
from harness.records.stats.intervals import (
    LEVEL,
    MIN_CLUSTERS,
    MIN_RESAMPLED,
    ROUNDING,
    Draws,
    Floats,
    bootstrap,
    iqm,
    mean,
    mean_interval,
    percentiles,
    resample,
)
from harness.records.stats.looks import (
    MOST,
    Step,
    chance_to_decide,
    crossing_chance,
    further,
    level_per_look,
    next_step,
    units_to_decide,
)
from harness.records.stats.moderation import Prior, fit_prior, moderated
from harness.records.stats.outcomes import (
    COLLAPSES,
    NO_SIGNAL,
    Judged,
    Outcome,
    Outcomes,
    collapse_rate,
    difference,
    has_signal,
    is_decided,
    judge,
    kind,
    outcome,
)
from harness.records.stats.replicates import Components, Key, components, contrast
from harness.records.stats.single_bases import ON_BASE, BaseDifference, Noise, OnBase, on_bases, run_noise
from harness.records.stats.verdicts import (
    DELTA,
    MIN_SEEDS,
    Verdict,
    holm,
    step_up,
    verdict,
)

__all__ = [
    "ALPHA", "COLLAPSES", "DELTA", "LEVEL", "MAX_EXACT", "MIN_CLUSTERS", "MIN_RESAMPLED", "MIN_SEEDS", "MOST",
    "NO_SIGNAL", "ON_BASE", "ROUNDING", "Answers", "BaseDifference", "Components", "Contrast", "Crossed", "Decision",
    "Difference", "Draws", "Fall", "Floats", "Improvement", "Judged", "Key", "LogRank", "Noise", "OnBase",
    "Outcome", "Outcomes", "Prior", "Rate", "Step", "Stratum", "Verdict", "bootstrap", "chance_to_decide",
    "collapse_rate", "components", "contrast", "crossed", "crossing_chance", "decide", "difference", "fall",
    "fit_prior", "further", "has_signal", "holm", "improvement", "iqm", "is_collapsed", "is_decided", "judge",
    "kind", "level_per_look", "log_rank", "mcnemar", "mean", "mean_interval", "moderated", "next_step", "on_bases",
    "outcome", "paired", "percentiles", "rate", "resample", "run_noise", "sign_flip_p", "sign_test_p", "step_up",
    "units_to_decide", "verdict", "won",
]  # fmt: skip
