"""One rank's share of a model that several devices of an engine hold together: vLLM's tensor parallelism.

    q k v gate up   by rows: whole heads; fewer key-value heads than ranks are held several times
    o down          by columns
    embedding, head by rows of the vocabulary padded to PADDING
    norms           whole on every rank

A push sends whole tensors to every rank; what a rank holds is compared with its cut of them, and a passport's checksums
are of whole tensors, gathered, so that it equals that of one device. Left out: experts, pipeline stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.models.decoder import DecoderConfig

PADDING = 64
"""Multiple to which vLLM pads a vocabulary before it is cut."""
BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
BY_COLUMNS = ("o_proj", "down_proj")


def _alone(x: Tensor) -> list[Tensor]:
    return [x]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Place of a rank among `size`; the default is a model that one device holds whole."""

    config: DecoderConfig
    rank: int = 0
    size: int = 1
    exchange: Callable[[Tensor], list[Tensor]] = _alone
    """Every rank's tensor, in order of ranks, for one of the same shape and dtype from each; all ranks must call."""

    def span(self, name: str, rank: int | None = None) -> tuple[int, int, int] | None:
        """(axis, first, end) of what a rank holds of the tensor that the checkpoint calls `name`, adapters among them;
        None: all of it."""
        module, _, leaf = name.rpartition(".")
        stem, _, lora = module.rpartition(".")
        kind = lora if lora.startswith("lora_") else leaf
        part = (stem if kind != leaf else module).rpartition(".")[2]
        by_rows, by_columns = part in BY_ROWS and kind != "lora_A", part in BY_COLUMNS and kind in ("weight", "lora_A")
        if self.size == 1 or not (by_rows or by_columns):
            return None
        first, end = self._range(part, self.rank if rank is None else rank)
        return int(by_columns), first, end

    def _range(self, part: str, rank: int) -> tuple[int, int]:
        c = self.config
        if part in ("embed_tokens", "lm_head"):
            share = -(-c.vocab_size // PADDING) * PADDING // self.size
            return min(rank * share, c.vocab_size), min((rank + 1) * share, c.vocab_size)
        if part in ("k_proj", "v_proj") and c.num_kv_heads < self.size:
            head = rank * c.num_kv_heads // self.size
            return head * c.head_dim, (head + 1) * c.head_dim
        heads = {"k_proj": c.num_kv_heads, "v_proj": c.num_kv_heads, "q_proj": c.num_heads, "o_proj": c.num_heads}
        share = (heads[part] * c.head_dim if part in heads else c.intermediate_size) // self.size
        return rank * share, (rank + 1) * share

    def cut(self, name: str, whole: Tensor, step: int = 1) -> Tensor:
        """View of what this rank holds of a whole tensor. `step`: entries of the weight for one of `whole` along the
        axis of the cut, for scales; 0: one for all, which nobody cuts."""
        span = self.span(name)
        if span is None or not step or whole.dim() <= span[0]:
            return whole
        axis, first, end = span
        return whole.narrow(axis, first // step, -(-end // step) - first // step)

    def gather(self, name: str, held: Tensor, step: int = 1) -> Tensor:
        """The whole tensor, of what every rank holds of it; inverse of `cut`. Every rank must call, in one order."""
        span = self.span(name)
        if span is None or not step or held.dim() <= span[0]:
            return held
        axis, spans = span[0], [self.span(name, rank) for rank in range(self.size)]
        ranges = [(first // step, -(-end // step)) for _, first, end in (s for s in spans if s is not None)]
        widest = max(end - first for first, end in ranges)
        padded = held.movedim(axis, 0)
        if len(padded) < widest:
            padded = torch.cat([padded, padded.new_zeros((widest - len(padded), *padded.shape[1:]))])
        pieces = [x.view(held.dtype).view(padded.shape) for x in self.exchange(_bytes(padded))]
        found, at = list[Tensor](), 0
        for (first, end), piece in zip(ranges, pieces, strict=True):
            if first == at and end > first:  # else a head that another rank holds too
                found.append(piece[: end - first])
                at = end
        return torch.cat([_bytes(x).view(x.shape[0], -1) for x in found]).view(-1).view(held.dtype).view(
            at, *padded.shape[1:]).movedim(0, axis).contiguous()  # fmt: skip

    def shapes(self, whole: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Shapes of what this rank holds, by name, of whole ones."""
        found = dict(whole)
        for name, shape in whole.items():
            if (span := self.span(name)) is not None:
                axis, first, end = span
                found[name] = (*shape[:axis], end - first, *shape[axis + 1 :])
        return found


def _bytes(x: Tensor) -> Tensor:
    """[bytes] uint8: collectives do not know every dtype."""
    return x.contiguous().reshape(-1).view(torch.uint8)


def shard_here(config: DecoderConfig) -> Shard:
    """This process's place in its vLLM engine."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()

    def exchange(x: Tensor) -> list[Tensor]:
        found = [torch.empty_like(x) for _ in range(group.world_size)]
        torch.distributed.all_gather(found, x, group=group.device_group)
        return found

    return Shard(config=config, rank=group.rank_in_group, size=group.world_size, exchange=exchange)


def check_shards(config: DecoderConfig, size: int, what: str) -> None:
    """Raises ValueError, one line beginning with `what`, where `size` devices cannot share the model."""
    heads, kv = config.num_heads, config.num_kv_heads
    if heads % size or (kv % size and size % kv) or config.intermediate_size % size:
        raise ValueError(
            f"{what}: {heads} heads, {kv} key-value heads and {config.intermediate_size} MLP channels do not divide by "
            f"{size} devices"
        )
    if config.num_experts:
        raise ValueError(f"{what}: a mixture of experts is held by one device; valid: 1")
