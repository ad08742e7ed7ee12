"""Every loss-side method of the registry against what all of them owe: order, splits, padding, memory, no mismatch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from math import exp, inf, log, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.api import Memory, Part, Step, TokenBatch
from harness.config.compose import has_hook
from harness.foundation.seeds import generator
from harness.objective.loss import AGGREGATIONS, aggregate, batch_normalize, cleaned, count_totals, policy_loss, start
from harness.objective.mismatch import clip_metrics, correction_metrics, mismatch_metrics
from harness.trainers.corrected_step import take_batch, take_correction
from methods import METHODS
from methods.ais_r import AISR
from methods.calibrated_clipping import matched_band
from methods.flashrl import TIS, log_rho
from methods.icepop import IcePop
from methods.jackpot import Jackpot
from methods.mis import MIS, GeoRS, Reject, divergence
from methods.qurl import ACR
from methods.vespo import gamma_weight
from tests.loss_cases import Algo, assert_exact, corrected, random_batch, value_and_gradient
from tests.objective_cases import objective, updated

HOOKS = ("correct", "correct_update", "token_loss")
DISTINCT = {tuple(p for p in m.parts if any(has_hook(p, h) for h in HOOKS)): m.name for m in [*METHODS.values()][::-1]}
"""Parts with a hook of the loss -> the first method that has them."""
CASES: dict[str, tuple[Part, ...]] = {name: parts for parts, name in DISTINCT.items() if parts} | {
    "veto": (MIS(level="token", lo=0.01, hi=100.0, weight="none", veto=0.2), TIS()),
    "token_k1": (Reject(stat="k1", over="token", lo=0.5, hi=2.0),),
    "jackpot_full": (Jackpot(source="full"),),
    "calibrated_bound": (Reject(stat="k2", over="seq_max", reject_frac=0.2),),
}
LOOSE = Algo(eps_low=0.05, eps_high=0.05)


def full_batch(*seed: int | str, index: int = 0, spread: float = 0.4) -> tuple[Tensor, TokenBatch]:
    """A random batch with everything that a part may need."""
    logp, batch = random_batch(*seed, size=(12, 7), spread=spread)
    noise = 0.1 * torch.randn(logp.shape, generator=generator("cpu", "noise", *seed), dtype=logp.dtype)
    shadow = {"old": batch.old_logp + 0.2, "current": logp.detach() + 0.2 + noise}
    gap = (batch.old_logp - batch.rollout_logp).abs()
    extras = {"rollout_kl": 0.1 * gap, "rollout_tv": 1.0 - (-gap).exp(), "ref_logp": batch.old_logp - 0.1}
    extras["router_shift"] = gap
    age = torch.randint(4, logp.shape, generator=generator("cpu", "age", *seed))
    step = Step(index=index, total=100, seed=0)
    return logp, replace(batch, shadow=shadow, extras=extras, step=step, version=index - age)


def dirty(batch: TokenBatch, bad: float) -> TokenBatch:
    """The batch with `bad` wherever it is padded."""

    def spoilt(x: Tensor) -> Tensor:
        return torch.where(batch.mask, x, bad)

    fields = {name: spoilt(getattr(batch, name)) for name in ("adv", "rollout_logp", "old_logp")}
    dicts = {name: {k: spoilt(v) for k, v in getattr(batch, name).items()} for name in ("shadow", "extras")}
    return replace(batch, **fields, **dicts)


@pytest.mark.parametrize("name", CASES)
def test_padding_of_any_kind_changes_nothing(name: str) -> None:
    logp, batch = full_batch("padding")
    value, grad = objective(CASES[name], logp, batch)
    for bad in (nan, inf, -inf):
        padded = torch.where(batch.mask, logp.detach(), bad).requires_grad_()
        same, same_grad = objective(CASES[name], padded, dirty(batch, bad))
        assert_exact(same, value)
        assert_exact(same_grad, grad)


@pytest.mark.parametrize("name", CASES)
def test_a_token_without_a_rollout_log_prob_counts_as_padding(name: str) -> None:
    logp, batch = full_batch("invalid")
    lost = batch.mask & (torch.rand(batch.mask.shape, generator=generator("cpu", "lost")) < 0.2)
    spoilt = replace(batch, rollout_logp=torch.where(lost, nan, batch.rollout_logp))
    found = updated(CASES[name], logp, spoilt)
    expected = updated(CASES[name], logp, replace(batch, mask=batch.mask & ~lost))
    assert lost.any() and torch.equal(found.keep, expected.keep)
    for field in ("weight", "clip_low", "clip_high"):
        assert_exact(getattr(found, field)[found.keep], getattr(expected, field)[found.keep])


@pytest.mark.parametrize("name", CASES)
def test_nothing_to_train_on_gives_zero(name: str) -> None:
    logp, batch = full_batch("empty")
    for bare in (
        replace(batch, mask=torch.zeros_like(batch.mask)),
        replace(batch, rollout_logp=torch.full_like(batch.rollout_logp, nan)),
    ):
        loss, grad = objective(CASES[name], logp, bare)
        assert loss == 0 and torch.equal(grad, torch.zeros_like(grad))
        assert not updated(CASES[name], logp, bare).keep.any()


@pytest.mark.parametrize("name", CASES)
def test_a_sampler_that_is_the_old_policy_is_left_alone_bit_for_bit(name: str) -> None:
    """Whatever the current policy; the parts with a rule on that have their own."""
    logp, batch = random_batch("battery", dtype=torch.float32)
    batch = replace(batch, rollout_logp=batch.old_logp, extras={"rollout_tv": torch.zeros_like(batch.old_logp)})
    c = corrected(CASES[name], batch)
    if not any(has_hook(part, "token_loss") for part in CASES[name]):
        for part in CASES[name]:
            c = part.correct_update(c, batch.old_logp, batch, {})
    assert torch.equal(c.keep, batch.mask) and (c.weight[batch.mask] == 1).all()
    for mode in ("decoupled", "bypass_pg"):
        value, grad = value_and_gradient(logp, batch, start(batch, 0.2, 0.2), Algo(mode=mode))
        for level in ("token", "sequence"):
            for weight in (c.weight, batch_normalize(c.weight, batch.mask, level)):
                same, same_grad = value_and_gradient(logp, batch, replace(c, weight=weight), Algo(mode=mode))
                assert torch.equal(same, value) and torch.equal(same_grad, grad)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("name", CASES)
def test_no_gradient_reaches_a_constant(name: str) -> None:
    logp, batch = full_batch("constants")
    leaves = {n: getattr(batch, n).clone().requires_grad_() for n in ("adv", "rollout_logp", "old_logp")}
    live = replace(batch, **leaves)
    c = updated(CASES[name], logp, live)
    found = policy_loss(logp, live, c, count_totals(batch.mask, c.keep, 7), Algo(), **own(CASES[name], logp, live, c))
    grads = torch.autograd.grad(found[0], [logp, *leaves.values()], allow_unused=True)
    assert bool(grads[0].any()) == bool(c.keep.any()) and grads[1:] == (None, None, None)


def own(parts: Sequence[Part], logp: Tensor, batch: TokenBatch, c: Any) -> dict[str, Any]:
    """Arguments that the loop hands to `policy_loss` for a part with an objective of its own."""
    owner = next((part for part in parts if has_hook(part, "token_loss")), None)
    if owner is None:
        return {}
    clean, b, correction = cleaned(logp, batch, c)
    return {"part_loss": owner.token_loss(clean, correction, b), "owns_objective": owner.owns_objective}


@pytest.mark.parametrize("name", CASES)
def test_order_micro_batches_and_ranks_change_nothing(name: str) -> None:
    """The last row has no token. The correction sees the whole optimizer batch, the loss a part of it."""
    parts, method = CASES[name], METHODS.get(name)
    algo = Algo(agg=method.agg or "token-mean", denom=method.denom or "original") if method else Algo(denom="kept")
    logp, batch = full_batch("order")
    value, grad = objective(parts, logp, batch, algo)
    order = torch.randperm(12, generator=generator("cpu", "order"))
    shuffled, shuffled_grad = objective(parts, logp[order].detach().requires_grad_(), take_batch(batch, order), algo)
    assert_exact(shuffled, value)
    assert_exact(shuffled_grad, grad[order])
    for found, expected in zip(objective(parts[::-1], logp, batch, algo), (value, grad), strict=True):
        assert_exact(found, expected)
    c = updated(parts, logp, batch, algo)
    for pieces, ranks in ((order.split(5), 1), (torch.arange(12).split(1), 1), (order.split(6), 2)):
        totals, losses = replace(count_totals(batch.mask, c.keep, 4), dp_size=ranks), list[Tensor]()
        for rows in pieces:
            some, kept = take_batch(batch, rows), take_correction(c, rows)
            more = own(parts, logp[rows], some, kept)
            losses.append(policy_loss(logp[rows], some, kept, totals, algo, **more)[0] / ranks)
        total = torch.stack(losses).sum()
        assert_exact(total.detach(), value)
        assert_exact(torch.autograd.grad(total, logp)[0], grad)


@pytest.mark.parametrize("name", CASES)
def test_one_policy_everywhere_gives_the_gradient_of_grpo(name: str) -> None:
    """Current = old = sampler. trm's own aggregation is any other's: only the objective is compared."""
    logp, batch = full_batch("one policy")
    same = replace(batch, old_logp=logp.detach(), rollout_logp=logp.detach())
    zeros = dict.fromkeys(("rollout_kl", "rollout_tv", "router_shift"), torch.zeros_like(logp))
    same = replace(same, extras=zeros, shadow=dict.fromkeys(("old", "current"), logp.detach()))
    for agg in ("seq-mean-token-sum", "seq-mean-token-mean") if "TBPO" not in str(CASES[name]) else AGGREGATIONS[-1:]:
        c = updated(CASES[name], logp, same)
        assert torch.equal(c.keep, batch.mask) and (c.weight == 1).all()
        _, grad = objective(CASES[name], logp, same, Algo(agg=agg))
        assert_exact(grad, value_and_gradient(logp, same, start(same, 0.2, 0.2), Algo(agg=agg))[1])


@pytest.mark.parametrize("name", CASES)
def test_memory_is_plain_numbers_and_goes_through_json(name: str) -> None:
    """Four batches with the memory written and read between them, as a resumed run does, and without."""

    def run(is_resumed: bool) -> list[Tensor]:
        memories: list[Memory] = [{} for _ in CASES[name]]
        out = list[Tensor]()
        for i in range(4):
            logp, batch = full_batch("memory", i, index=20 * (i // 2), spread=0.1 * (i + 1))
            c = start(batch, 0.2, 0.28)
            for part, memory in zip(CASES[name], memories, strict=True):
                c = part.correct(c, batch, memory)
            for part, memory in zip(CASES[name], memories, strict=True):
                c = part.correct_update(c, logp.detach(), batch, memory)
            if is_resumed:
                memories = json.loads(json.dumps(memories))
            assert all(type(v) is float for memory in memories for v in memory.values())
            out += [c.weight, c.keep, c.clip_low, c.clip_high]
        return out

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_every_step_asks_for_what_its_hooks_read(name: str) -> None:
    """A batch that has nothing but what `needs` names is enough, at any step."""
    parts, memories = CASES[name], [dict[str, float]() for _ in CASES[name]]
    for index in (0, 1, 19, 20, 21, 40):
        logp, batch = full_batch("needs", index=index)
        asked = frozenset[str]().union(*(part.needs(batch.step) for part in parts))
        bare = replace(
            batch,
            extras={k: v for k, v in batch.extras.items() if k in asked},
            shadow=batch.shadow if "shadow" in asked else {},
        )
        c = start(bare, 0.2, 0.2)
        for hook in ("correct", "correct_update"):
            for part, memory in zip(parts, memories, strict=True):
                args = (c, bare, memory) if hook == "correct" else (c, logp.detach(), bare, memory)
                c = getattr(part, hook)(*args)
        own(parts, logp, bare, c)
        assert index % 20 == 0 or "shadow" not in asked


@pytest.mark.parametrize("agg", AGGREGATIONS)
def test_an_unmoved_policy_has_the_weighted_advantage_as_its_loss(agg: str) -> None:
    logp, batch = random_batch("unmoved")
    batch = replace(batch, old_logp=logp.detach())
    c, algo = corrected([TIS(cap=1.2)], batch), Algo(agg=agg)
    totals = count_totals(batch.mask, c.keep, 7)
    loss, sums = policy_loss(logp, batch, c, totals, algo)
    assert_exact(loss.detach(), -aggregate(c.weight * batch.adv, batch.mask, c.keep, totals, agg=agg))
    found = clip_metrics({name: float(value) for name, value in sums.items()})
    assert found["train/clip_frac"] == found["train/clip_dual_frac"] == 0.0 and found["train/ess_ppo"] == 1.0


def test_the_adaptive_clip_range_is_the_objective_of_the_paper() -> None:
    """QuRL eq. 9: min(rho, C) min(R A, clip(R, 1 - eps, (1 + eps) / r) A), r = min(rho, C) / rho."""
    logp, batch = random_batch("eq 9", size=(20, 9), spread=0.8)
    eps, cap, total = 0.05, 1.3, 0.0
    for i, t in batch.mask.nonzero().tolist():
        a, rho = float(batch.adv[i, t]), exp(float(batch.old_logp[i, t] - batch.rollout_logp[i, t]))
        ratio, r = exp(float(logp[i, t] - batch.old_logp[i, t])), min(rho, cap) / rho
        clipped = min(max(ratio, 1 - eps), (1 + eps) / r)
        total += min(rho, cap) * min(ratio * a, clipped * a)
    c = corrected([ACR(cap=cap)], batch, LOOSE)
    loss, _ = value_and_gradient(logp, batch, c, replace(LOOSE, dual_clip=None))
    assert_exact(loss.item(), -total / int(batch.mask.sum()))
    below = torch.minimum(logp.detach(), batch.old_logp + log(1.049)).requires_grad_()
    acr, tis = (value_and_gradient(below, batch, x, LOOSE) for x in (c, corrected([TIS(cap=cap)], batch, LOOSE)))
    assert (c.clip_high > 1.05).any() and torch.equal(acr[0], tis[0]) and torch.equal(acr[1], tis[1])


def test_geometric_rejection_with_token_weights_by_hand() -> None:
    logp, batch = random_batch("combination", size=(20, 9), spread=0.5)
    parts, total, num_kept = (GeoRS(lo=0.9, hi=1.1), TIS(cap=1.4)), 0.0, 0
    for i, mask in enumerate(batch.mask):
        d = (batch.old_logp - batch.rollout_logp)[i][mask].tolist()
        if not d or not 0.9 <= exp(sum(d) / len(d)) <= 1.1:
            continue
        num_kept += 1
        for t, x in zip(mask.nonzero()[:, 0].tolist(), d, strict=True):
            a, ratio = float(batch.adv[i, t]), exp(float(logp[i, t] - batch.old_logp[i, t]))
            ell = max(-a * ratio, -a * min(max(ratio, 0.8), 1.2))
            total += min(exp(x), 1.4) * (min(ell, -3 * a) if a < 0 else ell)
    assert 3 < num_kept < 15
    assert_exact(objective(parts, logp, batch)[0].item(), total / int(batch.mask.sum()))


def test_sums_are_clamped_after_summing_and_statistics_know_their_length() -> None:
    _, batch = random_batch("sums", size=(2, 6))
    d = torch.tensor([[30.0, -25.0, 0, 0, 0, 0], [5.0] * 6], dtype=torch.float64)
    far = replace(batch, mask=torch.ones_like(batch.mask), rollout_logp=batch.old_logp - d)
    weight = corrected([TIS(cap=inf, level="sequence")], far).weight[:, 0]
    assert_exact(weight, torch.tensor([5.0, 20.0], dtype=torch.float64).exp())
    _, batch = random_batch("lengths", size=(12, 5))
    old, rollout, mask = batch.old_logp, batch.rollout_logp, batch.mask
    twice = [torch.cat([x, x], 1) for x in (old, rollout, mask)]
    zeros = [torch.cat([old, old], 1), torch.cat([rollout, old], 1), torch.cat([mask, mask], 1)]
    product, mean = (log_rho(old, rollout, mask, level)[:, 0] for level in ("sequence", "geometric"))
    assert_exact(log_rho(*twice, "sequence")[:, 0], 2 * product)  # pyright: ignore[reportCallIssue]
    assert_exact(log_rho(*twice, "geometric")[:, 0], mean)  # pyright: ignore[reportCallIssue]
    assert_exact(log_rho(*zeros, "sequence")[:, 0], product)  # pyright: ignore[reportCallIssue]
    assert_exact(log_rho(*zeros, "geometric")[:, 0], mean / 2)  # pyright: ignore[reportCallIssue]
    once, again = log_rho(old, rollout, mask, "token"), log_rho(*twice, "token")  # pyright: ignore[reportCallIssue]
    assert_exact(divergence(again, twice[2], "k3", "seq_sum")[:, 0], 2 * divergence(once, mask, "k3", "seq_sum")[:, 0])
    assert_exact(divergence(again, twice[2], "k3", "seq_mean")[:, 0], divergence(once, mask, "k3", "seq_mean")[:, 0])


def test_small_independent_noise_scales_with_the_length_as_derived() -> None:
    """losses.md 6.0: d of mean -kappa and variance 2 kappa; the product's log spreads by sqrt(2 kappa n)."""
    kappa, n = 1e-3, 500
    d = -kappa + (2 * kappa) ** 0.5 * torch.randn(2000, n, generator=generator("cpu", "noise"), dtype=torch.float64)
    zero, mask = torch.zeros_like(d), torch.ones_like(d, dtype=torch.bool)
    product, mean = (log_rho(d, zero, mask, level)[:, 0] for level in ("sequence", "geometric"))
    assert float(product.mean()) == pytest.approx(-kappa * n, rel=0.1)
    assert float(product.std()) == pytest.approx((2 * kappa * n) ** 0.5, rel=0.05)
    assert float(mean.std()) == pytest.approx((2 * kappa / n) ** 0.5, rel=0.05)
    assert mismatch_metrics(d - 1, zero - 1, mask, cap=2.0)["mismatch/kl_k3"] == pytest.approx(kappa, rel=0.02)
    phi = [gamma_weight(product * x, torch.tensor(2.0), torch.tensor(3.0)).mean().log() for x in (0.1, 1.0, 3.0)]
    assert 0.1 > phi[0] > phi[1] > phi[2]


def test_weights_do_not_contain_the_current_policy() -> None:
    logp, batch = random_batch("theta", spread=1.0)
    for part in (IcePop(), TIS(), MIS(), AISR(), ACR()):
        assert torch.equal(updated([part], logp, batch).weight, updated([part], logp + 1.0, batch).weight)
    rho = (batch.old_logp - batch.rollout_logp)[batch.mask].exp()
    popped = correction_metrics(corrected([IcePop()], batch), batch.mask)["correction/zero_frac"]
    assert_exact(popped, float(((rho < 0.5) | (rho > 5.0)).double().mean()))
    same = replace(batch, rollout_logp=batch.old_logp)
    assert (corrected([AISR(lam_min=0.7, lam_max=0.7)], same).weight == 1).all()
    nothing = replace(corrected([], batch), keep=torch.zeros_like(batch.mask))
    assert correction_metrics(nothing, batch.mask)["correction/token_kept_frac"] == 0.0


def test_a_lower_bound_alone_punishes_too_much_so_the_upper_one_rises() -> None:
    rng = generator("cpu", "band")
    shadow = (0.25 * torch.randn(4000, generator=rng, dtype=torch.float64)).exp()
    adv = torch.randn(4000, generator=rng, dtype=torch.float64)
    noisy = shadow * (0.3 * torch.randn(4000, generator=rng, dtype=torch.float64)).exp()
    band = matched_band(noisy, shadow, adv, 0.8, 1.2, 5.0)
    assert band is not None and band[0] < 0.8 and band[1] > 1.2

    def balance(ratio: Tensor, low: float, high: float) -> float:
        up, down = (adv > 0) & (ratio <= high), (adv < 0) & (ratio >= low)
        return float((ratio * adv)[up].sum() / -(ratio * adv)[down].sum())

    assert balance(noisy, band[0], 1.2) < 0.95 * balance(shadow, 0.8, 1.2)
