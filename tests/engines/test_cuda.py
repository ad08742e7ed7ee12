"""The embedded engine on a CUDA device: the same weights, log-probs and guarantees as on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from harness.api import Plan
from harness.models.decoder import response_hidden
from harness.numerics.formats import format_named
from harness.numerics.logprobs import selected_logp
from tests.engines.engine_cases import (
    EVEN,
    PAD,
    PAIRS,
    QWEN2,
    QWEN3,
    UNEVEN,
    WEIGHTS,
    decoder,
    loaded,
    plan_of,
    sample,
    trainer_logp,
)

pytestmark = pytest.mark.gpu
CUDA = "cuda"


@pytest.fixture(autouse=True)
def full_float32() -> None:
    """Tensor cores would round float32 products to TF32."""
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("prompts", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("config", [QWEN3, QWEN2], ids=["qwen3", "qwen2"])
def test_log_probs_are_the_cpu_trainers(config, prompts) -> None:
    model = decoder(config)
    out = sample(loaded(model, device=CUDA), prompts, num_samples=16, temperature=0.8)
    assert out.logp.is_cuda and out.token_ids.is_cuda
    out = replace(out, token_ids=out.token_ids.cpu(), logp=out.logp.cpu(), lengths=out.lengths.cpu())
    assert (trainer_logp(model, prompts, out, temperature=0.8) - out.logp).abs().max() < 2e-5
    greedy = [sample(loaded(model, device=d), prompts, num_samples=1, temperature=0.0) for d in ("cpu", CUDA)]
    assert torch.equal(greedy[0].token_ids, greedy[1].token_ids.cpu())


def test_dropping_ended_rows_changes_nothing() -> None:
    model = decoder(std=0.15)
    outs = [
        sample(loaded(model, device=CUDA, retire_at=at), UNEVEN, num_samples=64, max_new_tokens=40)
        for at in (1e-9, None)
    ]
    assert torch.equal(outs[0].token_ids, outs[1].token_ids)
    torch.testing.assert_close(outs[0].logp, outs[1].logp, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", WEIGHTS)
def test_passports_equal_the_cpus(name: str) -> None:
    model = decoder()
    cpu, cuda = (loaded(model, plan_of(name), device=d).realized_plan() for d in ("cpu", CUDA))
    assert cpu.weights == cuda.weights


@pytest.mark.parametrize(("name", "acts"), PAIRS)
def test_emulated_activations_agree_with_the_cpu(name: str, acts: str) -> None:
    model = decoder(std=0.05)
    outs = [
        sample(loaded(model, plan_of(name, acts, rollout_kv=format_named("e4m3_kv")), device=d), EVEN, temperature=0.0)
        for d in ("cpu", CUDA)
    ]
    assert (outs[0].logp[:, 0] - outs[1].logp[:, 0].cpu()).abs().max() < 0.05


def test_trainer_sampler_is_exact_bit_for_bit() -> None:
    model = decoder(std=0.15).to(CUDA)
    plan = Plan(rollout_weights=format_named("fp32"), sampler="trainer")
    engine = loaded(model, plan, trainer_model=model, max_batch=8, device=CUDA)
    for prompts in (EVEN, UNEVEN):
        out = sample(engine, prompts, num_samples=4, max_new_tokens=9)
        rows = [prompt for prompt in prompts for _ in range(4)]
        lens = torch.tensor([len(row) for row in rows], device=CUDA)
        ids = torch.full((len(rows), max(map(len, rows)) + 9), PAD, device=CUDA)
        for i, prompt in enumerate(rows):
            ids[i, : len(prompt) + 9] = torch.cat((torch.tensor(prompt, device=CUDA), out.token_ids[i]))
        logp: list[Tensor] = []
        for part in torch.arange(len(rows), device=CUDA).split(8):
            logits = model.head(response_hidden(model, ids[part], 4 if prompts is EVEN else lens[part], 9))
            logp.append(selected_logp(logits.flatten(0, 1), out.token_ids[part].flatten(), 1.0)[0].view(-1, 9))
        sampled = torch.arange(9, device=CUDA) < out.lengths[:, None]
        assert torch.equal(torch.cat(logp)[sampled], out.logp[sampled])


def test_calibrated_scales_agree_with_the_cpu() -> None:
    model = decoder()
    plan = Plan(rollout_weights=format_named("fp32"), rollout_kv=format_named("e4m3_kv"))
    scales = []
    for device in ("cpu", CUDA):
        engine = loaded(model, plan, device=device)
        engine.calibrate_kv(UNEVEN)
        scales.append(engine.kv.scales.cpu())
    torch.testing.assert_close(scales[0], scales[1], rtol=1e-4, atol=0)
