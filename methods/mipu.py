"""MIPU, step 1: the truncated weight of a response, outside the clip.

Paper: arXiv 2606.29526 (monotonic inference policy update), known through notes; no code.
Claim: the deployed quantized sampler must improve, not the trainer's policy. Step 1 bounds the gap between the two by a
truncated weight, step 2 takes an update back where a validation rollout says that the sampler got worse. Step 1 alone
reaches 65.36 on average with Qwen3-4B, both 66.71, GRPO 64.42.
Rule of step 1: sg[min(rho, 2)] times PPO's clipped term, with rho = pi_old / pi_rollout: the geometric mean over the
response in one note, the token's own in the others. The latter is FlashRL's weight (knobs.TIS.level=token).
Left out: step 2. It needs weights and optimizer states that go back after a trial push, and its estimator, threshold
and validation size are not known.
"""

from __future__ import annotations

from harness.api import Method
from methods.flashrl import TIS
from methods.naive import LOW_BIT

METHOD = Method(
    name="mipu_step1",
    paper="arXiv 2606.29526",
    parts=(TIS(cap=2.0, level="geometric"),),
    precisions=(*LOW_BIT, "bf16"),
    mode="decoupled",
    summary="the geometric mean of a response's importance ratios, at most 2, weighs its clipped terms",
    claim="the truncated weight alone beats GRPO (65.36, 64.42 on average), with the rejected updates 66.71",
    reconstructed="the level of the ratio, on which the notes differ; step 2 is left out",
)
