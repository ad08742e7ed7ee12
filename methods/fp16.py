"""FP16 instead of BF16 at both sites (arXiv 2510.26788; code sail-sg/Precision-RL, verl_fp16.patch).

Claim: ten mantissa bits instead of seven make the rounding of sampler and trainer 8 times finer, the log-ratios of
whole responses up to 24 times smaller, and the usual collapses disappear without any correction.
Settings: FP16 compute, float32 master weights and optimizer, dynamic loss scaling from 65536, doubled after 400 good
steps, halved on overflow; clip after unscaling. The trainer turns the scaling on when it computes in FP16.
Left out: nothing on the method's side. It removes kernel noise, not quantization error.
"""

from dataclasses import dataclass

from harness.api import Method, Part, Plan
from harness.numerics.formats import format_named


@dataclass(frozen=True, kw_only=True)
class HalfPrecision(Part):
    """Forward and backward matmuls of the trainer in FP16; the rollout's format comes from the precision axis."""

    def plan(self, rollout: Plan) -> Plan:
        return Plan(train_compute=format_named("fp16"))


METHOD = Method(
    name="fp16",
    paper="arXiv 2510.26788",
    parts=(HalfPrecision(),),
    precisions=("fp16",),
    claim="24 times less mismatch than BF16; the sanity run ends at 99 % where BF16 collapses",
    summary="FP16 in trainer and sampler, with loss scaling",
)
