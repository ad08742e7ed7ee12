"""Effective bits of plans and of recorded runs, against sums by hand."""

from __future__ import annotations

import math

import pytest

from harness.api import Plan
from harness.cli.methods import bits_line
from harness.config.compose import compose
from harness.config.decoder_config import decoder_config
from harness.config.load import load
from harness.numerics.formats import Adapters, format_named
from harness.records.effective_bits import bits_of_plan, bits_of_run
from harness.sweep import plan, read_sweep
from methods import METHODS
from tests import result_factory as factory
from tests.source_tree import ROOT

SHAPE = {
    "num_layers": 4, "hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "intermediate_size": 768,
    "vocab_size": 128, "family": "qwen3", "name": "s128",
}  # fmt: skip
ADAPTERS = {
    "rank": 16, "alpha": 4.0, "targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "site": "rollout", "is_trained": False, "train_norms": False,
}  # fmt: skip


def test_a_run_is_counted_from_its_record():
    result, _ = factory.result("rilq", "int4", model=SHAPE)
    planned = {"rollout_weights": "int4_g32", "adapters": ADAPTERS, "exceptions": {"*layernorm.weight": "fp32"}}
    run = result.model_copy(update={"planned": planned})
    assert bits_of_run(run) == pytest.approx(4.5 + 16 * 77824 / 786432)
    plain = run.model_copy(update={"planned": {"rollout_weights": "int4_g32", "adapters": None, "exceptions": {}}})
    assert bits_of_run(plain) == 4.5
    assert bits_of_run(run.model_copy(update={"planned": {"rollout_weights": None}})) == 16
    assert math.isnan(bits_of_run(result))  # without a plan
    assert math.isnan(bits_of_run(factory.result("rilq", "int4")[0].model_copy(update={"planned": planned})))


def test_a_layer_that_is_excepted_counts_in_its_own_format():
    model = decoder_config(load(["model=s128"]).model)
    formats = {name: format_named(name) for name in ("int4_g32", "fp32")}
    down = Plan(rollout_weights=formats["int4_g32"], exceptions=(("*.down_proj.weight", formats["fp32"]),))
    # down_proj is 196608 of a layer's 786432 weights: a quarter.
    assert bits_of_plan(down, model) == pytest.approx(0.75 * 4.5 + 0.25 * 32)
    trained = Plan(rollout_weights=formats["int4_g32"], adapters=Adapters(rank=16, alpha=1.0, site="train"))
    assert bits_of_plan(trained, model) == 4.5


def test_the_matched_arms_of_the_text_sweep_store_what_its_comment_says():
    found = {}
    for cell in plan(read_sweep("main_wordmath", ROOT / "sweeps")).cells:
        if cell.method in ("rilq", "flashrl") and cell.precision.name == "int4" and cell.task.n == 10:
            bits = bits_of_plan(compose(cell).plan, decoder_config(cell.model))
            found[cell.method, cell.precision.weights, tuple(cell.parts)] = round(bits, 2)
    assert found == {
        ("flashrl", "int4_g32", ()): 4.5,
        ("rilq", "int4_g32", ()): 5.6,
        ("rilq", "int4_g32", ("rilq.RILQ",)): 5.6,
        ("rilq", "int4_g128", ()): 4.47,
        ("rilq", "int4_g128", ("rilq.RILQ",)): 4.47,
    }


def test_methods_are_listed_with_their_bits():
    words = bits_line(METHODS["rilq"])
    assert "int4 6.08/4.60" in words and words.endswith("sizes s128/7b)")
    assert bits_line(METHODS["jet_rl"]) == "fp8_block 8.00/8.00 (a weight of the linear layers, sizes s128/7b)"
