"""Selected log-probabilities: float64 reference, closed-form gradient, chunks, masked logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.foundation.seeds import generator
from harness.numerics.logprobs import selected_logp


def case(rows: int = 37, size: int = 32, scale: float = 4.0) -> tuple[Tensor, Tensor]:
    """(float32 logits with gradient, token ids)."""
    rng = generator("cpu", "logprobs", rows, size)
    ids = torch.randint(0, size, (rows,), generator=rng)
    return (scale * torch.randn(rows, size, generator=rng)).requires_grad_(), ids


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
@pytest.mark.parametrize("chunk", [None, 1, 8, 64])
def test_equals_float64(temperature: float, chunk: int | None) -> None:
    logits, ids = case()
    logp, entropy = selected_logp(logits, ids, temperature, chunk=chunk)
    p = (logits.detach().double() / temperature).softmax(-1)
    expected = p.gather(1, ids[:, None]).squeeze(1).log()
    torch.testing.assert_close(logp.detach().double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy.double(), -(p * p.log()).sum(-1), rtol=0, atol=2e-6)
    assert logp.dtype == entropy.dtype == torch.float32 and not entropy.requires_grad
    weight = torch.linspace(-1, 2, len(ids))
    (grad,) = torch.autograd.grad((weight * logp).sum(), logits)
    one_hot = torch.nn.functional.one_hot(ids, logits.shape[1])
    torch.testing.assert_close(grad.double(), weight.double()[:, None] * (one_hot - p) / temperature, rtol=0, atol=2e-6)


def test_chunks_change_no_bit() -> None:
    logits, ids = case(rows=50)
    whole = selected_logp(logits, ids, 0.7)
    (expected,) = torch.autograd.grad(whole[0].sum(), logits)
    for chunk in (1, 7, 49, 50, 1000):
        logp, entropy = selected_logp(logits, ids, 0.7, chunk=chunk)
        (grad,) = torch.autograd.grad(logp.sum(), logits)
        assert torch.equal(logp, whole[0]) and torch.equal(entropy, whole[1]) and torch.equal(grad, expected)
        with torch.no_grad():
            assert torch.equal(selected_logp(logits, ids, 0.7, chunk=chunk)[0], whole[0])


def test_chunks_save_nothing_of_the_size_of_the_logits() -> None:
    logits, ids = case(rows=64, size=128)
    saved: list[int] = []

    def record(x: Tensor) -> Tensor:
        if x.data_ptr() != logits.data_ptr():
            saved.append(x.numel())
        return x

    for chunk, is_lean in ((None, False), (8, True)):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
            selected_logp(logits, ids, chunk=chunk)
        assert (max(saved, default=0) < logits.numel()) == is_lean


def test_masked_logits_have_no_probability() -> None:
    logits, ids = case(rows=4)
    masked = logits.detach().clone()
    masked[:, 5:] = -torch.inf
    ids = torch.tensor([0, 1, 2, 9])
    logp, entropy = selected_logp(masked.requires_grad_(), ids)
    short, short_entropy = selected_logp(masked.detach()[:, :5], ids.clamp(max=4))
    torch.testing.assert_close(logp[:3], short[:3])
    torch.testing.assert_close(entropy, short_entropy)
    assert logp[3] == -torch.inf and torch.isfinite(entropy).all()


def test_low_precision_logits_are_scored_in_float32() -> None:
    logits, ids = case()
    half = logits.detach().bfloat16()
    logp, entropy = selected_logp(half, ids, 0.9)
    expected = selected_logp(half.float(), ids, 0.9)
    assert torch.equal(logp, expected[0]) and torch.equal(entropy, expected[1])
    assert selected_logp(logits.double(), ids)[0].dtype == torch.float64


def test_entropy_with_gradient() -> None:
    rng = generator("cpu", "entropy")
    logits = torch.randn(3, 5, generator=rng, dtype=torch.float64, requires_grad=True)
    ids = torch.zeros(3, dtype=torch.int64)
    for chunk in (None, 2):
        assert torch.autograd.gradcheck(
            lambda z, c=chunk: selected_logp(z, ids, 1.3, chunk=c, entropy_grad=True), logits
        )


def test_a_sure_token_keeps_its_digits() -> None:
    """log_softmax, not logit minus logsumexp: 1e-6 below 0 next to a logit of 20 is not lost."""
    logits = torch.tensor([[20.0, 20.0 - 13.8155]])
    logp, _ = selected_logp(logits, torch.tensor([0]))
    torch.testing.assert_close(logp.item(), -1.0e-6, rtol=6e-2, atol=0)


def test_bad_chunk() -> None:
    logits, ids = case()
    with pytest.raises(ValueError, match="chunk: 0"):
        selected_logp(logits, ids, chunk=0)
