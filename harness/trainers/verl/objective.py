"""Our loss inside verl's worker, and the driver's side of it: what of a batch travels, and how it is read back.

The driver computes advantages and corrections over the whole batch and stores them beside verl's own columns; the
worker reads them with the raw log-probs of the sampler, which verl's own loss never sees.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.utils.padding import no_padding_2_padding

from harness.api import Correction, Step, TokenBatch
from harness.objective.loss import Totals
from harness.trainers.corrected_step import method_loss
from harness.trainers.verl.engine import TOTALS
from harness.trainers.verl.job import current_job, current_method

FIELDS = ("weight", "keep", "clip_low", "clip_high")
"""Fields of a `Correction`, stored under the prefix."""
PREFIX = "lowbit_"
STEP = "lowbit_step"
"""[B] int64: policy steps taken before the batch."""


def columns(correction: Correction, batch: TokenBatch) -> dict[str, Tensor]:
    """Columns that the driver stores of an update's rows: [b, T] each, and the step of every row."""
    adv = batch.adv if correction.adv_shift is None else batch.adv + correction.adv_shift
    found = {f"{PREFIX}{name}": getattr(correction, name).float() for name in FIELDS}
    found |= {"advantages": adv.contiguous(), "loss_mask": batch.mask.long()}
    return found | {STEP: torch.full((len(correction.weight),), batch.step.index)}


def loss(model_output: dict[str, Any], data: TensorDict, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
    """One micro-batch's share of the loss, and its sums. verl adds shares up and averages gradients over ranks.

    Raises RuntimeError where a column of the driver, or the sampler's log-probs, did not arrive.
    """
    job, composed = current_job(), current_method()
    logp = no_padding_2_padding(model_output["log_probs"], data).float()
    entropy = model_output.get("entropy")
    entropy = None if entropy is None else no_padding_2_padding(entropy, data).float()
    batch, correction = unpack(data)
    counts = tu.get_non_tensor_data(data=data, key=TOTALS, default=None)
    if counts is None:
        raise RuntimeError("the counts of the mini-batch did not reach the loss: the engine is not ours")
    dp_size = int(data["dp_size"])
    totals = Totals(**counts, max_len=job.max_new_tokens, dp_size=dp_size)
    total, sums = method_loss(composed, logp, batch, correction, totals, job.algo, entropy)
    # verl averages metrics over ranks after it has summed them over micro-batches.
    values = {name: float(value) * dp_size for name, value in sums.items()} | {"loss": float(total.detach())}
    return total, {f"{PREFIX}{name}": Metric(aggregation="sum", value=value) for name, value in values.items()}


def unpack(data: TensorDict) -> tuple[TokenBatch, Correction]:
    """The token batch and the correction of a micro-batch of verl, [b, T] each. Raises RuntimeError for a column that
    did not arrive."""
    named = ("responses", "loss_mask", "advantages", "rollout_log_probs", "old_log_probs")
    wanted = (*named, *(f"{PREFIX}{name}" for name in FIELDS))
    if missing := [name for name in (*wanted, STEP) if name not in data.keys()]:  # noqa: SIM118
        raise RuntimeError(f"the batch has no {missing[0]}")
    dense = {name: _dense(data[name]) for name in wanted}
    extras = {"ref_logp": _dense(data["ref_log_prob"])} if "ref_log_prob" in data.keys() else {}  # noqa: SIM118
    job = current_job()
    step = Step(index=int(data[STEP].flatten()[0]), total=job.config.trainer.steps, seed=job.config.seed)
    batch = TokenBatch(
        token_ids=dense["responses"], mask=dense["loss_mask"].bool(), adv=dense["advantages"].float(),
        rollout_logp=dense["rollout_log_probs"].float(), old_logp=dense["old_log_probs"].float(), step=step,
        extras=extras,
    )  # fmt: skip
    weight, keep, low, high = (dense[f"{PREFIX}{name}"] for name in FIELDS)
    return batch, Correction(weight=weight, keep=keep.bool(), clip_low=low, clip_high=high)


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_padded_tensor(0) if tensor.is_nested else tensor
