"""Repeated steps are vLLM's own steps: the same tokens, fewer questions to its scheduler, nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from harness.engines.vllm import decoding
from harness.engines.vllm.engine import VLLMEngine, seeded
from harness.foundation.seeds import stable_seed
from tests.engines.vllm.vllm_cases import PROMPTS, LiveEngine, model_of, needs_vllm, plan_of, scheduler_of, stream

pytestmark = needs_vllm
COUNT, TOKENS = 24, 40


@pytest.fixture(scope="module")
def engine() -> Iterator[VLLMEngine]:
    holder = LiveEngine()
    started = holder(plan_of("fp32"), max_length=256)
    started.loop = None  # the scheduler's own way
    started.load_weights(stream(model_of()))
    yield started
    holder.close()


def drawn(engine: VLLMEngine, tokens: int = TOKENS, seed: int = 3, samples: int = COUNT // len(PROMPTS)) -> Any:
    return engine.generate(PROMPTS, num_samples=samples, max_new_tokens=tokens, temperature=1.0, seed=seed)


def check_nothing_is_left(engine: VLLMEngine) -> None:
    scheduler, processor = scheduler_of(engine), engine.llm.llm_engine.output_processor
    assert not scheduler.requests and not scheduler.running and not processor.request_states
    assert scheduler.num_lookahead_tokens == 0
    assert scheduler.kv_cache_manager.usage == 0.0


@pytest.mark.parametrize("in_flight", [1, 2])
def test_without_an_early_end_tokens_are_vllms_own(
    engine: VLLMEngine, asked: list[int], monkeypatch: pytest.MonkeyPatch, in_flight: int
) -> None:
    from vllm import SamplingParams  # pyright: ignore[reportAttributeAccessIssue]

    monkeypatch.setattr(engine, "end_ids", [])
    monkeypatch.setattr(engine.llm.llm_engine.engine_core.engine_core, "batch_queue_size", in_flight)
    ours = drawn(engine)
    assert asked == [COUNT] * 2  # the prompts, one token more; then 38 without a question
    engine.llm.reset_prefix_cache()
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=0, detokenize=False, flat_logprobs=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS for _ in range(COUNT // len(PROMPTS))]
    with seeded(stable_seed(3, "vllm"), torch.device("cpu")):
        theirs = [output.outputs[0] for output in engine.llm.generate(prompts, sampling, use_tqdm=False)]
    assert ours.token_ids.tolist() == [list(one.token_ids) for one in theirs]
    assert torch.equal(ours.logp, torch.tensor([one.logprobs.logprobs for one in theirs]))
    assert ours.lengths.tolist() == [TOKENS] * COUNT and bool(ours.truncated.all())
    check_nothing_is_left(engine)


def test_long_answers_ask_every_64_tokens(
    engine: VLLMEngine, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "end_ids", [])
    out = drawn(engine, tokens=200)
    assert out.lengths.tolist() == [200] * COUNT
    assert len(asked) == 2 + 3  # 1 + 1 + 64, then three times 1 + up to 64
    check_nothing_is_left(engine)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_ended_rows_leave_the_batch_in_eighths(
    engine: VLLMEngine, asked: list[int], monkeypatch: pytest.MonkeyPatch, in_flight: int
) -> None:
    """480 rows, 64 at a time; an eighth of those that run may linger."""
    monkeypatch.setattr(engine.llm.llm_engine.engine_core.engine_core, "batch_queue_size", in_flight)
    out = drawn(engine, samples=60, tokens=100)
    (end,) = engine.end_ids
    is_end = out.token_ids == end
    lengths = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, 100)
    assert torch.equal(out.lengths, lengths) and torch.equal(out.truncated, ~is_end.any(1))
    assert 0.2 < float(is_end.any(1).float().mean()) <= 1.0 and max(asked) == 64
    # With rows waiting every eighth that ends is replaced: far fewer questions than the 100 tokens of 8 waves.
    assert 480 / 64 < len(asked) < 300
    check_nothing_is_left(engine)


def test_samples_are_reproducible_and_follow_the_seed(engine: VLLMEngine) -> None:
    first, again, other = (drawn(engine, seed=seed).token_ids for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert first.shape != other.shape or not torch.equal(first, other)


def test_an_error_leaves_no_request_behind(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a kernel failed")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="a kernel failed"):
        patched.setattr(decoding, "_repeat", broken)
        drawn(engine)
    check_nothing_is_left(engine)
    assert drawn(engine).lengths.min() > 0
