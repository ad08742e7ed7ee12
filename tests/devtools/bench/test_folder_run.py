"""The bench of whole runs on a folder: its tokenizer, what a cell asks of `lowbit run`, and what a record tells."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from harness.cli.main import main
from harness.config.load import load, split_launch
from harness.devtools.bench import folder_run, runner
from harness.models.checkpoint import load_decoder
from harness.records.run_result import read_results
from harness.studies.capacity.check import work_of
from harness.studies.capacity.place import place

CELL: dict[str, Any] = {
    "steps": [1.25, 2.0], "peak_gib": None, "policy": {"gib": 0.5}, "evaluations": [{"error": None, "seconds": 3.0}],
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions in the form of GSM8K."""
    folder = tmp_path_factory.mktemp("x") / "my data, gsm8k"  # no plain word of a command line
    folder.mkdir()
    for split, numbers in (("train", range(8, 40)), ("test", range(8))):
        rows = [
            {"question": f"Tom has {i} apples and buys {i + 1} more. How many?", "answer": f"So.\n#### {2 * i + 1}"}
            for i in numbers
        ]
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return folder


def given(folder: Path, data: Path, *words: str) -> argparse.Namespace:
    asked = ["--out", str(folder / "x.json"), "--work", str(folder / "work"), "--data", str(data), *words]
    return runner.parsed("folder_run", asked)


SMALL = (
    "--device", "cpu", "--engine", "embedded", "--prompts", "2", "--group", "2", "--tokens", "8", "--questions", "3",
    "--samples", "2", "--steps", "2",
)  # fmt: skip


def test_the_folder_has_a_tokenizer_that_reads_the_questions_and_as_many_ids_as_the_model(
    tmp_path: Path, data: Path
) -> None:
    folder = tmp_path / "m"
    folder_run.write_folder(folder, "toy", data, "cpu")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "Tom has 9 apples and buys 10 more. How many? äß"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("Tom has 9 apples").ids) < 8  # pieces of text, not bytes
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    weights = dict(load_decoder(folder).named_parameters())
    assert sorted(vocab.values()) == list(range(1024)) == list(range(len(weights["model.embed_tokens.weight"])))
    written = (folder / "config.json").stat().st_mtime_ns
    folder_run.write_folder(folder, "toy", Path("/no/where"), "cpu")  # it is there: nothing is read or written
    assert (folder / "config.json").stat().st_mtime_ns == written and not (tmp_path / "m.weights").exists()


def test_a_cell_asks_for_what_was_given_and_corrects_low_bit_rollouts(tmp_path: Path, data: Path) -> None:
    words = given(tmp_path, data, *SMALL, "trainer.lr=1e-5")
    folder_run.write_folder(tmp_path / "m", "toy", data, "cpu")
    for precision, method in (("bf16", "bf16"), ("int8", "flashrl")):
        overrides, launch = split_launch(folder_run.words_of(tmp_path / "m", "toy", precision, words))
        config = load(overrides)
        assert (config.method, config.precision.name, config.model.path) == (method, precision, str(tmp_path / "m"))
        assert (config.algo.num_prompts, config.algo.group_size, config.engine.max_batch) == (2, 2, 4)
        assert (config.trainer.steps, config.engine.max_new_tokens, config.trainer.lr) == (2, 8, 1e-5)
        assert (config.evaluations[0].num, config.evaluations[0].k, config.task.num_eval) == (3, 2, 3)
        assert launch["save"] == "hf" and launch["checkpoint_every_steps"] == 3  # no state to resume from
        assert "micro_batch_tokens" not in launch


def test_on_a_gpu_micro_batches_are_those_of_the_capacity_plan(tmp_path: Path, data: Path) -> None:
    words = given(tmp_path, data)
    made = dict(word.split("=", 1) for word in folder_run.words_of(tmp_path / "m", "7b", "fp8_block", words))
    planned = place(work_of("7b", 1, "fp8_block", vars(words)), 1)
    assert planned.rows >= 1 and int(made["launch.micro_batch_tokens"]) == planned.rows * (256 + 1024)
    assert made["launch.checkpoint_layers"] == str(planned.is_checkpointed).lower() and made["engine.sleep"] == "true"


def test_a_record_tells_steps_evaluations_and_the_saved_policy(tmp_path: Path, data: Path) -> None:
    words, results = given(tmp_path, data, *SMALL), tmp_path / "results"
    folder_run.write_folder(tmp_path / "m", "toy", data, "cpu")
    overrides = folder_run.words_of(tmp_path / "m", "toy", "int8", words)
    assert main(["run", *overrides, "--results", str(results)]) == 0
    (record,) = read_results(results / "runs" / "runs")
    found = folder_run.told(record, results)
    assert found["status"] == "ok" and found["run_id"] == record.run_id and len(found["steps"]) == 2
    for step in (0, 1):
        assert found["steps"][step] == pytest.approx(sum(seconds[step] for seconds in found["stages"].values()))
    assert {"generate", "update", "sync"} <= set(found["stages"]) and all(k3 > 0 for k3 in found["k3"])
    assert "int8_channel" in found["formats"] and all(0 < tokens <= 4 * 16 for tokens in found["rollout_tokens"])
    places = {(one["step"], one["site"]) for one in found["evaluations"]}
    assert places == {(0, "reference"), (0, "rollout"), (2, "reference"), (2, "rollout")}
    assert all(one["k"] == 2 and one["scores"]["avg@2"] == 0.0 for one in found["evaluations"])  # random weights
    parameters = sum(p.numel() for p in load_decoder(tmp_path / "m").parameters())
    assert found["policy"]["files"] == 1
    assert 2 * parameters <= found["policy"]["gib"] * 2**30 < 5 * parameters  # 2 or 4 bytes each
    (line,) = folder_run.lines({"toy int8": found})
    assert line.startswith("toy int8: steps 0.") and "policy 0.00" in line


def test_a_run_that_is_refused_is_a_failed_cell_with_its_last_words(tmp_path: Path, data: Path) -> None:
    words = given(tmp_path, data, *SMALL, "trainer.stepz=1")
    found = folder_run.measure(tmp_path / "m", "toy", "bf16", words)
    assert found["failed"].startswith("lowbit: error: ") and "stepz" in found["failed"] and found["log"]
    assert list(folder_run.lines({"a": found})) == [f"a: failed: {found['failed']}"]


def test_finished_cells_are_kept_and_failed_ones_tried_again(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []

    def measure(folder: Path, size: str, precision: str, words: argparse.Namespace) -> dict[str, Any]:
        assert (folder / "tokenizer.json").is_file()
        started.append(precision)
        return {"failed": "RuntimeError: x"} if len(started) == 2 else CELL

    monkeypatch.setattr(folder_run, "measure", measure)
    words = ["--out", str(tmp_path / "x.json"), "--work", str(tmp_path / "work"), "--data", str(data), "--size", "toy",
             "--precision", "bf16,int8", "--device", "cpu"]  # fmt: skip
    assert runner.run("folder_run", words) == 1
    assert "toy int8: failed: RuntimeError: x" in capsys.readouterr().out
    assert runner.run("folder_run", words) == 0 and started == ["bf16", "int8", "int8"]
    said = capsys.readouterr().out
    assert "toy int8: steps 1.2, 2.0 s; peak not measured; evaluation 3.0 s; policy 0.500 GiB" in said
    written = json.loads((tmp_path / "x.json").read_text())
    assert written["what"] == "folder_run" and set(written["cells"]) == {"toy bf16", "toy int8"}
    assert not (tmp_path / "work" / "model-toy").exists()
    for number, option in enumerate((["--tokens", "99"], ["--pass-tokens", "99"], ["--gpu-memory", "0.4"])):
        assert runner.run("folder_run", [*words, *option]) == 0
        assert len(started) == 5 + 2 * number  # another load: nothing is kept


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--size", "9b"], "9b"),
        (["--precision", "int9"], "int9"),
        (["--steps", "0"], "steps"),
        (["--data", "/no/where"], "/no/where"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, data: Path, words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--out", str(tmp_path / "x.json"), "--device", "cpu", "--data", str(data)]
    assert runner.run("folder_run", [*place, *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert expected in line
