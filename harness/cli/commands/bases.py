"""`lowbit base`: train the base models that sweeps start from, several at once, and go on where it stopped.

Every base is a process of its own that prints what it reaches; bases for a GPU share those that are visible, the
longest answers first. Left out: how a base is trained (`harness.start.base_training`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from harness.config.load import parse, to_json
from harness.config.schema import Launch, RunConfig
from harness.run.checks import check_device
from harness.start.base_model import read_record
from harness.start.base_training import Unfinished
from harness.start.prepare import base_folder, start_of
from harness.sweep import plan, read_sweep, sweep_names
from harness.sweep.launchers.local import ENVIRONMENT, visible_gpus

UNFINISHED = 3
"""Exit code of a process that stopped in between."""
SHOW_S = 10.0
"""Seconds between two lines about one base."""


def base(names: Sequence[str], overrides: Sequence[str], *, results: Path, workers: int, minutes: float | None) -> int:
    """Train every base that the named sweeps (default: all) start from. Exit code 1 if one failed, 130 if interrupted;
    0 too where `minutes` left some unfinished, which the same command goes on with."""
    waiting = wanted(list(names) or sweep_names(), overrides, results)
    elsewhere = [cell for cell in waiting if cell.trainer.device == "cuda" and not torch.cuda.is_available()]
    if elsewhere and not names:
        print(f"{len(elsewhere)} bases are for a GPU, which this machine does not have: left out")
        waiting = [cell for cell in waiting if cell not in elsewhere]
    print(f"{len(waiting)} bases to train", flush=True)
    for cell in waiting:
        check_device(cell)
    end = None if minutes is None else time.monotonic() + 60 * minutes
    gpus = visible_gpus() if any(cell.trainer.device == "cuda" for cell in waiting) else []
    running, code, left, count = list[subprocess.Popen[bytes]](), 0, 0, 0
    try:
        while waiting or running:
            while waiting and len(running) < workers and (end is None or time.monotonic() < end):
                running.append(_spawn(waiting.pop(0), results, end, gpus[count % len(gpus)] if gpus else None))
                count += 1
            if not running:
                break
            time.sleep(0.1)
            for process in [p for p in running if p.poll() is not None]:
                running.remove(process)
                left += process.returncode == UNFINISHED
                code = code or (0 if process.returncode in (0, UNFINISHED) else 1)
    except KeyboardInterrupt:  # the children have heard of it too
        for process in running:
            process.wait()
        print("\ninterrupted; the same command goes on from here")
        return 130
    if left + len(waiting):
        print(f"time limit: {left + len(waiting)} bases are left; the same command goes on from here")
    return code


def wanted(names: Sequence[str], overrides: Sequence[str], results: Path) -> list[RunConfig]:
    """One cell for every base that is not there yet, the longest answers first."""
    launch, found = Launch(results=str(results)), dict[Path, RunConfig]()
    for name in names:
        for cell in plan(read_sweep(name), overrides).cells:
            folder = base_folder(cell, launch)
            if folder is not None and not folder.is_dir():
                found.setdefault(folder, cell)
    return sorted(found.values(), key=lambda cell: -(cell.task.n or 0) * (cell.model.hidden_size or 0))


def _spawn(cell: RunConfig, results: Path, end: float | None, gpu: str | None) -> subprocess.Popen[bytes]:
    words = {"config": to_json(cell), "launch": to_json(Launch(results=str(results))), "end": end}
    environment = os.environ | ENVIRONMENT | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
    return subprocess.Popen([sys.executable, "-m", "harness.cli.commands.bases", json.dumps(words)], env=environment)


def train(words: str) -> int:
    """Train one base, in a process of its own, and print what becomes of it."""
    torch.set_num_threads(1)
    values, stops = json.loads(words), list[int]()
    config, launch = parse(RunConfig, values["config"]), parse(Launch, values["launch"])
    folder, started = base_folder(config, launch), time.monotonic()
    assert folder is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stops.append(number))
    shown = [started]

    def progress(step: int, most: int, accuracy: float) -> None:
        if time.monotonic() - shown[0] >= SHOW_S:
            shown[0] = time.monotonic()
            print(f"{folder.name}: step {step} of at most {most}, accuracy {accuracy:.3f}", flush=True)

    def should_stop() -> bool:
        return bool(stops) or (values["end"] is not None and time.monotonic() >= values["end"])

    try:
        record = read_record(start_of(config, launch, progress, should_stop).folder)
    except Unfinished as stop:
        print(f"{folder.name}: {stop}", flush=True)
        return UNFINISHED
    except ValueError as error:
        print(f"failed: {folder.name}: {error}", file=sys.stderr, flush=True)
        return 1
    print(
        f"{folder.name}: {record['steps']} steps, accuracy {record['accuracy']:.3f}, "
        f"greedy {record['greedy_accuracy']:.3f}, {time.monotonic() - started:.0f} s",
        flush=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(train(sys.argv[1]))
