"""Control: the sampler is the trainer's own graph, so old and rollout log-probs agree bit for bit.

Claim: what is left of an effect here is not caused by mismatch. The idea of bit-equal sampling and training is that of
VeXact (arXiv 2605.14220) and of torchtitan's batch-invariant RL experiment.
Left out: batch-invariant kernels; the trainer's forward runs without a cache at the training batch shape instead, which
is slow and exact.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.api import Method, Part, Plan, linear_setters


@dataclass(frozen=True, kw_only=True)
class TrainerSampler(Part):
    """Sample with the trainer's forward pass."""

    def plan(self, rollout: Plan) -> Plan:
        return Plan(sampler="trainer")

    def check(self, plan: Plan, parts: Sequence[Part], shapes: Mapping[str, tuple[int, ...]] | None) -> None:
        fmt = plan.rollout_weights
        if fmt is None or fmt.name != "fp32":
            name = None if fmt is None else fmt.name
            raise ValueError(f"TrainerSampler: weights={name}, but the trainer's own are float32; choose fp32")
        sending = [p for p in parts if type(p).sync is not Part.sync and "sync" not in p.idle(plan)]
        if sending := [*sending, *linear_setters(parts, plan)]:
            name = type(sending[0]).__name__
            raise ValueError(
                f"TrainerSampler: the trainer's own module samples, to which {name} cannot send other weights; leave "
                f"out {name}"
            )


METHOD = Method(
    name="zero_mismatch",
    paper="arXiv 2605.14220",
    parts=(TrainerSampler(),),
    precisions=("fp32",),
    summary="the trainer samples for itself, mismatch exactly 0",
    is_control=True,
)
