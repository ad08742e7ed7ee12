"""Guess of a run's seconds on a Hugging Face model, from the shape in its config.json and rates of a device.

    sample   every response as long as it may be; a step of decoding reads the weights once and the cache of all rows
             that decode together, or multiplies, whichever takes longer
    train    2 operations per parameter that a token meets to score, 6 to learn, each learning pass; attention on top
    update   AdamW's pass over float32 masters and moments
    push     float32 masters read, weights of the rollout written

Peak rates are those of the vendors' data sheets; the shares of them that are reached are assumed. No weights are read.
Left out: what lies between GPUs (`harness.studies.capacity` has it), and rates that were measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from harness.config.compose import compose
from harness.config.decoder_config import decoder_config
from harness.config.schema import Launch, RunConfig
from harness.engines.vllm.memory import kv_bytes_per_token, num_parameters, used_parameters, weight_bytes
from harness.foundation.did_you_mean import nearest
from harness.models.decoder import DecoderConfig
from harness.tasks import longest_response


@dataclass(frozen=True, kw_only=True)
class Machine:
    """GPUs that a forecast is for."""

    gpus: int = 1
    """Those of a cell."""
    gpu: str | None = None
    """Name in `RATES`; null takes this machine's."""
    memory_gib: float | None = None
    """GiB of each; null takes that of the named GPU, or this machine's where it has one."""
    engine_gpus: int = 1
    """Those that an engine's weights and cache are spread over."""
    is_cluster: bool = False
    """Every cell has cores and GPUs of its own: those of a cluster."""


HERE = Machine()
"""One GPU of this machine."""


def machine_of(
    launch: Launch, gpu: str | None = None, memory_gib: float | None = None, *, is_cluster: bool = False
) -> Machine:
    """The machine of a launch; fields as in `Machine`."""
    return Machine(
        gpus=launch.gpus * launch.nodes, gpu=gpu, memory_gib=memory_gib, engine_gpus=launch.tensor_parallel,
        is_cluster=is_cluster,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Peak rates of one device."""

    bf16: float
    """Operations per second in BF16, without sparsity."""
    fp32: float
    """In float32, without TF32."""
    memory: float
    """Bytes per second."""
    room_gib: float | None = None
    """GiB that CUDA reports; of the A100 those of its larger kind."""


RATES: Mapping[str, Rates] = {
    "A100": Rates(bf16=312e12, fp32=19.5e12, memory=2.04e12, room_gib=79.0),
    "H100": Rates(bf16=989e12, fp32=67e12, memory=3.35e12, room_gib=79.0),
    "H200": Rates(bf16=989e12, fp32=67e12, memory=4.8e12, room_gib=139.0),
    "B200": Rates(bf16=2250e12, fp32=75e12, memory=8.0e12, room_gib=178.0),
    "cpu": Rates(bf16=40e9, fp32=40e9, memory=10e9),
}
"""Device -> SXM data sheets of NVIDIA; of a CPU one core, as other forecasts here assume."""
GPUS = tuple(name.lower() for name in RATES if name != "cpu")
"""GPUs as one names them."""
UNSEEN = "H200"
"""GPU that is assumed where none of the list is in the machine."""
PRODUCTS, STREAMS = 0.4, 0.6
"""Shares of peak operations and of peak bandwidth that are reached: assumed."""
EMBEDDED = 4.0
"""Seconds of the embedded engine over those of vLLM: assumed; it multiplies emulated formats in torch."""
PROMPT = 256
"""Tokens of a prompt: assumed."""
ADAM_BYTES = 28
"""Per parameter: gradient, float32 weight and two moments, all but the gradient written back."""
START_S = 60.0
"""Imports, weights, engine, CUDA graphs: assumed."""


def check_gpu(gpu: str) -> None:
    """Raises ValueError for a GPU whose rates are not known."""
    if gpu.lower() not in GPUS:
        raise ValueError(f"gpu={gpu}: an unknown GPU; {nearest(gpu.lower(), GPUS)}")


def device_name(config: RunConfig, gpu: str | None = None) -> str:
    """Name in `RATES` of the run's device. `gpu`: a name to take in place of this machine's. Raises ValueError for one
    that is unknown."""
    if gpu is not None:
        check_gpu(gpu)
    if config.trainer.device == "cpu":
        if gpu is not None:
            raise ValueError(f"gpu={gpu}: the trainer is on the CPU (trainer.device=cpu); add trainer.device=cuda")
        return "cpu"
    if gpu is not None:
        return gpu.upper()
    here = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    return next((name for name in RATES if name in here), UNSEEN)


def check_named(cells: Sequence[RunConfig], machine: Machine) -> None:
    """Raises ValueError for a GPU that is unknown or that a cell does not use, and for a GPU or its memory where no
    forecast rests on it."""
    given = {name: value for name, value in (("gpu", machine.gpu), ("memory", machine.memory_gib)) if value is not None}
    for cell in cells if machine.gpu is not None else ():
        device_name(cell, machine.gpu)
    if given and all(cell.model.path is None for cell in cells):
        name, value = next(iter(given.items()))
        raise ValueError(
            f"{name}={value}: models made here are predicted from finished runs, whatever the GPU; leave it out"
        )


def memory_gib(config: RunConfig, machine: Machine) -> float | None:
    """GiB of each GPU: those given, else those of the GPU that is named, else this machine's; None where there is
    none."""
    if machine.memory_gib is not None or config.trainer.device == "cpu":
        return machine.memory_gib
    if machine.gpu is not None:
        return RATES[device_name(config, machine.gpu)].room_gib
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(0).total_memory / 2**30


def folder_time(config: RunConfig, gpus: int = 1, gpu: str | None = None) -> tuple[float, float]:
    """(seconds per step, seconds once) of a run whose model is a folder, its work divided by `gpus`. Raises ValueError
    for a folder that the decoder cannot be."""
    shape, rates = decoder_config(config.model), RATES[device_name(config, gpu)]
    algo, trainer, length = config.algo, config.trainer, response_tokens(config)
    rows = algo.num_prompts * algo.group_size
    drawn = (algo.gen_prompts or algo.num_prompts) * algo.group_size
    size, tokens = num_parameters(shape), rows * (PROMPT + length)
    passes = 2 + 6 * algo.num_epochs + (2 if algo.kl_coef else 0)
    attention = 2 * shape.num_layers * shape.num_heads * shape.head_dim * (PROMPT + length) / 2
    peak = rates.bf16 if trainer.compute == "bf16" else rates.fp32
    train = passes * (used_parameters(shape) + attention) * tokens / (PRODUCTS * peak)
    adam = algo.num_updates * ADAM_BYTES * size / (STREAMS * rates.memory)
    push = (4 * size + weight_bytes(shape, compose(config).plan)) / (STREAMS * rates.memory)
    step = (sampling_s(config, shape, rates, drawn, length) + train + adam) / gpus + push
    held_out = sampling_s(config, shape, rates, config.task.num_eval, length)
    for entry in config.evaluations:
        answers = (entry.num or config.task.num_eval) * (entry.k + entry.greedy)
        longest = entry.max_new_tokens or longest_response(entry.task, entry.options)
        held_out += sampling_s(config, shape, rates, answers, longest)
    return step, START_S + num_evaluations(trainer.steps, trainer.eval_every) * held_out / gpus


def num_evaluations(steps: int, every: int) -> int:
    """Evaluations of a run: before the first step, after every `every` steps, and after the last."""
    return 2 + (steps - 1) // max(1, every)


def response_tokens(config: RunConfig) -> int:
    """Tokens that a response may have: the engine's limit, else the task's."""
    task, size = config.task, {} if config.task.n is None else {"n": config.task.n}
    return config.engine.max_new_tokens or longest_response(task.name, {**task.options, **size})


def sampling_s(config: RunConfig, shape: DecoderConfig, rates: Rates, rows: int, length: int) -> float:
    """Seconds in which one device answers `rows` prompts with `length` tokens each."""
    plan, at_once = compose(config).plan, min(rows, config.engine.max_num_seqs or config.engine.max_batch)
    if not rows:
        return 0.0
    read = weight_bytes(shape, plan) + at_once * (PROMPT + length / 2) * kv_bytes_per_token(shape, plan)
    one = max(read / (STREAMS * rates.memory), 2 * used_parameters(shape) * at_once / (PRODUCTS * rates.bf16))
    prefill = 2 * used_parameters(shape) * rows * PROMPT / (PRODUCTS * rates.bf16)
    return (-(-rows // at_once) * length * one + prefill) * (1.0 if config.engine.name == "vllm" else EMBEDDED)
