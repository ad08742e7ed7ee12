"""Recipes of papers: settings against the hand-written table, binding, what is missing, and every twin end to end."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from harness.cli.main import main
from harness.config.load import launch_of, load, parse, quoted, split_launch
from harness.config.schema import Launch, RunConfig
from harness.published.recipes.beside import measured, table
from harness.published.recipes.lacks import memory_gib, of_machine, of_verl
from harness.published.recipes.recipe import Recipe, bound, read_recipe, recipe_names
from harness.published.recipes.twin import TEMPLATES, question, twin, write_model, write_questions
from harness.records.run_result import RunResult, read_series, write_result
from harness.run.cell import run_cell
from harness.run.checks import check_launch
from harness.sweep import plan
from harness.sweep.planning import with_default_precision
from tests.source_tree import ROOT

NAMES = recipe_names()
PAPERS = {"dapo", "flashrl", "fp16", "fp8_rl", "jet_rl", "qerl", "qurl", "reasoning_qat", "rilq", "tis"}


@cache
def resolved(name: str) -> tuple[Recipe, RunConfig]:
    """A recipe with its first arm, on a model that comes with the project."""
    recipe = read_recipe(name)
    arm = next(iter(recipe.arms.values()))
    words = [*recipe.overrides(), *with_default_precision([f"{k}={quoted(v)}" for k, v in arm.items()])]
    return recipe, load(split_launch(words)[0])


ROWS: dict[str, tuple[str, Callable[[RunConfig], Any]]] = {
    "task": ("task", lambda c: c.task.name),
    "reward rule": ("task.options.rule", lambda c: c.task.options["rule"]),
    "reward scale": ("algo.reward_scale", lambda c: {"zero_one": "0/1", "plus_minus": "-1/1"}[c.algo.reward_scale]),
    "prompts": ("algo.num_prompts", lambda c: c.algo.num_prompts),
    "samples": ("algo.group_size", lambda c: c.algo.group_size),
    "prompts drawn at once": ("algo.gen_prompts", lambda c: c.algo.gen_prompts if c.algo.dynamic_sampling else None),
    "updates a step": ("algo.num_minibatches", lambda c: c.algo.num_minibatches * c.algo.num_epochs),
    "prompt tokens": ("task.options.max_prompt_tokens", lambda c: c.task.options["max_prompt_tokens"]),
    "response tokens": ("engine.max_new_tokens", lambda c: c.engine.max_new_tokens),
    "overlong buffer": ("algo.overlong_buffer", lambda c: c.algo.overlong_buffer or None),
    "clip low": ("algo.eps_low", lambda c: c.algo.eps_low),
    "clip high": ("algo.eps_high", lambda c: c.algo.eps_high),
    "dual clip": ("algo.dual_clip", lambda c: c.algo.dual_clip),
    "advantage": ("algo.advantage", lambda c: c.algo.advantage),
    "loss mean": ("algo.agg", lambda c: c.algo.agg),
    "KL": ("algo.kl_coef", lambda c: c.algo.kl_coef),
    "temperature": ("engine.temperature", lambda c: c.engine.temperature),
    "learning rate": ("trainer.lr", lambda c: c.trainer.lr),
    "betas": ("trainer.betas", lambda c: ", ".join(map(str, c.trainer.betas))),
    "weight decay": ("trainer.weight_decay", lambda c: c.trainer.weight_decay),
    "gradient clip": ("trainer.grad_clip", lambda c: c.trainer.grad_clip),
    "schedule": ("trainer.schedule", lambda c: c.trainer.schedule),
    "warm-up updates": ("trainer.warmup_steps", lambda c: c.trainer.warmup_steps),
    "steps": ("trainer.steps", lambda c: c.trainer.steps),
}
"""Row of the table -> (override key, its value in a resolved configuration)."""


def shown(value: Any) -> str:
    """A value as the table writes it."""
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def test_the_table_of_the_docs_is_what_recipes_resolve_to() -> None:
    lines = [
        line.strip("|").split("|") for line in (ROOT / "docs" / "papers.md").read_text().splitlines() if "|" in line
    ]
    head, rows = [cell.strip() for cell in lines[0][1:]], {line[0].strip(): line[1:] for line in lines[2:]}
    assert set(head) == PAPERS == set(NAMES) and set(rows) == set(ROWS)
    wrong: list[str] = []
    for label, (key, value_of) in ROWS.items():
        for name, cell in zip(head, rows[label], strict=True):
            recipe, config = resolved(name)
            found = shown(value_of(config)) + "°" * (key in recipe.settings.get("ours", {}))
            if found != cell.strip():
                wrong.append(f"{name} {label}: the table has {cell.strip()}, the recipe {found}")
    assert wrong == []


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_whole(name: str) -> None:
    recipe, config = resolved(name)
    keys = {key for settings in recipe.settings.values() for key in settings}
    assert {"task", "algo", "engine", "trainer", "trainer.lr", "trainer.steps", "task.options.rule"} <= keys
    assert config.algo.num_prompts % config.algo.num_minibatches == 0
    assert config.algo.overlong_buffer == 0 or config.algo.reward_scale == "plus_minus"
    assert len(recipe.arms) >= 3 and recipe.differs and recipe.published
    assert all("data" in evaluation for evaluation in recipe.evaluations)
    assert any(set(found.values) & set(recipe.arms) for found in recipe.published)


@pytest.mark.parametrize("name", NAMES)
def test_every_arm_of_a_twin_runs_end_to_end(name: str, tmp_path: Path) -> None:
    recipe = read_recipe(name)
    sweeps, records = twin(recipe, tmp_path), dict[str, list[RunResult]]()
    assert list(sweeps) == list(recipe.arms)
    for label, sweep in sweeps.items():
        planned = plan(sweep)
        assert not planned.skipped, planned.skipped
        (cell,) = planned.cells
        result = run_cell(cell, Launch(results=str(tmp_path), sweep=sweep.name))
        assert (result.status, result.num_steps, result.error) == ("ok", 2, None), label
        records[label] = [result]
        assert [e.error for e in result.evaluations] == [None] * len(result.evaluations)
        assert {e.task for e in result.evaluations} == {recipe.data[e["data"]].task for e in recipe.evaluations}
        series = read_series(tmp_path / "runs" / sweep.name, result.run_id)
        assert all(math.isfinite(value) for value in series["train/loss"])
    rows = table(recipe, records, tmp_path / "runs" / f"paper_{name}_tiny")
    compared = [shown for shown in recipe.published if shown.ours is not None]
    for found in compared:
        ours = [row[3] for row in rows if row[0].startswith(found.metric) and row[1] in recipe.arms]
        assert ours and all("(1 seed)" in value for value in ours), rows


def test_a_twin_takes_an_evaluation_with_the_usual_settings(tmp_path: Path) -> None:
    recipe = replace(read_recipe("rilq"), evaluations=({"data": "gsm8k", "greedy": True},))
    for sweep in twin(recipe, tmp_path).values():
        (asked,) = plan(sweep).cells[0].evaluations
        assert (asked.num, asked.k, asked.max_new_tokens, asked.options) == (2, 1, 16, {"num_workers": 1})


def test_rewards_of_twins_are_not_all_alike(tmp_path: Path) -> None:
    sweeps = twin(read_recipe("tis"), tmp_path)
    (cell,) = plan(sweeps["BF16"]).cells
    result = run_cell(cell, Launch(results=str(tmp_path), sweep="twin"))
    series = read_series(tmp_path / "runs" / "twin", result.run_id)
    assert series["reward/informative_frac"] == [1.0, 1.0]  # what dynamic sampling kept
    assert measured(result, "peak", tmp_path / "runs" / "twin") == max(series["reward/accuracy"]) > 0
    for values, expected in (([math.nan, 0.5, 0.25], 0.5), ([math.nan], None)):
        write_result(tmp_path / "x", result, [{"reward/accuracy": value} for value in values])
        assert measured(result, "peak", tmp_path / "x") == expected


@pytest.mark.parametrize("template", [name for name in TEMPLATES if name != "none"])
def test_twins_write_turns_as_the_published_templates_do(template: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_model(tmp_path, "qwen3", template)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert (
        text
        == {
            "qwen2.5": "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
            "<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
            "qwen3": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
            "llama3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "r1": "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜><think>\n",
        }[template]
    )
    assert tokenizer.decode(tokenizer.encode("#### 1 \\boxed{2}")) == "#### 1 \\boxed{2}"
    assert len(tokenizer.encode(question(0)[0])) == len(tokenizer.encode(question(47)[0]))


def test_values_survive_hydras_grammar() -> None:
    for value in ('{question} Let\'s say "####" in \\boxed{}.\n', "a, b: [c]", "it's"):
        assert load([f"task.options.template={quoted(value)}"]).task.options["template"] == value
    nested = {"rule": "dapo", "template": "x's {question}, \\n\n", "n": 3, "b": True, "none": None, "l": [1, "a b"]}
    assert load([f"task.options.some={quoted(nested)}"]).task.options["some"] == nested


def test_wrong_recipes_and_bindings_are_one_line(tmp_path: Path) -> None:
    recipe = read_recipe("fp8_rl")
    model, data = {"8b": tmp_path}, {"dapo": tmp_path}
    cases = [
        (lambda: read_recipe("fp8rl"), r"paper 'fp8rl' not found; nearest: fp8_rl"),
        (lambda: bound(recipe, {"7b": tmp_path}, data), r"model: fp8_rl has no '7b'; nearest: 8b"),
        (lambda: bound(recipe, {}, data), r"model: fp8_rl needs a folder: --model 8b=DIR \(Qwen/Qwen3-8B-Base\)"),
        (lambda: bound(recipe, model, {}), r"data: fp8_rl trains on BytedTsinghua-SIA/DAPO-Math-17k: --data dapo=DIR"),
        (lambda: bound(recipe, model, {"aime": tmp_path}), r"data: fp8_rl has no 'aime'; nearest: aime24"),
        (lambda: replace(recipe, train="x"), r"train=x: no such data"),
        (lambda: replace(recipe, evaluations=({"data": "x"},)), r"evaluations: data=x is none of dapo, aime24"),
        (lambda: replace(recipe, settings={"code": {"a": 1}, "ours": {"a": 2}}), r"settings: a stands under two marks"),
        (lambda: parse(Recipe, {**vars(recipe), "pape": 1}), r"unknown key pape"),
    ]
    for make, message in cases:
        with pytest.raises(ValueError, match=message):
            make()
    (sweep, *_) = bound(recipe, model, data).values()
    assert not any(word.startswith("evaluations=") for word in sweep.overrides)  # no data for it
    assert [s.seeds for s in bound(recipe, model, data).values()] == [(0, 1, 2)] * 5


PLACES = {"dapo": (16, 8), "flashrl": (1, 4), "fp16": (1, 8), "fp8_rl": (1, 8), "jet_rl": (1, 8), "qerl": (1, 1),
          "qurl": (8, 8), "reasoning_qat": (1, 1), "rilq": (1, 1), "tis": (4, 8)}  # fmt: skip
"""Recipe -> (nodes, GPUs of each) of its runs."""


@pytest.mark.parametrize("name", NAMES)
def test_every_arm_can_be_started_at_the_published_scale(name: str, tmp_path: Path) -> None:
    """Its method under its trainer, its batch over its GPUs, its layout, its evaluations; at the length of its answers
    where the model has the positions. The machine is not asked."""
    recipe, (nodes, gpus) = read_recipe(name), PLACES[name]
    key, model = next(iter(recipe.models.items()))
    write_model(tmp_path / "model", model.family, model.template)
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 65536}
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | heads))
    data = {given: tmp_path / source.task for given, source in recipe.data.items()}
    for given, path in data.items():
        write_questions(path, recipe.data[given].task)
    for sweep in bound(recipe, {key: tmp_path / "model"}, data).values():
        launch = launch_of(split_launch(sweep.overrides)[1], results=str(tmp_path), sweep=sweep.name)
        assert (launch.nodes, launch.gpus) == (nodes, gpus)
        planned = plan(sweep)
        assert len(planned.cells) == 3 and not planned.impossible, planned.skipped
        assert planned.cells[0].trainer.name == ("verl" if nodes * gpus > 1 else "local")
        assert len(planned.cells[0].evaluations) == len(recipe.evaluations)
        check_launch(planned.cells[0], launch)


def test_a_users_overrides_come_last(tmp_path: Path) -> None:
    for sweep in twin(read_recipe("fp8_rl"), tmp_path).values():
        (cell,) = plan(sweep, ["trainer.steps=3", "model.name=mine"]).cells  # the name is one of the arm's words
        assert (cell.trainer.steps, cell.model.name) == (3, "mine")


def test_what_verl_and_memory_lack_is_said() -> None:
    embedded = "engine=embedded: trainer=verl drives vLLM's servers; valid: vllm"
    assert of_verl(read_recipe("qerl")) == [f"NF4 QLoRA, MXFP4 LoRA: {embedded}"]
    assert of_verl(read_recipe("rilq")) == [f"every arm: {embedded}"]
    assert of_verl(read_recipe("jet_rl")) == []
    assert "algo.dynamic_sampling=true" in read_recipe("fp8_rl").overrides() and of_verl(read_recipe("fp8_rl")) == []
    assert memory_gib(2**30 / 1e9) == 16.0


def test_the_command_lists_shows_and_previews(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n{name}" in listed for name in NAMES)
    assert main(["paper", "rilq"]) == 0
    told = capsys.readouterr().out
    assert "knobs.RILQ.rank=64" in told and "433.65" in told and "differs  RILQ is no RL paper" in told
    assert main(["paper", "rilq", "--tiny", "--dry-run", "--results", str(tmp_path)]) == 0
    preview = capsys.readouterr().out
    assert (
        "paper_rilq_tiny: 3 of 3 cells to run" in preview and "GiB of masters" in preview and "time: about" in preview
    )
    assert "missing" not in preview and "GPU (H100)" not in preview
    assert main(["paper", "rilq", "--model", "7b"]) == 2
    assert "--model 7b: NAME=DIR is expected" in capsys.readouterr().err
    assert main(["paper", "rilq", "--data", "gsm8k=/no/where"]) == 2
    assert "/no/where does not exist" in capsys.readouterr().err
    assert main(["paper", "rilq", "--dry-run"]) == 2
    assert "a dry run needs --model NAME=FOLDER and --data NAME=FOLDER, or --tiny" in capsys.readouterr().err


def test_what_is_missing_follows_the_gpus_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    recipe = read_recipe("fp8_rl")
    assert of_machine(recipe)[0] == "8 GPUs (H100): 0 are here"
    assert of_machine(recipe, 2)[0] == "2 GPUs (H100): 0 are here"
    assert of_machine(recipe, 1)[0] == "1 GPU (H100): 0 are here"
