"""BF16 training: gradients and updates against float32, masters that keep what 16 bits would lose, what is recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.api import Plan
from harness.config.compose import compose, plan_json
from harness.config.load import load
from harness.config.schema import TrainerConfig
from harness.numerics.formats import format_named
from harness.run.cell import run_cell
from harness.run.loop import grpo_step
from harness.trainers.local.forward import Thrift
from harness.trainers.local.trainer import LocalTrainer
from tests.toy import small_config, small_launch, small_run
from tests.trainers.local.test_forward import model_of, run, sequences

EPSILON = 2.0**-8
"""Half the distance of two BF16 numbers, relative."""


def trainer_of(compute: str, *, is_native: bool = False, lr: float = 1e-6) -> LocalTrainer:
    plan = Plan(train_compute=format_named(compute))
    return LocalTrainer(
        model_of(), TrainerConfig(lr=lr, grad_clip=1e9), plan, temperature=0.8, micro_batch_rows=None,
        micro_batch_tokens=1000, num_updates=4, thrift=Thrift(native_16bit=is_native),
    )  # fmt: skip


@pytest.mark.parametrize("is_native", [False, True])
def test_gradients_are_the_float32_ones_up_to_the_rounding_of_three_layers(is_native: bool) -> None:
    """Twenty roundings in a row of relative error up to EPSILON each, half that at the root of the mean square."""
    _, wanted = run(trainer_of("fp32").model, sequences())
    _, found = run(trainer_of("bf16", is_native=is_native).model, sequences())
    _, finer = run(trainer_of("fp16", is_native=is_native).model, sequences())
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]
    assert all(grad.dtype == torch.float32 for grad in found)
    assert EPSILON / 2 < max(errors) < 20 * EPSILON, errors
    fine = [float((a - b).norm() / b.norm()) for a, b in zip(finer, wanted, strict=True)]
    assert 5 < sum(errors) / sum(fine) < 12, (errors, fine)  # three bits more: 8


@pytest.mark.parametrize("is_native", [False, True])
def test_masters_keep_updates_that_bf16_weights_would_lose(is_native: bool) -> None:
    trainer = trainer_of("bf16", is_native=is_native, lr=1e-6)
    before = [p.detach().clone() for p in trainer.parameters]
    for _ in range(3):
        trainer.accumulate(sequences(), lambda rows, found: (-found.logp.sum() / 23, {}))
        trainer.step()
    moved = [(p.detach() - old).abs().mean() for p, old in zip(trainer.parameters, before, strict=True)]
    assert all(5e-7 < change < 3.1e-6 for change in moved), moved  # Adam: up to the learning rate a step
    gains = [(p, old) for p, old in zip(trainer.parameters, before, strict=True) if p.dim() == 1]
    assert gains and all(torch.equal(p.bfloat16(), old.bfloat16()) for p, old in gains)  # 1 + 3e-6 is 1 in BF16
    state = [value for kept in trainer.optimizer.state.values() for value in kept.values()]
    assert {p.dtype for p in trainer.parameters} == {value.dtype for value in state} == {torch.float32}


def test_the_plan_and_the_record_say_it(tmp_path: Path) -> None:
    words = ["method=flashrl", "precision=int8", "parts=[bf16_train.BF16Compute,flashrl.TIS]"]
    assert plan_json(compose(load(words)).plan)["train_compute"] == "bf16"
    assert plan_json(compose(load(words[:2])).plan)["train_compute"] is None
    launch = small_launch(tmp_path, native_16bit=True)
    result = run_cell(small_config("method=bf16_train", "trainer.steps=1"), launch)
    assert result.status == "ok" and result.planned["train_compute"] == "bf16"
    assert result.trainer == {"bf16, native": 15} and result.launch == {"native_16bit": True}
    plain = run_cell(small_config("method=bf16", "trainer.steps=1"), small_launch(tmp_path))
    assert plain.trainer == {"float32": 15} and plain.launch == {}


def test_a_bf16_trainer_is_nearer_to_a_bf16_sampler(tmp_path: Path) -> None:
    """Both round the same operands: the order of summation alone is left, and not even that where both sum alike."""
    gaps = {m: grpo_step(small_run(tmp_path, [f"method={m}"]))["mismatch/kl_k3"] for m in ("bf16", "bf16_train")}
    assert 0 <= gaps["bf16_train"] < 0.01 * gaps["bf16"], gaps
