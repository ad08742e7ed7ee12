"""Configurations of recipes: ours is read by our own loader, those of verl and TRL have the keys of their recipe."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.config.compose import compose
from harness.config.load import launch_of, load, split_launch
from harness.config.resolve import resolve
from harness.engines.vllm.builds import BUILDS
from harness.run.checks import check_launch
from harness.start.prepare import start_of
from harness.studies.advise.configurations import CAP, LEAST, MOST, group_of, ours, trl, verl
from harness.trainers.verl.data import lay_out
from harness.trainers.verl.settings import verl_settings
from tests.source_tree import ROOT
from tests.studies.advise.made import question
from tests.studies.probe import made
from tests.toy import SMALL, small_launch


@pytest.mark.parametrize(
    ("precision", "correction", "method"),
    [("bf16", "none", "bf16"), ("fp8_block", "none", "naive"), ("fp8_block+kv8", "TIS", "fp8_rl"),
     ("int8", "TIS", "flashrl"), ("int4", "none", "naive"), ("int4", "IcePop", "icepop"), ("nvfp4", "TIS", "flashrl"),
     ("fp8_block+kv8", "none", "naive"), ("int8+kv8", "TIS", "flashrl"), ("bf16+kv8", "TIS", "fp8_rl")],
)  # fmt: skip
@pytest.mark.parametrize("gpus", [1, 16])
def test_our_words_are_a_run_of_the_recipe(
    precision: str, correction: str, method: str, gpus: int, tmp_path: Path
) -> None:
    asked = question(gpus=gpus, length=40, batch=96)
    words = ours(asked, precision, correction, str(made.qwen2(tmp_path / "m")))
    own, launch = split_launch(words)
    config = load(own)
    assert (config.method, config.precision.name, config.engine.name) == (method, precision, "vllm")
    assert config.algo.num_prompts * config.algo.group_size == 96 and config.engine.max_new_tokens == 40
    assert config.engine.sleep and config.trainer.device == "cuda"
    assert config.trainer.name == ("local" if gpus == 1 else "verl")
    assert launch == ({} if gpus == 1 else {"gpus": 8, "nodes": 2, "ray_address": "auto"})
    bounds = {"TIS": {"cap": CAP}, "IcePop": {"alpha": LEAST, "beta": MOST}}
    for part, knobs in bounds.items():
        held = config.knobs.get(part, {})
        assert {name: held.get(name) for name in knobs} == (knobs if part == correction else dict.fromkeys(knobs))


def test_a_format_that_no_method_samples_in_is_refused() -> None:
    with pytest.raises(ValueError, match="fp17: naive does not sample in it"):
        ours(question(), "fp17", "none")


def accepted(name: str) -> list[dict[str, Any]]:
    """Settings that the library itself took (tests/oracles/make_NAME.py), each with the values that it then held."""
    rows = json.loads((ROOT / "tests" / "oracles" / f"{name}.json").read_text())["rows"]
    assert all(row["resolved"] == row["given"] for row in rows)
    return [row["given"] for row in rows]


def test_verl_takes_the_settings_of_a_recipe() -> None:
    asked = question(gpus=16, batch=512, length=8192)
    recipes = (("fp8_block", "TIS"), ("fp8_block+kv8", "none"), ("bf16", "none"))
    assert [verl(asked, *recipe, ways=2) for recipe in recipes] == accepted("verl_settings")
    plain = verl(question(gpus=4), "bf16", "none")
    assert (plain["trainer.n_gpus_per_node"], plain["trainer.nnodes"]) == (4, 1)
    for precision in ("int8", "int4", "nvfp4"):
        with pytest.raises(ValueError, match=f"takes fp8 and torchao, not {precision}; our trainer=verl does it"):
            verl(question(), precision, "TIS")


def test_icepop_has_our_bounds_in_verl_and_leaves_the_cache_alone() -> None:
    settings = verl(question(), "fp8_block+kv8", "IcePop")
    at = "algorithm.rollout_correction.rollout_is"
    assert (settings[at], settings[f"{at}_threshold"]) == ("token", f"{LEAST}_{MOST}") == ("token", "0.5_5.0")


def test_verl_gets_the_cache_that_our_trainer_writes_and_no_recipe_that_renews_its_scales(tmp_path: Path) -> None:
    key = "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype"
    config = resolve(load([*SMALL, "trainer=verl", "method=naive", "precision=fp8_block+kv8"]))
    composed, launch = compose(config), small_launch(tmp_path)
    job = lay_out(config, launch, composed, start_of(config, launch), tmp_path / "verl")
    written = verl_settings(job, composed, BUILDS["cuda"], 7)[key]
    assert verl(question(gpus=4), "fp8_block+kv8", "none")[f"+{key}"] == written == "fp8_e4m3"
    said = (
        "its engine keeps the scales of an FP8 cache at 1, and this recipe renews them at every push; our trainer=verl "
        "does it"
    )
    with pytest.raises(ValueError, match=f"^{said}$"):
        verl(question(gpus=4), "fp8_block+kv8", "TIS")


@pytest.mark.parametrize("correction", ["none", "TIS"])
def test_an_fp8_cache_over_several_gpus_is_refused_here_as_by_the_trainer(correction: str, tmp_path: Path) -> None:
    asked, folder = question(gpus=8, length=40), str(made.qwen2(tmp_path / "m"))
    said = "launch.tensor_parallel=2: the scales of an FP8 cache are those of all heads; valid with it: 1"
    with pytest.raises(ValueError, match=f"^{said}$"):
        ours(asked, "fp8_block+kv8", correction, folder, ways=2)
    own, launch = split_launch(ours(asked, "fp8_block+kv8", correction, folder))
    config = resolve(load(own))
    alone, shared = (
        launch_of({**launch, "tensor_parallel": ways}, results=str(tmp_path), sweep="s") for ways in (1, 2)
    )
    check_launch(config, alone)
    with pytest.raises(ValueError, match=f"^{said}$"):
        check_launch(config, shared)


def test_trl_takes_the_arguments_of_a_recipe() -> None:
    asked = question(gpus=8, batch=512, length=8192)
    assert [trl(asked, "bf16", rule, ways=2) for rule in ("TIS", "none")] == accepted("trl_arguments")
    for precision in ("fp8_block", "int8"):
        with pytest.raises(ValueError, match="no argument for a quantized rollout of a BF16 model"):
            trl(question(), precision, "none")


def test_an_engine_over_several_gpus_is_one_in_our_words() -> None:
    words = ours(question(gpus=8), "fp8_block", "TIS", ways=2)
    assert words[words.index("launch.nodes=1") + 1] == "launch.tensor_parallel=2"
    assert not any("tensor_parallel" in word for word in ours(question(gpus=8), "fp8_block", "TIS"))


@pytest.mark.parametrize("settings", [ours, verl, trl])
def test_a_batch_that_gpus_cannot_share_is_refused(settings: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"^24 GPUs cannot share 100 answers evenly; give another --batch$"):
        settings(question(gpus=24, batch=100), "bf16", "none")


@pytest.mark.parametrize(("batch", "group"), [(512, 8), (12, 4), (6, 2), (7, 7), (1, 1)])
def test_groups_divide_the_batch(batch: int, group: int) -> None:
    assert group_of(batch) == group and batch % group == 0
