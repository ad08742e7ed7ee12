"""Time stamps of records, as ISO 8601 writes them."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> str:
    """The stamp of this moment, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def moment(stamp: str) -> datetime:
    """The moment of a stamp; one without a zone is UTC. Raises ValueError for what is no ISO 8601 time."""
    try:
        found = datetime.fromisoformat(stamp)
    except ValueError:
        raise ValueError(f"time stamp {stamp!r}: ISO 8601 is expected, such as 2026-01-31T12:00:00+00:00") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
