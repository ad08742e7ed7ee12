"""Log-probability and entropy of sampled tokens straight from the head's input: the logits never stand as a whole.

    z = x W^T + b,  logp_m = log softmax(z_m / t)[token_m],  H_m = -sum_v p_v log p_v
    dz_v = (g_logp (1[v = token] - p_v) - g_H p_v (log p_v + H)) / t

A chunk of rows is multiplied, reduced to two numbers a row and dropped; the backward pass multiplies it again, turns
it into dz in place and adds dz^T x to one buffer. So V = 152k costs two or three times chunk x V floats and one
gradient of the head, whatever the number of tokens (the idea of Cut Cross-Entropy, arXiv 2411.09009, and of Liger,
arXiv 2410.10989, without their kernels). Eager operations move some 40 bytes a logit; compiled, a chunk of logits is
only read and its gradient written once. `logprobs.selected_logp` is the other way, from logits that stand anyway.
The head is called once, whatever the number of chunks: FSDP gathers its weight around a call, and ranks whose batches
make other numbers of chunks would wait for each other for ever. Left out: second derivatives and logits of -inf.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from harness.numerics.compiler_options import compiler_options
from harness.numerics.linear import CastLinear
from harness.numerics.logprobs import selected_logp


class _HeadLogp(torch.autograd.Function):
    """Inputs as `head_logp` has them, with the operands of the head's product in place of the head."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, temperature: float, chunk: int,
        has_entropy_grad: bool, rounding: torch.dtype | None, is_compiled: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        read = _compiled(_read, x.device) if is_compiled else _read
        logp, entropy = (torch.empty(len(x), dtype=_wide(x), device=x.device) for _ in range(2))
        for first in range(0, len(x), chunk):
            rows = slice(first, first + chunk)
            z = F.linear(x[rows], weight, bias)
            logp[rows], entropy[rows] = read(z, token_ids[rows, None], temperature, rounding)
        ctx.save_for_backward(x, weight, bias, token_ids, entropy if has_entropy_grad else None)
        ctx.temperature, ctx.chunk, ctx.rounding, ctx.is_compiled = temperature, chunk, rounding, is_compiled
        if not has_entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, token_ids, entropy = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        wide, turn = _wide(x), _compiled(_turn, x.device) if ctx.is_compiled else _turn
        dx = torch.empty_like(x) if wants_x else None
        dw = torch.zeros(weight.shape, dtype=wide, device=x.device) if wants_weight else None
        db = torch.zeros(len(weight), dtype=wide, device=x.device) if wants_bias else None
        for first in range(0, len(x), ctx.chunk):
            rows = slice(first, first + ctx.chunk)
            held = None if entropy is None else (entropy[rows, None], grads[1][rows, None])
            z = F.linear(x[rows], weight, bias)
            dz = turn(z, token_ids[rows, None], grads[0][rows, None], held, ctx.temperature, ctx.rounding)
            dz = dz.to(x.dtype)
            if dx is not None:
                dx[rows] = dz @ weight
            if dw is not None:
                dw = dw.addmm_(dz.t(), x[rows]) if dw.dtype == x.dtype else dw.add_(dz.t() @ x[rows])
            if db is not None:
                db += dz.sum(0)
        return dx, dw, db, None, None, None, None, None, None


Held = tuple[Tensor, Tensor] | None
"""(H, g_H), [C, 1] both, where the entropy has a gradient."""


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@cache
def _compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """One for all chunks: whole ones, and what is left of a batch, whose size changes."""
    return torch.compile(function, options=compiler_options(device, is_dynamic=True))


def _log_probs(z: Tensor, temperature: float, rounding: torch.dtype | None) -> Tensor:
    """Logits [C, V], in place where it can be: the only copy of them."""
    z = (z if rounding is None else z.to(rounding)).to(_wide(z))
    if temperature != 1.0:
        z = z.div_(temperature)
    return torch.log_softmax(z, -1)


def _read(z: Tensor, ids: Tensor, temperature: float, rounding: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """(log-prob [C], entropy [C]) of logits [C, V]; ids [C, 1]."""
    log_probs = _log_probs(z, temperature, rounding)
    return log_probs.gather(-1, ids).squeeze(-1), log_probs.exp().mul_(log_probs).sum(-1).neg_()


def _turn(z: Tensor, ids: Tensor, g: Tensor, held: Held, temperature: float, rounding: torch.dtype | None) -> Tensor:
    """dz of the module docstring, [C, V], in the dtype that enters products; ids and g [C, 1]."""
    log_probs = _log_probs(z, temperature, rounding)
    p = log_probs.exp()
    if held is None:
        p = p.mul_(-g)
    else:
        entropy, g_entropy = held
        p = p.mul_(log_probs.add_(entropy).mul_(g_entropy).add_(g).neg_())
    if torch.compiler.is_compiling():  # a scatter would make it write dz twice
        dz = p + torch.where(torch.arange(z.shape[-1], device=z.device) == ids, g, 0.0)
    else:
        dz = p.scatter_add_(1, ids, g)
    dz = dz.div_(temperature) if temperature != 1.0 else dz
    return dz.to(rounding or z.dtype)


def head_logp(
    head: nn.Module,
    x: Tensor,
    token_ids: Tensor,
    temperature: float = 1.0,
    *,
    chunk: int,
    entropy_grad: bool = False,
    num_tokens: int | None = None,
    is_compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """`selected_logp(head(x)[:, :num_tokens], token_ids, temperature)` with `chunk` rows of logits at a time.

    x [M, d] float, differentiable; token_ids [M] int64 -> (log-prob [M], entropy [M]), nats, float32 (float64 for
    float64 x), equal to the other way up to the order of sums. The entropy is detached unless `entropy_grad`. A head
    of 16-bit rounding has its weight, and the sum of the chunks' gradients of it, rounded once. A head that multiplies
    in another way than `nn.Linear` and `CastLinear` works chunk by chunk under checkpointing. Hooks of the head see one
    call, from x to the two results. `num_tokens`: ids from there on have probability 0. `is_compiled`: what surrounds
    the products runs compiled, where nothing emulates 16 bits. Raises ValueError where `chunk` < 1.
    """
    if chunk < 1:
        raise ValueError(f"chunk: {chunk} is not a number of rows; valid: >= 1")

    def score(x: Tensor) -> tuple[Tensor, Tensor]:
        own = type(head).forward  # FSDP's classes inherit it
        if own is CastLinear.forward:
            x, weight, bias, rounding = cast(CastLinear, head).operands(x)
        elif own is nn.Linear.forward:
            weight, bias, rounding = cast(Tensor, head.weight), cast(Tensor | None, head.bias), None
        else:
            return _checkpointed(partial(own, head), x, token_ids, temperature, chunk, entropy_grad, num_tokens)
        bias = None if bias is None else bias[:num_tokens]
        knobs = (token_ids, temperature, chunk, entropy_grad, rounding, is_compiled and rounding is None)
        return cast(tuple[Tensor, Tensor], _HeadLogp.apply(x, weight[:num_tokens], bias, *knobs))

    return _call(head, score, x)


def _call(head: nn.Module, function: Callable[[Tensor], tuple[Tensor, Tensor]], x: Tensor) -> tuple[Tensor, Tensor]:
    """`function(x)` as a call of the head, with all that hangs on one."""
    head.forward = function
    try:
        return head(x)
    finally:
        del head.forward


def _checkpointed(
    head: Callable[[Tensor], Tensor], x: Tensor, token_ids: Tensor, temperature: float, chunk: int,
    entropy_grad: bool, num_tokens: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    def of(some: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return selected_logp(head(some)[:, :num_tokens], ids, temperature, entropy_grad=entropy_grad)

    run: Callable[..., tuple[Tensor, Tensor]] = checkpoint  # pyright: ignore[reportUnknownVariableType]
    rows = [slice(first, first + chunk) for first in range(0, max(1, len(x)), chunk)]
    pieces = [run(of, x[r], token_ids[r], use_reentrant=False, preserve_rng_state=False) for r in rows]
    return torch.cat([logp for logp, _ in pieces]), torch.cat([entropy for _, entropy in pieces])
