"""The FP8 layer benchmark on a CPU: its layer, its contestants and its rows."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.devtools.bench import fp8_layers, runner
from harness.devtools.bench.fp8_layers_model import BAR, Contestant, Layer, build, lineup, makers
from harness.numerics.fp8_flow import use_kernels
from harness.numerics.fp8_gemm import Kernels, Operand, reference
from harness.studies.stage_rates import TRAIN
from harness.studies.throughput.shapes import SIZES
from tests.trainers.local.test_compiling import trace

TOY = SIZES["toy"]
GIVEN = Namespace(size="toy", tokens=128, length=64, repeats=1, device="cpu")


@pytest.fixture(autouse=True)
def no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times mean nothing here."""
    monkeypatch.setattr(fp8_layers, "WARM_UP", 0)


def layer(what: str = "bf16") -> Layer:
    """A layer of size toy, in sequences of 16 tokens."""
    return Layer(TOY, makers("cpu")[what], length=16, device="cpu")


def inputs(tokens: int = 32) -> Tensor:
    """bf16 [T, H]."""
    return torch.randn(tokens, TOY.hidden_size, generator=torch.Generator().manual_seed(3)).bfloat16()


def test_attention_is_causal_and_stays_in_its_sequence() -> None:
    model, x = layer(), inputs()
    with torch.no_grad():
        before = model(x)
        x[10] += 1.0
        after = model(x)
    moved = (before != after).any(-1)
    assert not moved[:10].any() and moved[10:16].all() and not moved[16:].any()


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


def test_rows_of_the_kernels() -> None:
    who: dict[str, Kernels | None] = {"reference": reference(), "square": reference(is_square=True)}
    rows = {row["what"]: row for row in fp8_layers.layer_rows(GIVEN, lineup(who, is_compiled=False))}
    assert list(rows) == ["bf16", "fp8 held, reference", "fp8 held, square", "bf16, fp32 masters", "fp8, reference"]
    assert rows["bf16"]["x_bf16"] == 1.0 and rows["bf16"]["output_error"] == rows["bf16"]["grad_error"] == 0.0
    assert rows["fp8 held, reference"]["bar"] == rows["fp8 held, square"]["bar"] == BAR
    assert rows["fp8, reference"]["bar"] is None and rows["bf16, fp32 masters"]["grad_error"] < 5e-3
    # Held or not: one layer. Square tiles are another, in the weights' gradients alone.
    errors = {what: (row["output_error"], row["grad_error"]) for what, row in rows.items()}
    assert errors["fp8 held, reference"] == errors["fp8, reference"]
    assert 0.0 < errors["fp8, reference"][0] == errors["fp8 held, square"][0] < 0.1
    assert 0.0 < abs(errors["fp8, reference"][1] - errors["fp8 held, square"][1]) < 0.01


def test_the_contestants_on_a_gpu() -> None:
    names = ("deep_gemm", "scaled_mm", "mixed", "square")
    who: dict[str, Kernels | None] = {name: replace(reference(), name=name) for name in names}
    entries = lineup(who, is_compiled=True)
    assert [entry.name for entry in entries] == [
        "bf16", "bf16, compiled", "fp8 held, mixed, compiled", "fp8 held, mixed", "fp8 held, square, compiled",
        "fp8 held, deep_gemm, compiled", "fp8 held, scaled_mm, compiled", "bf16, fp32 masters, compiled",
        "bf16, fp32 masters", "fp8, mixed",
    ]  # fmt: skip
    assert set(TRAIN.values()) <= {entry.name for entry in entries}
    assert all(entry.is_compiled == entry.name.endswith(", compiled") for entry in entries)
    assert all(entry.kernels is who[entry.name.split(", ")[1]] for entry in entries if entry.make == "fp8")


def test_compiled_contestants_are_the_eager_ones_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as they are traced: graphs run by torch's own kernels."""
    trace(monkeypatch, Layer)
    for make, kernels in (("bf16", None), ("fp8", reference())):
        found: list[list[Tensor]] = []
        for is_compiled in (False, True):
            entry = Contestant(name="", make=make, kernels=kernels, is_compiled=is_compiled)
            model = build(TOY, entry, length=64, device="cpu")
            x, dy = fp8_layers.inputs(GIVEN)
            fp8_layers.step(model, x, dy)
            with torch.no_grad():
                y = model(x)
            found.append([y, *(p.grad for p in (x, *model.parameters()) if p.grad is not None)])
        assert len(found[0]) == 8
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_contestant_that_fails_is_named_and_the_others_go_on() -> None:
    def by_runs(a: Operand, b: Operand) -> Tensor:
        raise RuntimeError("no such kernel\nat all")

    who: dict[str, Kernels | None] = {"broken": replace(reference(), by_runs=by_runs)}
    rows = {row["what"]: row["failed"] for row in fp8_layers.layer_rows(GIVEN, lineup(who, is_compiled=False))}
    said = "RuntimeError: no such kernel"
    assert rows == {
        "fp8 held, broken": said, "fp8, broken": said, "bf16": None, "bf16, fp32 masters": None
    }  # fmt: skip


def test_without_bf16_there_is_nothing_to_compare_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object, **named: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried\nto")

    monkeypatch.setattr(fp8_layers, "build", full)
    assert runner.run("fp8_layers", ["--size", "toy", "--device", "cpu", "--tokens", "64", "--length", "32"]) == 2
    said = "fp8_layers: bf16, which all others are compared with: OutOfMemoryError: CUDA out of memory. Tried\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("words", [("--tokens", "0"), ("--tokens", "-64"), ("--length", "0"), ("--repeats", "-1")])
def test_numbers_below_one_are_refused(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.run("fp8_layers", ["--size", "toy", "--device", "cpu", *words]) == 2
    assert capsys.readouterr().err == f"fp8_layers: {words[0]}: {words[1]}; valid: >= 1\n"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "fp8.json"
    words = ["--size", "toy", "--device", "cpu", "--tokens", "64", "--length", "32", "--repeats", "1"]
    assert runner.run("fp8_layers", [*words, "--out", str(out)]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [row["what"] for row in found["layers"]] == ["bf16", "bf16, fp32 masters", "fp8, emulated"]
    assert all(row["ms"] > 0 for row in found["layers"]) and found["tokens"] == 64
    assert capsys.readouterr().out.splitlines()[-1].startswith("fp8, emulated ")
    assert runner.run("fp8_layers", [*words, "--length", "48"]) == 2
    assert "--length is 48; it must divide --tokens, which is 64" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert runner.run("fp8_layers", ["--size", "toy"]) == 2
        assert "--device cuda: no CUDA device is visible; valid: --device cpu" in capsys.readouterr().err
