"""Mixtures of experts under vLLM's CPU build: pushed, measured on the kernels, and near the embedded engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.engines.embedded.engine import EmbeddedEngine
from harness.engines.vllm import experts, settings
from harness.engines.vllm.engine import VLLMEngine
from harness.engines.vllm.export import export
from harness.engines.vllm.push_by_reload import IncompleteSwap, live_experts
from harness.engines.weight_stream import read_stream
from harness.run.cell import run_cell
from tests.engines.engine_cases import EOS, PAD, arrive, decoder, weights
from tests.engines.vllm.vllm_cases import MIXTURE, PROMPTS, LiveEngine, lacking, needs_vllm, plan_of, pointers
from tests.gpu.vllm_cases import mean_gap
from tests.toy import small_config, small_launch

pytestmark = needs_vllm

A, B = (decoder(MIXTURE, seed, std=0.08) for seed in (0, 1))
BF16, FP16, INT8 = plan_of("bf16", "bf16"), plan_of("fp16", "fp16"), plan_of("int8_channel", "int8_token")
HAS_TILES = pytest.mark.skipif(bool(lacking("amx_tile")), reason=lacking("amx_tile") or "it has")
PLANS = [pytest.param(BF16, id="bf16"), pytest.param(FP16, id="fp16"), pytest.param(INT8, id="int8", marks=HAS_TILES)]
MOE = (
    "model=moe_xs", "model.head_dim=32", "task=sort", "task.n=2", "base.target_accuracy=0.0", "base.num_eval=16",
    "algo.num_prompts=8", "algo.group_size=4", "trainer.steps=2", "trainer.eval_every=2", "task.num_eval=16",
)  # fmt: skip


@pytest.fixture(scope="module", params=PLANS)
def engine(request: pytest.FixtureRequest) -> Iterator[VLLMEngine]:
    """The engine of each plan in turn."""
    holder = LiveEngine()
    yield holder(request.param, MIXTURE)
    holder.close()


def gaps(engine: VLLMEngine) -> dict[str, tuple[float, float]]:
    """Format -> (smallest, largest) gap of all experts' answers."""
    found: dict[str, list[float]] = {}
    for name, layer in live_experts(engine.model):
        told = engine.weights.sent_experts[name]
        for fmt, row in zip(told.formats, experts.gaps_of(layer, told, engine.plan, engine.device), strict=True):
            found.setdefault(fmt, []).extend(row.tolist())
    return {fmt: (min(row), max(row)) for fmt, row in found.items()}


def test_pushes_measure_and_sample_as_the_embedded_engine(engine: VLLMEngine) -> None:
    ours = EmbeddedEngine(MIXTURE, engine.plan, eos_id=EOS, pad_id=PAD)
    said, addresses = {}, {}
    for step, model in (("a", A), ("b", B), ("again", A)):
        for each in (engine, ours):
            each.load_weights(weights(model))
        passport, emulated = engine.realized_plan(), ours.realized_plan()
        assert {(r.name, r.format, r.dtype, r.hash) for r in passport.weights} == {
            (r.name, r.format, r.dtype, r.hash) for r in emulated.weights
        }
        assert passport.acts == emulated.acts
        kernels = {r.kernel for r in passport.weights if settings.is_expert(r.name)}
        assert len(kernels) == 1 and "Experts" in kernels.pop()
        greedy = [each.generate(PROMPTS, num_samples=1, max_new_tokens=8, temperature=0.0, seed=0)
                  for each in (engine, ours)]  # fmt: skip
        assert mean_gap(*greedy) < 0.08
        said[step], addresses[step] = greedy[0], pointers(engine)
    assert addresses["again"] == addresses["a"]
    assert torch.equal(said["again"].logp, said["a"].logp)
    assert mean_gap(said["b"], said["a"]) > 0.3


def test_answers_tell_the_format_and_other_weights(engine: VLLMEngine) -> None:
    engine.load_weights(weights(A))
    told = engine.weights.sent_experts
    own, *others = gaps(engine).items()
    assert own[1][1] < 0.8 * experts.tolerance(own[0])  # 0.0074 in bf16 on a processor without AVX-512
    assert all(low > 2 * own[1][1] for _, (low, _) in others)
    engine.load_weights(weights(B))
    engine.weights.sent_experts = told
    assert min(low for low, _ in gaps(engine).values()) > 0.5
    with pytest.raises(
        RuntimeError, match=r"model.layers.0.mlp.experts.0.gate_proj.weight and its up and down are not"
    ):
        engine.realized_plan()


def test_one_changed_expert_is_found_and_a_push_mends_it(engine: VLLMEngine) -> None:
    engine.load_weights(weights(A))
    for fused in ("w13_weight", "w2_weight"):
        layer = [module for _, module in live_experts(engine.model)][1]
        held = getattr(layer, fused).data
        with torch.inference_mode():
            held[4] = held[3]
        with pytest.raises(RuntimeError, match=r"^model.layers.1.mlp.experts.4.gate_proj.weight"):
            engine.realized_plan()
        engine.load_weights(weights(A))
        engine.realized_plan()


def test_pieces_and_torn_swaps(engine: VLLMEngine) -> None:
    engine.load_weights(weights(B))
    whole = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    passport = engine.realized_plan()
    engine.load_weights(weights(A))
    arrive(engine, weights(B), 5)
    assert all(torch.equal(p, whole[name]) for name, p in engine.model.named_parameters())
    assert engine.realized_plan() == passport
    pushed = experts_pushed(engine)
    for lost in ("model.layers.1.mlp.experts.5.up_proj.weight", "model.layers.0.mlp.experts.0.down_proj.weight"):
        with pytest.raises(IncompleteSwap, match=r"1 layers got no or only part .*\.mlp\.experts"):
            engine.weights.swap([(name, tensor) for name, tensor in pushed if name != lost])
        with pytest.raises(RuntimeError, match=r"^the last push did not end: call load_weights first$"):
            engine.realized_plan()
        engine.load_weights(weights(B))
        assert engine.realized_plan() == passport


def experts_pushed(engine: VLLMEngine) -> list[tuple[str, torch.Tensor]]:
    """Tensors of a push of A, by checkpoint name."""
    stream = read_stream(weights(A), engine.shapes, engine.plan)
    return export(stream, engine.plan, engine.shapes, engine.device).tensors


@HAS_TILES
def test_a_layer_left_in_bf16_stays_so() -> None:
    holder = LiveEngine()
    engine = holder(replace(INT8, exceptions=(("model.layers.0.*", None),)), MIXTURE)
    engine.load_weights(weights(A))
    passport = engine.realized_plan()
    holder.close()
    formats = {r.name: r.format for r in passport.weights if settings.is_expert(r.name)}
    assert len(formats) == 2 * 6 * 3
    assert all(
        fmt == ("bf16" if name.startswith("model.layers.0.") else "int8_channel") for name, fmt in formats.items()
    )
    assert all(passport.acts[name] == ("bf16" if fmt == "bf16" else "int8_token") for name, fmt in formats.items())


@pytest.mark.parametrize(("method", "precision"), [("bf16", "bf16"), pytest.param("naive", "int8", marks=HAS_TILES)])
def test_a_cell_trains_a_mixture_on_vllm(method: str, precision: str, tmp_path: Path) -> None:
    config = small_config(*MOE, "engine=vllm", f"method={method}", f"precision={precision}")
    result = run_cell(config, small_launch(tmp_path))
    assert (result.status, result.num_steps) == ("ok", 2), result.error
    formats = {line["name"]: line["format"] for line in (result.passport or {})["weights"]}
    wanted = {"bf16": "bf16", "int8": "int8_channel"}[precision]
    assert formats["model.layers.1.mlp.experts.7.down_proj.weight"] == wanted
    assert formats["model.layers.1.mlp.gate.weight"] == "bf16"
    (row,) = [row for row in result.evals if (row.step, row.site) == (2, "rollout")]
    assert 0.0 <= row.accuracy <= 1.0
