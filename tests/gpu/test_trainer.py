"""The local trainer on a CUDA device: FP8 kernels in a run, compiled layers, memory in records, running out of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.numerics.quantize import quantize
from harness.records.run_result import read_series
from harness.run.cell import run_cell
from harness.run.loop import grpo_step
from harness.run.run import Run
from harness.sweep.retry import MEMORY, failure_class
from harness.trainers.local.compiling import compile_layers
from harness.trainers.local.forward import lay_out
from harness.trainers.local.products import kernels_of
from harness.trainers.local.trainer import LocalTrainer
from tests.gpu.test_long_sequences import far, moved
from tests.toy import small_config, small_launch, small_run
from tests.trainers.local.test_compiling import check_layers, native
from tests.trainers.local.test_forward import groups, model_of, run, sequences
from tests.trainers.local.test_products import WIDE, flow_layers

pytestmark = pytest.mark.gpu
CUDA = "trainer.device=cuda"


@pytest.fixture
def who() -> str:
    """Name of the FP8 kernels that run here."""
    kernels = kernels_of(torch.device("cuda"), "best")
    if kernels is None:
        pytest.skip("no Hopper GPU (compute capability 9.0) or no Triton: the FP8 flow stays emulated")
    return kernels.name


def stepped(folder: Path, **launch: object) -> tuple[Run, dict[str, float], dict[str, Tensor]]:
    """One update from a base that is right now and then: (the run, its row, the clipped gradients as Adam saw them)."""
    found = small_run(folder, [*WIDE, CUDA, "base.eval_every=100"], **launch)
    row = grpo_step(found)
    state, named = found.trainer.optimizer.state, dict(found.trainer.model.named_parameters())
    return found, row, {name: state[p]["exp_avg"].clone() for name, p in named.items()}


def test_an_update_on_fp8_units_is_the_emulated_one_up_to_its_bound(tmp_path: Path, who: str) -> None:
    """The last bit of BF16 tips codes: noise of 2^-10 in the attention alone moves the emulated gradients by 0.04 to
    0.09 and their norm by 6e-4, and leaves a KL of 7e-5 on a CPU, where that of BF16 training is 2e-4."""
    emulated, row, wanted = stepped(tmp_path, fp8_kernels="emulated")
    real, other, found = stepped(tmp_path)
    assert emulated.trainer.products() == {"bf16, emulated": 1, "e4m3_block x e4m3_1x128, emulated": 14}
    assert real.trainer.products() == {"bf16, emulated": 1, f"e4m3_block x e4m3_1x128, {who}": 14}
    assert row["train/grad_norm"] > 0.1
    assert other["train/grad_norm"] == pytest.approx(row["train/grad_norm"], rel=0.03)
    distances = {name: float((found[name] - grad).norm() / grad.norm()) for name, grad in wanted.items()}
    assert max(distances.values()) < 0.2, distances
    assert other["mismatch/kl_k3"] < 3e-4


@pytest.mark.parametrize("fp8_kernels", ["best", "square"])
def test_a_compiled_update_on_fp8_units_is_the_eager_one_up_to_tipped_codes(
    tmp_path: Path, who: str, fp8_kernels: str
) -> None:
    """Bounds as above: a last bit of what lies between the products tips codes."""
    if fp8_kernels == "square" and who == "scaled_mm":
        pytest.skip("vLLM, which brings DeepGEMM, is not installed")
    eager, row, wanted = stepped(tmp_path, fp8_kernels=fp8_kernels)
    compiled, other, found = stepped(tmp_path, fp8_kernels=fp8_kernels, compile=True)
    said = who if fp8_kernels == "best" else fp8_kernels
    assert compiled.trainer.products() == eager.trainer.products()
    assert compiled.trainer.products()[f"e4m3_block x e4m3_1x128, {said}"] == 14
    assert other["train/grad_norm"] == pytest.approx(row["train/grad_norm"], rel=0.03)
    distances = {name: float((found[name] - grad).norm() / grad.norm()) for name, grad in wanted.items()}
    assert max(distances.values()) < 0.2, distances
    assert other["mismatch/kl_k3"] < 3e-4


def test_codes_of_the_trainer_are_the_quantizers_after_an_update(tmp_path: Path, who: str) -> None:
    """Codes of trainer and engine from one push (tests/trainers/local/test_products.py compares passports)."""
    found, _, _ = stepped(tmp_path)
    for layer in flow_layers(found).values():
        assert layer.kernels is not None and layer.kernels.name == who
        ours, _ = layer.kernels.weight(layer.weight.detach(), layer.weights)
        theirs = quantize(layer.weight.detach().cpu().bfloat16(), layer.weights)
        assert theirs.scale is not None
        assert torch.equal(ours.codes.cpu().view(torch.uint8), theirs.codes.view(torch.uint8))
        assert torch.equal(ours.scale.cpu(), theirs.scale)


def test_a_record_tells_the_memory_of_stages(tmp_path: Path) -> None:
    result = run_cell(small_config("method=bf16_train", CUDA), small_launch(tmp_path, native_16bit=True))
    assert result.status == "ok", result.error
    assert result.trainer == {"bf16, native": 15}
    memory, peak = result.memory_gib, result.peak_memory_gib or 0.0
    assert memory["engine"] is not None and memory.keys() == {"allocated", "reserved", "engine"}
    assert (memory["reserved"] or 0) >= (memory["allocated"] or 0) == peak > 0
    series = read_series(tmp_path / "runs" / "test", result.run_id)
    for stage in ("generate", "sync", "old_logp", "update"):
        column = series[f"memory/{stage}_gib"]
        assert len(column) == 4 and all(0 < value <= peak * 1.0001 for value in column), stage
    assert all(value > 0 for value in series["memory/reserved_gib"])
    assert all((result.time_s[stage] or 0) > 0 for stage in ("generate", "sync", "old_logp", "update", "eval"))


def test_a_cell_without_memory_is_known_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(trainer: LocalTrainer) -> dict[str, float]:
        torch.empty(2**45, dtype=torch.uint8, device="cuda")
        return {}

    monkeypatch.setattr(LocalTrainer, "step", step)
    result = run_cell(small_config("method=bf16", CUDA), small_launch(tmp_path))
    assert result.status == "failed" and failure_class(result) == MEMORY, result.reason


def test_compiled_native_layers_give_the_numbers_of_eager_ones() -> None:
    check_layers(native().to("cuda"), moved(sequences()))


def test_compiled_float32_layers_give_the_numbers_of_eager_ones() -> None:
    model, seqs = model_of().to("cuda"), moved(sequences())
    wanted, gradients = run(model, seqs)
    compile_layers(model.model.layers)
    for checkpoint in (False, True):
        found, got = run(model, seqs, checkpoint=checkpoint)
        torch.testing.assert_close(found.logp, wanted.logp, rtol=1e-3, atol=1e-3)
        assert far(got, gradients) < 1e-2


def test_a_shared_prompt_changes_nothing() -> None:
    """The kernel of packed sequences, with the prompt of a group computed once, against padded rows on the CPU."""
    model, seqs = model_of(), groups()
    wanted, grads = run(model, seqs)
    found, got = run(model.cuda(), moved(seqs), packing=True)
    torch.testing.assert_close(found.logp.cpu(), wanted.logp, rtol=1e-4, atol=1e-4)
    for a, b in zip(got, grads, strict=True):
        assert float((a.cpu() - b).norm()) <= 1e-4 * float(b.norm()) + 1e-6


def test_gradients_of_a_shared_prompt_are_summed_in_one_order() -> None:
    shared = lay_out(moved(groups())).spans.shared
    assert shared is not None
    grad = torch.randn(1, 4, len(shared.source), 64, device="cuda")
    sums: list[Tensor] = []
    for _ in range(3):
        x = torch.zeros(1, 4, len(shared.first), 64, device="cuda", requires_grad=True)
        shared.spread(x).backward(grad)
        assert x.grad is not None
        sums.append(x.grad)
    assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])
    by_hand = torch.zeros_like(sums[0], dtype=torch.float64).index_add_(2, shared.source, grad.double())
    torch.testing.assert_close(sums[0].double(), by_hand, rtol=1e-6, atol=1e-6)
