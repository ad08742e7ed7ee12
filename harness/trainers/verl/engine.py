"""verl's FSDP engine around our decoder: the modules, wrapping and optimizer of the local trainer, sharded.

    build     rank 0 reads the prepared model, the others stay on the meta device; every part wraps it, FSDP shards it
              and each rank gets its shards from rank 0; parameters are float32 in use, and frozen ones that bfloat16
              holds exactly rest in it (`trainers/at_rest.py`)
    forward   sequences end to end, without padding, by the local trainer's pass -> log-prob and entropy of every
              response token; what the tokenizer does not know has probability 0, as verl masks it in the sampler
              and where ranks share a sequence each has a piece of the row (`ulysses.py`)
    update    denominators of the whole mini-batch over all ranks; our schedule, stepped per update
    push      float32 masters by checkpoint names, with `algo.staleness` those of an earlier step (`past.py`)

Left out: offloading of single layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_torch_device
from verl.utils.fsdp_utils import load_fsdp_optimizer, offload_fsdp_optimizer
from verl.utils.metric import Metric
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from harness.api import Sequences
from harness.foundation.state_files import load_state, save_state
from harness.foundation.whole_file import write_atomic
from harness.foundation.whole_folder import replacing
from harness.models.adapters import named_weights
from harness.models.decoder import Decoder, rope_tables
from harness.models.shards import write_shards
from harness.objective.loss import count_totals
from harness.trainers.at_rest import frozen_in_bf16
from harness.trainers.local.forward import Thrift, forward, prepared
from harness.trainers.local.policy import computing, is_loss_scaled
from harness.trainers.local.products import products, use_fp8
from harness.trainers.local.trainer import parameter_groups, schedule
from harness.trainers.verl import ulysses
from harness.trainers.verl.job import VerlJob, current_job, current_method
from harness.trainers.verl.past import Past, Stream, whole
from harness.trainers.verl.reference import policy_of
from harness.trainers.verl.settings import ROLLOUT

TOTALS = "lowbit_totals"
"""Counts of one mini-batch over all ranks, beside its tensors."""
LOSS_SCALE = "lowbit_loss_scale"
"""Metric of an update: FP16's loss scale; 1 without scaling."""
VERSION = "lowbit_version"
"""Steps behind the weights that a forward pass is asked of, where those are not the trainer's own."""
COUNTED = ("num_tokens", "num_sequences", "num_kept_tokens", "num_kept_sequences")


class Policy(nn.Module):
    """Our decoder as verl calls a transformers model."""

    _no_split_modules: ClassVar[list[str]] = ["Layer"]

    def __init__(self, decoder: Decoder, config: Any, job: VerlJob) -> None:
        super().__init__()
        self.decoder, self.config, self.num_tokens = decoder, config, job.num_tokens
        self.thrift, self.temperature = thrift_of(job), job.config.engine.temperature
        self.wants_entropy_grad = job.algo.entropy_coef != 0
        self.group: ProcessGroup | None = None
        """Ranks that share every sequence, where there are several."""

    def can_generate(self) -> bool:
        """verl asks before it writes a generation config."""
        return False

    def forward(self, seqs: Sequences, **_: Any) -> tuple[Tensor, Tensor]:
        """(log-prob [M], entropy [M]) of the M sampled tokens, row by row, float32 nats.

        verl's rollout never samples what the tokenizer does not know (`monkey_patch_compute_logits`), so a trainer that
        spreads probability over a padded vocabulary would see every ratio shifted by the log of that share.
        """
        wanted: dict[str, Any] = {
            "temperature": self.temperature, "entropy_grad": self.wants_entropy_grad, "num_tokens": self.num_tokens
        }  # fmt: skip
        if self.group is not None:
            return ulysses.forward(self.decoder, seqs, self.thrift, self.group, **wanted)
        found = forward(self.decoder, seqs, self.thrift, is_fixed=False, wants_logits=False, **wanted)
        return found.logp[seqs.sampled], found.entropy[seqs.sampled]  # FSDP hangs its hooks on tensors that are no view


def thrift_of(job: VerlJob) -> Thrift:
    """The launch's settings, without padding."""
    return replace(Thrift.of(job.launch, job.config.trainer), packing=not job.is_padded)


def sequences(micro_batch: TensorDict) -> Sequences:
    """Rows of verl's sequences of their own lengths."""
    ids, responses = micro_batch["input_ids"], micro_batch["responses"]
    new, tokens = responses.offsets().diff(), responses.to_padded_tensor(0)
    return Sequences(
        ids=ids.to_padded_tensor(0), prompt_lens=ids.offsets().diff() - new, token_ids=tokens,
        sampled=torch.arange(tokens.shape[1], device=tokens.device) < new[:, None],
    )  # fmt: skip


@contextmanager
def drawn_weights() -> Iterator[None]:
    """Context in which verl's engine draws a sharded model's weights instead of spreading those of rank 0."""
    theirs = transformer_impl.fsdp2_load_full_state_dict
    transformer_impl.fsdp2_load_full_state_dict = _draw
    try:
        yield
    finally:
        transformer_impl.fsdp2_load_full_state_dict = theirs


@torch.no_grad()
def _draw(model: Policy, full_state: Any, mesh: Any = None, offload: Any = None) -> None:
    """Matrices from N(0, 0.02^2), gains 1, biases and the second matrices of adapters 0: each rank its own shards.
    Raises ValueError for a model with codes or scales, which cannot be drawn."""
    model.to_empty(device=get_device_id())
    draws = torch.Generator(next(model.parameters()).device).manual_seed(torch.distributed.get_rank())
    for name, parameter in model.named_parameters():
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if parameter.dim() == 2 and "lora_B" not in name:
            own.normal_(0.0, 0.02, generator=draws)
        else:
            own.fill_(float(parameter.dim() == 1 and not name.endswith("bias")))
    cos, sin = rope_tables(model.decoder.config, len(model.decoder.get_buffer("_cos")))
    tables: dict[str, Tensor] = {"_cos": cos, "_sin": sin}
    for name, buffer in model.named_buffers():
        if (table := tables.get(name.rpartition(".")[2])) is None:
            raise ValueError(f"{name} of a model without weights cannot be drawn")
        buffer.copy_(table)
    if offload is not None:
        model.to("cpu")
        for buffer in model.buffers():
            buffer.data = buffer.data.to(get_device_id())


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device=["cuda", "cpu"], vendor=ROLLOUT)
class Engine(FSDPEngineWithLMHead):
    """One rank's share of the policy, or of the frozen reference."""

    def _build_module(self) -> nn.Module:
        job, composed = current_job(), current_method()
        decoder = policy_of(job, composed, is_empty=self.rank != 0 or job.is_drawn)
        decoder = prepared(computing(decoder, composed.plan), thrift_of(job))  # the frozen reference as the policy
        use_fp8(decoder, job.config.trainer.device, job.launch.fp8_kernels)
        if torch.distributed.get_rank() == 0 and not self.engine_config.forward_only:
            write_atomic(job.products_file, json.dumps(products(decoder)).encode())
        frozen_in_bf16(decoder.requires_grad_(False) if self.engine_config.forward_only else decoder)
        policy = Policy(decoder, self.model_config.hf_config, job)
        policy.group = self.ulysses_parallel_group
        return policy

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        """Raises RuntimeError where verl would cast parameters or put autocast around us: settings say float32."""
        job = current_job()
        with drawn_weights() if job.is_drawn else nullcontext():
            built, config = super()._build_fsdp_module(module), job.config.trainer
        trained = (p for p in built.parameters() if p.is_floating_point() and p.requires_grad)
        dtypes = {self._autocast_dtype, *(p.dtype for p in trained)}
        if dtypes != {torch.float32}:
            raise RuntimeError(f"verl computes in {sorted(map(str, dtypes))}; our modules cast by themselves")
        if is_loss_scaled(current_method().plan):
            # Not verl's ShardedGradScaler: it is FSDP1's, and its sum over ranks breaks AdamW's fused step.
            self.scaler = torch.amp.GradScaler(
                config.device, init_scale=config.loss_scale, growth_interval=config.loss_scale_interval
            )
        return built

    def _build_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        config, composed = current_job().config.trainer, current_method()
        decoder = cast(Decoder, module.get_submodule("decoder"))
        assert config.lr is not None
        groups = parameter_groups(decoder, composed.lr_factor)
        for group in groups:
            group["lr"] = config.lr * group["lr_factor"]
        # As the local trainer's, and without the copies of all weights that an unfused update makes on a GPU.
        return torch.optim.AdamW(groups, betas=config.betas, eps=1e-8, weight_decay=config.weight_decay, fused=True)

    def _build_lr_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        config = current_job().config
        total = config.trainer.steps * config.algo.num_updates
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: schedule(config.trainer, update, total))

    def eval_mode(self, **kwargs: Any) -> Any:
        """verl's context of a pass without gradients; the first after a rollout tells what the trainer kept of its GPU
        meanwhile."""
        if self.rank == 0 and not self.engine_config.forward_only and (kept := get_torch_device().memory_allocated()):
            write_atomic(current_job().rest_file, json.dumps({"memory/rest_gib": kept / 2**30}).encode())
        return super().eval_mode(**kwargs)

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        """False for verl, which would fetch the moments before a batch's passes: `optimizer_step` does after them."""
        return False

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move as verl does, and wait for copies to the host, which are asynchronous: `Past.keep` reads them there."""
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        if device == "cpu":
            get_torch_device().synchronize()

    def train_batch(self, data: TensorDict, loss_function: Callable[..., Any]) -> Any:
        """Run verl's method, with the loss scale that the update had among its metrics."""
        scaler = self.scaler
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        outputs = super().train_batch(data, loss_function)
        if self.is_mp_src_rank_with_outputs():
            outputs["metrics"][LOSS_SCALE] = Metric(aggregation="mean", value=scale)
        return outputs

    def optimizer_step(self) -> float:
        """Take one update, after which the schedule goes on; a step that loss scaling skipped does not count. Moments
        that rest on the host are here for it alone, when no activation is."""
        assert self.optimizer is not None
        if self._is_offload_optimizer:
            load_fsdp_optimizer(self.optimizer, get_device_id())
        norm = super().optimizer_step()
        if self._is_offload_optimizer:
            offload_fsdp_optimizer(self.optimizer)
            get_torch_device().synchronize()  # the copies are asynchronous, and a checkpoint reads them
        if norm == norm and norm not in (float("inf"), float("-inf")):
            self.lr_scheduler.step()
        return norm

    def lr_scheduler_step(self) -> float:
        """The learning rate in force; `optimizer_step` advances it."""
        return self.lr_scheduler.get_last_lr()[0]

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any], forward_only: bool = False
    ) -> Any:
        """Run verl's method with the counts of the whole mini-batch beside the tensors, and with the weights of the
        step that is asked for."""
        if "lowbit_keep" in data.keys():  # noqa: SIM118 - a TensorDict iterates over rows
            tu.assign_non_tensor_data(data, TOTALS, self._totals(data))
        version = tu.get_non_tensor_data(data=data, key=VERSION, default=None)
        with nullcontext() if version is None else self.past.holding(self.module, int(version)):
            return super().forward_backward_batch(data, loss_function, forward_only)

    @cached_property
    def past(self) -> Past:
        """This rank's shards of earlier versions."""
        return Past(current_job().config.algo.staleness, cast(Decoder, self.module.get_submodule("decoder")))

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(arguments of `Policy.forward`, which of the tokens end to end predict one of a response)."""
        seqs = sequences(micro_batch)
        first = cast(Tensor, seqs.prompt_lens)[:, None]
        at, size = torch.arange(seqs.ids.shape[1], device=seqs.ids.device), first + seqs.sampled.sum(1, keepdim=True)
        predicts = (at >= first - 1) & (at < size - 1)
        return {"seqs": seqs}, {"predicts": predicts[at < size]}

    def prepare_model_outputs(
        self, output: tuple[Tensor, Tensor], output_args: dict[str, Tensor], micro_batch: TensorDict, *_: Any, **__: Any
    ) -> dict[str, Tensor]:
        """Outputs as verl lays them out: a value per token of whole sequences, at its predecessor's place; 0 elsewhere.

        What was not asked for is left out: the reference's entropy would take the place of the policy's.
        """
        offsets, at = micro_batch["input_ids"].offsets(), output_args["predicts"]
        named = dict(zip(("log_probs", "entropy"), output, strict=True))
        if not tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False):
            del named["entropy"]
        full = {name: values.new_zeros(at.shape).masked_scatter(at, values) for name, values in named.items()}
        return {name: torch.nested.nested_tensor_from_jagged(values, offsets) for name, values in full.items()}

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
        """Save verl's checkpoint, the earlier versions and the loss scale; after the last step rank 0 also writes the
        whole weights, which the end of a run is read from."""
        super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep, **kwargs)
        job = current_job()
        self.past.save(self._rank_file(local_path, "past"), global_step)
        if self.scaler is not None:  # verl's checkpoints have no loss scale
            save_state(self._rank_file(local_path, "scaler"), self.scaler.state_dict())
        if global_step >= job.config.trainer.steps:
            self.save_final()

    def save_final(self) -> None:
        """Write the whole weights. Every rank must ask for each tensor; rank 0 alone writes them and has one file's
        worth in memory at a time."""
        if self.rank == 0:
            with replacing(current_job().final_folder) as folder:
                write_shards(folder, self._weights())
        else:
            for _ in self._weights():
                pass

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **kwargs: Any
    ) -> None:
        """Load verl's checkpoint, the earlier versions and the loss scale. Raises ValueError where those are not
        whole."""
        self.past.load(self._rank_file(local_path, "past"))
        if self.scaler is not None:
            self.scaler.load_state_dict(load_state(self._rank_file(local_path, "scaler")))
        super().load_checkpoint(local_path, hdfs_path, del_local_after_load, **kwargs)

    def _rank_file(self, folder: str, what: str) -> Path:
        return Path(folder) / f"{what}_rank_{torch.distributed.get_rank()}.pt"

    def get_per_tensor_param(self, layered_summon: bool = False, base_sync_done: bool = False, **_: Any) -> Any:
        """(the weight stream of the local trainer, None): every rank must read it whole, in order. Shards that rest on
        the host are fetched one by one."""
        return Stream(self._weights, self.past, get_device_id()), None

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        decoder = cast(Decoder, self.module.get_submodule("decoder"))
        for name, tensor in named_weights(decoder):
            yield name, whole(tensor, get_device_id())
