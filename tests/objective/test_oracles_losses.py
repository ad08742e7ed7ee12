"""Advantages, losses, gradients, weights, masks and metrics equal verl's and TRL's own answers (tests/oracles)."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.api import Correction, Part, TokenBatch
from harness.objective.advantage import AdvantageKind, group_advantage
from harness.objective.loss import AGGREGATIONS, Totals, batch_normalize, count_totals, kl_penalty, policy_loss, start
from harness.objective.mismatch import clip_metrics, correction_metrics, mismatch_metrics
from methods.flashrl import TIS
from methods.icepop import IcePop
from methods.mis import K3RS, MIS, Reject
from tests.loss_cases import STEP, Algo, corrected
from tests.source_tree import ROOT

BATCHES = ("near", "int4", "wild")
NAMES = {
    "kl": "kl_k1", "k3_kl": "kl_k3", "training_ppl": "train_ppl", "rollout_ppl": "rollout_ppl",
    "ppl_ratio": "ppl_ratio",
    "training_log_ppl": "train_log_ppl", "rollout_log_ppl": "rollout_log_ppl", "log_ppl_diff": "log_ppl_diff",
    "log_ppl_abs_diff": "log_ppl_absdiff", "log_ppl_diff_max": "log_ppl_diff_max", "chi2_token": "chi2_token",
    "log_ppl_diff_min": "log_ppl_diff_min", "chi2_seq": "chi2_seq", "rollout_is_ratio_fraction_high": "frac_high",
    "rollout_is_ratio_fraction_low": "frac_low", "rollout_is_eff_sample_size": "ess_token", "rollout_is_std": "is_std",
    "rollout_is_mean": "is_mean", "rollout_is_max": "is_max", "rollout_is_min": "is_min",
}  # fmt: skip
"""verl's name -> ours, under token weights capped at 2."""
near = partial(torch.testing.assert_close, rtol=2e-6, atol=1e-7, check_dtype=False)
"""The libraries add 1e-8 to some counts and keep some tensors in float32."""


@cache
def oracle(name: str) -> tuple[dict[str, Tensor], dict[str, dict[str, float]]]:
    """(arrays by "batch/case/field", numbers by "batch/case") of one library."""
    with np.load(ROOT / "tests" / "oracles" / f"{name}.npz") as file:
        arrays = {key: torch.tensor(file[key]) for key in file.files if file[key].dtype.kind != "U"}
        return arrays, json.loads(str(file["numbers"]))


def batch_named(library: str, name: str) -> tuple[Tensor, TokenBatch]:
    """(current log-probs with gradient, batch) as the library saw them."""
    x = {field: oracle(library)[0][f"{name}/{field}"] for field in ("logp", "mask", "adv", "rollout", "old")}
    batch = TokenBatch(
        token_ids=torch.zeros_like(x["mask"]),
        mask=x["mask"].bool(),
        adv=x["adv"],
        rollout_logp=x["rollout"],
        old_logp=x["old"],
        step=STEP,
    )
    return x["logp"].requires_grad_(), batch


def check(
    library: str, case: str, logp: Tensor, batch: TokenBatch, c: Correction, algo: Algo, totals: Totals | None = None
) -> dict[str, float]:
    """Value and gradient equal the library's; returns our update metrics."""
    arrays, numbers = oracle(library)
    totals = totals or count_totals(batch.mask, c.keep, 16 if library == "trl" else batch.mask.shape[1])
    loss, sums = policy_loss(logp, batch, c, totals, algo)
    (grad,) = torch.autograd.grad(loss, logp)
    near(loss.item(), numbers[case]["loss"])
    near(grad, arrays[f"{case}/grad"])
    return clip_metrics({name: float(value) for name, value in sums.items()})


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("agg", AGGREGATIONS)
def test_verl_clipped_losses(name: str, agg: str) -> None:
    logp, batch = batch_named("verl", name)
    algo = Algo(agg=agg, eps_high=0.28)
    plain, tis = corrected([], batch, algo), corrected([TIS()], batch, algo)
    found = check("verl", f"{name}/vanilla/{agg}", logp, batch, plain, algo)
    theirs = oracle("verl")[1][f"{name}/vanilla/{agg}"]
    near(found["train/clip_frac"], theirs["pg_clipfrac"])
    near(found["train/clip_dual_frac"], theirs["pg_clipfrac_lower"])
    near(found["train/ppo_kl"], theirs["ppo_kl"])
    check("verl", f"{name}/tis/{agg}", logp, batch, tis, algo)
    totals = Totals(num_tokens=97, num_sequences=13, num_kept_tokens=0, num_kept_sequences=0, max_len=50, dp_size=2)
    check("verl", f"{name}/global/{agg}", logp, batch, tis, algo, totals)


@pytest.mark.parametrize("name", BATCHES)
def test_verl_gspo_and_cispo(name: str) -> None:
    logp, batch = batch_named("verl", name)
    for loss in ("gspo", "cispo"):
        algo = Algo(loss=loss, eps_high=0.28)
        check("verl", f"{name}/{loss}", logp, batch, corrected([], batch, algo), algo)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("rs", ["none", "seq_mean_k3"])
def test_verl_bypass_modes(name: str, level: str, rs: str) -> None:
    """verl weighs and rejects by the current policy, inside the loss, and divides by what it kept."""
    logp, batch = batch_named("verl", name)
    current = replace(batch, old_logp=logp.detach())
    rejection: list[Part] = [K3RS(hi=0.08)] if rs != "none" else []
    algo = Algo(mode="bypass_pg", denom="kept", eps_high=0.28)
    tis = TIS(level=level)  # pyright: ignore[reportArgumentType]
    c = corrected([*rejection, tis], current, algo)
    check("verl", f"{name}/bypass_reinforce/{level}/{rs}", logp, current, c, algo)
    algo = replace(algo, mode="bypass_ppo")
    c = corrected(rejection, current, algo)
    check("verl", f"{name}/bypass_ppo_clip/{level}/{rs}", logp, replace(batch, old_logp=batch.rollout_logp), c, algo)


@pytest.mark.parametrize("name", BATCHES)
def test_verl_weights_and_their_metrics(name: str) -> None:
    _, batch = batch_named("verl", name)
    arrays, numbers = oracle("verl")
    parts = {"token": TIS(), "sequence": TIS(level="sequence"), "icepop": IcePop()}
    for case, part in parts.items():
        c = corrected([part], batch)
        assert torch.equal(c.keep, batch.mask)
        near(c.weight[batch.mask], arrays[f"{name}/weight/{case}/weight"][batch.mask])
        found, theirs = correction_metrics(c, batch.mask), numbers[f"{name}/weight/{case}"]
        near(found["correction/weight_mean"], theirs["rollout_is_mean"])
        near(found["correction/weight_std"], theirs["rollout_is_std"])
        near(found["correction/ess"], theirs["rollout_is_eff_sample_size"])
        if case == "icepop":
            near(found["correction/zero_frac"], theirs["rollout_is_oob_ratio"])
        else:
            normal = batch_normalize(c.weight, batch.mask, case)  # pyright: ignore[reportArgumentType]
            near(normal[batch.mask], arrays[f"{name}/weight/{case}_norm/weight"][batch.mask])


@pytest.mark.parametrize("name", BATCHES)
def test_verl_mismatch_metrics(name: str) -> None:
    _, batch = batch_named("verl", name)
    numbers = oracle("verl")[1]
    found = mismatch_metrics(batch.old_logp, batch.rollout_logp, batch.mask, cap=2.0)
    theirs = numbers[f"{name}/weight/token"]
    for key, ours in NAMES.items():
        near(found[f"mismatch/{ours}"], theirs[key], msg=lambda text, n=ours: f"{n}: {text}")
    debug = numbers[f"{name}/debug"]
    for kind in ("mean", "max", "std"):
        near(found[f"mismatch/prob_absdiff_{kind}"], debug[f"rollout_probs_diff_{kind}"])
    near(found["mismatch/prob_pearson"], debug["rollout_actor_probs_pearson_corr"])


BOUNDS = {
    "token_k1": (0.5, 5.0), "token_k2": (None, 0.1), "token_k3": (None, 0.1), "seq_sum_k1": (0.4, 2.0),
    "seq_sum_k2": (None, 0.6), "seq_sum_k3": (None, 0.6), "seq_mean_k1": (0.9, 1.2), "seq_mean_k2": (None, 0.08),
    "seq_mean_k3": (None, 0.08), "seq_max_k2": (None, 0.4), "seq_max_k3": (None, 0.4),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("options", [*BOUNDS, "seq_mean_k1,token_k2"])
def test_verl_rejection(name: str, options: str) -> None:
    _, batch = batch_named("verl", name)
    parts: list[Part] = []
    for option in options.split(","):
        over, _, stat = option.rpartition("_")
        lo, hi = BOUNDS[option]
        parts.append(Reject(stat=stat, over=over, lo=lo, hi=hi, is_inverse=stat == "k1"))  # pyright: ignore[reportArgumentType]
    arrays, numbers = oracle("verl")
    c = corrected(parts, batch)
    assert torch.equal(c.keep, arrays[f"{name}/rs/{options}/mask"].bool())
    rejected = 1 - correction_metrics(c, batch.mask)["correction/token_kept_frac"]
    near(rejected, numbers[f"{name}/rs/{options}"]["masked_fraction"])


@pytest.mark.parametrize("name", BATCHES)
def test_verl_advantages_and_kl(name: str) -> None:
    arrays = oracle("verl")[0]
    mask, scores, group = (arrays[f"{name}/{field}"] for field in ("mask", "scores", "group"))
    kinds: dict[str, AdvantageKind] = {"grpo": "grpo", "dr_grpo": "dr_grpo", "rloo": "dr_grpo"}
    for case, kind in kinds.items():
        factor = 4 / 3 if case == "rloo" else 1.0
        found = factor * group_advantage(scores, group, kind, 1e-6)
        near(found[:, None] * mask, arrays[f"{name}/adv/{case}/adv"])
    for kind in ("k1", "k2", "k3"):
        logp = arrays[f"{name}/logp"].clone().requires_grad_()
        kl = kl_penalty(logp, arrays[f"{name}/ref"], kind)
        near(kl.detach(), arrays[f"{name}/kl/{kind}/kl"])
        near(torch.autograd.grad(kl.sum(), logp)[0], arrays[f"{name}/kl/{kind}/grad"])


TRL_AGG = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "dapo": "token-mean",
}
TRL_PARTS: dict[str, Part] = {
    "token_truncate": TIS(),
    "token_mask": IcePop(),
    "sequence_truncate": TIS(level="sequence"),
    "sequence_mask": MIS(),
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("loss", TRL_AGG)
@pytest.mark.parametrize("mode", TRL_PARTS)
def test_trl_losses(name: str, loss: str, mode: str) -> None:
    logp, batch = batch_named("trl", name)
    arrays, numbers = oracle("trl")
    case = f"{name}/{loss}/{mode}"
    adv = group_advantage(arrays[f"{name}/scores"], arrays[f"{name}/group"], "grpo", 1e-4)
    near(adv, arrays[f"{case}/adv"])
    batch = replace(batch, adv=adv[:, None].expand(batch.mask.shape).double())
    algo = Algo(agg=TRL_AGG[loss], eps_high=0.28, dual_clip=None)
    c = corrected([TRL_PARTS[mode]], batch, algo)
    applied = torch.where(c.keep, c.weight, 0.0)
    near(applied[batch.mask], arrays[f"{case}/ratio"].expand(batch.mask.shape)[batch.mask])
    found = check("trl", case, logp, batch, c, algo) | mismatch_metrics(
        batch.old_logp, batch.rollout_logp, batch.mask, cap=2.0
    )
    ours = {
        "low_mean": "train/clip_low_frac", "high_mean": "train/clip_high_frac", "region_mean": "train/clip_frac",
        "difference_mean": "mismatch/logp_absdiff_mean", "difference_max": "mismatch/logp_absdiff_max",
    }  # fmt: skip
    for theirs, metric in ours.items():
        near(found[metric], numbers[case][theirs])


@pytest.mark.parametrize("name", BATCHES)
def test_trl_sequence_ratio_and_reward_scaling(name: str) -> None:
    logp, batch = batch_named("trl", name)
    arrays = oracle("trl")[0]
    scores, group = arrays[f"{name}/scores"], arrays[f"{name}/group"]
    kinds: dict[str, AdvantageKind] = {"group": "grpo", "batch": "batch", "none": "dr_grpo"}
    for scale, kind in kinds.items():
        near(group_advantage(scores, group, kind, 1e-4), arrays[f"{name}/scale/{scale}/adv"])
    adv = group_advantage(scores, group, "grpo", 1e-4)
    batch = replace(batch, adv=adv[:, None].expand(batch.mask.shape).double())
    algo = Algo(loss="gspo", eps_high=0.28)
    check("trl", f"{name}/gspo", logp, batch, corrected([MIS()], batch, algo), algo)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["k3", "k3_is"])
def test_trl_kl_with_and_without_the_policy_ratio(name: str, level: str, kind: str) -> None:
    """`use_bias_correction_kl`, beside token and sequence ratios: value and gradient of the whole loss."""
    logp, batch = batch_named("trl", name)
    arrays, numbers = oracle("trl")
    adv = group_advantage(arrays[f"{name}/scores"], arrays[f"{name}/group"], "grpo", 1e-4)
    extras = {"ref_logp": arrays[f"{name}/ref"]}
    batch = replace(batch, adv=adv[:, None].expand(batch.mask.shape).double(), extras=extras)
    algo = Algo(
        loss="gspo" if level == "sequence" else "ppo", agg="seq-mean-token-mean", eps_high=0.28, dual_clip=None,
        kl_coef=0.3, kl_type=kind,
    )  # fmt: skip
    part = MIS() if level == "sequence" else TIS()  # TRL's default at the level of sequences
    check("trl", f"{name}/kl_{kind}/{level}", logp, batch, corrected([part], batch, algo), algo)
    apart = numbers[f"{name}/kl_k3_is/{level}"]["loss"] - numbers[f"{name}/kl_k3/{level}"]["loss"]
    assert abs(apart) > 2e-6


def test_the_oracles_are_not_trivial() -> None:
    """Every mechanism acts somewhere: clips, dual clips, caps, rejections, both signs of the advantage."""
    arrays, numbers = oracle("verl")
    vanilla = [numbers[f"{name}/vanilla/token-mean"] for name in BATCHES]
    assert max(v["pg_clipfrac"] for v in vanilla) > 0.1
    for option in BOUNDS:
        shares = [numbers[f"{name}/rs/{option}"]["masked_fraction"] for name in BATCHES]
        assert any(0 < share < 1 for share in shares), option
    assert (arrays["wild/weight/token/weight"] == 2.0).sum() > 3
    for _, batch in (batch_named("verl", name) for name in BATCHES):
        assert (batch.adv > 0).any() and (batch.adv < 0).any()
        assert start(batch, 0.2, 0.2).keep.sum() == batch.mask.sum()
