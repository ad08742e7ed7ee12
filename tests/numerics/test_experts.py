"""Routing and mixing of experts: golden gates, replayed experts, gradients, and the sum by brute force."""

from __future__ import annotations

import pytest
import torch

from harness.numerics.experts import mix, route

SCORES = torch.tensor([[2.0, 1.0, 0.5, 0.0]])


@pytest.mark.parametrize(
    ("given", "is_normed", "ids", "gates"),
    [
        (None, True, [0, 1], [0.731059, 0.268941]),
        ([0, 2], True, [0, 2], [0.817574, 0.182426]),
        ([0, 2], False, [0, 2], [0.579259, 0.129250]),
        ([-1, -1], True, [0, 1], [0.731059, 0.268941]),  # nothing is given: the router's own
    ],
)
def test_gates_are_the_routers_softmax_over_the_chosen(
    given: list[int] | None, is_normed: bool, ids: list[int], gates: list[float]
) -> None:
    """R3, arXiv 2510.11370 (losses.md section 6.7)."""
    chosen = None if given is None else torch.tensor([given], dtype=torch.int16)
    found, weights = route(SCORES, 2, is_normed=is_normed, given=chosen)
    assert found.tolist() == [ids] and found.dtype == torch.int64
    assert weights[0].tolist() == pytest.approx(gates, abs=1e-6)


def test_replayed_own_experts_change_no_bit_and_the_router_has_a_gradient() -> None:
    scores = torch.randn(50, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    ids, gates = route(scores, 3, is_normed=True)
    again, same = route(scores, 3, is_normed=True, given=ids.to(torch.int16))
    assert torch.equal(ids, again) and torch.equal(gates, same)
    torch.testing.assert_close(gates.sum(-1), torch.ones(50))
    other = (ids + 1) % 8
    _, forced = route(scores, 3, is_normed=True, given=other)
    forced[:, 0].sum().backward()
    assert scores.grad is not None
    reached = scores.grad != 0
    assert torch.equal(reached, torch.zeros_like(reached).scatter(1, other, True))  # the replayed logits, no others


def test_unlikely_experts_have_gates_that_are_numbers() -> None:
    scores = torch.tensor([[300.0, 0.0, -1.0]])
    _, gates = route(scores, 2, is_normed=True, given=torch.tensor([[1, 2]]))  # each has probability 0 in float32
    assert gates[0].tolist() == pytest.approx([0.731059, 0.268941], abs=1e-6)


def test_mix_is_the_sum_over_chosen_experts() -> None:
    generator = torch.Generator().manual_seed(2)
    x, matrices = torch.randn(40, 6, generator=generator), torch.randn(5, 6, 6, generator=generator)
    ids, gates = route(torch.randn(40, 5, generator=generator), 2, is_normed=True)
    ids[ids == 3] = 4  # nobody uses expert 3
    called: list[int] = []

    def expert(number: int, rows: torch.Tensor) -> torch.Tensor:
        called.append(number)
        return rows @ matrices[number]

    found = mix(x, ids, gates, 5, expert)
    wanted = torch.stack(
        [sum(g * (row @ matrices[i]) for i, g in zip(own, gate, strict=True)) for row, own, gate in
         zip(x, ids.tolist(), gates.tolist(), strict=True)]
    )  # fmt: skip
    assert called == [0, 1, 2, 4]
    torch.testing.assert_close(found, wanted)
