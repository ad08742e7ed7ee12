"""Sweep files, what is missing of an engine, estimates of memory and cache, shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.engines.vllm.memory import kv_bytes_per_token, num_parameters, tensor_bytes, weight_bytes
from harness.foundation.clock import GIB
from harness.records.paths import throughput_folder
from harness.studies.throughput.estimates import (
    OVERHEAD_GIB,
    UTILIZATION,
    does_not_fit,
    expected_s,
    kv_tokens_expected,
    kv_tokens_needed,
)
from harness.studies.throughput.plan import cells, engine_specs, missing, read_only, read_sweep, todo
from harness.studies.throughput.records import new_record, read_record, read_records, write_record
from harness.studies.throughput.shapes import SIZES, plan_of
from harness.studies.throughput.tables import map_specs
from tests.source_tree import ROOT
from tests.studies.throughput import made

REPORTED = {
    "0.5b": 494032768, "1.5b": 1543714304, "3b": 3085938688, "7b": 7615616512, "14b": 14770033664, "32b": 32763876352,
}  # fmt: skip
"""Parameters in the safetensors files of Qwen2.5, a tied head counted once."""


@pytest.mark.parametrize("size", REPORTED)
def test_a_shape_has_the_parameters_of_its_checkpoint(size: str) -> None:
    """To the last one."""
    assert num_parameters(SIZES[size]) == REPORTED[size]
    assert SIZES[size].tie_embeddings == (size in ("0.5b", "1.5b", "3b"))


def test_bytes_of_formats_and_cache() -> None:
    """One 256 x 512 matrix: codes and scales; the 7B's cache: 2 x 28 layers x 4 heads x 128 x 2 bytes a token."""
    codes = 256 * 512
    weights = {name: plan_of(name).rollout_weights for name in ("bf16", "int8", "fp8_block", "int4", "nvfp4")}
    bits = {name: 8 * tensor_bytes((256, 512), fmt, plan_of(name)) for name, fmt in weights.items() if fmt is not None}
    assert bits == {
        "bf16": 16 * codes,
        "int8": 8 * codes + 32 * 256,
        "fp8_block": 8 * codes + 32 * 2 * 4,
        "int4": 4 * codes + 16 * codes / 128,
        "nvfp4": 4 * codes + 8 * codes / 16 + 32,
    }
    assert kv_bytes_per_token(SIZES["7b"], plan_of("bf16")) == 57344
    assert kv_bytes_per_token(SIZES["7b"], plan_of("fp8_block+kv8")) == 28672
    assert weight_bytes(SIZES["7b"], plan_of("bf16")) == 2 * num_parameters(SIZES["7b"])


def test_what_fits_is_estimated_before_loading() -> None:
    """32B in BF16 (61 GiB) fits 80 GiB and not 64; its cache there is what is left of 90 %."""
    assert does_not_fit("32b", "bf16", 80.0, 512) is None
    assert does_not_fit("32b", "int4", 64.0, 512) is None
    assert "61.0 GiB of weights need about 64.2 GiB, 57.6 GiB are there" in str(does_not_fit("32b", "bf16", 64.0, 512))
    free = (UTILIZATION * 80 - OVERHEAD_GIB) * GIB - 2 * num_parameters(SIZES["32b"])
    assert kv_tokens_expected("32b", "bf16", 80.0) == int(free / 262144)
    assert kv_tokens_expected("32b", "bf16", 40.0) == 0
    assert kv_tokens_needed(8, 100, 16) == 8 * 112
    assert kv_tokens_needed(8, 96, 16) == 8 * 96


@pytest.mark.parametrize("name", ["throughput_h200", "throughput_cpu"])
def test_the_sweeps_of_the_repository_are_valid(name: str) -> None:
    """And the big one is planned at 6 sizes x 6 precisions of 36 cells, about 15 minutes on two GPUs."""
    sweep = read_sweep(name, ROOT / "sweeps")
    assert len(engine_specs(sweep)) == (len(sweep.sizes) * len(sweep.precisions) + len(sweep.extra) + len(sweep.checks))
    if sweep.device == "cuda":
        assert (len(sweep.sizes), len(sweep.precisions), len(cells(sweep))) == (6, 6, 36)
        seconds = sum(expected_s(sweep, spec, missing(sweep, spec, None), 139.8) for spec in engine_specs(sweep))
        assert 12 * 60 < seconds / 2 < 18 * 60


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("sizes: [7b, 0.5b]", "sizes: [7b, 8b]", "'8b' is unknown; nearest: .*7b"),
        ("precisions: [bf16, int8, int4]", "precisions: [bf16, in8]", "'in8' is unknown; nearest: int8"),
        ("lengths: [512", "length: [512", "unknown key length; nearest: lengths"),
        ("lengths: [512, 1024", "lengths: [1024, 512", "lengths=.*rising"),
        ("lengths: [512", "lengths: [64", "lengths=.*above the 106 tokens"),
        ("lengths: [512, 1024, 4096]", "prompt: 64", "lengths is missing"),
        ("batches: [1, 8, 64]", "batches: [1, 8, 8]", "batches=.*none twice"),
        ("batches: [1, 8, 64]", "batches: [1, x]", "batches.1='x'"),
        ("breakdown: [8]", "breakdown: [9]", "breakdown=.*9"),
        ("batch: 64, length: 4096", "batch: 65, length: 4096", "checks: batch=65"),
        ("breakdown: [8]", "extra: [{size: 7b, precision: int8}]", "extra: 7b-int8"),
        ("device: cuda", "device: tpu", "device='tpu'"),
        ("device: cuda", "device: cuda\nmin_steps: 200", "min_steps=200"),
    ],
)
def test_a_bad_sweep_is_refused_in_one_line(tmp_path: Path, old: str, new: str, words: str) -> None:
    """With the file, the field, the value and what is valid."""
    assert old in made.YAML
    with pytest.raises(ValueError, match=words) as error:
        made.sweep(tmp_path, made.YAML.replace(old, new))
    assert "throughput_made.yaml: " in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_sweep_names_the_nearest() -> None:
    """Only the files of throughput sweeps are offered."""
    with pytest.raises(ValueError, match="nearest: throughput_h200") as error:
        read_sweep("throughput_h20", ROOT / "sweeps")
    assert "standard" not in str(error.value)


def test_only_filters_and_refuses_unknown_names(tmp_path: Path) -> None:
    """A key twice is an alternative; a check counts as its size and precision."""
    sweep = made.sweep(tmp_path)
    stems = [spec.stem for spec in engine_specs(sweep, read_only("size=7b,precision=int8,precision=bf16"))]
    assert stems == ["7b-bf16-check", "7b-bf16", "7b-int8"]
    for text, words in (("size=9b", "nearest"), ("batch=8", "size=NAME"), ("size", "size=NAME")):
        with pytest.raises(ValueError, match=words):
            engine_specs(sweep, read_only(text))
    with pytest.raises(ValueError, match=r"^--only size=toy: throughput_made has no such engine; lowbit throughput "):
        engine_specs(sweep, read_only("size=toy"))


def test_an_extra_engine_is_last_in_the_plan_and_next_to_its_size_in_tables(tmp_path: Path) -> None:
    """In the order of work it comes last, in tables with its size."""
    sweep = made.sweep(tmp_path, made.YAML + "extra: [{size: 7b, precision: bf16+kv8}]\n")
    assert [spec.stem for spec in engine_specs(sweep)][-1:] == ["7b-bf16+kv8"]
    assert [spec.precision for spec in map_specs(sweep) if spec.size == "7b"] == ["bf16", "int8", "int4", "bf16+kv8"]


def test_only_what_is_missing_is_measured_again(tmp_path: Path) -> None:
    """Through the files: a full record lacks nothing, a cut one lacks what was cut, a skip lacks nothing."""
    sweep = made.sweep(tmp_path)
    folder = throughput_folder(tmp_path, sweep.name)
    found = made.records(sweep)
    del found["7b-int8"]["cells"]["8x1024"], found["7b-int8"]["prefill"], found["7b-int8"]["breakdown"]["8"]
    del found["7b-bf16"]["pair"], found["7b-bf16-check"]["check"], found["0.5b-bf16"]
    found["0.5b-int8"] |= {"cells": {}, "skipped": "memory: too big"}
    for stem, record in found.items():
        write_record(folder / f"{stem}.json", record)
    records = read_records(tmp_path, sweep)
    assert records == found
    everything = engine_specs(sweep)
    lacking = {spec.stem: missing(sweep, spec, records.get(spec.stem)) for spec in everything}
    assert lacking["7b-int8"] == ["8x1024", "breakdown/8", "prefill"]
    assert lacking["7b-bf16"] == ["pair"]
    assert lacking["7b-bf16-check"] == ["check"]
    assert lacking["7b-int4"] == lacking["0.5b-int8"] == []
    assert len(lacking["0.5b-bf16"]) == 9 + 2
    stems = [spec.stem for spec in todo(sweep, records, everything)]
    assert stems == ["7b-bf16-check", "7b-bf16", "7b-int8", "0.5b-bf16"]
    again = [spec.stem for spec in todo(sweep, records, everything, is_retried=True)]
    assert again == ["7b-bf16-check", "7b-bf16", "7b-int8", "0.5b-bf16", "0.5b-int4"]


def test_a_foreign_file_is_not_taken_for_a_record(tmp_path: Path) -> None:
    """Broken JSON and other JSON are named."""
    path = tmp_path / "7b-bf16.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        read_record(path)
    path.write_text(json.dumps({"run_id": "x"}))
    with pytest.raises(ValueError, match="not a throughput record"):
        read_record(path)
    sweep = made.sweep(tmp_path)
    with pytest.raises(ValueError, match="Out of range float"):
        write_record(path, new_record(sweep, engine_specs(sweep)[0]) | {"prefill": {"seconds": float("nan")}})
