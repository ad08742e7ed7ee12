"""The GPU that a test process takes; these tests need none."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import own_gpu


@pytest.mark.parametrize(
    ("worker", "visible", "count", "expected"),
    [
        (None, None, 4, None),
        ("gw1", None, 1, None),
        ("gw0", None, 2, "0"),
        ("gw3", None, 2, "1"),
        ("gw1", "5,7", 2, "7"),
        ("gw2", "GPU-a,GPU-b", 2, "GPU-a"),
    ],
)
def test_workers_are_dealt_the_visible_gpus(worker, visible, count, expected):
    assert own_gpu(worker, visible, count) == expected
