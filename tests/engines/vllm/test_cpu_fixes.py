"""Replacements for parts of vLLM's CPU build, tested without vLLM."""

from __future__ import annotations

import torch

from harness.engines.vllm.cpu_fixes import multiply_codes


def test_fp8_codes_are_multiplied_as_their_values() -> None:
    draws = torch.Generator().manual_seed(0)
    a = torch.randn(6, 32, generator=draws).to(torch.float8_e4m3fn)  # four rows of tokens, two that fill up
    b = torch.randn(16, 32, generator=draws).to(torch.float8_e4m3fn).t()
    a_scale, b_scale = torch.rand(6, 1, generator=draws), torch.rand(16, 1, generator=draws)
    bias = torch.randn(16, generator=draws)
    wanted = (a.double() * a_scale.double()) @ (b.double() * b_scale.double().t()) + bias.double()
    sizes = {"A": a, "B": b, "As": a_scale, "Bs": b_scale, "output_shape": [2, 2, 16]}
    exact = multiply_codes(None, **sizes, out_dtype=torch.float32, bias=bias)
    torch.testing.assert_close(exact, wanted[:4].float().view(2, 2, 16), rtol=1e-6, atol=1e-6)
    rounded = multiply_codes(None, **sizes, out_dtype=torch.bfloat16, bias=bias)
    assert rounded.dtype == torch.bfloat16 and torch.equal(rounded, exact.to(torch.bfloat16))
    plain = multiply_codes(None, **sizes, out_dtype=torch.float32, bias=None)
    torch.testing.assert_close(plain, exact - bias, rtol=1e-5, atol=1e-6)
