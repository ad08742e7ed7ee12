"""FP32 head: the last matrix product and the log-softmax in float32 at both sites.

Papers: MiniMax-M1, arXiv 2506.13585 (probabilities of trainer and sampler then correlate at .99, not .9); ScaleRL,
arXiv 2510.13786. Claim: most of the kernel-level mismatch of 16-bit engines comes from the head, and one plan entry
removes it. The embedded engine has no kernel noise, so what is left to see here is the rounding of logits to 16 bits.
Use it beside other parts: `parts=[fp32_head.FP32Head, flashrl.TIS]`.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.api import Method, Part, Plan
from harness.numerics.formats import format_named
from methods.naive import LOW_BIT


@dataclass(frozen=True, kw_only=True)
class FP32Head(Part):
    """The head's weight, inputs and outputs in float32 at both sites."""

    def plan(self, rollout: Plan) -> Plan:
        return Plan(lm_head=format_named("fp32"))


METHOD = Method(
    name="fp32_head",
    paper="arXiv 2506.13585",
    parts=(FP32Head(),),
    precisions=("bf16", *LOW_BIT),
    claim="probabilities of trainer and sampler correlate at .99 in place of .9",
    summary="head and log-softmax in float32 at both sites",
)
