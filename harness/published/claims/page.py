"""`results/claims.md` and its terminal twin: every claim with its source, our test, our number and the badge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.published.claims.badges import BADGES, Badge, capped, counts
from harness.published.claims.estimates import Estimate, ReplayRow, estimate
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
    arms_of,
)
from harness.published.claims.schema import Claim, Claims
from harness.published.claims.speed import Map, maps_of, place_words
from harness.records.metric_names import METRICS
from harness.studies.replay.tables import frame, read_records
from harness.sweep import SWEEPS

PAGE = "claims.md"
READING = (
    "**Badges.** A claim's first test, a, is the one nearest to its source and decides; the others show whether the "
    "answer holds elsewhere. Differences, ratios and slopes are taken pair by pair of seeds; brackets are 95 % t "
    "intervals over n pairs. *Supported*: the interval lies where it is expected. *Contradicted*: it lies on the other "
    "side. *Not supported*: it decides neither, or shows no difference that matters (0.03 of an accuracy, 5 % of a "
    "ratio) where one is claimed.",
    "**Scale.** The sources train models of 0.5B to 32B parameters on long answers; here models of 0.1M to 3M sort "
    "digits, with emulated formats and without kernel noise, but for `main_h200` and `aqn_h200`: vLLM's kernels on an "
    "H200, answers of 17, 65 and 257 tokens. A claim about a larger setting is at most *direction supported*; "
    "*contradicted* and *not supported* speak of this scale alone, too. Remarks say what else differs.",
    "**Speed.** Tests of throughput sweeps read the map of bare vLLM on one H200, with real kernels and models of the "
    "size that is claimed about. Their brackets are no confidence interval: they are the range over the cells next to "
    "the one that is asked for (one step of batch and of length, or all batches where the source leaves it open). The "
    "sources ran other GPUs, loads and versions, and whole RL systems; *claimed* beside a badge compares the size of "
    "the factor, the badge its direction.",
    "**Many tests.** Intervals are not adjusted for the number of claims: of 100 tests of effects that do not exist, "
    "two or three would be called supported and as many contradicted.",
    "**Numbers of the sources** are theirs, not reproduced; *notes* marks a source known second-hand.",
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
class Judged:
    """A claim with what its tests found."""

    claim: Claim
    estimates: tuple[Estimate, ...]

    @property
    def badge(self) -> Badge:
        return self.badge_of(0)

    def badge_of(self, index: int) -> Badge:
        """The badge of one test, scale counted."""
        return capped(self.estimates[index].badge, self.claim.scale)


def judge_all(claims: Claims, results: Path, sweeps: Path = SWEEPS) -> list[Judged]:
    """Every claim on the results. Raises ValueError naming the claim whose settings fit more than one arm."""
    needs: dict[str, set[str]] = {}
    tests = [test for claim in claims.claims for test in claim.tests]
    for test in tests:
        if not isinstance(test, Replay | Speed | NotTestable):
            needs.setdefault(test.sweep, set()).update({test.metric} & set(METRICS))
    evidence = load(results, needs)
    folder = results / "replay"
    rows: Sequence[ReplayRow] = frame(read_records(folder)).to_dict("records") if any(folder.glob("*.json")) else []
    maps = maps_of(tests, results, sweeps)
    return [_judged(claim, evidence, rows, maps) for claim in claims.claims]


def _judged(
    claim: Claim, evidence: Mapping[str, Evidence], rows: Sequence[ReplayRow], maps: Mapping[str, Map]
) -> Judged:
    try:
        return Judged(claim=claim, estimates=tuple(estimate(test, evidence, rows, maps) for test in claim.tests))
    except ValueError as error:
        raise ValueError(f"claim {claim.id}: {error}") from None


def markdown(claims: Claims, judged: Sequence[Judged]) -> str:
    """The whole page."""
    found = counts([one.badge for one in judged])
    papers = {source: [one for one in judged if one.claim.source == source] for source in claims.papers}
    which = {badge: ", ".join(one.claim.id for one in judged if one.badge == badge) for badge in found}
    blocks = [
        "# Published claims, tested here",
        f"{len(judged)} claims of {sum(bool(own) for own in papers.values())} sources. Written by `lowbit claims` from "
        "`claims.yaml` and the committed results; do not edit.",
        "| badge | claims | which |\n|---|---:|---|\n"
        + "\n".join(f"| {badge} | {count} | {which[badge]} |" for badge, count in found.items()),
        "\n".join(f"- {line}" for line in READING),
    ]
    head = "| claim | source, setting, its numbers | our test | ours [95 %] | badge | remark |\n" + "|---" * 6 + "|"
    for source, own in papers.items():
        if own:
            rows = [row for one in own for row in _rows(one)]
            blocks += [f"## {claims.papers[source]} ({source})", "\n".join([head, *rows])]
    return "\n\n".join(blocks) + "\n"


def _rows(one: Judged) -> list[str]:
    """A table row per test; the first has the claim too."""
    claim = one.claim
    is_testable = not isinstance(claim.tests[0], NotTestable)
    rows: list[str] = []
    for i, test in enumerate(claim.tests):
        found = one.estimates[i]
        mark = f"{chr(97 + i)}. " if len(claim.tests) > 1 else ""
        scale = "scale: smaller" if is_testable and claim.scale == "smaller" and not i else ""
        remark = "<br>".join(filter(None, [found.reason, scale, "" if i else claim.caveat]))
        about = ["", ""] if i else [f"`{claim.id}`<br>{claim.claim}", "<br>".join(filter(None, _source(claim)))]
        badge = one.badge_of(i) if i else f"**{one.badge}**"
        cells = [*about, mark + describe(test), shown(test, found), badge, remark]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


def _source(claim: Claim) -> list[str]:
    setting = "; ".join(filter(None, [claim.setting.model, claim.setting.task, claim.setting.precision,
                                      claim.setting.hardware]))  # fmt: skip
    values = ", ".join(f"{k} {v:g}" if isinstance(v, int | float) else f"{k} {v}" for k, v in claim.numbers.items())
    reported = f"{values} ({claim.unit})" if claim.unit and values else values or "no number in what was read"
    return [f"{claim.place}{' (notes)' if claim.read == 'notes' else ''}", setting, reported]


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
        return f"{test.sweep}: {what}, {place_words(test)}; expected {_expected(test)}{note}"
    return f"{test.sweep}: {_comparison(test)}; expected {_expected(test)}{note}"


def _expected(test: OfRuns | Replay | Speed) -> str:
    """Where the interval has to lie, in the unit of the value."""
    at = test.threshold or 0.0
    is_factor = isinstance(test, Ratio | Growth | Speed)
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


def shown(test: Test, found: Estimate) -> str:
    """Value, interval and n."""
    if isinstance(test, NotTestable) or math.isnan(found.value):
        return "-"
    is_factor = isinstance(test, Ratio | Growth | Speed)
    is_signed = not is_factor and not isinstance(test, Replay | Level)
    text = "x" * is_factor + _interval((found.value, found.low, found.high), is_signed)
    if found.against is not None:
        return f"{text} against {_interval(found.against)}"
    if isinstance(test, Speed):
        return f"{text}, {found.pairs} cell{'s' * (found.pairs != 1)}"
    return text if isinstance(test, Replay) else f"{text}, n = {found.pairs}"


def _interval(of: tuple[float, float, float], is_signed: bool = False) -> str:
    value, low, high = (_number(x, is_signed) for x in of)
    return f"{value} [{low}, {high}]"


def _number(value: float, is_signed: bool) -> str:
    """Three decimals where it is a difference, three digits elsewhere."""
    if is_signed:
        return f"{value:+.3f}"
    size = abs(value)
    if size >= 100:
        return f"{value:.0f}"
    return f"{value:#.3g}" if size >= 1 else f"{value:.3f}" if size >= 0.001 else f"{value:.1e}" if size else "0"


def terminal(judged: Sequence[Judged]) -> str:
    """One line per claim, and the counts."""
    width = max((len(one.claim.id) for one in judged), default=0)
    lines = [
        f"{one.claim.id:<{width}}  {one.badge:<19}  {shown(one.claim.tests[0], one.estimates[0]):<33}  "
        f"{one.estimates[0].reason}".rstrip()
        for one in judged
    ]
    found = counts([one.badge for one in judged])
    return "\n".join([*lines, f"{len(judged)} claims: " + ", ".join(f"{found[b]} {b}" for b in BADGES if b in found)])


def detailed(one: Judged) -> str:
    """One claim with every test, for the terminal."""
    claim = one.claim
    lines = [f"{claim.id}: {claim.claim}", f"  {claim.source}: " + " | ".join(filter(None, _source(claim)))]
    for i, test in enumerate(claim.tests):
        lines += [f"  {describe(test)}", f"    {shown(test, one.estimates[i])}  {one.badge_of(i)}"]
        lines += [f"    {one.estimates[i].reason}"] * bool(one.estimates[i].reason)
    return "\n".join([*lines, *([f"  {claim.caveat}"] if claim.caveat else [])])


assert set(SCORE_WORDS) == set(SCORES)
