"""The FP8 layer benchmark on a CPU: its layer, its contestants and its rows."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from harness.bench import fp8_layers
from harness.bench.fp8_layers_model import Layer, makers, pieces
from harness.bench.sync_model import SIZES
from harness.numerics.fp8_flow import use_kernels
from harness.numerics.fp8_gemm import reference

TOY = SIZES["toy"]


def layer(what: str = "bf16", *, is_fused: bool = True, length: int = 16) -> Layer:
    """Of size toy."""
    return Layer(TOY, makers("cpu")[what], pieces(False), is_fused=is_fused, length=length, device="cpu")


def inputs(tokens: int = 32) -> Tensor:
    """bf16 [T, H]."""
    return torch.randn(tokens, TOY.hidden, generator=torch.Generator().manual_seed(3)).bfloat16()


def test_attention_is_causal_and_stays_in_its_sequence() -> None:
    model, x = layer(), inputs()
    with torch.no_grad():
        before = model(x)
        x[10] += 1.0
        after = model(x)
    moved = (before != after).any(-1)
    assert not moved[:10].any() and moved[10:16].all() and not moved[16:].any()


def test_fused_and_separate_products_are_one_layer() -> None:
    fused, separate = layer(), layer(is_fused=False)
    for one, many in ((fused.qkv, separate.qkv), (fused.up, separate.up)):
        weights = [part.weight for part in many if isinstance(part, nn.Linear)]
        assert len(weights) == len(many) > 1
        with torch.no_grad():
            one[0].weight.copy_(torch.cat(weights))
    torch.testing.assert_close(fused(inputs()), separate(inputs()), rtol=0.02, atol=0.02)


def test_contestants_compute_one_layer_and_fp8_its_approximation() -> None:
    x = inputs()
    want = layer()(x).detach().float() - x.float()
    for what, low, high in (("bf16, fp32 masters", 0.0, 1e-6), ("fp8", 0.01, 0.2)):
        found = layer(what)
        for kernels in (None, reference()) if what == "fp8" else (None,):
            assert len(use_kernels(found, kernels)) == (4 if what == "fp8" else 0)
            y = found(x).detach()
            assert y.dtype == torch.bfloat16
            assert low <= float((y.float() - x.float() - want).norm() / want.norm()) <= high, (what, kernels)


def test_rows_of_the_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    given = Namespace(tokens=128, length=64, layers=1, separate=False, compiled=False, repeats=1, device="cpu")
    who = {"reference": reference()}
    rows = fp8_layers.layer_rows(TOY, "cpu", given, who)
    assert [row["what"] for row in rows] == ["bf16", "bf16, fp32 masters", "fp8, reference", "fp8 held, reference"]
    assert rows[0]["x_bf16"] == 1.0 and rows[0]["output_error"] == 0.0 and rows[3]["bar"] == fp8_layers.BAR
    assert 0.0 < rows[2]["output_error"] == rows[3]["output_error"] < 0.1
    products = fp8_layers.product_rows(TOY, "cpu", given, who)
    assert len(products) == 4 * 3 * 2
    assert {(row["layer"], row["product"]) for row in products} == {
        (name, product) for name in ("qkv", "o", "gate_up", "down") for product in ("FProp", "DGrad", "WGrad")
    }
    assert len(fp8_layers.quantizer_rows(TOY, given, who)) == 3 * 4 + 2 * 4
    assert fp8_layers.sides(SIZES["7b"], False)["gate_up"] == (37888, 3584)
    assert fp8_layers.sides(SIZES["7b"], True)["k"] == (512, 3584)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "fp8.json"
    words = ["--size", "toy", "--device", "cpu", "--tokens", "64", "--length", "32", "--repeats", "1"]
    assert fp8_layers.main([*words, "--out", str(out)]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [row["what"] for row in found["layers"]] == ["bf16", "bf16, fp32 masters", "fp8, emulated"]
    assert all(row["ms"] > 0 for row in found["layers"]) and found["tokens"] == 64
    assert "fp8, emulated" in capsys.readouterr().out
    assert fp8_layers.main([*words, "--length", "48"]) == 2
    assert "--length is 48; it must divide --tokens, which is 64" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert fp8_layers.main(["--size", "toy"]) == 2
        assert "--device is cuda, but torch sees no CUDA device" in capsys.readouterr().err
