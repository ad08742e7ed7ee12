"""Compiled layers against eager ones, and what is refused in one line."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from harness.api import Sequences
from harness.config.schema import Launch
from harness.foundation.seeds import generator
from harness.models.decoder import Decoder, Layer, Spans
from harness.numerics.casting import cast_model
from harness.numerics.formats import Format, format_named
from harness.numerics.fp8_flow import use_kernels
from harness.numerics.fp8_gemm import Kernels, Operand, reference
from harness.run.checks import check_launch
from harness.run.loop import grpo_step
from harness.trainers.local import compiling
from harness.trainers.local.compiling import compile_layers, eagerly
from harness.trainers.local.forward import Thrift, prepared
from methods.jet_rl import FP8Flow
from tests.toy import MIXTURE, small_config, small_run
from tests.trainers.local.test_forward import CONFIG, FLOW, model_of, run, sequences


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
    compile_layers(model.model.layers)
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


def trace(monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module] = Layer, backend: str = "aot_eager") -> None:
    """Everything but the machine code: graphs run by torch's own kernels, which take no minute to compile.

    "eager": without the graphs of gradients, in half the time.
    """
    torch._dynamo.reset()  # code that once had a break is not traced through afterwards
    real = kind.compile
    monkeypatch.setattr(kind, "compile", lambda self, **values: real(self, **values, backend=backend))
    monkeypatch.setattr(compiling, "check_compiler", lambda device: None)


def test_traced_layers_give_the_numbers_of_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    trace(monkeypatch)
    check_layers(native(), sequences())


def flow(num_layers: int, kernels: Kernels | None) -> Decoder:
    """The FP8 flow in a decoder whose sides kernels take."""
    config = replace(CONFIG, num_layers=num_layers, hidden_size=128, num_heads=2, head_dim=64, intermediate_size=256)
    model = FP8Flow().wrap(Decoder(config, generator=generator("cpu", 0, "flow"), init_std=0.2), FLOW, {})
    assert isinstance(model, Decoder)
    assert set(use_kernels(model, kernels).values()) == {"emulated" if kernels is None else kernels.name}
    return model


def graphs() -> int:
    """Compiled so far."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_the_fp8_flow_is_traced_around_its_products_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many layers there are: the graphs of a layer are compiled once for each kind of products."""
    trace(monkeypatch)
    seen, seqs = list[int](), sequences()
    for num_layers, kernels in ((2, reference()), (3, reference(is_square=True)), (2, None), (3, None)):
        before, model = graphs(), flow(num_layers, kernels)
        eager, wanted = run(model, seqs)
        compile_layers(model.model.layers)
        for is_checkpointed in (False, True):
            found, got = run(model, seqs, checkpoint=is_checkpointed)
            assert torch.equal(found.logp, eager.logp) and torch.equal(found.entropy, eager.entropy)
            assert len(got) == len(wanted) and all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        seen.append(graphs() - before)
    assert seen[:2] == [2, 2]  # a layer, and the last one, whose queries are fewer
    assert 8 <= seen[2] <= 16 and seen[3] == 0  # an emulated product breaks the graph


@pytest.mark.parametrize(("is_checkpointed", "forward_passes"), [(False, 1), (True, 2)])
def test_compiled_products_of_one_input_share_its_codes(
    monkeypatch: pytest.MonkeyPatch, is_checkpointed: bool, forward_passes: int
) -> None:
    """A layer has seven products of four inputs (queries, keys and values; output; gate and up; down), the last layer
    seven of five, because its queries are those of the response alone."""
    trace(monkeypatch)
    calls, plain = list[tuple[bool, bool]](), reference()

    def runs(x: Tensor, fmt: Format, **knobs: bool) -> tuple[Operand | None, Operand | None]:
        calls.append((knobs["has_rows"], knobs["has_columns"]))
        return plain.runs(x, fmt, **knobs)  # type: ignore[arg-type]

    model, seqs = flow(2, replace(plain, name="counted", runs=runs)), sequences()
    run(model, seqs, checkpoint=is_checkpointed)
    assert len(calls) == 2 * 7 * (forward_passes + 1)
    compile_layers(model.model.layers)
    run(model, seqs, checkpoint=is_checkpointed)
    calls.clear()
    run(model, seqs, checkpoint=is_checkpointed)
    assert len(calls) == (4 + 5) * forward_passes + 2 * 7 and all(both == (True, True) for both in calls)


def test_a_compiled_flow_multiplies_by_its_weights_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    trace(monkeypatch)
    model, seqs = flow(2, reference()), sequences()
    compile_layers(model.model.layers)
    before, _ = run(model, seqs)
    with torch.no_grad():
        model.get_parameter("model.layers.0.mlp.up_proj.weight").mul_(1.5)
    moved, _ = run(model, seqs)
    again, _ = run(copy.deepcopy(model), seqs)
    assert (moved.logp - before.logp).abs().max() > 0.02 and torch.equal(again.logp, moved.logp)


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
@pytest.mark.parametrize("kernels", [None, reference()], ids=["emulated", "kernels"])
def test_the_compiled_fp8_flow_is_the_eager_one_up_to_tipped_codes(kernels: Kernels | None) -> None:
    """A last bit of what lies between two products tips a code now and then."""
    torch._dynamo.reset()
    model, seqs, before = flow(2, kernels), sequences(), graphs()
    eager, wanted = run(model, seqs)
    compile_layers(model.model.layers)
    found, got = run(model, seqs)
    far = max(float((a - b).norm() / b.norm()) for a, b in zip(got, wanted, strict=True))
    count = graphs() - before
    assert far < 0.1 and (found.logp - eager.logp).abs().max() < 0.1, far
    assert count >= 8 if kernels is None else 1 <= count <= 4


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
def test_compiled_layers_give_the_numbers_of_eager_ones() -> None:
    check_layers(native(), sequences())


@pytest.mark.parametrize(
    ("build", "thrift", "said"),
    [
        ("bf16", Thrift(compile=True), "0.self_attn.q_proj emulates bf16; add launch.native_16bit=true"),
        ("fake_quant", Thrift(compile=True), "0.self_attn.q_proj is fake-quantized, which cannot be compiled"),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_one_line(build: str, thrift: Thrift, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        prepared(model_of(build), thrift)
    assert str(caught.value).startswith("launch.compile=true: ") and said in str(caught.value)
    assert "\n" not in str(caught.value)


def cut(seqs: Sequences, *rows: int) -> Sequences:
    """Some rows, as narrow as the longest of them."""
    some = seqs.take(torch.tensor(rows))
    assert isinstance(some.prompt_lens, torch.Tensor)
    return replace(some, ids=some.ids[:, : int((some.prompt_lens + some.sampled.sum(1)).max())])


def test_packed_layers_are_compiled_once_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled layers of packed rows give the numbers of eager ones, and new lengths make no new graph."""
    trace(monkeypatch)
    model, seqs = native(), sequences()
    batches = [seqs, cut(seqs, 0, 2, 4), cut(seqs, 5, 1), cut(seqs, 0, 1, 2, 3, 5)]
    eager = [run(model, some, packing=True) for some in batches]
    compile_layers(model.model.layers, is_dynamic=True)
    seen: list[int] = []
    for some, (plain, wanted) in zip(batches, eager, strict=True):
        found, got = run(model, some, packing=True)
        seen.append(graphs())
        assert (found.logp - plain.logp).abs().max() < 0.02 and plain.logp.any()
        assert max(float((a - b).norm() / b.norm()) for a, b in zip(got, wanted, strict=True)) < 0.02
    assert seen[1:] == seen[:1] * 3


def test_attention_of_packed_rows_is_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled or not, it runs as plain code with the lengths of now, and the layers of other models keep theirs."""
    trace(monkeypatch, backend="eager")
    model, other, lengths = native(), native(), list[list[int]]()
    real = Spans.attend
    monkeypatch.setattr(Spans, "attend", lambda self, *qkv: lengths.append(list(self.lengths)) or real(self, *qkv))
    compile_layers(model.model.layers, is_dynamic=True)
    for rows in ((0, 1, 2), (4, 5)):
        run(model, cut(sequences(), *rows), packing=True)
    assert lengths == [[10, 6, 6], [11, 5]]  # a last token predicts nothing
    assert "packed" not in vars(other.model.layers[0].self_attn.core)


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
def test_a_run_with_packed_and_compiled_layers_is_the_padded_eager_one(tmp_path: Path) -> None:
    fast = {False: {}, True: {"compile": True, "packing": True}}
    rows = {which: grpo_step(small_run(tmp_path, ["method=bf16"], **launch)) for which, launch in fast.items()}
    for name in ("train/loss", "train/grad_norm", "train/entropy"):
        assert rows[True][name] == pytest.approx(rows[False][name], rel=1e-3, abs=1e-5)


def test_a_machine_without_a_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def nobody() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", nobody)
    with pytest.raises(ValueError, match=r"launch.compile=true: no C\+\+ compiler is installed"):
        prepared(model_of(), Thrift(compile=True))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("method=zero_mismatch",), "the sampler runs the trainer's layers"),
        ((*MIXTURE, "method=bf16"), "the sizes of a mixture of experts change in every pass"),
    ],
)
def test_what_cannot_be_compiled_is_refused_before_the_run(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_launch(small_config(*words), Launch(compile=True))
    assert str(caught.value) == f"launch.compile=true: {said}; valid: launch.compile=false"
