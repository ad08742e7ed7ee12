"""Choices of a configuration resolved: parts with knobs, the algorithm with what the method fixes, all defaults.

Left out: whether the choice can work, which `harness.config.compose` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from harness.api import Method, Part, Plan, knobs, stated_knobs
from harness.config.load import parse
from harness.config.outside import sources_of
from harness.config.schema import AlgoConfig, EvaluationConfig, PrecisionConfig, RunConfig, TaskConfig, TrainerConfig
from harness.foundation.data_hash import data_hash
from harness.foundation.did_you_mean import listed, nearest
from harness.numerics.formats import format_or_none
from methods import METHODS, method_named

_Data = TypeVar("_Data", TaskConfig, EvaluationConfig)
LONG_RESPONSES = 16
"""From this problem size on, RL of the embedded tasks wants a learning rate of at most `LONG_LR`."""
LONG_LR = 2e-4


def choose_parts(config: RunConfig) -> tuple[Part, ...]:
    """The method's parts, or those `parts` names, with the knobs set. Raises ValueError for unknown names or values,
    and for knobs of a part that is not among them."""
    parts = known_parts(config)
    for name in [name for name in config.knobs if name not in {type(part).__name__ for part in parts}]:
        having = [m.name for m in METHODS.values() if name in (type(part).__name__ for part in m.parts)]
        raise ValueError(f"knobs.{name}: method={config.method} has no such part; it is in {listed(having, 3)}")
    return parts


def known_parts(config: RunConfig) -> tuple[Part, ...]:
    """The parts of a run with their knobs; knobs of parts that only other methods have are passed by. Raises ValueError
    for what is wrong beside any method: names that there are nowhere, and values that a knob cannot have."""
    if config.parts:
        parts = tuple(_part_named(name) for name in config.parts)
    else:
        parts = method_named(config.method).parts
    names = [type(part).__name__ for part in parts]
    if len(set(names)) < len(names):
        raise ValueError(f"parts={names}: the same part twice")
    for name in config.knobs:
        if name not in names and name not in (offered := [*names, *_parts()]):
            raise ValueError(f"knobs.{name}: method={config.method} has no such part; {nearest(name, offered)}")
    return tuple(_with_knobs(part, config.knobs.get(type(part).__name__, {})) for part in parts)


def _parts() -> list[str]:
    return sorted({type(part).__name__ for method in METHODS.values() for part in method.parts})


def _part_named(dotted: str) -> Part:
    offered = {f"{m.name}.{type(p).__name__}": p for m in METHODS.values() for p in m.parts}
    if dotted not in offered:
        raise ValueError(f"parts: unknown part {dotted}; {nearest(dotted, offered)}")
    return offered[dotted]


def _with_knobs(part: Part, values: Mapping[str, Any]) -> Part:
    name, known = type(part).__name__, knobs(part)
    for knob in values:
        if knob not in known:
            raise ValueError(f"knobs.{name}.{knob}: unknown knob; {nearest(knob, known)}")
        if values[knob] != values[knob]:
            raise ValueError(f"knobs.{name}.{knob}=nan: a number is expected")
    try:
        made = parse(type(part), known | dict(values))
    except ValueError as error:
        words = str(error)
        raise ValueError(f"knobs.{words}" if words.startswith(name) else f"knobs.{name}.{words}") from None
    for knob, value in values.items():  # pydantic takes true for 1
        if isinstance(value, bool) and not isinstance(getattr(made, knob), bool):
            raise ValueError(f"knobs.{name}.{knob}={str(value).lower()}: a number is expected")
    return made


def resolve(config: RunConfig, content_hash: Callable[[str], str] | None = None) -> RunConfig:
    """Fill in everything that is implied, so that the run id covers it: knobs, learning rate, aggregation, hashes.

    `content_hash`: folder of a model -> the hash that stands for it in the id; None: it keeps the one that it has.
    Raises ValueError, one line, for a folder that is none, and as `choose_parts` and `fixed_algo`.
    """
    method = method_named(config.method)
    parts = choose_parts(config)
    lr = config.trainer.lr
    if lr is None:
        is_long = (config.task.n or 0) >= LONG_RESPONSES
        lr = min(config.model.rl_lr, LONG_LR) if is_long else config.model.rl_lr
    model = config.model
    if model.path is not None and content_hash is not None:
        if not Path(model.path).is_dir():
            what = "is a file, no model folder" if Path(model.path).exists() else "no such folder"
            raise ValueError(f"model.path={model.path}: {what}")
        model = replace(model, content_hash=content_hash(model.path))
    return replace(
        config,
        task=_with_data(config.task),
        evaluations=tuple(_with_data(evaluation) for evaluation in config.evaluations),
        knobs={type(p).__name__: stated for p in parts if (stated := stated_knobs(p))},
        model=model,
        trainer=replace(trainer_of(config, parts), lr=lr),
        algo=fixed_algo(method, config.algo),
        outside=sources_of(method, parts),
    )


def _with_data(task: _Data) -> _Data:
    return task if task.path is None else replace(task, content_hash=data_hash(task.path))


def rollout_plan(precision: PrecisionConfig) -> Plan:
    """Plan of the precision axis."""
    return Plan(
        rollout_weights=format_or_none(precision.weights, "precision.weights"),
        rollout_acts=format_or_none(precision.acts, "precision.acts"),
        rollout_kv=format_or_none(precision.kv, "precision.kv"),
    )


def trainer_of(config: RunConfig, parts: Sequence[Part]) -> TrainerConfig:
    """The trainer with its arithmetic: BF16 for a Hugging Face model, where neither the user nor a part says any."""
    trainer, rollout = config.trainer, rollout_plan(config.precision)
    if trainer.compute is not None or config.model.path is None:
        return trainer
    if any(part.plan(rollout).train_compute is not None for part in parts):
        return trainer
    return replace(trainer, compute="bf16")


def fixed_algo(method: Method, algo: AlgoConfig) -> AlgoConfig:
    """The algorithm with what the method fixes of it: aggregation, correction mode, denominator. Raises ValueError for
    another correction mode than the method's."""
    if method.mode is not None and algo.mode not in (method.mode, AlgoConfig.mode):
        raise ValueError(f"algo.mode={algo.mode}: method {method.name} is defined in one mode; valid: {method.mode}")
    fixed = {name: getattr(method, name) for name in ("agg", "mode", "denom") if getattr(method, name) is not None}
    return parse(AlgoConfig, vars(algo) | fixed)
