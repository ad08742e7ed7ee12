"""`lowbit base`: train the base models that sweeps start from, several at once, and go on where it stopped.

Every base is a process of its own (`harness.start.base_process`) that prints what it reaches; bases for a GPU share
those that are visible, the longest answers first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.options import OVERRIDES, add_results, add_workers, minutes

if TYPE_CHECKING:
    from harness.config.schema import Launch, RunConfig


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("sweeps", nargs="*", default=[], metavar="sweep | key=value",
                        help=f"sweeps whose bases to train (default: all); {OVERRIDES}; without a sweep they "
                             "name one run, whose base is trained")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="list the bases that are missing; train nothing")
    add_workers(parser, "bases")
    parser.add_argument("--minutes", type=minutes, metavar="M",
                        help="stop after so long and save what was reached; the same command goes on")  # fmt: skip
    add_results(parser, check=_check)


def _check(a: argparse.Namespace) -> None:
    from harness.run.checks import check_device

    if a.sweeps:  # of all that are shipped, those for a GPU are left out where there is none
        for cell in wanted(*_asked(a)).values():
            check_device(cell)


def _asked(a: argparse.Namespace) -> tuple[list[str], list[str], Launch]:
    """(sweeps, overrides, launch) of a call. Raises ValueError for a wrong word."""
    from harness.config.load import check_overrides, launch_of, split_launch

    words = [word for word in a.sweeps if "=" in word]
    check_overrides(words)
    overrides, given = split_launch(words)
    names = [word for word in a.sweeps if "=" not in word]
    return names, overrides, launch_of(given, results=str(a.results))


def run(a: argparse.Namespace) -> int:
    """Train the bases."""
    names, overrides, launch = _asked(a)
    if not a.dry_run:
        return base(names, overrides, launch=launch, workers=a.workers, minutes=a.minutes)
    missing = wanted(names, overrides, launch)
    for folder, cell in missing.items():
        print(f"{folder.name}, on {'a GPU' if cell.trainer.device == 'cuda' else 'a CPU'}")
    print(f"{_count(len(missing))} to train")
    return 0


def base(names: Sequence[str], overrides: Sequence[str], *, launch: Launch, workers: int, minutes: float | None) -> int:
    """Train every base that is `wanted`. Exit code 1 if one failed, 130 if interrupted; 0 too where `minutes` left some
    unfinished, which the same command goes on with."""
    import torch

    from harness.foundation.visible_gpus import visible_gpus
    from harness.foundation.writable import check_writable
    from harness.records.paths import bases_folder
    from harness.run.checks import check_device
    from harness.start.base_process import UNFINISHED

    waiting = list(wanted(names, overrides, launch).values())
    elsewhere = [cell for cell in waiting if cell.trainer.device == "cuda" and not torch.cuda.is_available()]
    if elsewhere and not names and not overrides:
        print(f"left out, for this machine has no GPU: {_count(len(elsewhere))}")
        waiting = [cell for cell in waiting if cell not in elsewhere]
    print(f"{_count(len(waiting))} to train", flush=True)
    for cell in waiting:
        check_device(cell)
    if waiting:
        check_writable(bases_folder(launch.results), "--results")
    end = None if minutes is None else time.monotonic() + 60 * minutes
    visible = visible_gpus() if any(cell.trainer.device == "cuda" for cell in waiting) else []
    gpus = cycle(visible or [None])
    running, ended = list[subprocess.Popen[bytes]](), list[int]()
    try:
        while waiting or running:
            while waiting and len(running) < workers and (end is None or time.monotonic() < end):
                running.append(_spawn(waiting.pop(0), launch, end, next(gpus)))
            if not running:
                break
            time.sleep(0.1)
            for process in [p for p in running if p.poll() is not None]:
                running.remove(process)
                ended.append(process.returncode)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here")
        return 130
    finally:
        for process in running:  # Ctrl-C in a terminal reaches them too, a signal to this process alone does not
            process.terminate()
        for process in running:
            process.wait()
    if left := ended.count(UNFINISHED) + len(waiting):
        print(f"time limit: {_count(left)} {'is' if left == 1 else 'are'} left; the same command goes on from here")
    return int(any(code not in (0, UNFINISHED) for code in ended))


def _count(num: int) -> str:
    return f"{num} base{'s' * (num != 1)}"


def wanted(names: Sequence[str], overrides: Sequence[str], launch: Launch) -> dict[Path, RunConfig]:
    """A cell for the folder of every base that is not there yet, the longest answers first: of the named sweeps, of the
    one run that overrides without a sweep describe, or of all sweeps."""
    from harness.config.load import load
    from harness.start.prepare import check_data, missing_bases
    from harness.sweep import plan, read_sweep, sweep_names

    if overrides and not names:
        cells = [load(overrides)]
        check_data(cells[0])
    else:
        cells = [cell for name in names or sweep_names() for cell in plan(read_sweep(name), overrides).cells]
    found = missing_bases(cells, launch)
    return dict(sorted(found.items(), key=lambda item: -(item[1].task.n or 0) * (item[1].model.hidden_size or 0)))


def _spawn(cell: RunConfig, launch: Launch, end: float | None, gpu: str | None) -> subprocess.Popen[bytes]:
    from harness.config.load import to_json
    from harness.foundation.own_process import code_path, module_command
    from harness.sweep.launchers.local import ENVIRONMENT

    words = {"config": to_json(cell), "launch": to_json(launch), "end": end}
    environment = os.environ | code_path() | ENVIRONMENT | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
    return subprocess.Popen(module_command("harness.start.base_process", json.dumps(words)), env=environment)
