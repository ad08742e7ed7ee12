"""Starting a module of this project in a Python process of its own, wherever the command runs.

The working directory is not searched for modules (`python -P`): a user's folder `methods` or file `queue.py` there
would replace ours or the standard library's. This code's own folder leads PYTHONPATH instead.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.foundation.provenance import ROOT


def module_command(module: str, *words: str) -> list[str]:
    """The command that runs `module` with these arguments."""
    return [sys.executable, "-P", "-m", module, *words]


def code_path() -> dict[str, str]:
    """PYTHONPATH for such a process: the folder of `harness` and `methods`, then what it already holds."""
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys([str(ROOT), *absolute(os.environ.get("PYTHONPATH", ""))]))}


def absolute(path: str) -> list[str]:
    """The folders of a PYTHONPATH as absolute paths, since a process may have another working directory."""
    return [str(Path(folder).absolute()) for folder in path.split(os.pathsep) if folder]


def exit_code(command: Sequence[str], limit_s: float, **options: Any) -> int | None:
    """Exit code of a command; None where `limit_s` seconds did not suffice. Neither it nor what it started outlives the
    call. `options`: those of `subprocess.Popen`."""
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError, PermissionError):  # nothing of it lives; macOS' word for that
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
