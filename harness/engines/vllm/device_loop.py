"""Decoding that stays on the device until every row has ended.

    state per row   last token, its position, the pages of its cache, is it live
    one step        slots of the cache -> attention's metadata -> model -> logits -> draw -> record -> state moved on
    loop            16 steps without a word to the host; then ended rows leave, and the next smaller size goes on

vLLM prepares every token's step on the host (3 to 4 ms for 512 rows on an H200's host), when a model of 10M parameters
takes the GPU a tenth of that. Here vLLM's own layers, kernels, cache and attention metadata do the same work, but one
step is one CUDA graph that also draws the token and moves the inputs on. Draws come from torch's default generator, and
vLLM's own sampler makes them, so a batch in which no row ends early gets vLLM's own tokens.

Left out: adapters, whole distributions, several cache groups, and batches that do not fit the cache from the first
token to the last (`decoding.py` asks vLLM's scheduler for those).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.engines.vllm.samples import Samples
from harness.foundation.life import LIFE

STEPS = 16
"""Steps between two looks at how many rows are live."""


@dataclass(frozen=True)
class Rows:
    """State of up to B rows: device tensors that the graphs read and write in place."""

    ids: Tensor
    """[B] int32: the last token of each row."""
    positions: Tensor
    """[B] int64: its position."""
    last: Tensor
    """[B] int64: position at which the row is full."""
    is_live: Tensor
    """[B] bool."""
    row: Tensor
    """[B] int64: row of the record; B for padding."""
    pages: Tensor
    """[B, pages] int32: the row's blocks of the cache."""

    def all(self) -> tuple[Tensor, ...]:
        """Return every tensor."""
        return self.ids, self.positions, self.last, self.is_live, self.row, self.pages

    def put(self, *values: Tensor) -> None:
        """Write the rows `values` (tensors in the order of `all`) to the front, and make the others padding."""
        count = len(values[0])
        for own, new in zip(self.all(), values, strict=True):
            own[:count] = new
            own[count:] = 0
        self.row[count:] = len(self.row)


class DeviceLoop:
    """Decoding loop over one engine's model runner."""

    def __init__(self, runner: Any, num_ends: int = 1) -> None:
        """`runner`: vLLM's model runner, warmed up; `num_ends`: token ids that end a row."""
        self.num_ends = num_ends
        config = runner.vllm_config
        self.runner, self.device = runner, runner.device
        self.max_batch: int = config.scheduler_config.max_num_seqs
        self.max_length: int = config.model_config.max_model_len
        self.is_captured = self.device.type == "cuda" and not config.model_config.enforce_eager
        self.table = runner.input_batch.block_table[0]
        self.graphs = dict[int, Any]()
        self._memory: Any = None
        with torch.inference_mode():
            self._allocate()

    def _allocate(self) -> None:
        batch = self.max_batch
        zeros = {name: torch.zeros(batch, dtype=torch.int64, device=self.device) for name in ("at", "last", "row")}
        pages = torch.zeros_like(self.table.get_device_tensor(batch))
        self.rows = Rows(
            ids=torch.zeros(batch, dtype=torch.int32, device=self.device), positions=zeros["at"], last=zeros["last"],
            is_live=torch.zeros(batch, dtype=torch.bool, device=self.device), row=zeros["row"] + batch, pages=pages,
        )  # fmt: skip
        self.slots = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self.seq_lens = torch.zeros(batch, dtype=torch.int32, device=self.device)
        self.starts = torch.arange(batch + 1, dtype=torch.int32, device=self.device)
        self.starts_on_host = torch.arange(batch + 1, dtype=torch.int32)
        shape = batch + 1, self.max_length + 1  # one row and one column more, which nobody reads
        self.tokens = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.logp = torch.zeros(shape, dtype=torch.float32, device=self.device)
        self.temperature = torch.ones((), dtype=torch.float32, device=self.device)
        self.end_ids = torch.zeros(self.num_ends, dtype=torch.int64, device=self.device)
        self.is_greedy = torch.zeros((), dtype=torch.bool, device=self.device)

    def takes(self, scheduler: Any) -> bool:
        """Do all requests run, and is there one group of cache blocks?"""
        return not scheduler.waiting and len(self.runner.kv_cache_config.kv_cache_groups) == 1

    def prepare(self, num_rows: int) -> None:
        """Record the graphs that `num_rows` rows will need. It draws random numbers: call it before seeding."""
        if not self.is_captured:
            return
        with torch.inference_mode():
            for size in self._sizes():
                if size not in self.graphs and size <= self._fit(min(num_rows, self.max_batch)):
                    self.graphs[size] = self._capture(size)

    def run(self, samples: Samples, names: list[str], index: np.ndarray, prompt_lengths: np.ndarray, *,
            temperature: float) -> int:  # fmt: skip
        """Sample rows `index` [R] of `samples` to their ends: their last tokens are recorded, not yet fed.

        `names`: the requests, in the same order; `prompt_lengths` [R] in tokens. The runner's block tables must hold
        cache for whole responses. Returns the number of steps.
        """
        with torch.inference_mode():
            return self._run(samples, names, index, prompt_lengths, temperature)

    def _run(
        self, samples: Samples, names: list[str], index: np.ndarray, prompts: np.ndarray, temperature: float
    ) -> int:
        done, width = samples.lengths[index], samples.ids.shape[1]
        is_live = ~samples.has_ended[index] & (done < width)
        order = [self.runner.input_batch.req_id_to_index[name] for name in names]
        pages = self.table.get_device_tensor(len(self.runner.input_batch.req_ids))
        self.temperature.fill_(temperature or 1.0)
        self.is_greedy.fill_(temperature == 0)
        self.end_ids.fill_(-1)
        self.end_ids[: len(samples.end_ids)] = self._tensor(samples.end_ids)
        first = prompts + done - 1
        self.rows.put(
            self._tensor(samples.ids[index, done - 1]), self._tensor(first), self._tensor(prompts + width - 1),
            self._tensor(is_live), torch.arange(len(index), device=self.device), pages[self._tensor(order)],
        )  # fmt: skip
        steps = self._loop(len(index), int((width - done).max()))
        self._read(samples, index, prompts, done)
        return steps

    def _tensor(self, values: Any) -> Tensor:
        return torch.as_tensor(np.asarray(values)).to(self.device)

    def _loop(self, num_rows: int, limit: int) -> int:
        size, steps = self._fit(num_rows), 0
        while steps < limit:
            count = min(STEPS, limit - steps)
            for _ in range(count):
                self._make_step(size)
            steps += count
            live = self.rows.is_live[:size].nonzero()[:, 0]
            LIFE.alive()
            if not len(live):
                break
            if (smaller := self._fit(len(live))) < size:
                self.rows.put(*(tensor[live] for tensor in self.rows.all()))
                size = smaller
        return steps

    def _read(self, samples: Samples, index: np.ndarray, prompts: np.ndarray, done: np.ndarray) -> None:
        """Copy the recorded tokens to the host's samples."""
        tokens = self.tokens[: len(index)].cpu().numpy()
        logp = self.logp[: len(index)].cpu().numpy()
        width = samples.ids.shape[1]
        for at, (row, prompt, start) in enumerate(zip(index.tolist(), prompts.tolist(), done.tolist(), strict=True)):
            if samples.has_ended[row]:
                continue
            new = tokens[at, prompt + start : prompt + width]
            ends = np.flatnonzero(np.isin(new, samples.end_ids))
            end = start + (int(ends[0]) + 1 if len(ends) else len(new))
            samples.ids[row, start:end] = new[: end - start]
            samples.logp[row, start:end] = logp[at, prompt + start : prompt + end]
            samples.lengths[row], samples.has_ended[row] = end, len(ends) > 0

    def _sizes(self) -> list[int]:
        """The batch sizes that graphs are recorded for."""
        halves = [self.max_batch >> shift for shift in range(self.max_batch.bit_length())]
        return sorted({size for half in halves for size in (half, half * 3 // 4) if size >= 8} | {self.max_batch})

    def _fit(self, num_rows: int) -> int:
        """The smallest size that holds these rows; without graphs it is their number."""
        return next(size for size in self._sizes() if size >= num_rows) if self.is_captured else num_rows

    def _make_step(self, size: int) -> None:
        if self.is_captured:
            self.graphs[size].replay()
        else:
            self._step(size)

    def _capture(self, size: int) -> Any:
        """A CUDA graph of one step. All rows are padding meanwhile, so nothing is written that anybody reads."""
        self.rows.put(*(tensor[:0] for tensor in self.rows.all()))
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self._step(size)  # kernels are compiled, workspaces allocated
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            self._step(size)
        self._memory = graph.pool()
        return graph

    def _step(self, size: int) -> None:
        """One token for every live row among the first `size`."""
        ids, positions, last, is_live, row, pages = (tensor[:size] for tensor in self.rows.all())
        logits = self._logits(size, ids, positions, row, pages).float() / self.temperature
        greedy = logits.argmax(-1)
        drawn, log_probs = self.runner.sampler.topk_topp_sampler(logits, {}, None, None)
        token = torch.where(self.is_greedy, greedy, drawn.long())
        logp = log_probs.gather(1, token[:, None])[:, 0]
        at = positions + 1
        record = torch.where(is_live, row, self.max_batch), at
        self.tokens.index_put_(record, token.to(torch.int32))
        self.logp.index_put_(record, logp)
        is_end = (token[:, None] == self.end_ids).any(1)
        goes_on = is_live & ~is_end & (at < last)
        ids.copy_(torch.where(goes_on, token.to(torch.int32), ids))
        positions.copy_(torch.where(goes_on, at, positions))
        is_live.copy_(goes_on)

    def _logits(self, size: int, ids: Tensor, positions: Tensor, row: Tensor, pages: Tensor) -> Tensor:
        """[size, vocabulary] of vLLM's model, which writes the tokens' keys and values into its cache."""
        from vllm.forward_context import set_forward_context
        from vllm.v1.attention.backend import CommonAttentionMetadata

        block = self.table.block_size
        slots, seq_lens = self.slots[:size], self.seq_lens[:size]
        page = pages.gather(1, (positions // block)[:, None])[:, 0].long()
        slots.copy_(torch.where(row < self.max_batch, page * block + positions % block, -1))
        seq_lens.copy_(positions + 1)
        common = CommonAttentionMetadata(
            query_start_loc=self.starts[: size + 1], query_start_loc_cpu=self.starts_on_host[: size + 1],
            seq_lens=seq_lens, num_reqs=size, num_actual_tokens=size, max_query_len=1, max_seq_len=self.max_length,
            block_table_tensor=pages, slot_mapping=slots, causal=True,
        )  # fmt: skip
        metadata, where = dict[str, Any](), dict[str, Tensor]()
        for group in self.runner.attn_groups[0]:
            built = group.get_metadata_builder().build(common_prefix_len=0, common_attn_metadata=common)
            metadata |= dict.fromkeys(group.layer_names, built)
            where |= dict.fromkeys(group.layer_names, slots)
        model = self.runner.get_model()
        with set_forward_context(metadata, self.runner.vllm_config, num_tokens=size, slot_mapping=where):
            return model.compute_logits(model(input_ids=ids, positions=positions))
