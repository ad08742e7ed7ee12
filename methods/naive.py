"""Control: a quantized sampler and nothing else. What every cure has to beat.

Claim: none. The rollout is generated in the precision of the axis, the trainer stays in high precision, and the loss
pretends that both are one policy.
"""

from harness.api import Method

LOW_BIT = (
    "int8",
    "fp8_channel",
    "fp8_tensor",
    "fp8_block",
    "w8a16",
    "mxfp8",
    "nvfp4",
    "nvfp4_w4a4",
    "mxfp4",
    "mxfp4_w4a4",
    "mxfp4_up_w4a4",
    "mxfp4_mbs_w4a4",
    "nf4",
    "int4",
    "int3",
    "int2",
)
"""Every precision name below 16 bits; "+kv8" is allowed with each."""

METHOD = Method(
    name="naive",
    paper="",
    parts=(),
    precisions=LOW_BIT,
    summary="quantized rollouts without any correction",
    is_control=True,
)
