"""Evaluate: every arm on every stored batch, against the exact sampler's step. One JSON record per sampler."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.api import stated_knobs
from harness.config.load import parse
from harness.config.schema import Launch, RunConfig
from harness.foundation.digits import significant
from harness.foundation.seeds import stable_seed
from harness.foundation.whole_file import write_atomic
from harness.objective.loss import MODES
from harness.objective.mismatch import ENTROPY_EDGES
from harness.run.build import build
from harness.studies.replay.arms import Arm, arms_of, pull
from harness.studies.replay.gradients import chunks, current_logp, gradients, move, pulls_of
from harness.studies.replay.moments import Reference, compare, off_diagonal, reference
from harness.studies.replay.sampling import load_policy
from harness.studies.replay.store import POLICY, REFERENCE, Stored, read, samplers
from harness.trainers.local.trainer import LocalTrainer

LENGTH_EDGES = (0.0, 0.25, 0.5, 0.75)
"""Lower edges of the buckets of response length, as shares of the limit."""
VERSION = 2


@dataclass(frozen=True, kw_only=True)
class Question:
    """Settings of an evaluation."""

    methods: tuple[str, ...] = ()
    modes: tuple[str, ...] = MODES[:1]
    ages: tuple[int, ...] = (0, 1)
    """Optimizer steps between the stored policy and the one that is updated: 0 or 1."""

    def __post_init__(self) -> None:
        if not self.ages or not set(self.ages) <= {0, 1}:
            raise ValueError(f"--ages={','.join(map(str, self.ages))}: valid are 0, 1 or 0,1")


@dataclass(frozen=True, kw_only=True)
class Target:
    """The exact sampler's gradients of one objective."""

    gradients: np.ndarray
    """[R, D] float64."""
    gram: np.ndarray
    """[R, R]."""
    summary: Reference

    @property
    def is_known(self) -> bool:
        """Do the batches tell its mean from 0?"""
        return off_diagonal(self.gram) > 0


NOISE = "{} batches do not tell its own exact step from 0 at age {}"


def evaluate_context(
    folder: Path, records: Path, question: Question, launch: Launch, progress: Callable[[str, float], None]
) -> dict[str, str]:
    """Write `records`/<context>-<sampler>.json for what has no record yet; returns skipped methods with reasons.

    `progress` is told (what, batches done). Raises ValueError for a damaged or incomplete store, and where a record of
    more methods would be replaced by one of fewer.
    """
    ref = read(folder, REFERENCE)
    config = parse(RunConfig, ref.meta["config"])
    arms, skipped = arms_of(config.algo, question.methods, question.modes)
    todo: dict[int, list[str]] = {}
    for age in sorted(question.ages):
        for name in samplers(folder):
            path = record_path(records, folder, name, age)
            if recorded(path).get("identity") != identity(arms, ref, read(folder, name), age):
                _check_kept(path, arms, skipped)
                todo.setdefault(age, []).append(name)
    if not todo:
        return skipped
    run, _ = build(config, launch)
    load_policy(run, read(folder, POLICY).tensors)
    for age in (0, 1):
        if age == 1 and age in todo:
            plain = targets(run.trainer, ref, arms[:1], False, lambda: progress("one step ahead", 1))
            move(run.trainer, torch.from_numpy(plain[config.algo.agg].gradients.mean(0)).float())
        if age not in todo:
            continue
        found = targets(run.trainer, ref, arms, bool(age), lambda age=age: progress(f"{REFERENCE}, age {age}", 1))
        noise = {arm.name: NOISE.format(ref.num_batches, age) for arm in arms if not found[arm.target].is_known}
        told = [arm for arm in arms if arm.name not in noise]
        for name in todo[age]:
            stored = read(folder, name)
            rows = evaluate_sampler(run.trainer, stored, told, found, age, partial(progress, f"{name}, age {age}"))
            record = {
                "identity": identity(arms, ref, stored, age), "context": folder.name, "age": age,
                "sampler": {k: v for k, v in stored.meta.items() if k != "config"}, "config": stored.meta["config"],
                "reference": {name: asdict(one.summary) for name, one in found.items() if one.is_known},
                "skipped": skipped | noise, "rows": rows,
            }  # fmt: skip
            text = json.dumps(significant(record, 5), separators=(",", ":"), allow_nan=False)
            lines = text.replace('{"arm"', '\n{"arm"') + "\n"
            write_atomic(record_path(records, folder, name, age), lines.encode())
    return skipped


def _check_kept(path: Path, arms: Sequence[Arm], skipped: Collection[str]) -> None:
    """Raises ValueError where the record at `path` has arms that are not asked for now."""
    known = {row["arm"] for row in recorded(path).get("rows", ())}
    if lost := known - {arm.name for arm in arms} - set(skipped):
        raise ValueError(
            f"{path} has {len(lost)} arms that --methods and --modes leave out, {min(lost)} among them; ask for all of "
            "them, or write into another folder by --results"
        )


def record_path(records: Path, folder: Path, sampler: str, age: int) -> Path:
    """Path of the record of one stored sampler at one age."""
    return records / f"{folder.name}-{sampler}-age{age}.json"


def identity(arms: Sequence[Arm], ref: Stored, stored: Stored, age: int) -> str:
    """Hash of everything that decides a record: the batches, the arms with their knobs, the age."""
    said = [[a.name, asdict(a.algo), [[type(p).__name__, stated_knobs(p)] for p in a.method.parts]] for a in arms]
    values = [VERSION, ref.meta["identity"], stored.meta["identity"], said, age]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def recorded(path: Path) -> dict[str, Any]:
    """A record; empty where there is none, and for a damaged one, which is written again."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def targets(
    trainer: LocalTrainer, ref: Stored, arms: Sequence[Arm], is_moved: bool, tick: Callable[[], None]
) -> dict[str, Target]:
    """`Arm.target` -> the gradients of `Arm.exact` on the exact sampler's batches; equal ones share their memory.

    Raises ValueError where the batches do not tell a plain step from 0.
    """
    logp = current_logp(trainer, ref, is_moved)
    wanted = {arm.target: replace(arm.exact, name=arm.target) for arm in arms}
    pulls = pulls_of(list(wanted.values()), ref, logp)
    pulled = {name: [one.grad for one in pulls.by_arm[name]] for name, first in pulls.same_as.items() if name == first}
    found: dict[str, Target] = {}
    for name, g in gradients(trainer, ref, pulled, tick).items():
        gram = (values := g.double().numpy()) @ values.T
        found[name] = Target(gradients=values, gram=gram, summary=reference(gram))
    if plain := [arm.target for arm in arms if not arm.has_objective and not found[pulls.same_as[arm.target]].is_known]:
        raise ValueError(f"reference {plain[0]}: {ref.num_batches} batches do not tell the gradient from 0; take more")
    return {name: found[first] for name, first in pulls.same_as.items()}


def evaluate_sampler(
    trainer: LocalTrainer, stored: Stored, arms: Sequence[Arm], found: dict[str, Target], age: int,
    tick: Callable[[float], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """One row per arm: what it did to the tokens, and where its gradient goes."""
    logp = current_logp(trainer, stored, bool(age))
    pulls = pulls_of(arms, stored, logp)
    goals: dict[str, dict[str, Target]] = {}
    firsts: dict[tuple[str, int], str] = {}
    for arm in arms:
        first, goal = pulls.same_as[arm.name], found[arm.target]
        goals.setdefault(first, {})[arm.target] = goal
        firsts.setdefault((first, id(goal)), arm.name)
    distinct = [name for name, first in pulls.same_as.items() if name == first]
    size = sum(p.numel() for p in trainer.parameters)
    measured: dict[tuple[str, str], dict[str, Any]] = {}
    groups = chunks(distinct, stored.num_batches, size)
    for group in groups:
        chosen = {name: [one.grad for one in pulls.by_arm[name]] for name in group}
        for name, g in gradients(trainer, stored, chosen, lambda: tick(1 / len(groups))).items():
            for target, goal in goals[name].items():
                rng = np.random.default_rng(stable_seed("replay moments", stored.meta["identity"], name))
                moments = compare(g.double().numpy(), goal.gradients, goal.gram, rng)
                measured[name, target] = _flat(asdict(moments))
    tokens = {agg: base_pulls(stored, plain) for agg, plain in {a.algo.agg: a.plain for a in arms}.items()}
    same = {arm.name: firsts[pulls.same_as[arm.name], id(found[arm.target])] for arm in arms}
    return [
        {
            "arm": arm.name, "method": arm.method.name, "mode": arm.algo.mode, "agg": arm.algo.agg,
            "target": arm.target, "same_as": "" if same[arm.name] == arm.name else same[arm.name],
            "reconstructed": arm.method.reconstructed,
            "loss": float(np.mean([one.loss for one in pulls.by_arm[arm.name]])),
            "clip_frac": float(np.mean([one.clip_frac for one in pulls.by_arm[arm.name]])),
            **token_statistics(stored, [one.grad for one in pulls.by_arm[arm.name]], tokens[arm.algo.agg]),
            **measured[pulls.same_as[arm.name], arm.target],
        }
        for arm in arms
    ]  # fmt: skip


def base_pulls(stored: Stored, plain: Arm) -> list[Tensor]:
    """Pulls of the plain policy gradient at the stored policy, the unit of effective weights."""
    return [
        pull(plain, batch, batch.old_logp, stored.meta["max_new_tokens"]).grad
        for batch in (stored.batch(b) for b in range(stored.num_batches))
    ]


def token_statistics(stored: Stored, grads: Sequence[Tensor], base: Sequence[Tensor]) -> dict[str, Any]:
    """Effective weights: an arm's pull over that of the plain policy gradient, on tokens with an advantage.

    Ratio, truncation, rejection and clipping are all in it. `rejected` is the share with no pull at all, by length of
    the response and by entropy of the token as well (NaN where a bucket is empty).
    """
    g, plain = torch.cat([x.flatten() for x in grads]).double(), torch.cat([x.flatten() for x in base]).double()
    used = plain != 0
    names = ("weight_mean", "weight_std", "weight_min", "weight_max", "weight_p99", "ess", "rejected")
    if not used.any():
        return dict.fromkeys(names, math.nan) | {"rejected_by_length": [], "rejected_by_entropy": []}
    weight = (g[used] / plain[used]).numpy()
    lengths = stored.tensors["sampled"].sum(1, keepdim=True).expand(stored.tensors["sampled"].shape).flatten()[used]
    share = lengths.numpy() / stored.meta["max_new_tokens"]
    entropy = stored.tensors["entropy"].flatten()[used].numpy()
    square = float((weight**2).mean())
    return {
        "weight_mean": float(weight.mean()),
        "weight_std": float(weight.std()),
        "weight_min": float(weight.min()),
        "weight_max": float(weight.max()),
        "weight_p99": float(np.quantile(weight, 0.99)),
        "ess": float(weight.mean()) ** 2 / square if square > 0 else math.nan,
        "rejected": float((weight == 0).mean()),
        "rejected_by_length": _by_bucket(weight == 0, share, LENGTH_EDGES, right=True),
        "rejected_by_entropy": _by_bucket(weight == 0, entropy, ENTROPY_EDGES, right=False),
    }


def _by_bucket(is_rejected: np.ndarray, values: np.ndarray, edges: Sequence[float], right: bool) -> list[float]:
    """Share rejected in every bucket; `right` puts a value on an edge into the bucket below."""
    index = np.digitize(values, edges[1:], right=right)
    counts = np.bincount(index, minlength=len(edges))
    hits = np.bincount(index, weights=is_rejected, minlength=len(edges))
    return [float(h / n) if n else math.nan for h, n in zip(hits, counts, strict=True)]


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Intervals as name, name_low, name_high."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= {name: value["value"], f"{name}_low": value["low"], f"{name}_high": value["high"]}
        else:
            flat[name] = value
    return flat
