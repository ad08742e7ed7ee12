"""Advantages, losses, gradients, correction weights, rejection masks, presets and metrics of verl -> verl.npz."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from log_probs import batches, save
from verl import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.workers.config import ActorConfig, PolicyLossConfig

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
GLOBAL = {"dp_size": 2, "batch_num_tokens": 97, "global_batch_size": 13, "loss_scale_factor": 50}
"""Denominators of a pretended optimizer batch that this batch is a part of."""
CORRECTIONS: dict[str, dict[str, Any]] = {
    "token": {"rollout_is": "token"},
    "sequence": {"rollout_is": "sequence"},
    "token_norm": {"rollout_is": "token", "rollout_is_batch_normalize": True},
    "sequence_norm": {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
    "icepop": {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
}
REJECTIONS = {
    "token_k1": "0.5_5.0", "token_k2": 0.1, "token_k3": 0.1, "seq_sum_k1": "0.4_2.0", "seq_sum_k2": 0.6,
    "seq_sum_k3": 0.6, "seq_mean_k1": "0.9_1.2", "seq_mean_k2": 0.08, "seq_mean_k3": 0.08, "seq_max_k2": 0.4,
    "seq_max_k3": 0.4,
}  # fmt: skip
NARROWED = {"tight": 0.012, "mild": 0.3}
"""Name -> factor on the log-ratios of batch "int4", so that the presets' bounds reject some responses, not all."""
DIVERGENCES = {"dppo_tv": 0.15, "dppo_kl": 0.05}
TAUS = {"default": (1.0, 1.05), "apart": (0.5, 3.0)}
"""Steepness of SAPO's gate for positive and other advantages; the first are verl's defaults."""


def config(low: float = 0.2, high: float = 0.28, dual: float = 3.0, **policy_loss: Any) -> ActorConfig:
    """An actor's configuration, with the clips of DAPO."""
    return ActorConfig(
        strategy="fsdp", rollout_n=4, ppo_mini_batch_size=8, ppo_micro_batch_size_per_gpu=8, clip_ratio=0.2,
        clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=dual, policy_loss=PolicyLossConfig(**policy_loss),
    )  # fmt: skip


def loss_and_gradient(name: str, b: dict[str, Any], cfg: ActorConfig, **extra: Any) -> dict[str, Any]:
    """Value, gradient and metrics of one registered policy loss."""
    logp = torch.tensor(b["logp"], requires_grad=True)
    loss, metrics = core_algos.get_policy_loss_fn(name)(
        log_prob=logp,
        advantages=torch.tensor(b["adv"]),
        config=cfg,
        **{"old_log_prob": torch.tensor(b["old"]), "response_mask": torch.tensor(b["mask"])} | extra,
    )
    (grad,) = torch.autograd.grad(loss, logp)
    wanted = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
    kept = {key.rpartition("/")[2]: metrics[key] for key in wanted if key in metrics}
    return {"loss": loss.item(), "grad": grad.numpy(), **kept}


def losses(b: dict[str, Any]) -> dict[str, Any]:
    """Decoupled, bypass and REINFORCE losses."""
    found: dict[str, Any] = {}
    weight = corrected(b, **CORRECTIONS["token"])[0]
    for agg in AGGREGATIONS:
        found[f"vanilla/{agg}"] = loss_and_gradient("vanilla", b, config(), loss_agg_mode=agg)
        found[f"tis/{agg}"] = loss_and_gradient("vanilla", b, config(), loss_agg_mode=agg, rollout_is_weights=weight)
        part = config()
        part.global_batch_info.update(GLOBAL)
        found[f"global/{agg}"] = loss_and_gradient("vanilla", b, part, loss_agg_mode=agg, rollout_is_weights=weight)
    found["gspo"] = loss_and_gradient("gspo", b, config(), loss_agg_mode="seq-mean-token-mean")
    found["cispo"] = loss_and_gradient("cispo", b, config(), loss_agg_mode="token-mean")
    for kind in ("ppo_clip", "reinforce"):
        for name in ("token", "sequence"):
            for rs in (None, "seq_mean_k3"):
                correction = {"loss_type": kind, "rollout_rs": rs, "rollout_rs_threshold": 0.08, **CORRECTIONS[name]}
                found[f"bypass_{kind}/{name}/{rs or 'none'}"] = loss_and_gradient(
                    "bypass_mode", b, config(rollout_correction=correction), loss_agg_mode="token-mean",
                    old_log_prob=torch.tensor(b["rollout"]),
                )  # fmt: skip
    return found


def corrected(b: dict[str, Any], **options: Any) -> tuple[torch.Tensor | None, torch.Tensor, dict[str, float]]:
    """(weights or None, mask after rejection, metrics without prefix)."""
    options = {"rollout_is_threshold": 2.0} | options
    weights, mask, metrics = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
        torch.tensor(b["old"]), torch.tensor(b["rollout"]), torch.tensor(b["mask"]), **options
    )
    found = None if weights is None else weights.batch["rollout_is_weights"]
    return found, mask, {name.removeprefix("rollout_corr/"): value for name, value in metrics.items()}


def corrections(b: dict[str, Any]) -> dict[str, Any]:
    """Weights, masks and every metric of the correction helper and of the debug helper."""
    found: dict[str, Any] = {}
    for name, options in CORRECTIONS.items():
        weights, _, metrics = corrected(b, **options)
        assert weights is not None
        found[f"weight/{name}"] = {"weight": weights.numpy(), **metrics}
    pairs = {"seq_mean_k1,token_k2": "0.9_1.2,0.1"}
    for option, threshold in (REJECTIONS | pairs).items():
        _, mask, metrics = corrected(b, rollout_rs=option, rollout_rs_threshold=threshold)
        found[f"rs/{option}"] = {"mask": mask.numpy(), "masked_fraction": metrics["rollout_rs_masked_fraction"]}
    tensors = {"rollout_log_probs": b["rollout"], "old_log_probs": b["old"], "response_mask": b["mask"]}
    data = {name: torch.tensor(value) for name, value in tensors.items()} | {"responses": torch.tensor(b["mask"])}
    debug = calculate_debug_metrics(DataProto.from_single_dict(data))
    found["debug"] = {name.removeprefix("training/"): value for name, value in debug.items()}
    return found


def others(b: dict[str, Any]) -> dict[str, Any]:
    """Advantages and KL penalties."""
    rewards = torch.tensor(np.where(np.arange(b["mask"].shape[1]) == 0, b["scores"][:, None], 0.0))
    mask = torch.tensor(b["mask"])
    found: dict[str, Any] = {}
    for name, scale in (("grpo", True), ("dr_grpo", False)):
        adv, _ = core_algos.compute_grpo_outcome_advantage(
            rewards.clone(), mask, b["group"], norm_adv_by_std_in_grpo=scale
        )
        found[f"adv/{name}"] = {"adv": adv.numpy()}
    adv, _ = core_algos.compute_rloo_outcome_advantage(rewards.clone(), mask, b["group"])
    found["adv/rloo"] = {"adv": adv.numpy()}
    for kind in ("k1", "k2", "k3", "k3+"):
        logp = torch.tensor(b["logp"], requires_grad=True)
        kl = core_algos.kl_penalty(logp, torch.tensor(b["ref"]), kind)
        (grad,) = torch.autograd.grad(kl.sum(), logp)
        found[f"kl/{kind}"] = {"kl": kl.detach().numpy(), "grad": grad.numpy()}
    return found


def narrowed() -> dict[str, dict[str, Any]]:
    """Batch "int4" with smaller log-ratios between sampler, old and current policy."""
    b = batches()["int4"]
    return {
        name: b | {field: b["rollout"] + factor * (b[field] - b["rollout"]) for field in ("old", "logp")}
        for name, factor in NARROWED.items()
    }


def preset_configs() -> dict[str, RolloutCorrectionConfig]:
    """Configuration that every factory method returns, by its name; "disabled" corrects nothing."""
    made = inspect.getmembers(RolloutCorrectionConfig, lambda member: inspect.ismethod(member))
    return {name: factory() for name, factory in made if name.startswith(("decoupled", "bypass"))}


def given(chosen: RolloutCorrectionConfig) -> dict[str, Any]:
    """The options of a configuration, without what its base class adds."""
    return {name: value for name, value in asdict(chosen).items() if not name.startswith("_")}


def presets(b: dict[str, Any]) -> dict[str, Any]:
    """Weights, mask, loss and gradient of every preset, with local and with the actor's global denominators."""
    found: dict[str, Any] = {}
    for name, chosen in preset_configs().items():
        options = given(chosen)
        is_bypass, kind = options.pop("bypass_mode"), options.pop("loss_type")
        policy = b | {"old": b["logp"]} if is_bypass else b
        weights, mask, _ = corrected(policy, **options)
        fields: dict[str, Any] = {"mask": mask.numpy()}
        if weights is not None:
            fields["weight"] = weights.numpy()
        for case, total in (("local", {}), ("global", GLOBAL)):
            cfg = config(rollout_correction=options | {"loss_type": kind}) if is_bypass else config()
            cfg.global_batch_info.update(total)
            if is_bypass:
                extra = {"old_log_prob": torch.tensor(b["rollout"])}
            else:
                extra = {"response_mask": mask, "rollout_is_weights": weights}
            loss = "bypass_mode" if is_bypass else "vanilla"
            result = loss_and_gradient(loss, b, cfg, loss_agg_mode="token-mean", **extra)
            fields |= {f"{case}_loss": result["loss"], f"{case}_grad": result["grad"]}
        found[f"preset/{name}"] = fields
    return found


def divergences(b: dict[str, Any]) -> dict[str, Any]:
    """DPPO against the sampler, and against the old policy with token weights."""
    found: dict[str, Any] = {}
    anchors: dict[str, dict[str, Any]] = {
        "rollout": {"old_log_prob": torch.tensor(b["rollout"])},
        "old": {"rollout_is_weights": corrected(b, **CORRECTIONS["token"])[0]},
    }
    for name, delta in DIVERGENCES.items():
        for anchor, extra in anchors.items():
            cfg = config(low=delta, high=delta, dual=20.0)
            found[f"{name}/{anchor}"] = loss_and_gradient(name, b, cfg, loss_agg_mode="token-mean", **extra)
    return found


def gates(b: dict[str, Any]) -> dict[str, Any]:
    """SAPO, with and without token weights, with local and with global denominators."""
    found: dict[str, Any] = {}
    weight = corrected(b, **CORRECTIONS["token"])[0]
    for name, (tau_pos, tau_neg) in TAUS.items():
        for case, extra, total in (
            ("plain", {}, {}), ("tis", {"rollout_is_weights": weight}, {}),
            ("global", {"rollout_is_weights": weight}, GLOBAL),
        ):  # fmt: skip
            cfg = replace(config(), tau_pos=tau_pos, tau_neg=tau_neg)
            cfg.global_batch_info.update(total)
            found[f"sapo/{name}/{case}"] = loss_and_gradient("sapo", b, cfg, **extra)
    return found


def main() -> None:
    """Every batch through every function."""
    answers: dict[str, dict[str, Any]] = {}
    for name, b in batches().items():
        answers |= {f"{name}/{case}": fields for case, fields in (losses(b) | corrections(b) | others(b)).items()}
        answers |= {f"{name}/{case}": fields for case, fields in (divergences(b) | gates(b)).items()}
    for name, b in (narrowed() | {"wild": batches()["wild"]}).items():
        answers |= {f"{name}/{case}": fields for case, fields in presets(b).items()}
    names = ("mask", "rollout", "old", "logp", "adv")
    answers |= {name: {field: b[field] for field in names} for name, b in narrowed().items()}
    configs = {name: given(chosen) for name, chosen in preset_configs().items()}
    answers["presets"] = {"configs": np.array(json.dumps(configs))}
    save("verl", version("verl"), answers)


if __name__ == "__main__":
    main()
