"""Methods of verl (presets, DPPO, SAPO) and TRL (SAPO, VESPO, off-policy mask) against their own answers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.api import Part, TokenBatch
from harness.objective.advantage import group_advantage
from harness.objective.loss import Totals, count_totals, policy_loss
from methods.dppo import DPPO, KL, TV, Anchor
from methods.flashrl import TIS
from methods.opsm import OPSM
from methods.sapo import METHOD as SAPO_METHOD
from methods.sapo import SAPO
from methods.verl_presets import METHODS
from methods.vespo import METHOD as VESPO_METHOD
from methods.vespo import VESPO
from tests.loss_cases import Algo, corrected
from tests.objective.test_oracles_losses import BATCHES, batch_named, near, oracle
from tests.objective_cases import objective, updated
from tests.source_tree import ROOT

PRESET_BATCHES = ("tight", "mild", "wild")
"""Rejecting some responses by the geometric mean, some by k3, some by the product."""
PRESETS = {method.name.removeprefix("verl_"): method for method in METHODS.values()}
GLOBAL = 97
"""Tokens of the pretended optimizer batch that the stored batch is a part of, on two ranks."""


def verl_configs() -> dict[str, dict[str, Any]]:
    """Configurations that verl's factory methods return."""
    with np.load(ROOT / "tests" / "oracles" / "verl.npz") as file:
        return json.loads(str(file["presets/configs"]))


def preset_loss(name: str, logp: Tensor, batch: TokenBatch, totals: Totals | None, denom: str) -> tuple[Tensor, Tensor]:
    """(loss, gradient) of a preset at one update, as the loop composes it."""
    method = PRESETS[name]
    algo = Algo(mode=method.mode or "", eps_high=0.28, denom=denom)
    live = batch if algo.mode == "decoupled" else replace(batch, old_logp=logp.detach())
    c = corrected(method.parts, live, algo)
    if algo.mode == "bypass_ppo":
        batch = replace(batch, old_logp=batch.rollout_logp)
    loss, _ = policy_loss(logp, batch, c, totals or count_totals(batch.mask, c.keep, 16), algo)
    return loss.detach(), torch.autograd.grad(loss, logp)[0]


def test_every_preset_of_verl_is_here_and_has_its_thresholds() -> None:
    configs = verl_configs()
    assert set(configs) == set(PRESETS)
    losses = {("ppo_clip", True): "bypass_ppo", ("reinforce", True): "bypass_pg", ("ppo_clip", False): "decoupled"}
    for name, chosen in configs.items():
        method = PRESETS[name]
        assert method.mode == losses[chosen["loss_type"], chosen["bypass_mode"]]
        assert method.denom == ("kept" if method.mode == "decoupled" else "original")  # what verl's actor divides by
        parts = {type(part).__name__: part for part in method.parts}
        expected: set[str] = set()
        if chosen["rollout_is"]:
            low, _, high = str(chosen["rollout_is_threshold"]).rpartition("_")
            expected.add("IcePop" if low else "TIS")
            weight: Any = parts["IcePop" if low else "TIS"]
            assert weight.level == chosen["rollout_is"] if not low else weight.alpha == float(low)
            assert float(high) == (weight.beta if low else weight.cap)
        if chosen["rollout_rs"]:
            (rejection,) = (part for part in method.parts if not part.sets_weight)
            expected.add(type(rejection).__name__)
            found: Any = rejection
            assert f"{found.over}_{found.stat}" == chosen["rollout_rs"]
            low, _, high = str(chosen["rollout_rs_threshold"]).rpartition("_")
            assert (found.lo, found.hi) == (float(low) if low else None, float(high))
        assert set(parts) == expected and not chosen["rollout_is_batch_normalize"]


@pytest.mark.parametrize("batch_name", PRESET_BATCHES)
@pytest.mark.parametrize("name", PRESETS)
def test_presets_equal_verl(batch_name: str, name: str) -> None:
    logp, batch = batch_named("verl", batch_name)
    arrays, numbers = oracle("verl")
    case, method = f"{batch_name}/preset/{name}", PRESETS[name]
    live = batch if method.mode == "decoupled" else replace(batch, old_logp=logp.detach())
    c = corrected(method.parts, live)
    assert torch.equal(c.keep, arrays[f"{case}/mask"].bool())
    if f"{case}/weight" in arrays:
        near(c.weight[batch.mask], arrays[f"{case}/weight"][batch.mask])
    else:
        assert (c.weight == 1).all()
    loss, grad = preset_loss(name, logp, batch, None, "kept")
    if c.keep.any():
        near(loss.item(), numbers[case]["local_loss"])
        near(grad, arrays[f"{case}/local_grad"])
    else:  # verl divides 0 by 0
        assert np.isnan(numbers[case]["local_loss"]) and loss == 0 and (grad == 0).all()
    is_kept = method.denom == "kept"
    totals = Totals(
        num_tokens=0 if is_kept else GLOBAL, num_kept_tokens=GLOBAL if is_kept else 0, num_sequences=0,
        num_kept_sequences=0, max_len=16, dp_size=2,
    )  # fmt: skip
    loss, grad = preset_loss(name, logp, batch, totals, method.denom or "")
    near(loss.item(), numbers[case]["global_loss"])
    near(grad, arrays[f"{case}/global_grad"])


def test_the_presets_act_and_differ() -> None:
    """Each rejects some responses but not all on some batch, if it rejects; no two give one gradient everywhere."""
    arrays = oracle("verl")[0]
    for name, chosen in verl_configs().items():
        shares = [arrays[f"{b}/preset/{name}/mask"].sum() / arrays[f"{b}/mask"].sum() for b in PRESET_BATCHES]
        assert any(0 < share < 1 for share in shares) == bool(chosen["rollout_rs"]), name
    grads = [torch.cat([arrays[f"{b}/preset/{n}/global_grad"].flatten() for b in PRESET_BATCHES]) for n in PRESETS]
    assert all(not torch.equal(a, b) for i, a in enumerate(grads) for b in grads[:i])


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("method", [TV, KL], ids=lambda m: m.name)
@pytest.mark.parametrize("anchor", ["rollout", "old"])
def test_verl_dppo(name: str, method: Any, anchor: Anchor) -> None:
    """Against the sampler; against the old policy with token weights (verl outside its bypass mode)."""
    logp, batch = batch_named("verl", name)
    arrays, numbers = oracle("verl")
    part = replace(method.parts[0], mask_anchor=anchor, ratio_anchor=anchor)
    assert isinstance(part, DPPO)
    parts: list[Part] = [part] if anchor == "rollout" else [TIS(), part]
    case = f"{name}/{method.name}/{anchor}"
    loss, grad = objective(parts, logp, batch)
    near(loss.item(), numbers[case]["loss"])
    near(grad, arrays[f"{case}/grad"])
    masked = 1 - updated(parts, logp, batch).keep.sum().item() / batch.mask.sum().item()
    near(masked, numbers[case]["pg_clipfrac"])
    assert masked > 0.04 or name == "near"


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("case", ["plain", "tis", "global"])
@pytest.mark.parametrize(("taus", "part"), [("default", SAPO()), ("apart", SAPO(tau_pos=0.5, tau_neg=3.0))])
def test_verl_sapo(name: str, case: str, taus: str, part: SAPO) -> None:
    logp, batch = batch_named("verl", name)
    parts: list[Part] = [part] if case == "plain" else [TIS(), part]
    totals = Totals(num_tokens=97, num_sequences=13, num_kept_tokens=0, num_kept_sequences=0, max_len=50, dp_size=2)
    algo = Algo(agg="seq-mean-token-mean")
    loss, grad = objective(parts, logp, batch, algo, totals if case == "global" else None)
    arrays, numbers = oracle("verl")
    near(loss.item(), numbers[f"{name}/sapo/{taus}/{case}"]["loss"])
    near(grad, arrays[f"{name}/sapo/{taus}/{case}/grad"])
    assert not torch.allclose(grad, objective([TIS()], logp, batch, algo)[1], rtol=1e-2)


@pytest.mark.parametrize("name", BATCHES)
def test_trl_sapo(name: str) -> None:
    logp, batch = batch_named("trl", name)
    arrays, numbers = oracle("trl")
    adv = group_advantage(arrays[f"{name}/scores"], arrays[f"{name}/group"], "grpo", 1e-4)
    batch = replace(batch, adv=adv[:, None].expand(batch.mask.shape).double())
    loss, grad = objective([TIS(), *SAPO_METHOD.parts], logp, batch, Algo(agg="seq-mean-token-mean"))
    near(loss.item(), numbers[f"{name}/sapo"]["loss"])
    near(grad, arrays[f"{name}/sapo/grad"])


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("case", ["capped", "plain"])
def test_trl_vespo_weight(name: str, case: str) -> None:
    """The gradient of the loss is -phi A over the number of tokens."""
    logp, batch = batch_named("trl_methods", name)
    _, grad = objective(VESPO_METHOD.parts if case == "capped" else [VESPO()], logp, batch)
    phi = oracle("trl_methods")[0][f"{name}/vespo/{case}/phi"].expand_as(grad)
    near(grad[batch.mask], (-phi * batch.adv)[batch.mask] / batch.mask.sum())
    assert phi.max() > 0.05 and phi.min() < 0.9


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("anchor", ["rollout", "old"])
@pytest.mark.parametrize("delta", [0.0, 0.05, 0.5])
def test_trl_off_policy_mask(name: str, anchor: Anchor, delta: float) -> None:
    logp, batch = batch_named("trl_methods", name)
    keep = updated([OPSM(anchor=anchor, delta=delta)], logp, batch).keep
    theirs = oracle("trl_methods")[0][f"{name}/opsm/{anchor}/{delta}/keep"].bool()
    assert torch.equal(keep, batch.mask & theirs)


def test_the_off_policy_masks_are_not_trivial() -> None:
    masks = {key: x for key, x in oracle("trl_methods")[0].items() if "/opsm/" in key}
    for anchor in ("rollout", "old"):
        assert any(0 < x.sum() < x.numel() for key, x in masks.items() if f"/{anchor}/" in key)
