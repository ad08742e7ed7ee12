"""The capacity plan: memory and time by hand, what fits how, what is checked against what, bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.api import Plan
from harness.cli import main as cli
from harness.config.schema import TrainerConfig
from harness.engines.vllm import memory
from harness.engines.vllm.memory import num_parameters
from harness.foundation.provenance import ROOT
from harness.models.decoder import Decoder, DecoderConfig
from harness.numerics.formats import format_named
from harness.studies.capacity import check, fastest, report
from harness.studies.capacity.host import host_parts, pinned_bytes, usable_gib
from harness.studies.capacity.memory import (
    GIB,
    USABLE_GIB,
    adapter_parameters,
    at_once,
    layer_bytes,
    sampling_parts,
    update_parts,
)
from harness.studies.capacity.place import (
    ARMS,
    Layout,
    Work,
    engine_ways,
    first_that_fits,
    place,
    placements,
    remedy,
    sequence_splits,
)
from harness.studies.capacity.seconds import Links, collective_s, decode_s, step
from harness.studies.stage_rates import RATES, Measured, operations, read_measured
from harness.studies.throughput.plan import read_sweep
from harness.studies.throughput.shapes import shape_of
from harness.trainers.local.forward import Thrift
from harness.trainers.local.trainer import LocalTrainer

COUNT = 7_615_616_512
"""Parameters of Qwen2.5-7B."""


def record(step_ms: dict[int, float], idle: float = 0.0) -> dict[str, Any]:
    """Steps of constant cost by batch, at contexts 512 and 1024."""
    cells = {
        f"{batch}x{n}": {"status": "ok", "context": n, "step_ms": ms}
        for batch, ms in step_ms.items()
        for n in (512, 1024)
    }
    breakdown = {"1": {"step_ms": 1.0, "host_ms": idle}}
    return {"cells": cells, "breakdown": breakdown, "prefill": {"tokens": 8000, "seconds": 0.1}}


FOUND = Measured(
    records={"7b-bf16": record({1: 4.0, 32: 8.0, 64: 12.0}), "32b-bf16": record({1: 20.0, 8: 22.0}, idle=0.5)},
    push_s={"bf16": 0.01, "fp8_block": 0.02},
    layer_s={"bf16": (1e-15, 2e-15), "fp8": (0.5e-15, 1e-15)},
    bytes_per_s=1e12,
)
SEVEN = Work(size="7b", arm="bf16", length=1000, prompt=24, batch=512, pass_tokens=16384)


def test_a_plan_of_many_layouts_counts_the_parameters_of_a_size_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[DecoderConfig] = []
    shapes = memory.tensor_shapes
    monkeypatch.setattr(memory, "tensor_shapes", lambda config: counted.append(config) or shapes(config))
    memory.num_parameters.cache_clear()
    assert len(report.cells_of(FOUND, [SEVEN, replace(SEVEN, length=2000)], (1, 8), Links())) == 4
    assert counted.count(shape_of("7b")) <= 2  # parameters, and the bytes of an engine


def test_the_memory_of_7b_on_8_gpus_by_hand() -> None:
    d, ff, vocab, layers = 3584, 18944, 152064, 28
    linear = d * (2 * d + 2 * 512 + 3 * ff)
    block = linear + d + 2 * 512 + 2 * d
    outside = 2 * vocab * d + d
    assert num_parameters(shape_of("7b")) == COUNT == layers * block + outside
    weights = 2 * COUNT / GIB
    sampling = sampling_parts("7b", "bf16", 8, 1)
    assert sampling == pytest.approx({
        "engine weights": weights, "engine overhead": 3.0, "masters and moments": 12 * COUNT / 8 / GIB,
        "push": 2 + 4 * vocab * d / GIB,
    })  # fmt: skip
    assert sampling_parts("7b", "bf16", 8, 4)["engine weights"] == pytest.approx(weights / 4)
    kept = 4 * (2 * d + 4 * d + 3 * ff) + 2 * (5 * d + d + ff) + 4 * (2 + 28)
    gathered = 4 * (2 * block + outside) + 4 * (block + outside)
    wanted = {
        "masters and moments": 12 * COUNT / 8 / GIB,
        "gradients": 4 * COUNT / 8 / GIB,
        "gathered or cast weights": (gathered + 2 * linear * 28) / GIB,
        "activations": 1000 * 28 * kept / GIB,
        "logits": 12 * 1000 * vocab / GIB,
    }
    assert update_parts("7b", "bf16", 8, 1000, False) == pytest.approx(wanted)
    checkpointed = {"gathered or cast weights": (gathered + 2 * linear) / GIB}
    checkpointed |= {"activations": 1000 * (kept + 4 * d * 28) / GIB}
    assert update_parts("7b", "bf16", 8, 1000, True) == pytest.approx(wanted | checkpointed)
    adapters, resting = 12 * adapter_parameters("7b"), linear * layers  # of a base on one GPU, computed in BF16
    for arithmetic, frozen in (("bf16", 2 * resting + 4 * (COUNT - resting)), ("fp8", 4 * COUNT)):
        parts = (
            update_parts("7b", arithmetic, 1, 1000, True, is_lora=True),
            sampling_parts("7b", "fp8_block", 1, 1, is_lora=True, arithmetic=arithmetic),
        )
        assert [found["masters and moments"] for found in parts] == pytest.approx([(frozen + adapters) / GIB] * 2)
    alone = update_parts("7b", "bf16", 1, 16384, True)
    assert alone["logits"] == pytest.approx(3.0) and alone["gathered or cast weights"] == 2 * linear / GIB
    assert update_parts("7b", "fp8", 1, 1, True)["gathered or cast weights"] == 2 * linear * 28 / GIB
    assert update_parts("7b", "fp8", 8, 1, True)["gathered or cast weights"] == pytest.approx(
        (gathered + 2 * linear) / GIB
    )
    per_response = 57344 * 1024  # 1010 tokens lie in 64 blocks of 16
    assert at_once("7b", "bf16", 1010, 10 * per_response / GIB, 1) == 10
    assert at_once("7b", "fp8_block+kv8", 1010, 10 * per_response / GIB, 1) == 20
    assert at_once("7b", "bf16", 1010, 10 * per_response / GIB, 8) == 40, "4 key-value heads divide by 4"


def test_the_bytes_of_a_layer_are_those_that_autograd_keeps() -> None:
    """With as many key-value heads as heads, which is what a GPU computes."""
    tokens, shape = 97, DecoderConfig(
        vocab_size=32, num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=4, head_dim=32, intermediate_size=160,
        qk_norm=False, attention_bias=True,
    )  # fmt: skip
    kept = [kept_bytes(replace(shape, num_layers=n), tokens) for n in (2, 3)]
    assert kept[1] - kept[0] == tokens * layer_bytes(shape)


def kept_bytes(shape: DecoderConfig, tokens: int) -> int:
    """Bytes of activations that the local trainer's forward pass keeps, weights and their casts left out."""
    model = Decoder(shape, generator=torch.Generator().manual_seed(0))
    LocalTrainer(
        model, TrainerConfig(lr=1e-6), Plan(train_compute=format_named("bf16")), temperature=1.0,
        micro_batch_rows=None, micro_batch_tokens=tokens, num_updates=1, thrift=Thrift(native_16bit=True),
    )  # fmt: skip
    storages: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        alive.append(x)
        if tokens in x.shape:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model.hidden(torch.arange(tokens)[None] % 32)
    return sum(storages.values())


def test_the_time_of_a_step_by_hand() -> None:
    at, links = place(SEVEN, 8), Links(nvlink=100.0, network=50.0, host=20.0)
    free = 0.9 * 139.8 * GIB - (2 + 12 / 8) * COUNT - 5 * GIB - 4 * 152064 * 3584
    assert (at.ways, at.share, at.at_once, at.rows, at.is_checkpointed) == (1, 64, free // (57344 * 1024), 16, True)
    found = step(FOUND, SEVEN, at, links)
    assert found is not None and found.rounds == 1 and not found.is_host_bound
    shape, tokens, head = shape_of("7b"), 64 * 1024, 152064 * 3584
    forward, both = operations(shape, 1024)
    gather = COUNT * 7 / 8 / 100e9
    assert found.seconds == pytest.approx({
        "generate": 12.0 + 64 * 24 * 0.1 / 8000, "push": 0.01, "sleep": 2 * 2 * COUNT / 20e9,
        "score": tokens * (28 * forward * 1e-15 + 2 * head * 1e-15),
        "update": tokens * (28 * (both * 2e-15 + forward * 1e-15) + 6 * head * 2e-15) + COUNT * 28 / 8 / 1e12,
        "communicate": 4 * (3 * 4 + 4) * gather + 4 * gather, "offload": 0.0,
    })  # fmt: skip
    two_nodes = step(FOUND, SEVEN, place(SEVEN, 16), links)
    assert two_nodes is not None
    assert two_nodes.seconds["generate"] == pytest.approx(8.0 + 32 * 24 * 0.1 / 8000)
    assert collective_s(links, 16, 1e9) == pytest.approx(max(15 / 16 / 100, 1 / 2 / 50))
    assert step(FOUND, replace(SEVEN, arm="int8"), at, links) is None, "not timed"
    assert step(FOUND, replace(SEVEN, length=3000), at, links) is None, "beyond what was timed"


def test_a_batch_between_measured_ones_and_more_than_fit() -> None:
    bf16 = FOUND.records["7b-bf16"]
    assert decode_s(bf16, 48, 24, 1000) == (pytest.approx(10.0), {32, 64})
    assert decode_s(bf16, 65, 24, 1000) is None
    at = replace(place(SEVEN, 8), at_once=24)
    found = step(FOUND, SEVEN, at, Links())
    assert found is not None and found.rounds == 3  # 22 at a time, between 1 and 32
    each = 4.0 + (8.0 - 4.0) * 21 / 31
    assert found.seconds["generate"] == pytest.approx(3 * each + 64 * 24 * 0.1 / 8000)
    assert replace(at, update={}).verdict == "fits, 24 of 64 at a time"


def test_tensor_parallel_over_the_fewest_gpus_that_hold_a_response() -> None:
    work = Work(size="32b", arm="bf16", length=512, prompt=24, batch=16)
    state, push = 12 * num_parameters(shape_of("32b")) / 4 / GIB, 2 + 4 * 152064 * 5120 / GIB
    weights = sampling_parts("32b", "bf16", 4, 1)["engine weights"]
    assert state + 3 + push + weights / 2 > USABLE_GIB > state + 3 + push + weights / 4
    at = place(work, 4)
    assert (at.ways, at.share) == (4, 16)
    assert at.sampling_gib == pytest.approx(state + 3 + push + weights / 4)
    assert place(work, 8).ways == 1 and place(replace(work, size="14b"), 2).ways == 1
    at = replace(at, update={}, at_once=8)  # timed up to 8 responses: two rounds
    found = step(FOUND, work, at, Links(all_reduce_us=50.0))
    assert found is not None and found.is_host_bound
    read, reduces = 16 * 24 * 0.1 / 8000, 2 * 64 * 512 * 50e-6
    assert found.seconds["generate"] == pytest.approx(read / 4 + 2 * (0.022 * 512 / 4 + reduces))


def test_what_does_not_fit_says_why_and_what_would() -> None:
    work = Work(size="14b", arm="bf16", length=512)
    at = place(work, 1)
    assert at.verdict == "does not fit" and at.at_once == 0 and at.rows == 1 and at.is_checkpointed
    assert at.reason == (
        f"the update needs {at.update_gib:.1f} of 125.8 GiB a GPU, masters and moments 165.1; "
        f"sampling needs {at.sampling_gib:.1f} of 125.8 GiB a GPU, masters and moments 165.1"
    )
    assert remedy(work, 1) == 4 and not place(work, 4).reason and step(FOUND, work, at, Links()) is None
    cell = report.PlanRow(work=work, place=at, step=None, remedy=4)
    assert cell.words == "no: 4" and replace(cell, place=place(work, 8)).words == "-"
    assert place(Work(size="0.5b", arm="bf16", length=512), 1).verdict == "fits"


def test_the_fastest_layout_by_hand_and_why_not_the_others() -> None:
    """7B on 2 GPUs: every layout's seconds are those of `step`, and the least wins against the first that fits."""
    links = Links(nvlink=100.0, network=50.0, host=20.0, all_reduce_us=1.0)
    work = replace(SEVEN, batch=64)
    choice = fastest.fastest(FOUND, work, 2, links, trains="full")
    tried = [choice.taken, *choice.others]
    assert len(tried) == 2 * 2 * 2  # engines and sequences over 1 or 2 GPUs, offloaded or not
    for each in tried:
        assert each.step is not None and each.step == step(FOUND, work, each.at, links)
    assert choice.taken.seconds == min(each.seconds for each in tried)
    # 64 responses: alone an engine takes 32 at 8 ms a step; over two GPUs it takes 64 at 12 ms, halved
    assert choice.taken.at.layout == Layout(ways=2)
    first = step(FOUND, work, place(work, 2), links)
    assert first is not None and first.seconds["generate"] == pytest.approx(8.0 + 32 * 24 * 0.1 / 8000)
    assert choice.taken.step is not None
    reduces = 2 * 28 * 1000 * 1e-6
    assert choice.taken.step.seconds["generate"] == pytest.approx(12.0 / 2 + 64 * 24 * 0.1 / 8000 / 2 + reduces)
    lines = list(choice.why())
    assert lines[0] == f"taken: engines over 2 GPUs, {choice.taken.seconds:.1f} s" and len(lines) == 8
    lost = first.seconds["generate"] - choice.taken.step.seconds["generate"]
    plain = next(each for each in choice.others if each.at.layout == Layout())
    assert f"data parallel: {plain.seconds:.1f} s, generate {lost:+.1f} s" in lines


def test_engines_that_the_trainer_refuses_are_not_taken_and_have_its_words() -> None:
    """An FP8 cache is on one GPU; block FP8 of 0.5B has 448 of 896 channels on each of two."""
    found = replace(FOUND, records={**FOUND.records, "7b-fp8_block+kv8": record({1: 4.0, 32: 8.0, 64: 12.0})})
    cached = replace(SEVEN, arm="fp8_block+kv8", batch=64)
    choice = fastest.fastest(found, cached, 2, Links(), trains="full")
    assert choice.taken.at.ways == 1 and choice.taken.step is not None
    said = "launch.tensor_parallel=2: the scales of an FP8 cache are those of all heads; valid with it: 1"
    assert f"engines over 2 GPUs: {said}" in choice.why()
    assert fastest.fastest(found, replace(cached, arm="bf16"), 2, Links(), trains="full").taken.at.ways == 2
    small = first_that_fits(Work(size="0.5b", arm="fp8_block", length=1000), 2, Layout(ways=2))
    assert small.reason == (
        "launch.tensor_parallel=2: 448 of 896 channels of model.layers.0.self_attn.q_proj.weight are no whole groups "
        "of 128"
    )
    tight = fastest.fastest(found, replace(cached, size="32b"), 2, Links(), trains="full").taken.at
    assert tight.ways == 1 and tight.reason and not tight.refusal  # what lacks least is one that could be


def test_lora_is_taken_where_nothing_else_fits_or_where_it_is_asked_for() -> None:
    work = replace(SEVEN, size="32b", batch=64, length=512)
    choice = fastest.fastest(FOUND, work, 2, Links())
    assert choice.taken.at.layout.is_lora and choice.taken.step is not None
    full = [each for each in choice.others if not each.at.layout.is_lora]
    assert full and all(each.step is None and "the update needs" in each.at.reason for each in full)
    assert any(line.startswith("data parallel: the update needs ") for line in choice.why())
    none = fastest.fastest(FOUND, work, 2, Links(), trains="full")
    assert none.taken.step is None and none.taken.at.reason and remedy(work, 2) == 8
    seven, adapters = (fastest.fastest(FOUND, SEVEN, 8, Links(), trains=trains) for trains in ("any", "lora"))
    assert not seven.taken.at.layout.is_lora and adapters.taken.at.layout.is_lora
    assert adapters.taken.seconds < seven.taken.seconds
    assert any(line.endswith(f"{adapters.taken.seconds:.1f} s, trains adapters alone") for line in seven.why())


def test_what_a_layout_changes_by_hand() -> None:
    """Sequences over 4 GPUs, offloading and adapters of 7B on 8 GPUs, against the plain layout."""
    d, ff, vocab, layers = 3584, 18944, 152064, 28
    linear = d * (2 * d + 2 * 512 + 3 * ff)
    adapters = 32 * layers * (2 * (d + d) + 2 * (d + 512) + 3 * (d + ff))
    assert adapter_parameters("7b") == adapters
    plain, split, off, lora = (
        first_that_fits(SEVEN, 8, layout)
        for layout in (Layout(), Layout(split=4), Layout(is_offloaded=True), Layout(is_lora=True))
    )
    # memory
    assert off.sampling["masters and moments"] == 0 and off.update == plain.update
    assert lora.sampling["masters and moments"] == pytest.approx((2 * COUNT + 12 * adapters) / 8 / GIB)
    assert lora.update["gradients"] == pytest.approx(4 * adapters / 8 / GIB)
    assert (split.rows, plain.rows) == (64, 16)  # four GPUs hold four times the tokens of a pass
    assert split.update["activations"] == plain.update["activations"]
    long = Work(size="7b", arm="bf16", length=32000, prompt=24, batch=8, pass_tokens=8192)
    alone, shared = (list(placements(long, 8, Layout(split=n)))[-1] for n in (1, 4))
    assert first_that_fits(long, 8, Layout()).is_checkpointed
    assert not first_that_fits(long, 8, Layout(split=4)).is_checkpointed
    assert shared.update["activations"] == pytest.approx(alone.update["activations"] / 4)
    # seconds
    links = Links(nvlink=100.0, network=50.0, host=20.0)
    costs = [step(FOUND, SEVEN, at, links) for at in (plain, split, off, lora)]
    base, spread, away, thin = (cost.seconds for cost in costs if cost is not None)
    assert (spread["score"], spread["update"]) == (pytest.approx(base["score"]), pytest.approx(base["update"]))
    tokens, heads = 64 * 1024, 2 * 28 + 2 * 4
    exchanged = 4 * tokens * 4 * 128 * heads * layers * 3 / 4 / 100e9
    gather = COUNT * 7 / 8 / 100e9
    passes = {"plain": 4, "split": 4}  # 256 responses of a group, 64 at a time
    assert spread["communicate"] == pytest.approx(passes["split"] * 16 * gather + 4 * gather + exchanged)
    assert base["communicate"] == pytest.approx(passes["plain"] * 16 * gather + 4 * gather)
    assert away["offload"] == pytest.approx(2 * (3 * 4 + 8) * COUNT / 8 / 20e9) and base["offload"] == 0
    frozen = tokens * (layers * 2 * linear + 2 * vocab * d) * 2e-15
    moments = COUNT * 28 / 8 / 1e12 * (1 - adapters / COUNT)
    assert base["update"] - thin["update"] == pytest.approx(frozen + moments)
    assert sequence_splits("7b", 8) == [1, 2, 4] and engine_ways("7b", 8) == [1, 2, 4]
    assert sequence_splits("0.5b", 8) == [1, 2] and sequence_splits("32b", 64) == [1, 2, 4, 8]


def test_the_memory_of_the_host_for_7b_by_hand() -> None:
    """BF16 engines and float32 shards, every tensor a power of two."""
    assert [pinned_bytes(n) for n in (1, 2, 3, 4096, 4097, 2**29 + 1)] == [1, 2, 4, 4096, 8192, 2**30]
    # bytes: query-key-value 33.0e6, o_proj 25.7e6, gate and up 271.6e6, down 135.8e6, embedding and head 1.09e9
    block = 2**25 + 2**14 + 2**25 + 2**29 + 2**28 + 2 * 2**13
    engine = 28 * block + 2 * 2**31 + 2**13
    # of 8 ranks: q and o 6.4e6, k and v 0.9e6, gate, up and down 33.9e6, biases 1792 and 256, embedding 272.5e6
    shard = 28 * (2 * 2**23 + 2 * 2**20 + 3 * 2**26 + 2**11 + 2 * 2**8 + 2 * 2**11) + 2 * 2**29 + 2**11
    found = host_parts("7b", "bf16", 8, 1, is_offloaded=True)
    assert found == pytest.approx({
        "masters and moments": 8 * 3 * shard / GIB, "sleeping engines": 8 * engine / GIB,
        "file": 5e9 / GIB, "whole model": 0.0, "processes": 48.0,
    })  # fmt: skip
    assert 1.5 < found["sleeping engines"] * GIB / (8 * 2 * COUNT) < 2  # what rounding costs
    assert 1.5 < found["masters and moments"] * GIB / (12 * COUNT) < 2
    nodes = host_parts("7b", "bf16", 64, 4)  # of eight machines the first: two engines, nothing offloaded
    share = 28 * (2**23 + 2**12 + 2**23 + 2**27 + 2**26 + 2 * 2**11) + 2 * 2**29 + 2**11
    assert nodes["sleeping engines"] == pytest.approx(8 * share / GIB) and nodes["masters and moments"] == 0
    assert (nodes["file"], nodes["whole model"], nodes["processes"]) == (5e9 / GIB, 0.0, 48.0)
    shared = host_parts("7b", "fp8_block", 1, 1)  # an engine and a file are 20 GiB, what one rank reads 28
    assert shared == {"masters and moments": 0.0, "sleeping engines": 0.0, "file": 0.0,
                      "whole model": 4 * COUNT / GIB, "processes": 6.0}  # fmt: skip
    # adapters of rank 32 for k_proj [512, 3584], of 8 ranks [4, 3584] and [64, 32]: masters and two moments
    d, ff = 3584, 18944
    pairs = [(d, d), (512, d), (512, d), (d, d), (ff, d), (ff, d), (d, ff)]
    each = [pinned_bytes(4 * 4 * k) + pinned_bytes(4 * n // 8 * 32) for n, k in pairs]
    lora = host_parts("7b", "bf16", 8, 1, is_offloaded=True, is_lora=True)["masters and moments"]
    assert lora == pytest.approx(8 * (shard / 2 + 3 * 28 * sum(each)) / GIB)  # the base in bfloat16


def test_what_does_not_fit_the_host_takes_another_layout_or_says_so() -> None:
    """7B on 8 GPUs: 8 engines need 214 GiB beside a file of 4.7 and 48 of processes, engines over 4 GPUs 53.5."""
    assert [usable_gib(256.0, gpus) for gpus in (1, 8, 64)] == pytest.approx([230.4, 1843.2, 1843.2])
    assert place(SEVEN, 8).ways == 1 and place(SEVEN, 8).host_gib == pytest.approx(266.7, abs=0.05)
    tight = replace(SEVEN, host_gib=20.0)
    at = place(tight, 8)
    assert (at.ways, at.reason) == (4, "") and at.host_gib == pytest.approx(53.5 + 4.66 + 48, abs=0.05)
    choice = fastest.fastest(FOUND, tight, 8, Links(), trains="full")
    assert choice.taken.at.layout.ways == 4 and not choice.taken.at.layout.is_offloaded
    assert "data parallel: the host needs 266.7 of 144.0 GiB a machine, sleeping engines 214.0" in list(choice.why())
    none = fastest.fastest(FOUND, replace(SEVEN, host_gib=10.0), 8, Links(), trains="full").taken
    assert none.step is None and none.at.fits_gpu and none.at.ways == 4  # the least that is short of memory
    assert none.at.reason == "the host needs 106.2 of 72.0 GiB a machine, sleeping engines 53.5"
    assert remedy(replace(SEVEN, host_gib=10.0), 8) is None  # machines of eight GPUs have no more
    assert remedy(replace(SEVEN, host_gib=30.0), 1) == 2  # 37.4 of 27 GiB, then 43.4 of 54
    with pytest.raises(ValueError, match=r"host_gib=-1\.0: a number of GiB above 0 is expected"):
        replace(SEVEN, host_gib=-1.0)


def test_the_layouts_table_is_the_one_of_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    """`docs/verl.md` shows the plan that the command prints; the runs behind it stand in their files."""
    words = ["--layouts", "--sizes", "7b,32b", "--lengths", "1024,8192,16384", "--results", str(ROOT / "results")]
    assert cli.main(["capacity", *words, "--gpus", "8"]) == 0
    planned, _, measured = capsys.readouterr().out.partition("Measured:")
    docs = (ROOT / "docs" / "verl.md").read_text(encoding="utf-8")
    rows = [line for line in planned.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 2 * 3 and all(row in docs for row in rows)
    rows = [line for line in measured.splitlines() if line.startswith("| ")]
    layout = "engines over 2 GPUs, bf16_lora, checkpoints"
    assert len(rows) > 6 and f"| 32b | 2 H200 | 1024 | {layout} | 53.9 | 48.4 | 169 | `verl_32b_h200.json` |" in rows


def test_engines_and_generations_are_checked_and_updates_where_there_are_any(tmp_path: Path) -> None:
    sweep = read_sweep(RATES)
    found = read_measured(ROOT / "results", sweep)
    rows = check.engine_rows(found.records)
    worst = {what: max(abs(row.error) for row in rows if row.what == what) for what in ("weights", "cache")}
    assert len(rows) == 62 and worst["weights"] < 0.06 and worst["cache"] < 0.02
    assert all(row.predicted < row.measured for row in rows if row.what == "weights")
    whole = list(check.generation_rows(ROOT / "results", found, sweep))
    shorter = [f"7b-{precision}, {batch} x 512" for precision in ("bf16", "fp8_block") for batch in (64, 256)]
    assert [row.where for row in whole] == [*shorter, "0.5b-bf16, 64 x 16384"]
    assert all(abs(row.error) < (0.1 if "fp8" in row.where else 0.07) for row in whole)
    (tmp_path / "bench").mkdir()
    assert any("no measurement is committed" in line for line in check.section(tmp_path, found, sweep))
    rows_there = [
        {"option": name, "length": 1024, "num_rows": 4, "s": 2.0, "peak_gib": 100.0}
        for name in ("chunks, bf16 native, compiled", "checkpoints, bf16 native, compiled", "plain")
    ]
    made = {"size": "7b", "rows": [*rows_there, {"option": "plain", "failed": "out of memory"}]}
    (tmp_path / "bench" / "long_sequences_7b.json").write_text(json.dumps(made), encoding="utf-8")
    plain, _, thrifty, time = check.update_rows(tmp_path, FOUND)
    assert plain.predicted == pytest.approx(sum(update_parts("7b", "bf16", 1, 4096, False).values()))
    assert thrifty.error == pytest.approx(sum(update_parts("7b", "bf16", 1, 4096, True).values()) / 100 - 1)
    forward, both = operations(shape_of("7b"), 1024)
    learn = 4096 * (28 * (both * 2e-15 + forward * 1e-15) + 6 * 152064 * 3584 * 2e-15)
    assert time.predicted == pytest.approx(learn + COUNT * 28 / 1e12) and time.measured == 2.0
    assert not any("no measurement is committed" in line for line in check.section(tmp_path, found, sweep))


def test_steps_under_verl_are_checked_against_what_was_measured() -> None:
    found = read_measured(ROOT / "results", read_sweep(RATES))
    rows = list(check.verl_rows(ROOT / "results", found))
    memory = {row.where: row for row in rows if row.what == "verl, memory"}
    cells = [(size, f"{gpus}") for size in ("0.5b", "1.5b", "7b") for gpus in (1, 2)]
    cells.insert(5, ("7b", "1, fp8_block"))
    assert list(memory) == [f"{size}, 128 x 512 on each of {gpus}" for size, gpus in cells]
    assert all(-0.04 < row.error < 0.09 for row in memory.values())
    last = memory["1.5b, 128 x 512 on each of 2"]
    assert last.predicted == pytest.approx(sum(update_parts("1.5b", "bf16", 2, 26 * 640, False).values()))
    assert last.measured == pytest.approx(98.475, abs=1e-3)
    stages = [row.what for row in rows if row.where == last.where]
    assert stages == ["verl, memory", "verl, generate", "verl, score", "verl, update"]


def test_what_is_committed_makes_the_committed_page() -> None:
    found = read_measured(ROOT / "results", read_sweep(RATES))
    wanted = [Work(size="7b", arm=arm, length=4096) for arm in ARMS]
    page = (ROOT / "results" / "tables" / "capacity_h200.md").read_text(encoding="utf-8")
    for gpus, title in ((1, "## 1 GPU (estimated)"), (8, "## 8 GPUs (assumed)")):
        lines = "\n".join(report.section(report.cells_of(found, wanted, [gpus], Links()), gpus)).splitlines()
        assert lines[0] == title and lines[-1].startswith("| 7b | 4096 | ")
        assert all(line in page for line in lines[2:]) and len(lines) == 5


def test_the_command_writes_a_page_a_table_and_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("bench", "throughput"):
        (tmp_path / name).symlink_to(ROOT / "results" / name)
    words = ["capacity", "--results", str(tmp_path), "--gpus", "1,16", "--sizes", "7b,0.5b", "--lengths", "512,2048"]
    assert cli.main([*words, "--batch", "64"]) == 0
    assert not (tmp_path / "tables").exists() and not (tmp_path / "figures").exists()
    assert cli.main([*words, "--batch", "64", "--write"]) == 0
    said = capsys.readouterr().out
    assert "## 16 GPUs (assumed)" in said and "- weights: 31 measured" in said
    assert said.startswith("# Capacity plan for NVIDIA H200\n\n## 1 GPU (estimated)\n")
    assert f"\n\n{report.LEGEND} `^` rates of steps that waited for the host; " in said
    assert said.count("\nMemory: BF16, ") == 2
    rows = (tmp_path / "tables" / "capacity_h200.csv").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 1 + 2 * 2 * 2 * 7 and rows[1].startswith("0.5b,512,bf16,1,64,estimated,fits,")
    page = (tmp_path / "tables" / "capacity_h200.md").read_text(encoding="utf-8")
    assert " | bf16 | fp8_block | fp8_block+kv8 | int8 | nvfp4 | int4 | one FP8 flow |\n" in page
    assert "\nNo other GPU was measured, so there is no plan for one.\n" in page
    assert (tmp_path / "figures" / "capacity_h200.png").stat().st_size > 10000


def test_four_bits_are_planned_and_where_they_were_not_timed_have_no_seconds() -> None:
    found = read_measured(ROOT / "results", read_sweep(RATES))
    wanted = [Work(size=size, arm=arm, length=512) for size in ("3b", "7b") for arm in ("int8", "nvfp4", "int4")]
    cells = report.cells_of(found, wanted, [1], Links())
    assert [cell.words for cell in cells] == ["-", "-", "-", "45.9 x2 c", "52.1 x2 c", "46.4 x2 c"]
    sampling = [cell.place.sampling["engine weights"] for cell in cells[3:]]
    assert sampling == pytest.approx([8.11, 5.45, 5.16], abs=0.01)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--gpus", "0"], "--gpus: '0': whole numbers above 0 are expected"),
        (["--gpus", "8,12"], "--gpus 12: 1 to 8, or whole nodes of 8"),
        (["--sizes", "8b"], "sizes: '8b' is unknown"),
        (["--lengths", "40000"], "lengths=40000: 0.5b answers with 1 to 32704 tokens"),
        (["--network", "-1"], "--network: '-1': GB/s above 0 are expected"),
        (["--host-gib", "0"], "--host-gib: '0': GiB above 0 are expected"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["capacity", *words, "--results", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("lowbit: error: ") and err.count("\n") == 1 and expected in err
