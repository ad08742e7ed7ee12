"""`lowbit claims NAME`: a claim by its id, several by the beginning of theirs, their paper or their sweep."""

from __future__ import annotations

import pytest

from harness.cli.claims import claims_named
from harness.published.claims.kinds import NotTestable
from harness.published.claims.schema import CLAIMS, Claims, read_claims

KNOWN = read_claims(CLAIMS)


def ids(name: str, known: Claims = KNOWN) -> list[str]:
    return [claim.id for claim in claims_named(name, known)]


def test_a_paper_is_its_title_or_its_number() -> None:
    own = [claim.id for claim in KNOWN.claims if claim.source == "arXiv 2602.13953"]
    assert len(own) == 12 and all(name.startswith("qurl-") for name in own)
    for name in ("QuRL", "qurl", "arXiv 2602.13953", "2602.13953"):
        assert ids(name) == own
    assert ids("SAPO") == ["sapo-beats-hard-clips"]


def test_a_sweep_is_every_claim_that_one_of_its_tests_reads() -> None:
    own = [c.id for c in KNOWN.claims if any(getattr(test, "sweep", None) == "newer" for test in c.tests)]
    assert ids("newer") == own
    assert own[:3] == ["sapo-beats-hard-clips", "minirl-needs-the-ratio", "kpop-masks-more-than-icepop"]
    assert own[3:] == ["dcmdp-gap-as-a-cost", "r2vpo-variance-in-place-of-clip", "mipu-step-1-beats-grpo"]
    for claim in KNOWN.claims:  # a claim without a sweep is in none
        if all(isinstance(test, NotTestable) for test in claim.tests):
            assert claim.id not in ids("standard")


def test_an_id_means_itself_and_its_beginning_all_that_begin_so() -> None:
    assert ids("jet-speed") == ids("JET-SPEED") == ["jet-speed"]
    assert ids("jet-unified") == ["jet-unified-flow-matches-bf16", "jet-unified-beats-mixed",
                                  "jet-unified-flow-removes-mismatch"]  # fmt: skip
    for claim in KNOWN.claims:
        assert ids(claim.id) == [claim.id]  # though another's may begin so


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("jet-sped", "claim 'jet-sped': unknown; nearest: jet-speed"),
        ("", "claim '': unknown; `lowbit claims` lists the ids; papers and sweeps: FlashRL and truncated"),
        ("zzz", "papers and sweeps: FlashRL .*, ALP, MXFP4 RL, ablate_aqn, .*throughput_h200$"),
    ],
)
def test_an_unknown_name_is_one_readable_line(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        claims_named(name, KNOWN)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1500
