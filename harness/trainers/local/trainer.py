"""The one-process trainer: float32 masters, micro-batches that cannot change the result, loss scaling for FP16.

It scores sequences and takes optimizer steps; what the loss is, the loop says. Left out: sharding (that is verl's).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from harness.api import Plan, Sequences, WeightStream
from harness.config.schema import TrainerConfig
from harness.fitting.fake_quant import FakeQuantLinear
from harness.foundation.life import LIFE
from harness.models.adapters import checkpoint_name, named_weights, plain_twin, plain_weights
from harness.models.decoder import Decoder
from harness.numerics.formats import Adapters
from harness.numerics.fp8_flow import held_weights
from harness.trainers.at_rest import linears_in_bf16
from harness.trainers.local.compiling import eagerly
from harness.trainers.local.forward import (
    Routers,
    Scores,
    Thrift,
    forward,
    lay_out,
    masked,
    packed_passes,
    prepared,
    used_routers,
)
from harness.trainers.local.policy import computing, is_loss_scaled
from harness.trainers.local.products import products

ROUTING = frozenset({"routing", "own_routing", "router_shift"})
"""Those that need a mixture of experts."""
EXTRAS = frozenset({"ref_logp", "rollout_kl", "rollout_tv", "shadow", "allowed_ids", "version"}) | ROUTING
"""Names that a part's `needs` may have."""
DIVERGENCES = frozenset({"rollout_kl", "rollout_tv"})
"""Those of whole distributions, for which the engine must keep its own."""


class Diverged(RuntimeError):  # noqa: N818 - a status of runs, not a defect
    """A loss or a log-probability is not finite."""


LossOf = Callable[[Tensor, Scores], tuple[Tensor, dict[str, Tensor]]]
"""(rows of the mini-batch [b] int64, their scores) -> (scalar loss share, {name: 0-d sum})."""


class LocalTrainer:
    """Owns the policy, its optimizer and the loss scaler."""

    def __init__(
        self,
        model: Decoder,
        config: TrainerConfig,
        plan: Plan,
        *,
        temperature: float,
        micro_batch_rows: int | None,
        micro_batch_tokens: int,
        num_updates: int,
        wants_entropy_grad: bool = False,
        wants_reference: bool = False,
        wants_shadow: bool = False,
        lr_factor: Callable[[str], float] = lambda name: 1.0,
        thrift: Thrift | None = None,
    ) -> None:
        """`micro_batch_rows` fixes the rows of every forward pass, at full shapes and with all logits; None derives
        them from `micro_batch_tokens`, and `thrift` then says how they fit into memory.

        `num_updates` is how many optimizer updates the run will take, for the learning-rate schedule; `lr_factor` says
        by checkpoint name how much faster a parameter learns.
        """
        assert micro_batch_rows is None or thrift is None or not thrift.compile, "`check_launch` refuses it"
        self.total_updates = num_updates
        self.config, self.temperature, self.thrift = config, temperature, thrift or Thrift()
        self.micro_batch_rows, self.micro_batch_tokens = micro_batch_rows, micro_batch_tokens
        self.wants_entropy_grad, self.adapters = wants_entropy_grad, plan.adapters
        model = computing(model, plan)
        reference = copy.deepcopy(model).requires_grad_(False) if wants_reference else None
        resting = [linears_in_bf16(one) for one in (model, reference) if one is not None]
        if any(resting) and model.model.embed_tokens.weight.is_cuda:
            torch.cuda.empty_cache()  # an engine starts beside it, and asks the device what is free
        self.model = prepared(model, self.thrift)
        self.reference = None if reference is None else prepared(reference, self.thrift)  # computes as the policy does
        self.is_fp16 = is_loss_scaled(plan)
        self.shadow = plain_twin(model) if wants_shadow else None
        self.named = named_weights(model)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        assert config.lr is not None, "the config must be resolved"
        self.lr = config.lr
        self.optimizer = torch.optim.AdamW(
            parameter_groups(model, lr_factor), lr=config.lr, betas=config.betas, eps=1e-8,
            weight_decay=config.weight_decay, fused=True,
        )  # fmt: skip
        device = self.parameters[0].device.type
        self.scaler = torch.amp.GradScaler(
            device, init_scale=config.loss_scale, growth_interval=config.loss_scale_interval, enabled=self.is_fp16
        )
        self.num_updates = 0
        self.num_skipped = 0

    def weights(self) -> WeightStream:
        """Float32 masters under checkpoint names, tied tensors once; adapters and the scales of frozen layers too."""
        for name, tensor in self.named:
            own = tensor.detach()
            yield name, own.to(torch.float32) if own.dtype == torch.bfloat16 else own  # at rest (`trainers.at_rest`)

    def policy_weights(self) -> WeightStream:
        """The weights that are evaluated in the reference precision."""
        return policy_weights(self.model, self.weights(), self.adapters)

    @contextmanager
    def holding(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Context in which the module holds other weights, by checkpoint name; its own are back afterwards, bit for
        bit. No graph may reach across its ends."""
        own = {name: tensor.detach().clone() for name, tensor in self.named}
        with torch.no_grad():
            try:
                for name, tensor in self.named:
                    tensor.copy_(weights[name])
                yield
            finally:
                for name, tensor in self.named:
                    tensor.copy_(own[name])

    def products(self) -> dict[str, int]:
        """Kind of product -> number of linear layers computed so (`products`)."""
        return products(self.model)

    def eagerly(self) -> AbstractContextManager[object]:
        """Context in which no layer runs compiled, so that hooks on layers are called."""
        return eagerly(self.thrift.compile)

    def rows_per_pass(self, length: int) -> int:
        """Rows of one forward pass over sequences of `length` tokens."""
        return self.micro_batch_rows or max(1, self.micro_batch_tokens // length)

    def passes(self, seqs: Sequences, *, wants_logits: bool = False) -> list[Tensor]:
        """Row indices of each forward pass, in order."""
        if self.thrift.packing and self.micro_batch_rows is None and not wants_logits:
            return packed_passes(seqs, self.micro_batch_tokens)
        rows = torch.arange(len(seqs.ids), device=seqs.ids.device)
        return list(rows.split(self.rows_per_pass(seqs.ids.shape[1])))

    def score(
        self, seqs: Sequences, *, keep_graph: bool = False, model: Decoder | None = None, keeps_experts: bool = False
    ) -> Scores:
        """Log-probabilities and entropies of every sampled token, micro-batch by micro-batch, and where they are kept
        the experts of every position.

        With `keep_graph`, and where one pass holds all rows, the result carries the graph and `accumulate` reuses it:
        a single update per batch then needs one forward pass (losses.md section 5).
        """
        passes = self.passes(seqs)
        if keep_graph and len(passes) == 1 and model is None:
            return self._forward(seqs, keeps_experts=keeps_experts)
        with torch.no_grad(), held_weights(model or self.model):
            pieces = [self._forward(seqs.take(rows), model=model, keeps_experts=keeps_experts) for rows in passes]
        experts = [p.experts for p in pieces if p.experts is not None]
        return Scores(
            logp=torch.cat([p.logp for p in pieces]), entropy=torch.cat([p.entropy for p in pieces]),
            experts=torch.cat(experts) if experts else None,
        )  # fmt: skip

    def reference_logp(self, seqs: Sequences) -> Tensor:
        """[B, T] float32 nats under the frozen initial policy, which computes in the policy's precision."""
        assert self.reference is not None
        return self.score(seqs, model=self.reference).logp

    def shadow_logp(self, seqs: Sequences) -> Tensor:
        """[B, T] float32 nats of the current weights through the unquantized float32 forward."""
        assert self.shadow is not None
        return self.score(seqs, model=self.shadow).logp

    @torch.no_grad()
    def divergences(self, seqs: Sequences, log_probs: Tensor) -> dict[str, Tensor]:
        """Divergences of the sampler's whole distribution, `log_probs` [B, T, V], from the policy's, [B, T] float32
        each: "rollout_kl" the KL against the policy, nats, "rollout_tv" the total variation."""
        pieces: list[Tensor] = []
        for rows in self.passes(seqs, wants_logits=True):
            some, sampler = seqs.take(rows), log_probs[rows].to(torch.float32)
            logits = self._forward(some, wants_logits=True).logits
            assert logits is not None
            logits = masked(logits, some.allowed)
            own = torch.log_softmax(logits.to(torch.float32) / self.temperature, -1)
            terms = torch.where(sampler > -torch.inf, sampler.exp() * (sampler - own), 0.0)
            apart = (sampler.exp() - own.exp()).abs()
            found = torch.stack([terms.sum(-1), 0.5 * apart.sum(-1)])
            pieces.append(torch.where(some.sampled, found, 0.0))
        return dict(zip(("rollout_kl", "rollout_tv"), torch.cat(pieces, 1), strict=True))

    @torch.no_grad()
    def routers(self, seqs: Sequences, ids: Tensor | None = None) -> Routers:
        """Log-probs of the experts that the policy's routers use, or of `ids` as in `Routers`, by a pass."""
        pieces: list[Routers] = []
        with held_weights(self.model):
            for rows in self.passes(seqs):
                some = seqs.take(rows)
                self._forward(some)
                layout = lay_out(some) if self.thrift.packing else None
                pieces.append(used_routers(self.model, some, layout, None if ids is None else ids[rows]))
        return Routers(ids=torch.cat([p.ids for p in pieces]), logp=torch.cat([p.logp for p in pieces]))

    def router_shift(self, seqs: Sequences, before: Routers) -> Tensor:
        """[B, T] float32 nats: mean over layers and the experts of `before` of how far the routers' log-probs have
        moved since; 0 where nothing was sampled."""
        moved = (self.routers(seqs, before.ids).logp - before.logp).abs().mean((-2, -1))
        return torch.where(seqs.sampled, moved, 0.0)

    def _forward(
        self, seqs: Sequences, *, model: Decoder | None = None, wants_logits: bool = False, keeps_experts: bool = False
    ) -> Scores:
        LIFE.alive()
        return forward(
            model or self.model, seqs, self.thrift, temperature=self.temperature, entropy_grad=self.wants_entropy_grad,
            is_fixed=self.micro_batch_rows is not None, wants_logits=wants_logits, keeps_experts=keeps_experts,
        )  # fmt: skip

    def accumulate(
        self, seqs: Sequences, loss_of: LossOf, scores: Scores | None = None
    ) -> tuple[float, dict[str, float]]:
        """Backward over one optimizer batch: (loss, summed sums). Raises Diverged on a non-finite loss."""
        reusable = scores if scores is not None and scores.logp.requires_grad else None
        total, sums = torch.zeros((), device=seqs.ids.device), dict[str, Tensor]()
        with held_weights(self.model) if reusable is None else nullcontext():
            for rows in self.passes(seqs):
                found = reusable or self._forward(seqs.take(rows))
                loss, parts = loss_of(rows, found)
                if not torch.isfinite(loss):
                    raise Diverged(f"the loss is {loss.item()}")
                self.scaler.scale(loss).backward()
                total += loss.detach()
                for name, value in parts.items():
                    sums[name] = sums[name] + value if name in sums else value
        stacked = torch.stack([total, *(v.to(total) for v in sums.values())]).tolist()
        return stacked[0], dict(zip(sums, stacked[1:], strict=True))

    def step(self, factor: float = 1.0) -> dict[str, float]:
        """Take an optimizer step: unscale, clip, step, zero the gradients. `factor` multiplies the learning rate of
        this step alone. Non-finite gradients raise Diverged; under loss scaling their step is skipped and counted."""
        scheduled = schedule(self.config, self.num_updates, self.total_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * group["lr_factor"] * scheduled * factor
        self.scaler.unscale_(self.optimizer)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.config.grad_clip))
        if not math.isfinite(norm) and not self.is_fp16:
            raise Diverged(f"the gradient norm is {norm}")
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        is_skipped = self.is_fp16 and not math.isfinite(norm)
        self.num_skipped += is_skipped
        self.num_updates += not is_skipped
        self.optimizer.zero_grad(set_to_none=True)
        rate = self.lr * scheduled * factor
        return {
            "train/grad_norm": norm, "train/lr": rate, "train/loss_scale": scale, "train/skipped": float(is_skipped),
        }  # fmt: skip

    def state(self) -> dict[str, Any]:
        """Everything that a bit-exact resume needs: tensors and plain values only."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "num_updates": self.num_updates,
            "num_skipped": self.num_skipped,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`. Raises ValueError for the state of another model."""
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:  # torch's, with a line for every tensor
            raise ValueError(f"the state is of another model: {' '.join(str(error).split())}") from error
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.num_updates, self.num_skipped = state["num_updates"], state["num_skipped"]


def policy_weights(model: Decoder, weights: WeightStream, adapters: Adapters | None) -> WeightStream:
    """The policy's weights as plain float32 tensors: weights on the grid they are trained on, trained adapters
    merged. `weights`: its masters."""
    on_grid = {
        checkpoint_name(f"{name}.weight"): module.values().detach()
        for name, module in model.named_modules()
        if isinstance(module, FakeQuantLinear)
    }
    return plain_weights(((name, on_grid.get(name, tensor)) for name, tensor in weights), adapters)


def parameter_groups(model: Decoder, lr_factor: Callable[[str], float]) -> list[dict[str, Any]]:
    """The trained parameters by their factor on the learning rate, in model order."""
    groups = dict[float, list[Tensor]]()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault(lr_factor(checkpoint_name(name)), []).append(parameter)
    return [{"params": parameters, "lr_factor": factor} for factor, parameters in groups.items()]


def schedule(config: TrainerConfig, update: int, total: int) -> float:
    """Factor on the learning rate at update 0..total-1: linear warm-up, then constant, or linear or cosine
    decay down to `min_lr_ratio`."""
    if update < config.warmup_steps:
        return (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    progress = min(1.0, (update - config.warmup_steps) / max(1, total - config.warmup_steps))
    left = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left
