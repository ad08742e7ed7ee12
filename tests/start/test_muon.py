"""Muon, against torch's own and against singular values."""

from __future__ import annotations

import pytest
import torch

from harness.foundation.seeds import generator
from harness.start.muon import Muon, orthogonal

SHAPES = ((24, 24), (8, 24), (64, 24), (24, 64), (24, 24))


@pytest.mark.parametrize("is_tensor", [False, True])
def test_steps_are_those_of_torch(is_tensor: bool) -> None:
    """Five steps at two rates; both round to bfloat16 inside, and sum in another order."""
    random = generator("cpu", 0, "muon")
    start = [torch.randn(shape, generator=random) for shape in SHAPES]
    ours, theirs = ([torch.nn.Parameter(t.clone()) for t in start] for _ in range(2))
    rate = torch.tensor(0.02) if is_tensor else 0.02
    own = Muon(ours, rate, weight_decay=0.1)
    other = torch.optim.Muon(theirs, 0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for number in range(5):
        for group in (*own.param_groups, *other.param_groups):
            group["lr"] = torch.tensor(0.01) if number == 3 and is_tensor else 0.01 if number >= 3 else group["lr"]
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=random)
            b.grad = a.grad.clone()
        own.step()
        other.step()
    for a, b, t in zip(ours, theirs, start, strict=True):
        torch.testing.assert_close(a, b, atol=5e-4, rtol=1e-3)
        assert float((a - t).detach().abs().max()) > 0.02


@pytest.mark.parametrize("shape", [(3, 32, 32), (2, 16, 48), (2, 48, 16)])
def test_singular_values_go_near_one(shape: tuple[int, int, int]) -> None:
    x = torch.randn(shape, generator=generator("cpu", 0, "orthogonal"))
    found = orthogonal(x).float()
    left, values, right = torch.linalg.svd(x, full_matrices=False)
    wide = values > 0.1 * values[:, :1]  # below, five rounds do not lift them all the way
    reached = torch.diagonal(left.mT @ found @ right.mT, dim1=-2, dim2=-1)
    assert found.shape == shape and bool(wide.float().mean() > 0.8)
    assert float(reached[wide].min()) > 0.6 and float(reached[wide].max()) < 1.3
    alone = torch.cat([orthogonal(matrix[None]).float() for matrix in x])
    torch.testing.assert_close(found, alone, atol=0.02, rtol=0.02)


def test_what_is_no_matrix_is_refused_and_what_has_no_gradient_stays() -> None:
    with pytest.raises(ValueError, match=r"Muon is for matrices, not for a parameter of shape \(3,\)"):
        Muon([torch.nn.Parameter(torch.ones(3))], 0.1, 0.0)
    still = torch.nn.Parameter(torch.ones(2, 2))
    Muon([still], 0.1, 0.5).step()
    assert torch.equal(still, torch.ones(2, 2))
