"""A cell that follows verl's driver: the end, divergence, a death, a stop and taking up; against a stand-in driver."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.config.compose import compose
from harness.config.load import load
from harness.config.resolve import resolve
from harness.config.schema import Launch
from harness.foundation import provenance
from harness.foundation.whole_file import write_atomic
from harness.models.checkpoint import read_tensors
from harness.run.policies import save_hf, save_quantized
from harness.start.base_training import Unfinished
from harness.start.prepare import start_of
from harness.tasks import build_task
from harness.trainers.local.trainer import Diverged
from harness.trainers.verl import parent
from harness.trainers.verl.data import lay_out
from harness.trainers.verl.parent import GrowingLines, Watched, read_lines
from harness.trainers.verl.settings import environment
from tests.toy import SMALL, small_launch


class Stop(Exception):  # noqa: N818 - what the cell raises
    pass


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(parent, "DRIVER", "tests.trainers.verl.verl_driver")
    monkeypatch.setattr(parent, "POLL_S", 0.02)
    config, launch = resolve(load([*SMALL, "trainer=verl", "method=bf16"])), small_launch(tmp_path)
    composed = compose(config)
    return Watched(lay_out(config, launch, composed, start_of(config, launch), tmp_path / "verl"), composed)


def train(run: Watched, ending: str, stop_at: int = 99) -> list[tuple[int, float]]:
    (run.job.folder / "ending").write_text(ending)
    told: list[tuple[int, float]] = []
    run.train(lambda step, reward: told.append((step, reward)), lambda: run.step >= stop_at, Stop)
    return told


def test_the_base_of_a_run_heeds_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent.checks, "check_launch", lambda *_: None)
    monkeypatch.setattr(parent.checks, "check_installed", lambda: None)
    config = resolve(load([*SMALL, "trainer=verl", "method=bf16", "task.n=4"]))
    launch = Launch(results=str(tmp_path), sweep="test")
    with pytest.raises(Unfinished):
        parent.watch(config, launch, compose(config), tmp_path, lambda: True)
    assert [path.suffix for path in (tmp_path / "work" / "bases").iterdir()] == [".pt"]


def test_the_record_has_the_hashes_of_the_evaluations_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent.checks, "check_installed", lambda: None)
    words = ("trainer=verl", "method=bf16", "evaluations=[{task:chain,num:4},{task:sort,num:4}]")
    config = resolve(load([*SMALL, *words]))
    _, hashes = parent.watch(config, small_launch(tmp_path), compose(config), tmp_path, lambda: False)
    assert list(hashes) == ["model", "task", "evaluations.0", "evaluations.1"]
    chain, sort = (build_task(name, {}).content_hash() for name in ("chain", "sort"))
    assert (hashes["task"], hashes["evaluations.0"], hashes["evaluations.1"]) == (chain, chain, sort)


def test_an_end_is_compared_in_the_reference_precision(run: Watched) -> None:
    train(run, "ok")
    run.compare()
    assert run.step == 4
    assert [(e.step, e.site, e.precision) for e in run.evals] == [(0, "reference", "fp32"), (4, "reference", "fp32")]
    assert run.evals[0].correct == run.evals[1].correct  # the stand-in trains nothing
    assert run.eval_s > 0
    assert run.final_hash() is not None


def test_a_model_too_large_for_the_reference_leaves_a_remark_and_no_failure(
    run: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*args: object) -> None:
        raise MemoryError("32B in float32\nneed 128 GiB")

    train(run, "ok")
    monkeypatch.setattr(parent, "evaluated", too_large)
    run.compare()
    words = "MemoryError: 32B in float32 need 128 GiB"
    assert run.evaluation_errors == [f"step 0: {words}", f"step 4: {words}"]
    assert run.evals == []


def test_the_last_policy_is_kept_as_the_local_trainer_keeps_it(run: Watched, tmp_path: Path) -> None:
    train(run, "ok")
    save_hf(run, tmp_path / "policy")
    assert provenance.tensors_hash(read_tensors(tmp_path / "policy")) == run.final_hash()
    assert (tmp_path / "policy" / "tokenizer.json").read_bytes() == (run.folder / "tokenizer.json").read_bytes()
    with pytest.raises(ValueError, match="precision=bf16 has no codes"):
        save_quantized(run, tmp_path / "codes")


def test_answers_to_evaluations_are_read_from_the_drivers_lines(run: Watched) -> None:
    train(run, "ok")
    told = {"number": 0, "task": "sort", "step": 4, "site": "rollout", "precision": "bf16", "engine": "Servers", "k": 1,
            "temperature": 1.0, "top_p": 1.0, "max_new_tokens": 4, "question_hash": "q", "seconds": 0.5,
            "error": "a replica did not answer"}  # fmt: skip
    record = {"step": 4, "precision": "bf16", "site": "rollout", "accuracy": 0.5, "correct": [1, 0],
              "question_hash": "q",
              "length_mean": 3.0, "truncated_frac": 0.0, "unparsable_frac": 0.0}  # fmt: skip
    line = json.dumps({"record": record, "seconds": 2.0, "evaluations": [told]})
    run.job.evals_file.write_text(f"{line}\n")
    assert [(one.step, one.task, one.error) for one in run.evaluations] == [(4, "sort", "a replica did not answer")]
    assert run.eval_s == 2.0


def test_the_driver_starts_where_no_file_of_the_user_has_a_modules_name(
    run: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods" / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    train(run, "ok")
    assert (run.job.folder / "cwd").read_text() == str(run.job.folder)
    assert not [*run.job.folder.rglob("*.py")] and environment(run.job)["PYTHONSAFEPATH"] == "1"


def test_divergence_and_failures_keep_their_words(run: Watched) -> None:
    with pytest.raises(Diverged, match="step 3: train/loss is nan"):
        train(run, "diverged")
    with pytest.raises(RuntimeError, match=r"train/loss is nan \(exit code 1; .*verl\.log\)"):
        train(run, "failed")
    with pytest.raises(RuntimeError, match=r"died without a word \(exit code 9"):
        train(run, "die")
    with pytest.raises(RuntimeError, match=r"driver died: KeyError: 'told' \(exit code 1; "):
        train(run, "raise")
    with pytest.raises(RuntimeError, match="killed by SIGKILL, as the kernel does where memory runs out"):
        train(run, "kill")
    with pytest.raises(MemoryError, match="train/loss is nan") as caught:
        train(run, "memory")
    assert caught.value.__notes__ == ["where it was raised"]


def test_a_stop_leaves_what_the_next_start_goes_on_from(run: Watched) -> None:
    with pytest.raises(Stop):
        train(run, "wait", stop_at=2)
    assert run.job.stop_file.exists()
    assert run.step == 2
    train(run, "wait")
    assert run.step == 4
    assert not run.job.stop_file.exists()


def test_a_silent_driver_is_told_of_once_and_one_that_works_at_every_stage(run: Watched) -> None:
    """The launcher kills a cell whose progress file stays as it is for `launch.stall_s`."""
    at_step_2 = [told for told in train(run, "silent") if told[0] == 2]
    assert at_step_2 == [(2, 0.25)]
    run.job.series_file.unlink()
    assert 4 <= sum(told[0] == 2 for told in train(run, "stages")) <= 6


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert read_lines(path) == [{"a": 1}, {"a": 2}]
    assert read_lines(tmp_path / "none") == []


def test_a_growing_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = GrowingLines(path)
    assert lines.read() == []
    path.write_text('{"a": 1}\n{"a"')
    assert lines.read() == [{"a": 1}]
    with path.open("r+b") as file:
        file.write(b"no JSON!")  # a reader that came back here would stumble
        file.seek(0, 2)
        file.write(': "\u00fc"}\n{"a": 3'.encode())
    assert lines.read() == [{"a": 1}, {"a": "\u00fc"}]
    assert lines.read() == [{"a": 1}, {"a": "\u00fc"}]
    with path.open("ab") as file:
        file.write(b"0}\n")
    assert lines.read() == [{"a": 1}, {"a": "\u00fc"}, {"a": 30}]


@pytest.mark.parametrize("count", [1, 4])
def test_a_file_in_the_place_of_another_is_read_anew(tmp_path: Path, count: int) -> None:
    path = tmp_path / "lines.jsonl"
    write_atomic(path, b'{"a": 1}\n{"a": 2}\n')
    lines = GrowingLines(path)
    assert lines.read() == [{"a": 1}, {"a": 2}]
    write_atomic(path, b'{"b": 1}\n' * count)
    assert lines.read() == [{"b": 1}] * count


def test_a_file_that_was_cut_in_place_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    lines = GrowingLines(path)
    assert len(lines.read()) == 2
    path.write_text('{"b": 1}\n')
    assert lines.read() == [{"b": 1}]
