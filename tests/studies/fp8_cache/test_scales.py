"""Rules that give scales: golden values, and what decoders before training look like."""

from __future__ import annotations

import pytest
import torch

from harness.studies.fp8_cache.scales import (
    DUMMY,
    FACTORS,
    Amaxes,
    arms,
    dummy_decoder,
    fresh_decoder,
    scales_of,
    scanned,
)
from tests.engines.engine_cases import QWEN3

AMAX: Amaxes = {"q": torch.tensor([[20.0, 10.0]]), "k": torch.tensor([[4.0, 8.0]]), "v": torch.tensor([[50.0, 25.0]])}


def test_rules_are_the_two_protocols() -> None:
    vllm, nemo = scales_of("vllm", AMAX), scales_of("nemo", AMAX)
    assert [float(vllm[role]) for role in ("q", "k", "v")] == pytest.approx([0.1, 0.04, 0.5])
    assert float(nemo["k"]) == pytest.approx(8 * 1.05 / 448) and float(nemo["v"]) == pytest.approx(50 * 1.05 / 448)
    assert scales_of("nemo", AMAX, per_head=True)["k"].tolist() == [pytest.approx([4 * 1.05 / 448, 8 * 1.05 / 448])]


def test_a_scan_puts_the_largest_magnitude_on_the_largest_code() -> None:
    found = {arm.factor: arm.cache.scales for arm in scanned(AMAX, ("v",))}
    assert set(found) == set(FACTORS) and set(found[1.0]) == {"v"}
    assert float(50.0 / found[1.0]["v"]) == 448.0 and float(50.0 / found[0.5]["v"]) == 896.0


def test_arms_round_what_their_names_say_and_stale_ones_need_a_first_load() -> None:
    larger: Amaxes = {role: 2 * x for role, x in AMAX.items()}
    found = {arm.name: arm.cache for arm in arms(QWEN3, AMAX, larger, {"fresh": AMAX}, None, None)}
    assert "vllm, stale" not in found and set(found["1, K"].scales) == {"k"} and set(found["1, Q"].scales) == set("qkv")
    assert found["nemo, QP"].rounds_probabilities and not found["1, Q"].rounds_probabilities
    assert float(found["nemo"].scales["k"]) == pytest.approx(2 * float(found["nemo, prompts"].scales["k"]))
    assert found["nemo, heads"].scales["v"].shape == (1, 2) and float(found["1"].scales["v"][2]) == 1.0
    half: Amaxes = {role: x / 2 for role, x in AMAX.items()}
    stale = {arm.name: arm.cache for arm in arms(QWEN3, AMAX, larger, {}, half, AMAX)}
    assert float(stale["vllm, stale"].scales["v"]) == pytest.approx(0.25)
    assert float(stale["nemo, stale"].scales["k"]) == pytest.approx(8 * 1.05 / 448)


def test_decoders_before_training() -> None:
    dummy = torch.cat([value.detach().flatten() for value in dummy_decoder(QWEN3).parameters()])
    assert float(dummy.abs().max()) <= DUMMY and float(dummy.std()) == pytest.approx(DUMMY / 3**0.5, rel=0.05)
    plain, wide = (dict(fresh_decoder(QWEN3, is_wide=is_wide).named_parameters()) for is_wide in (False, True))
    name = "model.layers.0.mlp.down_proj.weight"
    assert float(plain[name].detach().std()) == pytest.approx(0.02, rel=0.1)
    assert float(wide[name].detach().std()) == pytest.approx(64**-0.5, rel=0.1)
    assert torch.equal(plain["model.embed_tokens.weight"], wide["model.embed_tokens.weight"])
    assert float(wide["model.layers.0.input_layernorm.weight"].detach().amin()) == 1.0
