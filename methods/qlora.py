"""LoRA over a frozen base: the low-rank half of QeRL, and its two controls.

Papers: LoRA, arXiv 2106.09685; QLoRA, arXiv 2305.14314, for the NF4 base. Both sites hold the very same frozen codes
and the same unmerged adapters (QeRL, arXiv 2510.11696, section 3), so the base's precision opens no gap between them:
what is left is the engine's 16-bit rounding of inputs and adapters.
Left out: dropout, double quantization of NF4's scales, paged and 8-bit optimizers; activation quantization, under which
the two sites would differ again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from harness.api import Method, Part, Plan
from harness.numerics.formats import Adapters

LINEAR = Adapters.targets
TRAINED = (".lora_A.weight", ".lora_B.weight")
NORMS = (".input_layernorm.weight", ".post_attention_layernorm.weight")
"""The gains that feed q, k, v and gate, up."""


@dataclass(frozen=True, kw_only=True)
class LoRA(Part):
    """Adapters trained over the frozen rollout weights; a base without a tile stays in float32."""

    tuned: ClassVar[tuple[str, ...]] = ("lr_scale",)
    sets_linears: ClassVar[bool] = True

    rank: int = 32
    """As in the paper; its scripts take 16."""
    alpha: float = 32.0
    """The adapters' product is multiplied by alpha / rank; the scripts take 16."""
    targets: tuple[str, ...] = LINEAR
    """Linear layers that get adapters."""
    lr_scale: float = 10.0
    """Learning rate of what is trained here over the run's: QeRL's 1e-5 against the 1e-6 of full fine-tuning."""
    train_norms: bool = False
    """Train the two gains of every block too, as the authors' scripts do."""

    def __post_init__(self) -> None:
        if self.rank < 1 or not 0 < self.alpha < float("inf") or not 0 < self.lr_scale < float("inf"):
            raise ValueError(f"LoRA.rank, alpha, lr_scale: {self.rank}, {self.alpha}, {self.lr_scale} must be positive")
        if not self.targets or not set(self.targets) <= set(LINEAR):
            raise ValueError(f"LoRA.targets: {', '.join(self.targets) or 'none'}; choose from {', '.join(LINEAR)}")

    def plan(self, rollout: Plan) -> Plan:
        base, acts = rollout.rollout_weights, rollout.rollout_acts
        if acts is not None and acts.tile is not None:
            raise ValueError(
                f"LoRA: the rollout quantizes activations to {acts.name}, but the frozen base is weight-only; choose a "
                "weight-only precision: nvfp4, mxfp4, nf4, int4, w8a16 or bf16"
            )
        if base is not None and base.double_quant:
            raise ValueError(f"LoRA: {base.name} has no scales to share between the sites; choose nf4")
        adapters = Adapters(rank=self.rank, alpha=self.alpha, targets=self.targets, train_norms=self.train_norms)
        return Plan(adapters=adapters, train_weights=base if base is not None and base.tile is not None else None)

    def lr_factor(self, name: str) -> float:
        is_trained = name.endswith(TRAINED) or (self.train_norms and name.endswith(NORMS))
        return self.lr_scale if is_trained else 1.0


METHOD = Method(
    name="qlora",
    paper="arXiv 2305.14314",
    parts=(LoRA(),),
    precisions=("nf4",),
    summary="control for qerl: LoRA over a frozen NF4 base at both sites, no noise",
    is_control=True,
)
BF16_LORA = Method(
    name="bf16_lora",
    paper="arXiv 2106.09685",
    parts=(LoRA(),),
    precisions=("bf16", "fp32"),
    summary="control for aqn_bf16 and qerl: LoRA over a frozen unquantized base, no noise",
    is_control=True,
)
