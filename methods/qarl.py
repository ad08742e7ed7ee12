"""QaRL: the trainer's forward pass is the rollout's, weights and activations, under TBPO's sequence objective.

Paper: arXiv 2604.07853 (OpenReview oi0A6j428b); no code.
Claim: old and current policy are scored through the rollout's quantizer and matrix product, the backward pass is BF16
straight through, and the codes of the trainer are those that are shipped; the mismatch that is left is the kernels'.
With TBPO (`methods.tbpo`) against clusters of error tokens, W4A16 recovers most of what a quantized rollout loses.
Everything that is not quantized is BF16 at both sites, and the KV cache is never quantized in the trainer.
Left out: Muon, the authors' optimizer, and W4A8. In plain BF16 this is `tbpo`.
"""

from __future__ import annotations

from harness.api import Method
from methods.qat_aligned import AlignedQAT
from methods.tbpo import TBPO

METHOD = Method(
    name="qarl",
    paper="arXiv 2604.07853",
    parts=(AlignedQAT(acts=True, compute="bf16"), TBPO()),
    precisions=("int4", "int8", "fp8_channel", "fp8_tensor", "fp8_block", "w8a16", "nvfp4", "int3", "int2", "bf16"),
    agg="seq-mean-token-mean",
    mode="decoupled",
    summary="the trainer's forward pass reads the rollout's weight and activation codes, with TBPO",
    claim="W4A16 rollouts come within three points of BF16, from eight behind",
    reconstructed="the widths of TBPO's band and its cap come from notes",
)
