"""From a configuration to a runnable method: merge plans, fold hooks, refuse what cannot work before anything starts.

A method is its parts composed left to right. `plan` merges (differing opinions are errors), `token_loss` may come from
one part, `after_sync` has an effect, everything else maps a value to a value of its own type.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from math import inf, prod
from typing import Any

import torch
from torch import Tensor, nn

from harness.api import (
    Correction,
    Memory,
    Method,
    Part,
    Passport,
    Plan,
    RolloutEngine,
    Sampler,
    Sequences,
    Step,
    TokenBatch,
    WeightStream,
    linear_setters,
    sample_counts,
    sampler_plans,
    weight_format,
)
from harness.config.resolve import choose_parts, fixed_algo, rollout_plan, trainer_of
from harness.config.schema import AlgoConfig, RunConfig, TrainerConfig
from harness.foundation.did_you_mean import nearest
from harness.numerics.formats import Format, at_rollout, format_named
from harness.numerics.grids import bits_of, grid_of
from harness.numerics.rounding import CASTS
from methods import method_named

APART = ("exceptions", "adapters", "samplers")
"""Fields of a plan that are more than the name of a format."""
CORRECTED = tuple(field.name for field in fields(Correction))
FIRST = Step(index=0, total=1, seed=0)
"""The step by which parts are asked what they need before anything runs."""


@dataclass(frozen=True, kw_only=True)
class Composed:
    """A method ready to run: its parts, the merged plan, and what the parts keep between steps."""

    method: Method
    plan: Plan
    parts: tuple[Part, ...]
    fixed: dict[str, Tensor]
    """Prepared tensors of all parts; filled by `harness.start.prepare`, updated by `refit`."""
    memory: list[Memory]
    """One memory per part; logged and checkpointed."""

    def memory_row(self) -> dict[str, float]:
        """The parts' memory as columns `part/<Part>.<name>` of a step's row."""
        pairs = zip(self.parts, self.memory, strict=True)
        return {f"part/{type(part).__name__}.{name}": x for part, memory in pairs for name, x in memory.items()}

    def wrap(self, model: nn.Module) -> nn.Module:
        """Fold `Part.wrap`."""
        for part in self.parts:
            model = _returned(part, "wrap", part.wrap(model, self.plan, self.fixed), nn.Module)
        return model

    def lr_factor(self, name: str) -> float:
        """Product of every `Part.lr_factor`."""
        return prod(part.lr_factor(name) for part in self.parts)

    @contextmanager
    def during_update(self, model: nn.Module, step: Step, number: int) -> Iterator[None]:
        """Context of every `Part.during_update`."""
        with ExitStack() as entered:
            for part in self.parts:
                entered.enter_context(part.during_update(model, step, number))
            yield

    def update_lr_factor(self, b: TokenBatch) -> float:
        """Product of every `Part.update_lr_factor`. Raises ValueError for one that is no factor."""
        product = 1.0
        for part, memory in zip(self.parts, self.memory, strict=True):
            factor = part.update_lr_factor(b, memory)
            if not 0.0 <= factor < inf:
                raise ValueError(
                    f"{type(part).__name__}.update_lr_factor={factor}: a finite factor from 0 on is needed"
                )
            product *= factor
        return product

    def needs(self, step: Step) -> frozenset[str]:
        """Union of every `Part.needs`."""
        return frozenset[str]().union(*(part.needs(step) for part in self.parts))

    def sync(self, weights: WeightStream, step: Step) -> WeightStream:
        """Fold `Part.sync`. The stream raises RuntimeError at a weight that a part puts on a coarser grid than its plan
        has there: no passport would show it."""
        for part, memory in zip(self.parts, self.memory, strict=True):
            if has_hook(part, "sync"):
                weights = self._watched(part, weights, step, memory)
        return weights

    def _watched(self, part: Part, weights: WeightStream, step: Step, memory: Memory) -> WeightStream:
        """A part's stream, with every matrix that it changes looked at."""
        before = dict[str, Tensor]()

        def read() -> WeightStream:
            for name, tensor in weights:
                before[name] = tensor
                yield name, tensor

        stream = part.sync(read(), step, self.plan, self.fixed, memory)
        for name, tensor in _returned(part, "sync", stream, Iterable):
            old = before.pop(name, None)
            if tensor.dim() == 2 and old is not None and old is not tensor and not torch.equal(old, tensor):
                planned = weight_format(self.plan, name)
                if (grid := grid_of(tensor, bits_of(planned))) is not None:
                    raise RuntimeError(
                        f"{type(part).__name__}.sync puts {name} on a grid ({grid}), planned "
                        f"{'16 bits' if planned is None else planned.name}: declare the format in the part's plan "
                        "(rollout_weights or exceptions), so that the passport shows it"
                    )
            yield name, tensor

    def after_sync(self, engine: RolloutEngine, prompts: Sequence[Sequence[int]]) -> None:
        """Run every `Part.after_sync`."""
        for part in self.parts:
            part.after_sync(engine, prompts)

    def refit(self, model: nn.Module, seqs: Sequences, batch: TokenBatch, step: Step) -> None:
        """Run every `Part.refit`; the tensors it returns replace those of their names."""
        for part, memory in zip(self.parts, self.memory, strict=True):
            self.fixed.update(part.refit(model, seqs, batch, step, self.plan, self.fixed, memory) or {})

    def correct(self, c: Correction, b: TokenBatch) -> Correction:
        """Fold `Part.correct`."""
        for part, memory in zip(self.parts, self.memory, strict=True):
            c = _corrected(part, "correct", part.correct(c, b, memory), c)
        return c

    def correct_update(self, c: Correction, logp: Tensor, b: TokenBatch) -> Correction:
        """Fold `Part.correct_update`; `logp` is detached."""
        for part, memory in zip(self.parts, self.memory, strict=True):
            c = _corrected(part, "correct_update", part.correct_update(c, logp, b, memory), c)
        return c

    def token_loss(self) -> Part | None:
        """The one part that replaces the objective, or None."""
        return next((p for p in self.parts if has_hook(p, "token_loss")), None)


OUTSIDE_LOSS = (
    "plan", "prepare", "wrap", "lr_factor", "update_lr_factor", "during_update", "sync", "after_sync", "refit",
)  # fmt: skip
"""Hooks that act elsewhere than on the loss of given tokens: a part that corrects and does nothing else has none."""


def has_hook(part: Part, hook: str) -> bool:
    """True where the part's class overrides the hook."""
    return getattr(type(part), hook) is not getattr(Part, hook)


def own_hooks(part: Part) -> frozenset[str]:
    """Names of the hooks that the part's class overrides, but for what it says of itself."""
    hooks = {name for name, value in vars(Part).items() if callable(value) and not name.startswith("_")}
    return frozenset(hook for hook in hooks - {"needs", "idle", "check"} if has_hook(part, hook))


def _returned(part: Part, hook: str, value: Any, kind: type) -> Any:
    """The value that a part's hook returned. Raises ValueError, one line, where it is of another type."""
    if not isinstance(value, kind):
        found = "None" if value is None else f"a {type(value).__name__}"
        hint = "; is a `return` missing?" if value is None else ""
        raise ValueError(f"{type(part).__name__}.{hook} returned {found}; expected {kind.__name__}{hint}")
    return value


def _corrected(part: Part, hook: str, value: Any, before: Correction) -> Correction:
    """The correction that a part's `correct` or `correct_update` made of the one before. Raises ValueError, one line,
    where it is no `Correction` whose fields are tensors of the batch's shape, and for a weight of a part that has not
    said that it sets one: composition would let another part set it, too."""
    c: Correction = _returned(part, hook, value, Correction)
    for name in CORRECTED:
        field = getattr(c, name)
        if field is None and name == "adv_shift":
            continue
        if not isinstance(field, Tensor) or field.shape != before.keep.shape:
            found = f"shape {[*field.shape]}" if isinstance(field, Tensor) else f"a {type(field).__name__}"
            raise ValueError(
                f"{type(part).__name__}.{hook} returned a Correction whose {name} is {found}; "
                f"expected a tensor of shape {[*before.keep.shape]} (responses, tokens)"
            )
    if c.weight is not before.weight and not part.sets_weight:
        raise ValueError(f"{type(part).__name__}.{hook} sets the weight; say sets_weight = True in the part")
    return c


def merge(plans: Sequence[tuple[str, Plan]]) -> Plan:
    """One plan from (owner, plan) pairs. Raises ValueError where two owners have different opinions."""
    chosen: dict[str, tuple[str, Any]] = {}
    exceptions: dict[str, tuple[str, Format | None]] = {}
    for owner, plan in plans:
        for f in fields(Plan):
            value = getattr(plan, f.name)
            if f.name == "exceptions":
                for pattern, fmt in value:
                    other, previous = exceptions.setdefault(pattern, (owner, fmt))
                    if previous != fmt:
                        raise ValueError(f"{owner} and {other} disagree on the format of {pattern}")
            elif value is not None:
                other, previous = chosen.setdefault(f.name, (owner, value))
                if previous != value:
                    names = [getattr(v, "name", v) for v in (previous, value)]
                    raise ValueError(f"{other} wants {f.name}={names[0]}, {owner} wants {names[1]}")
    pairs = tuple((pattern, fmt) for pattern, (_, fmt) in exceptions.items())
    return Plan(**{name: value for name, (_, value) in chosen.items()}, exceptions=pairs)


def compose(config: RunConfig) -> Composed:
    """Build the method of a config and merge its plan with the precision's. Raises ValueError on any conflict."""
    method, parts = method_named(config.method), choose_parts(config)
    rollout = rollout_plan(config.precision)
    if config.precision.name.removesuffix("+kv8") not in {name.removesuffix("+kv8") for name in method.precisions}:
        hint = nearest(config.precision.name, method.precisions)
        if not parts and rollout.rollout_weights is not None and rollout.rollout_weights.tile is not None:
            hint += "; method=naive samples in it without a correction"
        raise ValueError(f"precision={config.precision.name}: method {method.name} cannot use it; {hint}")
    compute = trainer_of(config, parts).compute
    owners = [
        (f"precision {config.precision.name}", rollout),
        *((type(p).__name__, _returned(p, "plan", p.plan(rollout), Plan)) for p in parts),
    ]
    if compute is not None:
        owners.append((f"trainer.compute={compute}", Plan(train_compute=format_named(compute))))
    plan = merge(owners)
    composed = Composed(method=method, plan=plan, parts=parts, fixed={}, memory=[{} for _ in parts])
    _check_parts(replace(config, algo=fixed_algo(method, config.algo)), composed)
    return composed


def advice(config: RunConfig, composed: Composed) -> list[str]:
    """Remarks on settings that are allowed and change nothing, one line each. `config`: as it was given, before the
    method's own settings take the place of its."""
    algo, method = config.algo, composed.method
    updates, remarks = algo.num_updates, list[str]()
    for part in composed.parts:
        name, needs, hooks = type(part).__name__, part.needs(FIRST), own_hooks(part)
        if updates < part.needs_updates:
            remarks.append(
                f"{name} changes nothing below {part.needs_updates} updates per rollout batch, this run has {updates}: "
                "raise algo.num_minibatches or algo.num_epochs"
            )
        if config.trainer.steps < part.needs_steps:
            remarks.append(
                f"{name} changes nothing below {part.needs_steps} steps, this run has {config.trainer.steps}: raise "
                "trainer.steps"
            )
        if hooks and hooks <= part.idle(composed.plan):
            remarks.append(f"{name} changes nothing at precision={config.precision.name}")
        if "allowed_ids" in needs and config.engine.top_p == 1.0:
            remarks.append(f"{name} changes nothing at engine.top_p=1: the sampler may draw every token")
        if "version" in needs and not (algo.staleness or algo.partial_rollouts):
            remarks.append(f"{name} goes by the age of tokens, which are all new: raise algo.staleness or "
                           "algo.partial_rollouts")  # fmt: skip
        if has_hook(part, "token_loss") and algo.loss != "ppo":
            remarks.append(f"algo.loss={algo.loss} changes nothing: {name} replaces the objective")
    if composed.token_loss() is None and algo.loss == "gspo":
        if (method.mode or algo.mode) == "bypass_pg":
            remarks.append("algo.loss=gspo changes nothing: algo.mode=bypass_pg is the plain policy gradient")
        elif algo.agg not in ("seq-mean-token-mean", AlgoConfig.agg):
            remarks.append(f"algo.agg={algo.agg} changes nothing: algo.loss=gspo is defined with seq-mean-token-mean")
    if algo.batch_normalize != "none" and not any(part.sets_weight for part in composed.parts):
        remarks.append(
            f"algo.batch_normalize={algo.batch_normalize} changes nothing: no part of {method.name} sets weights"
        )
    for key in ("agg", "denom"):
        given, fixed = getattr(algo, key), getattr(method, key)
        if fixed is not None and given not in (fixed, getattr(AlgoConfig, key)):
            remarks.append(f"algo.{key}={given} changes nothing: method {method.name} is defined with {fixed}")
    return remarks + _schedule_advice(config.trainer, config.trainer.steps * updates)


def _schedule_advice(trainer: TrainerConfig, total: int) -> list[str]:
    """Remarks on settings of the learning rate that change nothing in a run of `total` updates (the rate of each is
    `harness.trainers.local.trainer.schedule`)."""
    warmup, remarks = trainer.warmup_steps, list[str]()
    if trainer.schedule == "constant":
        if trainer.min_lr_ratio:
            remarks.append(f"trainer.min_lr_ratio={trainer.min_lr_ratio:g} changes nothing: trainer.schedule=constant "
                           "never falls")  # fmt: skip
        if warmup == 1:
            remarks.append("trainer.warmup_steps=1 changes nothing: the first update has the whole rate")
    elif total <= warmup + 1:
        remarks.append(
            f"trainer.schedule={trainer.schedule} changes nothing: of {total} updates {min(warmup, total)} are warm-up"
        )
    return remarks


def _check_parts(config: RunConfig, composed: Composed) -> None:
    """Conflicts between parts, and between parts and the algorithm."""
    parts, plan = composed.parts, composed.plan
    for part in parts if config.model.path is not None else ():
        if missing := [name for name in part.tuned if name not in config.knobs.get(type(part).__name__, {})]:
            name = f"knobs.{type(part).__name__}.{missing[0]}"
            raise ValueError(f"{name}={getattr(part, missing[0])} suits the models made here; give {name} for yours")
    for what, owners in (
        ("set the correction weight", [p for p in parts if p.sets_weight]),
        ("set the upper clip", [p for p in parts if p.sets_clip]),
        ("set the trainer's linear layers", linear_setters(parts, plan)),
        ("replace the objective", [p for p in parts if has_hook(p, "token_loss")]),
    ):
        if len(owners) > 1:
            raise ValueError(f"parts {' and '.join(type(p).__name__ for p in owners)} both {what}; choose one")
    for part in parts:
        for key, valid in (("mode", part.modes), ("loss", part.losses)):
            if valid and getattr(config.algo, key) not in valid:
                raise ValueError(
                    f"algo.{key}={getattr(config.algo, key)}: {type(part).__name__} needs {' or '.join(valid)}"
                )
    adapters = plan.adapters
    shadowed = [type(p).__name__ for p in parts if "shadow" in p.needs(FIRST)]
    if shadowed and adapters is not None and adapters.is_trained:
        raise ValueError(f"{shadowed[0]} needs an unquantized forward, which trained adapters do not have")
    weighting = [type(p).__name__ for p in parts if p.sets_weight]
    if config.algo.mode == "bypass_ppo" and weighting:
        raise ValueError(
            f"algo.mode=bypass_ppo: the ratio already has the rollout policy in it, so the weight of {weighting[0]} "
            "would count it twice; valid: decoupled, bypass_pg"
        )
    if config.algo.mode != "decoupled" and config.algo.loss not in ("ppo", "gspo"):
        raise ValueError(f"algo.mode={config.algo.mode} with algo.loss={config.algo.loss}; valid losses: gspo, ppo")
    if plan.samplers:
        _check_samplers(config, composed)
    if plan.sampler == "trainer" and config.precision.kv is not None:
        raise ValueError(f"precision={config.precision.name}: method {composed.method.name} samples without a cache")
    if config.engine.top_p != 1.0 and "allowed_ids" not in composed.needs(FIRST):
        raise ValueError(
            f"engine.top_p={config.engine.top_p}: truncated sampling is not what is scored; valid: 1.0, or a part that "
            "keeps the sampling mask (keep_sampling_mask.KeepSamplingMask)"
        )
    if not 1 <= config.algo.num_minibatches <= config.algo.num_prompts:
        raise ValueError(f"algo.num_minibatches={config.algo.num_minibatches}: must be 1 to num_prompts")


def _check_samplers(config: RunConfig, composed: Composed) -> None:
    """Raises ValueError for samplers of a batch that cannot be told apart or served, and for what is made for the
    plan's own formats but would reach every one of them."""
    plan, name = composed.plan, composed.method.name
    samplers = plan.samplers or ()
    sample_counts(plan, config.algo.group_size)
    names = [config.precision.name, *(s.name for s in samplers)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"precision={config.precision.name}: two samplers of a batch are called {twice}")
    if plan.sampler == "trainer":
        raise ValueError(f"method {name}: the trainer's own module is the one sampler of a batch")
    shared = {
        f"exceptions: {pattern} as {fmt.name}": fmt.tile is not None for pattern, fmt in plan.exceptions if fmt
    } | {
        "adapters that make up for its rounding": plan.adapters is not None and not plan.adapters.is_trained,
        "a second pass over its inputs": (
            plan.residual is not None and any(s.acts is None or s.acts.tile is None for s in samplers)
        ),
    }
    for what in (words for words, is_made in shared.items() if is_made):
        raise ValueError(
            f"method {name}: {what} would reach every sampler of a batch, but is made for precision "
            f"{config.precision.name} alone; leave out the part with it, or that with the samplers"
        )


def check_supported(composed: Composed, supports: frozenset[str], engine: str, extras: frozenset[str]) -> None:
    """Raises ValueError, one line, for what the backend cannot do: formats the engine lacks, batch extras the trainer
    cannot compute."""
    plan = composed.plan
    wanted = {
        f"{name}:{fmt.name}"
        for each in sampler_plans(plan)
        for name in ("rollout_weights", "rollout_acts", "rollout_kv")
        if (fmt := getattr(each, name)) is not None
    }
    if plan.samplers:
        wanted.add("samplers")
    wanted |= {"allowed_ids", "routing"} & composed.needs(FIRST)
    wanted |= {f"rollout_weights:{fmt.name}" for _, fmt in plan.exceptions if fmt is not None}
    wanted.add(f"sampler:{plan.sampler or 'cached'}")
    if at_rollout(plan.adapters) is not None:
        wanted.add("adapters")
    if plan.residual is not None:
        wanted.add("residual")
    if missing := sorted(wanted - supports):
        raise ValueError(f"engine={engine}: cannot do {', '.join(missing)} of method {composed.method.name}")
    for part in composed.parts:
        if lacking := sorted(part.needs(FIRST) - extras):
            raise ValueError(f"{type(part).__name__} needs {', '.join(lacking)}; the trainer offers {sorted(extras)}")


def check_passport(plan: Plan, passport: Passport) -> None:
    """The realized plan must be the planned one. Raises RuntimeError naming the first tensor that is not, and for a
    passport that lists no weights or no inputs."""
    listed = {"weights": passport.weights, "inputs": passport.acts}
    wrong = [f"the passport lists no {what}" for what, found in listed.items() if not found]
    if (adapters := at_rollout(plan.adapters)) is not None:
        held = {record.name for record in passport.weights}
        targets = [r.name for r in passport.weights if r.name.endswith(tuple(f"{t}.weight" for t in adapters.targets))]
        lost = [name for name in targets if f"{name.removesuffix('weight')}lora_A.weight" not in held]
        wrong += [f"{name} has no adapter, planned rank {adapters.rank}" for name in lost]
    if plan.residual is not None and not any(r.name.endswith(".residual_channels") for r in passport.weights):
        wrong.append(f"no input gets a second pass, planned for {plan.residual:g} of the channels")
    if plan.residual_alpha is not None and passport.state.get("residual_alpha") != [plan.residual_alpha]:
        wrong.append(f"the second pass counts {passport.state.get('residual_alpha')}, planned {plan.residual_alpha:g}")
    for record in passport.weights:
        fmt = weight_format(plan, record.name)
        is_plain = record.format in CASTS or record.name.endswith(".residual_channels")
        is_right = is_plain if fmt is None else record.format == fmt.name
        if not is_right:
            wrong.append(f"{record.name} is {record.format}, planned {'not quantized' if fmt is None else fmt.name}")
    acts = plan.rollout_acts.name if plan.rollout_acts is not None else None
    for name, realized in passport.acts.items():
        planned = acts if weight_format(plan, name) is not None else None
        is_right = realized in CASTS if planned is None else realized == planned
        if not is_right:
            wrong.append(f"inputs of {name} are {realized}, planned {planned or 'not quantized'}")
    kv = plan.rollout_kv.name if plan.rollout_kv is not None else None
    if passport.kv != kv:
        wrong.append(f"the KV cache is {passport.kv or 'not quantized'}, planned {kv or 'not quantized'}")
    if passport.sampler != (plan.sampler or "cached"):
        wrong.append(f"the sampler is {passport.sampler}, planned {plan.sampler or 'cached'}")
    if wrong:
        raise RuntimeError(f"a format did not take effect: {wrong[0]} ({len(wrong)} differences)")


def plan_json(plan: Plan) -> dict[str, Any]:
    """A plan by format names, for records and tables."""
    left_out = APART if plan.residual_alpha is not None else (*APART, "residual_alpha")
    named = {f.name: getattr(plan, f.name) for f in fields(Plan) if f.name not in left_out}
    values: dict[str, Any] = {name: getattr(value, "name", value) for name, value in named.items()}
    adapters = plan.adapters
    values["adapters"] = None if adapters is None else vars(adapters) | {"targets": list(adapters.targets)}
    values["exceptions"] = {pattern: None if fmt is None else fmt.name for pattern, fmt in plan.exceptions}
    if plan.samplers:
        values["samplers"] = [
            {f.name: getattr(value := getattr(s, f.name), "name", value) for f in fields(Sampler)}
            for s in plan.samplers
        ]
    return values
