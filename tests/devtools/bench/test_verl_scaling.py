"""The scaling bench of trainer=verl without verl: what a cell asks for, what is skipped, what is kept and shown."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from harness.config.compose import compose
from harness.devtools.bench import runner, verl_scaling
from harness.models.checkpoint import load_config, load_decoder
from harness.trainers.verl import checks

CELL = {"tokens": [64.0, 64.0], "stages": {"generate": [0.5, 0.7], "update": [0.5, 0.7]}, "trainer_gib": None,
        "gpu_gib": None, "start_s": 60.0}  # fmt: skip


def given(folder: Path, *words: str) -> argparse.Namespace:
    asked = ["--out", str(folder / "x.json"), "--work", str(folder / "work"), *words]
    return runner.parsed("verl_scaling", asked)


def test_a_folder_of_random_weights_has_a_tokenizer_of_its_whole_vocabulary(tmp_path: Path) -> None:
    verl_scaling.make_folder(tmp_path / "m", "toy", "cpu")
    weights = dict(load_decoder(tmp_path / "m").named_parameters())
    assert float(weights["model.layers.0.mlp.up_proj.weight"].detach().std()) == pytest.approx(0.02, rel=0.02)
    assert float(weights["model.norm.weight"].detach().min()) == 1.0
    assert float(weights["model.layers.0.self_attn.q_proj.bias"].detach().abs().max()) == 0.0
    tokenizer = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    assert tokenizer.get_vocab_size(with_added_tokens=True) == 1024
    assert tokenizer.decode([3, 1023], skip_special_tokens=False) == "t3 t1023"


def test_every_gpu_has_as_many_prompts(tmp_path: Path) -> None:
    verl_scaling.make_folder(tmp_path / "m", "toy", "cpu")
    words = given(tmp_path, "--device", "cpu", "--prompts", "3", "--group", "4", "--tokens", "8")
    config, launch = verl_scaling.cell_of(tmp_path / "m", "toy", 2, "fp8_block", words)
    assert (config.algo.num_prompts, launch.gpus, config.engine.max_batch) == (6, 2, 12)
    assert (config.method, config.precision.name) == ("bf16_train", "fp8_block")
    assert config.task.options["max_new_tokens"] == 8 and not launch.native_16bit
    checks.check_launch(config, launch)
    words.tensor_parallel = 2  # one engine has the prompts of both
    assert verl_scaling.cell_of(tmp_path / "m", "toy", 2, "fp8_block", words)[0].engine.max_batch == 24


def test_micro_batches_are_those_of_the_capacity_plan(tmp_path: Path) -> None:
    verl_scaling.make_folder(tmp_path / "m", "toy", "cpu")
    launch = verl_scaling.cell_of(tmp_path / "m", "7b", 2, "bf16", given(tmp_path))[1]
    assert launch.checkpoint_layers and launch.native_16bit
    assert launch.micro_batch_tokens % (128 + 512) == 0


def test_what_does_not_fit_is_skipped_with_the_plans_words(tmp_path: Path) -> None:
    words = given(tmp_path, "--size", "14b", "--gpus", "1", "--precision", "bf16")
    found = verl_scaling.measure(tmp_path, "14b", 1, "bf16", words)
    assert found["skipped"].startswith("memory: the update needs ")


def test_finished_cells_are_kept_and_failed_ones_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []

    def measure(folder: Path, size: str, gpus: int, precision: str, words: argparse.Namespace) -> dict[str, object]:
        started.append(f"{gpus} {precision}")
        is_bad = len(started) == 2
        return {"failed": "RuntimeError: x"} if is_bad else CELL | {"steps": [0.9, 1.1] if gpus == 1 else [1.2, 1.3]}

    monkeypatch.setattr(verl_scaling, "measure", measure)
    words = ["--out", str(tmp_path / "x.json"), "--work", str(tmp_path), "--device", "cpu", "--size", "toy", "--gpus",
             "1,2", "--precision", "bf16"]  # fmt: skip
    assert runner.run("verl_scaling", words) == 1
    assert "toy 2 bf16: failed: RuntimeError: x" in capsys.readouterr().out
    assert runner.run("verl_scaling", words) == 0
    assert started == ["1 bf16", "2 bf16", "2 bf16"]
    one, two = json.loads((tmp_path / "x.json").read_text())["summary"]
    assert (one["step_s"], one["efficiency"], one["tokens_per_s_gpu"]) == (1.0, 1.0, 64.0)
    assert (two["step_s"], two["efficiency"]) == (1.25, 0.8)
    assert not (tmp_path / "model-toy").exists()
    assert runner.run("verl_scaling", [*words, "--tokens", "99"]) == 0  # another load: nothing is kept
    assert len(started) == 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--size", "9b"), "sizes: '9b' is unknown; "),
        (("--precision", "int9"), "precisions: 'int9' is unknown; "),
        (("--steps", "1"), "--steps: 1; valid: >= 2"),
        (("--prompts", "0"), "--prompts: 0; valid: >= 1"),
        (("--tensor-parallel", "-1"), "--tensor-parallel: -1; valid: >= 1"),
        (("--minutes", "0"), "--minutes: 0; valid: above 0"),
    ],
)
def test_bad_input_is_one_line_before_weights_are_drawn(
    tmp_path: Path, words: tuple[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--out", str(tmp_path / "x.json"), "--work", str(tmp_path / "work"), "--device", "cpu"]
    assert runner.run("verl_scaling", [*place, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"verl_scaling: {said}") and not list(tmp_path.iterdir())


def test_what_a_plan_of_a_full_update_refuses_is_run_as_it_is_said(tmp_path: Path) -> None:
    words = given(tmp_path, "--method", "bf16_lora", "--unplanned", "--drawn", "--tensor-parallel", "2", "--offload",
                  "params", "--pass-tokens", "5120", "--mean-tokens", "300")  # fmt: skip
    verl_scaling.make_folder(tmp_path / "m", "32b", "cpu", words.drawn)
    assert {path.suffix for path in (tmp_path / "m").iterdir()} == {".json"}
    config, launch = verl_scaling.cell_of(tmp_path / "m", "32b", 2, "bf16", words)
    assert (launch.tensor_parallel, launch.offload, launch.gpus) == (2, "params", 2)
    assert (launch.micro_batch_tokens, launch.checkpoint_layers) == (5120, True)
    assert (config.method, config.task.options["mean_tokens"]) == ("bf16_lora", 300)
    checks.check_launch(config, launch)
    checks.check_shared_engine(launch.tensor_parallel, compose(config).plan, load_config(tmp_path / "m"))


def test_a_folder_without_weights_is_not_taken_for_one_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that an interrupted run left."""
    taken: list[bool] = []

    def measure(folder: Path, *_: object) -> dict[str, object]:
        taken.append(any(folder.glob("*.safetensors")))
        if len(taken) == 1:
            raise KeyboardInterrupt
        return CELL | {"steps": [1.0, 1.0]}

    monkeypatch.setattr(verl_scaling, "measure", measure)
    words = ["--out", str(tmp_path / "x.json"), "--work", str(tmp_path), "--device", "cpu", "--size", "toy", "--gpus",
             "1", "--precision", "bf16"]  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        runner.run("verl_scaling", [*words, "--drawn"])
    assert runner.run("verl_scaling", words) == 0
    assert taken == [False, True]


def test_settings_that_came_later_leave_finished_cells_of_older_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verl_scaling, "measure", lambda *_: CELL | {"steps": [1.0, 1.0]})
    words = ["--out", str(tmp_path / "x.json"), "--work", str(tmp_path), "--device", "cpu", "--size", "toy", "--gpus",
             "1", "--precision", "bf16"]  # fmt: skip
    assert runner.run("verl_scaling", words) == 0
    told = json.loads((tmp_path / "x.json").read_text())["settings"]
    assert set(told) == {"device", "prompts", "group", "prompt_tokens", "tokens", "steps", "pass_tokens", "gpu_memory",
                         "compile"}  # fmt: skip
    assert runner.run("verl_scaling", [*words, "--padded", "--mean-tokens", "5"]) == 0
    told = json.loads((tmp_path / "x.json").read_text())["settings"]
    assert (told["padded"], told["mean_tokens"]) == (True, 5)
