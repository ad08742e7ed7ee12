"""Distillation losses against torch's own, the analytic gradient, one-hot teachers and padding; the stage converges."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.fitting.distill import divergence, fit, kd_loss, sft_loss, texts_of, token_weights, weighted_mean
from harness.foundation.seeds import generator

B, L, V = 3, 5, 11
MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [1, 0, 0, 0, 0]]).bool()


def logits(purpose: str, spread: float = 2.0) -> Tensor:
    """[B, L, V] float64."""
    return torch.randn(B, L, V, generator=generator("cpu", 0, purpose), dtype=torch.float64) * spread


def close(a: Tensor, b: Tensor) -> None:
    """Equal but for float64 rounding."""
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.5])
def test_against_torch(temperature: float) -> None:
    s, t = logits("student"), logits("teacher")
    log_s, log_t = (F.log_softmax(x / temperature, -1) for x in (s, t))
    expected = {
        "forward": F.kl_div(log_s, log_t, log_target=True, reduction="none").sum(-1),
        "reverse": F.kl_div(log_t, log_s, log_target=True, reduction="none").sum(-1),
        "skew": F.kl_div((0.3 * log_t.exp() + 0.7 * log_s.exp()).log(), log_t, log_target=True, reduction="none").sum(
            -1
        ),
    }
    found = {kl: temperature**2 * value for kl, value in expected.items()}
    for kl, value in found.items():
        close(divergence(s, t, kl, temperature, 0.3), value)
        loss = kd_loss(s, t, MASK, kl=kl, temperature=temperature, alpha=0.3)
        close(loss, value[MASK].mean())
    assert not torch.allclose(found["forward"], found["reverse"])


def test_gradient_is_temperature_times_the_difference_of_probabilities() -> None:
    temperature, s, t = 1.7, logits("student").requires_grad_(), logits("teacher").requires_grad_()
    kd_loss(s, t, MASK, temperature=temperature, weighting="teacher_confidence").backward()
    w = torch.where(MASK, torch.softmax(t.detach(), -1).amax(-1), 0.0)
    difference = torch.softmax(s.detach() / temperature, -1) - torch.softmax(t.detach() / temperature, -1)
    close(s.grad, temperature * difference * w[..., None] / w.sum())
    assert t.grad is None and (s.grad[~MASK] == 0).all()


def test_zero_up_to_a_constant_and_never_negative() -> None:
    s = logits("student")
    shifted = s + torch.randn(B, L, 1, generator=generator("cpu", 0, "shift"), dtype=torch.float64)
    for kl in ("forward", "reverse", "skew"):
        assert kd_loss(s, shifted, MASK, kl=kl).abs() < 1e-14
        assert (divergence(s, logits("teacher"), kl) > 0).all()


def test_one_hot_teacher_is_cross_entropy() -> None:
    s, ids = logits("student").requires_grad_(), torch.randint(V, (B, L), generator=generator("cpu", 0, "ids"))
    hard = torch.full((B, L, V), -torch.inf, dtype=torch.float64).scatter(-1, ids[..., None], 0.0)
    loss, plain = kd_loss(s, hard, MASK), sft_loss(s, ids, MASK)
    close(loss, plain)
    close(plain, F.cross_entropy(s[MASK], ids[MASK]))
    close(*(torch.autograd.grad(x, s)[0] for x in (loss, plain)))


def test_padding_does_not_count_and_nothing_is_finite() -> None:
    s, t = logits("student"), logits("teacher")
    spoilt = [torch.where(MASK[..., None], x, torch.nan).requires_grad_() for x in (s, t)]
    longer = torch.cat([MASK, torch.zeros(B, 2, dtype=torch.bool)], 1)
    for weighting in ("uniform", "teacher_confidence", "length"):
        expected = kd_loss(s, t, MASK, weighting=weighting)
        loss = kd_loss(*spoilt, MASK, weighting=weighting)
        close(loss, expected)
        assert torch.autograd.grad(loss, spoilt[0])[0].isfinite().all()
        padded = [F.pad(x, (0, 0, 0, 2), value=torch.nan) for x in (s, t)]
        close(kd_loss(*padded, longer, weighting=weighting), expected)
    empty = torch.zeros_like(MASK)
    for loss in (kd_loss(*spoilt, empty), sft_loss(spoilt[0], torch.zeros(B, L, dtype=torch.int64), empty)):
        assert loss == 0 and torch.autograd.grad(loss, spoilt[0])[0].eq(0).all()


def test_weights() -> None:
    t = logits("teacher")
    values = divergence(logits("student"), t)
    by_row = torch.stack([row[keep].mean() for row, keep in zip(values, MASK, strict=True)])
    close(weighted_mean(values, MASK, token_weights(t, MASK, "length")), by_row.mean())
    confidence = token_weights(t, MASK, "teacher_confidence")
    assert (confidence > 1 / V).all() and (confidence <= 1).all()
    with pytest.raises(ValueError, match="the teacher has 10 tokens, the student 11"):
        kd_loss(t, t[..., :-1], MASK)


def test_texts_and_what_they_predict() -> None:
    texts = texts_of([((1, 2, 3), (4, 5)), ((6,), (7, 8, 9)), ((1,), ())], pad_id=0)
    assert texts.ids.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 0], [1, 0, 0, 0, 0]]
    assert texts.keep().sum(1).tolist() == [5, 4, 1]
    assert texts.predicted("response").int().tolist() == [[0, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]]
    assert texts.predicted("all").int().tolist() == [[1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]]
    some = texts.take(torch.tensor([1]))
    assert some.ids.tolist() == [[6, 7, 8, 9]] and some.lens.tolist() == [4]
    with pytest.raises(ValueError, match="no text"):
        texts_of([])


def test_stage_reaches_the_teacher() -> None:
    torch_rng = torch.get_rng_state()
    student, teacher = (
        nn.Sequential(nn.Embedding(V, 8), nn.Linear(8, V)).requires_grad_(name == "student")
        for name in ("student", "teacher")
    )
    for model, name in ((student, "a"), (teacher, "b")):
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator("cpu", 0, name)))
    torch.set_rng_state(torch_rng)
    ids = torch.randint(V, (40, 6), generator=generator("cpu", 0, "texts")).tolist()
    texts = texts_of([(row[:2], row[2:]) for row in ids])
    frozen = student[0].weight.detach().clone()
    losses = fit(
        student, texts, lambda z, b: kd_loss(z, teacher(b.ids)[:, :-1], b.predicted("all")),
        steps=150, batch_size=16, lr=0.05, generator=generator("cpu", 0, "order"),
        lr_factor=lambda name: 0.0 if name == "0.weight" else 1.0,
    )  # fmt: skip
    assert len(losses) == 150 and losses[-1] < losses[0] / 10
    assert torch.equal(student[0].weight, frozen)
    with pytest.raises(ValueError, match="diverged at step 0"):
        fit(student, texts, lambda z, b: z.sum() * torch.nan, steps=1, batch_size=4, lr=1.0,
            generator=generator("cpu", 0, "order"))  # fmt: skip
