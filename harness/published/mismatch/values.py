"""`values.yaml`: published values of mismatch, checked when they are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from harness.config.load import read_yaml

VALUES = Path(__file__).with_name("values.yaml")
Unit = Literal["token", "sequence", "ratio"]
Read = Literal["text", "code", "docs", "notes"]


@dataclass(frozen=True, kw_only=True)
class Published:
    """One value, or a range."""

    model: str
    formats: tuple[str, ...]
    """Our formats that it is held beside."""
    unit: Unit
    """token: KL a token, nats; sequence: KL of an answer, nats; ratio: over BF16's own."""
    low: float
    high: float
    source: str
    place: str
    read: Read
    parameters: float | None = None

    def __post_init__(self) -> None:
        if self.unit not in get_args(Unit) or self.read not in get_args(Read):
            raise ValueError(f"{self.source}: unit {self.unit!r} or read {self.read!r} is unknown")
        if not 0 <= self.low <= self.high or not self.formats or not self.source or not self.place:
            raise ValueError(
                f"{self.source}: {self.low} to {self.high} of {self.formats} at {self.place!r} is no value"
            )


def read_values(path: Path = VALUES) -> list[Published]:
    """The values of the file, in its order. Raises ValueError naming a row that is none."""
    rows: Any = read_yaml(path).get("values", ())
    found: list[Published] = []
    for number, row in enumerate(rows):
        try:
            numbers = {name: float(row[name]) for name in ("low", "high", "parameters") if name in row}
            found.append(Published(**{**row, **numbers, "formats": tuple(row["formats"])}))
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"{path}: row {number}: {error}") from None
    return found
