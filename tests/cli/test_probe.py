"""`lowbit probe` on a tiny Qwen2 folder: record, page and figure, earlier records, and wrong input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.cli.main import main
from harness.devtools.bench.verl_scaling import make_folder
from harness.trainers.local.trainer import LocalTrainer
from tests.studies.probe import made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 folder."""
    return made.qwen2(tmp_path_factory.mktemp("folder") / "qwen2")


def lowbit_probe(results: Path, *words: object) -> int:
    return main(["probe", *map(str, words), "--results", str(results)])


def test_the_command_measures_prints_and_writes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, dump = tmp_path / "results", tmp_path / "dump"
    words = (folder, *made.WORDS, "trainer.compute=fp32", "--precisions", "int8,int4=int4_g32", "--untrained")
    assert lowbit_probe(results, *words, "--dump", dump, "--write") == 0
    out = capsys.readouterr().out
    (path,) = (results / "probes").glob("*.json")
    record = json.loads(path.read_bytes())
    assert [row["name"] for row in record["formats"]] == ["bf16", "bf16 again", "int8", "int4"]
    assert record["formats"][3]["passport"]["weights"]["int4_g32"] == 14 and record["is_untrained"]
    floor = " and ".join(f"{row['mismatch']['kl_k3']:.2g}" for row in record["formats"][:2])
    assert f"- qwen2: the floor, bf16 sampled twice, has a k3 of {floor}." in out and "untrained, so costs" in out
    assert f"- qwen2: 24 answers of 6 prompts each, task sort, engine embedded, probe {record['id']}\n" in out
    assert "\nbf16_tis: token TIS alone, the correction of flashrl.\n" in out
    assert {path.name for path in (dump / "qwen2").iterdir()} == {
        f"{name}.safetensors" for name in ("bf16", "bf16-again", "int8", "int4")
    }
    page = results / "tables" / f"probe_{record['id']}.md"
    assert page.read_text(encoding="utf-8").startswith("# Probe\n\n- qwen2: untrained")
    before = page.read_bytes(), path.read_bytes()
    assert lowbit_probe(results, path, "--write") == 0, "an earlier record is read, not measured again"
    assert (page.read_bytes(), path.read_bytes()) == before


def test_settings_of_the_launch_reach_the_trainer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp16 among the formats, and micro-batches of one answer: one forward pass each."""
    seen: list[int] = []
    passes = LocalTrainer.passes

    def counted(self: LocalTrainer, *given: Any, **kept: Any) -> Any:
        found = passes(self, *given, **kept)
        seen.append(len(found))
        return found

    monkeypatch.setattr(LocalTrainer, "passes", counted)
    words = (folder, *made.WORDS, "--precisions", "fp16")
    assert lowbit_probe(tmp_path / "a", *words, "launch.micro_batch_tokens=1") == 0
    assert len(seen) == 3 and set(seen) == {24}
    seen.clear()
    assert lowbit_probe(tmp_path / "b", *words) == 0
    assert set(seen) == {1}
    one, other = (json.loads(next((tmp_path / x / "probes").glob("*")).read_bytes()) for x in "ab")
    assert one["id"] == other["id"], "a launch is no part of what was measured"
    assert other["formats"][2]["passport"]["weights"] == {"fp16": 26}


def test_a_folder_is_compared_with_an_earlier_record(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps(made.record(made.row("int8", 0.5), folder="before")), encoding="utf-8")
    assert lowbit_probe(tmp_path, folder, earlier, *made.WORDS, "--precisions", "int8") == 0
    out = capsys.readouterr().out
    assert "- before: k3 over the floor's: int8 2,500 times." in out and "- qwen2: the floor" in out


def test_ctrl_c_says_that_a_folder_has_no_record(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("harness.studies.probe.record.measure", stop)
    assert lowbit_probe(tmp_path, folder, *made.WORDS, "--precisions", "int8") == 130
    assert capsys.readouterr().err == (
        f"\nlowbit: interrupted; {folder} has no record: the same command measures all its formats anew\n"
    )
    assert not list((tmp_path / "probes").glob("*"))


def test_prompts_of_a_file(tmp_path: Path) -> None:
    """128 questions of one's own, in columns of one's own; one in 16 is held out, the others are sampled."""
    make_folder(tmp_path / "model", "toy", "cpu")
    file = tmp_path / "prompts.jsonl"
    asked = [{"prompt": f"What is {a} + {b}?", "right": str(a + b)} for a in range(8) for b in range(16)]
    file.write_text("".join(json.dumps(row) + "\n" for row in asked), encoding="utf-8")
    words = ("task=math", f"task.path={file}", "+task.options.columns={question: prompt, answer: right}",
             "algo.num_prompts=3", "algo.group_size=2", "engine.max_new_tokens=4", "--precisions", "int8")  # fmt: skip
    assert lowbit_probe(tmp_path / "results", tmp_path / "model", *words) == 0
    (path,) = (tmp_path / "results" / "probes").glob("*.json")
    record = json.loads(path.read_bytes())
    assert [(row["num_prompts"], row["num_answers"]) for row in record["formats"]] == [(3, 6)] * 3
    assert record["config"]["task"]["path"] == str(file)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("FOLDER", "--precisions", "int44"), "--precisions=int44: unknown"),
        (("FOLDER", "method=flashrl"), "the probe has no method, --precisions names the formats"),
        (("FOLDER", "algo.num_promts=3"), "algo.num_promts"),
        (("FOLDER", "trainer=verl"), "override 'trainer=verl'"),
        (
            ("FOLDER", "trainer.steps=3"),
            "trainer.steps=3: nothing is trained here; valid of the trainer: trainer.device",
        ),
        (("FOLDER", "base.n=9"), "base.n=9: no base is trained here, the model is the folder; leave it out"),
        (("FOLDER", "launch.results=x"), "launch.results=x: launch has no such setting"),
        (("nowhere",), "nowhere: no such folder; a model's, with its config.json, is expected"),
        (("FOLDER", "nowhere"), "nowhere: no such folder"),
        (("FOLDER", "--dump", "README.md"), "--dump README.md/qwen2: nothing can be written there: Not"),
        (("README.md",), "README.md: no model folder; it is a file"),
        (("nothing.json",), "cannot read nothing.json: No such file or directory; valid: a file"),
        ((), "FOLDER"),
    ],
)
def test_wrong_input(
    words: tuple[str, ...], expected: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    given = [str(folder) if word == "FOLDER" else word for word in words]
    assert lowbit_probe(results, *given, *(made.WORDS if given else ())) == 2
    err = capsys.readouterr().err
    assert err.startswith("lowbit: error: ") and err.count("\n") == 1 and expected in err
    assert not results.exists()


def test_results_that_cannot_be_written_are_refused_before_anything_is_measured(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.studies.probe.record.probe", lambda *given, **kept: pytest.fail("it is measured"))
    (tmp_path / "probes").touch()
    assert lowbit_probe(tmp_path, folder, *made.WORDS) == 2
    assert f"--results {tmp_path / 'probes'}: nothing can be written there: File exists" in capsys.readouterr().err
