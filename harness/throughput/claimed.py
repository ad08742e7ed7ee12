"""What papers and documentation report of rollout speed, beside the cell of the map that comes nearest.

Facts as `claims.yaml` and its sources give them. A claim whose setting leaves batch or length open is met by all
batches of the map; nothing is claimed here about training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.throughput.cost import baseline_of, decode_tokens_per_s, generation_tokens_per_s, ratio
from harness.throughput.plan import Sweep

SLACK = 0.03
"""A measured factor agrees within this of the claimed range."""


@dataclass(frozen=True, kw_only=True)
class Claimed:
    """One reported factor of rollout throughput over BF16."""

    source: str
    where: str
    """Model, hardware and load of the source."""
    size: str
    """Of the map."""
    precision: str
    low: float
    high: float
    batch: int | None = None
    """None: the source leaves it open."""
    length: int = 4096
    """New tokens of a generation; with `batch` 1 the decode rate is compared instead."""
    remark: str = ""


_QURL, _QERL, _FP8RL = "QuRL, arXiv 2602.13953", "QeRL, arXiv 2510.11696", "FP8-RL, arXiv 2601.18150"
_DENSE = "Qwen3-8B, 8 x H100, 32 prompts x 16, 20K tokens"
CLAIMED = (
    Claimed(source=_QURL, where="7B, INT8", size="7b", precision="int8", low=1.2, high=1.3),
    Claimed(source=_QURL, where="14B, INT8", size="14b", precision="int8", low=1.3, high=1.56),
    Claimed(source=_QURL, where="32B, INT8, H100", size="32b", precision="int8", low=1.83, high=1.9,
            remark="1.7 on A100"),
    Claimed(source="FlashRL, OpenReview 8MHqvb4lK9", where="0.5B, INT8", size="0.5b", precision="int8", low=0.0,
            high=1.0, length=2048, remark="INT8 is said to pay from 14B on"),
    Claimed(source="FlashRL, OpenReview 8MHqvb4lK9", where="14B, INT8, long outputs", size="14b", precision="int8",
            low=1.0, high=2.0, length=8192, remark="only the sign is claimed"),
    Claimed(source=_QERL, where="14B, NVFP4 with LoRA, batch 1, H100", size="14b", precision="nvfp4",
            low=95.3 / 65.4, high=95.3 / 65.4, batch=1, length=512, remark="65.4 to 95.3 tokens/s; no LoRA here"),
    Claimed(source=_QERL, where="32B, NVFP4 with LoRA, batch 1, H100", size="32b", precision="nvfp4",
            low=58 / 34.0, high=60 / 34.0, batch=1, length=512, remark="34.0 to 58-60 tokens/s; no LoRA here"),
    Claimed(source=_FP8RL, where=f"{_DENSE}: linears", size="7b", precision="fp8_block", low=1.1, high=1.2,
            batch=64, length=16384, remark="7B for 8B"),
    Claimed(source=_FP8RL, where="long context: cache alone", size="7b", precision="bf16+kv8", low=1.38, high=1.38,
            batch=64, length=16384, remark="7B for 8B"),
    Claimed(source=_FP8RL, where="long context: linears and cache", size="7b", precision="fp8_block+kv8", low=1.44,
            high=1.44, batch=64, length=16384, remark="7B for 8B; more sequences also fit, not counted here"),
    Claimed(source="verl, FP8 documentation", where=f"{_DENSE}; CUDA 12.6, 12.9", size="7b", precision="fp8_block",
            low=1.12, high=1.18, batch=64, length=16384, remark="7B for 8B"),
    Claimed(source="Jet-RL, arXiv 2601.14243", where="32B, FP8 blocks", size="32b", precision="fp8_block", low=1.0,
            high=1.33, remark="up to 1.33"),
    Claimed(source="FP16, arXiv 2510.26788", where="1.5B, FP16", size="1.5b", precision="fp16", low=1.0, high=1.0,
            remark="no loss of speed"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A claim and the factors of the map that answer it."""

    claimed: Claimed
    factors: tuple[tuple[int, float], ...]
    """(batch, factor), by rising batch; empty where the map has no such cell."""

    @property
    def verdict(self) -> str:
        """In words, against the claimed range with `SLACK`."""
        if not self.factors:
            return "no such cell"
        low, high = self.claimed.low - SLACK, self.claimed.high + SLACK
        values = [factor for _, factor in self.factors]
        if any(low <= value <= high for value in values):
            return "seen" if len(values) == 1 else "seen at some batches"
        if max(values) < low:
            return "less here"
        return "more here" if min(values) > high else "around it"


def compare(
    sweep: Sweep, records: Mapping[str, Mapping[str, Any]], claims: Sequence[Claimed] = CLAIMED
) -> list[Compared]:
    """Every claim about a size that the sweep has, in order."""
    return [
        Compared(claimed=claim, factors=tuple(_factors(sweep, records, claim)))
        for claim in claims
        if claim.size in sweep.sizes
    ]


def _factors(sweep: Sweep, records: Mapping[str, Mapping[str, Any]], claim: Claimed) -> list[tuple[int, float]]:
    record, base = records.get(f"{claim.size}-{claim.precision}", {}), baseline_of(records, claim.size)
    found: list[tuple[int, float]] = []
    for batch in sweep.batches if claim.batch is None else (claim.batch,):
        if claim.batch == 1:
            value = ratio(*(decode_tokens_per_s(each, batch, claim.length) for each in (record, base)))
        else:
            value = ratio(
                *(generation_tokens_per_s(each, batch, sweep.prompt, claim.length) for each in (record, base))
            )
        if value is not None:
            found.append((batch, value))
    return found
