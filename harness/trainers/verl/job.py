"""A run under verl as files in one folder that all its processes see, on every node.

The environment variable LOWBIT_VERL_JOB names job.json; Ray hands it to every worker, and each composes the method from
it again, since parts are pure values.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from safetensors.torch import load_file

from harness.config.compose import Composed, compose
from harness.config.load import parse, to_json
from harness.config.resolve import fixed_algo
from harness.config.schema import AlgoConfig, Launch, RunConfig
from harness.foundation.provenance import text_hash
from harness.foundation.whole_file import write_atomic
from harness.models.checkpoint import load_config
from harness.models.decoder import DecoderConfig

JOB = "LOWBIT_VERL_JOB"
"""Environment variable with the path of job.json."""
GRACE_S = 600.0
"""Seconds that a run that was asked to stop has to end its step and write a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class VerlJob:
    """A run under verl and the paths of its files."""

    config: RunConfig
    launch: Launch
    folder: Path
    max_new_tokens: int
    """Largest number of response tokens, resolved."""
    num_tokens: int
    """Number of tokens that the tokenizer knows; a model's vocabulary may be padded beyond."""
    eos_id: int
    base: str = ""
    """Hugging Face folder of the base, absolute: the trained policy has its tokenizer and dtype."""
    evaluation_length: int = 0
    """Tokens of the longest prompt with a whole answer among `evaluations`; 0 where there are none."""
    rollouts: str = ""
    """File for responses, absolute; empty where none are asked for."""
    is_timed: bool = False
    """Run steps alone, for timing: no evaluation, no checkpoint, no weights at the end."""

    is_padded: bool = False
    """For timing alone: rows of a pass are padded to the longest, as a trainer without packing does."""

    @property
    def model(self) -> Path:
        """The Hugging Face folder that the policy starts from."""
        return self.folder / "model"

    @property
    def is_drawn(self) -> bool:
        """Are weights drawn on the devices? For timing alone: a model whose folder has none."""
        return self.is_timed and not any(self.model.glob("*.safetensors"))

    @property
    def train_file(self) -> Path:
        """The prompts in the order in which they are drawn."""
        return self.folder / "train.parquet"

    @property
    def eval_file(self) -> Path:
        """The held-out questions."""
        return self.folder / "eval.parquet"

    @property
    def fixed_file(self) -> Path:
        """File of the tensors that the parts prepared."""
        return self.folder / "fixed.safetensors"

    @property
    def series_file(self) -> Path:
        """File with a line of JSON per step."""
        return self.folder / "series.jsonl"

    @property
    def evals_file(self) -> Path:
        """File with a line of JSON per evaluation."""
        return self.folder / "evals.jsonl"

    @property
    def passport_file(self) -> Path:
        """File of the last passport of the first vLLM worker."""
        return self.folder / "passport.json"

    @property
    def products_file(self) -> Path:
        """File that says how the trainer computes its linear layers, from its live modules."""
        return self.folder / "products.json"

    @property
    def rest_file(self) -> Path:
        """File of the GPU memory that the first trainer had at its last pass's start, a row of the series."""
        return self.folder / "rest.json"

    @property
    def final_folder(self) -> Path:
        """Folder of the weights after the last step, in shards."""
        return self.folder / "final"

    @property
    def log_file(self) -> Path:
        """File of the output of the process that holds Ray, and of Ray's workers through it."""
        return self.folder / "verl.log"

    @property
    def stage_file(self) -> Path:
        """File that the driver writes at every stage of a step: its only sign of life between two steps."""
        return self.folder / "stage.json"

    @property
    def stop_file(self) -> Path:
        """File that exists while the run is asked to stop after its step."""
        return self.folder / "stop"

    @property
    def checkpoints(self) -> Path:
        """Folder of verl's own checkpoints."""
        return self.folder / "checkpoints"

    @property
    def shape(self) -> DecoderConfig:
        """Shape of the model."""
        return load_config(self.model)

    @property
    def algo(self) -> AlgoConfig:
        """Algorithm with what the method fixes."""
        return fixed_algo(composed_of(self).method, self.config.algo)


def write_job(job: VerlJob) -> Path:
    """Write job.json; returns its path."""
    values = {"config": to_json(job.config), "launch": to_json(job.launch), "max_new_tokens": job.max_new_tokens,
              "num_tokens": job.num_tokens, "eos_id": job.eos_id, "base": job.base,
              "evaluation_length": job.evaluation_length, "rollouts": job.rollouts,
              "is_timed": job.is_timed, "is_padded": job.is_padded}  # fmt: skip
    path = job.folder / "job.json"
    write_atomic(path, json.dumps(values, indent=1).encode())
    return path


def read_job(path: Path) -> VerlJob:
    """Read what `write_job` wrote; its folder is where the file stands."""
    values = json.loads(path.read_text(encoding="utf-8"))
    config, launch = parse(RunConfig, values.pop("config")), parse(Launch, values.pop("launch"))
    return VerlJob(config=config, launch=launch, folder=path.parent, **values)


def own_socket(job: VerlJob, socket: str) -> str:
    """verl's name of a socket with the run in it: every local Ray calls its first job 01000000, so the trainers and
    engines of two runs on one machine would find each other's."""
    return socket.replace(".sock", f"-{text_hash([str(job.folder)])[:12]}.sock")


@cache
def current_job() -> VerlJob:
    """The job of this process. Raises RuntimeError where it belongs to none."""
    path = os.environ.get(JOB)
    if path is None:
        raise RuntimeError(f"{JOB} is not set: this process was not started by `lowbit run trainer=verl`")
    return read_job(Path(path))


def composed_of(job: VerlJob) -> Composed:
    """The method of a job with what its parts prepared, memories empty."""
    composed = compose(job.config)
    if job.fixed_file.exists():
        composed = replace(composed, fixed=load_file(str(job.fixed_file)))
    return composed


@cache
def current_method() -> Composed:
    """The method of this process's job; parts keep their memories in it."""
    return composed_of(current_job())
