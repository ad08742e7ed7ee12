"""One base model trained in a process of its own, which prints what it reaches.

    python -m harness.start.base_process JSON      ({"config": ..., "launch": ..., "end": ...}, end: monotonic seconds)

Exit codes: 0 trained, 1 failed, 3 stopped in between, where the same command goes on.
"""

from __future__ import annotations

import json
import signal
import sys
import time

import torch

from harness.config.load import parse
from harness.config.schema import Launch, RunConfig
from harness.start.base_model import read_record
from harness.start.base_training import Unfinished
from harness.start.prepare import base_folder, start_of

UNFINISHED = 3
"""Exit code of a process that stopped in between."""


def train(words: str) -> int:
    """Train one base, in a process of its own, and print what becomes of it."""
    torch.set_num_threads(1)
    values, stops = json.loads(words), list[int]()
    config, launch = parse(RunConfig, values["config"]), parse(Launch, values["launch"])
    folder, started = base_folder(config, launch), time.monotonic()
    assert folder is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stops.append(number))

    def should_stop() -> bool:
        return bool(stops) or (values["end"] is not None and time.monotonic() >= values["end"])

    try:
        record = read_record(start_of(config, launch, should_stop).folder)
    except Unfinished as stop:
        print(f"{folder.name}: {stop}", flush=True)
        return UNFINISHED
    except (ValueError, OSError, RuntimeError) as error:  # memory that ran out and a lost worker are RuntimeErrors
        print(f"failed: {folder.name}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 1
    rate = f", {record['tokens_per_s'] / 1e6:.2f}M tokens/s" if "tokens_per_s" in record else ""
    print(
        f"{folder.name}: {record['steps']} steps, accuracy {record['accuracy']:.3f}, "
        f"greedy {record['greedy_accuracy']:.3f}, {time.monotonic() - started:.0f} s{rate}",
        flush=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(train(sys.argv[1]))
