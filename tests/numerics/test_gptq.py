"""GPTQ: the identity that proves it, its limits (round to nearest), every option, bad input, and llm-compressor."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.foundation.seeds import generator
from harness.numerics.formats import format_named
from harness.numerics.gptq import GPTQResult, accumulate, gptq
from harness.numerics.quantize import fake_quantize, quantize

FORMATS = [
    "int2_g16", "int2_g16_asym", "int3_g32_qat", "int4_g32", "int4_g32_asym", "int4_g32_asym_qat", "int8_g64",
    "int8_channel", "int8_channel_ct", "e4m3_channel", "e4m3_tensor", "e4m3_block", "mxfp4", "mxfp8", "nvfp4",
    "nvfp4_torchao",
]  # fmt: skip
"""Every width, sign, layout of scales and rule of integers, each once."""
OPTIONS: list[dict[str, Any]] = [{}, {"act_order": "static"}]

CASES = [(name, OPTIONS[0]) for name in FORMATS] + [
    (name, options) for name in ("int4_g32_asym", "int3_g32_qat", "int8_channel", "nvfp4") for options in OPTIONS[1:]
]


def inputs(columns: int = 128, tokens: int = 300) -> Tensor:
    """Correlated inputs of unequal size, [tokens, columns]."""
    draw = generator("cpu", 3, "gptq_inputs", columns)
    mixed = torch.randn(tokens, columns // 4, generator=draw) @ torch.randn(columns // 4, columns, generator=draw)
    gains = torch.randn(columns, generator=draw).exp()
    return (mixed / math.sqrt(columns // 4) + 0.5 * torch.randn(tokens, columns, generator=draw)) * gains


def hessian(dtype: torch.dtype = torch.float64, columns: int = 128) -> Tensor:
    return accumulate(torch.zeros(columns, columns, dtype=dtype), 0, inputs(columns))[0]


def weight(rows: int = 12, columns: int = 128) -> Tensor:
    return 0.05 * torch.randn(rows, columns, generator=generator("cpu", 3, "gptq_weight", rows))


def damped(h: Tensor, r: GPTQResult) -> Tensor:
    return h + r.damping * h.diagonal().mean() * torch.eye(h.shape[0], dtype=h.dtype)


def output_error(delta: Tensor, h: Tensor) -> float:
    """tr(delta H delta^T)."""
    return float((delta.double() @ h.double() * delta.double()).sum())


def test_hessian_is_a_running_mean_of_tokens() -> None:
    x = inputs(32, 60).view(4, 15, 32)
    h, count = None, 0
    for batch in x:
        h, count = accumulate(h, count, batch)
    assert h is not None and count == 60 and h.dtype == torch.float32
    rows = x.reshape(-1, 32).double()
    assert torch.allclose(h.double(), 2 / 60 * rows.T @ rows, rtol=1e-5, atol=1e-6)
    again, same = accumulate(h, count, x[:, :0])
    assert again is h and same == 60


def test_hessian_takes_kept_tokens_only_and_halves_without_overflow() -> None:
    x = inputs(16, 24).view(2, 12, 16)
    keep = torch.arange(12).expand(2, 12) < torch.tensor([[12], [5]])
    padded = torch.where(keep[..., None], x, math.nan)
    h, count = accumulate(None, 0, padded, keep)
    assert count == 17 and torch.equal(h, accumulate(None, 0, x[keep])[0])
    # In float16 itself, 300^2 is beyond its largest number.
    assert accumulate(None, 0, torch.full((1, 2), 300.0, dtype=torch.float16))[0].tolist() == [[180000.0] * 2] * 2


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_identity_hessian_is_round_to_nearest(name: str, options: dict[str, Any]) -> None:
    fmt, w = format_named(name), weight()
    rtn = quantize(w, fmt)
    if name == "int8_channel":  # Its dynamic codes are w * (127 / amax), those of a given scale w * (1 / scale).
        rtn = quantize(w, fmt, scale=rtn.scale)
    r = gptq(w, torch.eye(128), fmt, **options)
    assert rtn.scale is not None and torch.equal(r.scale.float(), rtn.scale.float())
    assert torch.equal(r.codes.view(torch.uint8), rtn.codes.view(torch.uint8))
    assert rtn.zero_point is None or torch.equal(r.zero_point, rtn.zero_point)  # type: ignore[arg-type]
    assert torch.equal(r.preround, w)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_squared_errors_are_the_damped_output_error(name: str, options: dict[str, Any]) -> None:
    w, fmt = weight(), format_named(name)
    # The errors of 8 bits are a hundredth of the weights, whose last float32 bits they are left with.
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-3 if name.startswith("int8") else 1e-4)):
        h = hessian(dtype)
        r = gptq(w, h, fmt, **options)
        delta = w.double() - r.values.double()
        expected = (delta @ damped(h, r).double() * delta).sum(1)
        assert torch.allclose(r.errors.double().square().sum(1), expected, rtol=tolerance, atol=0)
        assert torch.allclose(2 * r.loss.double(), expected, rtol=tolerance, atol=0)
        # Plain rounding has another error by far, so this is no identity of any numbers.
        assert output_error(w - fake_quantize(w, fmt), damped(h, r)) > 1.2 * expected.sum()


@pytest.mark.parametrize("name", ["int4_g32", "int3_g64_asym", "int8_channel", "nvfp4"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_result_does_not_depend_on_the_block(name: str, options: dict[str, Any]) -> None:
    w, h = weight(), hessian()
    results = [gptq(w, h, format_named(name), block=block, **options) for block in (1, 24, 128)]
    for r in results[1:]:
        assert torch.equal(r.codes, results[0].codes)
        assert torch.equal(r.scale.float(), results[0].scale.float())
        assert torch.allclose(r.preround, results[0].preround, atol=1e-6)


def test_less_output_error_than_round_to_nearest() -> None:
    h = hessian()
    sums = {"rtn": 0.0, "none": 0.0, "static": 0.0}
    for layer in range(4):
        w = weight(20 + layer)
        sums["rtn"] += output_error(w - fake_quantize(w, format_named("int3_g32")), h)
        for order in ("none", "static"):
            sums[order] += output_error(w - gptq(w, h, format_named("int3_g32"), act_order=order).values, h)
    assert sums["static"] < sums["none"] < 0.6 * sums["rtn"]


@pytest.mark.parametrize("name", ["int4_g32", "int3_g64_asym", "int8_channel_ct", "nvfp4"])
def test_first_column_is_rounded_to_nearest_and_the_others_are_not(name: str) -> None:
    w, h, fmt = weight(), hessian(), format_named(name)
    rtn = quantize(w, fmt).codes
    for order in ("none", "static"):
        r = gptq(w, h, fmt, act_order=order)
        first = 0 if order == "none" else int(h.diagonal().argmax())
        assert torch.equal(r.codes[:, first], rtn[:, first])
        assert torch.equal(r.preround[:, first], w[:, first])
        assert not torch.equal(r.codes, rtn)


@pytest.mark.parametrize(("name", "options"), [case for case in CASES if "nvfp4" not in case[0]], ids=str)
def test_what_was_rounded_rounds_to_the_values_again(name: str, options: dict[str, Any]) -> None:
    fmt, w, h = format_named(name), weight(), hessian(torch.float32)
    r = gptq(w, h, fmt, **options)
    assert torch.equal(fake_quantize(r.preround, fmt, scale=r.scale, zero_point=r.zero_point), r.values)
    # From the original weight, the same scales round to nearest: what GPTQ did is lost.
    assert not torch.equal(fake_quantize(w, fmt, scale=r.scale, zero_point=r.zero_point), r.values)


def test_what_was_rounded_rounds_to_nvfp4_values_again() -> None:
    fmt, w = format_named("nvfp4"), weight()
    r = gptq(w, hessian(torch.float32), fmt)
    q = quantize(r.preround, fmt, scale=r.scale, tensor_amax=w.abs().amax())
    assert torch.equal(q.codes, r.codes) and torch.equal(q.global_scale, r.global_scale)  # type: ignore[arg-type]


def test_act_order_keeps_the_scales() -> None:
    w, h, fmt = weight(), hessian(), format_named("int4_g32")
    plain, static = gptq(w, h, fmt), gptq(w, h, fmt, act_order="static")
    assert torch.equal(static.scale, plain.scale) and not torch.equal(static.codes, plain.codes)


def test_dead_inputs_lose_their_weights_and_disturb_nobody() -> None:
    x, w, fmt = inputs(64), weight(8, 64), format_named("int4_g32_asym")
    x[:, [3, 40]] = 0.0
    h, _ = accumulate(None, 0, x)
    r = gptq(w, h, fmt, act_order="static")
    assert not r.values[:, [3, 40]].any() and torch.equal(r.scale, quantize(w, fmt).scale)  # type: ignore[arg-type]
    w[:, [3, 40]] = 0.0
    delta = w - r.values
    alive = h + torch.diag((h.diagonal() == 0).float())
    assert r.errors.square().sum().item() == pytest.approx(output_error(delta, damped(alive, r)), rel=1e-4)


def test_failing_factorisation_damps_more_then_rounds_to_nearest() -> None:
    w, fmt = weight(8, 32), format_named("int4_g32")
    h = torch.eye(32)
    for smallest, damping, is_fallback in (
        (-0.005, 0.01, False),
        (-0.05, 0.1, False),
        (-0.5, 1.0, False),
        (-2, 1.0, True),
    ):
        h[7, 7] = smallest
        r = gptq(w, h, fmt)
        assert (r.damping, r.is_fallback) == (pytest.approx(damping), is_fallback)
    rtn = quantize(w, fmt)
    assert torch.equal(r.codes, rtn.codes)
    assert torch.allclose(r.loss, (w - r.values).square().sum(1) / 2)


def test_fewer_tokens_than_inputs() -> None:
    x, w = inputs(128, 20), weight()
    h, _ = accumulate(None, 0, x)
    r = gptq(w, h, format_named("int4_g32"))
    assert not r.is_fallback and r.damping == 0.01 and bool(r.values.isfinite().all())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"w": torch.ones(4, 40)}, r"layer.up has shape \(4, 40\); GPTQ to int4_g32 needs .* multiple of 32"),
        ({"fmt": "nf4"}, "format nf4: GPTQ of layer.up"),
        ({"fmt": "bf16"}, "format bf16: GPTQ of layer.up"),
        ({"h": torch.full((64, 64), math.nan)}, "layer.up: its Hessian or the weight itself is not finite"),
        ({"w": torch.full((4, 64), math.inf)}, "layer.up: its Hessian or the weight itself is not finite"),
        ({"h": torch.zeros(64, 64)}, "Hessian of layer.up is zero: no calibration token"),
        ({"h": torch.eye(32)}, r"Hessian of layer.up is torch.float32 \(32, 32\); valid: .*\(64, 64\)"),
        ({"h": torch.eye(64).half()}, "Hessian of layer.up is torch.float16"),
        ({"act_order": "weight"}, "act_order 'weight' is unknown; valid: none, static"),
        ({"block": 0}, "block is 0"),
        ({"damping": -0.1}, "damping -0.1"),
    ],
    ids=str,
)
def test_bad_input(change: dict[str, Any], words: str) -> None:
    call: dict[str, Any] = {"w": torch.ones(4, 64), "h": torch.eye(64), "fmt": "int4_g32", "name": "layer.up"} | change
    with pytest.raises(ValueError, match=words):
        gptq(call.pop("w"), call.pop("h"), format_named(call.pop("fmt")), **call)


@lru_cache(maxsize=1)
def oracle() -> dict[str, NDArray[np.generic]]:
    with np.load(Path(__file__).parents[1] / "oracles" / "llmcompressor.npz", allow_pickle=False) as npz:
        return {key: npz[key] for key in npz.files}


def test_hessian_equals_llm_compressor() -> None:
    x, theirs = torch.from_numpy(oracle()["x"]), torch.from_numpy(oracle()["h"])
    h, count = None, 0
    for batch in x.chunk(3):
        h, count = accumulate(h, count, batch)
    assert h is not None and torch.allclose(h, theirs, rtol=1e-4, atol=1e-6 * theirs.abs().max().item())


@pytest.mark.parametrize("case", sorted({key.rsplit("/", 1)[0] for key in oracle() if "/" in key}))
def test_equals_llm_compressor(case: str) -> None:
    table = {key: torch.from_numpy(value) for key, value in oracle().items() if key.startswith(case) or key in "wh"}
    name, order = case.split("/")
    # Float64 too: where both precisions give its float32 codes, no code hangs on the last bit of a machine's BLAS.
    for dtype in (torch.float32, torch.float64):
        r = gptq(table["w"], table["h"].to(dtype), format_named(name), block=64, act_order=order)  # type: ignore[arg-type]
        assert torch.equal(r.scale.float(), table[f"{case}/scale"])
        if r.zero_point is not None:
            assert torch.equal(r.zero_point.float(), table[f"{case}/zero"].float())
        assert torch.equal(r.values, table[f"{case}/values"])
        assert r.loss.sum().item() == pytest.approx(table[f"{case}/loss"].item(), rel=1e-4)
