"""The committed claims: sources, arms, and the page that the committed results give."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import methods
from harness.config.load import to_json
from harness.published.claims.estimates import estimate
from harness.published.claims.evidence import Evidence, in_arms
from harness.published.claims.kinds import NotTestable, Replay, Speed, Update
from harness.published.claims.page import judge_all, markdown
from harness.published.claims.schema import Claims, read_claims
from harness.records.paths import claims_page
from harness.sweep import plan, read_sweep
from tests.published.claims.hand_made import run
from tests.source_tree import ROOT

CONTRADICTED = "contradicted in its own domain"
KEPT = tuple(f"results/{name}/" for name in ("bench", "looks", "packed", "replay", "runs", "throughput"))


@pytest.fixture(scope="module")
def committed() -> Claims:
    return read_claims(ROOT / "claims.yaml", ROOT / "sweeps")


def test_the_committed_claims_cover_every_paper_of_the_methods(committed: Claims):
    assert len(committed.claims) >= 25
    used = {claim.source for claim in committed.claims}
    assert used == set(committed.papers)
    own, broken = methods.own()
    assert not broken
    papers = {
        m.paper.split(" as in ")[0] for m in own if m.paper and not m.is_control and not m.paper.startswith("verl 0")
    }
    assert len(papers) > 15 and papers <= used


def test_the_committed_page_is_what_the_committed_results_say(committed: Claims, tmp_path: Path):
    listed = subprocess.run(["git", "ls-files", "results"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout, so there is no telling which results are the repository's own")
    for name in listed.stdout.splitlines():
        if name.startswith(KEPT) and (ROOT / name).exists():
            link = tmp_path / Path(name).relative_to("results")
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(ROOT / name)
    judged = judge_all(committed, tmp_path)
    assert claims_page(ROOT / "results").read_text(encoding="utf-8") == markdown(committed, judged), (
        "run `lowbit claims`"
    )
    by_id = {one.claim.id: one for one in judged}
    assert by_id["qarl-speed"].badge == "not testable here"
    assert by_id["qerl-speed"].badge == "supported"
    assert by_id["qarl-4-bit-rollouts-lose"].badge == "direction supported"
    assert not any(one.badge == "supported" and one.claim.scale == "smaller" for one in judged)
    decided = [one.answers[0] for one in judged if one.badge in ("supported", "direction supported", CONTRADICTED)]
    assert len(decided) > 20
    assert all(not one.outside and one.place is not None and not one.test.is_side for one in decided)
    # Emulated INT4 costs 0.21 of accuracy, but the claim is about real kernels, on which it costs 0.32.
    assert {"emulated", "real"} == {a.place.kernels for a in by_id["qarl-4-bit-rollouts-lose"].answers if a.place}
    assert by_id["qarl-4-bit-rollouts-lose"].answers[0].place.kernels == "real"


@pytest.mark.slow
def test_every_arm_of_a_committed_claim_is_a_cell_of_its_sweep(committed: Claims):
    tests = [
        test
        for c in committed.claims
        for test in c.tests
        if not isinstance(test, Replay | Speed | Update | NotTestable)
    ]
    for name in sorted({test.sweep for test in tests}):
        cells = plan(read_sweep(name, ROOT / "sweeps")).cells
        runs = [run(seed=cell.seed).model_copy(update={"config": to_json(cell)}) for cell in cells]
        evidence = Evidence(arms=in_arms(runs))
        for test in (test for test in tests if test.sweep == name):
            assert not estimate(test, {name: evidence}, []).reason.startswith(f"sweep {name} has no run of"), test
