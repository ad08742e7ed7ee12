"""Guessed seconds of a run on a Hugging Face folder: Qwen2.5-7B by hand, and what must and must not change them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from harness.config.load import load
from harness.config.resolve import resolve
from harness.config.schema import RunConfig
from harness.models.checkpoint import config_json
from harness.studies.throughput.shapes import shape_of
from harness.sweep.folder_time import (
    GPUS,
    HERE,
    RATES,
    START_S,
    Machine,
    device_name,
    folder_time,
    memory_gib,
    response_tokens,
)
from harness.tasks.wordmath import Wordmath
from tests.source_tree import ROOT

PARAMETERS, LAYERS, KV_WIDTH, WIDTH = 7_615_616_512, 28, 2 * 28 * 512, 3584
"""Sizes of Qwen2.5-7B: 4 key-value heads of 128 in 28 layers, 28 heads of 128."""
FLOPS, BYTES = 0.4 * 989e12, 0.6 * 3.35e12
"""That an H100 is taken to reach."""


def config_folder(parent: Path) -> Path:
    """A folder with a config.json alone: no weight is read."""
    path = parent / "7b"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config_json(shape_of("7b"), torch.bfloat16)))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return config_folder(tmp_path_factory.mktemp("models"))


def config_of(folder: Path, *words: str) -> RunConfig:
    given = [
        "model=hf", f"model.path={folder}", "engine=vllm", "trainer.device=cuda", "method=bf16", "task=gsm8k",
        f"task.path={ROOT / 'tests' / 'tasks' / 'data' / 'gsm8k'}", "task.num_eval=100", "algo.num_prompts=16",
        "algo.group_size=8", "engine.max_new_tokens=1024", "trainer.steps=50", "trainer.eval_every=20",
    ]  # fmt: skip
    return resolve(load([*given, *words]), lambda path: "0")


def sampling(rows: int, at_once: int, weights: float, kv_bytes: float, new: int = 1024) -> float:
    """A round of decoding reads weights and cache, or multiplies; prompts of 256 tokens are multiplied before."""
    at_once = min(rows, at_once)
    reads = (weights + at_once * (256 + new / 2) * kv_bytes) / BYTES
    products = 2 * PARAMETERS * at_once / FLOPS
    rounds = -(-rows // at_once)
    return rounds * new * max(reads, products) + 2 * PARAMETERS * rows * 256 / FLOPS


def test_a_step_of_7b_by_hand(folder: Path) -> None:
    config = config_of(folder, "engine.max_batch=64")
    step, once = folder_time(config, gpu="h100")
    tokens = 128 * (256 + 1024)
    train = 8 * (PARAMETERS + 2 * LAYERS * WIDTH * 640) * tokens / FLOPS  # 2 to score, 6 to learn
    adam, push = 28 * PARAMETERS / BYTES, (4 + 2) * PARAMETERS / BYTES
    sample = sampling(128, 64, 2 * PARAMETERS, 2 * KV_WIDTH)
    assert step == pytest.approx(sample + train + adam + push, rel=1e-6)
    assert 30 < step < 60
    assert once == pytest.approx(START_S + 4 * sampling(100, 64, 2 * PARAMETERS, 2 * KV_WIDTH))  # after 0, 20, 40, 50


def test_what_gpus_share_and_what_each_does(folder: Path) -> None:
    """All but the push is divided."""
    config = config_of(folder)
    one, eight = (folder_time(config, gpus, "h100") for gpus in (1, 8))
    push = 6 * PARAMETERS / BYTES
    assert one[0] - push == pytest.approx(8 * (eight[0] - push))
    assert one[1] - START_S == pytest.approx(8 * (eight[1] - START_S))


def test_lower_bits_are_read_faster_and_the_trainer_stays(folder: Path) -> None:
    plain = folder_time(config_of(folder, "algo.num_prompts=1"), gpu="h100")[0]
    low = folder_time(config_of(folder, "algo.num_prompts=1", "method=naive", "precision=int4"), gpu="h100")[0]
    cached = folder_time(config_of(folder, "algo.num_prompts=1", "method=naive", "precision=int4+kv8"), gpu="h100")[0]
    assert plain - low > 1024 * 2 * 0.6 * PARAMETERS / BYTES  # more than 60 % of the weights' bytes, each token
    assert low - cached == pytest.approx(1024 * 8 * (256 + 512) * KV_WIDTH / BYTES, rel=1e-6)


def test_arithmetic_engine_and_passes(folder: Path) -> None:
    base = folder_time(config_of(folder), gpu="h100")[0]
    train = 8 * (PARAMETERS + 2 * LAYERS * WIDTH * 640) * 128 * 1280 / FLOPS
    exact = folder_time(config_of(folder, "trainer.compute=fp32"), gpu="h100")[0]
    assert exact - base == pytest.approx(train * (989 / 67 - 1), rel=1e-6)
    reference = folder_time(config_of(folder, "algo.kl_coef=0.01"), gpu="h100")[0]
    assert reference - base == pytest.approx(train / 4, rel=1e-6)  # one more scoring
    twice = folder_time(config_of(folder, "algo.num_epochs=2"), gpu="h100")[0]
    assert twice - base == pytest.approx(0.75 * train + 28 * PARAMETERS / BYTES, rel=1e-6)
    rolled, wide = (sampling(rows, config_of(folder).engine.max_batch, 2 * PARAMETERS, 2 * KV_WIDTH)
                    for rows in (128, 256))  # fmt: skip
    embedded = folder_time(config_of(folder, "engine=embedded"), gpu="h100")[0]
    assert embedded - base == pytest.approx(3 * rolled, rel=1e-3)
    drawn = folder_time(config_of(folder, "algo.dynamic_sampling=true", "algo.gen_prompts=32"), gpu="h100")[0]
    assert drawn - base == pytest.approx(wide - rolled, rel=1e-6)


def test_evaluations_on_tasks_of_their_own_add_their_answers(folder: Path) -> None:
    base = folder_time(config_of(folder), gpu="h100")
    data = ROOT / "tests" / "tasks" / "data" / "gsm8k"
    more = f"evaluations=[{{task:gsm8k,path:{data},k:4,greedy:true,num:10,max_new_tokens:512}}]"
    found = folder_time(config_of(folder, more), gpu="h100")
    assert found[0] == base[0]
    width = config_of(folder).engine.max_batch
    assert found[1] - base[1] == pytest.approx(4 * sampling(50, width, 2 * PARAMETERS, 2 * KV_WIDTH, 512), rel=1e-6)
    own = folder_time(config_of(folder, "evaluations=[{task:sort,options:{n:16},k:1,num:10}]"), gpu="h100")
    assert own[1] - base[1] == pytest.approx(4 * sampling(10, width, 2 * PARAMETERS, 2 * KV_WIDTH, 17), rel=1e-6)


def test_names_of_devices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(folder)
    assert [device_name(config, name) for name in ("h100", "B200", "a100")] == ["H100", "B200", "A100"]
    with pytest.raises(ValueError, match=r"^gpu=h10: an unknown GPU; nearest: h100") as caught:
        device_name(config, "h10")
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_name(config) == "H200"
    on_cpu = config_of(folder, "trainer.device=cpu", "engine=embedded")
    assert device_name(on_cpu) == "cpu"
    with pytest.raises(ValueError, match=r"gpu=h100: the trainer is on the CPU \(trainer\.device=cpu\); add trainer"):
        device_name(on_cpu, "h100")
    with pytest.raises(ValueError, match=r"^gpu=cpu: an unknown GPU; valid: a100, h100, h200, b200$"):
        device_name(on_cpu, "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for told, expected in (("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA GeForce", "H200")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index, told=told: told)
        assert device_name(config) == expected
    assert set(RATES) == {"A100", "H100", "H200", "B200", "cpu"}


def test_memory_is_what_was_given_or_what_is_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(folder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (memory_gib(config, HERE), memory_gib(config, Machine(memory_gib=80.0))) == (None, 80.0)
    assert [memory_gib(config, Machine(gpu=name)) for name in GPUS] == [79.0, 79.0, 139.0, 178.0]
    assert memory_gib(config, Machine(gpu="h200", memory_gib=96.0)) == 96.0


def test_tokens_of_a_response_are_the_engines_the_tasks_or_assumed(folder: Path) -> None:
    config = config_of(folder)
    assert response_tokens(config) == 1024
    assert response_tokens(config_of(folder, "engine.max_new_tokens=7")) == 7
    assert response_tokens(config_of(folder, "engine.max_new_tokens=null", "task.options.max_new_tokens=300")) == 300
    assert response_tokens(config_of(folder, "engine.max_new_tokens=null")) == 1024
    own = [folder, "engine.max_new_tokens=null", "task.path=null"]
    assert response_tokens(config_of(*own, "task=reasoning_gym")) == 512
    assert response_tokens(config_of(*own, "task=count")) == 64
    assert [response_tokens(config_of(*own, "task=sort", f"task.n={n}")) for n in (8, 16)] == [9, 17]
    assert response_tokens(config_of(*own, "task=wordmath", "task.n=4")) == Wordmath(n=4).max_new_tokens
