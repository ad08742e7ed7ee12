"""Chunks, layer checkpoints and packing against the plain forward pass: values, gradients, memory."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from harness.api import Plan, Sequences
from harness.fitting.fake_quant import fake_quantized
from harness.foundation.seeds import generator
from harness.models.adapters import add_adapters
from harness.models.decoder import CoreAttention, Decoder, DecoderConfig
from harness.numerics.casting import cast_model
from harness.numerics.formats import Adapters, format_named
from harness.numerics.linear import CastLinear
from harness.trainers.local.forward import FLOATS_PER_MIB, Scores, Thrift, forward, lay_out, packed_passes, prepared
from methods.jet_rl import FP8Flow
from tests.live_bytes import peak
from tests.toy import stepped

CONFIG = DecoderConfig(
    vocab_size=48, num_layers=3, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=64
)
FLOW = Plan(rollout_weights=format_named("e4m3_block"), rollout_acts=format_named("e4m3_1x128"))
BUILDS: dict[str, Callable[[Decoder], nn.Module]] = {
    "plain": lambda model: model,
    "fp16": lambda model: cast_model(model, format_named("fp16")),
    "bf16": lambda model: cast_model(model, format_named("bf16")),
    "fake_quant": lambda model: fake_quantized(
        model, Plan(rollout_weights=format_named("int4_g32"), rollout_acts=format_named("int8_token")), is_w_and_a=True
    ),
    "fp8_flow": lambda model: FP8Flow().wrap(model, FLOW, {}),
    "lora": lambda model: add_adapters(
        model, Adapters(rank=4, alpha=8, targets=("q_proj", "down_proj"), site="both", is_trained=True), {}, 0
    ),
    "lora_bf16": lambda model: cast_model(BUILDS["lora"](model), format_named("bf16")),
}  # fmt: skip


def model_of(build: str = "plain") -> Decoder:
    model = BUILDS[build](Decoder(CONFIG, generator=generator("cpu", 0, "forward"), init_std=0.2))
    assert isinstance(model, Decoder)
    return model


def sequences(*, even: bool = False) -> Sequences:
    """Six rows whose prompts have 5 tokens, or 2 to 6, and whose responses have 0 to 9."""
    rng = generator("cpu", "sequences")
    prompts = [5] * 6 if even else [2, 6, 3, 3, 5, 4]
    news, width = [9, 1, 4, 0, 7, 2], 15
    ids = torch.randint(0, 48, (6, width), generator=rng)
    for row, (prompt, new) in enumerate(zip(prompts, news, strict=True)):
        ids[row, prompt + new :] = 0
    lens = torch.tensor(prompts)
    at = lens[:, None] + torch.arange(9)
    sampled = torch.arange(9) < torch.tensor(news)[:, None]
    return Sequences(
        ids=ids, prompt_lens=5 if even else lens, token_ids=ids.gather(1, at.clamp(max=width - 1)), sampled=sampled
    )


def run(
    model: Decoder, seqs: Sequences, *, checkpoint: bool = False, keeps_experts: bool = False, **values: Any
) -> tuple[Scores, list[Tensor]]:
    """(scores, gradients of a weighted sum of log-probabilities and entropies)."""
    model.checkpoint_layers = checkpoint
    found = forward(
        model, seqs, Thrift(**values), temperature=0.8, entropy_grad=True, is_fixed=False, wants_logits=False,
        keeps_experts=keeps_experts,
    )  # fmt: skip
    weight = torch.linspace(-1, 2, found.logp.numel(), device=found.logp.device).view_as(found.logp)
    loss = (weight * found.logp).sum() + 0.1 * (weight * found.entropy).sum()
    return found, list(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad]))


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("packing", [False, True])
def test_layer_checkpoints_change_no_bit(build: str, packing: bool) -> None:
    model, seqs = model_of(build), sequences()
    plain, wanted = run(model, seqs, packing=packing)
    found, got = run(model, seqs, packing=packing, checkpoint=True)
    assert torch.equal(found.logp, plain.logp) and torch.equal(found.entropy, plain.entropy)
    assert len(got) == len(wanted) > 1 and all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert any(bool(grad.any()) for grad in got)


@pytest.mark.parametrize("even", [False, True])
def test_packing_equals_padding_in_float64(even: bool) -> None:
    model, seqs = model_of().double(), sequences(even=even)
    plain, wanted = run(model, seqs)
    found, got = run(model, seqs, packing=True)
    torch.testing.assert_close(found.logp, plain.logp, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.entropy, plain.entropy, rtol=1e-12, atol=1e-12)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("build", ["plain", "fake_quant", "lora"])
def test_packing_equals_padding_in_float32(build: str) -> None:
    model, seqs = model_of(build), sequences()
    plain, wanted = run(model, seqs)
    found, got = run(model, seqs, packing=True)
    torch.testing.assert_close(found.logp, plain.logp, rtol=1e-5, atol=2e-5)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(("build", "bound"), [("bf16", 0.02), ("fp8_flow", 0.1)])
def test_packing_is_within_the_rounding_of_the_format(build: str, bound: float) -> None:
    """A last float32 bit may tip a rounding; WGrad tiles of the FP8 flow hold other tokens, as any other split has."""
    model, seqs = model_of(build), sequences()
    plain, wanted = run(model, seqs)
    found, got = run(model, seqs, packing=True)
    assert (found.logp - plain.logp).abs().max() < 0.1
    for a, b in zip(got, wanted, strict=True):
        assert (a - b).norm() < bound * b.norm()


@pytest.mark.parametrize("even", [True, False])
def test_experts_are_kept_and_replayed_packed_and_padded(even: bool) -> None:
    config = replace(CONFIG, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32)
    model = Decoder(config, generator=generator("cpu", 0, "forward"), init_std=0.2)
    seqs = sequences(even=even)
    lens = seqs.prompt_lens if isinstance(seqs.prompt_lens, Tensor) else torch.full((6,), seqs.prompt_lens)
    width = seqs.ids.shape[1]
    scored = torch.arange(width) < (lens + seqs.sampled.sum(1) - 1)[:, None]  # positions that a log-prob needs
    with torch.no_grad():
        model(seqs.ids)
    own = torch.stack([layer.mlp.chosen for layer in model.model.layers], 2)
    needed = scored[:, :, None].repeat(1, 1, 3)
    needed[:, :, -1] &= torch.arange(width) >= lens[:, None] - 1
    for packing in (False, True):
        kept = run(model, seqs, packing=packing, keeps_experts=True)[0]
        assert kept.experts is not None and kept.experts.shape == (6, width, 3, 2)
        assert torch.equal(kept.experts[needed].long(), own[needed])
        again = run(model, replace(seqs, experts=kept.experts), packing=packing)
        plain = run(model, seqs, packing=packing)
        assert torch.equal(again[0].logp, plain[0].logp)
        assert all(torch.equal(a, b) for a, b in zip(again[1], plain[1], strict=True))
    other = replace(seqs, experts=((own + 1) % 6).to(torch.int16))
    padded, packed = (run(model, other, packing=packing, keeps_experts=True) for packing in (False, True))
    assert (padded[0].logp - plain[0].logp).abs().max() > 0.01
    torch.testing.assert_close(padded[0].logp, packed[0].logp, atol=1e-5, rtol=1e-5)
    for scores in (padded[0], packed[0]):
        assert scores.experts is not None and torch.equal(scores.experts[needed], other.experts[needed])
    for a, b in zip(padded[1], packed[1], strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_a_packed_sequence_does_not_see_its_neighbours() -> None:
    model, seqs = model_of(), sequences()
    found, _ = run(model, seqs, packing=True)
    other = copy.deepcopy(seqs)
    other.ids[0] = (other.ids[0] + 7) % 48
    changed, _ = run(model, other, packing=True)
    assert torch.equal(found.logp[1:], changed.logp[1:])
    assert not torch.allclose(found.logp[0], changed.logp[0])


def test_a_layout_by_hand() -> None:
    seqs = Sequences(
        ids=torch.tensor([[1, 2, 3, 4, 0], [5, 6, 7, 8, 9]]), prompt_lens=torch.tensor([2, 1]),
        token_ids=torch.tensor([[3, 4, 0, 0], [6, 7, 8, 9]]),
        sampled=torch.tensor([[True, True, False, False], [True, True, True, True]]),
    )  # fmt: skip
    layout = lay_out(seqs)
    assert layout.ids.tolist() == [[1, 2, 3, 5, 6, 7, 8]]
    assert layout.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert layout.predicts.tolist() == [1, 2, 3, 4, 5, 6]
    assert layout.spans.lengths == (3, 4)


def groups() -> Sequences:
    """Three prompts of 4, 6 and 2 tokens with 3, 1 and 2 responses of 0 to 9 tokens; the first response is empty, and
    the third prompt begins as the second."""
    rng = generator("cpu", "groups")
    prompts, news = torch.tensor([4, 4, 4, 6, 2, 2]), torch.tensor([0, 9, 3, 5, 1, 7])
    ids = torch.randint(0, 48, (6, 15), generator=rng)
    ids[1:3, :4], ids[4:, :2] = ids[0, :4], ids[3, :2]
    at = torch.arange(15)
    ids[at >= (prompts + news)[:, None]] = 0
    places = prompts[:, None] + torch.arange(9)
    return Sequences(ids=ids, prompt_lens=prompts, token_ids=ids.gather(1, places.clamp(max=14)),
                     sampled=torch.arange(9) < news[:, None])  # fmt: skip


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_shared_prompt_is_computed_once_and_changes_nothing_in_float64(checkpoint: bool) -> None:
    model, seqs = model_of().double(), groups()
    layout = lay_out(seqs)
    assert layout.ids.shape[1] == (4 + 0 + 8 + 2) + (6 + 4) + (2 + 0 + 6) and layout.spans.lengths == (
        4,
        12,
        6,
        10,
        2,
        8,
    )
    assert lay_out(seqs, is_shared=False).ids.shape[1] == 42
    plain, wanted = run(model, seqs)
    found, got = run(model, seqs, packing=True, checkpoint=checkpoint)
    torch.testing.assert_close(found.logp, plain.logp, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.entropy, plain.entropy, rtol=1e-12, atol=1e-12)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("build", "bound"), [("plain", 2e-5), ("lora", 2e-5), ("bf16", 0.02), ("fp8_flow", 0.1)])
def test_a_shared_prompt_is_within_the_rounding_of_the_format(build: str, bound: float) -> None:
    model, seqs = model_of(build), groups()
    plain, wanted = run(model, seqs)
    found, got = run(model, seqs, packing=True)
    assert (found.logp - plain.logp).abs().max() < max(bound, 2e-5) * 5
    for a, b in zip(got, wanted, strict=True):
        assert (a - b).norm() <= bound * b.norm() + 1e-6


def test_experts_of_a_shared_prompt_stand_in_every_row() -> None:
    config = replace(CONFIG, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32)
    model, seqs = Decoder(config, generator=generator("cpu", 0, "forward"), init_std=0.2), groups()
    with torch.no_grad():
        model(seqs.ids)
    own = torch.stack([layer.mlp.chosen for layer in model.model.layers], 2)
    words: dict[str, Any] = {"temperature": 1.0, "entropy_grad": False, "is_fixed": False, "wants_logits": False}
    with torch.no_grad():
        kept = forward(model, seqs, Thrift(packing=True), keeps_experts=True, **words).experts
    assert kept is not None
    is_there = torch.arange(15) < torch.tensor(lay_out(seqs).spans.lengths)[:, None]
    assert torch.equal(kept[is_there].long(), own[is_there]) and bool((kept[~is_there] == -1).all())
    other = replace(seqs, experts=((own + 1) % 6).to(torch.int16))
    padded, packed = (forward(model, other, Thrift(packing=packing), **words).logp for packing in (False, True))
    torch.testing.assert_close(padded, packed, atol=1e-5, rtol=1e-5)


def test_passes_count_a_shared_prompt_once_and_bound_what_attention_sees() -> None:
    seqs = groups()  # rows of 4, 13, 7, 11, 3 and 9 tokens
    assert [rows.tolist() for rows in packed_passes(seqs, 16)] == [[0, 1, 2], [3, 4], [5]]
    assert [rows.tolist() for rows in packed_passes(seqs, 1)] == [[row] for row in range(6)]
    ids = torch.ones(40, 12, dtype=torch.int64)
    same = Sequences(ids=ids, prompt_lens=10, token_ids=ids[:, 10:], sampled=torch.ones(40, 2, dtype=torch.bool))
    assert [len(rows) for rows in packed_passes(same, 60)] == [10] * 4  # 10 + 10 x 2 tokens at 120 places
    assert [len(rows) for rows in packed_passes(same, 24)] == [4] * 10


def test_packed_passes_count_real_tokens() -> None:
    """Rows of 11, 7, 7, 3, 12 and 6 tokens, 15 wide: padding lets two into 30 tokens."""
    assert [rows.tolist() for rows in packed_passes(sequences(), 30)] == [[0, 1, 2, 3], [4, 5]]
    assert [rows.tolist() for rows in packed_passes(sequences(), 1)] == [[row] for row in range(6)]


def test_chunks_start_where_the_budget_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the budget the plain path, bit for bit; above it the same numbers up to rounding."""
    model, seqs = model_of(), sequences()
    plain, wanted = run(model, seqs)
    again, same = run(model, seqs, logits_mib=1)
    assert torch.equal(again.logp, plain.logp) and all(torch.equal(a, b) for a, b in zip(same, wanted, strict=True))
    assert FLOATS_PER_MIB > 48 * 23
    monkeypatch.setattr("harness.trainers.local.forward.FLOATS_PER_MIB", 48 * 5)
    chunked, got = run(model, seqs, logits_mib=1)
    assert not all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    torch.testing.assert_close(chunked.logp, plain.logp, rtol=1e-6, atol=5e-6)
    torch.testing.assert_close(chunked.entropy, plain.entropy, rtol=1e-6, atol=5e-6)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def peak_of(config: DecoderConfig, seqs: Sequences, **values: Any) -> int:
    model = Decoder(config, generator=generator("cpu", 0, "forward"))
    return peak(lambda: run(model, seqs, **values))


def test_each_option_holds_less() -> None:
    """Most bytes alive at once in a forward and backward pass, gradients of the weights included."""
    ids = torch.arange(4 * 128).view(4, 128) % 48
    seqs = Sequences(ids=ids, prompt_lens=2, token_ids=ids[:, 2:], sampled=torch.ones(4, 126, dtype=torch.bool))
    deep, wide = replace(CONFIG, num_layers=8), replace(CONFIG, num_layers=1, vocab_size=8192)
    layer = 4 * 512 * 32
    assert peak_of(deep, seqs) > 8 * 12 * layer
    assert peak_of(deep, seqs, checkpoint=True) < 0.4 * peak_of(deep, seqs)
    logits = 4 * 504 * 8192
    assert peak_of(wide, seqs) > 3 * logits
    assert peak_of(wide, seqs, logits_mib=1) < 0.6 * logits
    uneven = replace(seqs, sampled=torch.arange(126) < torch.tensor([126, 8, 8, 8])[:, None])
    assert peak_of(deep, uneven, packing=True) < 0.5 * peak_of(deep, uneven)


@pytest.mark.parametrize(
    "words",
    [
        ("method=flashrl", "precision=int4", "algo.num_minibatches=2"),
        ("method=fp16",),
        ("method=jet_rl",),
        ("method=qerl",),
        ("method=qat_aligned", "precision=int4"),
    ],
    ids=lambda words: words[0].partition("=")[2],
)
def test_a_run_with_layer_checkpoints_is_the_same_run(tmp_path: Path, words: tuple[str, ...]) -> None:
    plain, rows = stepped(tmp_path, *words)
    other, again = stepped(tmp_path, *words, checkpoint_layers=True)
    assert other.trainer.model.checkpoint_layers and not plain.trainer.model.checkpoint_layers
    assert [row["train/loss"] for row in rows] == [row["train/loss"] for row in again]
    for (_, a), (_, b) in zip(plain.trainer.weights(), other.trainer.weights(), strict=True):
        assert torch.equal(a, b)


def test_a_packed_run_is_the_same_run_up_to_rounding(tmp_path: Path) -> None:
    """Split and unsplit: denominators must not notice. Adam makes up to 2 % of a step (5e-4) of float noise."""
    words = ("method=flashrl", "precision=int4", "algo.num_minibatches=2")
    plain, rows = stepped(tmp_path, *words)
    for tokens in (32768, 60):
        packed, again = stepped(tmp_path, *words, packing=True, micro_batch_tokens=tokens)
        assert packed.trainer.thrift.packing
        assert again[1]["train/loss"] == pytest.approx(rows[1]["train/loss"], abs=1e-6)
        for (_, a), (_, b) in zip(plain.trainer.weights(), packed.trainer.weights(), strict=True):
            assert (a - b).abs().max() < 2e-5


def test_nothing_touches_the_fixed_shapes_of_the_exact_sampler(tmp_path: Path) -> None:
    exact = ("method=zero_mismatch", "engine.max_batch=16")
    plain, rows = stepped(tmp_path, *exact)
    other, again = stepped(tmp_path, *exact, packing=True, logits_mib=1, checkpoint_layers=True)
    assert [row["mismatch/logp_absdiff_max"] for row in again] == [0.0, 0.0]
    assert [row["train/loss"] for row in rows] == [row["train/loss"] for row in again]
    for (_, a), (_, b) in zip(plain.trainer.weights(), other.trainer.weights(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("words", [("method=fp16",), ("method=jet_rl",)], ids=lambda words: words[0])
def test_native_products_are_a_launch_away(tmp_path: Path, words: tuple[str, ...]) -> None:
    """The loss scale of FP16 and the update survive; the numbers are the emulated ones up to 16-bit rounding."""
    plain, rows = stepped(tmp_path, *words)
    other, again = stepped(tmp_path, *words, native_16bit=True, logits_mib=1, checkpoint_layers=True, packing=True)
    heads = [run.trainer.model.lm_head for run in (plain, other)]
    assert all(isinstance(head, CastLinear) for head in heads)
    assert [head.is_native for head in heads] == [False, True]  # type: ignore[union-attr]
    assert again[0]["train/skipped"] == 0.0
    assert again[0]["train/grad_norm"] == pytest.approx(rows[0]["train/grad_norm"], rel=0.02)
    assert again[0]["mismatch/kl_k3"] < 2 * rows[0]["mismatch/kl_k3"] + 1e-6


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("build", ["bf16", "fp16", "fp8_flow"])
def test_attention_in_16_bits_rounds_what_it_reads_and_what_it_gives(build: str, packing: bool) -> None:
    """The numbers of float32 attention up to that rounding; the format is that of the linear layers."""
    found, counts = [dict[str, Any]() for _ in range(2)], Counter[torch.dtype]()
    for is_16bit, kept in enumerate(found):
        model = prepared(model_of(build), Thrift(attention_16bit=bool(is_16bit)))
        cores = [module for module in model.modules() if isinstance(module, CoreAttention)]
        real = torch.nn.functional.scaled_dot_product_attention

        def seen(q: Tensor, *others: Any, real: Any = real, **more: Any) -> Tensor:
            counts[q.dtype] += 1
            return real(q, *others, **more)

        with patch("harness.models.decoder.F.scaled_dot_product_attention", seen):
            scores, grads = run(model, sequences(), packing=packing)
        kept |= {"logp": scores.logp, "grads": grads, "dtypes": {core.dtype for core in cores}}
    wanted = torch.float16 if build == "fp16" else torch.bfloat16
    assert [kept["dtypes"] for kept in found] == [{None}, {wanted}]
    assert set(counts) == {torch.float32, wanted} and counts[wanted] == counts[torch.float32] >= CONFIG.num_layers
    far = (found[0]["logp"] - found[1]["logp"]).abs().max()
    bound = 0.5 if build == "fp8_flow" else 0.05  # a step of FP8 is far
    assert 0 < far < bound
    for a, b in zip(found[1]["grads"], found[0]["grads"], strict=True):
        assert a.dtype == torch.float32 and (a - b).norm() < bound * b.norm() + 1e-6


def test_attention_stays_float32_where_nothing_is_in_16_bits() -> None:
    model = prepared(model_of(), Thrift(attention_16bit=True))
    assert {module.dtype for module in model.modules() if isinstance(module, CoreAttention)} == {None}


def test_native_heads_work_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seqs = prepared(model_of("bf16"), Thrift(native_16bit=True)), sequences()
    plain, wanted = run(model, seqs)
    monkeypatch.setattr("harness.trainers.local.forward.FLOATS_PER_MIB", 48 * 5)
    chunked, got = run(model, seqs, logits_mib=1)
    torch.testing.assert_close(chunked.logp, plain.logp, rtol=0, atol=0.05)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == torch.float32 and (a - b).norm() < 0.02 * b.norm()
