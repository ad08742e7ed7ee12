"""Composition, validation, JSON both ways, and what the run id covers."""

from __future__ import annotations

import json
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from harness.config.load import groups, launch_of, load, parse, quoted, run_id, run_name, split_launch, to_json
from harness.config.resolve import resolve
from harness.config.schema import Launch, RunConfig
from tests.source_tree import ROOT


def test_defaults_are_the_measured_recommendation() -> None:
    config = resolve(load([]))
    assert (config.method, config.precision.weights, config.model.num_layers, config.model.hidden_size) == (
        "bf16",
        "bf16",
        4,
        64,
    )
    assert (config.trainer.lr, config.trainer.betas, config.algo.eps_low, config.algo.eps_high) == (
        3e-4,
        (0.9, 0.95),
        0.2,
        0.28,
    )
    assert (config.algo.num_prompts, config.algo.group_size, config.algo.dual_clip) == (32, 8, 3.0)


def test_json_round_trip_is_equal_and_keeps_the_id() -> None:
    config = resolve(load(["method=flashrl", "precision=int8+kv8", "knobs.TIS.cap=4.0", "trainer.betas=[0.9,0.99]"]))
    again = parse(RunConfig, to_json(config))
    assert again == config
    assert run_id(again) == run_id(config)


def test_other_data_are_another_run_and_moved_data_are_not(tmp_path: Path) -> None:
    def of(path: str) -> RunConfig:
        entry = f"evaluations=[{{task:gsm8k,path:{tmp_path / path},k:1}}]"
        return resolve(load(["task=gsm8k", f"task.path={tmp_path / path}", entry]))

    for name, text in (("a", "{}"), ("moved", "{}"), ("b", '{"x": 1}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text(text)
    shutil.copy(tmp_path / "a" / "train.jsonl", tmp_path / "alone.jsonl")
    a, b, moved, alone, none = (of(name) for name in ("a", "b", "moved", "alone.jsonl", "nowhere"))
    assert run_id(moved) == run_id(a) and len({run_id(one) for one in (a, b, alone, none)}) == 4
    assert a.task.content_hash == a.evaluations[0].content_hash is not None and none.task.content_hash is None
    assert run_id(parse(RunConfig, to_json(a))) == run_id(a)
    (tmp_path / "a" / "train.jsonl").write_text('{"x": 2}')
    assert run_id(of("a")) != run_id(a)


def test_every_field_but_paths_is_in_the_id() -> None:
    config = resolve(load([]))
    edited = [
        replace(config, seed=1),
        replace(config, base_seed=1),
        replace(config, algo=replace(config.algo, eps_high=0.2)),
        replace(config, trainer=replace(config.trainer, lr=1e-4)),
        replace(config, model=replace(config.model, spread=0.0)),
        replace(config, numerics_version=config.numerics_version + 1),
    ]
    assert len({run_id(c) for c in [config, *edited]}) == 1 + len(edited)
    moved = replace(config, model=replace(config.model, path="/elsewhere"))
    assert run_id(moved) == run_id(config)


def test_the_id_is_pinned() -> None:
    """A change here renames every committed result: bump NUMERICS_VERSION only with a CHANGELOG line."""
    first, second = run_id(resolve(load([]))), run_id(resolve(load([])))
    assert first == second
    assert len(first) == 12


def test_evaluations_are_a_list_in_the_id_without_their_paths() -> None:
    first = "{{task:aime,path:{},k:{},temperature:0.6,top_p:0.95,options:{{year:2025}}}}"
    entry = f"evaluations=[{first},{{{{task:gsm8k,greedy:true,k:0}}}}]"
    config = resolve(load([entry.format("/a/b", 32)]))
    first, second = config.evaluations
    assert (first.task, first.path, first.k, first.temperature, first.top_p) == ("aime", "/a/b", 32, 0.6, 0.95)
    assert (first.options, first.num, first.max_new_tokens, second.k, second.greedy) == (
        {"year": 2025},
        None,
        None,
        0,
        True,
    )
    assert parse(RunConfig, json.loads(json.dumps(to_json(config)))) == config
    assert run_id(resolve(load([entry.format("/c", 32)]))) == run_id(config)
    assert run_id(resolve(load([entry.format("/a/b", 31)]))) != run_id(config)
    plain = resolve(load([]))
    assert "evaluations" not in to_json(plain) and run_id(replace(config, evaluations=())) == run_id(plain)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{k:2}", "evaluations.0.task is missing"),
        ("{tsk:aime}", "unknown key evaluations.0.tsk; nearest: evaluations.0.task"),
        ("{task:aime,kk:2}", "unknown key evaluations.0.kk; nearest: evaluations.0.k"),
        ("{task:aime},{task:aime,greedi:true}", "unknown key evaluations.1.greedi; nearest: evaluations.1.greedy"),
        ("{task:aime,k:-1}", "evaluations.0.k=-1: must be at least 0"),
        ("{task:aime,num:0}", "evaluations.0.num=0: must be at least 1"),
        ("{task:aime,temperature:0}", "evaluations.0.temperature=0: must be above 0"),
        ("{task:aime,top_p:1.5}", "evaluations.0.top_p=1.5: must be at most 1"),
        ("{task:aime,max_new_tokens:0}", "evaluations.0.max_new_tokens=0: must be at least 1"),
        ("{task:aime,k:0}", "k=0 with greedy=false"),
        ("aime", "evaluations.0='aime': keys with values are expected"),
    ],
)
def test_a_wrong_evaluation_is_one_line(entry: str, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("[", r"\[")) as caught:
        load([f"evaluations=[{entry}]"])
    assert "\n" not in str(caught.value)


def test_kv8_suffix_adds_the_cache_format() -> None:
    plain, cached = load(["precision=int8"]).precision, load(["precision=int8+kv8"]).precision
    assert (plain.kv, cached.kv, cached.name) == (None, "e4m3_kv", "int8+kv8")
    assert (plain.weights, plain.acts) == (cached.weights, cached.acts)
    assert load(["precision=int8+kv8", "precision=fp8_block"]).precision == load(["precision=fp8_block"]).precision


@pytest.mark.parametrize(
    "path",
    ["/models/my (1) model", "a=b", "it's", "plain/path-1.5", "{x}, [y]", "modèle", "ends in \\", "a\\'b", "\\\\",
     "C:\\x", "null", "True", "1e3", "-08", ".5", "nan"],
)  # fmt: skip
def test_a_quoted_word_is_read_as_it_was(path: str) -> None:
    assert load(["model=hf", f"model.path={quoted(path)}"]).model.path == path


def test_long_problems_get_the_smaller_learning_rate() -> None:
    assert resolve(load(["task.n=16"])).trainer.lr == 2e-4
    assert resolve(load(["task.n=16", "trainer.lr=5e-4"])).trainer.lr == 5e-4


def test_every_choice_of_every_group_composes() -> None:
    for group, choices in groups().items():
        for choice in choices:
            config = load([f"{group}={choice}", *["model.path=there"] * (choice == "hf")])
            assert getattr(config, group) is not None


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("metod=x", ["metod", "method"]),
        ("precision=int9", ["int9", "int8"]),
        ("algo.mode=bypass", ["algo.mode", "bypass", "bypass_ppo"]),
        ("trainer.steps=many", ["trainer.steps", "many"]),
        ("algo.eps_hi=1", ["algo.eps_hi", "algo.eps_high"]),
        ("trainer.betas=[1]", ["trainer.betas"]),
        ("model=xxl", ["model=xxl", "xs"]),
        ("steps", ["steps", "key=value"]),
    ],
)
def test_bad_input_is_one_line_that_names_it(override: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        load([override])
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in words)


def test_one_string_in_place_of_a_list_is_one_line() -> None:
    with pytest.raises(ValueError) as found:
        load("method=naive precision=int4")
    assert str(found.value) == (
        "overrides='method=naive precision=int4': a list of words is expected, such as ['method=naive', "
        "'precision=int4']"
    )


def test_the_name_tells_what_differs() -> None:
    config = resolve(load(["method=naive", "precision=int4", "algo.mode=bypass_ppo", "seed=2", "base_seed=2"]))
    assert run_name(config) == "naive-int4-s-sort8-bypass_ppo-b2-s2"


def test_launch_settings_are_told_from_the_runs_own():
    rest, values = split_launch(["model=m", "+launch.packing=true", "launch.logits_mib=64", "task.n=8"])
    assert rest == ["model=m", "task.n=8"]
    assert values == {"packing": True, "logits_mib": 64}
    launch = launch_of(values, results="r", sweep="s")
    assert (launch.packing, launch.logits_mib, launch.results, launch.sweep) == (True, 64, "r", "s")
    assert launch_of({}, results="results", sweep="runs") == Launch()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["launch.pakcing=true"], "launch.pakcing=true: launch has no such setting; nearest: packing"),
        (["launch.results=x"], "launch has no such setting"),
        (["launch.packing"], "'launch.packing' is not of the form key=value"),
        (["launch.stall_s=true"], "launch.stall_s=true: neither true nor false is expected; default: 1800.0"),
    ],
)
def test_a_wrong_launch_setting_is_one_line(words, said):
    with pytest.raises(ValueError) as caught:
        split_launch(words)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_wrong_launch_value_names_field_and_value():
    with pytest.raises(ValueError, match=r"packing='often'"):
        launch_of(split_launch(["launch.packing=often"])[1], results="r", sweep="s")


def test_every_committed_record_keeps_its_run_id() -> None:
    """Single and packed ones: their configurations are within the bounds and hash to their ids."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "results" / "runs").glob("*/*.json")]
    for path in (ROOT / "results" / "packed").glob("*.zip"):
        with zipfile.ZipFile(path) as archive:
            records += [json.loads(line) for line in archive.read("records.jsonl").splitlines()]
    assert len(records) > 1000
    wrong = [r["run_id"] for r in records if run_id(parse(RunConfig, r["config"])) != r["run_id"]]
    assert wrong == []
