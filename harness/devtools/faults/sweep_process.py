"""A sweep's process under faults: started as users start it, or forked from a server that has loaded everything."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from harness.devtools.faults import driver
from harness.devtools.faults.forked_cell import settle
from harness.foundation.own_process import code_path, module_command


class Sweeping(Protocol):
    """A started sweep."""

    def ended(self, seconds: float) -> int | None:
        """Exit code of the sweep (minus the signal) once it ended; None if it did not within so many seconds."""
        ...

    def kill(self) -> None:
        """Kill the sweep's process."""
        ...


class Spawned:
    """Owns a sweep that was started with an interpreter of its own."""

    def __init__(self, path: Path, environment: Mapping[str, str]) -> None:
        with path.with_suffix(".log").open("wb") as log:
            self.process = subprocess.Popen(
                module_command("harness.devtools.faults.driver", str(path)),
                cwd=path.parent,
                env=os.environ | environment | code_path(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ended(self, seconds: float) -> int | None:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Served:
    """Owns a sweep that the fork server started."""

    def __init__(self, path: Path, environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["harness.devtools.faults.driver"])
        self.process = context.Process(target=_serve, args=(str(path), dict(environment)))
        self.process.start()

    def ended(self, seconds: float) -> int | None:
        self.process.join(seconds)
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _serve(path: str, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    with Path(path).with_suffix(".log").open("wb") as log:
        settle(log.fileno(), Path(path).parent)
    sys.exit(driver.main(path))
