"""Methods on a mixture of experts: a step in their own formats, or one line that says why not."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.api import Part, Plan, Step, weight_format
from harness.cli.main import main
from harness.config.compose import has_hook
from harness.config.decoder_config import decoder_config
from harness.config.load import load
from harness.engines.vllm.memory import num_parameters, used_parameters
from harness.engines.vllm.warm import layer_shapes
from harness.models.checkpoint import load_decoder
from harness.models.decoder import Decoder
from harness.numerics.formats import format_named
from harness.records.effective_bits import bits_of_plan
from harness.run.checks import check
from harness.run.policies import save_hf
from harness.run.run import Run
from harness.trainers.local.compiling import compile_layers
from methods import METHODS
from tests.methods.test_battery_runs import MOE, overrides, step
from tests.toy import small_config, small_run

REFUSED = {"zero_mismatch": "sampler=trainer: a mixture of experts"}
LOSS_HOOKS = {"correct", "correct_update", "token_loss", "update_lr_factor", "idle"}
OTHER_HOOKS = {name for name in vars(Part) if callable(getattr(Part, name)) and name[0] != "_"} - LOSS_HOOKS - {"needs"}


def beyond_the_loss(name: str) -> tuple[object, ...]:
    """Parts of a method that act on the model, its weights or its inputs; a loss sees no mixture."""
    at = Step(index=0, total=10, seed=0)
    parts = METHODS[name].parts
    acting = [type(p) for p in parts if p.needs(at) or any(has_hook(p, hook) for hook in OTHER_HOOKS)]
    return (*acting, METHODS[name].precisions[0]) if acting else ()


STEPPING = [*{beyond_the_loss(name): name for name in reversed(METHODS) if name not in REFUSED}.values()]
"""One method for each thing done beyond the loss, and one that does nothing."""


def run_of(folder: Path, name: str, *more: str) -> Run:
    return small_run(folder, overrides(name, *MOE, *more))


@pytest.mark.parametrize("name", sorted(STEPPING))
def test_a_step_moves_routers_and_every_expert_is_in_the_passport(name: str, moe_folder: Path) -> None:
    run = run_of(moe_folder, name)
    before = {name: tensor.clone() for name, tensor in run.trainer.weights()}
    row = step(run)
    assert math.isfinite(row["train/loss"]) and row["train/grad_norm"] > 0
    assert run.passport is not None
    plan, records = run.composed.plan, {record.name: record.format for record in run.passport.weights}
    experts = [n for n in records if ".experts." in n and n.endswith("_proj.weight")]
    assert len(experts) == 2 * 4 * 3
    for n in experts:
        fmt = weight_format(plan, n)
        assert fmt is not None and records[n] == fmt.name
    routers = [f"model.layers.{i}.mlp.gate.weight" for i in range(2)]
    assert {records[n] for n in routers} <= {"bf16", "fp16", "fp32"}
    after = dict(run.trainer.weights())
    moved = {n for n in after if not torch.equal(after[n], before[n])}
    if plan.adapters is None or not plan.adapters.is_trained:
        assert set(routers) <= moved and any(".experts." in n for n in moved)
    else:
        assert not set(routers) & moved and any(".experts." in n and "lora_B" in n for n in moved)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_work_says_so_before_anything_is_loaded(name: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[name]):
        check(small_config(*overrides(name, *MOE)))


@pytest.mark.parametrize(
    ("name", "knob"),
    [
        ("qat_no_kd", "knobs.GPTQStart.sequential_inputs=false"), ("qat_no_kd", "knobs.GPTQStart.act_order=static"),
        ("qurl", "knobs.UAQ.tensors=all"), ("rilq", "knobs.RILQ.start=cloq"), ("rilq", "knobs.RILQ.start=loftq"),
        ("qlora", "knobs.LoRA.targets=[gate_proj,down_proj]"), ("naive", "precision=nvfp4_w4a4"),
        ("naive", "precision=fp8_block+kv8"), ("naive", "trainer.compute=bf16"),
    ],
)  # fmt: skip
def test_knobs_that_look_into_the_mlp_work_on_experts(name: str, knob: str, moe_folder: Path) -> None:
    row = step(run_of(moe_folder, name, knob))
    assert math.isfinite(row["train/loss"]) and row["mismatch/kl_k3"] < 1.0


def test_the_packed_path_scores_as_the_padded_one(moe_folder: Path) -> None:
    rows = [step(small_run(moe_folder, overrides("naive", *MOE), packing=packing)) for packing in (False, True)]
    for key in ("train/loss", "train/grad_norm", "mismatch/kl_k3"):
        assert rows[0][key] == pytest.approx(rows[1][key], rel=1e-3)


def test_verl_and_compilers_refuse_a_mixture_in_one_line() -> None:
    words = ("trainer.device=cuda", "model.head_dim=64", "engine=vllm", "trainer=verl")
    with pytest.raises(ValueError, match=r"^num_experts=4: .* never trained under verl; choose trainer=local$"):
        check(small_config(*overrides("naive", *MOE, *words)))
    shape = decoder_config(load(MOE).model)
    with pytest.raises(ValueError, match="num_experts=4: nothing to warm"):
        layer_shapes(shape)
    with pytest.raises(ValueError, match=r"launch.compile=true: 0.mlp is a mixture of experts"):
        compile_layers(Decoder(shape).model.layers)


@pytest.mark.parametrize(("model", "millions", "active"), [("moe_xs", 0.322, 0.101), ("words_moe", 56.9, 12.9)])
def test_models_made_here_have_the_sizes_that_they_say(model: str, millions: float, active: float) -> None:
    shape = decoder_config(load([f"model={model}"]).model)
    assert num_parameters(shape) / 1e6 == pytest.approx(millions, rel=0.01)
    assert used_parameters(shape) / 1e6 == pytest.approx(active, rel=0.01)
    router = shape.num_layers * shape.num_experts * shape.hidden_size
    dense = replace(shape, num_experts=0, num_experts_per_tok=0, moe_intermediate_size=0)
    assert used_parameters(dense) == num_parameters(dense) == used_parameters(shape) - router
    int8 = Plan(rollout_weights=format_named("int8_channel"))
    rows = shape.num_layers * shape.num_experts * (2 * shape.moe_intermediate_size + shape.hidden_size)
    assert bits_of_plan(int8, shape) == pytest.approx(8 + 32 * rows / num_parameters(shape), rel=0.03)


def test_a_mixture_is_probed_and_its_policy_is_kept(moe_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(moe_folder, "naive", "precision=int8")
    step(run)
    save_hf(run, moe_folder / "policy")
    kept = load_decoder(moe_folder / "policy")
    assert kept.config.num_experts == 4
    held = dict(kept.named_parameters())
    assert all(torch.equal(held[name], tensor) for name, tensor in run.trainer.weights())
    words = ["task=sort", "task.n=2", "algo.num_prompts=8", "algo.group_size=4", "--precisions", "int4,int2"]
    assert main(["probe", str(moe_folder / "policy"), *words, "--results", str(moe_folder)]) == 0
    (record,) = (moe_folder / "probes").glob("*.json")
    k3 = {row["precision"]: row["mismatch"]["kl_k3"] for row in json.loads(record.read_text())["formats"]}
    assert k3["int2"] > k3["int4"] > k3["bf16"] >= 0.0
    assert "the floor" in capsys.readouterr().out
