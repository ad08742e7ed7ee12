"""The embedded rollout engine: batched sampling in plain torch with every number format emulated in float32.

    load_weights -> LiveWeights (quantize, dequantize into fused matrices)
    generate     -> per chunk of max_batch rows: prefill distinct prompts once, then decode against a static cache,
                    dropping rows that have ended
    realized_plan -> what the live memory holds, checked bit for bit against codes and scales

It separates the format gap from the engine gap: one framework, one thread if asked, no kernel noise. Emulated formats
are slower than float32, never faster. With `plan.sampler == "trainer"` it samples from the trainer's own forward pass
(`exact.py`). Left out: paged or shared caches, and requests that arrive while others run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from harness.api import KVProtocol, Passport, Plan, Rollout, WeightStream
from harness.engines.embedded.exact import check_same_weights, input_formats, parameter_records, sample_exact
from harness.engines.embedded.forward import decode, fold, head_gains, prefill
from harness.engines.embedded.kv_cache import KVCache, KVScales
from harness.engines.embedded.sampling import Draws, Transcript, join, nucleus, pick, race_noise, scaled_log_probs
from harness.engines.embedded.supports import SUPPORTS
from harness.engines.embedded.weights import LiveWeights
from harness.engines.requests import Requests, requests_of
from harness.foundation.life import LIFE
from harness.foundation.seeds import generator
from harness.models.decoder import Decoder, DecoderConfig, rope_tables
from harness.numerics.experts import OWN

RETIRE_AT = 0.125
"""Ended rows are dropped once they are this share of those computed. Measured: 1/16 to 1/4 are equally fast, and never
dropping takes twice the time where lengths spread over 3 x the mean."""
BLOCK_TOKENS = {"cpu": 1152, "cuda": 32768}
"""Prompt tokens of one prefill by device. On a CPU 1152 are a sixth faster than 4608 at sizes xs and m, which spill its
cache. On a GPU they bound the memory: the widest layer's output for 256 prompts of 640 tokens alone has 1.3 GiB with
10M parameters."""
EVALUATED_AT_ONCE = 512
"""Rows that an evaluation on a GPU computes together, chunks of `max_batch` side by side: a step costs the host some
5 ms, whatever their number. With 10M parameters their cache has 5 GiB at 1670 tokens."""
GPU_CHECK_EVERY = 8
"""Steps between two questions to a GPU whether rows have ended; a CPU is asked at every step."""
NO_EXACT_MIXTURE = (
    "sampler=trainer: a mixture of experts gives each expert another number of rows at every step, so that products "
    "differ in their last bits; choose a dense model, or method=router_replay"
)


class EmbeddedEngine:
    """`harness.api.RolloutEngine` on one device."""

    supports: ClassVar[frozenset[str]] = SUPPORTS

    def __init__(
        self,
        config: DecoderConfig,
        plan: Plan,
        *,
        eos_id: int,
        pad_id: int,
        stop_ids: Sequence[int] = (),
        device: torch.device | str = "cpu",
        trainer_model: Decoder | None = None,
        max_batch: int | None = None,
        retire_at: float | None = RETIRE_AT,
        keeps_log_probs: bool = False,
        keeps_experts: bool = False,
        for_evaluation: bool = False,
    ) -> None:
        """`stop_ids` end a response as `eos_id` does. `max_batch` rows are sampled at once (None: all); it is part of
        the random stream. Where a GPU has no room they are fewer, and half as many whenever its memory runs out, but
        never under `sampler=trainer`. `retire_at` None: ended rows are computed to the end. `keeps_log_probs`: rollouts
        carry the whole distribution of every token; `keeps_experts`: the experts of every position. `for_evaluation`:
        weights take no memory before the first load and no codes are kept of them, so there is no passport; on a GPU
        several chunks are computed together, which changes rounding alone.
        Raises ValueError for a plan this engine cannot follow."""
        if plan.sampler == "trainer" and trainer_model is None:
            raise ValueError("sampler=trainer needs trainer_model, the module to sample from")
        if plan.sampler == "trainer" and plan.rollout_kv is not None:
            raise ValueError("rollout_kv: the trainer's own forward (sampler=trainer) has no cache")
        if plan.sampler == "trainer" and plan.residual is not None:
            raise ValueError("residual: the trainer's own forward (sampler=trainer) has no second pass")
        if plan.sampler == "trainer" and config.num_experts:
            raise ValueError(NO_EXACT_MIXTURE)
        self.config, self.plan, self.device = config, plan, torch.device(device)
        self.end_ids, self.pad_id = (eos_id, *stop_ids), pad_id
        if keeps_experts and config.num_experts == 0:
            raise ValueError("keeps_experts=true: a dense model has no experts; choose a mixture such as model=moe_xs")
        self.max_batch, self.retire_at, self.keeps_log_probs = max_batch, retire_at, keeps_log_probs
        self.keeps_codes = not for_evaluation
        self.rows_at_once = EVALUATED_AT_ONCE if for_evaluation and self.device.type == "cuda" else 1  # or one chunk
        self.keeps_experts = keeps_experts
        self.trainer_model = trainer_model if plan.sampler == "trainer" else None
        self.weights = LiveWeights(config, plan, torch.device("meta") if for_evaluation else self.device)
        self.kv = KVScales(plan.rollout_kv, config.num_layers, self.device)
        self._drop_cache()
        self.tables = rope_tables(config, 1, self.device)
        self.is_awake = True

    def load_weights(self, weights: WeightStream) -> None:
        """Quantize and take over a stream of checkpoint tensors; ValueError leaves the old weights in place."""
        if self.weights.device.type == "meta":
            self.weights = LiveWeights(self.config, self.plan, self.device)
        if self.trainer_model is not None:
            weights = check_same_weights(self.trainer_model, weights)
        for name, scale in self.weights.load(weights, keeps_codes=self.keeps_codes).items():
            layer = int(name.removeprefix("model.layers.").partition(".")[0])
            self.kv.scales[layer, int(name.endswith("v_scale"))] = scale.to(self.device, torch.float32).reshape(())

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        num_samples: int,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        top_p: float = 1.0,
    ) -> Rollout:
        """`num_samples` responses per prompt, adjacent. Token ids are as wide as the longest response; under
        `sampler=trainer` as wide as `max_new_tokens`, the shape the trainer must score them at.

        Temperature 0 is greedy. Raises ValueError for requests that do not fit the model and for `top_p` under
        `sampler=trainer`, RuntimeError before the first load or while asleep, or where planned residual channels are
        not set, and torch.OutOfMemoryError where a GPU has no room for one row.
        """
        self._check_ready(wants_residual=True)
        requests = requests_of(prompts, num_samples, max_new_tokens, temperature, self.config, top_p)
        if top_p < 1.0 and self.trainer_model is not None:
            raise ValueError(f"top_p={top_p}: the trainer's own forward samples the whole distribution; valid: 1")
        fitting = self._fitting(requests)
        size = min(self.max_batch or len(requests.rows), fitting)
        together = max(1, min(self.rows_at_once, fitting) // size)
        while True:
            try:
                return self._in_chunks(requests, size, together, seed)
            except torch.OutOfMemoryError:  # another process has taken what was free
                if size * together == 1 or self.trainer_model is not None:  # it scores these very chunks
                    raise
            self._drop_cache()
            torch.cuda.empty_cache()
            size, together = (size, together // 2) if together > 1 else ((size + 1) // 2, 1)

    def _in_chunks(self, requests: Requests, size: int, together: int, seed: int) -> Rollout:
        """The responses, in chunks of `size` rows with noise of their own, `together` chunks at a time."""
        parts: list[Rollout] = []
        with torch.inference_mode():
            for batch, rows in enumerate(requests.rows.split(size * together)):
                draws: Draws | None = None
                if requests.temperature > 0:
                    draws = [
                        (len(chunk), generator(self.device, seed, "sample", number))
                        for number, chunk in enumerate(rows.split(size), batch * together)
                    ]
                if self.trainer_model is not None:
                    out = sample_exact(self.trainer_model, requests, rows, draws, self._transcript(rows, requests))
                else:
                    out = self._sample(requests, rows, draws)
                parts.append(out.rollout())
        return join(parts, None if self.trainer_model is None else requests.max_new_tokens)

    def _fitting(self, requests: Requests) -> int:
        """Rows whose cache and logits fit a GPU's free memory with a quarter to spare, at least one. All of them on a
        CPU, and under `sampler=trainer`, which has no cache and whose chunks are those that the trainer scores."""
        rows = len(requests.rows)
        if self.device.type != "cuda" or self.trainer_model is not None:
            return rows
        shape, length = self.config, max(map(len, requests.prompts)) + requests.max_new_tokens
        row = 4 * (2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * length + 6 * shape.vocab_size)
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        free = torch.cuda.mem_get_info(self.device)[0] + unused + self.cache.num_bytes()
        return max(1, min(rows, int(0.75 * free / row)))

    def _transcript(self, rows: Tensor, requests: Requests) -> Transcript:
        out = Transcript(len(rows), requests.max_new_tokens, self.end_ids, self.pad_id, self.device)
        if self.keeps_log_probs:
            out.keep_log_probs()
        return out

    def _sample(self, requests: Requests, rows: Tensor, draws: Draws | None) -> Transcript:
        """Sample rows together; `rows` [R] int64 are their prompts' numbers. `draws` None: greedy."""
        prompt_experts: list[Tensor] | None = [] if self.keeps_experts else None
        logits, lens, mask, length = self._start(requests, rows, prompt_experts)
        out, gains = self._transcript(rows, requests), head_gains(self.weights)
        if prompt_experts is not None:
            width = max(map(len, requests.prompts)) + requests.max_new_tokens
            out.keep_experts(torch.cat(prompt_experts), width)
        cos, sin = self._tables(length + requests.max_new_tokens)
        for t in range(requests.max_new_tokens):
            LIFE.alive()
            noise = None
            if draws is not None:  # for every row of a chunk, so that dropping rows changes no other row's draw
                noise = race_noise(draws, logits.shape[1])
                noise = noise if out.rows is None else noise[out.rows]
            log_probs = nucleus(scaled_log_probs(logits, requests.temperature), requests.top_p)
            token, logp = pick(log_probs, noise)
            out.record_log_probs(log_probs)
            out.record(token, logp)
            if t == requests.max_new_tokens - 1:
                break
            kept = self._retire(out, length + t) if self.device.type == "cpu" or t % GPU_CHECK_EVERY == 0 else None
            if kept is not None:
                if len(kept) == 0:
                    break
                token, lens, mask = token[kept], lens[kept], None if mask is None else mask[kept]
            at = slice(length + t, length + t + 1) if mask is None else lens + t
            tables, experts = fold(gains, cos[at], sin[at]), list[Tensor]() if self.keeps_experts else None
            hidden = decode(self.weights, self.kv, token, length + t, mask, tables, self.cache, experts)
            logits = self.weights.head(hidden)
            if experts is not None:
                out.record_experts(lens + t, experts)
        return out

    def _start(
        self, requests: Requests, rows: Tensor, experts: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None, int]:
        """Prefill of a chunk: (logits [R, V], prompt lengths [R] int64, mask [R, 1, S] of empty slots or None, the
        number of prompt slots). Each distinct prompt is computed once. `experts` gets those of the prompts of some
        rows at a time, [r, P, layers, k] int64, from each prompt's first token on."""
        ids, lens, index = requests.left_padded(rows, self.pad_id, self.device)
        length, slots = ids.shape[1], ids.shape[1] + requests.max_new_tokens - 1
        pad = None if int(lens.min()) == length else length - lens
        self.cache.reserve(len(rows), length, slots)
        logits = self.weights.head(torch.cat([*self._prefill(ids, pad, index, experts)]))
        if experts and index is not None:
            experts[:] = [torch.cat(experts)[index]]
        if index is not None:
            logits, lens, pad = logits[index], lens[index], None if pad is None else pad[index]
        if pad is None:
            return logits, lens, None, length
        is_empty = torch.arange(slots, device=self.device) < pad[:, None]
        mask = torch.zeros(is_empty.shape, device=self.device).masked_fill_(is_empty, float("-inf"))
        return logits, lens, mask[:, None], length

    def _prefill(
        self, ids: Tensor, pad: Tensor | None, index: Tensor | None, experts: list[Tensor] | None = None
    ) -> Iterator[Tensor]:
        """Hidden states [p, d] of the prompts [P, L], in blocks of `BLOCK_TOKENS`; K and V to the row cache.

        `index` [R] int64 is the prompt of every row, ascending; None: one row per prompt. `experts` gets those of each
        block, [p, L, layers, k].
        """
        (count, length), gains = ids.shape, head_gains(self.weights)
        cos, sin = self._tables(length)
        block = max(1, BLOCK_TOKENS[self.device.type] // length)
        for first in range(0, count, block):
            part = slice(first, min(first + block, count))
            rows, inside = part, None
            if index is not None:
                ends = torch.tensor([part.start, part.stop], device=self.device)
                rows = slice(*torch.searchsorted(index, ends).tolist())
                inside = index[rows] - first
            shift = None if pad is None else pad[part]
            at: Tensor | slice = slice(0, length)
            if shift is not None:
                at = (torch.arange(length, device=self.device) - shift[:, None]).clamp(min=0)
            store = partial(self.cache.fill, rows=rows, index=inside)
            used: list[Tensor] | None = None if experts is None else []
            yield prefill(self.weights, self.kv, ids[part], shift, fold(gains, cos[at], sin[at]), store, used)
            if experts is not None and used is not None:
                experts.append(aligned(used, length, shift))

    def _retire(self, out: Transcript, length: int) -> Tensor | None:
        """Drop ended rows where it pays: the computed rows that stay, or None where nothing was dropped."""
        computed, alive = len(out.is_alive), int(out.is_alive.sum())
        if alive and (self.retire_at is None or computed - alive < max(1.0, self.retire_at * computed)):
            return None
        kept = out.retire()
        if alive:
            self.cache.keep(kept, length)
        return kept

    def _tables(self, length: int) -> tuple[Tensor, Tensor]:
        if len(self.tables[0]) < length:
            self.tables = rope_tables(self.config, length, self.device)
        return self.tables

    def calibrate_kv(self, prompts: Sequence[Sequence[int]], protocol: KVProtocol = "trainer") -> None:
        """Set every layer's K and V scale from the largest magnitudes of one exact prefill. Without a quantized cache
        there is nothing to set."""
        self._check_ready()
        if self.kv.fmt is None:
            return
        self.kv.observe()
        try:
            self._read(prompts)
            self.kv.settle(protocol)
        finally:
            self.kv.amax = None  # an observing cache stores exactly

    def calibrate_residual(self, prompts: Sequence[Sequence[int]]) -> None:
        """Choose the channels of the second pass from one prefill without it; nothing to do where none is planned."""
        self._check_ready()
        if self.weights.residual is not None:
            with self.weights.residual.observed():
                self._read(prompts)

    def _read(self, prompts: Sequence[Sequence[int]]) -> None:
        """Prefill every prompt, those of one length together, because padding must not count."""
        requests = requests_of(prompts, 1, 1, 0.0, self.config)
        with torch.inference_mode():
            for length in sorted({len(prompt) for prompt in requests.prompts}):
                alike = torch.tensor([prompt for prompt in requests.prompts if len(prompt) == length])
                for ids in alike.to(self.device).split(self.max_batch or len(alike)):
                    self.cache.reserve(len(ids), length, length)
                    list(self._prefill(ids, None, None))

    def realized_plan(self) -> Passport:
        """Passport read back from live memory. RuntimeError where a format did not take effect or the weights were
        changed."""
        self._check_ready(wants_residual=True)
        model = self.trainer_model
        return Passport(
            engine="embedded",
            weights=self.weights.records() if model is None else parameter_records(model),
            acts=self.weights.acts() if model is None else input_formats(model),
            kv=None if self.kv.fmt is None else self.kv.fmt.name,
            sampler="cached" if model is None else "trainer",
            state={} if (residual := self.weights.residual) is None else {"residual_alpha": residual.alphas()},
        )

    def sync_metrics(self) -> dict[str, float]:
        """Numbers of the last load: "code_flip_rate" since the load before, "saturated_frac"."""
        return self.weights.metrics()

    def sleep(self) -> None:
        """Give the cache's memory back."""
        self._drop_cache()
        self.is_awake = False

    def wake(self) -> None:
        """The opposite of `sleep`; the cache is made again by the next `generate`, and after `discard` the next
        `load_weights` must come before it."""
        self.is_awake = True

    def discard(self) -> None:
        """Sleep, and give the memory of the weights back too."""
        self.sleep()
        self.weights = LiveWeights(self.config, self.plan, torch.device("meta"))

    def close(self) -> None:
        """Free everything."""
        self.discard()

    def _drop_cache(self) -> None:
        self.cache = KVCache(self.config.num_layers, self.config.num_kv_heads, self.config.head_dim, self.device)

    def _check_ready(self, *, wants_residual: bool = False) -> None:
        if not self.is_awake:
            raise RuntimeError("the engine is asleep: call wake() first")
        if not self.weights.is_loaded:
            raise RuntimeError("the engine has no weights: call load_weights first")
        if wants_residual and self.weights.residual is not None and not self.weights.residual.is_set:
            raise RuntimeError("the plan's residual channels are not chosen: call calibrate_residual first")


def aligned(layers: Sequence[Tensor], length: int, pad: Tensor | None) -> Tensor:
    """Experts of left-padded prompts, from each one's first token on: layers of [P, L, k], the last one [P, 1, k] of
    the last slot, -> [P, L, layers, k]. `pad` [P] int64: empty slots of each."""
    *others, last = layers
    ends = last.new_full((len(last), length, last.shape[-1]), OWN)
    ends[:, -1:] = last
    found = torch.stack((*others, ends), 2)
    if pad is None:
        return found
    slot = torch.arange(length, device=pad.device) + pad[:, None]
    is_there = (slot < length)[:, :, None, None]
    index = slot.clamp(max=length - 1)[:, :, None, None].expand_as(found)
    return found.gather(1, index).where(is_there, OWN)
