"""Time stamps: one moment in any zone, UTC without one, and one line for what is none."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest

from harness.foundation.time_stamp import moment

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    "stamp",
    ["2026-01-31T12:00:00+00:00", "2026-01-31T12:00:00Z", "2026-01-31T14:00:00+02:00", "2026-01-31T12:00:00"],
)
@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo"])
def test_a_stamp_is_one_moment_whatever_the_machines_zone(
    stamp: str, zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert moment(stamp) == NOON and moment(stamp).timestamp() == 1769860800
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("stamp", ["", "yesterday", "2026-13-01T00:00:00+00:00", "1769860800.5"])
def test_what_is_no_time_is_one_line(stamp: str) -> None:
    with pytest.raises(ValueError) as caught:
        moment(stamp)
    assert str(caught.value) == f"time stamp {stamp!r}: ISO 8601 is expected, such as 2026-01-31T12:00:00+00:00"
