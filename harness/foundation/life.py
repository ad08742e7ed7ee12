"""Signs of life of a cell between its steps, in a file whose time of change its launcher looks at.

Samplers, passes of the trainer and preparations call `alive` as they go on, however long one takes. Where no file is
set, as in every other command, it does nothing.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

NAME = "alive"
"""Name of the file in a cell's work folder."""
EVERY_S = 1.0
"""Seconds between two signs, at least."""


class Life:
    """The file of this process, and when it was last touched."""

    file: Path | None = None
    last_s = 0.0
    """Seconds on the monotonic clock."""

    def alive(self) -> None:
        """Give a sign, unless the last one is younger than EVERY_S."""
        if self.file is None or (now := time.monotonic()) - self.last_s < EVERY_S:
            return
        self.last_s = now
        with suppress(OSError):  # a full disk costs the sign
            self.file.touch()


LIFE = Life()
"""Signs of this process."""
