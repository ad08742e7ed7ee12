"""Advice in words: every recipe in its table, sources on demand, three configurations."""

from __future__ import annotations

from harness.studies.advise.recipes import advise, named
from harness.studies.advise.report import configurations, explained, words
from tests.studies.advise.made import SMALL, curves, evidence, question


def test_answered_and_open_recipes_stand_apart() -> None:
    found = advise(evidence(), curves(), question(0.01, **SMALL))
    text = words(found, is_explained=False)
    assert text.startswith(
        "0.1m, answers of 32 tokens, 512 a step, 1 x h200, BF16 weights deployed\n\nAccuracy measured on a like case:"
    )
    answered, _, rest = text.partition("Accuracy not known for your model:")
    for recipe in found.answered:
        cell = "0, the control" if recipe.is_control else recipe.accuracy.shown
        assert any(recipe.precision in line and cell in line for line in answered.splitlines())
    assert "runs" not in rest.partition("step: time")[0]
    deployed = words(
        advise(evidence(), curves("rollout"), question(0.01, deploy="rollout", **SMALL)), is_explained=False
    )
    assert deployed.splitlines()[0].endswith("the rollout format deployed")


def test_a_line_for_many_recipes_is_said_once() -> None:
    text = words(advise(evidence(), curves(), question(2e-4, gpus=8)), is_explained=False)
    (eager,) = [line for line in text.splitlines() if line.startswith("if: the update computes in BF16")]
    assert eager.endswith("(all)")
    changes = [line for line in text.splitlines() if line.startswith("changes: ")]
    assert len(changes) == 2 and all("fp8_block" in line for line in changes), "one of no correction, one of TIS"


def test_the_sources_are_told_on_demand() -> None:
    found = advise(evidence(), curves(), question(2e-4, gpus=8))
    recipe = named(found, "int8:TIS")
    lines = explained(recipe)
    assert lines[0] == "int8 with TIS:" and lines[1] == f"  step: {recipe.speed.words}"
    assert lines[2] == f"  accuracy: {recipe.accuracy.words}" and "capacity plan" in lines[1]
    told, short = (words(found, is_explained=yes) for yes in (True, False))
    assert told.startswith(short) and told.count("\n  accuracy: ") == len([*found.answered, *found.open])


def test_three_configurations_or_why_there_is_none() -> None:
    asked = question(2e-4, gpus=8)
    found = advise(evidence(), curves(), asked)
    text = configurations(asked, named(found, "fp8_block:TIS"))
    assert "lowbit run method=flashrl precision=fp8_block knobs.TIS.cap=2.0 model=hf model.path=FOLDER" in text
    assert (
        "actor_rollout_ref.rollout.quantization=fp8\n" in text
        and "\nalgorithm.rollout_correction.rollout_rs=null\n" in text
    )
    assert text.endswith("none: GRPOConfig has no argument for a quantized rollout of a BF16 model")
    control = configurations(asked, named(found, "bf16"))
    assert "use_vllm=True,\n" in control and "quantization=null" in control
    assert "none: its rollout.quantization takes fp8 and torchao, not int4" in configurations(
        asked, named(found, "int4")
    )
