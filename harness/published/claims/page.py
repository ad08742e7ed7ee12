"""`results/claims.md` and its terminal twin: every claim with its source, our test, our number and the badge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.foundation.markdown_table import markdown_table
from harness.foundation.number_cell import with_interval
from harness.foundation.progress_bar import progress_bar
from harness.published.claims.badges import BADGES, Badge, badge_of, counts
from harness.published.claims.domains import DIMENSIONS, MISMATCH, Place, outside, place_of, place_words
from harness.published.claims.estimates import ClaimEstimate, Measured, ReplayRow, estimate
from harness.published.claims.evidence import Evidence, load, words
from harness.published.claims.kinds import (
    SCORES,
    Growth,
    Level,
    NotTestable,
    OfRuns,
    Ratio,
    Replay,
    Speed,
    Test,
    Trend,
    Update,
    arms_of,
)
from harness.published.claims.schema import Claim, Claims
from harness.published.claims.speed import Map, maps_of
from harness.published.claims.speed import place_words as cell_words
from harness.published.claims.update import Seconds, seconds_of
from harness.published.claims.update import place_words as option_words
from harness.records.metric_names import METRICS
from harness.records.paths import replay_folder
from harness.records.stats import MOST
from harness.studies.replay.tables import frame, read_records
from harness.sweep import SWEEPS

FURTHER = (
    f"(+n): with n more bases the chance that the interval decides is 80 %, if they vary as these do; (>{MOST}): more "
    "than that."
)
READING = (
    "**Badges.** Of a claim's tests the one nearest to its own setting decides, a; the others are side evidence. "
    "*Supported*: the interval lies where it is expected. *Direction supported*: the same, from a smaller model. "
    "*Contradicted in its own domain*: the interval lies on the other side. *Undecided*: it decides neither, shows no "
    "difference that matters (0.03 of an accuracy, 5 % of a ratio) where one is claimed, or no run tells. *Out of "
    "domain*: the nearest test is of another setting than the claim's, so it neither supports nor contradicts; the "
    "remark says which way it points.",
    "**Domain.** Every claim declares in `claims.yaml` what it speaks of: kernels (real, but for arithmetic and for "
    "weights before training), formats, range of mismatch, learning rate of one arm over the other's (1 where the "
    "source says nothing else), and where its source bounds it the learning rate, the length, the size and the steps. "
    "Where a test lies is read from its runs; *mismatch* is k3 in nats a token over the first five steps. Tests "
    "are compared along this list, and the nearer is the one inside where they first differ; of two as near the first "
    "of the file decides. A test without data, or whose arms never left their start, does not decide; one that asks "
    "another question never does (*side*).",
    "**Intervals.** Arms are compared base by base, by the means of their runs there; brackets are 95 % t intervals "
    "over n bases, wider where a sweep was enlarged after somebody had read its verdicts. "
    "The variance of a difference of accuracy leans on those of the other arms of its setting, as in the "
    "tables of sweeps: three lucky bases decide nothing. A run that stands in several sweeps counts once within a "
    f"claim, in the nearest test. {FURTHER}",
    "**Scale.** The sources train models of 0.5B to 32B parameters on long answers; here models of 0.1M to 10M (a few"
    " of 30M) sort digits or solve made-up word problems: with emulated formats and without kernel noise, but for "
    "`main_h200` and `aqn_h200` (digits, answers of 17, 65 and 257 tokens) and `main_wordmath` and `stress_wordmath` "
    "(87, 245 and 780 tokens), which have vLLM's kernels on an H100 or H200. A claim about a larger setting is at "
    "most *direction supported*, and *contradicted in its own domain* speaks of the declared domain at this size. "
    "Remarks say what else differs.",
    "**Speed.** Tests of throughput sweeps read the map of bare vLLM on one H200, with real kernels and models of the "
    "size that is claimed about. Their brackets are no confidence interval: they are the range over the cells next to "
    "the one that is asked for (one step of batch and of length, or all batches where the source leaves it open). The "
    "sources ran other GPUs, loads and versions, and whole RL systems; *claimed* beside a badge compares the size of "
    "the factor, the badge its direction. Tests of a whole update, measured once on one H200, have no interval.",
    "**Many tests.** Intervals are not adjusted for the number of claims: of 100 tests of effects that do not exist, "
    "two or three would be called supported and as many contradicted.",
    "**Sources.** Their numbers are theirs, not reproduced. *Known from notes* marks a claim whose text could not be "
    "read; a date says when it was last read against what can be read.",
)
SCORE_WORDS = {
    "auc": "AUC", "accuracy": "final accuracy", "gain": "final minus initial accuracy", "base_accuracy":
    "accuracy before training", "rollout_auc": "AUC in the rollout format", "rollout_accuracy": "final accuracy in the "
    "rollout format", "rollout_gain": "final minus initial accuracy in the rollout format", "base_rollout_accuracy":
    "accuracy in the rollout format before training", "reward": "the sampler's last reward",
}  # fmt: skip
REDUCE_WORDS = {"first": "first five steps of", "last": "last five steps of"} | {
    name: name for name in ("mean", "median", "max", "min")
}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A test, what it found, and where it lies."""

    test: Test
    estimate: ClaimEstimate
    place: Place | None
    outside: Mapping[str, str]
    """Dimension -> why it lies outside the claim's domain."""
    badge: Badge


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A claim with its answers, the nearest first: that one decides."""

    claim: Claim
    answers: tuple[Answer, ...]

    @property
    def badge(self) -> Badge:
        first = self.answers[0]
        return "out of domain" if _is_side(first.test) and first.estimate.has_data else first.badge


def judge_all(claims: Claims, results: Path, sweeps: Path = SWEEPS) -> list[Judged]:
    """Every claim on the results. Raises ValueError naming the claim whose settings fit more than one arm."""
    needs: dict[str, set[str]] = {}
    tests = [test for claim in claims.claims for test in claim.tests]
    for test in tests:
        if not isinstance(test, Replay | Speed | Update | NotTestable):
            needs.setdefault(test.sweep, set()).update({test.metric, MISMATCH} & set(METRICS))
    evidence = load(results, needs)
    folder = replay_folder(results)
    rows: Sequence[ReplayRow] = frame(read_records(folder)).to_dict("records") if any(folder.glob("*.json")) else []
    maps, seconds = maps_of(tests, results, sweeps), seconds_of(tests, results)
    return [_judged(claim, evidence, rows, maps, seconds) for claim in progress_bar(claims.claims, "claim")]


def _judged(
    claim: Claim, evidence: Mapping[str, Evidence], rows: Sequence[ReplayRow], maps: Mapping[str, Map],
    seconds: Mapping[str, Seconds],
) -> Judged:  # fmt: skip
    try:
        places = [place_of(test, evidence) for test in claim.tests]
        out = [outside(claim.domain, place) if place else {} for place in places]

        def distance(i: int) -> tuple[bool, ...]:
            return (_is_side(claim.tests[i]), *(name in out[i] for name in DIMENSIONS))

        counted: set[Measured] = set()
        answers: list[Answer] = []
        order = sorted(range(len(claim.tests)), key=distance)
        for i in order:
            found = estimate(claim.tests[i], evidence, rows, maps, counted, seconds)
            counted |= found.counted
            badge = badge_of(found.outcome, not out[i], claim.scale)
            answers.append(Answer(test=claim.tests[i], estimate=found, place=places[i], outside=out[i], badge=badge))
    except ValueError as error:
        raise ValueError(f"claim {claim.id}: {error}") from None
    return Judged(
        claim=claim, answers=tuple(sorted(answers, key=lambda a: (_is_side(a.test), not a.estimate.has_data)))
    )


def _is_side(test: Test) -> bool:
    return not isinstance(test, NotTestable) and test.is_side


def markdown(claims: Claims, judged: Sequence[Judged]) -> str:
    """The whole page."""
    found = counts([one.badge for one in judged])
    papers = {source: [one for one in judged if one.claim.source == source] for source in claims.papers}
    which = {badge: ", ".join(one.claim.id for one in judged if one.badge == badge) for badge in found}
    blocks = [
        "# Published claims, tested here",
        f"{len(judged)} claims of {sum(bool(own) for own in papers.values())} sources. Written by "
        "`lowbit claims --write` from `claims.yaml` and the committed results; do not edit.",
        markdown_table(
            ("badge", "claims", "which"), [(b, str(count), which[b]) for b, count in found.items()], align="lrl"
        ),
        "\n".join(f"- {line}" for line in READING),
    ]
    head = (
        "claim", "source, setting, its numbers", "our test", "domain of the test", "ours [95 %]", "badge", "remark",
    )  # fmt: skip
    for source, own in papers.items():
        if own:
            rows = [row for one in own for row in _rows(one)]
            blocks += [f"## {claims.papers[source]} ({source})", markdown_table(head, rows)]
    return "\n\n".join(blocks) + "\n"


def _rows(one: Judged) -> list[list[str]]:
    """A table row per test, the one that decides first and with the claim."""
    claim = one.claim
    rows: list[list[str]] = []
    for i, answer in enumerate(one.answers):
        test, found = answer.test, answer.estimate
        mark = f"{chr(97 + i)}. " if len(claim.tests) > 1 else ""
        scale = "scale: smaller" if not isinstance(test, NotTestable) and claim.scale == "smaller" and not i else ""
        remark = "<br>".join(filter(None, [_direction(answer), found.reason, scale, "" if i else claim.caveat]))
        about = ["", ""] if i else [f"`{claim.id}`<br>{claim.claim}", "<br>".join(filter(None, _source(claim)))]
        badge = f"**{one.badge}**" if not i else f"side: {found.outcome}" if _is_side(test) else answer.badge
        rows.append([*about, mark + describe(test), domain_words(answer), shown(test, found), badge, remark])
    return rows


def domain_words(answer: Answer) -> str:
    """Place of a test, and why it is, or is not, the claim's own domain."""
    if isinstance(answer.test, NotTestable):
        return "-"
    if answer.place is None:
        return "not run"
    if answer.outside:
        return "outside: " + "; ".join(answer.outside.values())
    return f"{'other question' if answer.test.is_side else 'own'}: {place_words(answer.place)}"


def _direction(answer: Answer) -> str:
    """Direction in which a test outside the domain points all the same."""
    if answer.badge != "out of domain" or not answer.estimate.has_data:
        return ""
    return {
        "supported": "there it points the same way", "contradicted": "there it points the other way",
    }.get(answer.estimate.outcome, "there it is undecided, too")  # fmt: skip


def _source(claim: Claim) -> list[str]:
    setting = "; ".join(filter(None, [claim.setting.model, claim.setting.task, claim.setting.precision,
                                      claim.setting.hardware]))  # fmt: skip
    values = ", ".join(f"{k} {v:g}" if isinstance(v, int | float) else f"{k} {v}" for k, v in claim.numbers.items())
    reported = f"{values} ({claim.unit})" if claim.unit and values else values or "no number in what was read"
    how = {"notes": "known from notes", "text": "text read", "code": "code read", "docs": "documentation read"}[
        claim.read
    ]
    return [f"{claim.place} ({' '.join(filter(None, [how, claim.read_on]))})", setting, reported]


def describe(test: Test) -> str:
    """A test in words: data, comparison, what is expected."""
    if isinstance(test, NotTestable):
        return "none"
    note = f" ({test.note})" if test.note else ""
    if isinstance(test, Replay):
        target = f"{test.expect} that of {test.against}" if test.against else _expected(test)
        what = f"{test.column} of {test.arm} on {test.sampler}, {test.context}, age {test.age}"
        return f"replay: {what}; expected {target}{note}"
    if isinstance(test, Speed):
        what = "decode rate" if test.measure == "decode" else "rate of a generation"
        return f"{test.sweep}: {what}, {cell_words(test)}; expected {_expected(test)}{note}"
    if isinstance(test, Update):
        return f"{test.file}: speed of a whole update, {option_words(test)}; expected {_expected(test)}{note}"
    return f"{test.sweep}: {_comparison(test)}; expected {_expected(test)}{note}"


def _expected(test: OfRuns | Replay | Speed | Update) -> str:
    """Range in which the interval has to lie, in the unit of the value."""
    at = test.threshold or 0.0
    is_factor = isinstance(test, Ratio | Growth | Speed | Update)
    low, high = (at / test.margin, at * test.margin) if is_factor else (at - test.margin, at + test.margin)
    return {
        "above": f"above {at:g}",
        "below": f"below {at:g}",
        "equal": f"within {low:g} and {high:g}",
        "not_below": f"above {low:g}",
        "not_above": f"below {high:g}",
    }[test.expect]


def _comparison(test: OfRuns) -> str:
    a, *b = [words(arm) for arm in arms_of(test)]
    reduced = f"{REDUCE_WORDS[test.reduce]} {test.metric}" if test.metric in METRICS else test.metric
    what = SCORE_WORDS.get(test.metric, reduced)
    if isinstance(test, Growth):
        return f"{test.metric} of {a}, last fifth of the steps over the first"
    if isinstance(test, Trend):
        place = test.along.rpartition(".")[2]
        of = f"{a} minus {b[0]}" if b else a
        return f"slope of {what}, {of}, per {'doubling of ' if test.per == 'doubling' else ''}{place}"
    if isinstance(test, Ratio):
        return f"{what}, {a} over {b[0]}"
    return f"{what}, {a} minus {b[0]}" if b else f"{what} of {a}"


def shown(test: Test, found: ClaimEstimate) -> str:
    """A test's value with its interval and n, as a cell."""
    if isinstance(test, NotTestable) or math.isnan(found.value):
        return "-"
    is_factor = isinstance(test, Ratio | Growth | Speed | Update)
    is_signed = not is_factor and not isinstance(test, Replay | Level)
    if isinstance(test, Update):
        return f"x{_number(found.value)}, measured once"
    text = "x" * is_factor + _interval((found.value, found.low, found.high), is_signed)
    if found.against is not None:
        return f"{text} against {_interval(found.against)}"
    if isinstance(test, Speed):
        return f"{text}, {found.units} cell{'s' * (found.units != 1)}"
    return text if isinstance(test, Replay) else f"{text}, n = {found.units}"


def _interval(of: tuple[float, float, float], is_signed: bool = False) -> str:
    """Three decimals where it is a difference, three digits elsewhere."""
    if is_signed:
        return with_interval(*of, "+.3f")
    value, low, high = (_number(x) for x in of)
    return f"{value} [{low}, {high}]"


def _number(value: float) -> str:
    """Three digits."""
    size = abs(value)
    if size >= 100:
        return f"{value:.0f}"
    return f"{value:#.3g}" if size >= 1 else f"{value:.3f}" if size >= 0.001 else f"{value:.1e}" if size else "0"


def terminal(judged: Sequence[Judged]) -> str:
    """One line per claim, and the counts."""
    width = max((len(one.claim.id) for one in judged), default=0)
    room = max(map(len, BADGES))
    lines: list[str] = []
    for one in judged:
        first = one.answers[0]
        why = "; ".join(filter(None, [*first.outside.values(), first.estimate.reason]))
        lines.append(
            f"{one.claim.id:<{width}}  {one.badge:<{room}}  {shown(first.test, first.estimate):<33}  {why}".rstrip()
        )
    found = counts([one.badge for one in judged])
    lines.append(f"{len(judged)} claims: " + ", ".join(f"{count} {b}" for b, count in found.items()))
    return "\n".join([*lines, FURTHER])


def detailed(one: Judged) -> str:
    """One claim with every test, for the terminal."""
    claim = one.claim
    lines = [f"{claim.id}: {claim.claim}", f"  {claim.source}: " + " | ".join(filter(None, _source(claim)))]
    lines.append(f"  {one.badge}")
    for answer in one.answers:
        lines += [f"  {describe(answer.test)}", f"    {domain_words(answer)}"]
        badge = f"side: {answer.estimate.outcome}" if _is_side(answer.test) else answer.badge
        lines.append(f"    {shown(answer.test, answer.estimate)}  {badge}")
        lines += [f"    {answer.estimate.reason}"] * bool(answer.estimate.reason)
    return "\n".join([*lines, *([f"  {claim.caveat}"] if claim.caveat else [])])


assert set(SCORE_WORDS) == set(SCORES)
