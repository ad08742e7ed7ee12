"""The entry of all benches: names, tables, files, refusals."""

from __future__ import annotations

import json
from argparse import Namespace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from harness.devtools.bench import runner
from harness.devtools.bench.__main__ import BENCHES, main


def test_every_bench_is_listed_with_its_first_line_and_can_be_called(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in BENCHES:
        module = import_module(f"harness.devtools.bench.{name}")
        assert f"  {name:16}{(module.__doc__ or '').splitlines()[0]}" in lines
        assert callable(module.options) and callable(module.command)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["headd"], "bench: 'headd' is unknown; nearest: head; valid: coverage, "),
        (["head", "--device", "cpu", "--repeats", "0"], "head: --repeats: 0; valid: >= 1"),
        (["coverage", "--sims", "0"], "coverage: --sims: 0; valid: >= 1"),
        (["coverage", "--sims", "-5"], "coverage: --sims: -5; valid: >= 1"),
    ],
)
def test_bad_words_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(said)


def test_a_table_has_a_column_per_name_that_has_a_value() -> None:
    rows = [{"what": "a", "ms": 1.23456, "failed": None}, {"what": "bcd", "failed": None, "n": 7}]
    assert runner.table(rows).splitlines() == [
        "what  ms     n",
        "─" * 14,
        "a     1.235  -",
        "bcd   -      7",
    ]


def test_what_was_found_is_saved_whole(tmp_path: Path) -> None:
    runner.save(None, {})
    runner.save(tmp_path / "new" / "x.json", {"a": [1.5]})
    assert json.loads((tmp_path / "new" / "x.json").read_text()) == {"a": [1.5]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        runner.save(tmp_path / "new" / "x.json", {"a": float("nan")})
    assert json.loads((tmp_path / "new" / "x.json").read_text()) == {"a": [1.5]}


@pytest.mark.parametrize("given", ["1,a", "0", ""])
def test_a_list_of_other_than_numbers_is_refused_in_words(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["verl_scaling", "--out", "x.json", "--gpus", given])
    said = f"argument --gpus: {given!r}: whole numbers above 0 are expected, separated by commas"
    assert said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--device cuda: no CUDA device is visible; valid: --device cpu"):
        runner.check_device("cuda")


@pytest.mark.parametrize("name", ["peers", "verl_scaling", "vllm_engine sync", "folder_run --data x", "head"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_bench_says_that_its_device_is_not_there(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.json"
    assert main([*name.split(), "--out", str(out)]) == 2
    said = f"{name.split()[0]}: --device cuda: no CUDA device is visible; valid: --device cpu\n"
    assert capsys.readouterr().err == said and not out.exists()


@pytest.mark.parametrize("name", ["peers", "verl_scaling", "folder_run --data x"])
@pytest.mark.parametrize("share", ["0", "1", "-0.5", "nan"])
def test_a_share_of_a_gpu_is_one(name: str, share: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*name.split(), "--out", str(tmp_path / "x.json"), "--device", "cpu", "--gpu-memory", share]) == 2
    assert capsys.readouterr().err.endswith(f": --gpu-memory: {share}; valid: above 0, below 1\n")


def test_an_earlier_file_is_kept_read_or_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    assert runner.kept(path, "cells", settings=1) == {}
    for text in ('{"cells": ', "[]"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"x\.json: not a JSON file of a bench: "):
            runner.kept(path, "cells", settings=1)
    runner.save(path, {"cells": {"a": 2}, "settings": 1})
    assert runner.kept(path, "cells", settings=1) == {"a": 2} and capsys.readouterr().err == ""
    assert runner.kept(path, "cells", settings=2, model="7b") == {}
    said = f"{path}: settings, model: not as in this call; nothing of the file is kept\n"
    assert capsys.readouterr().err == said


def test_settings_have_options_that_came_later_where_they_are_not_as_usual() -> None:
    given = Namespace(tokens=5, padded=True, sigma=1.0)
    assert runner.settings_of(given, ("tokens",), {"padded": False, "sigma": 1.0}) == {"tokens": 5, "padded": True}


def test_an_error_is_one_short_line() -> None:
    assert runner.reason(RuntimeError("a\nb")) == "RuntimeError: a"
    assert runner.reason(RuntimeError()) == "RuntimeError: "
    assert len(runner.reason(ValueError("x" * 1000))) == 160
