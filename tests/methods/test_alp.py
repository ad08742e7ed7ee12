"""ALP: the golden norm of a noisy state, which layers and passes have noise, and that nothing else ever has it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import methods.alp
from harness.api import Step
from harness.config.compose import compose
from harness.foundation.seeds import generator
from harness.models.decoder import RMSNorm
from harness.run.checks import check
from harness.run.loop import grpo_step
from methods.alp import ALP, noisy
from tests.engines.engine_cases import decoder
from tests.toy import small_config, small_run

IDS = torch.arange(24).view(2, 12)
STEP = Step(index=3, total=10, seed=5)
MODEL = decoder()


def inputs_of_layers(part: ALP | None, step: Step = STEP, number: int = 0, passes: int = 1) -> list[Tensor]:
    """Inputs of the layers in the last of so many passes of an update; None: without the part."""
    found: list[Tensor] = []

    def see(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        found.append(inputs[0].detach().clone())

    with ExitStack() as stack:
        if part is not None:
            stack.enter_context(part.during_update(MODEL, step, number))
        for layer in MODEL.model.layers:  # registered last, so that they see what the noise left
            stack.callback(layer.register_forward_pre_hook(see).remove)
        for _ in range(passes):
            found.clear()
            MODEL(IDS)
    return found


def test_golden_norm_of_a_noisy_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods.alp.torch, "randn", lambda *_, **__: torch.tensor([[1.0, -1.0]], dtype=torch.float64))
    embedding, norm = nn.Embedding(1, 2, dtype=torch.float64), RMSNorm(2, 0.0).double()
    with torch.no_grad():
        embedding.weight.copy_(torch.tensor([[3.0, 4.0]]))
        norm.weight.fill_(1.0)
    clean = norm(embedding(torch.tensor([0])))
    with noisy(embedding, [(0, norm)], 0.01, (0, 0, 0)):
        found = norm(embedding(torch.tensor([0])))
    torch.testing.assert_close(clean, torch.tensor([[0.848528, 1.131371]]).double(), atol=6e-7, rtol=0)
    torch.testing.assert_close(found, torch.tensor([[0.851694, 1.128990]]).double(), atol=6e-7, rtol=0)
    assert torch.equal(norm(embedding(torch.tensor([0]))), clean)


def test_the_noise_of_a_layer_is_that_of_its_seed() -> None:
    """Layer 0 reads its clean input plus std times the draws of (seed, step, update, pass, layer)."""
    (clean, *_), (moved, *_) = inputs_of_layers(None), inputs_of_layers(ALP(std=0.03), number=2, passes=2)
    draws = torch.randn(clean.shape, generator=generator("cpu", 5, "alp", 3, 2, 2, 0))
    torch.testing.assert_close(moved - clean, 0.03 * draws, atol=1e-6, rtol=1e-5)
    assert float((moved - clean).std()) == pytest.approx(0.03, rel=0.08)


def test_only_the_chosen_layers_have_noise() -> None:
    clean = inputs_of_layers(None)
    for part, first in ((ALP(std=0.1), 0), (ALP(std=0.1, first=1), 1), (ALP(std=0.1, first=2), 2)):
        found = inputs_of_layers(part)
        assert [torch.equal(a, b) for a, b in zip(found, clean, strict=True)] == [i < first for i in range(3)]
    one, all_of_them = inputs_of_layers(ALP(std=0.1, count=1)), inputs_of_layers(ALP(std=0.1))
    assert torch.equal(one[0], all_of_them[0]) and not torch.equal(one[1], all_of_them[1])


def test_a_pass_has_its_own_noise_and_repeats_it_for_its_own_seed() -> None:
    part = ALP(std=0.1)
    base = inputs_of_layers(part)[0]
    assert torch.equal(inputs_of_layers(part)[0], base)
    others = [
        inputs_of_layers(part, passes=2)[0],
        inputs_of_layers(part, number=1)[0],
        inputs_of_layers(part, Step(index=4, total=10, seed=5))[0],
        inputs_of_layers(part, Step(index=3, total=10, seed=6))[0],
    ]
    assert not any(torch.equal(a, base) for a in others)
    second = inputs_of_layers(ALP(std=0.1, first=1))
    noise = [second[1] - inputs_of_layers(None)[1], base - inputs_of_layers(None)[0]]
    assert (noise[0] - noise[1]).abs().max() > 0.05  # layers draw apart


def test_a_layer_computed_again_for_the_backward_pass_has_the_noise_of_its_forward() -> None:
    grads: list[list[Tensor]] = []
    for is_checkpointed in (False, True):
        MODEL.zero_grad()
        MODEL.checkpoint_layers = is_checkpointed
        with ALP(std=0.1).during_update(MODEL, STEP, 0):
            for rows in (IDS[:1], IDS[1:]):
                MODEL(rows).log_softmax(-1)[..., 0].sum().backward()
        grads.append([p.grad.clone() for p in MODEL.parameters() if p.grad is not None])
    MODEL.checkpoint_layers = False
    MODEL.zero_grad()
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-5)


def test_hooks_are_gone_afterwards_also_after_an_error() -> None:
    clean = MODEL(IDS)
    with pytest.raises(RuntimeError, match="stop"), ALP(std=0.1).during_update(MODEL, STEP, 0):
        assert not torch.equal(MODEL(IDS), clean)
        raise RuntimeError("stop")
    assert torch.equal(MODEL(IDS), clean)


def test_runs_without_noise_are_bypass_ppo_and_noise_stays_inside_the_update(tmp_path: Path) -> None:
    """With std 0 the run is PPO on the ratio to the sampler, bit for bit; with noise only the update changes."""
    words = ["precision=int4", "algo.num_minibatches=2"]
    plain = ["method=naive", "algo.mode=bypass_ppo", *words]
    rows = [
        grpo_step(small_run(tmp_path, some))
        for some in (
            plain,
            ["method=alp", "knobs.ALP.std=0.0", *words],
            ["method=alp", "knobs.ALP.std=0.05", *words],
            ["method=alp", "knobs.ALP.std=0.05", *words],
        )
    ]
    keys = [k for k in rows[0] if k.startswith(("train/", "mismatch/", "reward/", "rollout/")) and "per_s" not in k]
    assert {k: rows[0][k] for k in keys} == {k: rows[1][k] for k in keys}
    assert {k: rows[2][k] for k in keys} == {k: rows[3][k] for k in keys}  # the noise is the seed's
    before = [k for k in keys if not k.startswith("train/")]
    assert {k: rows[2][k] for k in before} == {k: rows[0][k] for k in before}
    assert rows[2]["train/loss"] != rows[0]["train/loss"] and rows[2]["train/ppo_kl"] != rows[0]["train/ppo_kl"]


def test_activation_checkpoints_keep_the_noise_and_other_micro_batches_draw_their_own(tmp_path: Path) -> None:
    words = ["method=alp", "precision=int4", "knobs.ALP.std=0.05"]
    base = grpo_step(small_run(tmp_path, words))
    again = grpo_step(small_run(tmp_path, words, checkpoint_layers=True))
    assert again["train/grad_norm"] == pytest.approx(base["train/grad_norm"], rel=1e-4)
    apart = grpo_step(small_run(tmp_path, words, micro_batch_tokens=40))
    assert apart["train/grad_norm"] != pytest.approx(base["train/grad_norm"], rel=1e-3)
    quiet = [
        grpo_step(small_run(tmp_path, [*words[:2], "knobs.ALP.std=0.0"], **more))["train/grad_norm"]
        for more in ({}, {"micro_batch_tokens": 40})
    ]
    assert quiet[0] == pytest.approx(quiet[1], rel=1e-4)


def test_refusals() -> None:
    for knobs, words in (
        ({"std": -1.0}, "std: -1"), ({"first": -1}, "first, count: -1"), ({"count": 0}, "first, count: 0, 0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"ALP.{words}"):
            ALP(**knobs)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"algo.mode=decoupled: ALP needs bypass_ppo"):
        compose(small_config("method=naive", "parts=[alp.ALP]"))
    check(small_config("method=alp", "knobs.ALP.first=1"))
    with pytest.raises(ValueError, match=r"^knobs\.ALP\.first=2: the model has 2 layers; valid: 0 to 1$"):
        check(small_config("method=alp", "knobs.ALP.first=2"))
