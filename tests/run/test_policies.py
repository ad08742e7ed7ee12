"""The trained policy on disk: equal logits in transformers, shards, tokenizer, codes; what cannot be kept is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harness.config.load import launch_of, run_id
from harness.foundation.provenance import tensors_hash
from harness.models.checkpoint import load_decoder, read_tensors
from harness.models.shards import write_folder
from harness.records.policies import last_policy, saved_codes
from harness.run.cell import run_cell
from harness.run.policies import base_config, is_due, save_hf, save_quantized
from tests.toy import small_config, small_launch, small_run

IDS = torch.tensor([[2, 10, 12, 3, 11, 14, 13, 19]])


def test_the_saved_policy_has_the_logits_of_the_trainer_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config, launch = small_config("method=flashrl", "precision=int8"), small_launch(tmp_path, save="every:2")
    result = run_cell(config, launch)
    assert result.status == "ok", result.error
    home = tmp_path / "policies" / "test" / run_id(config)
    assert sorted(path.name for path in home.iterdir()) == ["step-2", "step-4"]
    folder = last_policy(tmp_path, "test", run_id(config))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = load_decoder(folder)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(IDS), theirs(IDS).logits, atol=1e-5, rtol=1e-5)
    assert tensors_hash((name, tensor.detach()) for name, tensor in ours.named_parameters()) == result.hashes["final"]
    assert AutoTokenizer.from_pretrained(folder).decode([10, 11]) == "01"
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip


def test_shards_hold_the_same_tensors(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    save_hf(run, tmp_path / "one")
    tensors = dict(read_tensors(tmp_path / "one"))
    write_folder(tmp_path / "many", base_config(tmp_path / "one"), tensors.items(), tmp_path / "one", 20_000)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(sum(t.nbytes for t in load_file(file).values()) <= 20_000 or len(load_file(file)) == 1 for file in files)
    again = dict(read_tensors(tmp_path / "many"))
    assert list(again) != [] and set(again) == set(tensors)
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    load_decoder(tmp_path / "many")
    assert (tmp_path / "many" / "tokenizer.json").read_bytes() == (run.folder / "tokenizer.json").read_bytes()
    assert not (tmp_path / "many" / "recipe.json").exists()


def test_the_codes_are_those_of_the_push(tmp_path: Path) -> None:
    from harness.numerics.formats import format_named
    from harness.numerics.quantize import quantize

    run = small_run(tmp_path, ["method=naive", "precision=int8"])
    save_quantized(run, tmp_path / "quantized")
    held = dict(read_tensors(tmp_path / "quantized"))
    for name, tensor in run.trainer.weights():
        if name.endswith("_proj.weight"):
            q = quantize(tensor.bfloat16(), format_named("int8_channel"))
            assert q.scale is not None
            assert torch.equal(held[name], q.codes)
            assert torch.equal(held[f"{name}_scale"].flatten().float(), q.scale.flatten())
        else:
            assert torch.equal(held[name], tensor.bfloat16())
    words = json.loads((tmp_path / "quantized" / "config.json").read_text())
    assert words["quantization_config"]["format"] == "int-quantized" and words["torch_dtype"] == "bfloat16"


def test_a_rollout_without_codes_keeps_the_weights_and_says_so(tmp_path: Path) -> None:
    config, launch = small_config("trainer.steps=1"), small_launch(tmp_path, save="quantized")
    result = run_cell(config, launch)
    assert result.status == "ok" and result.launch["save"] == "quantized"
    assert result.retries == ["no quantized checkpoint: precision=bf16 has no codes"]
    assert last_policy(tmp_path, "test", run_id(config)).name == "step-1"


def test_codes_that_vllm_does_not_read_are_not_kept(tmp_path: Path) -> None:
    config = small_config("trainer.steps=1", "method=naive", "precision=int2")
    result = run_cell(config, small_launch(tmp_path, save="quantized"))
    (said,) = result.retries
    assert said.startswith("no quantized checkpoint: rollout_weights=int2_g16_asym with rollout_acts=base: valid pairs")
    assert last_policy(tmp_path, "test", run_id(config)).name == "step-1"
    assert not last_policy(tmp_path, "test", run_id(config)).with_name("quantized").exists()


@pytest.mark.parametrize(
    ("save", "due"),
    [("none", []), ("hf", [7]), ("quantized", [7]), ("every:3", [3, 6, 7]), ("every:10", [7])],
)
def test_saves_are_due(save: str, due: list[int]) -> None:
    launch = launch_of({"save": save})
    assert [step for step in range(1, 8) if is_due(launch, step, 7)] == due


@pytest.mark.parametrize("save", ["every:0", "every", "HF", ""])
def test_a_wrong_save_names_the_valid_ones(save: str) -> None:
    with pytest.raises(ValueError, match=r"valid: none, hf, quantized, every:N"):
        launch_of({"save": save})


def test_no_policy_is_one_line(tmp_path: Path) -> None:
    anew = "to have one, repeat its lowbit run or lowbit sweep with --again launch.save="
    for of, name, said in (
        (last_policy, "", f"no saved policy; {anew}hf"),
        (saved_codes, "/quantized", f"no codes of a policy; {anew}quantized"),
    ):
        with pytest.raises(ValueError) as told:
            of(tmp_path, "test", "0" * 12)
        assert str(told.value) == f"{tmp_path}/policies/test/{'0' * 12}{name}: {said}"
