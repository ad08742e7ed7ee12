"""Questions: what may be asked, and the mismatch as words or from a probe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.studies.advise.question import (
    FORMATS,
    Mismatch,
    Question,
    given_mismatch,
    probed_mismatch,
    read_probe,
    size_warning,
)
from tests.studies.advise.made import question
from tests.studies.probe import made


def test_a_size_is_a_number_of_parameters() -> None:
    assert (question(size="7b").num_parameters, question(size="0.5b").num_parameters) == (7e9, 5e8)
    assert question(size="3m", length=250).num_parameters == 3e6
    assert [question(gpus=n).nodes for n in (1, 8, 16, 64)] == [1, 1, 2, 8]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"size": "big"}, "--size big: a number of parameters"),
        ({"size": "7"}, "--size 7: a number of parameters"),
        ({"size": "b"}, "--size b"),
        ({"deploy": "int8"}, "--deploy int8: valid: bf16, rollout"),
        ({"length": 0}, "--length 0"),
        ({"batch": 0}, "--batch 0"),
        ({"gpus": 12}, "12"),
        ({"length": 10**6}, "lengths=1000000: 7b answers with 1 to 32704 tokens"),
    ],
)
def test_what_cannot_be_asked(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        question(**values)


def test_formats_are_those_with_rates_and_those_of_the_probe() -> None:
    assert FORMATS == ("fp8_block", "fp8_block+kv8", "int8", "nvfp4", "int4")
    given = {name: Mismatch(k3=1e-3, source="x") for name in ("bf16", "int8", "mxfp8")}
    assert Question(size="7b", length=10, mismatch=given).formats == (*FORMATS, "mxfp8")


def test_a_number_is_every_formats_and_a_name_is_its_own() -> None:
    assert {name: m.k3 for name, m in given_mismatch("2e-3").items()} == dict.fromkeys(FORMATS, 2e-3)
    found = given_mismatch("1e-4,fp8_block=2e-3,int8=0")
    assert {name: found[name].k3 for name in ("fp8_block", "int8", "int4")} == {
        "fp8_block": 2e-3, "int8": 0.0, "int4": 1e-4,
    }  # fmt: skip
    assert found["int4"].source == "--k3 1e-4, taken for every format" and found["int8"].source == "--k3 int8=0"


@pytest.mark.parametrize("text", ["", "x", "-1", "nan", "inf", "int8=", "int8", "int8=1e-3,", "int44=1e-3"])
def test_a_mismatch_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"--k3 .*(nats a token|is no format with measured rates; nearest: int4)"):
        given_mismatch(text)


def test_a_probe_gives_the_mismatch_of_each_format() -> None:
    found = probed_mismatch(made.record(made.row("int8", 3e-3), made.row("mxfp8", 1e-2)))
    assert {name: m.k3 for name, m in found.items()} == {"bf16": 2e-4, "int8": 3e-3, "mxfp8": 1e-2}
    assert found["int8"].source == "probe 0123456789ab of base, 8 answers of 2 tokens in the mean"


def test_a_probe_of_a_model_of_another_size_is_told() -> None:
    row = made.row("int8", 3e-3) | {"num_parameters": 7_600_000_000}
    record = made.record(row) | {"formats": [row]}
    assert size_warning(record, question(size="7b")) == ""
    assert size_warning(record, question(size="32b")) == (
        "of a model of 7,600.00 million parameters, --size is 32b: its k3 need not hold there"
    )


def test_the_mismatch_of_untrained_weights_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    path.write_text(json.dumps(made.record(made.row("int8", 3e-3), is_untrained=True)), encoding="utf-8")
    with pytest.raises(ValueError, match=r"probe\.json: of untrained weights; costs alone count"):
        read_probe(path)
    with pytest.raises(ValueError, match=r"missing\.json: No such file or directory; valid: a file that lowbit probe"):
        read_probe(tmp_path / "missing.json")
