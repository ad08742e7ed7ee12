"""The statistics of a comparison: intervals over few seeds, paired differences, and what may be concluded.

    intervals.py     interquartile mean, bootstrap, Student's t
    differences.py   paired differences of two arms, over seeds, questions or both
    improvement.py   the probability that a run of one arm beats a run of another
    verdicts.py      many comparisons, equivalence, verdicts, missing seeds

Scores of an arm form a matrix [S seeds, Q questions]. A seed is a whole training run, so its questions rise and fall
together: seeds are resampled as rows and never question by question, which would call 3 runs 1500 independent trials.
Random generators are passed in. Numpy alone; `tests/test_stats.py` holds every rule against scipy, and
`python -m harness.devtools.bench.coverage` simulates how often every interval holds the truth.
"""

from harness.records.stats.differences import (
    MAX_EXACT,
    Answers,
    Crossed,
    Difference,
    crossed,
    mcnemar,
    paired,
    sign_flip_p,
)
from harness.records.stats.improvement import Improvement, Strata, improvement, improvement_bootstrap, won
from harness.records.stats.intervals import Draws, Floats, bootstrap, iqm, mean, resample, t_cdf, t_quantile
from harness.records.stats.verdicts import (
    DELTA,
    MAX_DECLARED,
    MIN_SEEDS,
    Verdict,
    adjusted,
    equivalence_p,
    false_discovery,
    further_seeds,
    holm,
    verdict,
)

__all__ = [
    "DELTA", "MAX_DECLARED", "MAX_EXACT", "MIN_SEEDS", "Answers", "Crossed", "Difference", "Draws", "Floats",
    "Improvement", "Strata", "Verdict", "adjusted", "bootstrap", "crossed", "equivalence_p", "false_discovery",
    "further_seeds", "holm", "improvement", "improvement_bootstrap", "iqm", "mcnemar", "mean", "paired", "resample",
    "sign_flip_p", "t_cdf", "t_quantile", "verdict", "won",
]  # fmt: skip
