"""The comparison with TRL and verl: what every peer is told, what is read from what it says, and what is made of it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest
from tokenizers import Tokenizer

from harness.devtools.bench import peer_ours, peers, runner, trl_step
from harness.devtools.bench.trl_step import Settings, arguments, numbers
from harness.models.tokenizer import char_tokenizer

GIVEN = Settings(prompts=4, group=2, prompt_tokens=6, tokens=5, rows=4, steps=4, warm_up=1)


def test_medians_and_quantiles_leave_the_warm_up_out(tmp_path: Path) -> None:
    """A log of verl's: the first step starts engines, the third fell to a poll."""
    lines = [
        {"step": i, "data": {"timing_s/step": value, "timing_s/gen": value / 2, "actor/loss": 0.1}}
        for i, value in enumerate((9.0, 1.0, 3.0, 2.0))
    ]
    path = tmp_path / "verl.jsonl"
    path.write_text("\n".join(map(json.dumps, [*lines, {"step": 9, "data": {"val/x": 1}}])), encoding="utf-8")
    found = peers.read_verl(path, GIVEN)
    assert found == {"steps": [1.0, 3.0, 2.0], "stages": {"gen": [0.5, 1.5, 1.0]}}
    assert peers.read_verl(tmp_path / "none", GIVEN)["steps"] == []
    row = peers.summary(found)
    assert (row["median_s"], row["p90_s"], row["count"]) == (2.0, pytest.approx(2.8), 3)
    assert row["stages_s"] == {"gen": 1.0}
    assert peers.summary({"failed": "no GPU"}) == {"failed": "no GPU"}
    ours = peers.summary({"steps": [1.0], "stages": {}})
    lines_of = peers.table({"ours": ours, "verl": row, "TRL": {"failed": "x"}}, GIVEN)
    assert "1 steps), 40 tokens/s" in lines_of[0] and "2.00 times ours" in lines_of[1]
    assert "not measured: x" in lines_of[2]


def test_every_peer_gets_the_same_problem(tmp_path: Path) -> None:
    peers.make_folder(tmp_path, "xs128", GIVEN)
    rows = pd.read_parquet(tmp_path / "train.parquet")
    texts = [row[0]["content"] for row in rows["prompt"]]
    assert len(texts) == 16 and len(set(texts)) == 16 and {len(text) for text in texts} == {5}  # and <bos>
    words = dict(word.removeprefix("+").split("=", 1) for word in peers.verl_words(tmp_path, GIVEN, 2.0) if "=" in word)
    assert words["data.train_batch_size"] == words["actor_rollout_ref.actor.ppo_mini_batch_size"] == "4"
    assert (words["actor_rollout_ref.rollout.n"], words["data.max_response_length"]) == ("2", "5")
    assert words["actor_rollout_ref.model.use_fused_kernels"] == "True"
    assert not any("custom_sampler" in name for name in words)
    assert any("poll_interval=0.05" in word for word in peers.verl_words(tmp_path, GIVEN, 0.05))
    for device in ("cpu", "cuda"):
        given = Settings(**{**GIVEN.__dict__, "device": device})
        asked = arguments(given, "out", 1)
        assert asked["per_device_train_batch_size"] * asked["gradient_accumulation_steps"] == 8
        assert asked["max_completion_length"] == 5 and asked.get("use_vllm", False) == (device == "cuda")


def test_our_side_times_every_stage_of_the_steps_that_count(tmp_path: Path) -> None:
    peers.make_folder(tmp_path, "xs128", GIVEN)
    found = peer_ours.measure(tmp_path / "m", GIVEN, engine="embedded")
    assert len(found["steps"]) == 3 and {len(values) for values in found["stages"].values()} == {3}
    for i, seconds in enumerate(found["steps"]):
        assert sum(values[i] for values in found["stages"].values()) == pytest.approx(seconds, rel=0.1, abs=0.01)


def test_a_peer_that_cannot_run_leaves_its_last_words(tmp_path: Path) -> None:
    peers.make_folder(tmp_path, "xs128", GIVEN)
    options = argparse.Namespace(
        trl_python=None, trl_path=str(tmp_path / "nothing"), verl_path=None, engine="embedded", limit_s=60
    )
    assert "GPU only" in peers.measure("verl", tmp_path, GIVEN, options)["failed"]
    assert "No module named" in peers.measure("TRL", tmp_path, GIVEN, options)["failed"]


def test_a_peer_that_takes_too_long_is_said_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it printed last: a warning would else be taken for the reason."""
    (tmp_path / "m").mkdir()
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\necho 'ValueError: no token'; echo 'UserWarning: ImportError: x'; exec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.chdir(tmp_path.parent)  # a path from where the bench runs; peers run elsewhere
    slow = slow.relative_to(tmp_path.parent)
    options = argparse.Namespace(trl_python=str(slow), trl_path=None, verl_path=None, engine="embedded", limit_s=0.5)
    found = peers.measure("TRL", tmp_path, GIVEN, options)
    assert found["failed"] == "the limit of 0.5 s was reached; last words: ValueError: no token"
    assert 0.5 <= found["all_s"] < 30


def test_steps_that_verl_made_before_the_limit_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    package = tmp_path / "path" / "verl" / "trainer"
    package.mkdir(parents=True)
    (package / "main_ppo.py").write_text(
        "import json, os, time\n"
        "rows = [{'data': {'timing_s/step': s, 'timing_s/gen': s / 2}} for s in (9.0, 1.0, 3.0)]\n"
        "with open(os.environ['VERL_FILE_LOGGER_PATH'], 'w') as file:\n"
        "    file.write('\\n'.join(map(json.dumps, rows)))\n"
        "time.sleep(60)\n"
    )
    given = Settings(**{**GIVEN.__dict__, "device": "cuda"})
    monkeypatch.chdir(tmp_path.parent)
    options = argparse.Namespace(
        verl_path=str(package.parents[1].relative_to(tmp_path.parent)), trl_path=None, trl_python=None, limit_s=4.0
    )
    found = peers.measure("verl", tmp_path, given, options)
    assert (found["steps"], found["stages"]) == ([1.0, 3.0], {"gen": [0.5, 1.5]})
    assert found["cut"].startswith("the limit of 4 s was reached") and "failed" not in found
    assert peers.summary(found)["count"] == 2


def test_verl_finds_the_end_of_a_turn_among_as_many_tokens(tmp_path: Path) -> None:
    peers.make_folder(tmp_path, "xs128", GIVEN)
    tokenizer, plain = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json")), char_tokenizer(128)
    assert tokenizer.token_to_id("<|im_end|>") == 127 == tokenizer.get_vocab_size(with_added_tokens=True) - 1
    text = "".join(plain.tokens[3:127])
    assert tokenizer.encode(text, add_special_tokens=False).ids == plain.encode(text) == [*range(3, 127)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompts", "3", "--group", "3", "--rows", "4"], "--rows: 4; it must divide the 9 samples of a step"),
        (["--rows", "0"], "--rows: 0; valid: >= 1"),
        (["--prompts", "-8", "--group", "-8"], "--prompts: -8; valid: >= 1"),
        (["--steps", "3", "--warm-up", "3"], "--warm-up: 3; valid: 1 to 2 for --steps 3"),
        (["--prompt-tokens", "4"], "--prompt-tokens: 4; valid: >= 5, so that all prompts are equally long"),
        (["--limit-s", "-1"], "--limit-s: -1; valid: above 0"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.run("peers", ["--out", str(tmp_path / "x.json"), "--device", "cpu", *words]) == 2
    assert capsys.readouterr().err == f"peers: {said}\n" and not (tmp_path / "x.json").exists()


def test_the_shortest_prompts_that_are_equally_long() -> None:
    for count, tokens in ((2, 2), (3, 3), (13, 3), (14, 4), (384, 5)):
        assert peers.shortest_prompt(count) == tokens
        lengths = [{len(text) for text in numbers(size - 1, count)} for size in (tokens, tokens + 1)]
        assert lengths == [{tokens - 1}, {tokens}]


def test_runs_of_another_engine_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def measure(peer: str, folder: Path, given: Settings, options: argparse.Namespace) -> dict[str, object]:
        asked.append(f"{peer} {options.engine}")
        return {"steps": [1.0], "stages": {}}

    monkeypatch.setattr(peers, "measure", measure)
    out = tmp_path / "x.json"
    words = ["--out", str(out), "--device", "cpu", "--model", "xs128", "--prompts", "4", "--group", "2", "--rows", "4",
             "--prompt-tokens", "6", "--steps", "4"]  # fmt: skip
    for engine, only, there in (("vllm", "ours", 1), ("vllm", "TRL", 2), ("embedded", "TRL", 1), ("vllm", "TRL", 1)):
        assert runner.run("peers", [*words, "--engine", engine, "--only", only]) == 0
        found = json.loads(out.read_text())
        assert len(found["runs"]) == there and found["settings"].get("engine", "vllm") == engine
    assert asked == ["ours vllm", "TRL vllm", "TRL embedded", "TRL vllm"]


def test_trls_stages_are_summed_over_each_step_after_the_warm_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Stand-ins of TRL and its packages: four steps, in each of which a stage comes twice and takes as many seconds in
    all as the step's number."""

    class Context:
        name = "generate"
        _log_metrics: Any = None

    class Trainer:
        def __init__(self, **named: Any) -> None:
            self.callback, self.texts = named["callbacks"][0], named["train_dataset"]

        def train(self) -> None:
            assert len(set(self.texts["prompt"])) == 16 and {len(text) for text in self.texts["prompt"]} == {6}
            for step in range(1, 5):
                for _ in range(2):
                    Context._log_metrics(Context(), step / 2)
                self.callback.on_step_end(None, None, None)

    def anything(*args: Any, **named: Any) -> SimpleNamespace:
        return SimpleNamespace(eos_token_id=1)

    loader = SimpleNamespace(from_pretrained=anything)
    parts = {
        "datasets": {"Dataset": SimpleNamespace(from_dict=lambda rows: rows)},
        "transformers": {"AutoModelForCausalLM": loader, "AutoTokenizer": loader, "TrainerCallback": object},
        "trl": {"GRPOConfig": anything, "GRPOTrainer": Trainer},
        "trl.extras": {"profiling": SimpleNamespace(ProfilingContext=Context)},
    }
    for name, inside in parts.items():
        monkeypatch.setitem(sys.modules, name, cast(ModuleType, SimpleNamespace(**inside)))
    monkeypatch.setattr(trl_step.time, "perf_counter", iter([10.0, 11.0, 13.0, 16.0]).__next__)
    given = Settings(**{**GIVEN.__dict__, "warm_up": 2})
    assert trl_step.measure(str(tmp_path), given) == ([2.0, 3.0], {"generate": [3.0, 4.0]})
