"""The contract between methods and the harness: parts, plans, batches, corrections, engines.

Axes: B sequences, T response tokens, V vocabulary. Log-probabilities are float32 nats of the distribution
that was actually sampled. A hook maps a value to a value of its own type, so a method is its parts composed
left to right and a hook left out is the identity. `harness.config.compose` folds the hooks and refuses conflicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from harness.numerics.formats import Adapters, Format
from harness.numerics.rounding import CASTS

WeightStream = Iterator[tuple[str, Tensor]]
"""(checkpoint name, whole tensor) pairs, read once."""
Fixed = Mapping[str, Tensor]
"""Tensors that a part prepared once: profiles, scales, latents, adapters."""
Memory = dict[str, float]
"""State that a part keeps between steps, floats by name; logged and checkpointed."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """The step of the run at which a hook is called. Schedules are functions of it."""

    index: int
    """Policy steps already taken: 0 before the first update."""
    total: int
    seed: int
    purpose: Literal["rollout", "eval"] = "rollout"
    """Noise is off in evaluation; weights are pushed again around it."""


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """One more sampler of a batch: the formats that it samples in and its share of every prompt's responses."""

    name: str
    share: float
    """Part of a prompt's responses, above 0 and below 1; times `algo.group_size` it is a whole number."""
    weights: Format
    acts: Format | None = None
    kv: Format | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Formats by place: weights, inputs, cache, both sites. None: no opinion. Two different opinions are an error."""

    train_weights: Format | None = None
    """Format of the weights that the optimizer (or the frozen base) holds."""
    train_compute: Format | None = None
    """Forward and backward matmuls of the trainer."""
    rollout_weights: Format | None = None
    rollout_acts: Format | None = None
    rollout_kv: Format | None = None
    lm_head: Format | None = None
    """Format of the output head, at both sites."""
    adapters: Adapters | None = None
    residual: float | None = None
    """Share of the input channels whose rounding error the rollout's linears read in a second pass (QUADS)."""
    residual_alpha: float | None = None
    """Factor of what that pass adds; None: 1."""
    sampler: Literal["cached", "trainer"] | None = None
    """"trainer": the trainer's own forward without a cache, at the training batch shape."""
    samplers: tuple[Sampler, ...] | None = None
    """Samplers of a batch beside the plan's own, which has what their shares leave, and answers evaluations."""
    exceptions: tuple[tuple[str, Format | None], ...] = ()
    """(tensor name pattern as in `fnmatch`, format) pairs that override `rollout_weights`."""


@dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """One line of a passport: what a live tensor really is."""

    name: str
    format: str
    dtype: str
    """Storage dtype of the codes, or of the tensor where it is a plain cast."""
    scale_shape: tuple[int, ...] | None
    hash: str
    """CRC-32 of the codes and scales, hexadecimal."""
    kernel: str = ""
    """Kernel that multiplies by it, where the engine chooses among kernels."""


@dataclass(frozen=True, kw_only=True)
class Passport:
    """The realized plan: read back from the live engine, never remembered."""

    engine: str
    weights: tuple[TensorRecord, ...]
    acts: Mapping[str, str]
    """Activation format name per linear layer (a checkpoint weight name), read from the live module."""
    kv: str | None
    sampler: str
    state: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Switches and scales of the engine that change what is computed, as JSON values."""


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """One rollout batch. Constants: no gradient flows into any field."""

    token_ids: Tensor
    """[B, T] int64, response only, right padded."""
    mask: Tensor
    """[B, T] bool, True where a token is trained on."""
    adv: Tensor
    """[B, T] float32."""
    rollout_logp: Tensor
    """[B, T] float32 nats, by the engine, while sampling."""
    old_logp: Tensor
    """[B, T] float32 nats, by the trainer, before any update on this batch. In the bypass modes `correct` and
    `update_lr_factor` find the current policy's here, under bypass_ppo `token_loss` the sampler's."""
    step: Step
    shadow: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Reference-precision "old" and "current" log-probs, [B, T] each, if a part needs them."""
    group: Tensor | None = None
    """[B] int64, the same for all responses to one prompt; None in a micro-batch under trainer=verl."""
    reward: Tensor | None = None
    """[B] float32, as the task gives it, before scale and length penalty; None where `group` is."""
    sampler: Tensor | None = None
    """[B] int64: the sampler of each response, 0 for the plan's own, then `Plan.samplers`; None: there is one."""
    version: Tensor | None = None
    """[B, T] int64: the step whose weights sampled each token, `step.index` where they were the newest; None under
    trainer=verl."""
    extras: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Only what `Part.needs` names: "ref_logp" [B, T] nats; "rollout_kl" [B, T] nats and "rollout_tv" [B, T] in [0, 1],
    KL and total variation of the sampler's whole distribution against the trainer's; "router_shift" [B, T] nats, in the
    hooks of an update alone: how far the log-probs of a mixture's routers have moved since before any update, mean over
    layers and the experts used then, at the position that predicts the token."""

    @property
    def valid(self) -> Tensor:
        """[B, T] bool: tokens of the mask whose two log-probs are finite, so that they have a ratio."""
        return self.mask & torch.isfinite(self.old_logp - self.rollout_logp)


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Prompts and responses as the trainer reads them."""

    ids: Tensor
    """[B, L] int64: prompt, response, right padding."""
    prompt_lens: int | Tensor
    """Tokens of the prompts: one number for all rows, or [B] int64."""
    token_ids: Tensor
    """[B, T] int64: the responses alone."""
    sampled: Tensor
    """[B, T] bool: True where a token was sampled."""
    allowed: Tensor | None = None
    """[B, T, V] bool: the tokens that the sampler could draw at each place, all where nothing was sampled. The
    trainer's distributions are renormalised over them; None: over the whole vocabulary."""
    experts: Tensor | None = None
    """[B, L, layers, k] int16: the experts that every position uses in the trainer's forward passes, -1 where it
    chooses by itself; None: everywhere."""

    def take(self, rows: Tensor) -> Sequences:
        """Some rows of the sequences; `rows` [b] int64."""
        lens = self.prompt_lens if isinstance(self.prompt_lens, int) else self.prompt_lens[rows]
        return Sequences(
            ids=self.ids[rows], prompt_lens=lens, token_ids=self.token_ids[rows], sampled=self.sampled[rows],
            allowed=None if self.allowed is None else self.allowed[rows],
            experts=None if self.experts is None else self.experts[rows],
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Weights, kept tokens, clips and a shift of the advantage with which a batch enters the objective. Constants,
    every field [B, T]."""

    weight: Tensor
    """float32, multiplies the token loss; starts as 1."""
    keep: Tensor
    """bool; starts as the mask."""
    clip_low: Tensor
    """float32; starts as 1 - eps_low."""
    clip_high: Tensor
    """float32; starts as 1 + eps_high."""
    adv_shift: Tensor | None = None
    """float32, added to the advantage before the objective; parts see the advantage without it. None: nothing is."""

    def shifted(self, shift: Tensor) -> Correction:
        """The correction with `shift` [B, T], of any float dtype, added to what shifts the advantage already."""
        shift = shift.to(self.weight)
        return replace(self, adv_shift=shift if self.adv_shift is None else self.adv_shift + shift)


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Responses that an engine sampled, in request order, samples of one prompt adjacent."""

    token_ids: Tensor
    """[B, T] int64, right padded with the pad id."""
    logp: Tensor
    """[B, T] float32 nats of the sampled distribution; 0 where padded."""
    lengths: Tensor
    """[B] int64, response tokens including the end token."""
    truncated: Tensor
    """[B] bool, True where the length limit came before the end token."""
    log_probs: Tensor | None = None
    """[B, T, V] float32 nats of the whole sampled distribution, where the engine was asked to keep it."""
    sampler: Tensor | None = None
    """[B] int64: the sampler of each response, as in `TokenBatch`; None where there is one."""
    version: Tensor | None = None
    """[B, T] int64: the step whose weights sampled each token, where there are several (`algo.partial_rollouts`)."""
    experts: Tensor | None = None
    """[B, prompt + response, layers, k] int16: experts that the sampler used at every position of prompt and response,
    from the first on, where the engine was asked to keep them; -1 where it computed nothing: at the last token, past
    the end, and in the last layer before the prompt's end."""

    def responses(self) -> list[list[int]]:
        """Token ids of every row without padding."""
        rows = cast("list[list[int]]", self.token_ids.tolist())  # pyright: ignore[reportUnknownMemberType]
        lengths = cast("list[int]", self.lengths.tolist())  # pyright: ignore[reportUnknownMemberType]
        return [ids[:n] for ids, n in zip(rows, lengths, strict=True)]


LINEAR = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""Linear layers of a block, grouped by the input that they share, in the order in which they are computed. Engines fuse
a group into one matrix: formats with a tensor-level scale share it there."""
QUANTIZED = tuple(f"*.{name}.weight" for group in LINEAR for name in group)
"""The linear layers a rollout format touches; embeddings, norms, biases and the head stay in high precision."""


def fused(names: Iterable[str]) -> list[list[str]]:
    """Names of modules or of their weights; those that engines fuse together, in the order of their rows."""
    place = {part: group for group in LINEAR for part in group}
    found: dict[tuple[str, tuple[str, ...]], dict[str, str]] = {}
    for name in names:
        parent, _, part = name.removesuffix(".weight").rpartition(".")
        found.setdefault((parent, place.get(part, (part,))), {})[part] = name
    return [[inside[part] for part in group if part in inside] for (_, group), inside in found.items()]


def sampler_plans(plan: Plan) -> list[Plan]:
    """The rollout plan of every sampler of a batch: the plan's own, then those of `Plan.samplers`."""
    own = replace(plan, samplers=None)
    others = plan.samplers or ()
    return [own, *(replace(own, rollout_weights=s.weights, rollout_acts=s.acts, rollout_kv=s.kv) for s in others)]


def sample_counts(plan: Plan, group_size: int) -> list[int]:
    """Responses to one prompt by sampler, in the order of `sampler_plans`. Raises ValueError for shares that are none,
    or no whole numbers of responses."""
    others = plan.samplers or ()
    counts = [round(s.share * group_size) for s in others]
    for s, count in zip(others, counts, strict=True):
        if not 0 < s.share < 1 or abs(s.share * group_size - count) > 1e-6 or count < 1:
            raise ValueError(
                f"algo.group_size={group_size}: the share {s.share:g} of sampler {s.name} is no whole number of "
                "responses to a prompt; choose a share, above 0 and below 1, and a group size that fit"
            )
    if sum(counts) >= group_size:
        raise ValueError(f"algo.group_size={group_size}: samplers beside the plan's own take {sum(counts)} responses")
    return [group_size - sum(counts), *counts]


@lru_cache(maxsize=4096)
def weight_format(plan: Plan, name: str) -> Format | None:
    """The rollout format of checkpoint tensor `name`: the first matching exception, else `rollout_weights`."""
    for pattern, fmt in plan.exceptions:
        if fnmatchcase(name, pattern):
            return fmt
    if name == "lm_head.weight":
        return plan.lm_head
    return plan.rollout_weights if any(fnmatchcase(name, pattern) for pattern in QUANTIZED) else None


def base_dtype(plan: Plan) -> torch.dtype:
    """Dtype in which an engine holds what is not quantized: fp32 or fp16 where its weights are that, else bf16."""
    fmt = plan.rollout_weights
    return CASTS[fmt.element] if fmt is not None and fmt.element in ("fp32", "fp16") else torch.bfloat16


KVProtocol = Literal["trainer", "inference"]
"""trainer: largest magnitude times a margin over the largest code (NeMo-RL); inference: over a constant (vLLM)."""


class RolloutEngine(Protocol):
    """A rollout engine. Methods know engines by this protocol alone."""

    supports: ClassVar[frozenset[str]]
    """Capabilities such as "rollout_weights:int8_channel"."""

    def load_weights(self, weights: WeightStream) -> None:
        """Quantize and take over a whole stream; ValueError leaves the old weights in place."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        num_samples: int,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        top_p: float = 1.0,
    ) -> Rollout:
        """`num_samples` responses to each prompt (token ids). Temperature 0 is greedy. `top_p` below 1: from the most
        probable tokens that together have this probability; training rollouts then need a part that asks for
        "allowed_ids"."""
        ...

    def calibrate_kv(self, prompts: Sequence[Sequence[int]], protocol: KVProtocol = "trainer") -> None:
        """Set the scales of a quantized KV cache from these prompts by one of two rules (precision.md 6.2)."""
        ...

    def calibrate_residual(self, prompts: Sequence[Sequence[int]]) -> None:
        """Choose the input channels of `Plan.residual` by their mean rounding error on these prompts."""
        ...

    def realized_plan(self) -> Passport:
        """Formats of the live weights, inputs and cache, read back."""
        ...

    def sync_metrics(self) -> dict[str, float]:
        """Numbers of the last `load_weights`: "code_flip_rate" since the load before, "saturated_frac"."""
        ...

    def sleep(self) -> None:
        """Give memory back until `wake`."""
        ...

    def wake(self) -> None:
        """The opposite of `sleep`."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


@dataclass(frozen=True, kw_only=True)
class Site:
    """Inputs of `Part.prepare`: the checkpoint, training data, the base seed; nothing of the run's state."""

    checkpoint: Path
    """Checkpoint folder as the earlier parts left it."""
    original: Path
    """Checkpoint folder of the base."""
    calibration: tuple[tuple[int, ...], ...]
    """Prompts of the task's training split."""
    demonstrations: Callable[[int], Sequence[tuple[tuple[int, ...], tuple[int, ...]]]]
    """Count -> at most so many (prompt, reference response) pairs of the training split; the task may have none."""
    sample: Callable[[nn.Module, Sequence[Sequence[int]], int], Rollout]
    """(unwrapped module, prompts, seed) -> one response of its own float32 policy to each prompt."""
    seed: int
    build: Callable[[Path], nn.Module]
    """Checkpoint folder -> the trainer's module in float32, unwrapped."""
    wrap: Callable[[nn.Module], nn.Module]
    """A module as the earlier parts wrap it."""
    fixed: Fixed
    """Tensors that earlier parts prepared."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One mechanism: a frozen dataclass of its knobs. A hook left alone changes nothing.

    `fixed` is one namespace for all parts of a method, named like companions of the checkpoint's tensors
    ("<module>.weight_scale", "<module>.lora_A.weight"): a later part's tensor replaces an earlier one's of its name.
    """

    sets_weight: ClassVar[bool] = False
    """True where the part sets `Correction.weight`; at most one part of a method may."""
    owns_objective: ClassVar[bool] = False
    """True where `token_loss` applies weight, keep and clips by itself."""
    sets_clip: ClassVar[bool] = False
    """True where the part sets the upper clip; at most one part of a method may."""
    sets_linears: ClassVar[bool] = False
    """True where the part puts its own layers in the place of the trainer's linear layers, or freezes them; at most one
    part of a method may, but for those whose `wrap` is `idle`."""
    modes: ClassVar[tuple[str, ...]] = ()
    """Correction modes it makes sense in; empty: any."""
    losses: ClassVar[tuple[str, ...]] = ()
    """Surrogates it makes sense with; empty: any."""
    deploys_rollout: ClassVar[bool] = False
    """True where the trained weights are meant to be used in the rollout's format: the method is ranked as deployed."""
    needs_updates: ClassVar[int] = 1
    """Updates per rollout batch below which the part changes nothing; fewer are warned of."""
    needs_steps: ClassVar[int] = 1
    """Steps of a run below which the part changes nothing; fewer are warned of."""
    tuned: ClassVar[tuple[str, ...]] = ()
    """Knobs whose defaults suit the models made here: with a Hugging Face model they must be given."""
    demonstrations: ClassVar[tuple[str, str] | None] = None
    """Setting of a knob that reads the task's demonstrations, and one that does not, such as ("data=dataset",
    "data=teacher"): a task without demonstrations is then refused. None: the part does without."""
    idle_by: ClassVar[Mapping[str, str]] = {}
    """Hook -> the setting of a knob that makes it `idle`, such as "protocol=inference"."""

    def needs(self, step: Step) -> frozenset[str]:
        """Extras that the trainer must compute for this step: "ref_logp", "rollout_kl" and "rollout_tv"
        (`TokenBatch.extras`), "shadow"; "allowed_ids": every log-prob of the trainer is over the tokens that the
        sampler could draw, so that `engine.top_p` may be below 1; "routing": every pass of the trainer uses the
        experts that the sampler used; "own_routing": updates use those of the pass before any update; "router_shift"
        (`TokenBatch.extras`). These three need a mixture of experts. "version":
        `TokenBatch.version`, which trainer=verl does not have."""
        return frozenset()

    def plan(self, rollout: Plan) -> Plan:
        """Formats that the part asks for; `rollout` is the plan of the precision axis. Raises ValueError, one line,
        where the part cannot go with it: the run is then refused before anything starts."""
        return Plan()

    def check(self, plan: Plan, parts: Sequence[Part], shapes: Mapping[str, tuple[int, ...]] | None) -> None:
        """Raises ValueError, one line, where the part cannot work under the merged plan, among the method's `parts` (in
        order, with itself) or with a checkpoint of these tensors (shapes by name; None: not known yet): the run is then
        refused before anything starts."""

    def idle(self, plan: Plan) -> frozenset[str]:
        """Names of its hooks that change nothing under this plan and these knobs: a backend may lack them, and where
        they are all that the part has, the user is told."""
        return frozenset()

    def prepare(self, site: Site, plan: Plan) -> tuple[nn.Module | None, dict[str, Tensor]]:
        """Prepare once, before the run, cached by content: (the changed module or None, fixed tensors). May train."""
        return None, {}

    def wrap(self, model: nn.Module, plan: Plan, fixed: Fixed) -> nn.Module:
        """Change the trainer's module, before the optimizer is built. Parameters keep their checkpoint names."""
        return model

    def lr_factor(self, name: str) -> float:
        """Factor on the learning rate of the trainer's parameter `name`, for the whole run."""
        return 1.0

    def update_lr_factor(self, b: TokenBatch, memory: Memory) -> float:
        """Factor on the learning rate of one update, at least 0; it multiplies the step that the optimizer takes, so
        that neither Adam nor gradient clipping hides it. `b` holds the rows of the update; in the bypass modes its
        `old_logp` is the current policy's, as in `correct`."""
        return 1.0

    def during_update(self, model: nn.Module, step: Step, number: int) -> AbstractContextManager[object]:
        """Context of the forward and backward passes of update `number` (from 0) of a step, in which the trainer's
        module may compute otherwise, by hooks on its layers. Scoring, sampling and evaluation are outside it."""
        return nullcontext()

    def sync(self, weights: WeightStream, step: Step, plan: Plan, fixed: Fixed, memory: Memory) -> WeightStream:
        """Change the weight stream of a push. The engine uses a `*.weight_scale` (and `*.weight_zero_point`) in the
        stream as it is. A part that puts weights on a grid declares its format in `plan`: a push of weights on a
        coarser grid than planned ends the run, for the passport would hide it."""
        return weights

    def after_sync(self, engine: RolloutEngine, prompts: Sequence[Sequence[int]]) -> None:
        """Act on the engine after the weights of a push are loaded."""

    def refit(
        self, model: nn.Module, seqs: Sequences, batch: TokenBatch, step: Step, plan: Plan, fixed: Fixed, memory: Memory
    ) -> Fixed | None:
        """Fixed tensors that replace those of their names after a batch's updates, before the push; or None."""
        return None

    def correct(self, c: Correction, b: TokenBatch, memory: Memory) -> Correction:
        """Correct a whole rollout batch, once, before any update. In the bypass modes, which have no policy before
        the update, it is called for the rows of every update instead, with the current policy's `old_logp`."""
        return c

    def correct_update(self, c: Correction, logp: Tensor, b: TokenBatch, memory: Memory) -> Correction:
        """Correct the rows of one update; `logp` [B, T] is the detached current log-prob."""
        return c

    def token_loss(self, logp: Tensor, c: Correction, b: TokenBatch) -> Tensor | None:
        """[B, T] loss per token in place of the clipped surrogate. At most one part of a method has it."""
        return None


@dataclass(frozen=True, kw_only=True)
class Method:
    """A named list of parts with the paper's own settings."""

    name: str
    paper: str = ""
    """Source of the rule, as `claims.yaml` names it; empty where it is no paper's."""
    parts: tuple[Part, ...]
    precisions: tuple[str, ...]
    """Rollout precisions it may run at, each also with "+kv8"; the first is its default."""
    agg: str | None = None
    """A fixed aggregation, where the method demands one."""
    mode: str | None = None
    """A fixed correction mode, where the method is one."""
    denom: str | None = None
    """A fixed denominator after rejection, where the method demands one."""
    plain_name: str = ""
    """Correction that the method makes, in plain words that begin a sentence; empty where its name has to do."""
    summary: str = ""
    """Its mechanism, one line for `lowbit methods`."""
    claim: str = ""
    """The authors' claim, one line; controls have none."""
    is_control: bool = False
    reconstructed: str = ""
    """The parts of the rule that are ours because no source gives them; shown wherever the method is."""


def linear_setters(parts: Sequence[Part], plan: Plan) -> list[Part]:
    """The parts that set the trainer's linear layers under this plan (`Part.sets_linears`)."""
    return [part for part in parts if part.sets_linears and "wrap" not in part.idle(plan)]


def knobs(part: Part) -> dict[str, Any]:
    """The part's knobs by name, as plain JSON values (tuples become lists)."""
    values: dict[str, Any] = {f.name: getattr(part, f.name) for f in fields(part)}
    return {name: _plain(value) for name, value in values.items()}


def stated_knobs(part: Part) -> dict[str, Any]:
    """The knobs that ids and records hold: a knob that came later (`later`) is left out at its default, so that runs
    from before it keep their ids."""
    left_out = {f.name for f in fields(part) if f.metadata.get("later") and getattr(part, f.name) == f.default}
    return {name: value for name, value in knobs(part).items() if name not in left_out}


def later(default: Any) -> Any:
    """Field of a part for a knob that came after runs were recorded; `default` is what those runs did."""
    return field(default=default, metadata={"later": True})


def _plain(value: Any) -> Any:
    return [*value] if isinstance(value, tuple) else value
