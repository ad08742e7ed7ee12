"""`lowbit advise`: every kind of answer, configurations, cases, and wrong input, on committed rates and made runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from harness.cli import advise
from harness.cli.main import main
from harness.foundation.project_files import HOME, RESULTS
from harness.foundation.provenance import ROOT
from harness.studies.advise import question
from harness.studies.advise.accuracy import STANDINGS
from harness.studies.probe.record import read
from tests.studies.advise import made
from tests.studies.probe import made as probes


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder with the committed rates, and made tables of word problems."""
    folder = tmp_path_factory.mktemp("results")
    for name in ("bench", "throughput"):
        (folder / name).symlink_to(ROOT / "results" / name)
    made.write_tables(folder)
    return folder


def lowbit_advise(results: Path, *words: object) -> int:
    return main(["advise", *map(str, words), "--results", str(results)])


def test_every_kind_of_answer(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: object) -> str:
        assert lowbit_advise(results, *words) == 0
        return capsys.readouterr().out.partition("\nstep: time")[0]

    found = said("--size", "0.1m", "--length", 16)
    assert found.count("The time of a step is not known: no rate was measured at 0.1m.") == 1
    assert found.count("  not known  ") == 11 and "not known:" not in found.partition("\n\n")[2]
    found = said("--size", "7B", "--length", 4096, "--gpus", 8, "--k3", "fp8_block=1")
    _, held, undecided, lost, beyond = found.split("\n\n")
    assert [part.partition("\n")[0] + "\n" for part in (held, undecided, lost, beyond)] == [
        f"{title}:\n" for title in STANDINGS.values()
    ]
    assert held.count("times, assumed") == 1 and "int8       TIS" not in lost and beyond.count("fp8_block  ") == 2
    found = said("--size", "7b", "--length", 1024)
    assert found.count("times, estimated") == 11 and STANDINGS["beyond"] not in found
    assert lowbit_advise(results, "--size", "7b", "--length", 1024) == 0
    assert "\nestimated: on one GPU, from what was measured on it. assumed: on several " in capsys.readouterr().out


def test_the_probe_is_read_once_and_gives_the_mismatch(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    probe, reads = tmp_path / "probe.json", list[Path]()
    monkeypatch.setattr(question, "read", lambda path: reads.append(path) or read(path))
    probe.write_text(json.dumps(probes.record(probes.row("int8", 1e-4), probes.row("mxfp8", 1e-3))), encoding="utf-8")
    assert lowbit_advise(results, "--size", "7b", "--length", 4096, "--probe", probe, "--explain") == 0
    out, err = capsys.readouterr()
    assert reads == [probe]
    assert err == (
        f"warning: --probe {probe}: of a model of 0.00 million parameters, --size is 7b: its k3 need not hold there\n"
    )
    assert "no rate was measured with mxfp8" in out
    source = "probe 0123456789ab of base, 8 answers of 2 tokens in the mean"
    assert out.count(f"k3 0.0001 ({source}), those bases have 3e-6 to 2e-4") == 2
    assert out.count(f"k3 0.001 ({source}), no base was measured there") == 2


def test_configurations_are_printed_alone(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--size", "7b", "--length", 2048, "--gpus", 8, "--config", "fp8_block:TIS")
    assert lowbit_advise(results, *words) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "# fp8_block with TIS\n"
        "# memory: on 8 x h200 it fits, with checkpointed layers (the plan of lowbit capacity)\n\n"
        "## lowbit, with your own task behind it, such as task=gsm8k task.path=FOLDER\n\n"
        "lowbit run method=flashrl precision=fp8_block "
    )
    assert "\nalgorithm.rollout_correction.rollout_is=token\n" in out and "Risk" not in out


def test_cases_are_printed_and_written(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "results"
    shutil.copytree(results, place, symlinks=True)
    assert lowbit_advise(place, "--cases") == 0 and not (place / "tables" / "advise.md").exists()
    printed = capsys.readouterr().out
    assert "| fp8_block+kv8 | none | equal, falls ≤39% | cannot tell (+8) | 3e-6 to 2e-4 |" in printed
    assert lowbit_advise(place, "--cases", "--write") == 0
    assert (place / "tables" / "advise.md").read_text(encoding="utf-8").strip() in printed
    grid = json.loads((place / "tables" / "advise.json").read_bytes())
    assert len(grid["speeds"]) == 5 * 5 * 3 and len(grid["accuracies"]) == 2 * 5


UNTRAINED = "UNTRAINED"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "--size and --length are needed, such as --size 7b --length 8192; or --cases"),
        ("--size 7b", "--size and --length are needed"),
        ("--size big --length 10", "--size big: a number of parameters such as 7b or 3m is expected"),
        ("--size 0b --length 10", "--size 0b: a number of parameters such as 7b or 3m is expected"),
        ("--size 7b --length 0", "argument --length: '0': a whole number above 0 is expected"),
        ("--size 7b --length 99999999", "7b answers with 1 to 32704 tokens"),
        ("--size 7b --length 10 --k3 high", "--k3 high: nats a token, 0 or more, are expected"),
        ("--size 7b --length 10 --k3 int44=1e-3", "int44 is no format with measured rates; nearest: int4"),
        ("--size 7b --length 10 --k3 1e-3 --probe x.json", "not allowed with argument --k3"),
        ("--size 7b --length 10 --probe x.json", "cannot read x.json: No such file or directory; valid: a file"),
        (f"--size 7b --length 10 --probe {UNTRAINED}", "of untrained weights; costs alone count"),
        ("--size 7b --length 10 --gpus 12", "--gpus 12: 1 to 8, or whole nodes of 8, are expected"),
        ("--size 7b --length 10 --deploy int8", "argument --deploy: invalid choice: 'int8'"),
        ("--size 7b --length 10 --config int44", "--config int44: unknown; nearest: int4"),
        ("--size 7b --length 10 --write", "--write goes with --cases alone"),
        ("--cases --size 7b", "--cases answers questions of its own: leave --size out"),
        ("--cases --deploy bf16", "leave --deploy out"),
    ],
)
def test_wrong_input(
    words: str, expected: str, results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "untrained.json"
    path.write_text(json.dumps(probes.record(probes.row("int8", 1e-4), is_untrained=True)), encoding="utf-8")
    assert lowbit_advise(results, *words.replace(UNTRAINED, str(path)).split()) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("lowbit: error: ") and captured.err.count("\n") == 1 and expected in captured.err
    assert not captured.out and not (results / "tables" / "advise.md").exists()


def test_a_folder_without_evidence_has_the_committed_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--size", "7b", "--length", 4096, "--explain")
    assert lowbit_advise(ROOT / "results", *words) == 0
    expected = capsys.readouterr().out
    assert lowbit_advise(tmp_path, *words) == 0
    found = capsys.readouterr()
    assert found.out == expected and found.err == (
        f"note: --results {tmp_path}: cannot read {tmp_path / 'bench' / 'fp8_layers_7b.json'}: No such file or "
        f"directory; python -m harness.devtools.bench measures it; the committed ones in {HOME / RESULTS} are read\n"
    )


def test_missing_evidence_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advise, "HOME", tmp_path)
    (tmp_path / "results").mkdir()
    assert lowbit_advise(tmp_path / "results", "--size", "7b", "--length", 10) == 2
    err = capsys.readouterr().err
    assert err.startswith("lowbit: error: ") and err.count("\n") == 1 and str(tmp_path) in err
