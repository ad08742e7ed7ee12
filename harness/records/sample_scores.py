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

from harness.records.stats.differences import crossed
from harness.records.stats.intervals import Floats, t_quantile

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
    """A mean with its two-sided Student interval; low and high are NaN for a single question."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def over_questions(scores: Floats, level: float = 0.95) -> Interval:
    """Interval of the mean of one run's scores [Q], its questions drawn from many."""
    values = np.asarray(scores, float)
    center, count = float(values.mean()), len(values)
    if count < 2:
        return Interval(mean=center, low=math.nan, high=math.nan)
    half = t_quantile(0.5 + level / 2, count - 1) * float(values.std(ddof=1)) / math.sqrt(count)
    return Interval(mean=center, low=center - half, high=center + half)


def over_seeds(scores: Floats, level: float = 0.95) -> Interval:
    """Interval of the mean of scores [S seeds, Q questions], both drawn from many; with one seed `over_questions`."""
    values = np.asarray(scores, float)
    if len(values) == 1:
        return over_questions(values[0], level)
    found = crossed(values, np.zeros_like(values), level)
    return Interval(mean=found.mean, low=found.low, high=found.high)
