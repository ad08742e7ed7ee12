"""Arms of the replay: the registry's loss-side methods, and each one's dloss/dlogp on every token of a stored batch.

Every correction here acts through d loss / d logp, a number per token: the model's gradient is that matrix times
d logp / d theta, whatever the rule. It is computed on a leaf, with the loop's own loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf

import torch
from torch import Tensor

from harness.api import Method, Plan, TokenBatch
from harness.config.compose import FIRST, OUTSIDE_LOSS, Composed, has_hook
from harness.config.load import load, parse
from harness.config.resolve import fixed_algo
from harness.config.schema import AlgoConfig
from harness.foundation.did_you_mean import nearest
from harness.objective.loss import MODES, count_totals
from harness.objective.mismatch import clip_metrics
from harness.trainers.corrected_step import batch_correction, method_loss, update_correction
from methods import METHODS
from methods.flashrl import TIS

STORED = frozenset({"ref_logp", "rollout_kl", "shadow"})
"""Needs of a part that stored batches meet."""
NONE = "none"
NO_METHOD = Method(name=NONE, paper="", parts=(), precisions=())
YARDSTICKS = (
    Method(name="token IS, no cap", paper="", parts=(TIS(cap=inf),), precisions=()),
    Method(name="sequence IS, no cap", paper="", parts=(TIS(cap=inf, level="sequence"),), precisions=()),
)
"""Untruncated ratios: what truncation and rejection trade bias against."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One correction in one mode."""

    name: str
    method: Method
    algo: AlgoConfig

    @property
    def plain(self) -> Arm:
        """The run's own objective under the same aggregation, without correction."""
        algo = vars(self.algo) | {"mode": "decoupled", "batch_normalize": "none", "denom": "original"}
        return Arm(name=NONE, method=NO_METHOD, algo=parse(AlgoConfig, algo))

    @property
    def exact(self) -> Arm:
        """The arm whose step it is compared with, on an exact sampler's batches: itself where it has an objective of
        its own, else the plain one."""
        return self if self.has_objective else self.plain

    @property
    def has_objective(self) -> bool:
        """Does a part replace the objective?"""
        return any(has_hook(part, "token_loss") for part in self.method.parts)

    @property
    def target(self) -> str:
        """Name of the step it is compared with: `own NAME`, or the aggregation of the plain one."""
        return f"own {self.name}" if self.has_objective else self.algo.agg


@dataclass(frozen=True, kw_only=True)
class Pull:
    """Effect of an arm on the tokens of one batch: dloss/dlogp."""

    grad: Tensor
    """[B, T] float32, d loss / d logp."""
    loss: float
    clip_frac: float
    """Share of the mask's tokens outside the clips of the ratio; NaN where the objective has none."""


def arms_of(
    algo: AlgoConfig, names: Sequence[str] = (), modes: Sequence[str] = ("decoupled",)
) -> tuple[list[Arm], dict[str, str]]:
    """(arms, skipped method -> reason): no correction in every mode, the yardsticks, every method on the loss side.

    `names` restricts the methods ("none" is always there), `modes` are those of methods that do not fix theirs. Raises
    ValueError for unknown names and modes.
    """
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"--modes={mode}: unknown; {nearest(mode, MODES)}")
    offered = {NONE: NO_METHOD} | {m.name: m for m in YARDSTICKS} | METHODS
    for name in names:
        if name not in offered:
            raise ValueError(f"--methods={name}: unknown; {nearest(name, offered)}")
    arms: list[Arm] = []
    skipped: dict[str, str] = {}
    for name, method in offered.items():
        if names and name not in (*names, NONE):
            continue
        if reason := reason_to_skip(name, method):
            skipped[name] = reason
            continue
        own = fixed_algo(method, algo)
        own_modes = [method.mode] if method.mode else MODES if name == NONE else modes
        fitting = [mode for mode in own_modes if fits(method, mode, algo)]
        if not fitting:
            skipped[name] = f"does not fit algo.mode={','.join(own_modes)} with algo.loss={algo.loss}"
        for mode in fitting:
            suffix = f" {mode}" if mode != "decoupled" and not method.mode else ""
            arms.append(Arm(name=f"{name}{suffix}", method=method, algo=parse(AlgoConfig, vars(own) | {"mode": mode})))
    return arms, skipped


@cache
def arm_names() -> tuple[str, ...]:
    """Names of all arms of the default algorithm, in every mode."""
    return tuple(arm.name for arm in arms_of(load([]).algo, modes=MODES)[0])


def reason_to_skip(name: str, method: Method) -> str:
    """Reason why a method cannot be replayed; empty where it can."""
    for part in method.parts:
        acting = [hook for hook in OUTSIDE_LOSS if has_hook(part, hook)]
        if acting:
            return f"{type(part).__name__} acts outside the loss ({', '.join(acting)})"
        if lacking := sorted(part.needs(FIRST) - STORED):
            return f"{type(part).__name__} needs {', '.join(lacking)}, which is not stored"
    return "" if method.parts or name == NONE else f"has no parts: equal to {NONE}"


def fits(method: Method, mode: str, algo: AlgoConfig) -> bool:
    """Does the mode make sense for the method? A weight must not meet a ratio that has the sampler in it already."""
    if any(part.modes and mode not in part.modes for part in method.parts):
        return False
    if mode == "decoupled":
        return True
    is_objective = any(has_hook(part, "token_loss") for part in method.parts)
    is_weighted = any(part.sets_weight for part in method.parts)
    return algo.loss in ("ppo", "gspo") and not is_objective and not (mode == "bypass_ppo" and is_weighted)


def pull(arm: Arm, batch: TokenBatch, logp: Tensor, max_new_tokens: int) -> Pull:
    """The arm on a whole batch as one update of the loop; `logp` [B, T] are the current log-probs, no gradient.

    Every batch starts from an empty memory: batches are as many first steps.
    """
    algo, composed = arm.algo, composed_of(arm.method)
    leaf = logp.detach().clone().requires_grad_()
    batch = replace(batch, shadow={**batch.shadow, "current": leaf.detach()})
    c = update_correction(composed, batch_correction(composed, batch, algo), batch, leaf.detach(), algo)
    totals = count_totals(batch.mask, c.keep, max_new_tokens)
    loss, sums = method_loss(composed, leaf, batch, c, totals, algo)
    (grad,) = torch.autograd.grad(loss, leaf)
    clips = clip_metrics({name: float(value) for name, value in sums.items()})
    return Pull(grad=grad, loss=float(loss.detach()), clip_frac=clips.get("train/clip_frac", torch.nan))


def composed_of(method: Method) -> Composed:
    """The method's parts without a plan, with nothing remembered."""
    return Composed(method=method, plan=Plan(), parts=method.parts, fixed={}, memory=[{} for _ in method.parts])
