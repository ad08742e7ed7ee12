"""BF16 training: what most RL stacks really do on a GPU, as a part.

The matrix products of the trainer's forward and backward pass take 16-bit operands and give 16-bit results, embeddings
and norm gains are rounded to BF16; master weights, gradients of weights, optimizer, softmax, norms and what flows
between layers stay float32 (mixed precision as autocast has it). Against a BF16 sampler the two then round alike up to
the order of summation; that noise is what FP16 is said to remove (2510.26788).
`launch.native_16bit=true` multiplies on tensor cores, without it the same roundings surround float32 products.
Use it beside other parts: `parts=[bf16_train.BF16Compute, flashrl.TIS]`.
Left out: BF16 master weights, and a residual stream in BF16.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.api import Method, Part, Plan
from harness.numerics.formats import format_named
from methods.naive import LOW_BIT


@dataclass(frozen=True, kw_only=True)
class BF16Compute(Part):
    """Forward and backward matmuls of the trainer in BF16; the rollout's format comes from the precision axis."""

    def plan(self, rollout: Plan) -> Plan:
        return Plan(train_compute=format_named("bf16"))


METHOD = Method(
    name="bf16_train",
    paper="",
    parts=(BF16Compute(),),
    precisions=("bf16", *LOW_BIT),
    summary="the trainer computes in BF16 around float32 masters, without any correction",
    is_control=True,
)
