"""RILQ: low-rank adapters beside a frozen low-bit rollout model, fitted on the output of the whole model.

Paper: arXiv 2412.01129 (AAAI 2025), eq. 5 and 6; code aiha-lab/RILQ.
Claim: a 2-bit error is close to full rank, so adapters that fit each weight by itself (SVD, LoftQ, CLoQ: `start`)
saturate; fitted on the last hidden state, with the cross entropy of text, they let other layers absorb it.
In RL (all of it ours): the trainer stays in full precision and the rollout computes with q(W_k) + C, where C is fitted
on W_0 and the codes follow W_k. `methods/rilq_refresh.py` fits again, `methods/rilq_init.py` trains what was fitted.
The authors' text has no prompts; here only the positions that predict a response are aligned, unless `tokens` is all.
Their example is W2A16 in groups of 64 (precision.weights=int2_g64_asym); precision=int2 has groups of 16.
The methods set g = 0, for demonstrations would teach the sampler the task, and a rate for narrow models (both ours).
Left out: their layer-wise loss, and QA-LoRA's mergeable adapters (merging what is below half a step loses it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from harness.api import Fixed, Memory, Method, Part, Plan, Site, Step, WeightStream
from harness.fitting import adapter_start
from harness.fitting.adapter_fit import Align, Fitted, Recipe, Texts, Tokens, fit, site_texts, targets
from harness.fitting.adapter_start import Local
from harness.fitting.low_bit_decoder import adapters_of, input_grams, low_bit_student
from harness.foundation.seeds import generator, stable_seed
from harness.numerics.formats import Adapters
from methods.flashrl import TIS
from methods.naive import LOW_BIT

PRECISIONS = ("int2", *(name for name in LOW_BIT if name != "int2"))
RECIPE = ("align", "a", "g", "lr", "batch_size", "updates", "validate_every", "patience")


@dataclass(frozen=True, kw_only=True)
class Compensation(Part):
    """Adapters made for a plan that has some; the parts below say how they are used."""

    start: Literal["none", "svd", "loftq", "cloq", "rilq"] = "rilq"
    """rilq fits the whole model; none is QLoRA's zero adapter; the others are local, in closed form."""
    fit_from: Local = "none"
    """Start of a fit; none is the authors' random A with B = 0."""
    loftq_steps: int = 5
    """LoftQ's alternations, 1 to 5 in its paper; 1 is svd."""
    align: Align = "hidden_postnorm"
    """hidden_postnorm: the authors' code; hidden_prenorm: their README; logit: their option; kl is ours."""
    a: float = 0.5
    """Weight of the distance to the full-precision model."""
    g: float = 0.5
    """Weight of the cross entropy of demonstrations; text that a model wrote never counts."""
    lr: float = 1e-4
    """Learning rate of Adam, constant."""
    updates: int = 1250
    batch_size: int = 8
    """Sequences per update; the authors accumulate them one by one."""
    validate_every: int = 25
    patience: int = 5
    """Validations without an improvement that end a fit."""
    sequences: int = 320
    """Sequences of the initial fit, a fifth of which validate."""
    sampled_frac: float = 0.5
    """Share of them that the full-precision model samples (ours); the rest are the task's demonstrations, if any."""
    tokens: Tokens = "response"
    """Predictions that are fitted."""

    def __post_init__(self) -> None:
        own = type(self).__name__
        if not 0 <= self.sampled_frac <= 1 or self.sequences < 3:
            raise ValueError(f"{own}.sampled_frac, sequences: {self.sampled_frac}, {self.sequences}; 0 to 1 of >= 3")
        if not 0 <= min(self.a, self.g) <= max(self.a, self.g) < float("inf"):
            raise ValueError(f"{own}.a, g: {self.a}, {self.g} are no weights of a loss (choose 0 or more)")
        if min(self.lr, self.updates, self.batch_size, self.validate_every, self.patience, self.loftq_steps) <= 0:
            raise ValueError(f"{own}: lr, updates, batch_size, validate_every, patience, loftq_steps must be positive")

    @property
    def local(self) -> tuple[str, Local]:
        """Knob that says what is made in closed form, and its value."""
        return ("fit_from", self.fit_from) if self.start == "rilq" else ("start", self.start)

    def check(self, plan: Plan, parts: Sequence[Part], shapes: Mapping[str, tuple[int, ...]] | None) -> None:
        knob, kind = self.local
        if plan.adapters is None or kind == "none" or shapes is None:
            return
        modules = adapter_start.modules_of(shapes, plan.adapters.targets)
        size, module = min((min(shapes[f"{module}.weight"]), module) for module in modules)
        if (rank := plan.adapters.rank) > size:
            owner = next(type(p).__name__ for p in parts if getattr(p, "rank", None) == rank)
            other = "start=rilq" if knob == "start" else "fit_from=none"
            raise ValueError(
                f"knobs.{owner}.rank={rank}: {knob}={kind} factors every layer, and {module} has {size} rows or "
                f"columns; valid: 1 to {size}, or knobs.{type(self).__name__}.{other}"
            )

    def adapters(self, site: Site, base: nn.Module, plan: Plan) -> dict[str, Tensor]:
        """The adapters of `base` as it was built, and LoftQ's shifts where it has them."""
        texts = site_texts(site, self.sequences, self.sampled_frac, self.tokens, stable_seed(site.seed, "rilq"))
        texts = texts.to(next(base.parameters()).device)
        teacher = site.wrap(site.build(site.checkpoint))
        held = self.closed_form(self.local[1], teacher, base, texts, plan, site.fixed, site.seed)
        if self.start == "rilq":
            held |= self.fitted(teacher, base, held, texts, plan, site.fixed)[0]
        return held

    def closed_form(
        self, kind: Local, teacher: nn.Module, base: nn.Module, texts: Texts, plan: Plan, given: Fixed, seed: int
    ) -> dict[str, Tensor]:
        """Adapters of `base` that need no training; CLoQ's inputs are the teacher's."""
        assert plan.adapters is not None
        weights, rank = dict(base.named_parameters()), plan.adapters.rank
        modules = adapter_start.modules_of(weights, plan.adapters.targets)
        if kind == "none":
            return adapter_start.gaussian_start(weights, modules, rank, partial(generator, "cpu", seed, "adapter"))
        grams = input_grams(teacher, modules, texts.ids, texts.used()) if kind == "cloq" else None
        scale = plan.adapters.alpha / rank
        alternations = self.loftq_steps
        return adapter_start.local_start(kind, weights, modules, plan, given, rank, scale, alternations, grams)

    def fitted(
        self, teacher: nn.Module, base: nn.Module, held: Fixed, texts: Texts, plan: Plan, given: Fixed, **recipe: Any
    ) -> tuple[dict[str, Tensor], Fitted]:
        """Adapters fitted from those in `held`, and how that went; `recipe` replaces knobs of the fit."""
        student = self.student(base, held, plan, given)
        own: dict[str, Any] = {name: getattr(self, name) for name in RECIPE}
        wanted = targets(teacher, texts.ids, self.align)
        went = fit(student, wanted, texts, Recipe(**own | recipe))
        return adapters_of(student), went

    def student(self, base: nn.Module, held: Fixed, plan: Plan, given: Fixed) -> nn.Module:
        """The model that the rollout computes with: `base` with its weights quantized and the adapters in `held`."""
        assert plan.adapters is not None
        values = adapter_start.shifted_values(dict(base.named_parameters()), held, plan, given)
        scale = plan.adapters.alpha / plan.adapters.rank
        return low_bit_student(base, values, held, scale=scale, acts=plan.rollout_acts)


@dataclass(frozen=True, kw_only=True)
class RILQ(Compensation):
    """Adapters made once for the initial weights and sent with every push; only the rollout has them."""

    rank: int = 16
    """64 in the paper, for a width of 4096; 16 suits the embedded widths of 64 to 256 (ours)."""
    scale: float = 0.25
    """alpha / rank."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1 or not 0 < self.scale < float("inf"):
            raise ValueError(f"{type(self).__name__}.rank, scale: {self.rank}, {self.scale} must be positive")

    def plan(self, rollout: Plan) -> Plan:
        alpha = self.scale * self.rank
        return Plan(adapters=Adapters(rank=self.rank, alpha=alpha, site="rollout", is_trained=False))

    def check(self, plan: Plan, parts: Sequence[Part], shapes: Mapping[str, tuple[int, ...]] | None) -> None:
        names = [type(p).__name__ for p in parts if isinstance(p, RILQ)]
        if len(names) > 1:
            raise ValueError(f"parts {' and '.join(names)} both send adapters; choose one")
        super().check(plan, parts, shapes)

    def prepare(self, site: Site, plan: Plan) -> tuple[nn.Module | None, dict[str, Tensor]]:
        base = site.build(site.checkpoint)
        held = self.adapters(site, base, plan)
        return None, held | adapter_start.errors_of(dict(base.named_parameters()), held, plan, site.fixed)

    def sync(self, weights: WeightStream, step: Step, plan: Plan, fixed: Fixed, memory: Memory) -> WeightStream:
        return adapter_start.compensated(weights, fixed)


METHOD = Method(
    name="rilq",
    paper="arXiv 2412.01129",
    parts=(RILQ(g=0.0, lr=1e-3), TIS()),
    precisions=PRECISIONS,
    summary="low-bit rollout weights with adapters fitted once on the model's output, and token TIS",
    claim="adapters fitted on the whole model's output restore what 2-bit weights lose, at any rank",
    reconstructed="RILQ inside RL; the fit's data, rank and rate; no cross entropy of text",
)
