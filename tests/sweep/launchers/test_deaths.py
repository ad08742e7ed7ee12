"""Ends of a cell's process in the words of its record."""

from __future__ import annotations

import pytest

from harness.run.cell import CANCELLED, UNWRITTEN
from harness.sweep.launchers.deaths import OUT_OF_MEMORY, REQUESTED, ending


@pytest.mark.parametrize(
    ("code", "is_oom", "found"),
    [
        (CANCELLED, False, ("cancelled", REQUESTED)),
        (0, False, ("failed", "the process ended well and left no record")),
        (UNWRITTEN, False, ("failed", "the record could not be written: last")),
        (1, False, ("failed", "the process ended with exit code 1: last")),
        (-9, True, ("failed", OUT_OF_MEMORY)),
        (-9, False, ("failed", "lost: killed by SIGKILL")),
        (-11, True, ("failed", "crashed: killed by SIGSEGV")),
        (-37, False, ("failed", "lost: killed by signal 37")),
    ],
)
def test_every_end_has_its_words(code: int, is_oom: bool, found: tuple[str, str]) -> None:
    assert ending(code, "first\nlast\n", is_oom=is_oom) == found
