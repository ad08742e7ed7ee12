"""Scores of several answers a question: avg@k, unbiased pass@k, maj@k, with intervals over questions and seeds.

All start from matrices of one evaluation, questions x samples, and end in one number a question; a score is the mean of
those. Answers are classes: samples of one number gave the same answer, -1 gave none that could be read. Sources:
pass@k is equation 1 of Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374); maj@k is the
majority vote of Wang et al., "Self-Consistency" (arXiv 2203.11171), whose ties we settle by their expectation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import stdtrit

from harness.foundation.number_cell import with_interval
from harness.records.stats.differences import crossed
from harness.records.stats.intervals import LEVEL, Floats

UNREAD = -1
"""Class of an answer that could not be read; it has no vote."""


def avg_at_k(correct: Floats) -> Floats:
    """avg@k of every question [Q]: the share of right samples. correct [Q, k] of 0 and 1."""
    return np.asarray(correct, float).mean(1)


def pass_at_k(correct: Floats, k: int) -> Floats:
    """Unbiased pass@k of every question [Q]: the chance that k of its n samples, drawn without replacement, hold a
    right one, 1 - C(n - c, k) / C(n, k). correct [Q, n] of 0 and 1. Raises ValueError unless 1 <= k <= n."""
    values = np.asarray(correct, float)
    n = values.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"k={k}: must be 1 to {n}, the samples of a question")
    table = np.array([1.0 - math.comb(n - c, k) / math.comb(n, k) for c in range(n + 1)])
    return table[values.sum(1).astype(int)]


def maj_at_k(correct: Floats, answers: Sequence[Sequence[int]]) -> Floats:
    """maj@k of every question [Q]: the score of its most frequent answer; of several equally frequent ones their mean,
    and 0 where no answer could be read. correct [Q, k] of 0 and 1, answers [Q][k] classes."""
    scores: list[float] = []
    for row, classes in zip(np.asarray(correct, float), answers, strict=True):
        votes = Counter(c for c in classes if c != UNREAD)
        most = max(votes.values(), default=0)
        tied = [float(row[np.asarray(classes) == c].mean()) for c, count in votes.items() if count == most]
        scores.append(float(np.mean(tied)) if tied else 0.0)
    return np.array(scores)


def classes_of(answers: Sequence[str | None]) -> list[int]:
    """Classes of one question's answers by order of first appearance; None, which could not be read, is UNREAD."""
    known: dict[str, int] = {}
    return [UNREAD if answer is None else known.setdefault(answer, len(known)) for answer in answers]


def question_scores(matrices: Mapping[str, Any]) -> dict[str, Floats]:
    """Score name -> one number a question [Q]: avg@k, pass@1, 2, 4 .. k, maj@k, greedy."""
    found: dict[str, Floats] = {}
    if matrices.get("correct"):
        correct = np.asarray(matrices["correct"], float)
        k = correct.shape[1]
        found[f"avg@{k}"] = avg_at_k(correct)
        for size in sorted({2**i for i in range(k.bit_length())} | {k}) if k > 1 else ():
            found[f"pass@{size}"] = pass_at_k(correct, size)
        if matrices.get("answers") and k > 1:
            found[f"maj@{k}"] = maj_at_k(correct, matrices["answers"])
    if matrices.get("greedy"):
        found["greedy"] = np.asarray(matrices["greedy"], float)
    return found


def scores_of(matrices: Mapping[str, Any]) -> dict[str, float]:
    """Mean over the questions of every score that the matrices of a record allow: "correct" [Q][k], "answers" [Q][k],
    "greedy" [Q]."""
    return {name: float(np.mean(values)) for name, values in question_scores(matrices).items()}


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean of scores in [0, 1] with its two-sided interval; low and high are NaN for a single question."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return with_interval(self.mean, self.low, self.high, ".3f")


def over_questions(scores: Floats) -> Interval:
    """Interval of the mean of one run's scores in [0, 1], [Q], its questions drawn from many."""
    values = np.asarray(scores, float)
    count = len(values)
    if count < 2:
        return Interval(mean=float(values.mean()), low=math.nan, high=math.nan)
    t = float(stdtrit(count - 1, 0.5 + LEVEL / 2))
    return _score_interval(float(values.mean()), (t * float(values.std(ddof=1))) ** 2 / count, t * t / count)


def over_seeds(scores: Floats) -> Interval:
    """Interval of the mean of scores in [0, 1], [S seeds, Q questions], both drawn from many; with one seed or one
    question `over_questions`."""
    values = np.asarray(scores, float)
    if 1 in values.shape:
        return over_questions(values.mean(0))
    found = crossed(values, np.zeros_like(values))
    t = float(stdtrit(values.shape[1] - 1, 0.5 + LEVEL / 2))
    return _score_interval(found.mean, ((found.high - found.low) / 2) ** 2, t * t / values.shape[1])


def _score_interval(mean: float, squared: float, alike: float) -> Interval:
    """Wilson's score interval (J. Am. Stat. Assoc. 22, 1927) with the spread that was seen: the values of p at which
    the observed mean lies just inside Student's interval, whose variance moves with p (1 - p).

    squared: that interval's half-width at the observed mean, squared. alike: the half-width squared per p (1 - p) where
    all scores are equal and show no spread: eight wrong answers of eight leave more than nothing possible.
    """
    spread = mean * (1 - mean)
    width = squared / spread if squared > 0 and spread > 0 else alike
    center = (mean + width / 2) / (1 + width)
    half = math.sqrt(width * spread + width * width / 4) / (1 + width)
    return Interval(mean=mean, low=max(0.0, center - half), high=min(1.0, center + half))
