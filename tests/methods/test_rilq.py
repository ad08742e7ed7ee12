"""RILQ in RL: adapters beside the rollout weights, refits with their triggers, and training from a fitted start."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import methods
from harness.api import Method, Part, Plan, Sequences, Site, Step, TokenBatch
from harness.config.compose import merge
from harness.config.load import load
from harness.engines.embedded.engine import EmbeddedEngine
from harness.fitting.adapter_start import ERROR
from harness.foundation.seeds import generator
from harness.models.adapters import add_adapters, freeze_base
from harness.models.decoder import Decoder, DecoderConfig
from harness.numerics.formats import format_named
from harness.run.checks import check
from harness.run.loop import evaluate, grpo_step, push_weights
from harness.run.run import Run
from methods import naive, rilq, rilq_init, rilq_refresh
from methods.qlora import LoRA
from methods.rilq import RILQ
from methods.rilq_init import RILQInit
from methods.rilq_refresh import RILQRefresh, recent_texts
from tests.loss_cases import random_batch
from tests.toy import SMALL, site_of, small_run, take_steps

SHAPE = DecoderConfig(
    vocab_size=32, num_layers=1, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=64
)
INT2 = Plan(rollout_weights=format_named("int2_g16_asym"))
QUICK: dict[str, Any] = {"updates": 12, "validate_every": 4, "lr": 3e-3, "sequences": 20, "sampled_frac": 0.0}
FEW: dict[str, Any] = {**QUICK, "updates": 4, "refit_updates": 4, "refresh_every": 1, "g": 0.0}
TEXTS = [(tuple(range(2, 6)), (6 + i % 20, 7, 1)) for i in range(40)]
STEP = Step(index=1, total=9, seed=3)


def decoder() -> Decoder:
    """A tiny random model whose layers matter."""
    return Decoder(SHAPE, generator("cpu", "rilq"), init_std=0.15)


def site(model: Decoder | None = None) -> Site:
    """A task that can show enough."""
    return site_of(model or decoder(), demonstrations=lambda count: TEXTS[:count])


def plan_of(part: Part, rollout: Plan = INT2) -> Plan:
    """The merged plan of a part and the precision."""
    return merge([("precision", rollout), ("part", part.plan(rollout))])


def prepared(part: RILQ, rollout: Plan = INT2, model: Decoder | None = None) -> tuple[Plan, dict[str, Tensor]]:
    """Plan and fixed tensors."""
    plan = plan_of(part, rollout)
    module, fixed = part.prepare(site(model), plan)
    assert module is None
    return plan, fixed


def pushed(part: Part | None, plan: Plan, fixed: dict[str, Tensor], model: Decoder | None = None) -> EmbeddedEngine:
    """An engine after one push."""
    engine = EmbeddedEngine(SHAPE, plan, eos_id=1, pad_id=0)
    stream = ((name, p.detach()) for name, p in (model or decoder()).named_parameters())
    engine.load_weights(stream if part is None else part.sync(stream, STEP, plan, fixed, {}))
    return engine


def rollout_logp(engine: EmbeddedEngine) -> Tensor:
    """Log-probs of what it samples, with the tokens in them."""
    out = engine.generate([(2, 3, 4)], num_samples=16, max_new_tokens=6, temperature=1.0, seed=5)
    return torch.cat([out.logp, out.token_ids.float()])


def batch_of(model: Decoder, k3_shift: float = 0.0) -> tuple[Sequences, TokenBatch]:
    """A rollout batch of TEXTS whose sampler differs from the trainer by `k3_shift` nats."""
    ids = torch.tensor([[*p, *r] for p, r in TEXTS])
    sampled = torch.ones(len(TEXTS), 3, dtype=torch.bool)
    _, batch = random_batch("rilq", size=(len(TEXTS), 3), dtype=torch.float32)
    batch = replace(batch, mask=sampled, rollout_logp=batch.old_logp - k3_shift)
    return Sequences(ids=ids, prompt_lens=4, token_ids=ids[:, 4:], sampled=sampled), batch


def test_zero_adapters_are_the_naive_arm_bit_for_bit() -> None:
    plan, fixed = prepared(RILQ(**QUICK, start="none"))
    assert plan.adapters is not None and plan.adapters.alpha == 4.0 and not plan.adapters.is_trained
    assert all(not t.any() for name, t in fixed.items() if name.endswith("lora_B.weight"))
    part = RILQ(**QUICK, start="none")
    naive_logp = rollout_logp(pushed(None, INT2, {}))
    assert torch.equal(rollout_logp(pushed(part, plan, fixed)), naive_logp)
    plan, fixed = prepared(RILQ(**QUICK, start="svd"))
    assert not torch.equal(rollout_logp(pushed(part, plan, fixed)), naive_logp)


def test_push_is_idempotent_and_the_passport_holds_the_adapters() -> None:
    part = RILQ(**QUICK)
    plan, fixed = prepared(part)
    first, second = pushed(part, plan, fixed), pushed(part, plan, fixed)
    assert first.realized_plan() == second.realized_plan()
    records = {r.name: r for r in first.realized_plan().weights}
    assert sum(name.endswith("lora_A.weight") for name in records) == 7
    second.load_weights(part.sync(((n, p.detach()) for n, p in decoder().named_parameters()), STEP, plan, fixed, {}))
    assert first.realized_plan() == second.realized_plan() and second.sync_metrics()["code_flip_rate"] == 0.0
    other = {name: tensor + 0.1 for name, tensor in fixed.items()}
    changed = {r.name: r for r in pushed(part, plan, other).realized_plan().weights}
    lora = [name for name in records if "lora" in name]
    assert all(changed[name].hash != records[name].hash for name in lora)


@pytest.mark.parametrize("start", ["svd", "loftq", "cloq"])
def test_local_starts_lower_the_error_that_the_sampler_sees(start: Any) -> None:
    """The engine's weights plus the adapters are closer to W; LoftQ's codes are those of shifted weights."""
    part = RILQ(**QUICK, start=start, loftq_steps=3)
    plan, fixed = prepared(part)
    engine, model = pushed(part, plan, fixed), decoder()
    name = "model.layers.0.mlp.down_proj"
    w, w_hat = model.get_parameter(f"{name}.weight"), engine.weights.stacks["down"][0]
    torch.testing.assert_close(fixed[f"{name}{ERROR}"], w.detach() - w_hat)
    rest = w - w_hat - 0.25 * fixed[f"{name}.lora_B.weight"] @ fixed[f"{name}.lora_A.weight"]
    x = torch.randn(50, 64, generator=generator("cpu", "x"))
    assert rest.norm() < 0.95 * (w - w_hat).norm() and (x @ rest.T).norm() < 0.95 * (x @ (w - w_hat).T).norm()
    assert (f"{name}.shift_A.weight" in fixed) == (start == "loftq")


def test_fit_lowers_the_distance_and_is_deterministic() -> None:
    part, model = RILQ(**QUICK, g=0.0), decoder()
    plan, fixed = prepared(part)
    again = prepared(part)[1]
    assert again.keys() == fixed.keys() and all(torch.equal(again[name], tensor) for name, tensor in fixed.items())
    ids = torch.tensor([[*p, *r] for p, r in TEXTS])
    with torch.no_grad():
        wanted = model.hidden(ids)
        _, zero = prepared(RILQ(**QUICK, start="none"))
        losses = [
            float((part.student(model, held, plan, {}).hidden(ids) - wanted).square().mean())  # type: ignore[operator]
            for held in (zero, fixed)
        ]
    assert losses[1] < 0.85 * losses[0]


def test_refit_follows_weights_that_moved() -> None:
    part, model = RILQRefresh(**QUICK, refresh_every=1, refit_updates=12), decoder()
    plan, fixed = prepared(part)
    seqs, batch = batch_of(model)
    memory: dict[str, float] = {}
    still = replace(part, refresh_every=None, triggers=False)
    assert still.refit(model, seqs, batch, STEP, plan, fixed, memory) is None and memory["staleness"] == 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator("cpu", "moved")))
    found = part.refit(model, seqs, batch, STEP, plan, fixed, memory)
    assert found is not None and memory["refits"] == memory["accepted"] == 1.0 and memory["refit_s"] > 0
    assert memory["staleness"] > 0.2 and memory["refit_gain"] > 0
    assert still.refit(model, seqs, batch, STEP, plan, {**fixed, **found}, memory) is None
    assert memory["staleness"] == 0.0


def test_refit_without_quantization_stays_at_zero_and_is_not_accepted() -> None:
    plain = Plan(rollout_weights=format_named("fp32"))
    part, model = RILQRefresh(**FEW), decoder()
    plan, fixed = prepared(part, plain, model)
    assert all(not t.any() for name, t in fixed.items() if name.endswith(("lora_B.weight", ERROR)))
    seqs, batch = batch_of(model)
    memory: dict[str, float] = {}
    assert part.refit(model, seqs, batch, STEP, plan, fixed, memory) is None
    assert memory["refits"] == 1.0 and memory["accepted"] == 0.0 and memory["staleness"] == 0.0


def test_triggers() -> None:
    part, model = RILQRefresh(refresh_every=None, cooldown=2), decoder()
    memory = {"staleness": 0.0}

    def due(index: int, shift: float) -> bool:
        return part.is_due(batch_of(model, shift)[1], replace(STEP, index=index), memory)

    assert not due(1, 0.1) and not due(2, 0.1)
    assert memory["k3_after_refit"] == pytest.approx(torch.tensor(0.1).exp().item() - 1.1, rel=1e-4)
    assert due(3, 0.2) and not due(1, 0.2), "K3 grew fourfold, but not within the cooldown"
    assert not due(3, 0.11)
    memory["staleness"] = 0.21
    assert due(3, 0.1) and not replace(part, max_staleness=0.5).is_due(batch_of(model, 0.1)[1], STEP, memory)
    memory["staleness"] = 0.0
    uneven = batch_of(model)[1]
    uneven = replace(uneven, rollout_logp=uneven.old_logp - torch.tensor([0.9, 0.0, 0.0]))
    wide = replace(part, k3_growth=1e9)
    assert wide.is_due(uneven, replace(STEP, index=3), memory) and not replace(wide, min_ess=0.5).is_due(
        uneven, replace(STEP, index=3), memory
    )
    assert not replace(part, triggers=False).is_due(uneven, replace(STEP, index=3), memory)
    assert replace(part, triggers=False, refresh_every=3).is_due(uneven, replace(STEP, index=3), memory)


def test_recent_texts_are_spread_and_no_text() -> None:
    seqs, _ = batch_of(decoder())
    texts = recent_texts(seqs, 4, "response")
    assert texts.ids[:, 4].tolist() == [seqs.ids[i, 4].item() for i in (0, 13, 26, 39)]
    assert texts.aligned.sum(1).tolist() == [3] * 4 and not texts.labelled.any()


@pytest.mark.parametrize("start", ["rilq", "loftq"])
@pytest.mark.parametrize("name", ["int2_g16_asym", "nvfp4"])
def test_trained_start_shares_the_base_with_the_rollout(start: Any, name: str) -> None:
    part, lora = RILQInit(**QUICK, start=start), LoRA(rank=8, alpha=2.0)
    rollout = Plan(rollout_weights=format_named(name))
    plan = merge([("precision", rollout), ("LoRA", lora.plan(rollout)), ("RILQInit", part.plan(rollout))])
    changed, fixed = part.prepare(site(), plan)
    assert (changed is not None) == (start == "loftq") and all("lora" in key for key in fixed)
    assert fixed["model.layers.0.mlp.up_proj.lora_A.weight"].shape == (8, 64)
    base = freeze_base(decoder() if changed is None else changed, plan)  # type: ignore[arg-type]
    held = dict(base.named_parameters())
    model = add_adapters(base, plan.adapters, fixed, 0)  # type: ignore[arg-type]
    module = "model.layers.0.mlp.up_proj"
    trained = dict(model.named_parameters())
    assert torch.equal(trained[f"{module}.lora_B.default.weight"], fixed[f"{module}.lora_B.weight"])
    source = decoder() if changed is None else part.prepare(site(), plan)[0]
    student = part.student(source, fixed, plan, {})  # type: ignore[arg-type]
    own = student.get_submodule(module).get_buffer("weight")
    assert torch.equal(own, held[f"{module}.weight"])


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="RILQInit: no part plans trained adapters"):
        RILQInit().check(INT2, (), None)
    with pytest.raises(ValueError, match="RILQInit: rollout weights bf16"):
        RILQInit().plan(Plan(rollout_weights=format_named("bf16")))
    with pytest.raises(ValueError, match=r"rank is 33; .* takes 1 to 32"):
        prepared(RILQ(**QUICK, start="svd", rank=33))
    for part, values, message in (
        (RILQ, {"rank": 0}, "RILQ.rank"), (RILQ, {"lr": 0.0}, "RILQ: lr"), (RILQ, {"sequences": 1}, "sampled_frac"),
        (RILQ, {"g": -0.5}, r"^RILQ.a, g: 0.5, -0.5 are no weights of a loss \(choose 0 or more\)$"),
        (RILQInit, {"a": float("inf")}, "RILQInit.a, g: inf, 0.5 are no weights"),
        (RILQRefresh, {"refresh_every": 0}, "refresh_every: 0"), (RILQRefresh, {"refit_updates": 0}, "refit_updates"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            part(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("method=rilq", "knobs.RILQ.start=svd", "knobs.RILQ.rank=65"),
            "knobs.RILQ.rank=65: start=svd factors every layer, and model.layers.0.self_attn.k_proj "
            "has 32 rows or columns; valid: 1 to 32, or knobs.RILQ.start=rilq",
        ),
        (
            ("method=rilq_init", "knobs.RILQInit.fit_from=loftq", "knobs.LoRA.rank=65"),
            "knobs.LoRA.rank=65: fit_from=loftq factors every layer, and model.layers.0.self_attn.k_proj "
            "has 32 rows or columns; valid: 1 to 32, or knobs.RILQInit.fit_from=none",
        ),
        (
            ("method=rilq_init", "knobs.RILQInit.start=cloq", "knobs.LoRA.rank=193", "knobs.LoRA.targets=[gate_proj]"),
            "knobs.LoRA.rank=193: start=cloq factors every layer, and model.layers.0.mlp.gate_proj "
            "has 64 rows or columns; valid: 1 to 64, or knobs.RILQInit.start=rilq",
        ),
    ],
)
def test_a_rank_that_a_layer_does_not_have_is_refused_when_planned(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError) as error:
        check(load([*SMALL, *words, "precision=int2"]))
    assert str(error.value) == message
    most = message.partition("valid: 1 to ")[2].partition(",")[0]
    check(load([*SMALL, *(re.sub(r"rank=\d+", f"rank={most}", word) for word in words), "precision=int2"]))


def test_a_fit_from_noise_takes_any_rank() -> None:
    check(load([*SMALL, "method=rilq", "precision=int2", "knobs.RILQ.rank=65"]))


KNOBS = (
    "knobs.{0}.updates=8", "knobs.{0}.validate_every=4", "knobs.{0}.sequences=16", "knobs.{0}.lr=0.003",
    "precision=int3", "algo.dynamic_sampling=false",
)  # fmt: skip


def started(folder: Path, monkeypatch: pytest.MonkeyPatch, method: Method, *words: str) -> Run:
    """A real tiny run of a method, whether the registry has it already or not."""
    for own in (rilq.METHOD, rilq_refresh.METHOD, rilq_init.METHOD):
        monkeypatch.setitem(methods.METHODS, own.name, own)
    return small_run(folder, [f"method={method.name}", *words])


def test_two_steps_and_a_refresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [word.format("RILQRefresh") for word in KNOBS]
    run = started(tmp_path, monkeypatch, rilq_refresh.METHOD, *words, "knobs.RILQRefresh.refresh_every=2",
                  "knobs.RILQRefresh.refit_updates=8", "knobs.RILQRefresh.triggers=false")  # fmt: skip
    before = dict(run.composed.fixed)
    rows = []
    for _ in range(2):
        rows.append(grpo_step(run))
        sampled_with = {r.name: r.hash for r in run.passport.weights if "lora" in r.name}  # type: ignore[union-attr]
        run.step += 1
    assert "part/RILQRefresh.refits" not in rows[0] and rows[1]["part/RILQRefresh.refits"] == 1.0
    assert rows[1]["part/RILQRefresh.accepted"] == 1.0 and 0 < rows[1]["part/RILQRefresh.staleness"] < 1
    changed = [name for name, tensor in run.composed.fixed.items() if not torch.equal(tensor, before[name])]
    assert any(name.endswith("lora_B.weight") for name in changed)
    push_weights(run, Step(index=2, total=4, seed=0))
    pushed_now = {r.name: r.hash for r in run.passport.weights if "lora" in r.name}  # type: ignore[union-attr]
    assert sampled_with.keys() == pushed_now.keys() and len(sampled_with) == 28
    assert all(pushed_now[n] != h for n, h in sampled_with.items()), "the batch was sampled with the version before"


def test_once_and_start_none_against_naive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [word.format("RILQ") for word in KNOBS]
    compensated = started(tmp_path, monkeypatch, rilq.METHOD, *words, "knobs.RILQ.start=cloq")
    zero = started(tmp_path, monkeypatch, rilq.METHOD, *words, "knobs.RILQ.start=none")
    plain = started(tmp_path, monkeypatch, naive.METHOD, "precision=int3", "algo.dynamic_sampling=false")
    rows = [grpo_step(run) for run in (compensated, zero, plain)]
    assert (
        rows[1]["mismatch/kl_k3"] == rows[2]["mismatch/kl_k3"]
        and rows[1]["mismatch/log_ppl_diff_max"] == rows[2]["mismatch/log_ppl_diff_max"]
    )
    assert rows[0]["mismatch/kl_k3"] < 0.7 * rows[1]["mismatch/kl_k3"]


def test_trained_start_runs_without_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [word.format("RILQInit") for word in KNOBS]
    run = started(tmp_path, monkeypatch, rilq_init.METHOD, *words)
    evaluate(run)
    rows = take_steps(run, 2)
    assert max(row["mismatch/kl_k3"] for row in rows) < 1e-3, "what is left is the engine's rounding"
    names = {r.name: r.format for r in run.passport.weights}  # type: ignore[union-attr]
    assert names["model.layers.0.mlp.up_proj.weight"] == "int3_g32"
    assert names["model.layers.0.mlp.up_proj.lora_B.weight"] == "bf16"
