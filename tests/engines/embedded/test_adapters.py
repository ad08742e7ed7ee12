"""The engine's adapters beside fused matrices are peft's; its frozen base has the trainer's codes, in every format."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.api import Plan
from harness.config.compose import check_passport
from harness.engines.embedded.engine import EmbeddedEngine
from harness.engines.embedded.weights import FUSED
from harness.foundation.seeds import generator
from harness.models.adapters import add_adapters, freeze_base, named_weights, plain_weights
from harness.models.decoder import Decoder, DecoderConfig, tensor_shapes
from harness.numerics.formats import Adapters, Format, format_named
from tests.engines.engine_cases import EOS, FP32, PAD, QWEN2, QWEN3, UNEVEN, decoder, sample, trainer_logp
from tests.numerics.format_cases import SCALED, by_name

ADAPTERS = Adapters(rank=3, alpha=6.0)
BASES = [fmt for fmt in SCALED if fmt.rule not in ("kv", "ct_token") and not fmt.double_quant]
"""Every weight format with scales to share, once for each code path."""
WIDE = DecoderConfig(
    vocab_size=16, num_layers=2, hidden_size=256, num_heads=8, num_kv_heads=2, head_dim=32, intermediate_size=384
)
"""Wide enough for groups of 128; k and v have 64 rows, so that blocks of 128 end inside the merged matrix."""


def trained(model: Decoder, plan: Plan, std: float = 0.2) -> Decoder:
    """The model as the trainer would hold it after a while: base frozen, adapters random."""
    assert plan.adapters is not None
    model = copy.deepcopy(model)
    if plan.train_weights is not None:
        model = freeze_base(model, plan)
    model = add_adapters(model, plan.adapters, {}, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator("cpu", "live", name)))
    return model


def engine_of(model: Decoder, plan: Plan) -> EmbeddedEngine:
    """An engine with everything that the trainer streams."""
    engine = EmbeddedEngine(model.config, plan, eos_id=EOS, pad_id=PAD)
    engine.load_weights((name, tensor.detach()) for name, tensor in named_weights(model))
    return engine


def plan_of(base: str, adapters: Adapters | None = ADAPTERS, **more: Any) -> Plan:
    """Base and rollout in one format, adapters on top."""
    fmt = format_named(base)
    return Plan(rollout_weights=fmt, train_weights=fmt if fmt.tile else None, adapters=adapters, **more)


@pytest.mark.parametrize("config", [QWEN3, QWEN2], ids=["qwen3", "qwen2"])
@pytest.mark.parametrize("targets", [ADAPTERS.targets, ("k_proj", "up_proj", "down_proj"), ("q_proj", "v_proj")])
def test_log_probs_are_those_of_peft(config: DecoderConfig, targets: tuple[str, ...]) -> None:
    plan = plan_of("fp32", Adapters(rank=3, alpha=6.0, targets=targets))
    model = trained(decoder(config), plan)
    out = sample(engine_of(model, plan), UNEVEN)
    torch.testing.assert_close(out.logp, trainer_logp(model, UNEVEN, out), atol=2e-4, rtol=1e-4)
    assert (out.logp - trainer_logp(decoder(config), UNEVEN, out)).abs().max() > 0.1
    merged = EmbeddedEngine(config, FP32, eos_id=EOS, pad_id=PAD)
    merged.load_weights(plain_weights(iter((n, t.detach()) for n, t in named_weights(model)), plan.adapters))
    same = sample(merged, UNEVEN)
    assert torch.equal(same.token_ids, out.token_ids)
    torch.testing.assert_close(same.logp, out.logp, atol=2e-4, rtol=1e-4)


def base_of(engine: EmbeddedEngine) -> dict[str, Tensor]:
    """The live values of every linear layer, by checkpoint name."""
    shapes, found = tensor_shapes(engine.config), dict[str, Tensor]()
    for key, linear in engine.weights.linears.items():
        layer, fused = key.split(".")
        block = "self_attn" if fused in ("qkv", "out") else "mlp"
        names = [f"model.layers.{layer}.{block}.{part}.weight" for part in FUSED[fused]]
        found |= zip(names, linear.weight.split([shapes[name][0] for name in names]), strict=True)
    return found


@by_name(BASES)
def test_the_base_is_the_trainers_bit_for_bit(fmt: Format) -> None:
    model, plan = decoder(WIDE), plan_of(fmt.name)
    frozen = trained(model, plan)
    held = {n: t for n, t in named_weights(frozen) if n.endswith("_proj.weight")}
    once = engine_of(frozen, plan)
    for at, live in base_of(once).items():
        assert torch.equal(live, held[at].detach()), at
    # the plain checkpoint, without the trainer's scales, gives the very same codes
    plain = EmbeddedEngine(WIDE, Plan(rollout_weights=fmt), eos_id=EOS, pad_id=PAD)
    plain.load_weights((n, t.detach()) for n, t in model.named_parameters())
    hashes = [
        {r.name: r.hash for r in e.realized_plan().weights if r.name.endswith("_proj.weight")} for e in (once, plain)
    ]
    assert hashes[0] == hashes[1] and len(hashes[0]) == 14
    once.load_weights((n, t.detach()) for n, t in named_weights(frozen))
    assert once.sync_metrics() == {"code_flip_rate": 0.0, "saturated_frac": 0.0}


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4_even", "nf4", "int4_g32", "bf16"])
def test_a_shared_base_leaves_only_16_bit_rounding(name: str) -> None:
    plan = plan_of(name)
    model = trained(decoder(std=0.1), plan, std=0.1)
    engine = engine_of(model, plan)
    out = sample(engine, UNEVEN)
    gap = (out.logp - trainer_logp(model, UNEVEN, out)).abs()
    unfrozen = trained(decoder(std=0.1), Plan(adapters=ADAPTERS), std=0.1)
    apart = (out.logp - trainer_logp(unfrozen, UNEVEN, out)).abs()
    assert gap.mean() < 0.01 and (name == "bf16" or gap.mean() < 0.1 * apart.mean())
    check_passport(plan, engine.realized_plan())


def test_adapters_are_bf16_tensors_apart_from_the_base() -> None:
    plan = plan_of("nvfp4")
    model = trained(decoder(), plan)
    engine = engine_of(model, plan)
    assert engine.weights.adapters is not None
    given = {n: t.detach() for n, t in named_weights(model)}
    qkv = engine.weights.linears["1.qkv"]
    a, b = qkv.adapter_a, qkv.adapter_b
    assert a is not None and b is not None and a.shape == (9, 32) and b.shape == (128, 9)
    for i, (part, rows) in enumerate((("q", slice(0, 64)), ("k", slice(64, 96)), ("v", slice(96, 128)))):
        at, columns = f"model.layers.1.self_attn.{part}_proj", slice(3 * i, 3 * i + 3)
        assert torch.equal(a[columns], given[f"{at}.lora_A.weight"].bfloat16().float())
        assert torch.equal(b[rows, columns], 2.0 * given[f"{at}.lora_B.weight"].bfloat16().float())
        others = torch.ones(9, dtype=torch.bool)
        others[columns] = False
        assert not b[rows][:, others].any()
    records = {r.name: r for r in engine.realized_plan().weights}
    for i in range(QWEN3.num_layers):
        for kind in ("lora_A", "lora_B"):
            record = records[f"model.layers.{i}.mlp.up_proj.{kind}.weight"]
            assert (record.format, record.dtype, record.scale_shape) == ("bf16", "bfloat16", None)
    a.add_(0.5)
    moved = {r.name for r in engine.realized_plan().weights if r.hash != records[r.name].hash}
    assert moved == {f"model.layers.1.self_attn.{part}_proj.lora_A.weight" for part in "qkv"}


def test_an_update_moves_the_adapters_and_no_code() -> None:
    plan = plan_of("nvfp4")
    model = trained(decoder(), plan)
    engine = engine_of(model, plan)
    before = {r.name: r.hash for r in engine.realized_plan().weights}
    first = sample(engine, UNEVEN)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    model(torch.arange(20).view(2, 10)).square().mean().backward()
    optimizer.step()
    engine.load_weights((n, t.detach()) for n, t in named_weights(model))
    after = {r.name: r.hash for r in engine.realized_plan().weights}
    assert {n for n in after if after[n] != before[n]} == {n for n in after if ".lora_" in n}
    assert engine.sync_metrics()["code_flip_rate"] == 0.0
    assert not torch.equal(sample(engine, UNEVEN).logp, first.logp)


def test_the_engine_takes_over_values_not_references() -> None:
    plan = plan_of("bf16")
    model = trained(decoder(), plan)
    engine = engine_of(model, plan)
    first = sample(engine, UNEVEN)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3)
    assert torch.equal(sample(engine, UNEVEN).logp, first.logp)


def test_bad_streams_are_refused_and_change_nothing() -> None:
    plan = plan_of("nvfp4")
    model = trained(decoder(), plan)
    engine = engine_of(model, plan)
    first = sample(engine, UNEVEN)
    good = {n: 2 * t.detach() for n, t in named_weights(model)}
    name = "model.layers.0.mlp.up_proj.lora_A.weight"
    bad = {
        rf"adapter {name} is missing": {n: t for n, t in good.items() if n != name},
        r"adapter .*norm.lora_A.weight is not planned": good | {"model.norm.lora_A.weight": torch.zeros(3, 32)},
        rf"{name} has shape \(4, 32\), the plan needs \(3, 32\)": good | {name: torch.zeros(4, 32)},
        r"o_proj.weight is missing|missing .*o_proj.weight": {
            n: t for n, t in good.items() if "1.self_attn.o_proj.weight" not in n
        },
    }
    for message, stream in bad.items():
        with pytest.raises(ValueError, match=message):
            engine.load_weights(iter(stream.items()))
        assert torch.equal(sample(engine, UNEVEN).logp, first.logp)
    twice = [*good.items(), (name, good[name])]
    with pytest.raises(ValueError, match="twice"):
        engine.load_weights(iter(twice))
    plain = EmbeddedEngine(QWEN3, Plan(rollout_weights=format_named("nvfp4")), eos_id=EOS, pad_id=PAD)
    with pytest.raises(ValueError, match=r"lora_A.weight: the plan has no adapters at the rollout"):
        plain.load_weights(iter(good.items()))
    with pytest.raises(ValueError, match=r"adapters.targets: w_proj is no linear layer; choose from down_proj, gate"):
        EmbeddedEngine(QWEN3, plan_of("bf16", Adapters(rank=2, alpha=1.0, targets=("w_proj",))), eos_id=EOS, pad_id=PAD)
    check_passport(plan, engine.realized_plan())
    with pytest.raises(RuntimeError, match="has no adapter, planned rank 3"):
        check_passport(plan, plain_passport())


def plain_passport() -> Any:
    """Passport of an engine without adapters."""
    engine = EmbeddedEngine(QWEN3, Plan(rollout_weights=format_named("nvfp4")), eos_id=EOS, pad_id=PAD)
    engine.load_weights((n, t.detach()) for n, t in decoder().named_parameters())
    return engine.realized_plan()
