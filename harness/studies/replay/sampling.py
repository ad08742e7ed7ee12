"""Collect: one policy, sampled exactly and in every format, with the prompts and random numbers of a batch shared."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from harness.api import Step
from harness.config.load import load, run_id, to_json
from harness.config.resolve import resolve
from harness.config.schema import Launch, RunConfig
from harness.engines.embedded.engine import EmbeddedEngine
from harness.foundation import provenance
from harness.foundation.did_you_mean import nearest
from harness.foundation.seeds import stable_seed
from harness.models.decoder import Decoder
from harness.objective.mismatch import METRIC_CAP, mismatch_metrics
from harness.run.build import build
from harness.run.collect import advantages, next_items, sequences
from harness.run.loop import grpo_step, push_weights
from harness.run.run import Run
from harness.studies.replay.store import CONTROL, POLICY, REFERENCE, Stored, joined, read, read_meta, write
from harness.trainers.stopping import stopped
from methods import METHODS

MIN_BATCHES = 8
"""Fewer batches give no usable interval."""
EXACT = "fp32"
CARRIERS = ("naive", "bf16")
"""Methods without parts that roll out in low and in high precision."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Batches to collect: contexts, samplers, numbers."""

    overrides: tuple[str, ...]
    precisions: tuple[str, ...]
    lengths: tuple[int, ...]
    """Values of task.n; empty: the one of the overrides."""
    num_prompts: int
    """Per sampler; a whole number of batches."""
    reference_factor: int = 4
    """Factor by which the reference gets more prompts."""
    warmup: int = 0
    """Steps of training with BF16 rollouts before the policy is fixed."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """One model and length: where its files are, and the config of every sampler."""

    folder: Path
    configs: dict[str, RunConfig]
    num_batches: int
    num_reference: int
    warmup: int

    def samplers(self) -> list[tuple[str, RunConfig, int]]:
        """(file name, config, batches), the reference first."""
        first = next(iter(self.configs.values()))
        exact = [(REFERENCE, first, self.num_reference), (CONTROL, first, self.num_batches)]
        return exact + [(name, config, self.num_batches) for name, config in self.configs.items()]


def plan(demand: Demand, out: Path) -> list[Context]:
    """Contexts that `demand` stands for. Raises ValueError, one line, for anything that cannot work."""
    for word in demand.overrides:
        if word.partition("=")[0].lstrip("+~") in ("method", "precision", "parts"):
            raise ValueError(f"override {word!r}: collecting has no method, and --precisions names the formats")
    if demand.warmup < 0:
        raise ValueError(f"--warmup={demand.warmup}: 0 or more steps are expected")
    if not demand.precisions:
        raise ValueError("--precisions: at least one format is needed")
    found: list[Context] = []
    for length in demand.lengths or (None,):
        words = [*demand.overrides, *([] if length is None else [f"task.n={length}"])]
        configs = {name: config_at(name, words) for name in demand.precisions}
        config = next(iter(configs.values()))
        batches, rest = divmod(demand.num_prompts, config.algo.num_prompts)
        if rest or batches < MIN_BATCHES:
            raise ValueError(
                f"--prompts={demand.num_prompts}: batches have algo.num_prompts={config.algo.num_prompts} prompts and "
                f"at least {MIN_BATCHES} are needed; give a multiple, {MIN_BATCHES * config.algo.num_prompts} or more"
            )
        if config.algo.dynamic_sampling:
            raise ValueError("algo.dynamic_sampling=true: every sampler must have the same prompts; valid: false")
        if config.algo.entropy_coef or config.algo.kl_coef:
            raise ValueError("algo.entropy_coef, algo.kl_coef: replay compares corrections alone; valid: 0")
        name = f"{config.model.name}-{config.task.name}{config.task.n or ''}"
        found.append(
            Context(
                folder=out / name, configs=configs, num_batches=batches,
                num_reference=batches * demand.reference_factor, warmup=demand.warmup,
            )
        )  # fmt: skip
    return found


def config_at(precision: str, overrides: Sequence[str], carriers: Sequence[str] = CARRIERS) -> RunConfig:
    """The run that samples in `precision` and corrects nothing, by the first of the methods `carriers` that offers it.
    Raises ValueError for an unknown precision."""
    offered = {p: name for name in reversed(carriers) for p in METHODS[name].precisions}
    carrier = offered.get(precision.removesuffix("+kv8"))
    if carrier is None:
        raise ValueError(f"--precisions={precision}: unknown; {nearest(precision, offered)}")
    return resolve(load([*overrides, f"method={carrier}", f"precision={precision}"]))


def missing(context: Context) -> list[tuple[str, RunConfig, int]]:
    """Those of a context's samplers whose batches are not stored yet. Raises ValueError where its folder holds batches
    of another policy or configuration."""
    return [one for one in context.samplers() if not _is_stored(context, one[0], one[1])]


def collect_context(context: Context, launch: Launch, on_batch: Callable[[str], None]) -> int:
    """Sample what is not stored yet; returns the number of files written. `on_batch` is called after every batch.

    Raises ValueError where the folder holds batches of another policy or configuration.
    """
    todo = missing(context)
    weights = _policy(context, launch) if todo else {}
    for name, config, count in todo:
        run, initial = _run(config, launch, weights)
        run.step = context.warmup
        parts: list[dict[str, Tensor]] = []
        for index in range(count):
            parts.append(sample(run, initial, name, index))
            on_batch(name)
        tensors = joined(parts, run.task.pad_id)
        write(context.folder, name, Stored(tensors=tensors, meta=_meta(context, name, config, tensors, run)))
    return len(todo)


def identity(context: Context, name: str, config: RunConfig) -> str:
    """Hash of everything that decides the batches of a file."""
    is_exact = name in (REFERENCE, CONTROL, POLICY)  # the format of the config that carries an exact sampler is idle
    config = exact_config(config) if is_exact else config
    values = [run_id(config), context.num_reference if name == REFERENCE else context.num_batches, context.warmup, name]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def _is_stored(context: Context, name: str, config: RunConfig) -> bool:
    meta = read_meta(context.folder, name)
    if meta is not None and meta["identity"] != identity(context, name, config):
        raise ValueError(f"{context.folder / name}: made with other settings; delete it or give another --out")
    return meta is not None


def exact_config(config: RunConfig) -> RunConfig:
    """A run's config with BF16 rollouts: what warms up the policy."""
    carrier = CARRIERS[1]
    return replace(config, method=carrier, precision=load([f"method={carrier}", "precision=bf16"]).precision)


def _policy(context: Context, launch: Launch) -> dict[str, Tensor]:
    """The weights that everything is sampled from: stored, or the base after the warm-up."""
    config = exact_config(next(iter(context.configs.values())))
    if _is_stored(context, POLICY, config):
        return read(context.folder, POLICY).tensors
    run, hashes = build(config, launch)
    for _ in range(context.warmup):
        grpo_step(run)
        run.step += 1
    weights = {name: tensor.detach().clone().contiguous() for name, tensor in run.trainer.weights()}
    write(context.folder, POLICY, Stored(tensors=weights, meta={
        "identity": identity(context, POLICY, config), "hashes": hashes, "warmup": context.warmup,
        "weights_hash": provenance.tensors_hash(iter(weights.items())),
    }))  # fmt: skip
    return weights


def _run(config: RunConfig, launch: Launch, weights: dict[str, Tensor]) -> tuple[Run, Decoder | None]:
    """(a run whose trainer and engines hold the policy, the model before the warm-up where that is another)."""
    run, _ = build(config, launch)
    initial = copy.deepcopy(run.trainer.model).requires_grad_(False)
    is_moved = any(not torch.equal(tensor, weights[name]) for name, tensor in run.trainer.weights())
    load_policy(run, weights)
    for engine in (run.engine, run.reference):
        cast(EmbeddedEngine, engine).keeps_log_probs = True
    push_weights(run, Step(index=0, total=config.trainer.steps, seed=config.seed))
    run.reference.load_weights(run.trainer.weights())
    return run, initial if is_moved else None


def load_policy(run: Run, weights: dict[str, Tensor]) -> None:
    """Copy stored weights into the trainer. Raises ValueError where they are another model's."""
    own = dict(run.trainer.weights())
    if {k: v.shape for k, v in own.items()} != {k: v.shape for k, v in weights.items()}:
        raise ValueError("the stored policy does not fit the model of the configuration")
    for name, tensor in own.items():
        tensor.copy_(weights[name])


def sample(run: Run, initial: Decoder | None, name: str, index: int) -> dict[str, Tensor]:
    """The tensors of batch `index` of sampler `name`: prompts index * P to (index + 1) * P after those of the warm-up.

    Rewards, advantages and masks by the rules of the training loop.
    """
    algo, trainer = run.config.algo, run.trainer
    engine = run.reference if name in (REFERENCE, CONTROL) else run.engine
    run.next_prompt = (run.step + index) * algo.num_prompts
    items = [item for item in next_items(run) for _ in range(algo.group_size)]
    rollout = engine.generate(
        [item.prompt for item in items[:: algo.group_size]],
        num_samples=algo.group_size,
        max_new_tokens=run.max_new_tokens,
        temperature=run.config.engine.temperature,
        seed=stable_seed(run.config.seed, "replay", CONTROL if name == CONTROL else "shared", index),
    )
    rollout = stopped(rollout, run.task)
    found = run.task.score(items, rollout.responses())
    seqs = sequences(items, rollout, run.task.pad_id, trainer.parameters[0].device)
    mask, adv, _ = advantages(run, found, rollout, seqs.sampled)
    scores, lens, device = trainer.score(seqs), seqs.prompt_lens, seqs.ids.device
    assert rollout.log_probs is not None
    return {
        "ids": seqs.ids, "token_ids": seqs.token_ids, "sampled": seqs.sampled, "mask": mask,
        "prompt_lens": torch.full((len(items),), lens) if isinstance(lens, int) else lens,
        "adv": adv[:, 0], "reward": torch.tensor([s.reward for s in found]), "truncated": rollout.truncated,
        "rollout_logp": rollout.logp.to(device), "old_logp": scores.logp, "entropy": scores.entropy,
        "ref_logp": scores.logp if initial is None else trainer.score(seqs, model=initial).logp,
        "rollout_kl": trainer.divergences(seqs, rollout.log_probs.to(device))["rollout_kl"],
    }  # fmt: skip


def _meta(context: Context, name: str, config: RunConfig, tensors: dict[str, Tensor], run: Run) -> dict[str, Any]:
    """Description of a file of batches, as plain JSON."""
    is_exact = name in (REFERENCE, CONTROL)
    names = ("old_logp", "rollout_logp", "mask")
    mismatch = mismatch_metrics(*(tensors[n] for n in names), cap=METRIC_CAP, entropy=tensors["entropy"])
    return {
        "sampler": name,
        "format": EXACT if is_exact else name,
        "length": config.task.n,
        "order": list(context.configs).index(name) if name in context.configs else -1,
        "num_batches": context.num_reference if name == REFERENCE else context.num_batches,
        "num_prompts": config.algo.num_prompts,
        "group_size": config.algo.group_size,
        "max_new_tokens": run.max_new_tokens,
        "step": {"index": context.warmup, "total": config.trainer.steps, "seed": config.seed},
        "identity": identity(context, name, config),
        "weights_hash": provenance.tensors_hash(run.trainer.weights()),
        "realized": None if is_exact or run.passport is None else sorted({t.format for t in run.passport.weights}),
        "accuracy": float(tensors["reward"].mean()),
        "response_tokens": float(tensors["mask"].sum(1).float().mean()),
        "truncated_frac": float(tensors["truncated"].float().mean()),
        "mismatch": {key.removeprefix("mismatch/"): value for key, value in mismatch.items()},
        "config": to_json(config),
        "commit": provenance.commit()[0],
        "torch": torch.__version__,
    }
