"""Requests to vLLM and its answers in float32, against those of the embedded engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from harness.api import Rollout
from harness.engines.embedded.engine import EmbeddedEngine
from harness.engines.vllm.engine import VLLMEngine
from tests.engines.engine_cases import EOS, PAD, decoder, trainer_logp, weights
from tests.engines.vllm.vllm_cases import PROMPTS, SHAPE, LiveEngine, model_of, needs_vllm, plan_of, stream

pytestmark = needs_vllm
PLAN = plan_of("fp32")


@pytest.fixture
def engine(live: LiveEngine) -> Iterator[VLLMEngine]:
    started = live(PLAN, max_length=64)
    started.load_weights(stream(model_of()))
    yield started
    started.keeps_log_probs = False


@pytest.fixture(scope="module")
def embedded() -> EmbeddedEngine:
    ours = EmbeddedEngine(SHAPE, PLAN, eos_id=EOS, pad_id=PAD)
    ours.load_weights(stream(model_of()))
    return ours


def test_greedy_answers_are_the_embedded_engines(engine: VLLMEngine, embedded: EmbeddedEngine) -> None:
    theirs, ours = (
        each.generate(PROMPTS, num_samples=2, max_new_tokens=24, temperature=0.0, seed=0) for each in (engine, embedded)
    )
    assert torch.equal(theirs.token_ids, ours.token_ids)
    assert torch.equal(theirs.lengths, ours.lengths) and torch.equal(theirs.truncated, ours.truncated)
    assert (theirs.logp - ours.logp).abs().max() < 2e-5
    assert theirs.logp.dtype == ours.logp.dtype == torch.float32


def check_meaning(out: Rollout, max_new_tokens: int) -> None:
    """An end token ends a response and belongs to it; padding has the pad id and log-prob 0."""
    for ids, logp, length, truncated in zip(
        out.token_ids.tolist(), out.logp.tolist(), out.lengths.tolist(), out.truncated.tolist(), strict=True
    ):
        assert EOS not in ids[: length - 1]
        assert truncated == (ids[length - 1] != EOS)
        assert not truncated or length == max_new_tokens
        assert set(ids[length:]) <= {PAD} and set(logp[length:]) <= {0.0} and all(x < 0 for x in logp[:length])
    assert out.token_ids.shape[1] == int(out.lengths.max())


def test_ends_and_padding_mean_the_same(engine: VLLMEngine, embedded: EmbeddedEngine) -> None:
    for each in (engine, embedded):
        for tokens in (1, 20):  # with one token an end token comes exactly at the limit
            out = each.generate(PROMPTS, num_samples=60, max_new_tokens=tokens, temperature=1.5, seed=1)
            check_meaning(out, tokens)
            assert 0 < int((~out.truncated).sum()) < len(out.truncated)


def test_a_whole_distribution_is_normal_and_holds_the_sampled_log_prob(engine: VLLMEngine) -> None:
    ask = {"num_samples": 3, "max_new_tokens": 20, "temperature": 0.7, "seed": 5}
    plain = engine.generate(PROMPTS, **ask)  # pyright: ignore[reportArgumentType]
    assert plain.log_probs is None
    engine.keeps_log_probs = True
    out = engine.generate(PROMPTS, **ask)  # pyright: ignore[reportArgumentType]
    assert torch.equal(out.token_ids, plain.token_ids) and torch.equal(out.logp, plain.logp)
    assert out.log_probs is not None and out.log_probs.shape == (24, out.logp.shape[1], SHAPE.vocab_size)
    is_token = torch.arange(out.logp.shape[1]) < out.lengths[:, None]
    assert (out.log_probs.exp().sum(-1) - 1)[is_token].abs().max() < 1e-5
    assert torch.equal(out.log_probs.gather(2, out.token_ids[:, :, None])[..., 0][is_token], out.logp[is_token])
    assert bool((out.log_probs[~is_token] == 0).all())
    assert (trainer_logp(model_of(), PROMPTS, out, 0.7) - out.logp).abs().max() < 2e-5


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_draws_follow_the_distribution_that_is_reported(engine: VLLMEngine, temperature: float) -> None:
    engine.keeps_log_probs = True
    out = engine.generate([[5, 9, 4]], num_samples=4000, max_new_tokens=1, temperature=temperature, seed=7)
    assert out.log_probs is not None
    chances = out.log_probs[0, 0].exp()
    expected = 4000 * chances
    counts = torch.bincount(out.token_ids[:, 0], minlength=SHAPE.vocab_size)
    often = expected > 5
    chi2 = ((counts - expected)[often] ** 2 / expected[often]).sum()
    count = int(often.sum())
    assert count > 20 and chi2 < count + 4 * (2 * count) ** 0.5
    flat = ((counts - 4000 / SHAPE.vocab_size) ** 2 / (4000 / SHAPE.vocab_size)).sum()
    assert flat > 10 * chi2  # a control: another distribution is far off


def test_requests_that_do_not_fit_are_refused_as_by_the_embedded_engine(
    engine: VLLMEngine, embedded: EmbeddedEngine
) -> None:
    good = {"num_samples": 1, "max_new_tokens": 4, "temperature": 1.0, "seed": 0}
    bad = (([], {}), ([[]], {}), ([[3], [999]], {}), ([[3]], {"max_new_tokens": 0}), ([[3]], {"temperature": -1.0}),
           ([[3]], {"num_samples": 0}), ([[3] * 500], {"max_new_tokens": 100}))  # fmt: skip
    for prompts, wrong in bad:
        said: list[str] = []
        for each in (engine, embedded):
            with pytest.raises(ValueError) as error:
                each.generate(prompts, **(good | wrong))  # pyright: ignore[reportArgumentType]
            said.append(str(error.value))
        assert said[0] == said[1]
    with pytest.raises(ValueError, match=r"^a prompt and max_new_tokens need 68 positions; the engine's max_length=64"):
        engine.generate([[3] * 48], num_samples=1, max_new_tokens=20, temperature=1.0, seed=0)
    engine.generate([[3] * 48], num_samples=1, max_new_tokens=16, temperature=1.0, seed=0)


def test_biases_and_a_head_of_its_own_arrive(live: LiveEngine) -> None:
    """Qwen2's shape, and a vocabulary that vLLM pads."""
    shape = replace(
        SHAPE, qk_norm=False, attention_bias=True, tie_embeddings=False, num_heads=2, vocab_size=100, max_positions=64
    )
    model = decoder(shape, seed=2, std=0.12)
    engine = live(PLAN, shape=shape)
    for each in (decoder(shape, seed=3), model):
        engine.load_weights(weights(each))
    out = engine.generate(PROMPTS, num_samples=8, max_new_tokens=12, temperature=1.0, seed=0)
    assert (trainer_logp(model, PROMPTS, out) - out.logp).abs().max() < 2e-5
    assert int(out.token_ids.max()) < 100
    ours = EmbeddedEngine(shape, PLAN, eos_id=EOS, pad_id=PAD)
    ours.load_weights(weights(model))
    mine, theirs = ({r.name: r.hash for r in each.realized_plan().weights} for each in (ours, engine))
    assert mine == theirs and "lm_head.weight" in mine and "model.layers.0.self_attn.k_proj.bias" in mine
