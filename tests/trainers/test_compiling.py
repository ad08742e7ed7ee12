"""Compiled layers against eager ones, and what is refused in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.api import Sequences
from harness.models.decoder import Decoder, Layer
from harness.numerics.casting import cast_model
from harness.numerics.formats import format_named
from harness.seeds import generator
from harness.trainers import compiling
from harness.trainers.compiling import compile_layers, eagerly
from harness.trainers.forward import Thrift, prepared
from tests.toy import small_run
from tests.trainers.test_forward import CONFIG, model_of, run, sequences


def has_compiler() -> bool:
    """Is there a C++ compiler that torch would use?"""
    try:
        compiling.check_compiler(torch.device("cpu"))
    except ValueError:
        return False
    return True


def native() -> Decoder:
    """One layer of native BF16, its gains no BF16 numbers."""
    model = Decoder(replace(CONFIG, num_layers=1), generator=generator("cpu", 0, "compiled"), init_std=0.2)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name:
                tensor.add_(torch.rand(tensor.shape, generator=generator("cpu", 0, name)) * 0.1)
    return prepared(cast_model(model, format_named("bf16")), Thrift(native_16bit=True))


def check_layers(model: Decoder, seqs: Sequences) -> None:
    """Compiled against eager: where a compiler drops the rounding of gains or of their gradients, it shows."""
    names = [name for name, _ in model.named_parameters()]
    eager, wanted = run(model, seqs)
    compile_layers(model, packing=False)
    found, got = run(model, seqs)
    with eagerly(True):
        again, same = run(model, seqs)
    assert torch.equal(again.logp, eager.logp) and all(torch.equal(a, b) for a, b in zip(same, wanted, strict=True))
    far = max(float((a - b).norm() / b.norm()) for a, b in zip(got, wanted, strict=True))
    assert far < 0.02 and (found.logp - eager.logp).abs().max() < 0.02, far
    for name, tensor, grad in zip(names, model.parameters(), got, strict=True):
        if "norm" in name:
            assert torch.equal(grad, grad.bfloat16().float()) and not torch.equal(tensor, tensor.bfloat16().float())
    with torch.no_grad():
        model.get_parameter("model.layers.0.input_layernorm.weight").add_(0.5)
    moved, _ = run(model, seqs)
    assert (moved.logp - found.logp).abs().max() > 0.02  # nothing of the parameters is compiled in


def test_traced_layers_give_the_numbers_of_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the machine code: graphs run by torch's own kernels, which take no minute to compile."""
    real = Layer.compile
    monkeypatch.setattr(Layer, "compile", lambda self, **values: real(self, **values, backend="aot_eager"))
    monkeypatch.setattr(compiling, "check_compiler", lambda device: None)
    check_layers(native(), sequences())


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
def test_compiled_layers_give_the_numbers_of_eager_ones() -> None:
    check_layers(native(), sequences())


@pytest.mark.parametrize(
    ("build", "thrift", "said"),
    [
        ("bf16", Thrift(compile=True), "0.self_attn.q_proj emulates bf16; add launch.native_16bit=true"),
        ("fp8_flow", Thrift(compile=True), "0.self_attn.q_proj computes in FP8, which cannot be compiled"),
        ("fake_quant", Thrift(compile=True), "0.self_attn.q_proj is fake-quantized, which cannot be compiled"),
        ("plain", Thrift(compile=True, packing=True), "packed batches are laid out anew each time"),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_one_line(build: str, thrift: Thrift, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        prepared(model_of(build), thrift)
    assert str(caught.value).startswith("launch.compile=true: ") and said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_machine_without_a_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def nobody() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", nobody)
    with pytest.raises(ValueError, match=r"launch.compile=true: no C\+\+ compiler is installed"):
        prepared(model_of(), Thrift(compile=True))


def test_the_exact_sampler_is_not_compiled(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"launch.compile=true: the sampler runs the trainer's layers"):
        small_run(tmp_path, ["method=zero_mismatch", "engine.max_batch=16"], compile=True)
