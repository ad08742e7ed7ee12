"""Arms: the cells of a sweep that differ only in their seeds and in how their bases were trained, with labels that say
what differs and no more."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.config.load import identity
from harness.config.schema import AlgoConfig
from harness.records.run_result import RunResult
from harness.records.statuses import FINISHED
from harness.records.sweep_file import CONTROL

Fields = dict[str, Any]
"""Dotted config name -> value."""

SEEDS = ("base_seed", "seed")
DEVICE = "trainer.device"
"""Another device is another random stream and other float rounding, as another seed is, and no other setting."""
PARTS = "parts"
"""Field of the parts that stand in place of a method's own."""
FIRST = (
    "model.name", "task.name", "task.n", "model.spread", "algo.name", "algo.mode", "algo.num_minibatches",
    "algo.num_epochs", "algo.staleness", "algo.partial_rollouts", "trainer.steps", "trainer.lr", "engine.name", PARTS,
)  # fmt: skip
"""Fields in order of precedence: where several vary together, the first stands for them."""
CONTEXT = ("model.", "task.", "base.", "engine.", "trainer.name", "trainer.steps")
"""Fields that set the experiment. Two arms are compared only where these agree."""
TOLD = tuple(name for name in FIRST if not name.startswith(CONTEXT) and name != PARTS)
"""Fields of FIRST that a label tells even where another stands for them, if they vary within an experiment."""
BASE = "base."
BASE_TRAITS = ("base.n", "base.target_accuracy")
"""Fields of `base` that say what a base is. The others say how it was trained: bases of one seed in two recipes are two
bases of an arm, as those of two seeds are, and runs are compared on one base alone."""
OF_PRECISION = "precision."
"""Prefix of the names of a precision's own fields."""
KNOBS = "knobs."
"""Prefix of the names of a method's own options."""
METHOD_OWN = (
    "method", PARTS, KNOBS, OF_PRECISION, "algo.mode", "algo.agg", "algo.denom", "trainer.compute", "outside",
)  # fmt: skip
"""Beginnings of the fields that say a method and its rollout format, or that follow from a method."""
WORDS = {
    "model.name": "{}",
    "task.name": "{}",
    "task.n": "n={}",
    "model.spread": "sigma={}",
    "algo.name": "{}",
    "algo.mode": "{}",
    "algo.num_minibatches": "{} minibatches",
    "algo.num_epochs": "{} epochs",
    "algo.staleness": "staleness {}",
    "algo.partial_rollouts": "partial {}",
    "trainer.steps": "{} steps",
    "trainer.lr": "lr={}",
    "engine.name": "{}",
    PARTS: "{}",
    "precision.weights": "{}",
}
"""Form of a field in a label; others are written name=value."""
PRECISIONS = (
    "fp32", "bf16", "fp16", "w8a16", "int8", "fp8_channel", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4", "mxfp4", "nf4",
    "int4", "nvfp4_w4a4", "mxfp4_mbs_w4a4", "mxfp4_w4a4", "mxfp4_up_w4a4", "int3", "int2",
)  # fmt: skip
"""Rollout precisions from fine to coarse: the order of rows and panels."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """The runs of one setting."""

    label: str
    method: str
    precision: str
    axes: Fields
    """Fields that vary over the sweep beyond method, precision and seeds, with this arm's values."""
    fields: Fields
    """The whole setting, seeds left out."""
    context: Fields
    """The axes that set the experiment."""
    variant: str
    """Label that sets the arm apart within its method, precision and context; empty for the usual setting."""
    is_plain: bool
    """No field of METHOD_OWN sets it apart."""
    runs: tuple[RunResult, ...]
    """Ordered by (base seed, seed)."""


def scored(arm: Arm) -> list[RunResult]:
    """Runs of an arm that count in its scores and curves: those with status ok or diverged."""
    return [run for run in arm.runs if run.status in FINISHED]


def group_arms(results: Sequence[RunResult]) -> list[Arm]:
    """The arms of a sweep: by context, by precision from fine to coarse, plain settings before variants."""
    groups: dict[str, list[RunResult]] = {}
    for result in {result.run_id: result for result in results}.values():
        groups.setdefault(json.dumps(setting(result), sort_keys=True), []).append(result)
    named = zip(_named([setting(group[0]) for group in groups.values()]), groups.values(), strict=True)
    arms = [replace(arm, runs=tuple(sorted(group, key=lambda run: (run.base_seed, run.seed)))) for arm, group in named]
    return sorted(arms, key=lambda arm: (_order(arm.context.values()), rank(arm.precision), arm.variant, arm.label))


def arm_names(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Method, precision and variant of the arms that cells with these configs make, as a table of them names them."""
    return list(dict.fromkeys(f"{a.method} {a.precision} {a.variant}".strip() for a in arms_of(configs)))


def arms_of(configs: Sequence[Mapping[str, Any]]) -> list[Arm]:
    """The arm, without its runs, of each of the cells with these configs."""
    found = [_setting(config) for config in configs]
    keys = [json.dumps(fields, sort_keys=True) for fields in found]
    settings = dict(zip(keys, found, strict=True))
    named = dict(zip(settings, _named(list(settings.values())), strict=True))
    return [named[key] for key in keys]


def _named(settings: Sequence[Fields]) -> list[Arm]:
    """The arms of different settings, in their order and without runs. Names follow from the settings, not from their
    order: where two values are equally common, that of the finest precision is the usual one, BF16 rollouts first."""
    plainest = sorted(settings, key=_plainness)
    names = _axes(plainest)
    usual, own, unsaid = _usual(plainest, names), _own_knobs(plainest, names), _unsaid(plainest, names)
    arms: list[Arm] = []
    for fields in settings:
        axes = {name: fields.get(name) for name in names}
        context = {name: value for name, value in axes.items() if name.startswith(CONTEXT)}
        method, precision = fields["method"], fields["precision.name"]
        plain = usual[precision] | _published(method, names)
        others = {name: value for name, value in axes.items() if name not in context and value != plain[name]}
        beside = unsaid[json.dumps(context)]
        others |= {name: fields.get(name) for name in beside if fields.get(name) != beside[name]}
        told = {name: v for name, v in others.items() if not name.startswith(KNOBS) or (method, name) in own}
        if fields.get(PARTS) and not any(name.startswith(KNOBS) for name in told):  # a knob names its part
            told |= {PARTS: fields[PARTS]}
        variant = label(told)
        arms.append(
            Arm(
                label=" ".join(filter(None, [method, precision, variant, label(context)])),
                method=method,
                precision=precision,
                axes=axes,
                fields=fields,
                context=context,
                variant=variant,
                is_plain=not any(name.startswith(METHOD_OWN) for name in told),
                runs=(),
            )
        )
    return arms


def arm_labels(results: Sequence[RunResult]) -> dict[str, str]:
    """Run id -> "method precision", with whatever else varies among `results`."""
    return {run.run_id: arm.label for arm in group_arms(results) for run in arm.runs}


def control_of(arm: Arm, arms: Sequence[Arm], method: str) -> Arm | None:
    """The arm of `method` whose settings are the arm's, but for those that are METHOD_OWN: at its precision if there is
    one, then with most shared settings. None where there is none."""
    alike = [other for other in arms if other.method == method and _beside_method(other) == _beside_method(arm)]

    def likeness(other: Arm) -> tuple[bool, int]:
        return other.precision == arm.precision, sum(other.axes[name] == value for name, value in arm.axes.items())

    return max(alike, key=likeness, default=None)


def _beside_method(arm: Arm) -> Fields:
    return {name: value for name, value in arm.fields.items() if not name.startswith(METHOD_OWN)}


def setting(result: RunResult) -> Fields:
    """The hashed fields of a run's config, dotted, without seeds, device and the recipe of the base."""
    return _setting(result.config)


def _setting(config: Mapping[str, Any]) -> Fields:
    return {
        name: value
        for name, value in flatten(identity(config)).items()
        if name not in (*SEEDS, DEVICE) and (not name.startswith(BASE) or name in BASE_TRAITS)
    }


def rank(precision: str) -> tuple[int, str]:
    """Sorting key of a precision: fine to coarse, an FP8 cache after the plain one, unknown names last."""
    plain = precision.removesuffix("+kv8")
    return (PRECISIONS.index(plain) if plain in PRECISIONS else len(PRECISIONS), precision)


def label(axes: Fields) -> str:
    """The axes in words, those without a value left out."""
    words: list[str] = []
    for name, value in axes.items():
        words += [] if value is None else [WORDS.get(name, f"{name.removeprefix(KNOBS)}={{}}").format(shown(value))]
    return " ".join(words)


def shown(value: Any) -> str:
    """A value of a field in words: a float without its trailing zeros, a list joined by +."""
    if isinstance(value, list):
        return "+".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def flatten(value: Any, prefix: str = "") -> Fields:
    """Nested dictionaries as one with dotted names."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    return {
        name: leaf
        for key, item in value.items()
        for name, leaf in flatten(item, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def _plainness(fields: Fields) -> tuple[tuple[int, str], bool, bool, str]:
    is_other = fields["method"] != CONTROL, fields.get("algo.mode") != AlgoConfig.mode
    return rank(fields["precision.name"]), *is_other, json.dumps(fields, sort_keys=True)


def _axes(settings: Sequence[Fields]) -> list[str]:
    """The fewest fields, in the order of FIRST, that tell apart all settings with equal method and precision, and of
    any two methods what is not their own: without that an arm and a control of other settings would look alike."""
    every = list(dict.fromkeys(FIRST) | {name: None for fields in settings for name in sorted(fields)})
    shared = [name for name in every if not name.startswith(METHOD_OWN)]
    names = _telling(settings, ["method", "precision.name"], every)[2:]
    possible = [fields for fields in settings if fields.get("trainer.lr") is not None]  # other cells are not resolved
    beside = _telling(possible, [name for name in names if name in shared], shared)
    return [name for name in every if name in (*names, *beside)]


def _telling(settings: Sequence[Fields], names: list[str], more: Sequence[str]) -> list[str]:
    """`names`, and as few of `more`, in their order, as tell apart what all of `more` do."""

    def num_told(names: Sequence[str]) -> int:
        return len({json.dumps([fields.get(name) for name in names]) for fields in settings})

    most = num_told(more)
    for name in more:
        if (told := num_told(names)) == most:
            break
        if num_told([*names, name]) > told:
            names = [*names, name]
    return names


def _usual(settings: Sequence[Fields], names: Sequence[str]) -> dict[str, Fields]:
    """Precision -> the usual value of every axis that sets no experiment: the most common one, but where some settings
    lack the field they have its default (`sparse` in the schema), and a label cannot name what is not there. Contexts
    are always written out. Fields of the precision itself, such as the weights' format, are counted within it. A
    method's usual parts are its own, which `parts=[]` stands for."""
    usual: dict[str, Fields] = {fields["precision.name"]: {} for fields in settings}
    for precision, found in usual.items():
        for name in names:
            if not name.startswith(CONTEXT):
                alike = [s for s in settings if not name.startswith(OF_PRECISION) or s["precision.name"] == precision]
                values = [json.dumps(fields.get(name)) for fields in alike]
                is_sparse = not name.startswith((OF_PRECISION, KNOBS)) and "null" in values
                found[name] = None if is_sparse else json.loads(max(values, key=values.count))
        found[PARTS] = []
    return usual


def _unsaid(settings: Sequence[Fields], names: Sequence[str]) -> dict[str, Fields]:
    """Experiment (its part of `names`, as JSON) -> the fields of TOLD that vary there within a method and are no axis,
    because another axis stands for them; each with its most common value, which needs no word."""
    experiments: dict[str, list[Fields]] = {}
    for fields in settings:
        context = {name: fields.get(name) for name in names if name.startswith(CONTEXT)}
        experiments.setdefault(json.dumps(context), []).append(fields)
    found: dict[str, Fields] = {place: {} for place in experiments}
    for place, inside in experiments.items():
        for name in (n for n in TOLD if n not in names):
            values = [(fields["method"], json.dumps(fields.get(name))) for fields in inside]
            if len(set(values)) > len({method for method, _ in values}):
                every = [value for _, value in values]
                found[place][name] = json.loads(max(every, key=every.count))
    return found


def _published(method: str, names: Sequence[str]) -> Fields:
    """The knobs among `names` of a method of ours, at the method's own settings: they need no word."""
    from harness.api import stated_knobs  # these load torch, which a reader of records may never need
    from methods import METHODS

    parts = METHODS[method].parts if method in METHODS else ()
    own = {f"{KNOBS}{type(part).__name__}": stated_knobs(part) for part in parts}
    return {name: own[part].get(name.rpartition(".")[2]) for name in names if (part := name.rpartition(".")[0]) in own}


def _own_knobs(settings: Sequence[Fields], names: Sequence[str]) -> set[tuple[str, str]]:
    """(method, knob) of the axes that are knobs and vary within the method: of any other its name says enough."""
    values: dict[tuple[str, str], set[str]] = {}
    for fields in settings:
        for name in (n for n in names if n.startswith(KNOBS)):
            values.setdefault((fields["method"], name), set()).add(json.dumps(fields.get(name)))
    return {place for place, found in values.items() if len(found) > 1}


def _order(values: Any) -> list[tuple[bool, float, str]]:
    """A sorting key for axis values: numbers by size, then words."""
    numbers = (int, float)
    return [(not isinstance(v, numbers), v if isinstance(v, numbers) else 0.0, str(v)) for v in values]
