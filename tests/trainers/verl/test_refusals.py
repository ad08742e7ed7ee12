"""`lowbit run trainer=verl` with options that cannot be: one line, exit code 2, and nothing on disk; without verl."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path

import pytest
import torch

from harness.cli import main as cli
from harness.config.load import load
from harness.config.resolve import resolve
from harness.config.schema import Launch
from harness.engines.vllm import builds, settings
from harness.foundation.seeds import generator
from harness.models.checkpoint import save_decoder
from harness.models.decoder import Decoder, DecoderConfig
from harness.models.tokenizer import save_tokenizer
from harness.run.checks import check_place
from harness.trainers.verl import checks
from tests.source_tree import ROOT

DATA = ROOT / "tests" / "tasks" / "data"


@pytest.fixture
def with_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if verl were installed."""
    spec, version = importlib.util.find_spec, metadata.version
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "verl" or spec(name))
    monkeypatch.setattr(metadata, "version", lambda name: checks.VERSION if name == "verl" else version(name))


def refused(capsys: pytest.CaptureFixture[str], results: Path, *words: str) -> str:
    """The one line that the command says."""
    run = ["run", "trainer=verl", "method=bf16", "model=xs128", "task=chain", *words, "--results", str(results)]
    assert cli.main(run) == 2
    said = capsys.readouterr()
    lines = said.err.strip().splitlines()
    assert len(lines) == 1, said.err
    assert "result:" not in said.out
    assert not results.exists() or list(results.iterdir()) == []
    return lines[0].removeprefix("lowbit: error: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("launch.gpus=0",), "launch.gpus=0: must be at least 1"),
        (
            ("launch.gpus=3",),
            "launch.gpus=3: 256 samples of an update do not divide by 3 GPUs; change algo.num_prompts",
        ),
        (("launch.nodes=2",), "launch.nodes=2: several machines need a running cluster; give launch.ray_address"),
        (
            ("launch.gpus=4", "launch.sequence_parallel=3"),
            "launch.sequence_parallel=3: launch.gpus=4 of a machine do not divide by it; valid: 1, 2, 4",
        ),
        (
            ("launch.gpus=8", "launch.sequence_parallel=8"),
            "launch.sequence_parallel=8: 4 heads and 2 key-value heads do not divide by it; valid: 1, 2",
        ),
        (("launch.checkpoint_share=0",), "launch.checkpoint_share=0: must be above 0"),
        (("launch.gpu=2",), "launch.gpu=2: launch has no such setting; nearest: gpus; "),
        (("engine.tensor_parallel=2",), "unknown key engine.tensor_parallel; "),
        (("trainer.v1.trainer_mode=separate_async",), "unknown key trainer.v1.trainer_mode; "),
        (("actor_rollout_ref.rollout.n=4",), "unknown key actor_rollout_ref.rollout.n; "),
        (("engine.top_p=0.9",), "engine.top_p=0.9: truncated sampling"),
        (("engine=embedded",), "engine=embedded: trainer=verl drives vLLM's servers"),
        (("trainer=ray",), "trainer=ray: no such choice; "),
        (("model=hf", "model.path=nowhere"), "nowhere"),
    ],
)
@pytest.mark.usefixtures("with_verl")
def test_wrong_options(capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    assert said in refused(capsys, tmp_path / "results", *words)


@pytest.mark.usefixtures("with_verl")
def test_a_cluster_that_does_not_answer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray").write_text('#!/bin/sh\ntest "$1 $2 $3" = "status --address here:1"\n')
    (tmp_path / "ray").chmod(0o755)
    monkeypatch.setattr(checks.sys, "executable", str(tmp_path / "python"))
    line = refused(capsys, tmp_path / "results", "launch.ray_address=there:1")
    assert line.startswith("launch.ray_address=there:1: no Ray cluster answers there; ")
    checks.check_cluster(2, "here:1")


@pytest.mark.usefixtures("with_verl")
def test_more_gpus_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(settings, "installed_build", lambda: builds.CUDA)
    config = resolve(load(["trainer=verl", "method=bf16", "trainer.device=cuda"]))
    check_place(config, Launch(gpus=2))
    with pytest.raises(ValueError, match=r"^launch\.gpus=4: 2 CUDA devices are visible; valid: 1 to 2$"):
        check_place(config, Launch(gpus=4))


def test_verl_is_not_installed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "verl" else find(name))
    assert refused(capsys, tmp_path / "results").startswith("trainer=verl: verl is not installed; pip install")


def test_a_task_without_questions_to_train_on(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = DecoderConfig(
        vocab_size=128, num_layers=1, hidden_size=16, num_heads=1, num_kv_heads=1, head_dim=32, intermediate_size=16
    )
    save_decoder(Decoder(config, generator=generator("cpu", 0, "refusals")), tmp_path / "model")
    save_tokenizer(tmp_path / "model", 128)
    words = ("model=hf", f"model.path={tmp_path / 'model'}", "task=math500", f"task.path={DATA / 'math500'}")
    line = refused(capsys, tmp_path / "results", *words)
    assert line.startswith("task=math500: no questions to train on; give a task.path that has some and task.options.")


@pytest.mark.parametrize(
    ("word", "usual"),
    [("launch.offload=params", "none"), ("launch.tensor_parallel=2", "1"), ("launch.sequence_parallel=2", "1")],
)
def test_what_verl_alone_does(tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str, usual: str) -> None:
    said = refused(capsys, tmp_path / "results", "trainer=local", word)
    assert said == f"{word}: trainer=verl alone does it; valid: {usual}, or trainer=verl"


def test_the_local_trainer_refuses_more_than_one_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, tmp_path / "results", "trainer=local", "launch.gpus=4")
    assert said == "launch.nodes=1 launch.gpus=4: trainer=local works on one GPU; choose trainer=verl"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("launch.compile=true", "method=bf16_train"), "launch.compile=true: the trainer emulates bf16; add launch."),
        (("launch.compile=true", "method=fp16"), "launch.compile=true: the trainer emulates fp16; add launch.nati"),
        (("launch.logits_mib=0",), "launch.logits_mib=0: must be at least 1"),
    ],
)
def test_launches_that_exclude_themselves_leave_no_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert refused(capsys, tmp_path / "results", "trainer=local", "engine=embedded", *words).startswith(said)
