"""Start of the command line: seconds until help is shown, and until a wrong key is refused.

Every start is a process of its own. CPU seconds are those of the process and say what an idle machine would take where
others work beside it. The slowest import is that of `python -X importtime`, with what it imports in turn.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time
from statistics import median

from harness.foundation.own_process import code_path, module_command

COMMANDS = {
    "lowbit --help": ["--help"],
    "lowbit sweep --help": ["sweep", "--help"],
    "lowbit run trainer.stepz=3": ["run", "trainer.stepz=3"],
    "lowbit run method=flashrk": ["run", "method=flashrk"],
    "lowbit run trainer.steps=0": ["run", "trainer.steps=0"],
    "lowbit sweep smoke algo.lr=3": ["sweep", "smoke", "algo.lr=3"],
}
BARS_S = {"--help": 0.3, "=": 1.5}
"""Word in a command -> the most seconds it may take on an idle machine."""
REPEATS = 5
LINE = re.compile(r"import time:\s+\d+ \|\s+(\d+) \|( +)(\S+)")


def run() -> list[dict[str, object]]:
    """A row per command: median seconds, the bar, and the slowest import."""
    rows: list[dict[str, object]] = []
    for name, words in COMMANDS.items():
        command = module_command("harness.cli.main", *words)
        seconds, cpu_s = (median(column) for column in zip(*(_seconds(command) for _ in range(REPEATS)), strict=True))
        bar = next(limit for word, limit in BARS_S.items() if word in name)
        slowest, own_s = _slowest([sys.executable, "-X", "importtime", *command[1:]])
        rows.append({"command": name, "seconds": seconds, "CPU seconds": cpu_s, "at most": bar,
                     "slowest import": slowest, "its seconds": own_s})  # fmt: skip
    return rows


def _seconds(command: list[str]) -> tuple[float, float]:
    """Seconds of one start: on the clock, and of the CPU."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, capture_output=True, check=False, env=os.environ | code_path())
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _slowest(command: list[str]) -> tuple[str, float]:
    """The package whose import takes longest, the modules that it imports included."""
    said = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | code_path()).stderr
    found = [(int(us), module) for us, _, module in LINE.findall(said) if not module.startswith("harness")]
    us, module = max(found)
    return module, us / 1e6
