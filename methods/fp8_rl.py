"""FP8-RL: block FP8 linears and an FP8 KV cache whose scales follow the weights (arXiv 2601.18150; code verl, NeMo-RL).

Claim: FP8 rollouts, cache included, train like BF16 where the K and V scales are renewed after every weight change and
token TIS corrects the rest; FP8 on the training side too ("end to end") lowers the mismatch further.
Two protocols renew the scales. "trainer" (NeMo-RL): largest magnitudes on the training batch just used, a percentile
over its micro-batches, a margin, sent with the weights. "inference" (verl, vLLM <= 0.27.1): the engine's own first
forward after each sync, over a constant; its scales depend on the prompts that come first (here: fixed held-out ones).
Before the first batch the trainer's protocol looks at calibration prompts.
Left out: FP8 attention with its q and probability scales, and the refresh of an engine's host copies (its own work).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from harness.api import (
    Fixed,
    KVProtocol,
    Memory,
    Method,
    Part,
    Plan,
    RolloutEngine,
    Sequences,
    Site,
    Step,
    TokenBatch,
    WeightStream,
)
from harness.numerics.formats import Format
from harness.numerics.kv_scales import ENDINGS, MARGIN, PERCENTILE, kv_amaxes, trainer_scales
from methods.flashrl import TIS
from methods.jet_rl import FP8Flow
from methods.mis import MIS


def spread_rows(count: int, wanted: int) -> list[int]:
    """At most `wanted` of `count` rows, evenly spread, ascending: samples of one prompt are neighbours."""
    wanted = min(count, wanted)
    return [i * count // wanted for i in range(wanted)]


@dataclass(frozen=True, kw_only=True)
class RecalibratedKV(Part):
    """New K and V scales at every weight change. Nothing where the plan's cache is not quantized."""

    idle_by: ClassVar[Mapping[str, str]] = {"refit": "protocol=inference"}
    protocol: KVProtocol = "trainer"
    """trainer: NeMo-RL's, percentile * margin / 448; inference: vLLM's, amax of K / 200 and of V / 100."""
    rows: int = 32
    """Rows of the training batch that the trainer's protocol looks at, evenly spread; NeMo-RL takes all."""
    micro_rows: int = 32
    """Rows of one micro-batch; the percentile is taken over the maxima of micro-batches. Fewer rows cost more time."""
    percentile: float = PERCENTILE
    """Percentile of the sorted maxima; at 0.999 the largest one for up to 500 micro-batches. Nothing where one holds
    all rows."""
    margin: float = MARGIN
    """Head room over that magnitude."""

    def __post_init__(self) -> None:
        if self.rows < 1 or self.micro_rows < 1:
            raise ValueError(f"RecalibratedKV.rows, micro_rows: {self.rows}, {self.micro_rows} (choose at least 1)")
        if not 0.0 <= self.percentile <= 1.0:
            raise ValueError(f"RecalibratedKV.percentile: {self.percentile} is no share (choose 0 to 1)")
        if self.margin <= 0.0:
            raise ValueError(f"RecalibratedKV.margin: {self.margin} (choose a positive factor)")

    def idle(self, plan: Plan) -> frozenset[str]:
        if plan.rollout_kv is None:
            return frozenset({"prepare", "refit", "sync", "after_sync"})
        return frozenset({"prepare", "refit", "sync"} if self.protocol == "inference" else {"after_sync"})

    def prepare(self, site: Site, plan: Plan) -> tuple[nn.Module | None, dict[str, Tensor]]:
        if plan.rollout_kv is None or self.protocol == "inference":
            return None, {}
        prompts = [site.calibration[i] for i in spread_rows(len(site.calibration), self.rows)]
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        width = max(map(len, prompts), default=0)
        ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], dtype=torch.int64)
        return None, self._scales(site.wrap(site.build(site.checkpoint)), ids, lengths, plan.rollout_kv)

    def refit(
        self, model: nn.Module, seqs: Sequences, batch: TokenBatch, step: Step, plan: Plan, fixed: Fixed, memory: Memory
    ) -> Fixed | None:
        if plan.rollout_kv is None or self.protocol == "inference":
            return None
        chosen = seqs.take(torch.tensor(spread_rows(len(seqs.ids), self.rows), device=seqs.ids.device))
        found = self._scales(model, chosen.ids, chosen.prompt_lens + chosen.sampled.sum(-1), plan.rollout_kv)
        for ending in ENDINGS:
            scales = torch.stack([scale for name, scale in found.items() if name.endswith(ending)])
            kind = ending.rpartition(".")[2]
            memory[f"{kind}_min"], memory[f"{kind}_max"] = float(scales.amin()), float(scales.amax())
        return found

    def sync(self, weights: WeightStream, step: Step, plan: Plan, fixed: Fixed, memory: Memory) -> WeightStream:
        yield from weights
        if plan.rollout_kv is not None and self.protocol == "trainer":
            yield from ((name, scale) for name, scale in fixed.items() if name.endswith(ENDINGS))

    def after_sync(self, engine: RolloutEngine, prompts: Sequence[Sequence[int]]) -> None:
        if self.protocol == "inference":
            engine.calibrate_kv(prompts, "inference")

    def _scales(self, model: nn.Module, ids: Tensor, lengths: Tensor, fmt: Format) -> dict[str, Tensor]:
        amaxes = kv_amaxes(model, ids, lengths, rows=self.micro_rows)
        lists = {name: torch.stack(values) for name, values in amaxes.items()}
        return trainer_scales(lists, fmt, margin=self.margin, percentile=self.percentile)


PAPER = "arXiv 2601.18150"
PRECISIONS = ("fp8_block+kv8", "fp8_block", "fp8_channel+kv8", "fp8_channel", "fp8_tensor+kv8", "fp8_tensor",
              "bf16+kv8")  # fmt: skip
METHOD = Method(
    name="fp8_rl",
    paper=PAPER,
    parts=(RecalibratedKV(), TIS()),
    precisions=PRECISIONS,
    summary="FP8 blocks and an FP8 cache with scales renewed at every sync, with token TIS",
    claim="FP8 rollouts with an FP8 cache keep the BF16 curve and are up to 44 % faster",
)
MASKED = replace(
    METHOD,
    name="fp8_rl_mis",
    parts=(RecalibratedKV(), MIS(level="token", lo=0.5, hi=2.0, weight="token")),
    summary="fp8_rl with token MIS, ratios outside 1/2 to 2 are dropped",
    reconstructed="the bounds of the masked variant",
)
END_TO_END = replace(
    METHOD,
    name="fp8_rl_e2e",
    parts=(FP8Flow(), RecalibratedKV(), TIS()),
    precisions=("fp8_block+kv8", "fp8_block"),
    summary="fp8_rl with the trainer in the same FP8 blocks",
    claim="less mismatch than FP8 rollouts alone, more than BF16; training 20 % faster",
    reconstructed="the trainer's products are Jet-RL's; the paper's come from Transformer Engine",
)
