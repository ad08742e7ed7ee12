"""Cells that wait for the host: there a step tells how fast the host was that day, and formats differ by noise.

The breakdown says what share of a step the device idles at three batches and the shortest context; between them the
share is linear in the logarithm of the batch. A longer context works the device more, so such a cell waits for the host
only as long as its step is still that of the shortest context.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from harness.studies.throughput.cost import curve
from harness.studies.throughput.map_cells import MapCell, measured

SHARE = 0.1
"""Share of a step that the device idles, from which on the step is the host's."""
FLAT = 1.1
"""Step over that at the shortest context, above which the device has become the slower one."""


def idle_share(record: Mapping[str, Any], batch: int) -> float:
    """Share of a step at the shortest context in which the device waits; 0 where no breakdown was measured."""
    found = {int(b): part["host_ms"] / part["step_ms"]
             for b, part in record.get("breakdown", {}).items() if part.get("step_ms")}  # fmt: skip
    if not found:
        return 0.0
    batches = sorted(found)
    return float(np.interp(math.log(batch), [math.log(b) for b in batches], [found[b] for b in batches]))


def host_bound_cells(record: Mapping[str, Any]) -> set[MapCell]:
    """(batch, length) of the measured cells whose step is the host's."""
    return {
        (batch, length)
        for (batch, length), cell in measured(record).items()
        if idle_share(record, batch) > SHARE and cell["step_ms"] <= FLAT * curve(record, batch)[0][1]
    }


def device_ms(record: Mapping[str, Any], batch: int) -> float | None:
    """Device time of a step at the shortest context, ms; None where it was not measured."""
    part = record.get("breakdown", {}).get(str(batch), {})
    return part["forward_ms"] + part["sampling_ms"] if "step_ms" in part else None
