"""Losses: golden values and gradients, identities between rules, and what must not change a result."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from harness.api import Plan, TokenBatch
from harness.config.compose import Composed
from harness.config.schema import AlgoConfig
from harness.objective.advantage import KINDS
from harness.objective.loss import (
    AGGREGATIONS,
    KL_KINDS,
    LOSSES,
    MODES,
    aggregate,
    batch_normalize,
    cleaned,
    clipped_surrogate,
    count_totals,
    kl_log_ratio,
    kl_penalty,
    policy_loss,
    start,
)
from harness.trainers.corrected_step import method_loss
from methods import METHODS
from tests.loss_cases import (
    MASK,
    Algo,
    assert_exact,
    assert_published,
    golden_batch,
    golden_logp,
    random_batch,
    response,
    rows_of,
    value_and_gradient,
)


def plain(logp: Tensor, batch: TokenBatch, algo: Algo, max_len: int = 4) -> tuple[Tensor, Tensor]:
    """(loss, gradient) without any correction."""
    return value_and_gradient(logp, batch, start(batch, algo.eps_low, algo.eps_high), algo, max_len=max_len)


@pytest.mark.parametrize(
    ("algo", "value"),
    [
        (Algo(), -0.176347),
        (Algo(agg="seq-mean-token-sum"), -0.529042),
        (Algo(agg="seq-mean-token-mean"), -0.116891),
        (Algo(agg="seq-mean-token-sum-norm"), -0.132261),
        (Algo(agg="token-sum"), -0.176347338 * 9),
        (Algo(loss="gspo", eps_low=3e-4, eps_high=4e-4), -0.143820),
        (Algo(loss="gspo", agg="token-sum"), -0.165185),
        (Algo(loss="cispo", eps_high=0.28), 0.152581),
    ],
)
def test_golden_values(algo: Algo, value: float) -> None:
    loss, _ = plain(golden_logp(), golden_batch(), algo)
    assert_published(loss.item(), value)


def test_golden_gradient() -> None:
    _, grad = plain(golden_logp(), golden_batch(), Algo())
    rows = [[-0.11111, 0, 0, -0.08231], [0.12280, 0, 0.18319, 0], [-0.05668, -0.05446, 0, 0]]
    torch.testing.assert_close(grad, torch.tensor(rows, dtype=torch.float64), rtol=0, atol=5e-6)


def test_golden_bypass() -> None:
    batch = replace(golden_batch(), old_logp=golden_batch().rollout_logp)
    loss, grad = plain(golden_logp(), batch, Algo(mode="bypass_ppo"))
    assert_published(loss.item(), -0.108136)
    rows = [[-0.11111, 0, 0, -0.06098], [0.12909, 0, 0.22375, 0], [-0.05556, -0.05556, 0, 0]]
    torch.testing.assert_close(grad, torch.tensor(rows, dtype=torch.float64), rtol=0, atol=5e-6)


@pytest.mark.parametrize(
    ("ratio", "adv", "dual", "value"),
    [(4.0, -1.0, 3.0, 3.0), (4.0, -1.0, None, 4.0), (4.0, 1.0, 3.0, -1.2), (0.5, -1.0, 3.0, 0.8)],
)
def test_clip_and_dual_clip_of_one_token(ratio: float, adv: float, dual: float | None, value: float) -> None:
    logp, batch = random_batch("one", size=(2, 1))
    old = logp.detach() - torch.tensor(ratio, dtype=torch.float64).log()
    c = start(batch, 0.2, 0.2)
    found = clipped_surrogate(logp, old, torch.full_like(old, adv), c, dual_clip=dual)
    assert_exact(found.detach(), torch.full_like(old, value))


def test_gradient_is_nonzero_exactly_where_the_ratio_is_inside() -> None:
    ratio = torch.tensor([[0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 2.9, 3.1]], dtype=torch.float64)
    logp = ratio.log().requires_grad_()
    zero, batch = torch.zeros_like(ratio), random_batch("clip", size=(2, 8))[1]
    _, c = rows_of(batch, start(batch, 0.2, 0.2), slice(0, 1))
    for sign, active in ((1.0, ratio <= 1.2), (-1.0, (ratio >= 0.8) & (ratio <= 3.0))):
        (grad,) = torch.autograd.grad(clipped_surrogate(logp, zero, zero + sign, c, dual_clip=3.0).sum(), logp)
        assert_exact(grad, torch.where(active, -sign * ratio, 0.0))


def test_on_policy_value_and_gradient() -> None:
    """Current = old: the value is -agg(A), the gradient -A / denominator, and GSPO has GRPO's gradient."""
    logp, batch = random_batch("on-policy")
    batch = replace(batch, old_logp=logp.detach())
    for agg in AGGREGATIONS:
        c, algo = start(batch, 0.2, 0.2), Algo(agg=agg)
        totals = count_totals(batch.mask, c.keep, 7)
        loss, grad = value_and_gradient(logp, batch, c, algo, totals)
        assert_exact(loss, -aggregate(batch.adv, batch.mask, c.keep, totals, agg=agg))
        (expected,) = torch.autograd.grad(aggregate(-batch.adv * logp, batch.mask, c.keep, totals, agg=agg), logp)
        assert_exact(grad, expected)
    _, grad = plain(logp, batch, Algo(agg="seq-mean-token-mean"))
    _, gspo = plain(logp, batch, Algo(loss="gspo"))
    assert_exact(gspo, grad)


def test_on_policy_bypass_gradients_agree() -> None:
    """Current = old = rollout: bypass PPO, REINFORCE and decoupled have one gradient; the values differ."""
    logp, batch = random_batch("bypass")
    batch = replace(batch, old_logp=logp.detach(), rollout_logp=logp.detach())
    value, grad = plain(logp, batch, Algo())
    for algo in (Algo(mode="bypass_ppo"), Algo(mode="bypass_pg"), Algo(loss="reinforce"), Algo(loss="cispo")):
        other, same = plain(logp, batch, algo)
        assert_exact(same, grad)
        assert (other - value).abs() > 1e-3 or algo.mode == "bypass_ppo"


def test_unclipped_untruncated_value_is_the_importance_sampling_estimate() -> None:
    logp, batch = random_batch("unclipped")
    algo = Algo(eps_low=inf, eps_high=inf, dual_clip=None)
    c = replace(start(batch, inf, inf), weight=(batch.old_logp - batch.rollout_logp).exp())
    loss, _ = value_and_gradient(logp, batch, c, algo)
    total = (logp.detach() - batch.rollout_logp).exp()
    assert_exact(loss, -(total * batch.adv)[batch.mask].mean())


def test_aggregations_agree_on_equal_lengths_and_denominators_by_the_kept_share() -> None:
    logp, batch = random_batch("equal")
    batch = replace(batch, mask=torch.ones_like(batch.mask))
    values = {agg: plain(logp, batch, Algo(agg=agg), max_len=21)[0] for agg in AGGREGATIONS}
    assert_exact(values["token-mean"], values["seq-mean-token-mean"])
    assert_exact(values["token-mean"], values["seq-mean-token-sum"] / 7)
    assert_exact(values["token-mean"], values["seq-mean-token-sum-norm"] * 3)
    assert_exact(values["token-mean"], values["token-sum"] / 42)
    c = start(batch, 0.2, 0.2)
    c = replace(c, keep=c.keep & (batch.rollout_logp < -1.5))
    original = value_and_gradient(logp, batch, c, Algo())[0]
    kept = value_and_gradient(logp, batch, c, Algo(denom="kept"))[0]
    assert_exact(kept, original * (42 / c.keep.sum()))


@pytest.mark.parametrize(
    ("agg", "original", "kept"),
    [
        ("token-mean", 9 / 6, 9 / 3),
        ("token-sum", 9.0, 9.0),
        ("seq-mean-token-sum", 9 / 3, 9 / 2),
        ("seq-mean-token-sum-norm", 9 / 3 / 8, 9 / 2 / 8),
        ("seq-mean-token-mean", (3 / 3 + 6 / 2) / 3, (3 / 2 + 6 / 1) / 2),
    ],
)
def test_denominators_by_hand(agg: str, original: float, kept: float) -> None:
    """Three sequences with 3, 2, 1 tokens and an empty one; 2, 1, 0 tokens are kept."""
    ell = torch.tensor([[1.0, 2, 50], [6, 60, 90], [70, 90, 90], [90, 90, 90]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()
    keep = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 1]]).bool()
    totals = count_totals(mask, keep, 8)
    for denom, expected in (("original", original), ("kept", kept)):
        assert_exact(aggregate(ell, mask, keep, totals, agg=agg, denom=denom).item(), expected)


def test_an_objective_of_its_own_is_divided_by_what_is_kept_but_summed_over_all() -> None:
    """Two responses: of 1, 2, 4 the last token is rejected, of 8, 16 the first; the objective is the numbers."""
    logp, batch = random_batch("own", size=(3, 3))
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]]).bool()
    batch = replace(batch, mask=mask)
    c = replace(start(batch, 0.2, 0.2), keep=torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0]]).bool())
    own = torch.tensor([[1.0, 2, 4], [8, 16, 90], [90, 90, 90]], dtype=torch.float64)
    totals = count_totals(batch.mask, c.keep, 3)
    for agg, denom, expected in (
        ("token-mean", "original", 31 / 5), ("token-mean", "kept", 31 / 3),
        ("seq-mean-token-mean", "original", (7 / 3 + 24 / 2) / 2), ("seq-mean-token-mean", "kept", (7 / 2 + 24) / 2),
    ):  # fmt: skip
        algo = Algo(agg=agg, denom=denom)
        loss, _ = policy_loss(logp, batch, c, totals, algo, part_loss=own, owns_objective=True)
        assert_exact(loss.item(), expected)


def test_batch_normalization() -> None:
    _, batch = random_batch("normalize")
    weight = (batch.old_logp - batch.rollout_logp).exp().clamp(max=2.0)
    normal = batch_normalize(weight, batch.mask, "token")
    assert_exact(normal[batch.mask].mean().item(), 1.0)
    per_sequence = weight[:, :1].expand_as(weight)
    normal = batch_normalize(per_sequence, batch.mask, "sequence")
    assert_exact(normal[batch.mask.any(-1), 0].mean().item(), 1.0)
    zero = torch.zeros_like(weight)
    assert torch.equal(batch_normalize(zero, batch.mask, "token"), zero)
    spoilt = torch.where(batch.mask, weight, nan)
    broken = weight.clone()
    broken[0, 1] = nan
    rest = batch.mask.clone()
    rest[0, 1] = False
    assert_exact(batch_normalize(broken, batch.mask, "token")[rest].mean().item(), 1.0)
    assert torch.equal(
        batch_normalize(spoilt, batch.mask, "token")[batch.mask],
        batch_normalize(weight, batch.mask, "token")[batch.mask],
    )


def test_constant_weights_scale_the_loss_and_normalization_undoes_it() -> None:
    logp, batch = random_batch("constant weight")
    c = start(batch, 0.2, 0.2)
    loss, grad = value_and_gradient(logp, batch, c, Algo())
    for level in ("token", "sequence"):
        low = replace(c, weight=0.25 * c.weight)
        quarter, quarter_grad = value_and_gradient(logp, batch, low, Algo())
        assert_exact(quarter, 0.25 * loss)
        assert_exact(quarter_grad, 0.25 * grad)
        normal = replace(low, weight=batch_normalize(low.weight, batch.mask, level))
        assert_exact(value_and_gradient(logp, batch, normal, Algo())[0], loss)


@pytest.mark.parametrize(
    ("field", "known"),
    [("kl_type", KL_KINDS), ("agg", AGGREGATIONS), ("loss", LOSSES), ("mode", MODES), ("advantage", KINDS)],
)
def test_all_that_is_computed_can_be_asked_for(field: str, known: tuple[str, ...]) -> None:
    assert get_args(get_type_hints(AlgoConfig)[field]) == known


def test_kl_penalties() -> None:
    x = torch.tensor([[-0.7, 0.0, 0.3, 30.0, -30.0]], dtype=torch.float64)
    zero = torch.zeros_like(x)
    values = {kind: kl_penalty(x, zero, kind) for kind in ("k1", "k2", "k3")}
    torch.testing.assert_close(values["k1"], x)
    torch.testing.assert_close(values["k2"], 0.5 * x**2)
    expected = [0.5 * 0.0 + 2.0137527 - 0.7 - 1.0, 0.0, 0.7408182 + 0.3 - 1.0, 10.0, 10.0]
    torch.testing.assert_close(values["k3"][0].tolist(), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("now", "ref", "old", "ratio", "value", "slope", "plain_slope"),
    [
        (-1.0, -1.5, -1.2, 1.221403, 0.130117, 0.610701, 0.393469),
        (-2.0, -1.5, -2.0, 1.0, 0.148721, -0.5, -0.648721),
        (-1.5, -1.0, -1.0, 0.606531, 0.090204, -0.303265, -0.648721),
        (-1.0, -1.0, -3.0, 7.389056, 0.0, 0.0, 0.0),
    ],
)
def test_golden_kl_with_the_policy_ratio(
    now: float, ref: float, old: float, ratio: float, value: float, slope: float, plain_slope: float
) -> None:
    """r (exp(-x) + x - 1), whose gradient is r x; that of plain k3 is 1 - exp(-x)."""
    logp, batch = response([now], old=[old], rollout=[0.0], adv=0.0)
    batch = replace(batch, extras={"ref_logp": torch.full_like(batch.old_logp, ref)})
    for kind, expected in (("k3_is", slope), ("k3", plain_slope)):
        algo = Algo(kl_coef=1.0, kl_type=kind, eps_low=1e9, eps_high=1e9)
        loss, grad = plain(logp, batch, algo)
        assert_published(grad.item(), expected)
        assert_published(loss.item(), value if kind == "k3_is" else value / ratio)
        assert_published(kl_log_ratio(logp, batch, algo).exp().item(), ratio)


def test_the_kl_with_the_ratio_is_the_kl_at_any_age() -> None:
    """Enumerated over a vocabulary: value and gradient in the mean over an old policy are those of KL(pi || ref)."""
    old, ref = (torch.tensor(x, dtype=torch.float64) for x in ([0.5, 0.3, 0.2], [0.2, 0.4, 0.4]))
    logits = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64).log().requires_grad_()
    pi = logits.log_softmax(-1)
    whole = (pi.exp() * (pi - ref.log())).sum()
    estimate = (old * kl_penalty(pi, ref.log(), "k3_is", pi - old.log())).sum()
    plain_k3 = (old * kl_penalty(pi, ref.log(), "k3")).sum()
    assert_published([whole.item(), estimate.item(), plain_k3.item()], [0.138629, 0.138629, 0.157944])
    grads = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (whole, estimate, plain_k3)]
    assert_exact(grads[1], grads[0])
    assert (grads[2] - grads[0]).abs().max() > 0.01


def test_the_kl_with_the_ratio_of_a_sequence_and_without_a_ratio() -> None:
    logp, batch = random_batch("gspo kl")
    ref = logp.detach() - 0.4
    for loss in ("gspo", "ppo"):
        algo = Algo(loss=loss, agg="seq-mean-token-mean", kl_coef=1.0, kl_type="k3_is")
        ratio = kl_log_ratio(logp, batch, algo)
        gap = torch.where(batch.mask, logp - batch.old_logp, 0.0)
        mean = gap.sum(-1, keepdim=True) / batch.mask.sum(-1, keepdim=True).clamp(min=1)
        assert_exact(ratio.expand_as(gap)[batch.mask], (mean if loss == "gspo" else gap).expand_as(gap)[batch.mask])
        zero = replace(batch, adv=torch.zeros_like(batch.adv), extras={"ref_logp": ref})
        _, grad = plain(logp, zero, algo)
        k3 = kl_penalty(logp, ref, "k3_is", ratio)
        share = batch.mask.double() / batch.mask.sum(-1, keepdim=True).clamp(min=1) / batch.mask.any(-1).sum()
        (expected,) = torch.autograd.grad((torch.where(batch.mask, k3, 0.0) * share).sum(), logp)
        assert_exact(grad, expected)
    assert kl_penalty(logp, logp.detach() + 25.0, "k3_is", logp - logp.detach()).max() > 1e8  # no clamp of the product
    with pytest.raises(ValueError, match="k3_is needs the log-ratio"):
        kl_penalty(logp, ref, "k3_is")


def test_a_bypassed_ratio_multiplies_the_kl_by_current_over_sampler() -> None:
    """bypass_ppo draws its ratio against the sampler, over whom the mean is; the other modes against the old policy."""
    logp, batch = random_batch("bypass kl", spread=0.8)
    zero = replace(batch, adv=torch.zeros_like(batch.adv), extras={"ref_logp": logp.detach() - 0.4})
    bf16 = Composed(method=METHODS["bf16"], plan=Plan(), parts=(), fixed={}, memory=[])
    c = start(zero, 0.2, 0.2)
    for mode, below in (("bypass_ppo", batch.rollout_logp), ("decoupled", batch.old_logp)):
        algo = Algo(kl_coef=1.0, kl_type="k3_is", mode=mode)
        loss, _ = method_loss(bf16, logp, zero, c, count_totals(batch.mask, c.keep, 7), algo)  # type: ignore[arg-type]
        (grad,) = torch.autograd.grad(loss, logp)
        expected = torch.where(batch.mask, (logp.detach() - below).exp() * 0.4, 0.0)
        assert_exact(grad, expected / batch.mask.sum())


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "reinforce"])
def test_a_shift_is_an_advantage_and_nothing_else(loss: str) -> None:
    logp, batch = random_batch("shift", spread=0.5)
    algo, shift = Algo(loss=loss, dual_clip=3.0), 0.8 * torch.sin(3.0 * batch.rollout_logp)
    c = start(batch, 0.2, 0.2)
    moved = replace(batch, adv=batch.adv + shift)
    for a, b in zip(
        value_and_gradient(logp, batch, replace(c, adv_shift=shift), algo), value_and_gradient(logp, moved, c, algo),
        strict=True,
    ):  # fmt: skip
        assert torch.equal(a, b)
    assert not torch.equal(value_and_gradient(logp, batch, c, algo)[1], value_and_gradient(logp, moved, c, algo)[1])
    none = value_and_gradient(logp, batch, replace(c, adv_shift=torch.zeros_like(shift)), algo)
    assert all(torch.equal(a, b) for a, b in zip(none, value_and_gradient(logp, batch, c, algo), strict=True))
    twice = c.shifted(0.25 * shift).shifted(0.75 * shift).adv_shift
    assert twice is not None
    assert_exact(twice, shift)
    narrow = c.shifted(shift.float()).adv_shift
    assert narrow is not None and narrow.dtype == c.weight.dtype == torch.float64
    clean = cleaned(logp, batch, replace(c, adv_shift=shift))
    assert clean[2].adv_shift is None  # it has been added, and cannot be added twice
    assert_exact(clean[1].adv, torch.where(batch.mask, batch.adv + shift, 0.0))
    assert cleaned(logp, clean[1], clean[2])[1].adv.equal(clean[1].adv)


def test_regularisers_run_over_the_mask_untouched_by_weight_and_rejection() -> None:
    logp, batch = random_batch("kl")
    batch = replace(batch, extras={"ref_logp": batch.old_logp - 0.2})
    c = start(batch, 0.2, 0.2)
    c = replace(c, keep=torch.zeros_like(c.keep), weight=3 * c.weight)
    totals = count_totals(batch.mask, c.keep, 7)
    entropy = (-logp).exp()
    algo = Algo(kl_coef=0.5, kl_type="k2", entropy_coef=0.25, denom="kept")
    loss, sums = policy_loss(logp, batch, c, totals, algo, entropy=entropy)
    kl = 0.5 * (logp - batch.old_logp + 0.2).square()
    assert_exact(loss, 0.5 * kl[batch.mask].mean() - 0.25 * entropy[batch.mask].mean())
    assert_exact(sums["kl_ref"], kl[batch.mask].sum().detach())
    with pytest.raises(ValueError, match="ref_logp"):
        policy_loss(logp, replace(batch, extras={}), c, totals, algo, entropy=entropy)
    with pytest.raises(ValueError, match="entropy"):
        policy_loss(logp, batch, c, totals, algo, entropy=entropy.detach())


def test_a_parts_own_loss_gets_weight_and_keep_unless_it_owns_the_objective() -> None:
    logp, batch = random_batch("own")
    c = start(batch, 0.2, 0.2)
    c = replace(c, weight=2 * c.weight, keep=c.keep & (batch.rollout_logp < -1.5))
    totals = count_totals(batch.mask, c.keep, 7)
    own = torch.where(batch.mask, logp.square(), nan)
    shared, _ = policy_loss(logp, batch, c, totals, Algo(), part_loss=own)
    owned, _ = policy_loss(logp, batch, c, totals, Algo(), part_loss=own, owns_objective=True)
    assert_exact(shared, 2 * own[c.keep].sum() / batch.mask.sum())
    assert_exact(owned, own[batch.mask].mean())


@pytest.mark.parametrize(("name", "value"), [("loss", "pppo"), ("mode", "bypass"), ("agg", "mean"), ("denom", "all")])
def test_unknown_choices_name_the_field_the_value_and_the_choices(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: unknown '{value}' .choose "):
        plain(golden_logp(), golden_batch(), replace(Algo(), **{name: value}))


def test_totals_count_tokens_and_nonempty_sequences() -> None:
    keep = MASK.clone()
    keep[2] = False
    totals = count_totals(MASK, keep, 9)
    assert (totals.num_tokens, totals.num_sequences, totals.num_kept_tokens) == (9, 3, 7)
    assert (totals.num_kept_sequences, totals.max_len, totals.dp_size) == (2, 9, 1)
