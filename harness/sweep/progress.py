"""Progress of a sweep on the terminal: a bar of steps, a line per finished cell."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from textwrap import shorten

from tqdm import tqdm

from harness.config.load import run_id
from harness.config.schema import RunConfig
from harness.records.run_result import RunResult
from harness.sweep.launchers.job import Event
from harness.sweep.planning import names_of


class Progress:
    """One bar over the steps to go of a sweep on a terminal; everywhere a line per finished cell, and one now and then
    about a base that a cell trains first."""

    def __init__(self, todo: Sequence[RunConfig], cells: Sequence[RunConfig]) -> None:
        """`cells`: all of the sweep, among which the cells to run have their names."""
        self.total, self.num_before = len(cells), len(cells) - len(todo)
        self.names = names_of(cells)
        self.ids = {id(config): run_id(config) for config in todo}
        self.steps, self.num_done = dict[str, int](), 0
        self.begun, self.ended, self.noted = set[str](), set[str](), set[str]()
        total = sum(config.trainer.steps for config in todo)
        self.bar = tqdm(total=total, unit="step", disable=not sys.stderr.isatty(), smoothing=0.05)
        self.num_steps, self.started = total, time.perf_counter()

    def __call__(self, event: Event) -> None:
        cell = self.ids.get(id(event.config)) or run_id(event.config)
        if event.kind == "started":
            self.begun.add(cell)
            if cell in self.ended:
                self._write(f"again  {cell}  {self.names[cell]}")
        step = event.config.trainer.steps if event.kind == "finished" else event.step
        if event.kind != "started" and cell not in self.steps:
            ran = event.kind == "finished" and cell in self.begun
            self.steps[cell] = 0 if ran else step  # of an earlier command or another sweep, or could not start
            self.num_steps -= self.steps[cell]
            self.bar.total = self.num_steps
            self.bar.refresh()
        if event.kind != "started" and (new := step - self.steps[cell]) > 0:
            self.bar.update(new)
            self.num_done, self.steps[cell] = self.num_done + new, step
        if event.note is not None and event.note not in self.noted:
            self.noted.add(event.note)
            self._write(event.note)
        if event.result is not None:
            self.ended.add(cell)
            seconds = time.perf_counter() - self.started
            left = seconds * (self.num_steps - self.num_done) / max(1, self.num_done)
            count = f"[{self.num_before + len(self.ended)}/{self.total}]"
            head = f"{count} {seconds / 60:5.1f} min, {left / 60:.1f} min left" if cell in self.begun else count
            self._write(f"{head}  {summary_line(event.result, self.names[cell])}")

    def _write(self, line: str) -> None:
        self.bar.write(line, file=sys.stdout)
        sys.stdout.flush()

    def close(self) -> None:
        """End the bar."""
        self.bar.close()


def summary_line(result: RunResult, name: str) -> str:
    """One finished cell: status, id, its name as shown, scores, and why one is missing."""
    head = f"{result.status}  {result.run_id}  {name}"
    if result.status != "ok":
        return f"{head}: {result.reason}"
    s = result.summary
    scores = ", ".join(
        f"{name} {value:.3f}"
        for name, key in (("accuracy", "final_accuracy"), ("in rollout format", "final_accuracy_rollout"))
        if (value := s.get(key)) is not None
    )
    again = f" (attempt {len(result.retries) + 1})" if result.retries else ""
    errors = [shorten(error, 160, placeholder=" ...") for error in result.evaluation_errors]
    missing = "".join(f"; the evaluation failed, {error}" for error in errors)
    return f"{head}{again}: {scores or 'no score'}, {result.time_s.get('total') or 0:.0f} s{missing}"
