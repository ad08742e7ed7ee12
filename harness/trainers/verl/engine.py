"""verl's FSDP engine around our decoder: the modules, wrapping and optimizer of the local trainer, sharded.

    build     rank 0 reads the prepared model, every part wraps it, FSDP shards it
    forward   token ids -> logits; what the tokenizer does not know is masked, as verl masks it in the sampler
    update    denominators of the whole mini-batch over all ranks; our schedule, stepped per update
    push      float32 masters by checkpoint names

Left out: Ulysses, removed padding, offloading of single layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import torch
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from transformers.modeling_outputs import CausalLMOutput
from verl.utils import tensordict_utils as tu
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from harness.loss import count_totals
from harness.models.adapters import checkpoint_name, named_weights
from harness.models.decoder import Decoder
from harness.trainers.local import parameter_groups, schedule
from harness.trainers.verl.job import current_job, current_method
from harness.trainers.verl.reference import policy_of
from harness.trainers.verl.settings import ROLLOUT
from harness.trainers.verl.support import num_updates

TOTALS = "lowbit_totals"
"""Counts of one mini-batch over all ranks, beside its tensors."""
COUNTED = ("num_tokens", "num_sequences", "num_kept_tokens", "num_kept_sequences")


class Policy(nn.Module):
    """Our decoder as verl calls a transformers model."""

    _no_split_modules: ClassVar[list[str]] = ["Layer"]

    def __init__(self, decoder: Decoder, config: Any, num_tokens: int) -> None:
        super().__init__()
        self.decoder, self.config, self.num_tokens = decoder, config, num_tokens

    def can_generate(self) -> bool:
        """verl asks before it writes a generation config."""
        return False

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutput:
        """[B, L] int64, right padded -> logits [B, L, V]; ids beyond the tokenizer have probability 0."""
        return CausalLMOutput(logits=cast(Any, mask_unknown(self.decoder(input_ids), self.num_tokens)))


def mask_unknown(logits: Tensor, num_tokens: int) -> Tensor:
    """Logits [..., V] with the ids from `num_tokens` on at the smallest finite value: probability and gradient 0.

    verl's rollout never samples what the tokenizer does not know (`monkey_patch_compute_logits`), so a trainer that
    spreads probability over a padded vocabulary sees every ratio shifted by the log of that share.
    """
    if logits.shape[-1] <= num_tokens:
        return logits
    unknown = torch.arange(logits.shape[-1], device=logits.device) >= num_tokens
    return logits.masked_fill(unknown, torch.finfo(logits.dtype).min)


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device=["cuda", "cpu"], vendor=ROLLOUT)
class Engine(FSDPEngineWithLMHead):
    """One rank's share of the policy, or of the frozen reference."""

    def _build_module(self) -> nn.Module:
        job = current_job()
        decoder = policy_of(job, current_method())
        self.names = [(checkpoint_name(name), name) for name, _ in decoder.named_parameters()]
        return Policy(decoder, self.model_config.hf_config, job.num_tokens)

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        built, config = super()._build_fsdp_module(module), current_job().config.trainer
        if self.scaler is not None:
            self.scaler = ShardedGradScaler(init_scale=config.loss_scale, growth_interval=config.loss_scale_interval)
        return built

    def _build_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        config, composed = current_job().config.trainer, current_method()
        decoder = cast(Decoder, module.get_submodule("decoder"))
        assert config.lr is not None
        groups = parameter_groups(decoder, composed.lr_factor)
        for group in groups:
            group["lr"] = config.lr * group["lr_factor"]
        return torch.optim.AdamW(groups, betas=config.betas, eps=1e-8, weight_decay=config.weight_decay)

    def _build_lr_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        config = current_job().config
        total = config.trainer.steps * num_updates(config)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: schedule(config.trainer, update, total))

    def optimizer_step(self) -> float:
        """One update, after which the schedule goes on; a step that loss scaling skipped does not count."""
        norm = super().optimizer_step()
        if norm == norm and norm not in (float("inf"), float("-inf")):
            self.lr_scheduler.step()
        return norm

    def lr_scheduler_step(self) -> float:
        """The learning rate in force; `optimizer_step` advances it."""
        return self.lr_scheduler.get_last_lr()[0]

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any], forward_only: bool = False
    ) -> Any:
        """verl's, with the counts of the whole mini-batch beside the tensors."""
        if "lowbit_keep" in data.keys():  # noqa: SIM118 - a TensorDict iterates over rows
            tu.assign_non_tensor_data(data, TOTALS, self._totals(data))
        return super().forward_backward_batch(data, loss_function, forward_only)

    def _totals(self, data: TensorDict) -> dict[str, int]:
        mask = data["loss_mask"].to_padded_tensor(0).bool()
        keep = data["lowbit_keep"].to_padded_tensor(0).bool()
        own = vars(count_totals(mask, keep, 0))
        counts = torch.tensor([own[name] for name in COUNTED], device=data["loss_mask"].device)
        torch.distributed.all_reduce(counts, group=self.get_data_parallel_group())
        return dict(zip(COUNTED, counts.tolist(), strict=True))

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0,
        max_ckpt_to_keep: int | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        """verl's; after the last step rank 0 also leaves the weights whole, for what reads a run's end."""
        super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep, **kwargs)
        job = current_job()
        if global_step < job.config.trainer.steps:
            return
        whole = {name: tensor.cpu().contiguous() for name, tensor in self._weights()}
        if torch.distributed.get_rank() == 0:
            save_file(whole, str(job.final_file))

    def get_per_tensor_param(self, layered_summon: bool = False, base_sync_done: bool = False, **_: Any) -> Any:
        """(the weight stream of the local trainer, None): every rank must read it whole, in order."""
        return self._weights(), None

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        decoder = cast(Decoder, self.module.get_submodule("decoder"))
        for name, tensor in named_weights(decoder):
            tensor = tensor.detach()
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
