"""Forecast of a cell's seconds from finished cells, with the error that the same prediction made on them.

Two ridge regressions on logarithms, of the time per step and of the rest (start, preparation, evaluation). What they
fit is measured over guessed time, the guess being from the model's size, so that everything not seen before falls back
to the guess, feature by feature. Records count as they are: many cells at a time on one GPU, a busy machine.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from harness.config.load import to_json
from harness.config.schema import RunConfig
from harness.foundation import provenance
from harness.foundation.clock import STAGES
from harness.foundation.progress_bar import progress_bar
from harness.records.packed import read_lines
from harness.records.paths import packed_paths, runs_folder, sweep_folders
from harness.sweep.folder_time import HERE, Machine, folder_time, num_evaluations

Config = Mapping[str, Any]
Floats = NDArray[np.float64]
Level = Literal["like", "arm", "new", "folder"]
LEVELS: dict[Level, str] = {
    "like": "arms with finished seeds",
    "arm": "new arms in a known setting",
    "new": "new sizes, lengths or machines",
    "folder": "models known by their config.json alone",
}
"""Level of knowledge of a cell -> the cells whose past error is told, in words."""
PENALTY = 1.0
"""Noise variance over the variance of one effect, of log seconds: on a shared machine both are about 0.2^2."""
START_S = 4.0
GPU_START_S = {"embedded": 15.0, "vllm": 45.0}
"""Imports, engine, CUDA graphs: guessed for a machine whose cores are all in use."""
GPU_DECODE_S = {"embedded": (1e-6, 3e-3), "vllm": (2e-5, 2.5e-3)}
"""Seconds of a decoding step: per row, and once."""


class _Times(BaseModel):
    """Fields of a record that a sample is made of: a parser that leaves the others out takes a third of the time."""

    status: str
    config: dict[str, Any]
    hardware: dict[str, Any]
    num_steps: int
    time_s: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Measured seconds of a finished cell."""

    config: Config
    place: str
    """Device and machine."""
    num_steps: int
    step_s: float
    """Per step, evaluations left out."""
    rest_s: float
    """Once: start, preparation, evaluations."""

    @property
    def total_s(self) -> float:
        return self.num_steps * self.step_s + self.rest_s


@dataclass(frozen=True, kw_only=True)
class PastError:
    """Error on cells predicted without themselves (`like`), their arm (`arm`) or their setting (`new`)."""

    median: float
    """Median of |predicted - actual| / actual."""
    p90: float
    low: float
    """Actual over predicted, 10 % quantile."""
    high: float
    """Its 90 % quantile."""
    count: int


@dataclass(frozen=True, kw_only=True)
class TimeForecast:
    """Seconds of one cell, and the range that held 80 % of past ones."""

    seconds: float
    low: float
    high: float
    level: Level


UNKNOWN = PastError(median=math.nan, p90=math.nan, low=1 / 3, high=3.0, count=0)
"""Error where nothing was measured: the guess has been off by as much."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Regressions learnt from finished cells."""

    step: dict[str, float]
    """Feature -> effect on log(measured / guessed), of a step."""
    rest: dict[str, float]
    arms: frozenset[str]
    settings: frozenset[str]
    errors: dict[Level, PastError]
    places: dict[str, str]
    """Device -> where most of its samples are from."""

    def estimate(self, config: RunConfig | Config, place: str | None = None, machine: Machine = HERE) -> TimeForecast:
        """Seconds of a whole cell, on this machine or where most samples of its device are from. A Hugging Face model
        that was never trained in this arm is guessed from its config.json, on `machine`."""
        values = to_json(config) if isinstance(config, RunConfig) else config
        place = place or self._place(values["trainer"]["device"])
        is_known = arm_key(values, place) in self.arms
        if isinstance(config, RunConfig) and config.model.path is not None and not is_known:
            step, rest = folder_time(config, machine.gpus, machine.gpu)
            seconds, error = config.trainer.steps * step + rest, UNKNOWN
            return TimeForecast(seconds=seconds, low=seconds * error.low, high=seconds * error.high, level="folder")
        words, (step, rest) = features(values, place), guess(values)
        if values["trainer"]["device"] in self.places:  # what one kind of device taught says nothing of another
            step, rest = step * _factor(self.step, words), rest * _factor(self.rest, words)
        seconds = values["trainer"]["steps"] * step + rest
        level: Level = "new"
        if setting_key(values, place) in self.settings:
            level = "like" if is_known else "arm"
        error = self.errors.get(level, UNKNOWN)
        return TimeForecast(seconds=seconds, low=seconds * error.low, high=seconds * error.high, level=level)

    def _place(self, device: str) -> str:
        if device == "cpu":
            return f"cpu {provenance.cpu_name()}"
        return self.places.get(device, device)


def _factor(effects: Mapping[str, float], words: Mapping[str, float]) -> float:
    return math.exp(sum(effects.get(name, 0.0) * value for name, value in words.items()))


def guess(config: Config) -> tuple[float, float]:
    """(seconds per step, seconds once) from the sizes alone."""
    if config["trainer"]["device"] == "cuda":
        return _guess_gpu(config)
    model, algo, trainer, task = config["model"], config["algo"], config["trainer"], config["task"]
    evals = 2 * num_evaluations(trainer["steps"], trainer["eval_every"])
    step = 0.06 + _token_flops(model) * _tokens(config) / 40e9
    answers = evals * task["num_eval"] * _length(config)
    passes = 0.55 + 0.4 * algo["num_epochs"] + 0.05 * algo["num_minibatches"] * algo["num_epochs"]
    return step * passes, START_S + _token_flops(model) * answers / 80e9


def _guess_gpu(config: Config) -> tuple[float, float]:
    """Guess for a small model on one of the GPU's many cells: a decoding step costs the host more than the GPU."""
    algo, trainer, task, engine = config["algo"], config["trainer"], config["task"], config["engine"]
    length, evals = _length(config) / 2.2, num_evaluations(trainer["steps"], trainer["eval_every"])
    row_s, once_s = GPU_DECODE_S[engine["name"]]

    def decode(rows: int) -> float:
        return length * (once_s * -(-rows // engine["max_batch"]) + row_s * rows)

    updates = algo["num_minibatches"] * algo["num_epochs"]
    train = _token_flops(config["model"]) * _tokens(config) * (0.5 + algo["num_epochs"]) / 20e12
    reference = length * GPU_DECODE_S["embedded"][1] * -(-task["num_eval"] // engine["max_batch"])
    step = 0.15 + decode(algo["num_prompts"] * algo["group_size"]) + train + 0.05 * updates
    return step, GPU_START_S[engine["name"]] + evals * (decode(task["num_eval"]) + reference)


def _token_flops(model: Config) -> float:
    width, layers = model["hidden_size"] or 1024, model["num_layers"] or 24
    return 10.0 * layers * width * (4 * width + 3 * (model["intermediate_size"] or 3 * width))


def _length(config: Config) -> float:
    return 2.2 * (config["task"]["n"] or config["engine"]["max_new_tokens"] or 256)


def _tokens(config: Config) -> float:
    return config["algo"]["num_prompts"] * config["algo"]["group_size"] * _length(config)


def features(config: Config, place: str) -> dict[str, float]:
    """Features of a cell's time: slopes over logarithms, and levels, from the general to the particular."""
    method, precision = config["method"], config["precision"]["name"]
    model, updates = config["model"], config["algo"]["num_minibatches"] * config["algo"]["num_epochs"]
    sized = f"{model['name']} n={config['task']['n']}"
    levels = [
        place, f"task {config['task']['name']}", f"model {model['name']}", f"n {config['task']['n']}",
        f"updates {updates}", f"method {method}", f"precision {precision}", f"{method} {precision}",
        f"{sized}", f"{place} {sized} {updates}", f"{place} {method}", f"{place} {precision}",
        f"{model['name']} {method}", f"n={config['task']['n']} {method}", f"setting {setting_key(config, place)}",
        f"arm {arm_key(config, place)}",
    ]  # fmt: skip
    slopes = {
        "log size": math.log(_token_flops(model) / 2e6),
        "log length": math.log(_length(config) / 20),
        "log tokens": math.log(_tokens(config) / 5000),
        "log updates": math.log(updates),
        f"log size {config['trainer']['device']}": math.log(_token_flops(model) / 2e6),
    }
    return {"one": 1.0, **slopes, **dict.fromkeys(levels, 1.0)}


def setting_key(config: Config, place: str) -> str:
    """Key of what arms of a sweep share: model, task, sizes of a batch, engine, trainer, machine."""
    algo, task, model = config["algo"], config["task"], config["model"]
    counts = [algo[name] for name in ("num_prompts", "group_size", "num_minibatches", "num_epochs")]
    by = [config["engine"]["name"], config["trainer"]["name"]]
    return json.dumps(
        [place, model["name"], model["hidden_size"], model["num_layers"], task["name"], task["n"], *counts, *by]
    )


def arm_key(config: Config, place: str) -> str:
    """Everything but seeds, base, learning rate, and how many steps and evaluations there are."""
    trainer = {name: value for name, value in config["trainer"].items() if name not in ("lr", "steps", "eval_every")}
    others = ("seed", "base_seed", "base")
    kept = {name: value for name, value in config.items() if name not in others} | {"trainer": trainer}
    text = json.dumps([place, kept], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_samples(results: Path) -> list[Sample]:
    """Every finished cell of every sweep, packed ones too. Files that are no records are no samples."""
    return [sample for text in _texts(results) if (sample := _sample(text)) is not None]


def _texts(results: Path) -> Iterator[bytes]:
    """JSON of every record."""
    folders = {path.name for path in sweep_folders(results)}
    for path in progress_bar(sorted(runs_folder(results).glob("*/*.json")), "record"):
        with suppress(OSError):
            yield path.read_bytes()
    for path in progress_bar(packed_paths(results), "packed sweep"):
        if path.stem not in folders:
            with suppress(ValueError):
                yield from read_lines(path)


def _sample(text: bytes) -> Sample | None:
    with suppress(AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
        record = _Times.model_validate_json(text)
        times, hardware, steps = record.time_s, record.hardware, record.num_steps
        step_s = sum(times.get(stage, 0.0) for stage in STAGES if stage != "eval") / steps
        place = f"{hardware['device']} {hardware.get('gpu') or hardware['cpu']}"
        rest_s = max(0.5, times["total"] - steps * step_s)
        if record.status == "ok" and step_s > 0:
            _ = features(record.config, place), guess(record.config)  # what `fit` asks of it
            return Sample(config=record.config, place=place, num_steps=steps, step_s=step_s, rest_s=rest_s)
    return None


def fit(samples: Sequence[Sample]) -> CostModel:
    """Learn from samples; none at all leaves the guess.

    Samples that differ in seeds alone have equal features, so the D distinct rows of features stand for all of them,
    each with its count. They are fewer than the features, so it is their system [D, D] that is solved.
    """
    if not samples:
        return CostModel(step={}, rest={}, arms=frozenset(), settings=frozenset(), errors={}, places={})
    found = [tuple(features(s.config, s.place).items()) for s in samples]
    distinct = {row: index for index, row in enumerate(dict.fromkeys(found))}
    own = np.array([distinct[row] for row in found])
    counts = np.bincount(own)
    guesses = np.array([guess(s.config) for s in samples])
    names = sorted({name for row in distinct for name, _ in row})
    columns = {name: index for index, name in enumerate(names)}
    x = np.zeros((len(distinct), len(names)))
    for row, index in distinct.items():
        x[index, [columns[name] for name, _ in row]] = [value for _, value in row]
    measured = np.array([(s.step_s, s.rest_s) for s in samples])
    y = np.log(measured / guesses)
    penalty = np.where(np.array(names) == "one", 0.01, PENALTY)
    scaled = x / penalty  # (X'WX + P)^-1 X'W is P^-1 X' (X P^-1 X' + W^-1)^-1, with the counts W and the penalties P
    inverse = np.linalg.inv(scaled @ x.T + np.diag(1 / counts))
    means = np.stack([np.bincount(own, part) for part in y.T], axis=1) / counts[:, None]
    effects = (scaled.T @ (inverse @ means)).astype(np.float64)
    hat = (np.diag(1 / counts) - inverse / np.outer(counts, counts)).astype(np.float64)
    arms = [arm_key(s.config, s.place) for s in samples]
    settings = [setting_key(s.config, s.place) for s in samples]
    steps, actual = np.array([s.num_steps for s in samples]), np.array([s.total_s for s in samples])
    errors: dict[Level, PastError] = {}
    keys: dict[Level, Sequence[object]] = {"like": range(len(samples)), "arm": arms, "new": settings}
    for level, groups in keys.items():
        if len(set(groups)) > 1:
            parts = guesses * np.exp(y - _left_out(hat, own, y - (x @ effects)[own], groups))
            errors[level] = _past_error(steps * parts[:, 0] + parts[:, 1], actual)
    counted = Counter(s.place for s in samples).most_common()
    places = {place.partition(" ")[0]: place for place, _ in reversed(counted)}
    return CostModel(
        step=dict(zip(names, effects[:, 0], strict=True)), rest=dict(zip(names, effects[:, 1], strict=True)),
        arms=frozenset(arms), settings=frozenset(settings), errors=errors, places=places,
    )  # fmt: skip


def _left_out(hat: Floats, own: NDArray[np.int64], residuals: Floats, groups: Sequence[object]) -> Floats:
    """Residuals of every group predicted by a fit without it: (1 - H_GG)^-1 r_G, exact for ridge regression. `hat`:
    H of the distinct rows [D, D]; `own`: the row of each sample."""
    members: dict[object, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    found = np.empty_like(residuals)
    for rows in members.values():
        at = own[rows]
        found[rows] = np.linalg.solve(np.eye(len(rows)) - hat[np.ix_(at, at)], residuals[rows])
    return found


def _past_error(predicted: Floats, actual: Floats) -> PastError:
    off, ratio = np.abs(predicted / actual - 1), actual / predicted
    return PastError(
        median=float(np.median(off)), p90=float(np.quantile(off, 0.9)), low=float(np.quantile(ratio, 0.1)),
        high=float(np.quantile(ratio, 0.9)), count=len(actual),
    )  # fmt: skip
