"""Cells with faults as forks of their sweep's process, which has loaded everything already.

Loading takes a cell some 4 s and its steps a second: same code, same signals, same files. Like every process of a
campaign a fork works in the control folder of its round, by which the audit finds it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.devtools.faults.cell import main

POLL_S = 0.02


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
            settle(log, folder)
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


def settle(log: int, folder: Path) -> None:
    """A session, a folder and standard streams of one's own."""
    os.setsid()
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)


def fork_cell(cell: Path, log: int, threads: int, gpus: Sequence[str]) -> Forked:
    """Start a cell with faults in a fork of this process: a `harness.sweep.launchers.local.Spawn`."""
    return Forked(lambda: main(str(cell)), log, Path.cwd())
