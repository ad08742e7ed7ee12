"""Processes of a campaign: sweeps and cells, started as users start them or forked from one that has loaded everything.

Loading takes a cell some 4 s and its steps a second, so most rounds fork: same code, same signals, same files. Sweeps
come from a fork server (`multiprocessing`), cells from their sweep. Every process works in the control folder of its
round, by which the audit finds it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

POLL_S = 0.02


class Sweeping(Protocol):
    """A started sweep."""

    def ended(self, seconds: float) -> int | None:
        """Its exit code (minus the signal) once it ended; None if it did not within so many seconds."""
        ...

    def kill(self) -> None:
        """End it."""
        ...


class Spawned:
    """Owns a sweep that was started with an interpreter of its own."""

    def __init__(self, path: Path, environment: Mapping[str, str]) -> None:
        code = str(Path(__file__).resolve().parents[3])
        paths = os.pathsep.join([code, *filter(None, [os.environ.get("PYTHONPATH")])])
        with path.with_suffix(".log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "harness.devtools.faults.driver", str(path)], cwd=path.parent,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environment, "PYTHONPATH": paths}, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

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
        _settle(log.fileno(), Path(path).parent)
    from harness.devtools.faults import driver

    sys.exit(driver.main(path))


class Forked:
    """Owns a cell's process that was forked; waits and signals like `subprocess.Popen`."""

    def __init__(self, run: Callable[[], int], log: int, folder: Path) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            _settle(log, folder)
            os.closerange(3, 4096)  # the sweep's lock above all: as with an interpreter of its own
            code = run()
        finally:  # the child must not return into the sweep, whatever happened
            if sys.exc_info()[0] is not None:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("a forked cell", timeout or 0.0)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to a process that lives."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to stop."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


def _settle(log: int, folder: Path) -> None:
    """A session, a folder and standard streams of one's own."""
    os.setsid()
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)


def fork_cell(cell: Path, log: int, threads: int, gpu: str | None) -> Forked:
    """Start a cell in a fork of this process, in place of the launcher's own way."""
    from harness.devtools.faults.cell import main

    return Forked(lambda: main(str(cell)), log, Path.cwd())
