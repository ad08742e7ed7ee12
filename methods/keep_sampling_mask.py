"""Keep sampling mask: with top-p sampling the trainer renormalises over the tokens that the sampler could draw.

Paper: DeepSeek-V3.2, arXiv 2512.02556, section on scaling GRPO ("Keep Sampling Mask").
Claim: top-p truncates the sampler's support, so importance ratios against the whole vocabulary are of two different
action spaces; with the sampler's set S of every position stored, and old and current policy renormalised over it, top-p
sampling keeps its language consistency during training.
Rule: logits outside S are -inf before every log-prob of the trainer. The sampler's own log-probs are of its truncated
distribution. With engine.top_p=1 the set is the vocabulary and nothing changes. The loss has no other correction here;
`opsm` has the paper's other mask.
Ours: the reference of the KL term is masked, too, so that the term is 0 for equal policies; the paper does not say.
Left out: top-k sampling, and vLLM, whose log-probs are of the whole distribution unless asked otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.api import Method, Part, Step
from methods.naive import LOW_BIT


@dataclass(frozen=True, kw_only=True)
class KeepSamplingMask(Part):
    """Log-probs of the trainer over the sampler's set of every position."""

    def needs(self, step: Step) -> frozenset[str]:
        return frozenset({"allowed_ids"})


METHOD = Method(
    name="keep_sampling_mask",
    paper="arXiv 2512.02556",
    parts=(KeepSamplingMask(),),
    precisions=(*LOW_BIT, "bf16", "fp32"),
    summary="with top-p sampling the trainer's log-probs are over the tokens that the sampler could draw",
    claim="with the sampler's set kept, top-p sampling has the same action space on both sides",
    reconstructed="the reference of the KL term is masked, too",
)
