"""The decoder against transformers (an independent implementation) and against its own invariances."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from harness.models.decoder import Decoder, DecoderConfig, response_hidden, rope_tables, rotate, tensor_shapes

CONFIG = DecoderConfig(
    vocab_size=32, num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48
)
MOE = replace(CONFIG, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=16)


def _model(**changes: object) -> Decoder:
    return Decoder(replace(CONFIG, **changes), torch.Generator().manual_seed(1), init_std=0.2)  # pyright: ignore


def test_rotation_turns_pairs_by_position_times_frequency() -> None:
    cos, sin = rope_tables(replace(CONFIG, head_dim=4, rope_theta=100.0), 3)
    x = torch.tensor([1.0, 0.0, 0.0, 2.0]).expand(3, 1, 4)
    angle = torch.tensor([0.0, 1.0, 2.0])
    # half-split layout: pairs are (0, 2) at frequency 1 and (1, 3) at frequency 1/10
    expected = torch.stack((angle.cos(), -2 * (angle / 10).sin(), angle.sin(), 2 * (angle / 10).cos()), -1)
    torch.testing.assert_close(rotate(x, cos, sin)[:, 0], expected)


def test_later_tokens_change_nothing_bit_for_bit() -> None:
    model = _model()
    ids = torch.randint(0, 32, (5, 12), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[:, 7:] = 3
    assert torch.equal(model(ids)[:, :7], model(changed)[:, :7])
    assert not torch.equal(model(ids)[:, 7:], model(changed)[:, 7:])


def test_positions_default_to_the_column_and_shift_only_rotates() -> None:
    model = _model()
    ids = torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(6).expand(2, 6)
    assert torch.equal(model(ids), model(ids, positions))
    # rotary attention depends on position differences alone
    torch.testing.assert_close(model(ids), model(ids, positions + 100), atol=1e-5, rtol=1e-5)


def test_tables_grow_and_end_at_max_positions() -> None:
    model = _model(max_positions=100)
    with torch.inference_mode():
        model(torch.zeros(1, 70, dtype=torch.long))
    model(torch.zeros(1, 90, dtype=torch.long)).sum().backward()  # the table made above is usable in training
    with pytest.raises(ValueError, match="101 exceeds max_positions=100"):
        model(torch.zeros(1, 101, dtype=torch.long))


def test_initialisation_is_the_generators_and_nobody_elses() -> None:
    state = torch.get_rng_state()
    first, second = _model(), _model()
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert first.model.embed_tokens.weight.std().item() == pytest.approx(0.2, rel=0.1)
    assert torch.equal(first.model.norm.weight, torch.ones(32))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_tensor_shapes_are_those_of_the_module(tied: bool, biased: bool) -> None:
    model = _model(tie_embeddings=tied, attention_bias=biased, qk_norm=not biased)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == tensor_shapes(model.config)


def test_tensor_shapes_of_a_mixture_are_those_of_the_module_in_its_order() -> None:
    found = [(name, tuple(p.shape)) for name, p in Decoder(MOE).named_parameters()]
    held = tensor_shapes(MOE)
    assert dict(found) == held and len(held) == 2 * (4 + 2 + 1 + 15 + 2) + 2
    assert held["model.layers.1.mlp.experts.4.down_proj.weight"] == (32, 16)


@pytest.mark.parametrize("equal", [True, False])
def test_response_hidden_predicts_each_response_token(equal: bool) -> None:
    model = _model()
    ids = torch.randint(0, 32, (3, 10), generator=torch.Generator().manual_seed(0))
    lens = torch.tensor([7, 7, 7] if equal else [2, 4, 7])
    got = response_hidden(model, ids, 7 if equal else lens, 3)
    full = model.hidden(ids)
    want = torch.stack([full[row, int(lens[row]) - 1 : int(lens[row]) + 2] for row in range(3)])
    if equal:  # the last column predicts nothing and may be missing
        assert torch.equal(response_hidden(model, ids[:, :-1], 7, 3), got)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    grads = [torch.autograd.grad(x.square().sum(), list(model.model.parameters())) for x in (got, want)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_response_hidden_ignores_what_comes_later_bit_for_bit() -> None:
    model = _model()
    ids = torch.randint(0, 32, (3, 10), generator=torch.Generator().manual_seed(0))
    for lens in (4, torch.tensor([4, 5, 6])):
        full = response_hidden(model, ids, lens, 4)
        for t in range(4):
            seen = ids.clone()
            for row in range(3):
                seen[row, (lens if isinstance(lens, int) else int(lens[row])) + t :] = 0
            assert torch.equal(response_hidden(model, seen, lens, 4)[:, t], full[:, t])


def test_rows_shorter_than_the_others_are_clamped() -> None:
    model = _model()
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
    got = response_hidden(model, ids, torch.tensor([2, 6]), 4)
    torch.testing.assert_close(got[1, 3], got[1, 2])  # position 8 does not exist: 7 stands in
    assert torch.isfinite(got).all()


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="num_heads=4 is not a multiple of num_kv_heads=3"):
        replace(CONFIG, num_kv_heads=3)
    with pytest.raises(ValueError, match="head_dim=7"):
        replace(CONFIG, head_dim=7)


def test_a_mixture_is_the_gated_sum_of_its_experts() -> None:
    mixture = Decoder(MOE, torch.Generator().manual_seed(1), init_std=0.2).model.layers[1].mlp
    x = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(2))
    probs = (x @ mixture.gate.weight.T).softmax(-1)
    kept = probs.topk(2, -1)
    every = torch.stack([expert(x) for expert in mixture.experts], -1)
    gates = torch.zeros(3, 7, 5).scatter(-1, kept.indices, kept.values / kept.values.sum(-1, keepdim=True))
    torch.testing.assert_close(mixture(x), (every * gates[:, :, None]).sum(-1))
    assert torch.equal(mixture.chosen, kept.indices)


@pytest.mark.parametrize("lens", [4, torch.tensor([4, 3])])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_given_experts_are_used_and_own_ones_change_no_bit(lens: int | torch.Tensor, checkpointed: bool) -> None:
    model = Decoder(MOE, torch.Generator().manual_seed(1), init_std=0.2)
    ids = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(0))
    model(ids)
    own = torch.stack([layer.mlp.chosen for layer in model.model.layers], 2)  # [B, L, layers, k]
    model.checkpoint_layers = checkpointed
    plain, same = response_hidden(model, ids, lens, 5), response_hidden(model, ids, lens, 5, own)
    assert torch.equal(plain, same)
    assert torch.equal(plain, response_hidden(model, ids, lens, 5, torch.full_like(own, -1)))
    other = (own + 1) % 5
    forced = response_hidden(model, ids, lens, 5, other)
    assert (forced - plain).abs().max() > 1e-3
    forced.square().sum().backward()
    for i, layer in enumerate(model.model.layers):  # nothing else is computed, in the backward pass neither
        columns = slice(3, 8) if isinstance(lens, int) and i == 1 else slice(0, 8)
        if isinstance(lens, int):
            assert torch.equal(layer.mlp.chosen, other[:, columns, i])
        assert layer.mlp.gate.weight.grad is not None and layer.mlp.gate.weight.grad.abs().max() > 0


def test_wrong_mixtures_are_refused() -> None:
    for changes, words in (
        ({"num_experts_per_tok": 6}, "num_experts_per_tok=6: valid: 1 to 5"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size=0"),
        ({"attention_bias": True}, "qwen3 family"),
        ({"num_experts": 0}, "num_experts=0: num_experts_per_tok"),
    ):
        with pytest.raises(ValueError, match=words):
            replace(MOE, **changes)  # pyright: ignore[reportArgumentType]
