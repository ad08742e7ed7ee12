"""slime's mismatch example: truncated token weights, a band with a veto, and weights that average 1.

Code: THUDM/slime, examples/train_infer_mismatch_helper (mis.py, mis.yaml); its core defaults are other ones.
Claim: none of its own; the rules are those of the blog "When Speed Kills Stability".
Rule, in this order: w = min(rho, 2); tokens outside 0.5 <= rho <= 2 are rejected, whole responses with a token below
1e-4 too; w is divided by its mean over all valid tokens, rejected ones counted.
A third denominator is left out: slime divides a response by its kept tokens and averages over all responses; `denom` is
"kept" here, which averages over responses with a kept token, the same where no response is emptied. slime's KL and
entropy terms leave rejected tokens out too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.api import Correction, Memory, Method, TokenBatch
from harness.objective.loss import batch_normalize
from methods.flashrl import TIS
from methods.mis import MIS
from methods.naive import LOW_BIT


@dataclass(frozen=True, kw_only=True)
class NormalizedTIS(TIS):
    """Truncated weights over their mean, so that they average 1 over the valid tokens of a batch."""

    def correct(self, c: Correction, b: TokenBatch, memory: Memory) -> Correction:
        c = super().correct(c, b, memory)
        return replace(c, weight=batch_normalize(c.weight, b.valid, "token"))


METHOD = Method(
    name="slime_mismatch",
    paper="blog, When Speed Kills Stability (2025) as in slime",
    parts=(NormalizedTIS(), MIS(level="token", lo=0.5, hi=2.0, weight="none", veto=1e-4)),
    precisions=(*LOW_BIT, "bf16"),
    mode="decoupled",
    denom="kept",
    summary="token weights cut at 2 that average 1, ratios outside 1/2 to 2 dropped, responses with one below 1e-4 too",
    claim="an example of slime's; sequence-level masks outlive token weights as the mismatch grows",
)
