"""The tree of frozen dataclasses that configures a run: field docs here, values in `harness/config/conf/`.

`RunConfig` holds only what changes numbers and is hashed into the run id; `Launch` holds where and how a run happens.
A field that came later is `sparse`: at its default it is not written, so that ids and records from before it stand.
Composing, validating and hashing are in `harness.config.load`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field

from harness import NUMERICS_VERSION

_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
Count: TypeAlias = Annotated[int, Field(ge=1)]
Whole: TypeAlias = Annotated[int, Field(ge=0, strict=True)]
Name: TypeAlias = Annotated[str, Field(pattern=r"^\w[\w. +-]*$")]
"""Name of a sweep or a model, which becomes that of folders and files: no path, not empty."""
Location: TypeAlias = Annotated[str, Field(min_length=1)]
"""Path of a file or folder: "", of a shell's variable that is not set, would be the current folder."""
Positive: TypeAlias = Annotated[float, Field(gt=0)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0)]
Beta: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Share: TypeAlias = Annotated[float, Field(gt=0, le=1)]
Fraction: TypeAlias = Annotated[float, Field(ge=0, le=1)]
BaseOptimizer: TypeAlias = Literal["adamw", "muon"]


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """A rollout plan by name; the values are names of formats (`harness.numerics.formats`)."""

    __pydantic_config__ = _STRICT
    name: str
    weights: str | None = None
    acts: str | None = None
    kv: str | None = None


SHAPE = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size")
MIXTURE = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
"""Fields of a shape that a dense model does not have."""
FOLDER_SHAPE = (*SHAPE, *MIXTURE, "family", "rope_theta")
"""Fields of a model that the config.json of its folder says, where it has one."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder trained here, or (`path`) a Hugging Face folder, whose own config then gives the shape."""

    __pydantic_config__ = _STRICT
    name: Name
    family: Literal["qwen3", "qwen2"] = "qwen3"
    num_layers: Count | None = None
    hidden_size: Count | None = None
    num_heads: Count | None = None
    num_kv_heads: Count | None = None
    head_dim: Count | None = None
    intermediate_size: Count | None = None
    vocab_size: Count | None = None
    num_experts: Whole = field(default=0, metadata={"sparse": True})
    """Experts of a mixture in every layer (Qwen3-MoE); `intermediate_size` then only says what a token passes through,
    its experts' widths together. 0: a dense model."""
    num_experts_per_tok: Whole = field(default=0, metadata={"sparse": True})
    moe_intermediate_size: Whole = field(default=0, metadata={"sparse": True})
    """Width of one expert."""
    norm_topk_prob: bool = field(default=True, metadata={"sparse": True})
    """The gates of a token's experts add up to 1."""
    rope_theta: Positive = 10000.0
    max_positions: Count | None = field(default=None, metadata={"sparse": True})
    """Tokens of prompt and response that the model takes; null: those of the folder, 4096 for a model trained here.
    More than a folder names are allowed: the rotary embedding goes on, but the model may not have seen them."""
    spread: NotNegative = 0.5
    """Sigma of the function-preserving channel spread; 0 leaves the weights alone."""
    rl_lr: Positive = 1e-6
    """Learning rate of RL that suits this size, where `trainer.lr` is null."""
    sft_lr: Positive = 3e-3
    """Learning rate that trains the base."""
    path: Location | None = field(default=None, metadata={"hashed": False})
    content_hash: str | None = None
    """Filled in from `path`: what is hashed in its place."""

    def __post_init__(self) -> None:
        if self.path is None and (missing := [name for name in SHAPE if getattr(self, name) is None]):
            raise ValueError(
                f"{missing[0]}=null: without a shape a local Hugging Face folder is needed; give model.path=FOLDER"
            )
        through = self.num_experts_per_tok * self.moe_intermediate_size
        if self.path is None and self.num_experts and self.intermediate_size != through:
            raise ValueError(
                f"intermediate_size={self.intermediate_size}: a token passes through num_experts_per_tok x "
                f"moe_intermediate_size; valid: {through}"
            )


@dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """Training of a base from scratch, with an early stop at a sampled accuracy."""

    __pydantic_config__ = _STRICT
    n: Count | None = field(default=None, metadata={"sparse": True})
    """Problem size that the base is trained for, without a `curriculum` the only one it sees; null: the task's own."""
    target_accuracy: Fraction = 0.40
    eval_every: Count = 5
    num_eval: Count = 512
    max_steps: Count = 400
    batch_size: Count = 64
    warmup_steps: Whole = 50
    grad_clip: Positive = 1.0
    curriculum: tuple[Count, ...] = field(default=(), metadata={"sparse": True})
    """Problem sizes that are learnt first, those below the task's own (`harness.start.base_training`)."""
    lr_power: NotNegative = field(default=0.0, metadata={"sparse": True})
    """Power with which the learning rate falls as the curriculum's size grows; 0: not at all."""
    batch_tokens: Whole = field(default=0, metadata={"sparse": True})
    """Tokens of a batch of packed documents, for a task in words (`harness.start.text_training`), whose `curriculum`
    holds the ends of the ranges of sizes that are mixed; `batch_size` and `lr_power` are then without effect."""
    lr_factor: Positive = field(default=1.0, metadata={"sparse": True})
    """Factor on `model.sft_lr`, for a task in words."""
    decay_from: Share = field(default=0.6, metadata={"sparse": True})
    """Share of `max_steps` after which the learning rate falls, for a task in words."""
    optimizer: BaseOptimizer = field(default="adamw", metadata={"sparse": True})
    """For a task in words: `muon` learns the matrices of the layers by Muon, all else by AdamW."""
    average: Fraction = field(default=0.0, metadata={"sparse": True})
    """Share of the steps so far over which the weights of the base are averaged, for a task in words; 0: not at all."""
    tolerance: Fraction = field(default=0.0, metadata={"sparse": True})
    """Accuracy by which a base may pass its target, for a task in words; beyond it the base is a point between the
    weights of the last two evaluations; 0: no limit."""
    weight_decay: NotNegative = field(default=0.1, metadata={"sparse": True})
    """For a task in words."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """The task, and the number of held-out prompts on which it is scored."""

    __pydantic_config__ = _STRICT
    name: str
    n: Count | None = None
    """Problem size, the generation-length axis of the embedded tasks."""
    num_eval: Count = 512
    path: Location | None = field(default=None, metadata={"hashed": False})
    """Local data file or folder, for tasks that read one."""
    content_hash: str | None = field(default=None, metadata={"sparse": True})
    """Hash of the data under `path`, filled in: other data are another run."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """One evaluation of the policy beside training: held-out questions of a task, each with `k` sampled answers, a
    greedy one, or both. It runs where `trainer.eval_every` falls, at the start and at the end
    (`harness.trainers.task_evaluation`)."""

    __pydantic_config__ = _STRICT
    task: str
    """Name of the task, as in `task.name`; it may be another one than is trained on."""
    path: Location | None = field(default=None, metadata={"hashed": False})
    """Local data file or folder."""
    content_hash: str | None = field(default=None, metadata={"sparse": True})
    """Hash of the data under `path`, filled in."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Options of the task, as in `task.options`."""
    num: Count | None = None
    """Questions, from the first on; null: all that there are."""
    k: Whole = 1
    """Sampled answers a question; 0: the greedy one alone."""
    temperature: Positive = 1.0
    top_p: Share = 1.0
    """Share of the probability that sampled answers come from; `engine.top_p` does not act here."""
    max_new_tokens: Count | None = None
    """Null: the task's own limit."""
    greedy: bool = False
    """Also one answer of the most probable tokens; `temperature` and `top_p` are then without effect."""

    def __post_init__(self) -> None:
        if self.k == 0 and not self.greedy:
            raise ValueError(
                f"k=0 with greedy=false: no answer is asked for; valid: k from 1 on, or greedy=true (task={self.task})"
            )


@dataclass(frozen=True, kw_only=True)
class AlgoConfig:
    """The policy-gradient algorithm (docs/rules/losses.md, sections 2 to 5)."""

    __pydantic_config__ = _STRICT
    name: str
    advantage: Literal["grpo", "dr_grpo", "loo", "batch"] = "grpo"
    loss: Literal["ppo", "gspo", "cispo", "reinforce"] = "ppo"
    mode: Literal["decoupled", "bypass_ppo", "bypass_pg"] = "decoupled"
    """Correction mode: which policy is the denominator of the clipped ratio, and where a weight acts."""
    eps_low: NotNegative = 0.2
    eps_high: NotNegative = 0.28
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    agg: Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"] = (
        "token-mean"
    )
    denom: Literal["original", "kept"] = "original"
    kl_coef: NotNegative = 0.0
    """Weight of the KL to the policy that the run starts from, which computes in the trained one's precision."""
    kl_type: Literal["k1", "k2", "k3", "k3_is"] = "k3"
    """Estimator of the KL to the reference; k3_is multiplies k3 by the policy ratio, so that its gradient has no bias
    at any age of the batch (DeepSeek-V3.2)."""
    entropy_coef: NotNegative = 0.0
    adv_eps: NotNegative = 1e-6
    batch_normalize: Literal["none", "token", "sequence"] = "none"
    num_prompts: Count = 32
    group_size: Count = 8
    num_minibatches: Count = 1
    num_epochs: Count = 1
    staleness: Whole = field(default=0, metadata={"sparse": True})
    """Age of the sampler's weights in steps, each of `num_minibatches` x `num_epochs` updates
    (`harness.trainers.staleness`)."""
    partial_rollouts: Whole = field(default=0, metadata={"sparse": True})
    """Tokens of a response after which a step may end; the response then goes on with the next step's weights; 0: every
    response is finished by the weights that began it (trainer=local alone; `harness.run.partial`)."""
    dynamic_sampling: bool = False
    max_gen_batches: Whole = 10
    """Dynamic sampling stops with an error after this many generation batches; 0 is unlimited."""
    gen_prompts: Count | None = field(default=None, metadata={"sparse": True})
    """Prompts that dynamic sampling draws at once; null: `num_prompts`. What is more than a batch needs is thrown
    away."""
    reward_scale: Literal["zero_one", "plus_minus"] = field(default="zero_one", metadata={"sparse": True})
    """A wrong and a right answer earn 0 and 1, or -1 and +1 as in DAPO. It matters beside a length penalty."""
    overlong_buffer: Whole = 0
    """Tokens before the length limit over which the soft penalty grows; 0 is off."""
    overlong_factor: NotNegative = 1.0
    overlong_filter: bool = False
    """Truncated responses leave the loss."""

    @property
    def num_updates(self) -> int:
        """Optimizer updates per rollout batch."""
        return self.num_minibatches * self.num_epochs

    def __post_init__(self) -> None:
        if self.gen_prompts is not None and not self.dynamic_sampling:
            raise ValueError(
                f"gen_prompts={self.gen_prompts}: without algo.dynamic_sampling a batch is drawn as it is; valid: null"
            )
        if self.dynamic_sampling and self.group_size == 1:
            raise ValueError(
                "group_size=1: dynamic sampling drops prompts whose answers all earn the same, and one answer always "
                "does; valid: 2 or more, or algo.dynamic_sampling=false"
            )
        if self.gen_prompts is not None and 0 < self.gen_prompts * self.max_gen_batches < self.num_prompts:
            raise ValueError(
                f"max_gen_batches={self.max_gen_batches}: batches of gen_prompts={self.gen_prompts} that never fill "
                f"num_prompts={self.num_prompts}; valid: {-(-self.num_prompts // self.gen_prompts)} or more, or 0"
            )
        if self.overlong_buffer and self.reward_scale == "zero_one" and self.overlong_factor >= 1:
            raise ValueError(
                f"overlong_factor={self.overlong_factor}: with rewards of 0 and 1 a right answer at the length limit "
                "would score as a wrong short one; valid: reward_scale=plus_minus, as in DAPO, or a factor below 1"
            )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The rollout engine and how it samples."""

    __pydantic_config__ = _STRICT
    name: Literal["embedded", "vllm"] = "embedded"
    temperature: Positive = 1.0
    """Temperature of rollouts, and of the answers that the evaluations of `task` sample."""
    top_p: Share = 1.0
    """Share of the probability that rollouts are sampled from; below 1 the method must keep the sampler's set
    (`methods.keep_sampling_mask`). The evaluations of `task` sample the whole distribution, so that runs with and
    without it are compared alike."""
    max_new_tokens: Count | None = None
    """Null: the task's own limit."""
    max_batch: Count = 256
    """Rows sampled at once; part of the random stream."""
    gpu_memory: Annotated[float, Field(gt=0, lt=1)] = field(default=0.5, metadata={"hashed": False})
    """vLLM on a GPU: the share of its memory for weights and cache; the trainer has the rest."""
    max_num_seqs: Count | None = field(default=None, metadata={"hashed": False, "sparse": True})
    """vLLM: sequences that decode at once; null: `max_batch`."""
    max_model_len: Count | None = field(default=None, metadata={"hashed": False, "sparse": True})
    """vLLM: tokens of prompt and response that it makes room for; null: what the run needs under verl, else the
    model's positions."""
    sleep: bool = field(default=False, metadata={"hashed": False})
    """The engine gives its memory back while the trainer updates: vLLM on a GPU all of it, others their cache."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The optimizer and the length of the run."""

    __pydantic_config__ = _STRICT
    name: Literal["local", "verl"] = "local"
    """verl: the same method on Ray, FSDP and vLLM's servers (`harness.trainers.verl`)."""
    device: Literal["cpu", "cuda"] = "cpu"
    steps: Count = 80
    lr: Positive | None = None
    """Null: `model.rl_lr`, at most 2e-4 from n = 16 on."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: NotNegative = 0.0
    grad_clip: Positive = 1.0
    warmup_steps: Whole = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: Fraction = field(default=0.0, metadata={"sparse": True})
    """Share of `lr` at which the schedule ends."""
    eval_every: Count = 20
    compute: Literal["fp32", "bf16"] | None = field(default=None, metadata={"sparse": True})
    """Arithmetic of forward and backward passes over float32 masters. bf16 rounds as `methods.bf16_train` does, and on
    a GPU multiplies on tensor cores. Null: the method's own; where it has none, bf16 with a Hugging Face model and
    float32 with one made here."""
    loss_scale: Positive = 65536.0
    """First loss scale of FP16 training; other formats ignore it."""
    loss_scale_interval: Count = 400


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides the numbers of one run."""

    __pydantic_config__ = _STRICT
    method: str
    parts: tuple[str, ...] = ()
    """Parts by `method.Part` in place of the method's own; empty keeps the method's."""
    knobs: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """Part -> knob -> value; after `harness.config.resolve.resolve` every knob of every part."""
    precision: PrecisionConfig
    model: ModelConfig
    base: BaseConfig
    task: TaskConfig
    algo: AlgoConfig
    engine: EngineConfig
    trainer: TrainerConfig
    evaluations: tuple[EvaluationConfig, ...] = field(default=(), metadata={"sparse": True})
    """Evaluations on tasks of their own, beside those on held-out questions of `task`."""
    base_seed: Whole = 0
    seed: Whole = 0
    numerics_version: Count = NUMERICS_VERSION
    outside: tuple[str, ...] = field(default=(), metadata={"sparse": True})
    """`package version hash` of other packages whose methods the run uses, and `methods.file hash` of files of your
    own in `methods`; filled in when the choices are resolved."""


DERIVED = ("numerics_version", "outside")
"""Fields of `RunConfig` that no override sets: they follow from the code."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Place and manner of a run; they change no number beyond float rounding, but for `fp8_kernels=square`."""

    __pydantic_config__ = _STRICT
    results: str = "results"
    sweep: str = "runs"
    micro_batch_tokens: Count = 32768
    logits_mib: Count = 1024
    """Float32 logits that the trainer holds at once; where a micro-batch has more, its head works in chunks."""
    checkpoint_layers: bool = False
    """The trainer's backward pass computes every layer again from its input: less memory, a third more time."""
    packing: bool = False
    """Sequences of a micro-batch lie end to end without padding, and a prompt is computed once for the responses that
    lie side by side; `micro_batch_tokens` then counts computed tokens. trainer=verl always does it."""
    compile: bool = False
    """The trainer's layers, and its head where it works in chunks, run as compiled code (torch.compile): seconds to
    minutes at the first steps, fewer passes over memory afterwards."""
    fp8_kernels: Literal["best", "emulated", "deep_gemm", "scaled_mm", "mixed", "square"] = "best"
    """Kernels of a trainer's FP8 linear layers on a GPU (`harness.kernels.fp8_flow`); best: whoever is fastest
    there, and where nobody is, or on a CPU, the emulation. square rounds otherwise: a variant of the recipe, which
    quantizes the inputs of weight gradients in tiles of 128 x 128; it is never the best."""
    native_16bit: bool = False
    """A trainer that computes in bf16 or fp16 multiplies 16-bit tensors, on tensor cores where there are some; False:
    float32 arithmetic on rounded operands, bit for bit the same on every device with float32 kernels alike."""
    attention_16bit: bool = False
    """A trainer that computes in 16 bits attends in them too: queries, keys and values are rounded, as vLLM has them,
    and a GPU uses its flash kernels; False: float32 attention, two to ten times as slow on a GPU."""
    offload: Literal["none", "params", "optimizer", "all", "host"] = "none"
    """Parts of a trainer under verl that rest in the host's memory: params, weights while the engine samples;
    optimizer, the moments but while a step is taken; all, both; host, weights, gradients and moments for good, with the
    steps taken on the processors."""
    checkpoint_every_s: NotNegative = 20.0
    """Seconds between states to resume from; more where saving would take more than `checkpoint_share` of the time. 0:
    after every step."""
    save: str = "none"
    """The trained policy in `results/policies`: hf keeps it as a Hugging Face folder, quantized also the codes of its
    rollout format as a compressed-tensors checkpoint, every:N a Hugging Face folder after every N steps and at the end;
    none keeps nothing."""
    checkpoint_every_steps: Whole = 0
    """A state to resume from after every so many steps in place of seconds, with the same bound; 0: by
    `checkpoint_every_s`."""
    checkpoint_share: Share = 0.05
    """Largest share of a run's time that states to resume from take; 1: no bound."""
    dump_rollouts: Whole = 0
    """Responses of every step that are written out, at most (`harness.trainers.rollout_file`)."""
    nodes: Count = 1
    """Machines of a run with trainer=verl; it has `gpus` on each, and `results` must be a folder that all see."""
    gpus: Count = 1
    tensor_parallel: Count = 1
    """GPUs that an engine under verl multiplies by together; each holds its share of the model's weights and cache."""
    sequence_parallel: Count = 1
    """GPUs of a machine that share every sequence of the trainer with trainer=verl (`harness.trainers.verl.ulysses`); a
    pass of theirs then holds `micro_batch_tokens` for each."""
    ray_address: str | None = None
    """An existing cluster for trainer=verl ("auto": the one of this machine); null starts one on this machine."""
    threads: Count = 1
    stall_s: Positive = 1800.0
    """A cell that shows no progress for so long is taken to hang, and is killed. Progress is a step, a state, output,
    sampled tokens and passes of the trainer (`harness.foundation.life`), under verl a stage of a step or an answer."""
    retries: tuple[str, ...] = ()
    """Ends of earlier attempts at this cell, and the change after each."""
    commit: str | None = None
    is_dirty: bool = False
    """The working tree differs from the commit: the result is a draft."""

    def __post_init__(self) -> None:
        if re.fullmatch(r"none|hf|quantized|every:[1-9][0-9]*", self.save) is None:
            raise ValueError(f"save={self.save!r}: valid: none, hf, quantized, every:N (such as every:50)")


TUNABLE = (
    "micro_batch_tokens", "logits_mib", "checkpoint_layers", "packing", "compile", "fp8_kernels", "native_16bit",
    "attention_16bit", "offload", "threads", "stall_s", "checkpoint_every_s", "checkpoint_every_steps",
    "checkpoint_share", "dump_rollouts", "save", "nodes", "gpus", "tensor_parallel", "sequence_parallel", "ray_address",
)  # fmt: skip
"""Fields of `Launch` that a user sets, as `launch.NAME=VALUE` among the overrides."""


def settings(launch: Launch) -> dict[str, Any]:
    """The fields of `TUNABLE` that are not at their defaults: what a record says of how its run happened."""
    usual = Launch()
    return {name: getattr(launch, name) for name in TUNABLE if getattr(launch, name) != getattr(usual, name)}
