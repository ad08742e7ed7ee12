"""Formats of a probe, its identity, and the file that it is kept in."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.config.schema import Launch, RunConfig
from harness.studies.probe import record
from harness.studies.probe.measure import Measured
from harness.studies.probe.noise import Meter
from harness.studies.probe.record import configs, probe, read, write
from harness.trainers.local.trainer import LocalTrainer
from methods import METHODS
from tests.studies.probe import made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 folder."""
    return made.qwen2(tmp_path_factory.mktemp("folder") / "qwen2")


def test_every_low_bit_format_is_probed_by_default(folder: Path) -> None:
    runs, remarks = configs(folder, (), made.WORDS)
    assert [(c.precision.name, c.seed) for c in runs[:2]] == [("bf16", 0), ("bf16", 1)] and not remarks
    assert [c.precision.name for c in runs[2:]] == list(METHODS["naive"].precisions)
    assert {c.method for c in runs} <= {"bf16", "naive"} and {c.model.path for c in runs} == {str(folder)}


def test_what_the_engine_cannot_follow_is_left_out_with_its_reason(folder: Path) -> None:
    words = [*made.WORDS, "engine=vllm"]
    runs, remarks = configs(folder, (), words)
    (reason,) = [line for line in remarks if line.startswith("nvfp4_w4a4: left out, ")]
    assert "nvfp4_act" in reason and "nvfp4_w4a4" not in {c.precision.name for c in runs}
    with pytest.raises(ValueError, match="nvfp4_act"):
        configs(folder, ["nvfp4_w4a4"], words)


def test_a_format_may_have_other_weights(folder: Path) -> None:
    runs, _ = configs(folder, ["int4=int4_g32", "int8", "fp8_block+kv8"], made.WORDS)
    assert [c.precision.weights for c in runs] == ["bf16", "bf16", "int4_g32", "int8_channel", "e4m3_block"]
    assert runs[-1].precision.kv == "e4m3_kv"
    assert configs(folder, ["int4"], made.WORDS)[0][2].precision.weights == "int4_g128", "as published checkpoints"


def test_a_format_finds_the_memory_of_the_one_before_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 7B a trainer has 28 GiB: two at once would not fit beside an engine."""
    trainers: list[weakref.ref[LocalTrainer]] = []
    alive: list[int] = []
    make = LocalTrainer.__init__

    def made_one(self: LocalTrainer, *given: Any, **kept: Any) -> None:
        alive.append(sum(one() is not None for one in trainers))
        trainers.append(weakref.ref(self))
        make(self, *given, **kept)

    monkeypatch.setattr(LocalTrainer, "__init__", made_one)
    probe(folder, configs(folder, ["int8"], made.WORDS)[0], Launch())
    assert alive == [0, 0, 0]


def test_fp16_is_sampled_by_its_method_whose_trainer_computes_so(folder: Path) -> None:
    runs, _ = configs(folder, ["fp16", "int8"], made.WORDS)
    assert [(c.method, c.precision.name) for c in runs[2:]] == [("fp16", "fp16"), ("naive", "int8")]


@pytest.mark.parametrize(
    ("precisions", "words", "expected"),
    [
        (["int4", "int4=int4_g32"], (), "int4 is named twice"),
        (["bf16=int4_g32"], (), "bf16 is the floor, and stays what it is"),
        (["int44"], (), "--precisions=int44: unknown"),
        (["int4=int4_g3"], (), "cannot do rollout_weights:int4_g3"),
        ((), ("method=flashrl",), "override 'method=flashrl': the probe has no method"),
        ((), ("precision=int8",), "override 'precision=int8'"),
        ((), ("precision.weights=int4_g32",), "override 'precision.weights=int4_g32'"),
        ((), ("+seed=3",), "override '\\+seed=3'"),
        ((), ("task=nothing",), "nothing"),
    ],
)
def test_bad_formats_and_overrides_are_refused(
    precisions: list[str], words: tuple[str, ...], expected: str, folder: Path
) -> None:
    with pytest.raises(ValueError, match=expected):
        configs(folder, precisions, [*made.WORDS, *words])


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no model folder; it has no config\.json"):
        configs(tmp_path, (), made.WORDS)


def test_the_id_tells_weights_formats_settings_and_training(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "qwen2"
    made.qwen2(other)

    def found(place: Path, *words: str, is_untrained: bool = False) -> tuple[str, str]:
        runs, _ = configs(place, [words[0]], [*made.WORDS, *words[1:]])
        told = list[str]()
        record = probe(place, runs, Launch(results=str(tmp_path)), is_untrained=is_untrained, tell=told.append)
        assert len(told) == 3 and told[2].startswith(f"qwen2 {words[0]}: k3 ")
        return record["id"], record["hashes"]["model"]

    first = found(folder, "int8")
    assert found(folder, "int8") == first
    ids = [found(folder, "int4")[0], found(folder, "int8", "engine.temperature=0.7")[0],
           found(folder, "int8", is_untrained=True)[0]]  # fmt: skip
    assert len({first[0], *ids}) == 4
    assert found(other, "int8")[1] == first[1], "equal weights in another place"


def test_a_format_without_a_mismatch_has_no_noise_like_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its k3 of 0 is named, and the rest of the probe is kept."""

    @contextmanager
    def meter(config: RunConfig, launch: Launch) -> Iterator[Meter]:
        yield lambda sigma: (sigma, 4.0)

    row = made.row("int8", 0.0)
    monkeypatch.setattr(record, "measure", lambda *given: Measured(row=row, tensors={}, hashes={}))
    monkeypatch.setattr(record, "noise_meter", meter)
    runs, told = configs(folder, ["int8"], made.WORDS)[0], list[str]()
    found = probe(folder, runs, Launch(), tell=told.append, noise=runs[0], like=["int8", "0.1"])
    assert told[-2].startswith("qwen2 noise like int8: none, --noise-like: a k3 of 0 is outside of 0.01 to 2")
    assert told[-1] == "qwen2 noise like 0.1: sigma 0.1, k3 0.1" and len(found["noise"]) == 1


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = made.record(made.row("int8", 0.01))
    path = write(tmp_path, record)
    assert path == tmp_path / "probes" / "0123456789ab.json" and read(path) == record
    assert len(path.read_text(encoding="utf-8").splitlines()) == 1 + 3 + 1, "a line for every format"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", r"x\.json is not valid JSON: .*; valid: a file that lowbit probe wrote"),
        ("[]", r"x\.json holds no JSON object; valid: a file that lowbit probe wrote"),
        (json.dumps({"formats": 3}), r"x\.json: not a probe: it has no formats"),
    ],
)
def test_a_file_that_is_none_is_named(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=expected):
        read(path)
    with pytest.raises(ValueError, match=r"cannot read .*missing\.json: No such file"):
        read(tmp_path / "missing.json")
