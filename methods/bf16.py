"""Control: high-precision rollouts, no correction. The reference that every other arm is compared with.

Claim: none. The trainer of a model made here computes in float32 on every device (`bf16_train`: in BF16), that of a
Hugging Face model in BF16 unless `trainer.compute` says otherwise. The sampler is vLLM in BF16, or the embedded engine,
which rounds weights, inputs and outputs of the linear layers to BF16.
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
