"""Memory and time of one update of the local trainer on long sequences, with each option that makes them fit.

    python -m harness.devtools.bench long_sequences --size 0.5b [--lengths 512 8192] [--options plain all] --out x.json
    python -m harness.devtools.bench long_sequences --device cpu --size toy
    python -m harness.devtools.bench long_sequences --size 1.5b --lengths 1152 --passes 8 --options \\
        "flash, bf16 native, compiled" "flash, jet_rl, compiled" --out jet_rl_1.5b.json

A batch is one padded micro-batch of `--tokens` tokens, or one sequence where that is longer: rows from a quarter of the
length up to all of it, evenly spread, after a short prompt; `--passes` repeats it. An update is score, backward and
AdamW, as in the loop with one update per batch: over several passes each is scored first, by a forward pass of its own.
Every option starts from the same weights, so loss and gradient norm of its first update must agree with those of the
others, up to the arithmetic. "jet_rl" computes in the FP8 flow of that method, with the fastest kernels of the GPU.
`--layers` leaves out the others of the size, for a GPU that has no room. Left out: generation, several GPUs, and what a
method adds to a forward pass.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from harness.api import Plan, Sequences
from harness.config.schema import TrainerConfig
from harness.devtools.bench.runner import add_device_and_out, add_numbers, check_device, check_positive, reason, save
from harness.devtools.bench.timing import timed
from harness.foundation.did_you_mean import nearest
from harness.foundation.provenance import commit, hardware, packages
from harness.models.decoder import Decoder, DecoderConfig
from harness.numerics.formats import format_named
from harness.studies.throughput.shapes import shape_of
from harness.trainers.local.forward import Scores, Thrift
from harness.trainers.local.products import use_fp8
from harness.trainers.local.trainer import LocalTrainer
from methods.jet_rl import FP8Flow

WHOLE = 2**30
"""A budget of logits that no micro-batch fills."""
FLASH = Thrift(native_16bit=True, attention_16bit=True, compile=True)
JET_RL = "jet_rl"
"""Arithmetic of `methods.jet_rl`, in place of a format."""
FLOW = Plan(rollout_weights=format_named("e4m3_block"), rollout_acts=format_named("e4m3_1x128"))
OPTIONS: dict[str, tuple[Thrift, str]] = {
    "plain": (Thrift(logits_mib=WHOLE), "fp32"),
    "chunks": (Thrift(), "fp32"),
    "all": (Thrift(checkpoint_layers=True, packing=True), "fp32"),
    "all, bf16 native": (Thrift(checkpoint_layers=True, packing=True, native_16bit=True), "bf16"),
    "chunks, bf16 native, compiled": (Thrift(native_16bit=True, compile=True), "bf16"),
    "checkpoints, bf16 native, compiled": (Thrift(checkpoint_layers=True, native_16bit=True, compile=True), "bf16"),
    "flash, bf16 native, compiled": (FLASH, "bf16"),
    "flash, jet_rl, compiled": (FLASH, JET_RL),
    "flash, checkpoints, bf16 native, compiled": (replace(FLASH, checkpoint_layers=True), "bf16"),
    "flash, checkpoints, jet_rl, compiled": (replace(FLASH, checkpoint_layers=True), JET_RL),
    "flash, checkpoints, jet_rl": (replace(FLASH, checkpoint_layers=True, compile=False), JET_RL),
}
"""Name -> (what saves memory, format of the matmuls)."""
LENGTHS = {"cuda": (512, 2048, 8192, 16384), "cpu": (64, 128)}
TOKENS = {"cuda": 16384, "cpu": 256}
GIB = 2**30


def batch(length: int, tokens: int, vocabulary: int, device: str, passes: int = 1) -> Sequences:
    """Rows of random tokens with ragged ends, at least one, the first of full length; as many `passes` over again."""
    count, prompt = max(1, tokens // length), max(1, min(128, length // 8))
    rng = torch.Generator().manual_seed(length)
    ids = torch.randint(0, vocabulary, (passes * count, length), generator=rng)
    ends = torch.linspace(length, length / 4, count).to(torch.int64).repeat(passes)
    sampled = torch.arange(prompt, length) < ends[:, None]
    return Sequences(
        ids=ids.to(device), prompt_lens=prompt, token_ids=ids[:, prompt:].to(device), sampled=sampled.to(device)
    )


def shape(given: argparse.Namespace) -> DecoderConfig:
    """The shape of the size, with as many layers as were asked for."""
    found = shape_of(given.size)
    return found if given.layers is None else replace(found, num_layers=given.layers)


def trainer_of(config: DecoderConfig, option: str, tokens: int, device: str) -> LocalTrainer:
    """A trainer whose weights are not set yet."""
    thrift, compute = OPTIONS[option]
    model = Decoder(config).to(device)
    if compute == JET_RL:
        plan = FP8Flow().plan(FLOW)
        FP8Flow().wrap(model, FLOW, {})
        use_fp8(model, device, "best")
    else:
        plan = Plan(train_compute=format_named(compute))
    return LocalTrainer(
        model, TrainerConfig(lr=1e-6), plan, temperature=1.0, micro_batch_rows=None, micro_batch_tokens=tokens,
        num_updates=1000, thrift=thrift,
    )  # fmt: skip


@torch.no_grad()
def begin(trainer: LocalTrainer) -> None:
    """Random weights, the same for every option, and no moments."""
    trainer.optimizer.state.clear()
    rng = torch.Generator(trainer.parameters[0].device).manual_seed(0)
    for name, parameter in trainer.model.named_parameters():
        if parameter.dim() == 2:
            parameter.normal_(0.0, 0.02, generator=rng)
        else:
            parameter.fill_(0.0 if name.endswith(".bias") else 1.0)


def update(trainer: LocalTrainer, seqs: Sequences) -> tuple[float, float]:
    """One update: (loss, gradient norm before clipping)."""
    total = int(seqs.sampled.sum())

    def loss_of(rows: torch.Tensor, found: Scores) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        sign = 1.0 - 2.0 * (rows % 2).to(found.logp)[:, None]  # advantages of both signs
        return -(sign * found.logp).sum() / total, {}

    loss, _ = trainer.accumulate(seqs, loss_of, trainer.score(seqs, keep_graph=True))
    return loss, trainer.step()["train/grad_norm"]


def measured(trainer: LocalTrainer, seqs: Sequences, repeats: int) -> dict[str, Any]:
    """Times and memory of updates on one batch from the first weights; the first update warms up and gives the numbers
    to compare.

    An update that does not fit gives {"failed": "out of memory"}, another failure its first line.
    """
    is_cuda = seqs.ids.is_cuda
    begin(trainer)
    if is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    first = (0.0, 0.0)
    try:
        for i in range(repeats + 1):
            took, found = timed(lambda: update(trainer, seqs), seqs.ids.device.type)
            seconds.append(took)
            first = first if i else found
    except torch.OutOfMemoryError:
        trainer.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        return {"failed": "out of memory"}
    except RuntimeError as failure:  # a compiler's, a kernel's
        return {"failed": reason(failure)}
    once = median(seconds[1:])
    real = int((seqs.sampled.sum(1) + seqs.ids.shape[1] - seqs.token_ids.shape[1]).sum())
    row: dict[str, Any] = {"s": once, "tokens": real, "tokens_per_s": real / once, "loss": first[0], "norm": first[1]}
    if is_cuda:
        row |= {"peak_gib": torch.cuda.max_memory_allocated() / GIB, "held_gib": torch.cuda.memory_allocated() / GIB}
    return row


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Every option at every length; what was found is in the file before the next one starts."""
    tokens = given.tokens or TOKENS[given.device]
    found: dict[str, Any] = {
        "size": given.size, "layers": shape(given).num_layers, "passes": given.passes, "micro_batch_tokens": tokens,
        "commit": commit()[0], "packages": packages(),
        "hardware": hardware(given.device), "rows": [],
    }  # fmt: skip
    print(f"{'option':30}{'length':>8}{'rows':>6}{'s':>9}{'tokens/s':>10}{'peak GiB':>10}{'loss':>11}{'norm':>9}")
    lengths = given.lengths or LENGTHS[given.device]
    for option in given.options or usual(given.device):
        trainer = trainer_of(shape(given), option, max(tokens, *lengths), given.device)
        for length in lengths:
            seqs = batch(length, tokens, shape(given).vocab_size, given.device, given.passes)
            row = {"option": option, "length": length, "num_rows": len(seqs.ids), "products": trainer.products()}
            row |= measured(trainer, seqs, given.repeats)
            found["rows"].append(row)
            save(given.out, found)
            print(line(row), flush=True)
        del trainer  # before the next one is made
        gc.collect()
    return found


def usual(device: str) -> list[str]:
    """The options that are measured where none are named: on a CPU those that need no minutes of compiling."""
    return [name for name, (thrift, _) in OPTIONS.items() if device == "cuda" or not thrift.compile]


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    start = f"{row['option']:30}{row['length']:>8}{row['num_rows']:>6}"
    if "failed" in row:
        return f"{start}  {row['failed']}"
    peak = f"{row['peak_gib']:.1f}" if "peak_gib" in row else "-"
    return f"{start}{row['s']:>9.3f}{row['tokens_per_s']:>10.0f}{peak:>10}{row['loss']:>11.5f}{row['norm']:>9.4f}"


def options(parser: argparse.ArgumentParser) -> None:
    """The options of the bench."""
    add_device_and_out(parser)
    usual_lengths, usual_tokens = ("; ".join(f"{d}: {v}" for d, v in one.items()) for one in (LENGTHS, TOKENS))
    parser.add_argument("--size", default="0.5b", help="Qwen2.5's shape of that size (default: 0.5b)")
    parser.add_argument("--lengths", nargs="+", type=int, metavar="TOKENS",
                        help=f"of the longest sequence (default: {usual_lengths})")  # fmt: skip
    parser.add_argument("--options", nargs="+", metavar="OPTION",
                        help=f"each in quotes: {', '.join(map(repr, OPTIONS))} (default: all; cpu: those that are not "
                        "compiled)")  # fmt: skip
    parser.add_argument("--tokens", type=int,
                        help=f"of a micro-batch, padding included (default: {usual_tokens})")  # fmt: skip
    parser.add_argument("--layers", type=int, help="of the size's, the first so many (default: all)")
    add_numbers(parser, ("passes", 1, "micro-batches of an update"), ("repeats", 2, "updates after the first"))


def check(given: argparse.Namespace) -> None:
    """Raises ValueError, one line, for what cannot be measured here."""
    of_size = shape_of(given.size)
    longest = of_size.max_positions
    for option in given.options or ():
        if option not in OPTIONS:
            raise ValueError(f"--options: {option!r} is unknown; {nearest(option, OPTIONS)}")
    for length in given.lengths or ():
        if not 8 <= length <= longest:
            raise ValueError(f"--lengths: {length} tokens; valid: 8 to {longest} for --size {given.size}")
    if given.layers is not None and not 1 <= given.layers <= of_size.num_layers:
        raise ValueError(f"--layers: {given.layers}; valid: 1 to {of_size.num_layers} for --size {given.size}")
    check_positive(given, "repeats", "passes", *["tokens"] * (given.tokens is not None))
    check_device(given.device)


def command(given: argparse.Namespace) -> int:
    """Check the options, then measure."""
    check(given)
    run(given)
    return 0
