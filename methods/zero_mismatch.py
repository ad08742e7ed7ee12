"""Control: the sampler is the trainer's own graph, so old and rollout log-probs agree bit for bit.

Claim: what is left of an effect here is not caused by mismatch. The idea of bit-equal sampling and training is that of
VeXact (arXiv 2605.14220) and of torchtitan's batch-invariant RL experiment.
Left out: batch-invariant kernels; the trainer's forward runs without a cache at the training batch shape instead, which
is slow and exact.
"""

from dataclasses import dataclass

from harness.api import Method, Part, Plan


@dataclass(frozen=True, kw_only=True)
class TrainerSampler(Part):
    """Sample with the trainer's forward pass."""

    def plan(self, rollout: Plan) -> Plan:
        return Plan(sampler="trainer")


METHOD = Method(
    name="zero_mismatch",
    paper="arXiv 2605.14220",
    parts=(TrainerSampler(),),
    precisions=("fp32",),
    summary="the trainer samples for itself, mismatch exactly 0",
    is_control=True,
)
