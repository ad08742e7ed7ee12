"""Reasoning-QAT: GPTQ start, distillation from the full-precision model, then RL on the quantized student.

Paper: arXiv 2601.14888 ("What Makes Low-Bit QAT Work for Reasoning LLMs?"); no code, hyper-parameters not reachable.
Claim: RL collapses from a bare 3-bit model and works from one that was started by GPTQ (`methods.gptq_start`) and
distilled on text of the same domain; distillation beats plain cross-entropy on the same text.
Trainer and rollout read one grid: codes of the same latent weights. Its abstract's +44.53 points are not its W3G128
row (+30.0). Ours: forward KL, every setting of the stage, responses of the teacher as its text, and TIS during RL.
The paper's formats are W3G128 and W2G128 with zero points; precision=int3 has groups of 32 without them, and
precision.weights=int3_g128_asym is theirs. Left out: FlatQuant with W4A4KV4, and a teacher during RL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from harness.api import Method, Part, Plan, Site
from harness.fitting.distill import Divergence, Texts, Tokens, Weighting, fit, kd_loss, sft_loss, texts_of
from harness.fitting.fake_quant import SCALE
from harness.foundation.seeds import generator
from methods.flashrl import TIS
from methods.gptq_start import GPTQStart, sampled, scale_lr


@dataclass(frozen=True, kw_only=True)
class KD(Part):
    """A training stage before RL: the student, wrapped by the parts before this one, learns from the frozen base."""

    objective: Literal["kd", "sft", "none"] = "kd"
    """sft: cross-entropy on the same text, without a teacher's distribution; none: no stage."""
    kl: Divergence = "forward"
    """Direction of the divergence from teacher to student; skew mixes `alpha` of the teacher into the student."""
    alpha: float = 0.1
    """The teacher's share under kl=skew."""
    temperature: float = 1.0
    """Temperature of both distributions; gradients keep their size."""
    tokens: Tokens = "response"
    """all: prompts count too."""
    weighting: Weighting = "uniform"
    """teacher_confidence: by the teacher's largest probability; length: by 1 / response length."""
    data: Literal["teacher", "dataset"] = "teacher"
    """teacher: its samples on the calibration prompts; dataset: the task's demonstrations."""
    num_responses: int = 8
    """Texts per calibration prompt."""
    steps: int = 100
    """Updates."""
    batch_size: int = 64
    """Texts per update."""
    lr: float = 5e-4
    """Peak learning rate of AdamW, after a warm-up over 3% of the steps; decays as a cosine to 0. Billions of weights
    want 1e-5."""

    @property
    def tuned(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The learning rate, where there is a stage."""
        return () if self.objective == "none" else ("lr",)

    @property
    def demonstrations(self) -> tuple[str, str] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Its text, where that is the task's."""
        return ("data=dataset", "data=teacher") if self.objective != "none" and self.data == "dataset" else None

    def __post_init__(self) -> None:
        if not 0.0 < self.alpha < 1.0 or self.temperature <= 0:
            raise ValueError(f"KD.alpha, temperature: {self.alpha}, {self.temperature}; choose 0 < alpha < 1, above 0")
        if min(self.num_responses, self.steps, self.batch_size) < 1:
            raise ValueError(
                "KD.num_responses, steps and batch_size must be at least 1; objective=none skips the stage"
            )
        if not 0.0 < self.lr < float("inf"):
            raise ValueError(f"KD.lr: {self.lr} is no learning rate (choose a positive one)")

    def check(self, plan: Plan, parts: Sequence[Part], shapes: Mapping[str, tuple[int, ...]] | None) -> None:
        earlier = parts[: list(parts).index(self)]
        wrapping = [p for p in earlier if type(p).wrap is not Part.wrap and "wrap" not in p.idle(plan)]
        if self.objective != "none" and not wrapping:
            raise ValueError(
                f"knobs.KD.objective={self.objective}: no part before KD quantizes the student, so it would be its own "
                "teacher; valid: none, or parts=[qat_kd.GPTQStart,qat_kd.KD]"
            )

    def prepare(self, site: Site, plan: Plan) -> tuple[nn.Module | None, dict[str, Tensor]]:
        if self.objective == "none":
            return None, {}
        student, teacher = site.wrap(site.build(site.checkpoint)), site.build(site.original).requires_grad_(False)

        def loss_of(logits: Tensor, batch: Texts) -> Tensor:
            mask = batch.predicted(self.tokens)
            if self.objective == "sft":
                return sft_loss(logits, batch.ids[:, 1:], mask)
            with torch.no_grad():
                target = teacher(batch.ids)[:, :-1]
            return kd_loss(logits, target, mask, kl=self.kl, temperature=self.temperature, alpha=self.alpha,
                           weighting=self.weighting)  # fmt: skip

        draws = generator("cpu", site.seed, "distillation")
        fit(student, self._texts(site), loss_of, steps=self.steps, batch_size=self.batch_size, lr=self.lr,
            generator=draws, lr_factor=scale_lr)  # fmt: skip
        trained = dict(student.named_parameters())
        model = site.build(site.checkpoint)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(trained[name])
        return model, {name: p.detach() for name, p in trained.items() if name.endswith(f".{SCALE}")}

    def _texts(self, site: Site) -> Texts:
        if self.data == "teacher":
            return texts_of(sampled(site, self.num_responses, "distillation"))
        return texts_of(site.demonstrations(self.num_responses * len(site.calibration)))


METHOD = Method(
    name="qat_kd",
    paper="arXiv 2601.14888",
    parts=(GPTQStart(), KD(), TIS()),
    precisions=("int4", "int3", "int2"),
    summary="GPTQ start, distillation from the base, RL on a fake-quantized trainer that ships its own codes",
    claim="a 3-bit model regains most of what GPTQ loses, and RL from it is stable",
    reconstructed="every setting of the distillation, frozen scales, TIS during RL",
)
SFT = replace(
    METHOD, name="qat_kd_sft", parts=(GPTQStart(), KD(objective="sft"), TIS()),
    summary="qat_kd with cross-entropy on the same text in place of distillation", is_control=True, claim="",
)  # fmt: skip
