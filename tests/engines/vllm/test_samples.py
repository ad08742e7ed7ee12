"""Tokens as vLLM's runner gives them, step by step: what is kept, where rows end; without vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from harness.engines.vllm.samples import Samples


def step(*tokens: int | None) -> SimpleNamespace:
    """One step of vLLM's runner; None: the row's prompt is still read. The sampled token comes first."""
    ids = np.array([[0 if token is None else token, 2, 3] for token in tokens])
    logp = np.array([[-0.1 * (row + 1), -5.0, -6.0] for row in range(len(tokens))], np.float32)
    return SimpleNamespace(
        sampled_token_ids=[[] if token is None else [token] for token in tokens],
        logprobs=SimpleNamespace(logprobs=logp, logprob_token_ids=ids),
    )


def test_each_of_the_end_ids_ends_a_row() -> None:
    samples = Samples(3, 4, end_ids=[1, 7], pad_id=0, vocab_size=None)
    for tokens in ((4, 1, None), (7, 8, 5), (6, 6, 6), (6, 6, 6), (6, 6, 1)):
        samples.record([0, 1, 2], step(*tokens))
    assert samples.ids.tolist() == [[4, 7, 0, 0], [1, 0, 0, 0], [5, 6, 6, 1]]
    assert samples.lengths.tolist() == [2, 1, 4]
    assert samples.has_ended.tolist() == [True, True, True]
    np.testing.assert_allclose(samples.logp[0], [-0.1, -0.1, 0, 0])
    np.testing.assert_allclose(samples.logp[2], [-0.3] * 4, rtol=1e-6)


def test_without_end_ids_rows_go_on_to_the_limit() -> None:
    samples = Samples(1, 2, end_ids=[], pad_id=0, vocab_size=None)
    for _ in range(4):
        samples.record([0], step(1))
    assert (samples.ids.tolist(), samples.lengths.tolist(), samples.has_ended.tolist()) == ([[1, 1]], [2], [False])


def test_rows_come_in_any_order_and_keep_whole_distributions() -> None:
    samples = Samples(2, 2, end_ids=[1], pad_id=0, vocab_size=9)
    samples.record([1, 0], step(4, 5))
    samples.record([1], step(1))
    assert samples.ids.tolist() == [[5, 0], [4, 1]]
    assert samples.log_probs is not None
    np.testing.assert_allclose(samples.log_probs[1, 0, [4, 2, 3]], [-0.1, -5, -6], rtol=1e-6)
    np.testing.assert_allclose(samples.log_probs[0, 0, [5, 2, 3]], [-0.2, -5, -6], rtol=1e-6)
    assert not samples.log_probs[0, 1].any()
