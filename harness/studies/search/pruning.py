"""Pruning of trials, on numbers alone: three rules with stated error rates, and halving.

1. `is_beaten`, after a seed. The trial and the best one so far are compared on the seeds that both have, which removes
   the base model's share of the variance. The spread is pooled over all complete trials (two-way layout, trial + seed,
   residual). The best of T trials is also the luckiest: its mean is taken as too high by what the largest of T equal
   trials exceeds their mean (Blom, Statistical Estimates and Transformed Beta-Variables, 1958). A trial that is truly
   as good as the others is then given up with a chance of about `alpha` per look; simulated in the tests. With several
   objectives, whoever looks better than the best trial by more than a standard error in any of them stays.
2. `has_collapsed`, inside a cell. The reward of the last steps is compared with that of the first ones of the same
   cell, by Welch's t at `collapse_alpha`. Both are of one sampler, so formats and noise cannot tilt it.
3. `is_among_lowest`, inside a cell, off by default: the reward half-way against finished cells of the same seed. A cell
   that is exchangeable with them is given up with at most the chance `reward_quantile`. Only for searches that leave
   the sampler's format and noise alone, since these change the reward that the sampler itself sees.

4. `is_below_half`, after a seed, off by default: successive halving (arXiv 1502.07943), asynchronous as in arXiv
   1810.05934. A trial goes on only among the best 1/`halving` of its share's trials that have as many seeds. It spends
   equal budgets; it promises no error rate, so the winner is confirmed on fresh seeds.

A cell that diverged ends its trial. Optuna's own pruners know one objective only and are not used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean, variance

import numpy as np
from scipy.special import stdtrit

from harness.records.stats import Floats
from harness.studies.search.spec import Objective, Pruner

WINDOW = 16
"""Steps whose mean reward is compared."""
MIN_SEEN = 4
"""Steps of a window that must have been seen; a running cell shows its reward twice a second."""
HALF = 0.5
"""Part of a cell after which its reward is looked at."""
KEPT_ERRORS = 1.0
"""Standard errors by which a trial must look better in another objective to be kept."""
Scores = Mapping[int, Mapping[str, float]]
"""Seed -> metric -> value, of one trial."""


def scaled(value: float, is_log: bool) -> float:
    """A value as it is averaged and compared: its logarithm with `is_log`, and as it is without."""
    return math.log(max(value, 1e-300)) if is_log else value


def oriented(value: float, objective: Objective) -> float:
    """Larger is better; a logarithm where the objective compares logarithms."""
    return scaled(value, objective.log) if objective.direction == "maximize" else -scaled(value, objective.log)


def matrix(trials: Sequence[Scores], seeds: Sequence[int], objective: Objective) -> Floats:
    """[trials, seeds] of oriented values."""
    return np.array([[oriented(scores[seed][objective.metric], objective) for seed in seeds] for scores in trials])


def pooled_spread(scores: Floats) -> tuple[float, int]:
    """(residual standard deviation of one seed of one trial, its degrees of freedom) of a layout [T trials, S seeds],
    2 x 2 or more."""
    degrees = (scores.shape[0] - 1) * (scores.shape[1] - 1)
    residual = scores - scores.mean(0) - scores.mean(1, keepdims=True) + scores.mean()
    return math.sqrt(float(np.sum(residual**2)) / degrees), degrees


def luck_of_best(num_trials: int) -> float:
    """Expected largest of that many standard normal draws, two or more (Blom's approximation)."""
    return NormalDist().inv_cdf((num_trials - 0.375) / (num_trials + 0.25))


def is_beaten(
    scores: Scores, complete: Sequence[Scores], seeds: Sequence[int], objectives: Sequence[Objective], pruner: Pruner
) -> str | None:
    """Reason to give up a trial with the seeds of `scores`, or None. `complete`: comparable trials with every seed."""
    done = [seed for seed in seeds if seed in scores]
    if pruner.alpha <= 0 or not done or len(done) == len(seeds) or len(complete) < max(2, pruner.min_trials):
        return None
    first = matrix(complete, seeds, objectives[0])
    best = complete[int(first.mean(1).argmax())]
    reason = None
    for number, objective in enumerate(objectives):
        sigma, degrees = pooled_spread(matrix(complete, seeds, objective))
        gap = fmean(
            oriented(scores[seed][objective.metric], objective) - oriented(best[seed][objective.metric], objective)
            for seed in done
        )
        error = sigma * math.sqrt(2 / len(done))
        if number:
            if gap > KEPT_ERRORS * error:
                return None
            continue
        luck = luck_of_best(len(complete)) * sigma / math.sqrt(len(seeds))
        if gap + luck + float(stdtrit(degrees, 1 - pruner.alpha)) * error >= 0:
            return None
        reason = f"{objective.metric} is behind the best trial by {-gap:.3g} +- {error:.2g} after {len(done)} seeds"
    return reason


def is_below_half(
    scores: Scores, others: Sequence[Scores], seeds: Sequence[int], objective: Objective, pruner: Pruner
) -> str | None:
    """Reason to give up a trial that is not among the best 1/halving after its seeds, or None.

    `others`: the share's other trials, pruned ones too; those without all of this trial's seeds do not count.
    """
    done = [seed for seed in seeds if seed in scores]
    if not pruner.halving or not done or len(done) == len(seeds):
        return None
    rivals = [other for other in others if all(objective.metric in other.get(seed, {}) for seed in done)]
    mine, *theirs = matrix([scores, *rivals], done, objective).mean(1).tolist()
    rank = 1 + sum(value > mine for value in theirs)
    if rank <= math.ceil((len(theirs) + 1) / pruner.halving):
        return None
    return f"its {objective.metric} is number {rank} of {len(theirs) + 1} after {len(done)} seeds"


def has_collapsed(rewards: Mapping[int, float], steps: int, pruner: Pruner) -> str | None:
    """Reason to give up a running cell; `rewards` are step (from 1) -> mean reward of the steps that were seen."""
    early = [reward for step, reward in rewards.items() if step <= WINDOW]
    now = max(rewards, default=0)
    late = [reward for step, reward in rewards.items() if step > now - WINDOW]
    if pruner.collapse_alpha <= 0 or now < max(HALF * steps, 2 * WINDOW) or min(len(early), len(late)) < MIN_SEEN:
        return None
    shares = [variance(early) / len(early), variance(late) / len(late)]
    total = sum(shares)
    if total == 0:
        return "its reward fell" if fmean(late) < fmean(early) else None
    degrees = total**2 / sum(s**2 / (n - 1) for s, n in zip(shares, (len(early), len(late)), strict=True))
    t = (fmean(early) - fmean(late)) / math.sqrt(total)
    if t <= float(stdtrit(max(1, int(degrees)), 1 - pruner.collapse_alpha)):
        return None
    return f"its reward fell from {fmean(early):.3f} to {fmean(late):.3f} by step {now}"


def reward_at(rewards: Mapping[int, float], step: int) -> float | None:
    """Mean reward of the window that ends at a step; None where too few of its steps were seen."""
    window = [reward for at, reward in rewards.items() if step - WINDOW < at <= step]
    return fmean(window) if len(window) >= MIN_SEEN else None


def is_among_lowest(rewards: Mapping[int, float], steps: int, peers: Sequence[float], pruner: Pruner) -> str | None:
    """Reason to give up a running cell: `peers` are `reward_at` half-way of finished cells of its seed.

    Rank r of m + 1 exchangeable cells has the chance r / (m + 1), so rank 1 counts from m + 1 >= 1 / quantile on.
    """
    half = int(HALF * steps)
    mine = reward_at(rewards, half)
    if pruner.reward_quantile <= 0 or mine is None or max(rewards) < half:
        return None
    rank = 1 + sum(peer <= mine for peer in peers)
    if rank > pruner.reward_quantile * (len(peers) + 1):
        return None
    return f"its reward {mine:.3f} at step {half} has rank {rank} from below among {len(peers) + 1} cells of its seed"
