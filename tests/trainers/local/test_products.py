"""Kernels of the trainer's linear layers in a run: FP8 kernels where there are some, else the emulation bit for bit."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.api import weight_format
from harness.config.compose import Composed
from harness.numerics import fp8_gemm
from harness.numerics.formats import Format
from harness.numerics.fp8_flow import FP8Linear, use_kernels
from harness.numerics.fp8_gemm import Kernels, Operand
from harness.run.cell import run_cell
from harness.run.loop import grpo_step
from harness.run.run import Run
from harness.trainers.local import products
from harness.trainers.local.products import kernels_of, use_fp8
from tests.toy import small_config, small_launch, small_run
from tests.trainers.local.test_compiling import trace
from tests.trainers.local.test_forward import model_of

WIDE = ("method=jet_rl", "model=xs128", "base.target_accuracy=0.0", "base.num_eval=16", "trainer.lr=1e-3")
"""Sides of 128 and 384, which kernels take; the base is whatever one evaluation leaves."""


LEARNS = (*WIDE, "base.eval_every=100")
"""From a base that is right now and then: there are gradients."""


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results with the base of LEARNS, which takes seconds to train."""
    return tmp_path_factory.mktemp("learned")


def steps(
    folder: Path, count: int = 2, overrides: Sequence[str] = WIDE, **launch: Any
) -> tuple[Run, list[dict[str, float]]]:
    run = small_run(folder, overrides, **launch)
    return run, [grpo_step(run) for _ in range(count)]


@pytest.fixture
def weighed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Stands in for a GPU: the definition of the kernels computes. The shape of every weight that is quantized."""
    shapes, reference = list[tuple[int, ...]](), fp8_gemm.reference()

    def weight(w: Tensor, fmt: Format) -> tuple[Operand, Operand]:
        shapes.append(tuple(w.shape))
        return reference.weight(w, fmt)

    monkeypatch.setattr(products, "kernels_of", lambda device, wanted: replace(reference, weight=weight))
    return shapes


def flow_layers(run: Run) -> dict[str, FP8Linear]:
    return {name: m for name, m in run.trainer.model.named_modules() if isinstance(m, FP8Linear)}


def test_on_a_cpu_everything_is_emulated_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options, and the codes that are held for a step, change nothing of what there was without them."""
    run, rows = steps(tmp_path)
    assert run.trainer.products() == {"bf16, emulated": 1, "e4m3_block x e4m3_1x128, emulated": 14}
    monkeypatch.setattr("harness.trainers.local.trainer.held_weights", lambda model: nullcontext())
    monkeypatch.setattr(Composed, "wrap", lambda self, model: plain(self, model))
    again, found = steps(tmp_path, fp8_kernels="emulated")
    assert [row["train/loss"] for row in rows] == [row["train/loss"] for row in found]
    for (_, a), (_, b) in zip(run.trainer.weights(), again.trainer.weights(), strict=True):
        assert torch.equal(a, b)


def plain(self: Composed, model: Any) -> Any:
    """The parts' wraps, and layers that nobody has touched since."""
    for part in self.parts:
        model = part.wrap(model, self.plan, self.fixed)
    assert all(module.kernels is None for module in model.modules() if isinstance(module, FP8Linear))
    return model


def test_a_run_on_kernels_is_the_emulated_run_up_to_its_rounding(learned: Path, weighed: list[Any]) -> None:
    plain_run, rows = steps(learned, 2, LEARNS, fp8_kernels="emulated")
    run, found = steps(learned, 2, LEARNS)
    assert plain_run.trainer.products() != run.trainer.products()
    assert run.trainer.products() == {"bf16, emulated": 1, "e4m3_block x e4m3_1x128, reference": 14}
    for row, wanted in zip(found, rows, strict=True):
        assert wanted["train/grad_norm"] > 0.1
        assert row["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=0.02)
        assert row["mismatch/kl_k3"] < 2 * wanted["mismatch/kl_k3"] + 1e-6
    assert weighed


@pytest.mark.parametrize("checkpoint_layers", [False, True])
@pytest.mark.parametrize(("tokens", "passes", "times"), [(32768, 1, 1), (100, 4, 2)])
def test_weights_are_quantized_once_for_all_micro_batches(
    tmp_path: Path, weighed: list[Any], tokens: int, passes: int, times: int, checkpoint_layers: bool
) -> None:
    """One pass scores and carries the graph; several score first, then compute again for the gradient. What a
    checkpoint computes again takes the codes of the pass before, where that is held."""
    run, _ = steps(tmp_path, 1, micro_batch_tokens=tokens, checkpoint_layers=checkpoint_layers)
    assert len(weighed) == (2 if checkpoint_layers else times) * 14
    assert all(layer._held is None for layer in flow_layers(run).values())
    limit = run.trainer.rows_per_pass(25)
    assert (16 + limit - 1) // limit == passes


def test_a_compiled_run_is_the_eager_one_bit_for_bit_and_holds_its_weights(
    learned: Path, weighed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as it is traced; two micro-batches that are scored first."""
    eager, wanted = steps(learned, 2, LEARNS, micro_batch_tokens=200)
    assert len(weighed) == 2 * 2 * 14
    trace(monkeypatch, backend="eager")
    weighed.clear()
    found, rows = steps(learned, 2, LEARNS, micro_batch_tokens=200, compile=True)
    assert len(weighed) == 2 * 2 * 14 and found.trainer.products() == eager.trainer.products()
    assert [row["train/loss"] for row in rows] == [row["train/loss"] for row in wanted]
    assert [row["train/grad_norm"] for row in rows] == [row["train/grad_norm"] for row in wanted]
    assert rows[0]["train/grad_norm"] > 0.1
    for (_, a), (_, b) in zip(found.trainer.weights(), eager.trainer.weights(), strict=True):
        assert torch.equal(a, b)


def test_square_tiles_are_another_recipe_for_the_gradients_alone(
    learned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def stand_in(device: torch.device, wanted: str) -> Kernels:
        asked.append(wanted)
        return fp8_gemm.reference(is_square=wanted == "square")

    monkeypatch.setattr(products, "kernels_of", stand_in)
    (_, (wanted,)), (run, (row,)) = steps(learned, 1, LEARNS), steps(learned, 1, LEARNS, fp8_kernels="square")
    assert asked == ["best", "square"] and row["mismatch/kl_k3"] == wanted["mismatch/kl_k3"]
    assert row["train/loss"] == wanted["train/loss"] and row["train/grad_norm"] != wanted["train/grad_norm"] > 0.1
    assert row["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=0.02)
    assert run.trainer.products() == {"bf16, emulated": 1, "e4m3_block x e4m3_1x128, reference, square": 14}


def test_codes_of_trainer_and_engine_are_equal_byte_for_byte(tmp_path: Path, weighed: list[Any]) -> None:
    """The engine's passport, after a push of weights that two updates have moved."""
    run, _ = steps(tmp_path, 3)
    fixed = {name: layer.weight.detach().clone() for name, layer in flow_layers(run).items()}
    run.engine.load_weights(run.composed.sync(run.trainer.weights(), None))  # type: ignore[arg-type]
    records = {record.name: record for record in run.engine.realized_plan().weights}
    for name, layer in flow_layers(run).items():
        assert layer.kernels is not None
        held, _ = layer.kernels.weight(fixed[name], layer.weights)
        crc = zlib.crc32(held.codes.view(torch.uint8).numpy().tobytes())
        crc = zlib.crc32(held.scale.contiguous().numpy().tobytes(), crc)
        record = records[f"{name}.weight"]
        assert (record.hash, record.format) == (f"{crc:08x}", "e4m3_block")
        assert weight_format(run.composed.plan, f"{name}.weight") == layer.weights


def test_the_record_says_who_computed(tmp_path: Path, weighed: list[Any]) -> None:
    result = run_cell(small_config(*WIDE, "trainer.steps=1"), small_launch(tmp_path, fp8_kernels="square"))
    assert result.status == "ok", result.error
    assert result.trainer["e4m3_block x e4m3_1x128, reference"] == 14
    assert result.launch == {"fp8_kernels": "square"} and len(weighed) == 14


def test_kernels_that_are_not_here_are_refused_in_one_line() -> None:
    model = model_of("fp8_flow")
    for name in ("deep_gemm", "square"):
        with pytest.raises(ValueError, match=rf"launch.fp8_kernels={name}: needs a Hopper GPU.*valid here: best, emul"):
            use_fp8(model, "cpu", name)
    use_fp8(model_of("bf16"), "cpu", "deep_gemm")  # nothing to compute
    use_fp8(model, "cpu", "best")
    assert kernels_of(torch.device("cpu"), "best") is None
    assert products.products(model) == {"bf16, emulated": 1, "e4m3_block x e4m3_1x128, emulated": 21}


def test_layers_that_no_kernel_takes_stay_emulated() -> None:
    """Sides of 32 and 64."""
    model = model_of("fp8_flow")
    use_kernels(model, fp8_gemm.reference())
    assert products.products(model) == {"bf16, emulated": 1, "e4m3_block x e4m3_1x128, emulated": 21}


@pytest.mark.parametrize(("build", "said"), [
    ("plain", {"float32": 22}), ("fp16", {"fp16, emulated": 22}), ("fake_quant", {"fake-quantized": 21, "float32": 1}),
])  # fmt: skip
def test_other_layers_are_told_apart(build: str, said: dict[str, int]) -> None:
    assert products.products(model_of(build)) == said
