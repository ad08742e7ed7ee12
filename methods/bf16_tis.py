"""Control: truncated importance sampling without quantization. Shows what the correction itself costs or gains.

Claim: none of its own; the rule is that of `flashrl`. Two implementations of one BF16 policy differ as well, so this
arm separates the effect of the weights from the effect of the format.
"""

from harness.api import Method
from methods.flashrl import TIS

METHOD = Method(
    name="bf16_tis",
    paper="",
    parts=(TIS(),),
    precisions=("bf16", "fp32"),
    summary="high-precision rollouts with token TIS",
    is_control=True,
)
