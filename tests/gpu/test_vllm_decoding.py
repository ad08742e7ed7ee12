"""Repeated steps and the loop on the device under CUDA graphs: vLLM's own tokens, and the trainer's log-probs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.api import Rollout
from harness.engines.vllm.engine import seeded
from harness.foundation.seeds import stable_seed
from tests.engines.engine_cases import trainer_logp, weights
from tests.gpu import vllm_cases
from tests.gpu.vllm_cases import DEVICE, FORMATS, PROMPTS, QWEN3, started

pytestmark = [pytest.mark.gpu, vllm_cases.NEEDS_VLLM]
MODEL = vllm_cases.model_of(FORMATS[0], 1)
TOKENS = 150


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    with started(QWEN3, FORMATS[0].plan, max_batch=64) as live:
        live.load_weights(iter(weights(MODEL)))
        yield live


def drawn(engine: Any, samples: int, tokens: int = TOKENS) -> Rollout:
    """Samples, on the CPU."""
    out = engine.generate(PROMPTS, num_samples=samples, max_new_tokens=tokens, temperature=1.0, seed=3)
    return replace(out, token_ids=out.token_ids.cpu(), logp=out.logp.cpu(), lengths=out.lengths.cpu())


@pytest.mark.parametrize(("count", "has_loop", "questions"), [(40, False, 6), (64, True, 3)])
def test_without_an_end_tokens_are_vllms_own(
    engine: Any, monkeypatch: pytest.MonkeyPatch, count: int, has_loop: bool, questions: int
) -> None:
    """64 rows fill a graph of the loop, so the noise has the shape that vLLM draws."""
    from vllm import SamplingParams  # pyright: ignore[reportAttributeAccessIssue]

    core = engine.llm.llm_engine.engine_core.engine_core
    assert core.batch_queue_size == 2  # steps overlap
    plain, asked = core.scheduler.schedule, list[int]()
    monkeypatch.setattr(core.scheduler, "schedule", lambda *args: asked.append(1) or plain(*args))
    if not has_loop:
        monkeypatch.setattr(engine, "loop", None)
    ours = drawn(engine, count // len(PROMPTS))
    assert len(asked) <= questions  # 150 tokens
    monkeypatch.undo()
    engine.llm.reset_prefix_cache()
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=0, detokenize=False, flat_logprobs=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS for _ in range(count // len(PROMPTS))]
    with seeded(stable_seed(3, "vllm"), torch.device(DEVICE)):
        theirs = [output.outputs[0] for output in engine.llm.generate(prompts, sampling, use_tqdm=False)]
    same = ours.token_ids == torch.tensor([list(one.token_ids) for one in theirs])
    assert float(same.all(1).float().mean()) >= 0.9
    assert not core.scheduler.requests and core.scheduler.num_lookahead_tokens == 0


@pytest.mark.parametrize("rows", [320, 56])
def test_rows_that_end_and_rows_that_wait_keep_their_own_context(
    engine: Any, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """320 rows, 64 at a time; 56 rows in the loop, beside 8 of padding: a token attributed to another row or place
    would be far from the trainer's log-prob."""
    monkeypatch.setattr(engine, "end_ids", [9])
    out = drawn(engine, rows // len(PROMPTS), 100)
    is_end = out.token_ids == 9
    lengths = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, 100)
    assert torch.equal(out.lengths, lengths) and float(is_end.any(1).float().mean()) > 0.2
    gap = (trainer_logp(MODEL, PROMPTS, out) - out.logp).abs()
    is_token = torch.arange(gap.shape[1]) < out.lengths[:, None]
    assert float(gap[is_token].mean()) < 0.02 and float((gap[is_token] > 0.3).float().mean()) < 1e-3
