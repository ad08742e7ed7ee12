"""Sampled tokens and log-probs of a batch, as they come from vLLM's model runner or from the loop on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class Samples:
    """Sampled tokens and log-probs: N rows of at most T tokens."""

    def __init__(
        self, num_rows: int, max_new_tokens: int, *, end_ids: Sequence[int], pad_id: int, vocab_size: int | None
    ) -> None:
        """`end_ids`: each of them ends a row. `vocab_size`: keep the whole distribution of every token; None: the
        sampled token's log-prob alone."""
        shape = num_rows, max_new_tokens
        self.end_ids = np.array(end_ids, np.int64)
        self.ids = np.full(shape, pad_id, np.int64)
        """[N, T] sampled tokens, then padding."""
        self.logp = np.zeros(shape, np.float32)
        """[N, T] nats, 0 where padded."""
        self.lengths = np.zeros(num_rows, np.int64)
        """[N] tokens sampled so far."""
        self.has_ended = np.zeros(num_rows, np.bool_)
        """[N] True per row that has ended by one of `end_ids`."""
        self.log_probs = None if vocab_size is None else np.zeros((*shape, vocab_size), np.float32)
        """[N, T, V] nats of the whole vocabulary, 0 where padded."""

    def record(self, rows: Sequence[int], output: Any) -> None:
        """Record one step's tokens, `rows` being those of vLLM's ModelRunnerOutput; rows that ended before, and those
        whose prompt was not read to its end, have none."""
        tokens = output.sampled_token_ids
        all_rows = np.asarray(rows, np.int64)
        has_token = np.fromiter(map(len, tokens), np.int64, len(tokens)) > 0
        new = np.flatnonzero(has_token & ~self.has_ended[all_rows] & (self.lengths[all_rows] < self.ids.shape[1]))
        if not len(new):
            return
        at = all_rows[new], self.lengths[all_rows[new]]
        values, found = output.logprobs.logprobs, output.logprobs.logprob_token_ids
        sampled = found[new, 0]  # the sampled token comes first
        self.ids[at], self.logp[at] = sampled, values[new, 0]
        if self.log_probs is not None:
            self.log_probs[at[0][:, None], at[1][:, None], found[new]] = values[new]
        self.lengths[at[0]] += 1
        self.has_ended[at[0]] = np.isin(sampled, self.end_ids)
