"""One row per arm: three scores with intervals, the paired difference to the control, and a verdict.

The scores are the accuracy in the reference precision, the accuracy in the run's own rollout format, and the reward of
the sampler while training. They can rank methods in opposite orders, so no row shows one without the others. The
primary endpoint is the AUC: the mean reference accuracy of the evaluations after step 0.

A diverged run scores 0 wherever it did not arrive, so an arm cannot gain by losing its bad seeds. A failed, cancelled
or skipped run says nothing about the arm: it is counted and not scored.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from harness.records import stats
from harness.records.arms import Arm, control_of, group_arms, label
from harness.records.run_result import EvalRecord, RunResult
from harness.records.statuses import FINISHED, STATUSES
from harness.records.sweep_file import BASELINES

SCORES = ("accuracy", "rollout_accuracy", "reward", "auc")
Pair = tuple[int, int]
"""(base seed, seed)."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What the runs of an arm scored; rows are the scored runs in seed order. Fractions in [0, 1]."""

    matrices: dict[str, stats.Floats]
    """Score name -> [S, Q]; Q = 1 where a score has no value per question, or the runs saw different questions."""
    auc: dict[tuple[Pair, str], float]
    """(seeds, question hash) -> AUC, for pairing."""
    answers: dict[tuple[Pair, str], stats.Floats]
    """(seeds, question hash) -> [E evaluations after step 0, Q] of 0 and 1."""
    base_accuracy: float

    def mean_auc(self) -> float:
        """0 where there is none."""
        return sum(self.auc.values()) / max(len(self.auc), 1)


def leaderboard(results: Sequence[RunResult], control: str = "bf16") -> pd.DataFrame:
    """The table of a sweep, one row per arm by context, precision and falling AUC, against the method `control`.

    Score columns hold means over seeds, `<score>_low` and `<score>_high` their 95 % interval, `<score>_iqm...` the
    interquartile mean. `difference` is arm minus control in AUC over common seeds and questions. `p_adjusted` is over
    the differences of one context (`stats.adjusted`). `improvement` is P(AUC of a run > that of a run of the control),
    `crossed` the interval over new seeds and new questions, `p_equal` two one-sided tests within `stats.DELTA`, `wins`
    and `losses` the final answers that one of two paired runs alone got right. NaN where nothing was measured.
    """
    arms = group_arms(results)
    scores = {arm.label: score_arm(arm) for arm in arms}
    places = list(dict.fromkeys((arm.precision, str(arm.context)) for arm in arms))
    arms.sort(key=lambda arm: (places.index((arm.precision, str(arm.context))), -scores[arm.label].mean_auc()))
    rows: list[dict[str, Any]] = []
    draws: dict[tuple[int, ...], stats.Draws] = {}
    for arm in arms:
        reference = control_of(arm, arms, control)
        row = _identity(arm) | _score_columns(scores[arm.label], draws) | _measurements(arm)
        rows.append(row | _comparison(arm, reference, scores))
    _judge(rows)
    return pd.DataFrame(rows)


def contrasts(results: Sequence[RunResult], baseline: str = BASELINES[-1]) -> pd.DataFrame:
    """What every arm changes against the method `baseline` at the same precision and context; empty without such pairs.

    The columns of `leaderboard` from `control` on. `p_adjusted` is over these differences alone, context by context.
    """
    arms = group_arms(results)
    scores = {arm.label: score_arm(arm) for arm in arms}
    rows: list[dict[str, Any]] = []
    for arm in arms:
        if arm.method == baseline and not arm.variant:
            continue
        reference = control_of(arm, [other for other in arms if other is not arm], baseline)
        if reference is not None and reference.precision == arm.precision:
            rows.append(
                {"arm": arm.label, "context": label(arm.context), "seeds": len(scores[arm.label].auc)}
                | _comparison(arm, reference, scores)
            )
    _judge(rows)
    return pd.DataFrame(rows)


def evaluation_steps(run: RunResult) -> list[int]:
    """The steps after 0 at which a run is evaluated, by its config, or by its own evaluations where that is silent."""
    trainer = run.config.get("trainer", {})
    steps, every = trainer.get("steps"), trainer.get("eval_every")
    if not steps or not every:
        return sorted({record.step for record in run.evals if record.step > 0})
    return [*range(every, steps, every), steps]


def answers(run: RunResult, site: str) -> stats.Floats:
    """[E evaluations after step 0, Q questions] of 0 and 1; 0 where a diverged run did not arrive."""
    records = {record.step: record for record in run.evals if record.site == site and record.step > 0}
    steps = evaluation_steps(run) if run.status == "diverged" else sorted(records)
    width = max((len(_answers(record)) for record in _of(run, site)), default=1)
    missing = [0.0] * width
    return np.array([_answers(records[step]) if step in records else missing for step in steps]).reshape(-1, width)


def _answers(record: EvalRecord) -> list[float]:
    return [float(value) for value in record.correct] or [math.nan if record.accuracy is None else record.accuracy]


def _of(run: RunResult, site: str) -> list[EvalRecord]:
    return [record for record in run.evals if record.site == site]


def score_arm(arm: Arm) -> Scores:
    """Every score of the scored runs of an arm."""
    runs = [run for run in arm.runs if run.status in FINISHED]
    rows: dict[str, list[stats.Floats]] = {name: [] for name in SCORES}
    auc: dict[tuple[Pair, str], float] = {}
    answered: dict[tuple[Pair, str], stats.Floats] = {}
    for run in runs:
        reference, rollout = answers(run, "reference"), answers(run, "rollout")
        if len(reference):
            rows["accuracy"].append(reference[-1])
            rows["auc"].append(reference.mean(axis=0))
            auc[(run.base_seed, run.seed), _hash(run)] = float(reference.mean())
            answered[(run.base_seed, run.seed), _hash(run)] = reference
        if len(rollout):
            rows["rollout_accuracy"].append(rollout[-1])
        reward = 0.0 if run.status == "diverged" else run.summary.get("reward_last")
        if reward is not None:
            rows["reward"].append(np.array([reward]))
    is_crossed = len({_hash(run) for run in runs}) == 1
    base = [r.accuracy for run in runs for r in _of(run, "reference") if r.step == 0 and r.accuracy is not None]
    return Scores(
        matrices={name: _matrix(values, is_crossed) for name, values in rows.items()},
        auc=auc,
        answers=answered,
        base_accuracy=float(np.mean(base)) if base else math.nan,
    )


def _hash(run: RunResult) -> str:
    return next((record.question_hash for record in _of(run, "reference")), "")


def _matrix(rows: list[stats.Floats], is_crossed: bool) -> stats.Floats:
    if is_crossed and len({len(row) for row in rows}) == 1:
        return np.array(rows)
    return np.array([[row.mean()] for row in rows]).reshape(len(rows), 1)


def _identity(arm: Arm) -> dict[str, Any]:
    counts = Counter(run.status for run in arm.runs)
    num_scored = sum(counts[status] for status in FINISHED)
    return {
        "arm": arm.label,
        "method": arm.method,
        "precision": arm.precision,
        "variant": arm.variant,
        "context": label(arm.context),
        **arm.axes,
        "seeds": num_scored,
        "status": ", ".join(f"{count} {status}" for status, count in counts.most_common()),
        **{status: counts[status] for status in STATUSES},
        "reconstructed": next((run.method.reconstructed for run in arm.runs if run.method.reconstructed), ""),
        "is_preliminary": num_scored < stats.MIN_SEEDS,
        "is_draft": any(run.is_draft for run in arm.runs),
    }


def _score_columns(scores: Scores, draws: dict[tuple[int, ...], stats.Draws]) -> dict[str, float]:
    """Means and interquartile means with intervals; matrices of one shape share their resamples through `draws`."""
    columns: dict[str, float] = {"base_accuracy": scores.base_accuracy}
    for name, matrix in scores.matrices.items():
        is_known = len(matrix) > 0 and bool(np.isfinite(matrix).all())
        if is_known and matrix.shape not in draws:
            num_seeds, num_questions = matrix.shape
            draws[matrix.shape] = stats.resample(num_seeds, num_questions, np.random.default_rng(0))
        for suffix, statistic in (("", stats.mean), ("_iqm", stats.iqm)):
            point = float(statistic(matrix.mean(axis=1), -1)) if is_known else math.nan
            low, high = stats.bootstrap(matrix, draws[matrix.shape], statistic) if is_known else (math.nan, math.nan)
            columns |= {f"{name}{suffix}": point, f"{name}{suffix}_low": low, f"{name}{suffix}_high": high}
    return columns


def _measurements(arm: Arm) -> dict[str, float]:
    """The worst mismatch of any seed; medians of what tails would rule; means of the rest."""
    runs = [run for run in arm.runs if run.status in FINISHED]

    def over(reduce: Any, values: list[float | None]) -> float:
        known = [value for value in values if value is not None]
        return float(reduce(known)) if known else math.nan

    return {
        "k3_max": over(max, [run.summary.get("k3_max") for run in runs]),
        "k3_median": over(np.median, [run.summary.get("k3_median") for run in runs]),
        "ess_token_raw": over(np.median, [run.summary.get("ess_token_raw_median") for run in runs]),
        "ess_token_min": over(min, [run.summary.get("ess_token_min") for run in runs]),
        "entropy_last": over(np.mean, [run.summary.get("entropy_last") for run in runs]),
        "grad_norm_max": over(max, [run.summary.get("grad_norm_max") for run in runs]),
        "rollout_tokens_per_s": over(np.median, [run.tokens_per_s.get("rollout") for run in runs]),
        "total_s": over(np.median, [run.time_s.get("total") for run in runs]),
        "peak_memory_gib": over(max, [run.peak_memory_gib for run in runs]),
    }


def _comparison(arm: Arm, reference: Arm | None, scores: dict[str, Scores]) -> dict[str, Any]:
    """The paired difference to the control, or why there is none in place of the verdict."""
    own = scores[arm.label].auc
    against = None if reference is None or reference is arm else scores[reference.label]
    other = {} if against is None else against.auc
    found = stats.paired(own, other)
    verdict = ""
    if reference is arm:
        verdict = "control"
    elif not own:
        verdict = "no result"
    elif not found.num_pairs:
        verdict = "no control"
    return {
        "control": reference.label if reference is not None else "",
        "pairs": found.num_pairs,
        "difference": found.mean,
        "difference_low": found.low,
        "difference_high": found.high,
        "difference_sd": found.sd,
        "p": found.p,
        "p_sign": found.p_sign,
        "verdict": verdict,
        "p_equal": stats.equivalence_p(found.mean, found.sd, found.num_pairs),
        **_improvement(own, other),
        **_over_questions(scores[arm.label], against),
    }


def _improvement(own: dict[tuple[Pair, str], float], other: dict[tuple[Pair, str], float]) -> dict[str, float]:
    found = stats.improvement([(np.array(list(own.values())), np.array(list(other.values())))])
    return {"improvement": found.probability, "improvement_low": found.low, "improvement_high": found.high}


def _over_questions(own: Scores, other: Scores | None) -> dict[str, float]:
    """The difference with questions as a second random effect, and McNemar's test on the final answers."""
    keys = [] if other is None else [key for key in own.answers if key in other.answers]
    names = "crossed_low", "crossed_high", "p_crossed", "wins", "losses", "p_mcnemar"
    if other is None or len({(key[1], own.answers[key].shape[1]) for key in keys}) != 1:
        return dict.fromkeys(names, math.nan)
    curve, curve_other = (np.array([s.answers[key].mean(axis=0) for key in keys]) for s in (own, other))
    final, final_other = (np.array([s.answers[key][-1] for key in keys]) for s in (own, other))
    both, last = stats.crossed(curve, curve_other), stats.mcnemar(final, final_other)
    values = both.low, both.high, both.p, last.wins, last.losses, last.p
    return dict(zip(names, values, strict=True))


def _judge(rows: list[dict[str, Any]]) -> None:
    """Fill in the adjusted p, the verdict, and how many seeds would show the difference seen, or delta if larger.

    A family is the differences of one context.
    """
    for context in {row["context"] for row in rows}:
        _judge_family([row for row in rows if row["context"] == context])


def _judge_family(rows: list[dict[str, Any]]) -> None:
    num_contrasts = sum(not math.isnan(row["p"]) for row in rows)
    for row, adjusted in zip(rows, stats.adjusted([row["p"] for row in rows]), strict=True):
        row |= {"p_adjusted": adjusted, "further_seeds": None}
        row["verdict"] = row["verdict"] or stats.verdict(
            row["difference_low"], row["difference_high"], p_adjusted=adjusted
        )
        if row["verdict"] == "cannot tell":
            effect = max(abs(row["difference"]), stats.DELTA)
            row["further_seeds"] = stats.further_seeds(
                row["difference_sd"], row["pairs"], effect, level=1 - 0.05 / max(num_contrasts, 1)
            )
