"""verl's presets as methods: form, and what tells them apart on one batch. Equality with verl: test_oracles_methods."""

from __future__ import annotations

import pytest
import torch

from harness.api import Method
from harness.objective.loss import MODES
from methods.verl_presets import METHODS, PRESETS
from tests.loss_cases import corrected, random_batch

MADE = {method.name: method for method in METHODS.values()}


def test_names_modes_and_denominators() -> None:
    assert list(MADE) == [f"verl_{name}" for name in PRESETS] and len(MADE) == 18
    for name, method in MADE.items():
        assert method.mode in MODES and name.startswith(f"verl_{method.mode}")
        assert method.denom == ("kept" if method.mode == "decoupled" else "original")
        assert len({type(part) for part in method.parts}) == len(method.parts)
        assert sum(part.sets_weight for part in method.parts) == int(
            method.mode != "bypass_ppo" and not name.endswith(("_geo_rs", "_k3_rs"))
        )
    assert len({method.summary for method in METHODS.values()}) == 18


@pytest.mark.parametrize("method", METHODS.values(), ids=lambda m: m.name)
def test_names_say_what_the_parts_do(method: Method) -> None:
    _, batch = random_batch("presets", size=(40, 9), spread=0.15)
    c = corrected(method.parts, batch)
    is_rejecting = any(word in method.name for word in ("_geo_rs", "_k3_rs", "_is_rs"))
    assert (c.keep.sum() < batch.mask.sum()) == is_rejecting
    weight = c.weight[batch.mask]
    assert bool((weight == 1).all()) == (not any(part.sets_weight for part in method.parts))
    if "icepop" not in method.name:
        assert weight.max() <= 2.0
    if "_seq_" in method.name or method.name.endswith("pg_is"):
        assert torch.equal(c.weight, c.weight[:, :1].expand_as(c.weight))
