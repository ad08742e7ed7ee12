"""The FP8 layer benchmark on a CPU: its layer, its contestants and its rows."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from harness.devtools.bench import fp8_layers, fp8_layers_model, fp8_layers_parts
from harness.devtools.bench.fp8_layers import best_launch, best_wgrad, budget, summary
from harness.devtools.bench.fp8_layers_model import BAR, Contestant, Layer, build, layer_rows, lineup, makers
from harness.devtools.bench.fp8_layers_parts import Row, error_rows, product_rows, sides, uses
from harness.devtools.bench.runner import table
from harness.devtools.bench.sync_model import SIZES
from harness.numerics.fp8_flow import use_kernels
from harness.numerics.fp8_gemm import Kernels, Operand, reference
from harness.studies.stage_rates import TRAIN
from tests.trainers.local.test_compiling import trace

TOY = SIZES["toy"]


@pytest.fixture(autouse=True)
def no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times mean nothing here."""
    monkeypatch.setattr(fp8_layers_parts, "WARM_UP", 0)


def layer(what: str = "bf16", *, is_merged: bool = True, length: int = 16) -> Layer:
    """A layer of size toy."""
    return Layer(TOY, makers("cpu")[what], is_merged=is_merged, length=length, device="cpu")


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


def test_merged_and_separate_products_are_one_layer() -> None:
    merged, separate = layer(), layer(is_merged=False)
    for one, many in ((merged.qkv, separate.qkv), (merged.up, separate.up)):
        weights = [part.weight for part in many if isinstance(part, nn.Linear)]
        assert len(weights) == len(many) > 1
        with torch.no_grad():
            one[0].get_parameter("weight").copy_(torch.cat(weights))
    torch.testing.assert_close(merged(inputs()), separate(inputs()), rtol=0.02, atol=0.02)


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


GIVEN = {"tokens": 128, "length": 64, "layers": 1, "separate": False, "eager": True, "quick": False, "repeats": 1,
         "device": "cpu", "seconds": 600.0}  # fmt: skip


def test_rows_of_the_kernels() -> None:
    given = Namespace(**GIVEN)
    who: dict[str, Kernels | None] = {"reference": reference(), "square": reference(is_square=True)}
    entries = lineup(who, given)
    rows = {row["what"]: row for row in layer_rows(TOY, given, entries, time.monotonic() + 600)}
    assert list(rows) == ["bf16", "fp8 held, reference", "fp8 held, square", "bf16, fp32 masters", "fp8, reference"]
    assert rows["bf16"]["x_bf16"] == 1.0 and rows["bf16"]["output_error"] == rows["bf16"]["grad_error"] == 0.0
    assert rows["fp8 held, reference"]["bar"] == rows["fp8 held, square"]["bar"] == BAR
    assert rows["fp8, reference"]["bar"] is None and rows["bf16, fp32 masters"]["grad_error"] < 5e-3
    # Held or not: one layer. Square tiles are another, in the weights' gradients alone.
    errors = {what: (row["output_error"], row["grad_error"]) for what, row in rows.items()}
    assert errors["fp8 held, reference"] == errors["fp8, reference"]
    assert 0.0 < errors["fp8, reference"][0] == errors["fp8 held, square"][0] < 0.1
    assert 0.0 < abs(errors["fp8, reference"][1] - errors["fp8 held, square"][1]) < 0.01
    products = list(product_rows(TOY, given, who))
    assert {(row["layer"], row["product"]) for row in products} == {
        (name, product) for name in ("qkv", "o", "gate_up", "down") for product in ("FProp", "DGrad", "WGrad")
    }
    assert list(best_wgrad(products)) != [] and set(best_wgrad(products)) == {"bf16", "reference", "square"}
    assert sides(SIZES["7b"], False)["gate_up"] == (37888, 3584) and sides(SIZES["7b"], True)["k"] == (512, 3584)


def test_the_contestants_on_a_gpu() -> None:
    names = ("deep_gemm", "scaled_mm", "mixed", "triton", "square")
    who: dict[str, Kernels | None] = {name: replace(reference(), name=name) for name in names}
    given = GIVEN | {"device": "cuda", "eager": False}
    entries = lineup(who, Namespace(**given))
    assert [entry.name for entry in entries] == [
        "bf16", "bf16, compiled", "fp8 held, mixed, compiled", "fp8 held, mixed", "fp8 held, square, compiled",
        "fp8 held, deep_gemm, compiled", "fp8 held, scaled_mm, compiled", "bf16, fp32 masters, compiled",
        "bf16, fp32 masters", "fp8, mixed",
    ]  # fmt: skip
    assert set(TRAIN.values()) <= {entry.name for entry in entries}
    assert all(entry.is_compiled == entry.name.endswith(", compiled") for entry in entries)
    assert all(entry.kernels is who[entry.name.split(", ")[1]] for entry in entries if entry.make == "fp8")
    quick = lineup(who, Namespace(**given | {"quick": True}))
    assert [entry.name for entry in quick] == ["bf16", "fp8 held, mixed"]


@pytest.mark.parametrize("is_separate", [False, True])
def test_compiled_contestants_are_the_eager_ones_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, is_separate: bool
) -> None:
    """As far as they are traced: graphs run by torch's own kernels."""
    trace(monkeypatch, Layer)
    given = Namespace(**GIVEN | {"separate": is_separate})
    for make, kernels in (("bf16", None), ("fp8", reference())):
        found: list[list[Tensor]] = []
        for is_compiled in (False, True):
            model = build(TOY, Contestant(name="", make=make, kernels=kernels, is_compiled=is_compiled), given)
            x, dy = fp8_layers_model.inputs(TOY, given)
            fp8_layers_model.step(model, x, dy)
            with torch.no_grad():
                y = model(x)
            found.append([y, *(p.grad for p in (x, *model.parameters()) if p.grad is not None)])
        assert len(found[0]) == (11 if is_separate else 8)
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_contestant_that_fails_or_has_no_time_is_named_and_the_others_go_on() -> None:
    def by_runs(a: Operand, b: Operand) -> Tensor:
        raise RuntimeError("no such kernel\nat all")

    given = Namespace(**GIVEN)
    who: dict[str, Kernels | None] = {"broken": replace(reference(), by_runs=by_runs)}
    entries = lineup(who, given)
    rows = {row["what"]: row for row in layer_rows(TOY, given, entries, time.monotonic() + 600)}
    assert rows["fp8 held, broken"]["failed"] == "RuntimeError: no such kernel" and rows["bf16"]["failed"] is None
    late = list(layer_rows(TOY, given, entries, time.monotonic()))
    assert [row["failed"] for row in late[:-1]] == ["no time left"] * (len(entries) - 1)
    assert late[-1]["what"] == "bf16" and late[-1]["repeats"] == 1
    assert "broken" not in table([row for row in rows.values() if row["failed"] is None])


def test_square_tiles_cost_little_more_than_runs() -> None:
    errors = {(row["data"], row["WGrad"]): row["error"] for row in error_rows("cpu")}
    assert errors["gaussian", "runs, X kept in bf16"] == pytest.approx(0.036, rel=0.03)  # the specification's
    for data in ("gaussian", "spread"):
        assert errors[data, "runs"] < errors[data, "square tiles of X"] < 1.03 * errors[data, "runs"]


def quantizer_row(what: str, width: int, launch: str, ms: float | None) -> Row:
    """As `quantizer_rows` makes them."""
    return {"quantizer": what, "width": width, "times": USES[what, width], "launch": launch, "ms": ms}


USES = uses(TOY)


def test_a_layer_runs_eight_quantizers() -> None:
    assert sum(USES.values()) == sum(uses(SIZES["7b"]).values()) == 8
    assert uses(SIZES["7b"]) == {
        ("twice", 3584): 3, ("twice", 18944): 1, ("both", 4608): 1, ("both", 3584): 2, ("both", 37888): 1,
        ("square", 18944): 0, ("rows", 18944): 0,
    }  # fmt: skip


def test_the_report_chooses_and_adds_up() -> None:
    slow = [quantizer_row(what, width, "slow", 2.0) for what, width in USES]
    fast = [quantizer_row(what, width, "fast", 1.0) for what, width in list(USES)[:2]]
    assert best_launch(slow + fast) == "fast" and best_launch([]) is None
    assert best_launch(slow + [quantizer_row(what, width, "broken", None) for what, width in USES]) == "slow"
    products = [
        {"layer": layer, "product": product, "what": what, "ms": ms}
        for layer in "abcd"
        for product in ("FProp", "DGrad", "WGrad")
        for what, ms in (("bf16", 3.0), ("mixed", 2.0), ("deep_gemm", 2.5), ("square", 1.0))
    ]
    assert best_wgrad(products) == {"square": 4.0, "mixed": 8.0, "deep_gemm": 10.0, "bf16": 12.0}
    layers = [{"what": "bf16", "ms": 50.0}, {"what": "fp8 held, mixed", "ms": 46.0},
              {"what": "fp8 held, mixed, compiled", "ms": 45.0}, {"what": "fp8 held, square", "ms": 40.0}
              ]  # fmt: skip
    found: Row = {"quantizers": slow, "products": products, "layers": layers, "launch": "slow", "deep": 1}
    rows = {(row["what"], row["of which"].split()[0]): row["ms"] for row in budget(found)}
    best = "fp8 held, mixed, compiled"
    assert rows == {("bf16", "products"): 36.0, ("bf16", "attention"): 14.0, (best, "products"): 24.0,
                    (best, "quantizers"): 16.0, (best, "attention"): 5.0}  # fmt: skip
    assert budget(found | {"quantizers": [*slow[1:], slow[0] | {"ms": None}]}) == budget(found)[:2]
    assert summary(found)[0] == {"best": "launch of the quantizers", "is": "slow"}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "new" / "fp8.json"
    words = ["--size", "toy", "--device", "cpu", "--tokens", "64", "--length", "32", "--repeats", "1"]
    assert fp8_layers.main([*words, "--out", str(out)]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [row["what"] for row in found["layers"]] == ["bf16", "bf16, fp32 masters", "fp8, emulated"]
    assert all(row["ms"] > 0 for row in found["layers"]) and found["tokens"] == 64 and found["is_whole"]
    assert capsys.readouterr().out.splitlines()[-1].startswith("bf16 ")  # the short table is the last
    assert fp8_layers.main([*words, "--length", "48"]) == 2
    assert "--length is 48; it must divide --tokens, which is 64" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert fp8_layers.main(["--size", "toy"]) == 2
        assert "--device cuda: no CUDA device is visible; valid: --device cpu" in capsys.readouterr().err

    def interrupted(*_: object) -> Iterator[Row]:
        yield {"layer": "o", "product": "WGrad", "what": "bf16", "ms": 1.0, "tflops": 1.0, "x_bf16": 1.0}
        raise KeyboardInterrupt

    monkeypatch.setattr(fp8_layers, "product_rows", interrupted)
    assert fp8_layers.main([*words, "--out", str(out)]) == 130
    found = json.loads(out.read_text(encoding="utf-8"))
    assert len(found["layers"]) == 3 and len(found["products"]) == 1 and not found["is_whole"]
    assert "interrupted" in capsys.readouterr().err
