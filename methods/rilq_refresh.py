"""RILQ-refresh(K): the rollout's adapters fitted again on what the policy last wrote, every K steps or when triggered.

Ours from end to end (compensation.md, section 3.3); the fit is RILQ's, arXiv 2412.01129. A refit starts from the
adapters in force, reads the last batch, aligns with the trainer after its updates, never with the cross entropy of
text (a rollout is no ground truth), and is accepted only if the distance on unseen sequences falls. Adapters in closed
form (`start` svd, loftq, cloq) are computed anew under the same test.
Logged: `staleness` |E_k - E_0| / |E_0|, E = W - q(W) and E_0 that of the adapters in force, refits, seconds.
Left out: reusing the forward pass of the old log-probs as targets (here the targets are those of the updated policy).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor, nn

from harness.api import Fixed, Memory, Plan, Sequences, Step, TokenBatch
from harness.fitting.adapter_fit import Recipe, Texts, Tokens, held_out, targets, texts_of, validate
from harness.fitting.adapter_start import errors_of, relative_change
from harness.objective.mismatch import mismatch_metrics
from methods.flashrl import TIS
from methods.rilq import METHOD as ONCE
from methods.rilq import RILQ


@dataclass(frozen=True, kw_only=True)
class RILQRefresh(RILQ):
    """RILQ's adapters, renewed during the run."""

    refresh_every: int | None = 25
    """Steps between refits; None: only triggers."""
    triggers: bool = True
    """Refit early where the mismatch grew, the effective sample size fell or the quantization error moved."""
    k3_growth: float = 1.5
    """Triggers where mean K3(old, rollout) exceeds so many times its value right after the last refit."""
    min_ess: float = 0.9
    """Triggers where the token-level ESS of rho falls below it."""
    max_staleness: float = 0.2
    """Triggers where |E_k - E_0| / |E_0| exceeds it."""
    cooldown: int = 10
    """Steps after a refit, accepted or not, in which nothing triggers."""
    refit_updates: int = 200
    """Updates of one refit, at most."""
    refit_sequences: int = 256
    """Sequences of the last batch that a refit reads; a fifth of them validates."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.refresh_every is not None and self.refresh_every < 1:
            raise ValueError(f"RILQRefresh.refresh_every: {self.refresh_every}; a number of steps, or null")
        if self.refit_updates < 1 or self.refit_sequences < 2:
            raise ValueError(
                f"RILQRefresh.refit_updates, refit_sequences: {self.refit_updates}, {self.refit_sequences}; "
                "choose at least 1 and 2"
            )

    def refit(
        self, model: nn.Module, seqs: Sequences, batch: TokenBatch, step: Step, plan: Plan, fixed: Fixed, memory: Memory
    ) -> Fixed | None:
        now = errors_of(dict(model.named_parameters()), fixed, plan, fixed)
        memory["staleness"] = relative_change(now, fixed)
        if not self.is_due(batch, step, memory) or self.start == "none":
            return None
        began = time.perf_counter()
        texts = recent_texts(seqs, self.refit_sequences, self.tokens)
        found, before, after = self.renewed(model, texts, plan, fixed, step)
        memory |= {
            "last_refit": float(step.index),
            "k3_after_refit": 0.0,
            "refits": memory.get("refits", 0.0) + 1.0,
            "accepted": memory.get("accepted", 0.0) + float(after < before),
            "refit_gain": 1.0 - after / before if before else 0.0,
            "refit_s": memory.get("refit_s", 0.0) + time.perf_counter() - began,
        }
        if after >= before:
            return None
        return found | errors_of(dict(model.named_parameters()), {**fixed, **found}, plan, fixed)

    def is_due(self, batch: TokenBatch, step: Step, memory: Memory) -> bool:
        """True at the schedule's steps and where a trigger fires. Remembers K3 of the first batch after a refit."""
        found = mismatch_metrics(batch.old_logp, batch.rollout_logp, batch.mask, cap=2.0)
        k3, ess = found["mismatch/kl_k3"], found["mismatch/ess_token_raw"]
        if not memory.get("k3_after_refit"):
            memory["k3_after_refit"] = k3 if k3 < inf else 0.0  # NaN: a batch without a token
        if self.refresh_every is not None and step.index % self.refresh_every == 0:
            return True
        if not self.triggers or step.index - memory.get("last_refit", 0.0) < self.cooldown:
            return False
        has_grown = k3 > self.k3_growth * memory["k3_after_refit"] > 0.0
        return has_grown or ess < self.min_ess or memory["staleness"] > self.max_staleness

    def renewed(
        self, model: nn.Module, texts: Texts, plan: Plan, fixed: Fixed, step: Step
    ) -> tuple[dict[str, Tensor], float, float]:
        """(new adapters, validation distance of those in force, of the new ones)."""
        if self.start == "rilq":
            found, went = self.fitted(model, model, fixed, texts, plan, fixed, g=0.0, updates=self.refit_updates)
            return found, went.log[0], went.best
        found = self.closed_form(self.start, model, model, texts, plan, fixed, step.seed)  # pyright: ignore[reportArgumentType] - "none" is never due
        unseen = texts.take(torch.arange(len(texts.ids) - held_out(len(texts.ids)), len(texts.ids)))
        wanted, recipe = targets(model, unseen.ids, self.align), Recipe(align=self.align, a=self.a, g=0.0)
        before, after = (
            validate(self.student(model, held, plan, fixed), unseen, wanted, recipe)
            for held in (fixed, {**fixed, **found})
        )
        return found, before, after


def recent_texts(seqs: Sequences, count: int, tokens: Tokens) -> Texts:
    """At most `count` sequences of a rollout batch, evenly spread over it; none of them is text."""
    size = len(seqs.ids)
    rows = torch.linspace(0, size - 1, min(count, size), device=seqs.ids.device).round().long()
    some = seqs.take(rows)
    lens = some.prompt_lens
    prompt_lens = torch.full_like(rows, lens) if isinstance(lens, int) else lens
    return texts_of(some.ids, prompt_lens, some.sampled.sum(1), torch.zeros_like(rows, dtype=torch.bool), tokens)


METHOD = replace(
    ONCE,
    name="rilq_refresh",
    parts=(RILQRefresh(g=0.0, lr=1e-3), TIS()),
    summary="low-bit rollout weights with adapters refitted on recent rollouts, and token TIS",
    reconstructed="everything but the distance that is fitted: schedule, triggers, data, acceptance",
)
