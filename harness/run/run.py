"""The live parts of one run, and the state that a bit-exact resume needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from harness.api import Passport, Plan, Rollout, RolloutEngine, Sequences, TensorRecord, WeightStream
from harness.config.compose import Composed
from harness.config.schema import RunConfig
from harness.models.decoder import DecoderConfig
from harness.records.run_result import EvalRecord, TaskEvalRecord
from harness.tasks import Item, Score, Task
from harness.tasks.prompt_order import prompt_indices
from harness.trainers.local.trainer import LocalTrainer
from harness.trainers.task_evaluation import Asked


@dataclass(frozen=True, kw_only=True)
class Version:
    """The trainer's policy as it stood before a step, on the CPU."""

    step: int
    weights: dict[str, Tensor]
    """`LocalTrainer.weights()`, by checkpoint name."""
    fixed: dict[str, Tensor]
    """`Composed.fixed`: adapters and scales that a push of these weights takes along."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """A response as far as it is sampled, by one version of the policy or several."""

    tokens: tuple[int, ...]
    logp: tuple[float, ...]
    """Nats of each token, by the weights that sampled it."""
    version: tuple[int, ...]
    """The step whose weights sampled each token."""
    is_ended: bool = False
    is_truncated: bool = False
    """The length limit came before the end token."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """The responses to one prompt, some of them unfinished (`harness.run.partial`)."""

    position: int
    """The place of the prompt in the run's order."""
    item: Item
    responses: tuple[Response, ...]

    @property
    def is_complete(self) -> bool:
        """All of its responses have ended."""
        return all(response.is_ended for response in self.responses)

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far."""
        return sum(len(response.tokens) for response in self.responses)


@dataclass(frozen=True, kw_only=True)
class Collected:
    """One rollout batch as it was sampled. Axes: B = prompts x samples, the samples of a prompt adjacent; T tokens."""

    seqs: Sequences
    """Prompt and response side by side, for the trainer."""
    rollout: Rollout
    items: list[Item]
    """The question of every row."""
    scores: list[Score]
    """Raw scores of the task, one a row."""
    num_tokens: int
    """Sampled tokens, with those of rows that dynamic sampling dropped among them."""
    num_batches: int
    """Generations that filled the batch."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """One more sampler of every batch, alive."""

    name: str
    plan: Plan
    engine: RolloutEngine


class Reached(Protocol):
    """Contents of a record, whichever trainer ran."""

    @property
    def composed(self) -> Composed: ...
    @property
    def series(self) -> list[dict[str, Any]]: ...
    @property
    def evals(self) -> list[EvalRecord]: ...
    @property
    def evaluations(self) -> list[TaskEvalRecord]: ...
    @property
    def evaluation_errors(self) -> list[str]: ...
    @property
    def eval_s(self) -> float: ...
    @property
    def passport(self) -> Passport | None: ...
    @property
    def memory_gib(self) -> Mapping[str, float]: ...
    def products(self) -> Any:
        """Kind of product -> number of the trainer's linear layers, for the record."""
        ...


@dataclass(kw_only=True)
class Run:
    """The live parts of one run and its progress. Owned by the cell's process."""

    config: RunConfig
    composed: Composed
    task: Task
    trainer: LocalTrainer
    engine: RolloutEngine
    reference: RolloutEngine
    """Samples in the reference precision, for evaluation alone."""
    others: list[Served] = field(default_factory=list[Served])
    """Samplers of every batch beside `engine` (`harness.run.samplers`)."""
    folder: Path
    """Hugging Face folder of the base: its tokenizer goes with the trained policy."""
    max_new_tokens: int
    eval_items: list[Item]
    step: int = 0
    next_prompt: int = 0
    eval_s: float = 0.0
    series: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    evals: list[EvalRecord] = field(default_factory=list[EvalRecord])
    asked: list[Asked] = field(default_factory=list[Asked])
    """Evaluations on tasks of their own."""
    evaluations: list[TaskEvalRecord] = field(default_factory=list[TaskEvalRecord])
    evaluation_errors: list[str] = field(default_factory=list[str])
    """Evaluations after the last step that ended in an error."""
    passport: Passport | None = None
    evaluated_sync: dict[str, float] = field(default_factory=dict[str, float])
    """Numbers of an evaluation's push: the push of the step that follows moves nothing."""

    memory_gib: dict[str, float] = field(default_factory=dict[str, float])
    """Memory of a GPU, as in `RunResult.memory_gib`."""
    lent_gib: float = 0.0
    """GPU memory of sleeping engines that is free at the moment, though torch counts it as theirs."""

    past: list[Version] = field(default_factory=list[Version])
    """With `algo.staleness`: the trainer's last weights, the sampler's first (`harness.run.staleness`)."""

    in_flight: list[Group] = field(default_factory=list[Group])
    """With `algo.partial_rollouts`: groups that no step has trained on yet, the oldest first."""

    on_batch: Callable[[int, Collected], None] | None = None
    """Called with every step's rollout batch, after its sampling."""

    @property
    def engines(self) -> list[RolloutEngine]:
        """Engines that sample batches: the plan's own first."""
        return [self.engine, *(other.engine for other in self.others)]

    @property
    def shape(self) -> DecoderConfig:
        """Shape of the model."""
        return self.trainer.model.config

    def weights(self) -> WeightStream:
        """Masters by checkpoint name, adapters too."""
        return self.trainer.weights()

    def policy_weights(self) -> WeightStream:
        """The weights that are evaluated in the reference precision."""
        return self.trainer.policy_weights()

    def items_at(self, positions: Sequence[int]) -> list[Item]:
        """The questions at these places of the run's own order: hashed indices, or a shuffled epoch where the data is
        finite."""
        return self.task.sample("train", prompt_indices(self.config.seed, positions, self.task.num_train))

    def keep_peaks(self, found: Mapping[str, float]) -> None:
        """Largest of what was found and what is known, by name."""
        for name, value in found.items():
            self.memory_gib[name] = max(value, self.memory_gib.get(name, 0.0))

    def state(self) -> dict[str, Any]:
        """All that resume needs, as tensors and plain values."""
        return {
            "trainer": self.trainer.state(),
            "step": self.step,
            "next_prompt": self.next_prompt,
            "eval_s": self.eval_s,
            "series": self.series,
            "evals": [record.model_dump() for record in self.evals],
            "evaluations": [record.model_dump() for record in self.evaluations],
            "fixed": self.composed.fixed,
            "memory": self.composed.memory,
            "memory_gib": self.memory_gib,
            "passport": None if self.passport is None else asdict(self.passport),
            "past": [dict(vars(version)) for version in self.past],
            "in_flight": [
                {"position": group.position, "responses": [dict(vars(response)) for response in group.responses]}
                for group in self.in_flight
            ],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self.trainer.restore(state["trainer"])
        self.step, self.next_prompt, self.eval_s = state["step"], state["next_prompt"], state["eval_s"]
        self.series = state["series"]
        self.evals = [EvalRecord(**record) for record in state["evals"]]
        self.evaluations = [TaskEvalRecord(**record) for record in state.get("evaluations", [])]
        self.composed.fixed.clear()
        self.composed.fixed.update(state["fixed"])
        self.composed.memory[:] = state["memory"]
        self.keep_peaks(state.get("memory_gib", {}))
        if (passport := state.get("passport")) is not None:
            weights = tuple(TensorRecord(**record) for record in passport["weights"])
            self.passport = Passport(**passport | {"weights": weights})
        self.past = [Version(**version) for version in state.get("past", [])]
        entries = state.get("in_flight", [])
        items = self.items_at([entry["position"] for entry in entries])
        self.in_flight = [
            Group(position=entry["position"], item=item, responses=tuple(Response(**r) for r in entry["responses"]))
            for entry, item in zip(entries, items, strict=True)
        ]

    def products(self) -> Any:
        """Kind of product -> number of the trainer's linear layers."""
        return self.trainer.products()

    def close(self) -> None:
        """Free every engine, also where one of them cannot be freed: then that error is raised in the end."""
        with ExitStack() as stack:
            for engine in (self.reference, *reversed(self.engines)):
                stack.callback(engine.close)
