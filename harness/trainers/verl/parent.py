"""A cell whose trainer is verl: start the process that holds Ray, follow its files, stop it, take it up again.

    work/<id>/verl/   job.json  model/  train.parquet  eval.parquet     written here
                      series.jsonl  evals.jsonl  passport.json          by verl's driver, read here
                      stage.json                                        its stage, so that silence shows a hang
                      stop                                              written here: save, then end
                      checkpoints/                                      verl's own; a new start goes on from the last
                      outcome.json                                      how it ended

A checkpoint that verl cannot read ends the run as failed; its text says which.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from harness.api import Passport, TensorRecord, WeightStream
from harness.config.compose import Composed
from harness.config.schema import Launch, RunConfig
from harness.foundation import provenance
from harness.foundation.lock_file import wait_until_free
from harness.foundation.own_process import code_path, module_command
from harness.foundation.process_log import one_line, tail
from harness.models.adapters import named_weights
from harness.models.decoder import Decoder, DecoderConfig
from harness.records.run_result import EvalRecord, TaskEvalRecord
from harness.start.prepare import evaluation_tasks, start_hashes, start_of
from harness.trainers.local.trainer import Diverged, policy_weights
from harness.trainers.task_evaluation import FAILURES
from harness.trainers.verl import checks
from harness.trainers.verl.data import lay_out
from harness.trainers.verl.job import GRACE_S, VerlJob, composed_of
from harness.trainers.verl.outcome import death, with_its_cause
from harness.trainers.verl.reference import evaluated, final_weights, policy_of
from harness.trainers.verl.settings import environment

POLL_S = 0.5
DRIVER = "harness.trainers.verl.driver"


class GrowingLines:
    """Reader of a growing file of JSON lines, which reads nothing twice."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.inode, self.offset, self.rows = -1, 0, list[dict[str, Any]]()

    def read(self) -> list[dict[str, Any]]:
        """All rows so far; a last line that is being written is left out. A file that took the place of another, as
        where verl's driver cuts it back to a checkpoint, is read from its start."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self.inode or status.st_size < self.offset:
                self.inode, self.offset, self.rows = status.st_ino, 0, []
            file.seek(self.offset)
            added = file.read()
        lines = added[: added.rfind(b"\n") + 1]
        self.rows += [json.loads(line) for line in lines.split(b"\n") if line]
        self.offset += len(lines)
        return self.rows


class Watched:
    """Owns the process of one run; what it reached is read from its files."""

    def __init__(self, job: VerlJob, composed: Composed) -> None:
        self.job, self.composed = job, composed
        self.process: subprocess.Popen[bytes] | None = None
        self.rows = GrowingLines(job.series_file)
        self.references: list[EvalRecord] = []
        self.reference_s = 0.0
        self.evaluation_errors: list[str] = []

    @property
    def step(self) -> int:
        """Steps done so far."""
        return len(self.series)

    @property
    def series(self) -> list[dict[str, Any]]:
        """Series of the run, a row per step."""
        return self.rows.read()

    @property
    def config(self) -> RunConfig:
        """Configuration of the run."""
        return self.job.config

    @property
    def folder(self) -> Path:
        """Hugging Face folder of the base."""
        return Path(self.job.base)

    @property
    def shape(self) -> DecoderConfig:
        """Shape of the model."""
        return self.job.shape

    @cached_property
    def trained(self) -> Decoder:
        """The module with the weights after the last step, once the run is there."""
        return policy_of(self.job, self.composed, masters=final_weights(self.job))

    def weights(self) -> WeightStream:
        """Masters by checkpoint name, adapters too."""
        return ((name, tensor.detach()) for name, tensor in named_weights(self.trained))

    def policy_weights(self) -> WeightStream:
        """The weights that are evaluated in the reference precision."""
        return policy_weights(self.trained, self.weights(), self.composed.plan.adapters)

    @property
    def evaluations(self) -> list[TaskEvalRecord]:
        """Answers of the run's own sampler to `evaluations`."""
        lines = read_lines(self.job.evals_file)
        return [TaskEvalRecord.model_validate(found) for line in lines for found in line["evaluations"]]

    @property
    def evals(self) -> list[EvalRecord]:
        """Evaluations in order: in the rollout precision by verl, in the reference precision by us."""
        own = [EvalRecord.model_validate(line["record"]) for line in read_lines(self.job.evals_file)]
        return sorted([*own, *self.references], key=lambda record: (record.step, record.site))

    @property
    def eval_s(self) -> float:
        """Seconds of all evaluations."""
        return self.reference_s + sum(line["seconds"] for line in read_lines(self.job.evals_file))

    @property
    def passport(self) -> Passport | None:
        """Last passport of the first server."""
        if not self.job.passport_file.exists():
            return None
        values = json.loads(self.job.passport_file.read_text(encoding="utf-8"))
        weights = tuple(TensorRecord(**record) for record in values.pop("weights"))
        return Passport(**values, weights=weights)

    @property
    def memory_gib(self) -> dict[str, float]:
        """Peaks of the first trainer's process, and what it keeps while the engine samples; a vLLM server is another
        one, and is not counted. "host": all processes of its machine."""
        names = {"allocated": "memory/update_gib", "reserved": "memory/reserved_gib", "host": "memory/host_gib",
                 "rest": "memory/rest_gib"}  # fmt: skip
        rows = self.series
        return {own: max(row[name] for row in rows) for own, name in names.items() if rows and name in rows[0]}

    def products(self) -> dict[str, int]:
        """Kind of product -> number of linear layers computed so, from the first trainer."""
        file = self.job.products_file
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    def final_hash(self) -> str | None:
        """Hash of the weights after the last step."""
        return provenance.tensors_hash(final_weights(self.job)) if self.job.final_folder.exists() else None

    def train(
        self, tell: Callable[[int, float], None], should_stop: Callable[[], bool], stopped: type[Exception]
    ) -> None:
        """Run to the end. Raises `stopped` when asked to stop, Diverged, and with verl's own words MemoryError or
        RuntimeError, which has verl's traceback as a note."""
        wait_until_free(self.job.folder)  # a driver whose cell was killed may still be writing its checkpoint
        self.job.stop_file.unlink(missing_ok=True)
        outcome = self.job.folder / "outcome.json"
        outcome.unlink(missing_ok=True)
        with self.job.log_file.open("ab") as log:
            log_start = log.tell()  # behind what earlier starts printed
            self.process = subprocess.Popen(
                module_command(DRIVER, str(self.job.folder / "job.json")),
                cwd=self.job.folder,  # Ray puts it first on its workers' module path: no place of the user's files
                stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                env=os.environ | code_path() | environment(self.job),
            )  # fmt: skip
        asked: float | None = None
        seen: tuple[int, float] | None = None
        while self.process.poll() is None:
            if asked is None and should_stop():
                asked = time.monotonic()
                self.job.stop_file.touch()
            if asked is not None and time.monotonic() - asked > GRACE_S:
                self.close()
            rows = self.series
            if (now := (len(rows), self._stage_s())) != seen:  # silence is how the launcher finds a hang
                seen = now
                tell(len(rows), float(rows[-1]["reward/accuracy"]) if rows else math.nan)
            time.sleep(POLL_S)
        printed = tail(self.job.log_file, log_start)
        if outcome.exists():
            found = with_its_cause(json.loads(outcome.read_text(encoding="utf-8")), printed)
        else:
            found = death(self.process.returncode, printed)
        if found["kind"] == "stopped" or asked is not None:
            raise stopped
        if found["kind"] == "diverged":
            raise Diverged(found["reason"])
        if found["kind"] != "ok":
            kind = MemoryError if found["kind"] == "memory" else RuntimeError
            failure = kind(f"{found['reason']} (exit code {self.process.returncode}; {self.job.log_file})")
            failure.add_note(found.get("traceback", ""))
            raise failure

    def _stage_s(self) -> float:
        """Time of the driver's last word on where its step is."""
        with suppress(FileNotFoundError):
            return self.job.stage_file.stat().st_mtime
        return 0.0

    def compare(self) -> None:
        """Evaluate the start and the end of the run in the reference precision, once the device is free. A model that
        is too large for one device in float32 leaves a remark, not a failed run."""
        started = time.monotonic()
        for step in (0, self.config.trainer.steps):
            try:
                self.references.append(self._evaluated(step))
            except FAILURES as failure:
                self.evaluation_errors.append(f"step {step}: {type(failure).__name__}: {one_line(str(failure))}")
        self.reference_s = time.monotonic() - started

    def _evaluated(self, step: int) -> EvalRecord:
        """The evaluation of a step, whose model the host forgets before the next one is built."""
        model = self.trained if step else policy_of(self.job, self.composed)
        return evaluated(self.job, self.composed, model, step)

    def close(self) -> None:
        """End the process and its whole group: Ray's local cluster is in it."""
        if self.process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20.0)


def watch(
    config: RunConfig, launch: Launch, composed: Composed, work: Path, should_stop: Callable[[], bool]
) -> tuple[Watched, dict[str, str | None]]:
    """Set up a run that has not started: its files are written. Returns it and the hashes of what it starts from.
    Raises ValueError on bad input, and Unfinished where `should_stop` ends the training of a base."""
    checks.check_launch(config, launch)
    checks.check_installed()
    start = start_of(config, launch, should_stop)
    job = lay_out(config, launch, composed, start, work / "verl")
    if config.trainer.device == "cuda":
        torch.cuda.empty_cache()  # what was prepared there is on disk now; the memory is verl's
    # what the parts prepared is read from the job's files: a run that goes on prepares nothing anew
    return Watched(job, composed_of(job)), start_hashes(start, evaluation_tasks(config))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Lines of JSON; a last line that is being written is left out."""
    return GrowingLines(path).read()
