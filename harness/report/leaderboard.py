"""One row per arm: three scores with intervals, the differences to the control, and the verdicts.

The scores are the accuracy in the reference precision, the accuracy in the run's own rollout format, and the reward of
the sampler while training. They can rank methods in opposite orders, so no row shows one without the others. A sweep
declares which endpoints are judged, each the mean accuracy of the evaluations after step 0: `reference`, the policy in
BF16 (the AUC), and `deployed`, the policy as the run's own rollout format computes it. A method whose parts say that it
must be deployed in its format (`Part.deploys_rollout`) is ranked by the second.

A failed, cancelled or skipped run says nothing about the arm: it is counted and not scored.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from harness.records import stats
from harness.records.arms import Arm, control_of, label, scored
from harness.records.effective_bits import bits_of_run
from harness.records.run_result import Base, RunResult
from harness.records.statuses import FINISHED, STATUSES
from harness.records.sweep_file import BASELINES, ENDPOINTS
from harness.report.scores import Scores, by_base, on_common_bases, score_arms
from methods import METHODS

Pairing = tuple[Arm, Arm | None]
"""(arm, its control)."""
OnBases = Mapping[Base, stats.BaseDifference]
"""Base seed -> the difference of an arm from its control there."""


@dataclass(frozen=True, kw_only=True)
class Alone:
    """An arm on single bases."""

    by_base: OnBases
    family: int
    """Arms of the context that are judged together."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """An arm against its control, judged at every endpoint."""

    arm: Arm
    control: Arm | None
    endpoint: str
    """The one that ranks the arm, declared or not."""
    found: Mapping[str, stats.Judged]
    """Endpoint -> the verdict there, for each of `ENDPOINTS`; "not declared" where the sweep does not have it."""
    ranking: stats.Judged
    """The verdict at `endpoint`, or at the first declared one where that is not declared."""


@dataclass(frozen=True, kw_only=True)
class Board:
    """A sweep against its control, judged once for all that draw, write and say it."""

    results: Sequence[RunResult]
    arms: Sequence[Arm]
    """In the order of `group_arms`; the table has them ranked."""
    scores: Mapping[str, Scores]
    """Label of an arm -> its scores."""
    control: str
    endpoints: Sequence[str]
    alpha: float
    table: pd.DataFrame
    """The `leaderboard`."""
    on_bases: Sequence[tuple[Arm, OnBases]]
    """(arm, base -> its difference from the control there) at the first endpoint, where something is known."""
    baselines: Sequence[str]
    """Methods that arms are compared with beside the control, no correction last."""

    @cached_property
    def against(self) -> dict[str, pd.DataFrame]:
        """Baseline -> `contrasts` with it, no correction first; without those that no arm is compared with."""
        others = [name for name in reversed(self.baselines) if name != self.control]
        found = {
            name: contrasts_of(self.arms, self.scores, name, self.endpoints, self.alpha, without=others[:place])
            for place, name in enumerate(others)
        }
        return {name: rows for name, rows in found.items() if len(rows)}


def leaderboard(
    results: Sequence[RunResult],
    control: str = "bf16",
    endpoints: Sequence[str] = ENDPOINTS,
    alpha: float = stats.ALPHA,
) -> pd.DataFrame:
    """The table of a sweep, one row per arm by context, precision and falling endpoint, against the method `control`.

    Score columns hold means over seeds, `<score>_low` and `<score>_high` their 95 % interval, `<score>_iqm...` the
    interquartile mean. `difference` is arm minus control in AUC over the runs of common bases and questions that did
    not collapse, `difference_low` and `_high` the interval that decides (`stats.decide`, over the arms of a context),
    `p_adjusted` the p of that decision. `verdict` is in words, `collapse` the rate with its interval;
    `deployed_difference`, `deployed_verdict` ... the same of the policy as deployed. `endpoint` says which one ranks
    the arm. `improvement` is P(AUC of a run > that of a run of the control on the same bases), `crossed` the interval
    over new seeds and new questions, `p_equal` two one-sided tests within `stats.DELTA`, `wins` and `losses` the final
    answers that one of two paired runs alone got right. NaN where nothing was measured. `alpha` is the level of the
    verdicts: lower for a sweep that was looked at while it ran (`harness.records.looks.level_of`).
    """
    return board_of(results, control, endpoints, alpha).table


def board_of(
    results: Sequence[RunResult],
    control: str = "bf16",
    endpoints: Sequence[str] = ENDPOINTS,
    alpha: float = stats.ALPHA,
    baselines: Sequence[str] = BASELINES,
) -> Board:
    """The `leaderboard` of a sweep with what it was judged from."""
    arms, scores = score_arms(results)
    judged = judge_arms(scores, arms, control, endpoints, alpha)
    pairs = [(one.arm, one.control) for one in judged.values()]
    alone = {name: _on_bases(pairs, scores, name, alpha) for name in endpoints}
    draws: dict[tuple[int, ...], stats.Draws] = {}
    rows = [
        _identity(one.arm) | {"endpoint": one.endpoint} | _score_columns(scores[name], draws) | _measurements(one.arm)
        | _against_columns(one, scores, alone)
        for name, one in judged.items()
    ]  # fmt: skip
    told = {name: one.by_base for name, one in alone[endpoints[0]].items()}
    return Board(
        results=results, arms=arms, scores=scores, control=control, endpoints=endpoints, alpha=alpha,
        table=pd.DataFrame(rows), on_bases=[(arm, told[arm.label]) for arm in arms if told.get(arm.label)],
        baselines=baselines,
    )  # fmt: skip


def contrasts(
    results: Sequence[RunResult],
    baseline: str = BASELINES[-1],
    endpoints: Sequence[str] = ENDPOINTS,
    alpha: float = stats.ALPHA,
) -> pd.DataFrame:
    """Differences of every arm from the method `baseline` at the same precision and context; empty without such pairs.

    Left out: arms to which `baseline` ran at other settings alone. The columns of `leaderboard` from `control` on. They
    are decided by themselves, context by context.
    """
    return contrasts_of(*score_arms(results), baseline, endpoints, alpha)


def contrasts_of(
    arms: Sequence[Arm],
    scores: Mapping[str, Scores],
    baseline: str = BASELINES[-1],
    endpoints: Sequence[str] = ENDPOINTS,
    alpha: float = stats.ALPHA,
    without: Sequence[str] = (),
) -> pd.DataFrame:
    """`contrasts` of arms whose `scores`, by label, are there; methods of `without` are left out as they are."""
    pairs: list[tuple[Arm, Arm]] = []
    for arm in arms:
        if arm.method in (baseline, *without) and arm.is_plain:
            continue
        reference = control_of(arm, [other for other in arms if other is not arm], baseline)
        if reference is not None and reference.precision == arm.precision:
            pairs.append((arm, reference))
    alone = {name: _on_bases(pairs, scores, name, alpha) for name in endpoints}
    return pd.DataFrame([
        {"arm": name, "method": one.arm.method, "context": label(one.arm.context), "seeds": len(scores[name].auc)}
        | _against_columns(one, scores, alone)
        for name, one in _judge(pairs, scores, endpoints, alpha).items()
    ])  # fmt: skip


def judge_arms(
    scores: Mapping[str, Scores],
    arms: Sequence[Arm],
    control: str = "bf16",
    endpoints: Sequence[str] = ENDPOINTS,
    alpha: float = stats.ALPHA,
) -> dict[str, Judgement]:
    """Label of an arm -> its judgement against the method `control`, in the order of the leaderboard's rows."""
    places = list(dict.fromkeys((arm.precision, str(arm.context)) for arm in arms))

    def place(arm: Arm) -> tuple[int, float]:
        falling = -scores[arm.label].mean(rank_endpoint(arm.method, endpoints))
        return places.index((arm.precision, str(arm.context))), falling

    ranked = sorted(arms, key=place)
    return _judge([(arm, control_of(arm, ranked, control)) for arm in ranked], scores, endpoints, alpha)


def rank_endpoint(method: str, endpoints: Sequence[str] = ENDPOINTS) -> str:
    """The endpoint that ranks a method: the first declared one, or `deployed` where one of its parts demands it."""
    parts = METHODS[method].parts if method in METHODS else ()
    return "deployed" if any(part.deploys_rollout for part in parts) else endpoints[0]


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
    """Means and interquartile means with intervals over bases; matrices of one shape share their resamples through
    `draws`."""
    columns: dict[str, float] = {"base_accuracy": scores.base_accuracy}
    for name, found in scores.matrices.items():
        matrix = by_base(found, scores.bases[name])
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
    """Measurements of an arm: the worst mismatch of any seed, medians of heavy-tailed quantities, means of the rest."""
    runs = scored(arm)

    def over(reduce: Any, values: list[float | None]) -> float:
        known = [value for value in values if value is not None]
        return float(reduce(known)) if known else math.nan

    return {
        "effective_bits": over(np.median, [bits_of_run(run) for run in runs]),
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


def _against_columns(
    one: Judgement, scores: Mapping[str, Scores], alone: Mapping[str, Mapping[str, Alone]]
) -> dict[str, Any]:
    """Columns of an arm beside its control; `alone`: endpoint -> label -> what the arm does on single bases."""
    arm, reference = one.arm, one.control
    own = scores[arm.label].auc
    against = None if reference is None or _reason(arm, reference, scores) else scores[reference.label]
    other = {} if against is None else against.auc
    keys = [key for key in own if key in other]
    gaps = by_base(np.array([own[key] - other[key] for key in keys]), [base for (base, _), _ in keys])
    columns: dict[str, Any] = {
        "control": reference.label if reference is not None else "",
        "p_sign": stats.sign_flip_p(gaps),
        "verdict": one.found["reference"].verdict,
        **_improvement(scores[arm.label], against),
        **_over_questions(scores[arm.label], against),
    }
    for endpoint, found in one.found.items():
        prefix = "" if endpoint == "reference" else f"{endpoint}_"
        columns |= _columns(prefix, found) | _base_columns(prefix, alone.get(endpoint, {}).get(arm.label))
    return columns


def _reason(arm: Arm, reference: Arm | None, scores: Mapping[str, Scores]) -> str:
    """Reason why an arm cannot be judged: it is the control, or has none, or no result; empty where it can."""
    if reference is arm:
        return "control"
    if not scores[arm.label].auc:
        return "no result"
    if reference is None or not _common(scores[arm.label], scores[reference.label]):
        return "no control"
    return ""


def _common(own: Scores, other: Scores, endpoint: str = "reference") -> bool:
    """Do two arms share a base and its questions?"""
    return not {base for base, _ in own.outcomes[endpoint]}.isdisjoint(base for base, _ in other.outcomes[endpoint])


def _improvement(own: Scores, other: Scores | None) -> dict[str, float]:
    found = stats.improvement([] if other is None else [on_common_bases(own, other)])
    return {"improvement": found.probability, "improvement_low": found.low, "improvement_high": found.high}


def _over_questions(own: Scores, other: Scores | None) -> dict[str, float]:
    """The difference with questions as a second random effect, and McNemar's test on the final answers."""
    keys = [] if other is None else [key for key in own.answers if key in other.answers]
    names = "crossed_low", "crossed_high", "p_crossed", "wins", "losses", "p_mcnemar"
    if other is None or len({(key[0][1], own.answers[key].shape[1]) for key in keys}) != 1:
        return dict.fromkeys(names, math.nan)
    bases = [base for (base, _), _ in keys]
    curve, curve_other = (by_base(np.array([s.answers[key].mean(axis=0) for key in keys]), bases) for s in (own, other))
    final, final_other = (np.array([s.answers[key][-1] for key in keys]) for s in (own, other))
    both, last = stats.crossed(curve, curve_other), stats.mcnemar(final, final_other)
    values = both.low, both.high, both.p, last.wins, last.losses, last.p
    return dict(zip(names, values, strict=True))


def _judge(
    pairs: Sequence[Pairing], scores: Mapping[str, Scores], endpoints: Sequence[str], alpha: float
) -> dict[str, Judgement]:
    """Label of an arm -> its judgement, in the order of `pairs`."""
    judged = {name: _judged(pairs, scores, name, name in endpoints, alpha) for name in ENDPOINTS}
    told: dict[str, Judgement] = {}
    for index, (arm, control) in enumerate(pairs):
        endpoint, found = rank_endpoint(arm.method, endpoints), {name: judged[name][index] for name in ENDPOINTS}
        ranking = found[endpoint if endpoint in endpoints else endpoints[0]]
        told[arm.label] = Judgement(arm=arm, control=control, endpoint=endpoint, found=found, ranking=ranking)
    return told


def _judged(
    pairs: Sequence[Pairing], scores: Mapping[str, Scores], endpoint: str, is_declared: bool, alpha: float
) -> list[stats.Judged]:
    """The verdicts of the arms at one endpoint; a family is one context."""
    found: dict[int, stats.Judged] = {}
    families: dict[str, dict[int, tuple[stats.Outcomes, stats.Outcomes]]] = {}
    for index, (arm, reference) in enumerate(pairs):
        own, other = scores[arm.label], None if reference is None else scores[reference.label]
        reason = _reason(arm, reference, scores)
        if is_declared and not reason and other is not None and _common(own, other, endpoint):
            pair = own.outcomes[endpoint], other.outcomes[endpoint]
            families.setdefault(label(arm.context), {})[index] = pair
        else:
            why = reason or ("no control" if is_declared else "not declared")
            rate = stats.collapse_rate(own.outcomes[endpoint])
            found[index] = stats.Judged(verdict=why, rate=rate, contrast=None, decision=None)
    for family in families.values():
        found |= zip(family, stats.judge(list(family.values()), alpha), strict=True)
    return [found[index] for index in range(len(pairs))]


def _on_bases(pairs: Sequence[Pairing], scores: Mapping[str, Scores], endpoint: str, alpha: float) -> dict[str, Alone]:
    """Label of an arm -> what it does on single bases; no arm of a context of which no two runs share arm and base. The
    noise of runs is that of a context, and so is the family that is decided together."""
    found: dict[str, Alone] = {}
    for context in dict.fromkeys(label(arm.context) for arm, _ in pairs):
        inside = [(arm, control) for arm, control in pairs if label(arm.context) == context]
        noise = stats.run_noise(scores[arm.label].outcomes[endpoint] for arm, _ in inside)
        judged = [(a, c) for a, c in inside if c is not None and not _reason(a, c, scores)]
        if noise.df > 0 and judged:
            compared = [(scores[a.label].outcomes[endpoint], scores[c.label].outcomes[endpoint]) for a, c in judged]
            told = stats.on_bases(compared, noise, alpha=alpha)
            for (arm, _), by_base in zip(judged, told, strict=True):
                by_seed = {base: one for (base, _), one in by_base.items()}
                found[arm.label] = Alone(by_base=by_seed, family=len(judged))
    return found


def _base_columns(prefix: str, alone: Alone | None) -> dict[str, Any]:
    """Counts of the words on single bases, the losses there, and how many bases are below the control, with the p of a
    sign test times the arms of the context (Bonferroni); no column where there is no word.

    The sign test takes it that an arm like its control is below it on half of the bases. That holds where both have as
    many runs a base, or where the noise of runs is symmetric. One run against the mean of three is above it on 58 % if
    the noise is that of an exponential with its tail to the low side, and below it on 58 % with its tail to the high
    side. Few bases only make it miss more: at 6 bases and 10 arms no p is below 0.3.
    """
    if alone is None or not alone.by_base:
        return {}
    by_base = alone.by_base
    words = Counter(one.word for one in by_base.values())
    lost = [one.mean for one in by_base.values() if one.word == "lower"]
    values = {"bases": len(by_base)} | {f"bases_{word}": words[word] for word in stats.ON_BASE}
    values |= {"base_loss_least": -max(lost, default=math.nan), "base_loss_most": -min(lost, default=math.nan)}
    gaps = [one.mean for one in by_base.values()]
    values |= {"bases_below": sum(gap < 0 for gap in gaps), "p_below": min(1.0, alone.family * stats.sign_test_p(gaps))}
    return {prefix + name: value for name, value in values.items()}


def _columns(prefix: str, found: stats.Judged) -> dict[str, Any]:
    decision, nan = found.decision, math.nan
    mean, low, high = stats.difference(found)
    more = None
    if decision is not None and found.contrast is not None and decision.verdict == "cannot tell":
        more = stats.units_to_decide(mean, decision.sd, found.contrast.num_units, decision.df, decision.level)
    values = {
        "pairs": found.contrast.num_units if found.contrast else 0,
        "difference": mean,
        "difference_low": low,
        "difference_high": high,
        "difference_sd": decision.sd if decision else nan,
        "difference_df": decision.df if decision else nan,
        "p": decision.p if decision else nan,
        "p_equal": decision.p_equal if decision else nan,
        "p_adjusted": decision.p_adjusted if decision else nan,
        "verdict": found.verdict,
        "further_seeds": more,
        "collapse": str(found.rate),
        "collapse_low": found.rate.low,
        "collapse_high": found.rate.high,
    }
    return {prefix + name: value for name, value in values.items()}
