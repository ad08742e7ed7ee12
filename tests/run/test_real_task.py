"""A math data set and a Hugging Face folder through the whole loop: prompts of different lengths, graded in workers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from harness.config.compose import compose
from harness.config.decoder_config import decoder_config
from harness.config.load import load, run_id
from harness.config.resolve import resolve
from harness.config.schema import Launch, RunConfig
from harness.foundation.seeds import generator
from harness.models.checkpoint import content_hash, load_config, save_decoder
from harness.models.decoder import Decoder, DecoderConfig
from harness.models.tokenizer import save_tokenizer
from harness.run.cell import run_cell
from harness.run.checks import check
from harness.run.collect import sequences
from harness.run.loop import grpo_step
from harness.run.run import Collected
from harness.start.prepare import check_data
from harness.tasks import Item
from tests.source_tree import ROOT
from tests.toy import small_config, small_launch

DATA = ROOT / "tests" / "tasks" / "data"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2-style model with the 128-character tokenizer."""
    path = tmp_path_factory.mktemp("models") / "toy"
    config = DecoderConfig(
        vocab_size=128, num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96,
        qk_norm=False, attention_bias=True, max_positions=512, eos_id=1, pad_id=0, bos_id=2,
    )  # fmt: skip
    save_decoder(Decoder(config, generator=generator("cpu", 0, "real")), path)
    save_tokenizer(path, 128)
    return path


def config_of(folder: Path, *words: str) -> RunConfig:
    overrides = [
        "model=hf", f"model.path={folder}", "task=gsm8k", f"task.path={DATA / 'gsm8k'}", "task.options.num_workers=1",
        "task.num_eval=3", "algo.num_prompts=2", "algo.group_size=2", "engine.max_new_tokens=12", "trainer.steps=1",
        "trainer.eval_every=1",
    ]  # fmt: skip
    return resolve(load([*overrides, *words]), lambda path: content_hash(Path(path)))


def test_gsm8k_runs_on_a_hugging_face_folder(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, "method=flashrl", "precision=fp8_channel")
    result = run_cell(config, Launch(results=str(tmp_path), sweep="test"))
    assert result.status == "ok", result.error
    assert len(result.evals[0].correct) == 3
    assert result.evals[0].unparsable_frac == 1.0  # a random model states no answer, which is not a wrong answer
    assert result.hashes["model"] == content_hash(folder)


def test_the_id_follows_the_weights_and_not_the_path(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    moved.symlink_to(folder)
    assert run_id(config_of(folder)) == run_id(config_of(moved))


def test_prompts_of_different_lengths_score_as_alone(folder: Path, tmp_path: Path) -> None:
    from harness.run.build import build

    config = config_of(folder, "method=bf16", "precision=fp32", "trainer.compute=fp32")
    run, _ = build(config, small_launch(tmp_path))
    row = grpo_step(run)
    assert row["mismatch/logp_absdiff_max"] < 1e-5
    items = [Item(index=i, prompt=tuple(range(3, 3 + n)), reference="", key=str(i)) for i, n in enumerate((4, 9))]
    rollout = run.engine.generate(
        [item.prompt for item in items], num_samples=1, max_new_tokens=6, temperature=1.0, seed=0
    )
    device = torch.device("cpu")
    both = run.trainer.score(sequences(items, rollout, 0, device)).logp
    assert (both - rollout.logp).abs().max() < 1e-5


def test_a_folder_trains_in_bf16_unless_the_user_or_a_part_says_otherwise(folder: Path, tmp_path: Path) -> None:
    """The default is the arithmetic of `bf16_train`, bit for bit; float32 differs by what BF16 rounds."""
    from harness.run.build import build

    def row(*words: str) -> dict[str, float]:
        run, _ = build(config_of(folder, "precision=fp32", *words), small_launch(tmp_path))
        return grpo_step(run)

    assert config_of(folder).trainer.compute == "bf16"
    assert config_of(folder, "method=bf16_train", "precision=bf16").trainer.compute is None
    assert config_of(folder, "trainer.compute=fp32").trainer.compute == "fp32"
    assert small_config().trainer.compute is None
    default, exact = row("method=bf16"), row("method=bf16", "trainer.compute=fp32")
    part = row("method=bf16", "parts=[bf16_train.BF16Compute]")
    same = ("train/loss", "train/grad_norm", "train/entropy", "mismatch/kl_k3", "mismatch/logp_absdiff_max")
    assert [default[name] for name in same] == [part[name] for name in same]
    assert exact["mismatch/logp_absdiff_max"] < 1e-5
    assert 1e-4 < default["mismatch/logp_absdiff_max"] < 0.1
    with pytest.raises(ValueError, match=r"train_compute.*trainer\.compute=fp32"):
        compose(config_of(folder, "method=bf16_train", "precision=bf16", "trainer.compute=fp32"))


def test_positions_beyond_those_of_the_folder_are_given_in_one_word(folder: Path, tmp_path: Path) -> None:
    from harness.run.build import build

    words = ("method=bf16", "trainer.compute=fp32", "model.max_positions=300")
    run, _ = build(config_of(folder, *words), small_launch(tmp_path))
    assert run.trainer.model.config.max_positions == 300
    assert decoder_config(run.config.model).max_positions == 300
    assert (
        grpo_step(run)["train/loss"]
        == grpo_step(build(config_of(folder, *words[:2]), small_launch(tmp_path))[0])["train/loss"]
    )  # no rope scaling: positions are a limit, no number
    with pytest.raises(ValueError, match=r"model\.max_positions=0: must be at least 1"):
        config_of(folder, "model.max_positions=0")


def test_what_does_not_fit_the_positions_is_refused_before_a_run(folder: Path) -> None:
    positions = load_config(folder).max_positions

    def refused(*words: str) -> str:
        with pytest.raises(ValueError) as error:
            check(config_of(folder, "method=bf16", *words))
        return str(error.value)

    new = f"engine.max_new_tokens={positions - 40}"
    check(config_of(folder, "method=bf16", new, "task.options.max_prompt_tokens=40"))
    assert refused(new, "task.options.max_prompt_tokens=41") == (
        f"{new}: behind a prompt of 41 tokens it needs {positions + 1} positions, the model has {positions}; valid: "
        f"up to {positions - 41}, or model.max_positions={positions + 1}"
    )
    check(
        config_of(
            folder, "method=bf16", new, "task.options.max_prompt_tokens=41", f"model.max_positions={positions + 1}"
        )
    )
    check(config_of(folder, "method=bf16", new, "task.options.max_prompt_tokens=[41]"))  # which the task refuses
    entry = f"evaluations=[{{task:gsm8k,path:{DATA}/gsm8k,max_new_tokens:{positions}}}]"
    assert refused(entry).startswith(f"evaluations.0.max_new_tokens={positions}: behind a prompt of 1 tokens it needs ")
    assert refused(f"engine.max_model_len={positions + 1}") == (
        f"engine.max_model_len={positions + 1}: the model has {positions} positions; valid: 1 to {positions}, or "
        f"model.max_positions={positions + 1}"
    )


@pytest.mark.parametrize("trainer", ["local", "verl"])
def test_the_longest_prompt_with_a_whole_response_is_held_against_the_room_before_a_run(
    trainer: str, folder: Path, tmp_path: Path
) -> None:
    """Both splits count: here the longest prompt is a training question."""
    for split, question in (("train", "y" * 60), ("test", "y" * 5)):
        row = {"question": question, "answer": "#### 1"}
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row), encoding="utf-8")
    words = [f"task.path={tmp_path}", "task.options.template='{question}'", f"trainer={trainer}", "engine=vllm"]

    def refused(*more: str) -> str:
        with pytest.raises(ValueError) as error:
            check_data(config_of(folder, "method=bf16", *words, *more))
        return str(error.value)

    assert refused("engine.max_model_len=71") == (
        "engine.max_model_len=71: with task=gsm8k a prompt of 61 and a response of 12 tokens need 73 positions; valid: "
        "73 to 512, or null"
    )
    asked = f"evaluations=[{{task:gsm8k,path:{tmp_path},options:{{template:'{{question}}'}},max_new_tokens:70}}]"
    assert refused("engine.max_model_len=74", asked) == (
        "engine.max_model_len=74: with evaluations.0.task=gsm8k a prompt of 6 and a response of 70 tokens need 76 "
        "positions; valid: 76 to 512, or null"
    )
    assert refused("engine.max_new_tokens=500") == (
        "model.max_positions=null: with task=gsm8k a prompt of 61 and a response of 500 tokens need 561 positions, the "
        "model has 512; valid: 561 or more, or a smaller engine.max_new_tokens"
    )
    assert refused("engine.max_model_len=null", asked.replace(":70", ":507")) == (
        "model.max_positions=null: with evaluations.0.task=gsm8k a prompt of 6 and a response of 507 tokens need 513 "
        "positions, the model has 512; valid: 513 or more, or a smaller evaluations.0.max_new_tokens"
    )
    for fits in (["engine.max_model_len=76", asked], ["engine=embedded", "engine.max_model_len=71"], []):
        check_data(config_of(folder, "method=bf16", *words, *fits))


def test_more_room_than_a_model_made_here_has_is_refused() -> None:
    words = ["method=bf16", "engine=vllm", "model=xs128"]
    check(small_config(*words, "engine.max_model_len=4096"))
    check(small_config(*words, "engine.max_model_len=4097", "model.max_positions=4097"))
    with pytest.raises(ValueError) as error:
        check(small_config(*words, "engine.max_model_len=4097"))
    assert str(error.value) == (
        "engine.max_model_len=4097: the model has 4096 positions; valid: 1 to 4096, or model.max_positions=4097"
    )


def test_responses_end_at_every_id_of_the_generation_config(folder: Path, tmp_path: Path) -> None:
    from harness.run.build import build

    other = tmp_path / "instruct"
    shutil.copytree(folder, other)
    stops = [1, *range(40, 70)]
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    lengths: list[float] = []
    for path in (folder, other):
        run, _ = build(config_of(path, "method=bf16", "engine.max_new_tokens=12"), small_launch(tmp_path))
        batches: list[Collected] = []
        run.on_batch = lambda step, batch, kept=batches: kept.append(batch)
        grpo_step(run)
        ends = set(stops) if path == other else {1}
        assert run.engine.end_ids[0] == 1 and set(run.engine.end_ids) == set(run.reference.end_ids) == ends  # type: ignore[attr-defined]
        rollout = batches[0].rollout
        for row, cut in zip(rollout.responses(), rollout.truncated.tolist(), strict=True):
            assert not ends & set(row[:-1]) and (row[-1] in ends) == (not cut)
        lengths.append(float(rollout.lengths.float().mean()))
    assert lengths[1] < 0.7 * lengths[0]  # a quarter of the tokens of a random model end it


def test_a_missing_data_file_is_one_line_before_anything_runs(folder: Path, tmp_path: Path) -> None:
    from harness.start.prepare import start_of

    config = config_of(folder, f"task.path={tmp_path / 'nowhere.parquet'}")
    with pytest.raises(ValueError, match=r"nowhere\.parquet") as caught:
        start_of(config, Launch(results=str(tmp_path)))
    assert "\n" not in str(caught.value)


def test_a_task_without_demonstrations_needs_a_model(tmp_path: Path) -> None:
    from harness.start.prepare import start_of

    with pytest.raises(ValueError, match="model"):
        start_of(resolve(load(["task=gsm8k", f"task.path={DATA / 'gsm8k'}"])), Launch(results=str(tmp_path)))
