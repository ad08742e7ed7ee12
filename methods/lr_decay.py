"""Learning-rate decay against mismatch: steps that halve once responses have surged.

Paper: arXiv 2602.01826, known through notes and a reproduction by others.
Claim: the mismatch grows with training and with the noise of gradients. A surge of the response length comes before the
collapse, and a decay by steps that it triggers keeps training stable.
Rule of the reproduction: the baseline is the mean length of the first 50 steps, the surge t* the first step whose mean
length is above 3 times that, counted from 1. The learning rate halves after every 1.8 t* steps from t* on, down to a
tenth. Without a surge it stays what it is; `period` fixes the steps between halvings instead, from the start on, as
MIPU's baseline does (arXiv 2606.29526).
Responses that have left the mask do not count. Left out: the paper's own test for a surge, which no source gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness.api import Memory, Method, Part, TokenBatch
from methods.naive import LOW_BIT


def halvings(step: int, surge: int, period: int, start: Literal["surge", "start"]) -> int:
    """Whole periods that have passed before step `step`, counted from 0; `surge` counts from 1, and so does its place.

    From "surge" the first halving comes `period` steps after step number `surge`, from "start" after `period` steps.
    """
    return max(0, step - (surge if start == "surge" else 0)) // period


@dataclass(frozen=True, kw_only=True)
class LengthDecay(Part):
    """The learning rate of every update, by the steps since the response length surged."""

    baseline_steps: int = 50
    """Steps whose mean length is the baseline."""
    surge: float = 3.0
    """Mean length of a surge over the baseline."""
    period_factor: float = 1.8
    """Steps between two halvings over the number of the step that surged."""
    period: int | None = None
    """Steps between two halvings, whatever the lengths are; None: by the surge."""
    counts_from: Literal["surge", "start"] = "surge"
    """First step of the first period, where a surge gives the period."""
    floor: float = 0.1
    """Smallest factor."""

    def __post_init__(self) -> None:
        if self.baseline_steps < 1:
            raise ValueError(f"LengthDecay.baseline_steps: {self.baseline_steps} (choose 1 or more)")
        if self.period is not None and self.period < 1:
            raise ValueError(f"LengthDecay.period: {self.period} (choose 1 or more steps, or null)")
        if min(self.surge, self.period_factor) <= 0:
            raise ValueError(f"LengthDecay.surge, period_factor: {self.surge}, {self.period_factor} must be above 0")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"LengthDecay.floor: {self.floor} (choose 0 to 1)")

    @property
    def needs_steps(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Steps of the shortest run that ends at a smaller rate: its responses surge right behind the baseline."""
        if self.period is not None:
            return self.period + 1
        surge = self.baseline_steps + 1
        period = self._period(surge)
        return 1 + (surge + period if self.counts_from == "surge" else max(surge, period))

    def _period(self, surge: int) -> int:
        """Steps between two halvings after a surge at step number `surge`."""
        return max(1, round(self.period_factor * surge))

    def update_lr_factor(self, b: TokenBatch, memory: Memory) -> float:
        step = b.step.index
        if self.period is not None:
            return max(self.floor, 0.5 ** halvings(step, 0, self.period, "start"))
        if memory.get("step", step) != step:
            self._close_step(memory)
        lengths = b.mask.sum(-1)
        memory["step"] = float(step)
        memory["tokens"] = memory.get("tokens", 0.0) + float(lengths.sum())
        memory["responses"] = memory.get("responses", 0.0) + float((lengths > 0).sum())
        if "surge_step" not in memory:
            return 1.0
        surge = int(memory["surge_step"])
        return max(self.floor, 0.5 ** halvings(step, surge, self._period(surge), self.counts_from))

    def _close_step(self, memory: Memory) -> None:
        """Judge the step that is over, and begin the next one."""
        number, mean = int(memory["step"]) + 1, memory["tokens"] / max(memory["responses"], 1.0)
        memory["tokens"] = memory["responses"] = 0.0
        if number <= self.baseline_steps:
            memory["length_sum"] = memory.get("length_sum", 0.0) + mean
        elif "surge_step" not in memory and mean > self.surge * memory["length_sum"] / self.baseline_steps:
            memory["surge_step"] = float(number)


METHOD = Method(
    name="lr_decay",
    paper="arXiv 2602.01826",
    parts=(LengthDecay(),),
    precisions=(*LOW_BIT, "bf16"),
    summary="the learning rate halves by steps once the response length has surged",
    claim="a decay by steps after a surge of the response length keeps training stable",
    reconstructed="the test for a surge, its constants and the first period are those of a reproduction by others",
)
