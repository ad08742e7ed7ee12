"""Magnitudes of a policy: against the product's own calibration, and sharpness where it is known."""

from __future__ import annotations

import math
from typing import Any

import torch

from harness.numerics.kv_scales import kv_amaxes
from harness.studies.fp8_cache.magnitudes import magnitudes
from tests.studies.fp8_cache.made import answers, sharp


def test_the_largest_of_all_is_what_calibration_sees_and_prompts_are_a_part_of_it() -> None:
    model, given = sharp(), answers()
    found = magnitudes(model, given)
    for ends, amaxes in ((given.prompt_lens + given.lens, found.all()), (given.prompt_lens, found.prompts)):
        known = kv_amaxes(model, given.ids, ends, rows=3)
        for layer in range(3):
            for role in ("k", "v"):
                own = known[f"model.layers.{layer}.self_attn.{role}_scale"][0]
                assert torch.isclose(amaxes[role][layer].amax(), own, rtol=1e-5)
    assert found.prompts["q"].shape == (3, 4) and found.prompts["k"].shape == (3, 2)
    assert (found.all()["v"] > found.prompts["v"]).any()
    summary = found.summary()
    assert summary["v"]["answers"] == float(found.answers["v"].amax())
    assert summary["k"]["ratio_max"] == float((found.answers["k"].amax(-1) / found.prompts["k"].amax(-1)).amax())


def test_queries_of_zero_attend_alike_to_everything() -> None:
    model, given = sharp(), answers()
    layers: list[Any] = list(model.model.layers)
    with torch.no_grad():
        for layer in layers:
            layer.self_attn.q_norm.weight.zero_()
    found = magnitudes(model, given)
    seen = [n for first, count in zip(given.prompt_lens.tolist(), given.lens.tolist(), strict=True)
            for n in range(first + 1, first + count + 1)]  # fmt: skip
    assert found.max_score == 0
    assert math.isclose(found.attention_entropy, sum(math.log(n) for n in seen) / len(seen), rel_tol=1e-5)
    assert math.isclose(found.top_weight, sum(1 / n for n in seen) / len(seen), rel_tol=1e-5)
