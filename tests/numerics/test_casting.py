"""Whole-model 16-bit training emulation: values and gradients representable, names and masters untouched."""

from __future__ import annotations

import pytest
import torch

from harness.foundation.seeds import generator
from harness.models.decoder import Decoder, DecoderConfig
from harness.numerics.casting import cast_model
from harness.numerics.formats import format_named
from harness.numerics.linear import CastLinear

CONFIG = DecoderConfig(
    vocab_size=32, num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96
)


def model() -> Decoder:
    return Decoder(CONFIG, generator=generator("cpu", 0, "test"), init_std=0.2)


def test_parameters_and_names_stay_the_same() -> None:
    plain, cast = model(), cast_model(model(), format_named("fp16"))
    assert list(plain.state_dict()) == list(cast.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), cast.parameters(), strict=True))
    assert cast.lm_head.weight is cast.model.embed_tokens.weight


def test_equal_to_rounding_the_weights_when_only_they_are_rounded() -> None:
    """Norms and embeddings: a cast module gives what a plain module with rounded parameters gives."""
    ids = torch.tensor([[3, 5, 7, 9]])
    cast = cast_model(model(), format_named("bf16"))
    rounded = model()
    with torch.no_grad():
        for p in rounded.parameters():
            p.copy_(p.bfloat16().float())
        embedded = cast.model.embed_tokens(ids)
        assert torch.equal(embedded, rounded.model.embed_tokens(ids))
        assert torch.equal(cast.model.norm(embedded), rounded.model.norm(embedded))
        out = cast(ids)
    assert torch.equal(out, out.bfloat16().float())
    assert not torch.allclose(out, model()(ids), atol=1e-6)


def test_gradients_of_every_parameter_are_rounded() -> None:
    cast = cast_model(model(), format_named("fp16"))
    cast(torch.tensor([[3, 5, 7, 9]])).square().mean().backward()
    for name, p in cast.named_parameters():
        assert p.grad is not None, name
        if "embed_tokens" not in name:  # tied: the sum of two rounded gradients
            assert torch.equal(p.grad, p.grad.half().float()), name


def test_overflow_reaches_the_gradient() -> None:
    cast = cast_model(model(), format_named("fp16"))
    (cast(torch.tensor([[3, 5]])).sum() * 1e30).backward()
    assert not all(torch.isfinite(p.grad).all() for p in cast.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("biased", [False, True])
def test_native_products_round_in_the_same_places(name: str, biased: bool) -> None:
    """Output and gradients differ by one rounding step at most, in few elements: only the order of a sum does."""
    rng, dtype = generator("cpu", "native"), {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    x, pull = torch.randn(40, 96, generator=rng).requires_grad_(), torch.randn(40, 48, generator=rng)
    layer = CastLinear(torch.nn.Linear(96, 48, bias=biased), format_named(name))
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=rng))
    found: list[list[torch.Tensor]] = []
    for is_native in (False, True):
        layer.is_native = is_native
        y = layer(x)
        found.append([y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], pull)])
    for emulated, native in zip(*found, strict=True):
        assert native.dtype == torch.float32 and torch.equal(native, native.to(dtype).float())
        torch.testing.assert_close(native, emulated, rtol=torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)
        assert (native == emulated).float().mean() > 0.97
    layer.is_native = True
    overflow = torch.autograd.grad(layer(x), x, 1e30 * pull)[0]
    assert name == "bf16" or not torch.isfinite(overflow).all()
