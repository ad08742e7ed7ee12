from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from harness.numerics.formats import format_named
from harness.numerics.kv_scales import (
    inference_scale,
    kv_amaxes,
    kv_scale,
    percentile_amax,
    quantize_kv,
    scale_names,
    trainer_scales,
)
from harness.numerics.quantize import fake_quantize, quantize

E4M3 = format_named("e4m3_kv")
E5M2 = format_named("e5m2_kv")


def test_constant_keys_give_the_calibrated_scale() -> None:
    k = torch.full((4, 8), -3.0)
    assert kv_scale(k.abs().max(), E4M3).item() == pytest.approx(3 * 1.05 / 448, rel=1e-6)
    assert kv_scale(k.abs().max(), E5M2, margin=1.0).item() == pytest.approx(3 / 57344, rel=1e-6)
    dynamic = quantize(k, E4M3).scale
    assert dynamic is not None and torch.equal(dynamic, kv_scale(k.abs().max(), E4M3))


def test_zero_keys_give_the_smallest_scale_that_engines_load() -> None:
    scales = kv_scale(torch.tensor([0.0, 1e-9, 1.0]), E4M3)
    assert scales[:2].tolist() == [pytest.approx(1e-6)] * 2 and scales[2] > 1e-3


def test_inference_side_constants() -> None:
    amax = torch.tensor(20.0)
    assert [inference_scale(amax, E4M3, role).item() for role in ("q", "k", "v")] == pytest.approx([0.1, 0.1, 0.2])


def test_stored_and_read_back() -> None:
    x = torch.tensor([1.06, -0.03, 100.0, 447.0, 500.0, -1e6])
    assert quantize_kv(x, E4M3, torch.tensor(1.0)).tolist() == [1.0, -0.029296875, 96.0, 448.0, 448.0, -448.0]
    halved = quantize_kv(x, E4M3, torch.tensor(2.0))
    assert halved.tolist() == [1.0, -0.03125, 96.0, 448.0, 512.0, -896.0]
    half = quantize_kv(x.half()[:2], E4M3, torch.tensor(0.01))
    assert torch.allclose(half, torch.tensor([1.06, -0.03]), rtol=0.07) and half.dtype == torch.float32


def test_a_hundredth_of_the_scale_saturates() -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    scale = kv_scale(x.abs().max(), E4M3)
    good, bad = (quantize_kv(x, E4M3, s) for s in (scale, scale * 0.01))
    assert ((good - x).norm() / x.norm()).item() < 0.03
    assert ((bad - x).norm() / x.norm()).item() > 0.9
    assert bad.abs().max().item() == pytest.approx(4.48 * scale.item())


def test_percentile_of_micro_batches() -> None:
    amaxes = [float(i) for i in range(1, 2001)]
    assert percentile_amax(amaxes).item() == 1 + round(0.999 * 1999)
    assert percentile_amax(list(reversed(amaxes[:500]))).item() == 500
    assert percentile_amax([5.0, 1.0, 3.0], 0.5).item() == 3
    with pytest.raises(ValueError, match="amaxes is empty"):
        percentile_amax([])


def test_trainer_side_scales_by_name() -> None:
    names = scale_names(11)
    assert names == {
        "q": "model.layers.11.self_attn.attn.q_scale",
        "k": "model.layers.11.self_attn.k_scale",
        "v": "model.layers.11.self_attn.v_scale",
    }
    scales = trainer_scales({names["k"]: [1.0, 4.0, 2.0], names["v"]: torch.tensor([0.0])}, E4M3)
    assert scales[names["k"]].item() == pytest.approx(4 * 1.05 / 448)
    assert scales[names["v"]].item() == pytest.approx(1e-6)


def test_one_scale_for_all_heads() -> None:
    k = torch.randn(2, 4, 8, 16, generator=torch.Generator().manual_seed(1))
    scale = kv_scale(k.abs().max(), E4M3)
    heads = torch.stack([quantize_kv(k[:, h], E4M3, scale) for h in range(4)], dim=1)
    assert torch.equal(heads, quantize_kv(k, E4M3, scale))
    assert torch.equal(heads, fake_quantize(k, E4M3))


class Core(nn.Module):
    """The attention core, which sees K and V."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Nothing."""
        return v


class Layers(nn.Module):
    """A model of two layers whose K is the token id and whose V is minus twice that; the second has ten times it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"self_attn": nn.ModuleDict({"core": Core()})}) for _ in range(2))
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, ids: Tensor) -> None:
        """[B, L] int64."""
        self.shapes.append(tuple(ids.shape))
        for i, layer in enumerate(self.layers):
            k = ids.float()[:, None, :, None].expand(-1, 2, -1, 4) * 10**i
            layer["self_attn"]["core"](k[:, :, -1:], k, -2 * k, None)


def test_maxima_of_micro_batches_without_padding() -> None:
    model = Layers()
    ids = torch.tensor([[1, 2, 99, 99], [5, 99, 99, 99], [3, 3, 3, 99]])
    lengths = torch.tensor([2, 1, 3])
    found = kv_amaxes(model, ids, lengths, rows=2)
    assert list(found) == [scale_names(i)[role] for i in (0, 1) for role in ("k", "v")]
    assert {name: [v.item() for v in values] for name, values in found.items()} == {
        "model.layers.0.self_attn.k_scale": [5, 3],
        "model.layers.0.self_attn.v_scale": [10, 6],
        "model.layers.1.self_attn.k_scale": [50, 30],
        "model.layers.1.self_attn.v_scale": [100, 60],
    }
    assert model.shapes == [(2, 2), (1, 3)]
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_padding_may_hold_anything() -> None:
    class Spoilt(Layers):
        def forward(self, ids: Tensor) -> None:
            k = torch.where(ids == 99, torch.nan, ids.float())[:, None, :, None]
            for layer in self.layers:
                layer["self_attn"]["core"](k, k, k, None)

    found = kv_amaxes(Spoilt(), torch.tensor([[1, 99], [2, 4]]), torch.tensor([1, 2]), rows=8)
    assert all(values[0].item() == 4 for values in found.values())


def test_nothing_to_look_into() -> None:
    with pytest.raises(ValueError, match="0 attention cores"):
        kv_amaxes(nn.Linear(2, 2), torch.zeros(1, 2, dtype=torch.int64), torch.ones(1), rows=1)
    with pytest.raises(ValueError, match="0 rows"):
        kv_amaxes(Layers(), torch.zeros(0, 2, dtype=torch.int64), torch.ones(0), rows=1)
