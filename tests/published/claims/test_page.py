"""The schema's errors, the page and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.cli.claims import claims
from harness.cli.main import parse
from harness.published.claims.kinds import Contrast, Ratio
from harness.published.claims.page import describe, judge_all, markdown
from harness.published.claims.schema import read_claims
from harness.records.paths import claims_page
from harness.records.run_result import write_result
from tests.published.claims.hand_made import BF16, NAIVE, run

CLAIM: dict[str, Any] = {
    "id": "one", "source": "arXiv 1", "place": "table 1", "read": "text", "claim": "INT8 | loses.",
    "setting": {"model": "7B"}, "unit": "percent", "numbers": {"BF16": 55.35},
}  # fmt: skip
TEST: dict[str, Any] = {
    "kind": "contrast", "sweep": "standard", "a": {"method": "naive", "precision": "int8"}, "b": {"method": "bf16"},
    "expect": "below",
}  # fmt: skip


def written(folder: Path, *rows: dict[str, Any], papers: dict[str, str] | None = None, **more: Any) -> Path:
    path = folder / "claims.yaml"  # JSON is YAML
    path.write_text(json.dumps({"papers": papers or {"arXiv 1": "One"}, "claims": list(rows)} | more))
    return path


@pytest.mark.parametrize(
    ("claim", "test", "words"),
    [
        ({"sauce": "x"}, {}, r"claim one: unknown key sauce; nearest: source"),
        ({"source": "arXiv 2"}, {}, r"source=arXiv 2: not among papers; .*valid: arXiv 1"),
        ({"read": "hearsay"}, {}, r"read='hearsay'"),
        ({}, {"kind": "contrastt"}, r"kind=contrastt: unknown; nearest: contrast"),
        ({}, {"thresholdd": 1}, r"unknown key thresholdd; nearest: threshold"),
        ({}, {"sweep": "standardd"}, r"sweep=standardd: unknown; nearest: standard"),
        ({}, {"metric": "acuracy"}, r"metric=acuracy: unknown; nearest: accuracy"),
        ({}, {"a": {"method": "flashrll"}}, r"method=flashrll: unknown; nearest: flashrl"),
        ({}, {"b": {"precision": "int9"}}, r"precision=int9: unknown; nearest: int"),
        ({}, {"where": {"task.m": 8}}, r"setting task.m: unknown; nearest: task"),
        ({}, {"expect": "more"}, r"expect='more'"),
        ({}, {"kind": "ratio", "metric": "mismatch/kl_k3", "threshold": 0}, r"threshold=0: must be above 0$"),
        ({}, {"kind": "growth", "b": None}, r"unknown key b"),
        ({"domain": {"kernel": "real"}}, {}, r"unknown key domain.kernel; nearest: domain.kernels"),
        ({"domain": {"length": [9, 8]}}, {}, r"length=\[9.0, 8.0\]: two rising numbers"),
        ({"domain": {"formats": ["int9"]}}, {}, r"claim one: domain formats=int9: unknown; nearest: int"),
        ({}, {"margin": -0.1}, r"margin=-0.1: must be at least 0$"),
        ({}, {"margin": 0, "expect": "equal"}, r"margin=0: expect=equal needs one above 0, for no interval lies in"),
        ({}, {"reduce": "median"}, r"reduce=median: auc is one number of a run; leave it out$"),
    ],
)
def test_a_faulty_claim_is_one_line_that_names_it(tmp_path, claim, test, words):
    path = written(tmp_path, CLAIM | {"tests": [TEST | test]} | claim)
    with pytest.raises(ValueError, match=words) as error:
        read_claims(path)
    assert "\n" not in str(error.value) and "claims.yaml" in str(error.value)


def test_faulty_files(tmp_path: Path):
    def refused(words: str, *rows: dict[str, Any], **more: Any) -> None:
        with pytest.raises(ValueError, match=words):
            read_claims(written(tmp_path, *rows, **more))

    good = CLAIM | {"tests": [TEST]}
    growth = {"kind": "growth", "sweep": "standard", "a": NAIVE, "expect": "above"}
    replay = {"kind": "replay", "context": "s", "sampler": "int8", "arm": "mis", "column": "bias", "expect": "below"}
    with pytest.raises(ValueError, match=r"absent.yaml: no such file"):
        read_claims(tmp_path / "absent.yaml")
    refused("two claims are called one", good, good)
    refused("claim one: tests is a list with at least one test", CLAIM | {"tests": []})
    refused("unknown key paper; nearest: papers", good, paper={})
    refused("growth needs a metric of every step", CLAIM | {"tests": [growth]})
    ends = growth | {"metric": "mismatch/kl_k3", "reduce": "last"}
    refused("reduce=last: growth takes both ends of a run; leave it out$", CLAIM | {"tests": [ends]})
    at = {"kind": "update", "file": "x.json", "precision": "fp8_block", "option": "a", "over": "b", "expect": "above"}
    refused("size=7B: unknown; nearest: 7b", CLAIM | {"tests": [at | {"size": "7B"}]})
    wrong = replay | {"sampler": "int9", "threshold": 1}
    refused("claim one: sampler=int9: unknown; nearest: int", CLAIM | {"tests": [wrong]})
    for key, name in (("arm", "mais"), ("against", "mis bypass_ppo"), ("against", "")):
        words = rf"claim one: {key}={name}: the replay laboratory has no such arm; (nearest: mis\b|valid: none, )"
        refused(words, CLAIM | {"tests": [replay | {"against": "none", key: name}]})
    refused("needs one of threshold and against", CLAIM | {"tests": [replay]})
    refused("needs one of threshold and against", CLAIM | {"tests": [replay | {"threshold": 1, "against": "none"}]})
    test = read_claims(written(tmp_path, good)).claims[0].tests[0]
    assert test == Contrast(sweep="standard", a=TEST["a"], b=BF16, expect="below")


def sweep_of(folder: Path) -> Path:
    """Results where int8 loses 1/2, 1/4 and 3/4 of the questions against bf16."""
    for seed, right in enumerate(([1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0])):
        for one in (run("naive", seed, {20: right}), run("bf16", seed, {20: [1, 1, 1, 1]})):
            write_result(folder / "runs" / "standard", one, None)
    return folder


def test_the_page_shows_claim_source_test_value_and_badge(tmp_path: Path):
    tests = [TEST | {"is_side": True, "metric": "accuracy"}, TEST]
    known = read_claims(written(tmp_path, CLAIM | {"caveat": "Tiny.", "read_on": "2026-11-23", "tests": tests}))
    judged = judge_all(known, sweep_of(tmp_path))
    text = markdown(known, judged)
    rows = [line for line in text.splitlines() if "minus bf16" in line]
    assert rows == [
        "| `one`<br>INT8 \\| loses. | table 1 (text read 2026-11-23)<br>7B<br>BF16 55.35 (percent) | a. standard: AUC, "
        "naive int8 minus bf16; expected below 0 | outside: emulated kernels | -0.500 [-1.121, +0.121], n = 3 | "
        "**out of domain** | there it is undecided, too<br>" + judged[0].answers[0].estimate.reason
        + "<br>scale: smaller<br>Tiny. |",
        "|  |  | b. standard: final accuracy, naive int8 minus bf16; expected below 0 | outside: emulated kernels | "
        f"-0.500 [-1.121, +0.121], n = 3 | side: undecided | there it is undecided, too<br>"
        f"{judged[0].answers[1].estimate.reason} |",
    ]  # fmt: skip
    assert "| out of domain | 1 | one |" in text and "## One (arXiv 1)" in text
    assert text == markdown(known, judge_all(known, tmp_path))


def test_a_run_counts_once_in_a_claim(tmp_path: Path):
    known = read_claims(written(tmp_path, CLAIM | {"tests": [TEST, TEST | {"expect": "above"}]}))
    first, second = judge_all(known, sweep_of(tmp_path))[0].answers
    assert first.estimate.units == 3 and len(first.estimate.counted) == 3
    assert not second.estimate.has_data
    assert second.estimate.reason == "its runs are those of a test above and count there"


def test_expectations_are_shown_in_the_unit_of_the_value():
    ratio = Ratio(sweep="standard", a=NAIVE, b=BF16, metric="mismatch/kl_k3", expect="equal", threshold=2, margin=4)
    assert describe(ratio) == "standard: mean mismatch/kl_k3, naive over bf16; expected within 0.5 and 8"
    contrast = Contrast(sweep="standard", a=NAIVE, b=BF16, expect="not_below", where={"task.n": 8}, note="why")
    assert describe(contrast) == "standard: AUC, naive n=8 minus bf16 n=8; expected above -0.03 (why)"


def test_the_command_writes_checks_and_shows_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, results = written(tmp_path, CLAIM | {"tests": [TEST]}), sweep_of(tmp_path)
    assert claims([], results, is_check=True, path=path) == 1 and not claims_page(results).exists()
    assert claims(["one"], results, path=path) == 0 and not claims_page(results).exists()
    assert "out of domain" in capsys.readouterr().out
    assert claims([], results, path=path) == 0 and not claims_page(results).exists()
    assert claims([], results, path=path, is_written=True) == 0
    assert "1 claims: 1 out of domain" in capsys.readouterr().out
    assert claims([], results, is_check=True, path=path) == 0
    claims_page(results).write_text("older", encoding="utf-8")
    assert claims([], results, is_check=True, path=path) == 1
    assert "out of date" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"claim 'ones': unknown; nearest: one"):
        claims(["ones"], results, path=path)


def test_the_parser():
    a = parse(["claims", "x", "y", "--check", "--results", "there"])
    assert (a.names, a.check, a.results) == (["x", "y"], True, Path("there"))
