"""Advice in words: every recipe in its table, sources on demand, three configurations."""

from __future__ import annotations

from typing import Any

from harness.studies.advise.accuracy import STANDINGS
from harness.studies.advise.recipes import advise, named
from harness.studies.advise.report import cells, configurations, explained, words
from tests.studies.advise.made import evidence, question, tables


def test_each_standing_has_a_table() -> None:
    found = advise(evidence(), tables()["bf16"], question(gpus=8))
    text = words(found, is_explained=False)
    assert text.startswith(
        "7b, answers of 1024 tokens, 512 a step, 8 x h200, BF16 weights deployed\n\n"
        "Equal to BF16 rollouts on word problems:\nformat     correction  step  "
    )
    parts = text.split("\n\n")[1:]
    for part, standing in zip(parts, list(STANDINGS)[:3], strict=False):
        title, _, _, *lines = part.splitlines()
        assert title == f"{STANDINGS[standing]}:"
        rows = [cells(recipe) for recipe in found.of(standing)]
        assert [" ".join(line.split()) for line in lines] == [" ".join(row) for row in rows]
    assert STANDINGS["beyond"] not in text
    assert STANDINGS["beyond"] in words(advise(evidence(), tables()["bf16"], question(1.0)), is_explained=False)
    deployed = words(advise(evidence(), tables()["rollout"], question(deploy="rollout")), is_explained=False)
    assert deployed.splitlines()[0].endswith("weights of the rollout format deployed")


def test_a_line_for_many_recipes_is_said_once() -> None:
    text = words(advise(evidence(), tables()["bf16"], question(gpus=8)), is_explained=False)
    (eager,) = [line for line in text.splitlines() if line.startswith("if: the update computes in BF16")]
    assert eager.endswith("(all)")


def test_the_sources_are_told_on_demand() -> None:
    found = advise(evidence(), tables()["bf16"], question(2e-4, gpus=8))
    recipe = named(found, "int8:TIS")
    lines = explained(recipe)
    assert lines[0] == "int8 with TIS:" and lines[1] == f"  step: {recipe.speed.words}"
    assert lines[2] == f"  accuracy: {recipe.accuracy.words}" and "capacity plan" in lines[1]
    told, short = (words(found, is_explained=yes) for yes in (True, False))
    assert told.startswith(short) and told.count("\n  accuracy: ") == len(found.recipes)


def test_three_configurations_or_why_there_is_none() -> None:
    asked = question(2e-4, gpus=8)
    found = advise(evidence(), tables()["bf16"], asked)
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


def test_configurations_say_whether_they_fit() -> None:
    """Master and two moments in float32 of 32.76 billion parameters: 12 bytes each over two GPUs, 183.1 GiB."""

    def line(**asked: Any) -> str:
        found = advise(evidence(), tables()["bf16"], question(**asked))
        return configurations(question(**asked), named(found, "fp8_block:TIS")).splitlines()[1]

    fits = "on 1 x h200 it fits, 474 of 512 at a time, with checkpointed layers (the plan of lowbit capacity)"
    assert line() == f"# memory: {fits}"
    lacking = line(size="32b", gpus=2)
    assert lacking.startswith("# memory: on 2 x h200 it does not fit: the update needs ")
    assert lacking.endswith("masters and moments 183.1 (the plan of lowbit capacity)")
    hint = "try the first command with --dry-run --gpu h100"
    assert line(gpu="h100") == f"# memory: not checked on h100, {hint}; {fits}"
    assert line(size="3m") == "# memory: not checked, for no plan knows 3m in this format"


def test_our_command_sets_what_its_memory_line_rests_on() -> None:
    """Two rows of 64 + 8192 tokens lie in a pass of at most 16896; 7B keeps their activations only in checkpoints."""
    asked = question(size="7b", length=8192, batch=512, gpus=8)
    text = configurations(asked, named(advise(evidence(), tables()["bf16"], asked), "fp8_block:TIS"))
    assert "with checkpointed layers" in text.splitlines()[1]
    command = next(line for line in text.splitlines() if line.startswith("lowbit run "))
    assert command.endswith(" launch.micro_batch_tokens=16512 launch.checkpoint_layers=true")
    small = question(size="0.5b", length=512, batch=512, gpus=8)
    text = configurations(small, named(advise(evidence(), tables()["bf16"], small), "fp8_block:TIS"))
    assert "checkpoint" not in text
