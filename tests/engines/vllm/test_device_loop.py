"""The loop on the device gives vLLM's own tokens, and asks its scheduler for the prompts alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from harness.engines.vllm.engine import VLLMEngine, seeded
from harness.foundation.seeds import stable_seed
from tests.engines.vllm.test_decoding import COUNT, TOKENS, check_nothing_is_left, drawn
from tests.engines.vllm.vllm_cases import PROMPTS, LiveEngine, model_of, needs_vllm, plan_of, stream

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def engine() -> Iterator[VLLMEngine]:
    holder = LiveEngine()
    started = holder(plan_of("fp32"), max_length=256)
    started.load_weights(stream(model_of()))
    yield started
    holder.close()


def test_tokens_and_log_probs_are_vllms_own_where_no_row_ends_early(
    engine: VLLMEngine, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams  # pyright: ignore[reportAttributeAccessIssue]

    monkeypatch.setattr(engine, "end_ids", [])
    ours = drawn(engine, tokens=200)
    assert asked == [COUNT] * 2  # the prompts and one token more
    engine.llm.reset_prefix_cache()
    sampling = SamplingParams(max_tokens=200, ignore_eos=True, logprobs=0, detokenize=False, flat_logprobs=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS for _ in range(COUNT // len(PROMPTS))]
    with seeded(stable_seed(3, "vllm"), torch.device("cpu")):
        theirs = [output.outputs[0] for output in engine.llm.generate(prompts, sampling, use_tqdm=False)]
    assert ours.token_ids.tolist() == [list(one.token_ids) for one in theirs]
    assert torch.equal(ours.logp, torch.tensor([one.logprobs.logprobs for one in theirs]))
    check_nothing_is_left(engine)


def test_greedy_answers_of_different_lengths_are_those_of_the_scheduler(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token 41, which this model likes, ends a row: rows leave at different steps, and the rest move together."""
    prompts = [[5 + k, 9, 3 * k % 60, 7] for k in range(40)]

    def greedy() -> Any:
        return engine.generate(prompts, num_samples=1, max_new_tokens=100, temperature=0.0, seed=0)

    monkeypatch.setattr(engine, "end_ids", [])
    free = greedy().token_ids
    common = int(torch.bincount(free.flatten()).argmax())
    monkeypatch.setattr(engine, "end_ids", [common])
    ours = greedy()
    monkeypatch.setattr(engine, "loop", None)
    theirs = greedy()
    assert len(set(ours.lengths.tolist())) > 3
    assert torch.equal(ours.token_ids, theirs.token_ids) and torch.equal(ours.lengths, theirs.lengths)
    assert torch.equal(ours.truncated, theirs.truncated)
    # Other numbers of rows a step, so other sums: 3e-6 apart on a CPU with AMX. A cached sampler is held to 1e-5.
    torch.testing.assert_close(ours.logp, theirs.logp, atol=1e-5, rtol=0)
    check_nothing_is_left(engine)


def test_a_second_call_sees_nothing_of_the_first(engine: VLLMEngine) -> None:
    first = drawn(engine, seed=3)
    drawn(engine, tokens=200, seed=9)
    again = drawn(engine, seed=3)
    assert torch.equal(first.token_ids, again.token_ids) and torch.equal(first.logp, again.logp)


def test_a_batch_that_does_not_run_at_once_is_the_schedulers(engine: VLLMEngine, asked: list[int]) -> None:
    out = drawn(engine, samples=60, tokens=TOKENS)  # 480 rows, 64 at a time
    assert len(asked) > 480 / 64 and bool((out.lengths > 0).all())
    check_nothing_is_left(engine)


def test_an_error_in_the_loop_leaves_no_request_behind(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a kernel failed")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="a kernel failed"):
        patched.setattr(engine.loop, "_step", broken)
        drawn(engine)
    check_nothing_is_left(engine)
    assert drawn(engine).lengths.min() > 0
