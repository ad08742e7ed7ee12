"""Control: high-precision rollouts, no correction. The reference that every other arm is compared with.

Claim: none. On a GPU both sites run in BF16; the embedded CPU trainer computes in float32 and its sampler rounds
weights, inputs and outputs of the linear layers to BF16.
"""

from harness.api import Method

METHOD = Method(
    name="bf16",
    paper="",
    parts=(),
    precisions=("bf16", "fp32"),
    summary="high-precision rollouts without any correction",
    is_control=True,
)
