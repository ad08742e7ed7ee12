"""Tracking while a sweep runs: a thread that samples the cells' processes and logs every cell as it ends.

The sweep only puts events on a queue, so that neither a slow store nor an outage holds a cell up. What is measured here
and nowhere else are system metrics over time; a rebuild has peak memory and seconds per stage, from the record.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from time import time
from types import TracebackType
from typing import TYPE_CHECKING

import psutil

from harness.config.load import run_id
from harness.records.paths import runs_folder
from harness.viewers.tracking.facts import Point
from harness.viewers.tracking.tracker import Tracker, log_cell

if TYPE_CHECKING:
    from harness.sweep.launchers.job import Event

PERIOD_S = 2.0
MAX_SAMPLES = 100
"""Samples kept of a cell; when they are full every second one goes and the period doubles."""
PATIENCE_S = 30.0
"""Seconds that the end of a sweep waits for what is still to be logged, and then for the cell at hand; the rest is made
up for afterwards."""


class Sampler:
    """Owns the handles of running cells and their samples: (milliseconds, name -> value)."""

    def __init__(self) -> None:
        self.processes: dict[str, psutil.Process] = {}
        self.samples: dict[str, list[tuple[int, dict[str, float]]]] = defaultdict(list)
        self.skip: dict[str, int] = defaultdict(lambda: 1)
        self.ticks = 0

    def watch(self, cell: str, pid: int) -> None:
        """Sample this process from now on; a pid of 0 is another machine's."""
        if pid > 0:
            try:
                process = psutil.Process(pid)
                process.cpu_percent()
            except psutil.Error:
                return
            self.processes[cell] = process

    def sample(self) -> None:
        """One look at every cell and at the machine; a process that is gone is dropped."""
        self.ticks += 1
        if not self.processes:
            return
        machine = {
            "system/cpu_utilization_percentage": psutil.cpu_percent(),
            "system/system_memory_usage_percentage": psutil.virtual_memory().percent,
        }
        for cell, process in list(self.processes.items()):
            if self.ticks % self.skip[cell]:
                continue
            try:
                with process.oneshot():
                    own = {
                        "system/cell_cpu_percent": process.cpu_percent(),
                        "system/cell_memory_mib": process.memory_info().rss / 2**20,
                        "system/cell_threads": float(process.num_threads()),
                    }
            except psutil.Error:
                del self.processes[cell]
                continue
            self.samples[cell].append((int(time() * 1000), machine | own))
            if len(self.samples[cell]) > MAX_SAMPLES:
                self.samples[cell] = self.samples[cell][::2]
                self.skip[cell] *= 2

    def take(self, cell: str) -> list[Point]:
        """The samples of a cell, numbered; they are forgotten here."""
        self.processes.pop(cell, None)
        rows = self.samples.pop(cell, [])
        return [Point(k, v, stamp, index) for index, (stamp, row) in enumerate(rows) for k, v in row.items()]


class Live:
    """Owns the thread. Call it with every event of a sweep; use it as a context.

    The trackers are opened in the thread, by `openers`.
    """

    def __init__(
        self,
        results: Path,
        sweep: str,
        openers: Sequence[Callable[[], Tracker]],
        tags: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self.results, self.sweep, self.openers = results, sweep, openers
        self.tags = dict(tags or {})
        """Run id -> tags beyond the record's, such as a search's trial."""
        self.queue: SimpleQueue[Event | None] = SimpleQueue()
        self.sampler = Sampler()
        self.num_logged = 0
        """Cells, counted once for every tracker."""
        self.is_late = False
        self.thread = threading.Thread(target=self._work, name="tracking", daemon=True)

    def __call__(self, event: Event) -> None:
        if event.kind != "progress":
            self.queue.put(event)

    def __enter__(self) -> Live:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.queue.put(None)
        self.thread.join(PATIENCE_S)
        self.is_late = True
        self.thread.join()  # whoever makes up for the rest would log the cell at hand a second time

    def _work(self) -> None:
        trackers = [open_one() for open_one in self.openers]
        folder = runs_folder(self.results, self.sweep)
        while any(tracker.is_on for tracker in trackers):
            try:
                event = self.queue.get(timeout=PERIOD_S)
            except Empty:
                self.sampler.sample()
                continue
            if event is None or self.is_late:
                break
            cell = run_id(event.config)
            if event.kind == "started":
                self.sampler.watch(cell, event.pid)
            elif event.result is not None and (folder / f"{cell}.json").exists():
                samples, tags = self.sampler.take(cell), self.tags.get(cell)
                for tracker in trackers:
                    self.num_logged += log_cell(tracker, self.sweep, event.result, folder, tags=tags, samples=samples)
        for tracker in trackers:
            tracker.close()
