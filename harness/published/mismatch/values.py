"""`values.yaml`: published values of mismatch, checked when they are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from harness.config.load import parse, read_yaml

VALUES = Path(__file__).with_name("values.yaml")
Words = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, kw_only=True)
class Published:
    """One value, or a range."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    model: Words
    formats: Annotated[tuple[str, ...], Field(min_length=1)]
    """Our formats that it is held beside."""
    unit: Literal["token", "sequence", "ratio"]
    """token: KL a token, nats; sequence: KL of an answer, nats; ratio: over BF16's own."""
    low: Annotated[float, Field(ge=0)]
    high: float
    source: Words
    place: Words
    read: Literal["text", "code", "docs", "notes"]
    parameters: float | None = None

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low={self.low}: more than high={self.high}")


@dataclass(frozen=True, kw_only=True)
class _File:
    __pydantic_config__ = ConfigDict(extra="forbid")
    values: list[Published]


def read_values(path: Path = VALUES) -> list[Published]:
    """The values of the file, in its order. Raises ValueError naming a row that is none."""
    found = read_yaml(path)
    try:
        return parse(_File, found).values
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
