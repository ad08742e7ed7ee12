"""The head in chunks against the head at once: values, gradients, rounding, and what is alive meanwhile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from harness.foundation.seeds import generator
from harness.numerics.formats import format_named
from harness.numerics.head_logp import head_logp
from harness.numerics.linear import CastLinear
from harness.numerics.logprobs import selected_logp
from tests.live_bytes import peak
from tests.trainers.local.test_compiling import has_compiler

ROWS, WIDTH, VOCABULARY = 37, 12, 50


class Wrapped(nn.Module):
    """A head of no known kind."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.linear = linear.weight, linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def case(
    dtype: torch.dtype = torch.float64, *, bias: bool = True, kind: str = "linear"
) -> tuple[nn.Module, Tensor, Tensor]:
    """(head, input with gradient, token ids)."""
    rng = generator("cpu", "head_logp")
    head: nn.Module = nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype)
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(torch.randn(p.shape, generator=rng))
    if kind == "wrapped":
        head = Wrapped(head)  # type: ignore[arg-type]
    elif kind != "linear":
        head = CastLinear(head, format_named(kind))  # type: ignore[arg-type]
    x = torch.randn(ROWS, WIDTH, generator=rng).to(dtype).requires_grad_()
    return head, x, torch.randint(0, VOCABULARY, (ROWS,), generator=rng)


def gradients(found: tuple[Tensor, Tensor], head: nn.Module, x: Tensor, *, entropy: bool) -> list[Tensor]:
    weight = torch.linspace(-1, 2, ROWS, dtype=found[0].dtype)
    loss = (weight * found[0]).sum() + ((weight.flip(0) * found[1]).sum() if entropy else 0.0)
    return list(torch.autograd.grad(loss, [x, *head.parameters()]))


@pytest.mark.parametrize("kind", ["linear", "wrapped"])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(("chunk", "temperature"), [(1, 1.0), (8, 0.6), (37, 2.5), (100, 1.0)])
def test_equals_the_whole_head_in_float64(kind: str, entropy: bool, chunk: int, temperature: float) -> None:
    head, x, ids = case(kind=kind)
    whole = selected_logp(head(x), ids, temperature, entropy_grad=entropy)
    found = head_logp(head, x, ids, temperature, chunk=chunk, entropy_grad=entropy)
    assert found[1].requires_grad == entropy
    for a, b in zip(found, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    pairs = zip(gradients(found, head, x, entropy=entropy), gradients(whole, head, x, entropy=entropy), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_gradient_is_that_of_finite_differences() -> None:
    head, x, ids = case()
    x = x.detach()[:5].requires_grad_()

    def of(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        linear = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)
        del linear.weight, linear.bias
        linear.weight, linear.bias = weight, bias  # type: ignore[assignment]
        return head_logp(linear, x, ids[:5], 0.7, chunk=2, entropy_grad=True)

    assert torch.autograd.gradcheck(of, (x, *head.parameters()))


@pytest.mark.parametrize("bias", [False, True])
def test_float32_is_within_its_rounding(bias: bool) -> None:
    head, x, ids = case(torch.float32, bias=bias)
    whole, found = selected_logp(head(x), ids, 0.8), head_logp(head, x, ids, 0.8, chunk=8)
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found, whole, rtol=1e-6, atol=2e-6)
    pairs = zip(gradients(found, head, x, entropy=False), gradients(whole, head, x, entropy=False), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_a_rounding_head_rounds_its_gradient_once(kind: str) -> None:
    """The sum over all chunks is what is rounded: values on the 16-bit grid, at most one step from the whole head's."""
    head, x, ids = case(torch.float32, kind=kind)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    whole, found = selected_logp(head(x), ids), head_logp(head, x, ids, chunk=8)
    torch.testing.assert_close(found, whole, rtol=1e-6, atol=2e-6)
    ours, theirs = (gradients(f, head, x, entropy=False) for f in (found, whole))
    step = torch.finfo(dtype).eps
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, a.to(dtype).float())
        torch.testing.assert_close(a, b, rtol=step, atol=1e-4)
        assert (a == b).float().mean() > 0.95
    plain, x2, _ = case(torch.float32)
    control = gradients(head_logp(plain, x2, ids, chunk=8), plain, x2, entropy=False)
    assert not torch.equal(control[1], control[1].to(dtype).float())


def test_overflow_of_fp16_reaches_the_gradient() -> None:
    head, x, ids = case(torch.float32, kind="fp16")
    (1e30 * head_logp(head, x, ids, chunk=8)[0]).sum().backward()
    assert not torch.isfinite(head.weight.grad).all()  # type: ignore[arg-type, union-attr]


def test_what_needs_no_gradient_gets_none() -> None:
    head, x, ids = case()
    head.requires_grad_(False)
    logp, _ = head_logp(head, x, ids, chunk=8)
    (grad,) = torch.autograd.grad(logp.sum(), x)
    wanted = torch.autograd.grad(selected_logp(head(x), ids)[0].sum(), x)[0]
    torch.testing.assert_close(grad, wanted, rtol=1e-11, atol=1e-11)
    assert not head_logp(head, x.detach(), ids, chunk=8)[0].requires_grad


@pytest.mark.parametrize("kind", ["linear", "bf16", "wrapped"])
def test_no_rows_give_no_numbers(kind: str) -> None:
    head, x, ids = case(torch.float32, kind=kind)
    logp, entropy = head_logp(head, x[:0], ids[:0], chunk=8)
    assert logp.shape == entropy.shape == (0,)
    assert not torch.autograd.grad(logp.sum(), [x, head.weight])[1].any()


def test_a_bad_chunk_is_refused() -> None:
    head, x, ids = case()
    with pytest.raises(ValueError, match="chunk: 0 is not a number of rows"):
        head_logp(head, x, ids, chunk=0)


def test_the_logits_of_all_rows_never_exist() -> None:
    rows, width, vocabulary, chunk = 512, 8, 1024, 16
    head, ids = nn.Linear(width, vocabulary, bias=False), torch.arange(rows) % vocabulary
    x = torch.randn(rows, width, generator=generator("cpu", "peak")).requires_grad_()
    logits = 4 * rows * vocabulary
    whole = peak(lambda: selected_logp(head(x), ids)[0].sum().backward())
    head.weight.grad = x.grad = None
    chunked = peak(lambda: head_logp(head, x, ids, chunk=chunk)[0].sum().backward())
    gradients = 4 * (vocabulary + rows) * width
    assert whole > 2 * logits and chunked > logits * chunk / rows
    assert chunked < 4 * logits * chunk / rows + 3 * gradients < 0.2 * logits


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
@pytest.mark.parametrize(("entropy", "temperature"), [(False, 1.0), (True, 0.6)])
def test_compiled_it_is_the_eager_one(entropy: bool, temperature: float) -> None:
    head, x, ids = case()
    eager, found = (
        head_logp(head, x, ids, temperature, chunk=8, entropy_grad=entropy, is_compiled=is_compiled)
        for is_compiled in (False, True)
    )
    for a, b in zip(found, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    pairs = zip(gradients(found, head, x, entropy=entropy), gradients(eager, head, x, entropy=entropy), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
def test_compiled_products_of_16_bits_keep_their_rounding() -> None:
    head, x, ids = case(torch.float32, kind="bf16")
    head.is_native = True  # type: ignore[assignment]
    eager, found = (head_logp(head, x, ids, chunk=8, is_compiled=is_compiled) for is_compiled in (False, True))
    torch.testing.assert_close(found[0], eager[0], rtol=0, atol=4e-6)
    for a, b in zip(gradients(found, head, x, entropy=False), gradients(eager, head, x, entropy=False), strict=True):
        assert (a - b).norm() < 1e-3 * b.norm()  # a few gradients of logits round the other way


def test_emulated_16_bits_are_never_compiled() -> None:
    """A compiler would drop the rounding."""
    head, x, ids = case(torch.float32, kind="bf16")
    eager, found = (head_logp(head, x, ids, chunk=8, is_compiled=is_compiled) for is_compiled in (False, True))
    assert torch.equal(found[0], eager[0]) and torch.equal(found[1], eager[1])
    for a, b in zip(gradients(found, head, x, entropy=False), gradients(eager, head, x, entropy=False), strict=True):
        assert torch.equal(a, b)
