"""One forward pass of the trainer: how a micro-batch is cut, laid out and scored, within a budget of memory.

    padded  [b, L] rows of one length; logits where a token was sampled
    packed  the sequences of a micro-batch end to end in one row, without padding, a prompt that neighbours have in
            common once: `lay_out`, `decoder.Spans`
    fixed   [b, L] and logits everywhere, at the shapes of the zero-mismatch sampler: nothing below touches it

Left out: what the loss is, and every state of the trainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from harness.api import Sequences
from harness.config.schema import Launch, TrainerConfig
from harness.models.decoder import CoreAttention, Decoder, Mixture, Shared, Spans, response_hidden
from harness.numerics.experts import OWN
from harness.numerics.head_logp import head_logp
from harness.numerics.linear import CastLinear, cast_dtype
from harness.numerics.logprobs import selected_logp
from harness.trainers.local.compiling import compile_layers

FLOATS_PER_MIB = 2**18


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Log-probs and entropies of sampled tokens under the current policy; 0 where nothing was sampled."""

    logp: Tensor
    """[B, T] float32 nats; carries the graph where the scorer was asked to keep it."""
    entropy: Tensor
    """[B, T] float32 nats."""
    logits: Tensor | None = None
    """[B, T, V], only when asked for."""
    experts: Tensor | None = None
    """[B, L, layers, k] int16: the experts that every position used, only when asked for; -1 where none was computed
    (`Sequences.experts`)."""


@dataclass(frozen=True, kw_only=True)
class Routers:
    """Log-probs of some experts by a mixture's routers for every sampled token, at the position that predicts it."""

    ids: Tensor
    """[B, T, layers, k] int64: the experts."""
    logp: Tensor
    """[B, T, layers, k] float32 nats of the softmax over all experts; where nothing was sampled, of no meaning."""

    def take(self, rows: Tensor) -> Routers:
        """The log-probs of some rows."""
        return Routers(ids=self.ids[rows], logp=self.logp[rows])


@dataclass(frozen=True, kw_only=True)
class Thrift:
    """Settings with which a forward pass fits into memory; none of it changes a number beyond float rounding."""

    logits_mib: int = 1024
    """Float32 logits that may stand at once; where a micro-batch has more, the head works in chunks (`head_logp`)."""
    checkpoint_layers: bool = False
    """Activation checkpoints: the backward pass computes every layer again from its input."""
    packing: bool = False
    """No padding: micro-batches count real tokens. verl's workers always pack."""
    compile: bool = False
    """Layers run as compiled code (`trainers.compiling`)."""
    native_16bit: bool = False
    """Linear layers of a 16-bit trainer multiply 16-bit tensors (`linear.CastLinear`); nothing else changes."""
    attention_16bit: bool = False
    """Attention of a 16-bit trainer rounds queries, keys and values to its format (`decoder.CoreAttention`)."""

    def head_rows(self, vocab_size: int) -> int:
        """Rows of logits that may stand at once, at least one."""
        return max(1, self.logits_mib * FLOATS_PER_MIB // vocab_size)

    @classmethod
    def of(cls, launch: Launch, trainer: TrainerConfig) -> Thrift:
        """Settings that a launch asks for; `trainer.compute=bf16` multiplies on a GPU's tensor cores."""
        is_native = launch.native_16bit or (trainer.compute == "bf16" and trainer.device == "cuda")
        return cls(
            logits_mib=launch.logits_mib, checkpoint_layers=launch.checkpoint_layers, packing=launch.packing,
            native_16bit=is_native, attention_16bit=launch.attention_16bit, compile=launch.compile,
        )  # fmt: skip


def prepared(model: Decoder, thrift: Thrift) -> Decoder:
    """The model itself, told how to compute. Raises ValueError, one line, where it cannot be compiled."""
    model.checkpoint_layers = thrift.checkpoint_layers
    rounding = [module for module in model.modules() if isinstance(module, CastLinear)]
    for module in rounding:
        module.is_native = thrift.native_16bit
    if thrift.attention_16bit and rounding:
        attend_in(model, cast_dtype(rounding[0].fmt))
    if thrift.compile:
        compile_layers(model.model.layers)
    return model


def attend_in(model: Decoder, dtype: torch.dtype | None) -> None:
    """Let every attention of `model` compute in `dtype`, in place; None: in that of its input."""
    for module in model.modules():
        if isinstance(module, CoreAttention):
            module.dtype = dtype


def response_lengths(seqs: Sequences) -> tuple[list[int], list[int]]:
    """(prompt tokens, response tokens) of every row."""
    count, lens = len(seqs.ids), seqs.prompt_lens
    return [lens] * count if isinstance(lens, int) else lens.tolist(), seqs.sampled.sum(1).tolist()


def shared_prompts(seqs: Sequences) -> Tensor:
    """[B] bool: rows that begin with the prompt of the row before."""
    first = seqs.prompt_lens
    at = torch.arange(seqs.ids.shape[1], device=seqs.ids.device)
    is_same = (seqs.ids[1:] == seqs.ids[:-1]) | (at >= (first if isinstance(first, int) else first[1:, None]))
    found = is_same.all(1)
    if not isinstance(first, int):
        found &= first[1:] == first[:-1]
    return torch.nn.functional.pad(found, (1, 0))


MOST_PLACES = 2
"""Places that attention sees in a pass, as a multiple of the tokens that it may compute."""


def packed_passes(seqs: Sequences, tokens: int) -> list[Tensor]:
    """Row indices of each pass, in order: as many sequences as `tokens` computed ones hold, one at least."""
    passes, room, places = list[list[int]](), 0, 0
    is_shared: list[bool] = shared_prompts(seqs).tolist()
    for row, (prompt, new) in enumerate(zip(*response_lengths(seqs), strict=True)):
        computed = new if is_shared[row] else prompt + new
        if not passes or computed > room or prompt + new > places:
            passes.append([])
            room, places, computed = tokens, MOST_PLACES * tokens, prompt + new
        room -= computed
        places -= prompt + new
        passes[-1].append(row)
    return [torch.tensor(rows, device=seqs.ids.device) for rows in passes]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sequences end to end, without padding and without last tokens, which predict nothing; prompts that neighbours
    share are computed once. U tokens are computed, and they stand at N places."""

    ids: Tensor
    """[1, U] int64."""
    positions: Tensor
    """[1, U] int64: the place of each token in its own sequence."""
    predicts: Tensor
    """[M] int64: tokens whose next one is a sampled one, in the order of `ids[sampled]`."""
    spans: Spans
    is_computed: Tensor
    """[B, L] bool: the places of `ids` in the padded rows."""
    source: Tensor
    """[B, L] int64: the computed token of every place; -1 where there is none."""


def lay_out(seqs: Sequences, *, is_shared: bool = True) -> Layout:
    """Pack rows; those with an empty response predict nothing. `is_shared`: a prompt that the row before has as well is
    not computed again."""
    prompts, news = response_lengths(seqs)
    device, width = seqs.ids.device, seqs.ids.shape[1]
    alike = shared_prompts(seqs) if is_shared else torch.zeros(len(seqs.ids), dtype=torch.bool, device=device)
    lengths = tuple(max(prompt, prompt + new - 1) for prompt, new in zip(prompts, news, strict=True))
    at = torch.arange(width, device=device)
    size, first, new = (torch.tensor(x, device=device)[:, None] for x in (lengths, prompts, news))
    is_there, predicts = at < size, (at >= first - 1) & (at < first - 1 + new)
    is_again = alike[:, None] & (at < first)
    is_computed = is_there & ~is_again
    number = is_computed.flatten().cumsum(0).view_as(is_there) - 1
    row = torch.arange(len(alike), device=device)
    leader = torch.where(alike, 0, row).cummax(0).values
    source = torch.where(is_again, number[leader], number).masked_fill(~is_there, -1)
    shared = Shared.of(source[is_there]) if bool(alike.any()) else None
    return Layout(
        ids=seqs.ids[is_computed][None], positions=at.expand_as(is_there)[is_computed][None],
        predicts=source[predicts], spans=Spans.of(lengths, device, shared), is_computed=is_computed, source=source,
    )  # fmt: skip


def forward(
    model: Decoder, seqs: Sequences, thrift: Thrift, *, temperature: float, entropy_grad: bool, is_fixed: bool,
    wants_logits: bool, num_tokens: int | None = None, keeps_experts: bool = False,
) -> Scores:  # fmt: skip
    """Log-probability and entropy of every sampled token of one micro-batch. `num_tokens`: ids from there on have
    probability 0, where no logits stand everywhere."""
    columns = (seqs.ids, seqs.prompt_lens, seqs.token_ids.shape[1], seqs.experts)
    if is_fixed or wants_logits:
        logits = model.head(response_hidden(model, *columns))
        flat = (masked(logits, seqs.allowed).flatten(0, 1), seqs.token_ids.flatten())
        logp, entropy = selected_logp(*flat, temperature, entropy_grad=entropy_grad)
        logp, entropy = (torch.where(seqs.sampled, x.view_as(seqs.token_ids), 0.0) for x in (logp, entropy))
        used = used_experts(model, seqs) if keeps_experts else None
        return Scores(logp=logp, entropy=entropy, logits=logits if wants_logits else None, experts=used)
    layout = lay_out(seqs) if thrift.packing else None
    if layout is not None:
        given = None if seqs.experts is None else seqs.experts[layout.is_computed][None]
        h = model.hidden(layout.ids, layout.positions, layout.spans, given)[0, layout.predicts]
    else:
        h = response_hidden(model, *columns)[seqs.sampled]
    used = used_experts(model, seqs, layout) if keeps_experts else None
    logp, entropy = of_head(
        model, h, seqs.token_ids[seqs.sampled], thrift, temperature=temperature, entropy_grad=entropy_grad,
        num_tokens=num_tokens, allowed=None if seqs.allowed is None else seqs.allowed[seqs.sampled],
    )  # fmt: skip
    empty = torch.zeros(seqs.token_ids.shape, dtype=logp.dtype, device=logp.device)
    return Scores(
        logp=empty.masked_scatter(seqs.sampled, logp), entropy=empty.masked_scatter(seqs.sampled, entropy), experts=used
    )


def used_experts(model: Decoder, seqs: Sequences, layout: Layout | None = None) -> Tensor:
    """Experts of the last forward pass, over these sequences, as in `Scores.experts`; `layout` where it was packed."""
    mixtures = [cast(Mixture, layer.get_submodule("mlp")) for layer in model.model.layers]
    *others, last = [mixture.chosen.to(torch.int16) for mixture in mixtures]
    found = last.new_full((*seqs.ids.shape, len(others) + 1, last.shape[-1]), OWN)
    if layout is not None:
        is_there = layout.source >= 0
        found[is_there] = torch.stack((*others, last), 2)[0, layout.source[is_there]]
        return found
    for i, ids in enumerate(others):
        found[:, : ids.shape[1], i] = ids
    first = seqs.prompt_lens if isinstance(seqs.prompt_lens, int) else seqs.prompt_lens[:, None]
    index = first - 1 + torch.arange(last.shape[1], device=last.device)  # the last layer computes what predicts alone
    index = index.clamp(max=seqs.ids.shape[1] - 1).expand(len(last), -1)
    found[:, :, -1].scatter_(1, index[:, :, None].expand_as(last), last)
    return found


def used_routers(model: Decoder, seqs: Sequences, layout: Layout | None, ids: Tensor | None = None) -> Routers:
    """Routers of the last forward pass, over these sequences: of the experts that it used, or of `ids` as in
    `Routers`. `layout` where it was packed."""
    first = seqs.prompt_lens if isinstance(seqs.prompt_lens, int) else seqs.prompt_lens[:, None]
    at = (first - 1 + torch.arange(seqs.token_ids.shape[1], device=seqs.ids.device)).expand(seqs.token_ids.shape)

    def of_tokens(x: Tensor, *, is_last: bool) -> Tensor:
        if layout is not None:
            found = x.new_zeros((*seqs.token_ids.shape, x.shape[-1]))
            found[seqs.sampled] = x[0, layout.predicts]
            return found
        if is_last:  # it computes what predicts alone
            return torch.nn.functional.pad(x, (0, 0, 0, seqs.token_ids.shape[1] - x.shape[1]))
        return x.gather(1, at.clamp(max=x.shape[1] - 1)[:, :, None].expand(-1, -1, x.shape[-1]))

    num, used, logps = len(model.model.layers), list[Tensor](), list[Tensor]()
    for i, layer in enumerate(model.model.layers):
        mixture = cast(Mixture, layer.get_submodule("mlp"))
        own = of_tokens(mixture.chosen, is_last=i == num - 1) if ids is None else ids[:, :, i]
        logp = of_tokens(mixture.logits.to(torch.float32), is_last=i == num - 1).log_softmax(-1)
        used.append(own)
        logps.append(logp.gather(-1, own))
    return Routers(ids=torch.stack(used, 2), logp=torch.stack(logps, 2))


def masked(logits: Tensor, allowed: Tensor | None) -> Tensor:
    """Logits [..., V] with -inf where `allowed` [..., V] bool is False; None changes nothing."""
    return logits if allowed is None else logits.masked_fill(~allowed, float("-inf"))


def of_head(
    model: Decoder, h: Tensor, token_ids: Tensor, thrift: Thrift, *, temperature: float, entropy_grad: bool,
    num_tokens: int | None = None, allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Score `token_ids` [M] with the head at the final-norm outputs `h` [M, d]: (log-prob [M], entropy [M]), within
    the budget of logits. `num_tokens`: ids from there on have probability 0. `allowed` [M, V] bool: so have those that
    are not; its logits stand as a whole, as it does."""
    chunk = thrift.head_rows(model.config.vocab_size)
    if allowed is not None:
        logits = masked(model.head(h), allowed)[:, :num_tokens]
        return selected_logp(logits, token_ids, temperature, chunk=chunk, entropy_grad=entropy_grad)
    if len(h) <= chunk:
        return selected_logp(model.head(h)[:, :num_tokens], token_ids, temperature, entropy_grad=entropy_grad)
    return head_logp(
        model.lm_head, h, token_ids, temperature, chunk=chunk, entropy_grad=entropy_grad, num_tokens=num_tokens,
        is_compiled=thrift.compile,
    )  # fmt: skip
