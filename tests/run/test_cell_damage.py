"""A cell's answers to damage: states, bases and preparations that changed, full disks, foreign files."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness.config import outside
from harness.config.load import run_id, to_json
from harness.config.outside import source_hash
from harness.config.schema import Launch, RunConfig
from harness.engines.embedded.engine import EmbeddedEngine
from harness.foundation.lock_file import held
from harness.foundation.state_files import load_state, save_state
from harness.records.run_result import read_result, write_result
from harness.run import cell
from harness.run.build import build
from harness.run.cell import UNWRITTEN, Cancelled, Stages, record, record_path, run_cell, work_folder
from harness.run.checks import check
from harness.run.run import Run
from harness.start.prepare import Start, prepare, start_of
from tests.toy import small_config, small_launch, small_run


def stopped_at(step: int, config: RunConfig, launch: Launch) -> Path:
    """The state of a cell that was asked to stop after so many steps."""
    asked: list[int] = []

    def should_stop() -> bool:
        asked.append(1)
        return len(asked) == step

    with pytest.raises(Cancelled):
        run_cell(config, launch, should_stop=should_stop)
    return work_folder(launch, run_id(config)) / "state.pt"


def flipped(path: Path, fraction: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * fraction)] ^= 1
    path.write_bytes(data)


def test_a_damaged_state_is_set_aside_and_the_result_is_the_same(tmp_path: Path) -> None:
    config = small_config("method=bf16")
    straight = run_cell(config, small_launch(tmp_path / "straight"))
    launch = small_launch(tmp_path / "hit", retries=("lost: killed by SIGKILL",))
    state = stopped_at(2, config, launch)
    resumed = load_state(state)
    assert (resumed["step"], resumed["run_id"]) == (2, run_id(config))
    flipped(state, 0.5)  # a bit in the middle of a tensor: torch alone would read it without a word
    result = run_cell(config, launch)
    assert (result.status, result.num_steps) == ("ok", 4)
    assert result.hashes == straight.hashes
    assert result.evals == straight.evals
    assert result.retries[0] == "lost: killed by SIGKILL"
    assert result.retries[1].startswith("state.pt was set aside as state.pt.corrupt and its training started again")
    assert "checksum" in result.retries[1]
    assert read_result(record_path(launch, run_id(config))) == result
    assert (state.parent / "state.pt.corrupt").exists()


def of_another_cell(state: Path) -> None:
    """Make a cell's state that of another one, which is read whole before it is refused."""
    save_state(state, load_state(state) | {"run_id": "another"})


def test_every_sampler_is_closed_before_the_cell_is_built_again(tmp_path: Path) -> None:
    config = small_config("method=mixed_rollouts", "precision=int4", "knobs.SecondSampler.share=0.25")
    launch, built, awake = small_launch(tmp_path), list[Run](), list[list[bool]]()

    def build_again(
        config: RunConfig, launch: Launch, should_stop: Callable[[], bool]
    ) -> tuple[Run, dict[str, str | None]]:
        awake.extend([engine.is_awake for engine in run.engines if isinstance(engine, EmbeddedEngine)] for run in built)
        run, hashes = build(config, launch, should_stop)
        built.append(run)
        awake.append([engine.is_awake for engine in run.engines if isinstance(engine, EmbeddedEngine)])
        return run, hashes

    of_another_cell(stopped_at(1, config, launch))
    assert run_cell(config, launch, stages=Stages(build=build_again)).status == "ok"
    assert awake == [[True, True], [False, False], [True, True]]


def test_the_first_run_is_gone_before_the_cell_is_built_again(tmp_path: Path) -> None:
    config, launch = small_config("method=bf16"), small_launch(tmp_path)
    first, alive = list[weakref.ref[Run]](), list[bool]()

    def build_again(
        config: RunConfig, launch: Launch, should_stop: Callable[[], bool]
    ) -> tuple[Run, dict[str, str | None]]:
        gc.collect()
        alive.extend(run() is not None for run in first)
        run, hashes = build(config, launch, should_stop)
        first.append(weakref.ref(run))
        return run, hashes

    of_another_cell(stopped_at(1, config, launch))
    assert run_cell(config, launch, stages=Stages(build=build_again)).status == "ok"
    assert alive == [False]


def test_the_state_of_another_cell_is_not_taken(tmp_path: Path) -> None:
    config, launch = small_config("method=bf16"), small_launch(tmp_path)
    other = stopped_at(3, small_config("method=bf16", "seed=7"), launch)
    here = work_folder(launch, run_id(config)) / "state.pt"
    here.parent.mkdir()
    here.write_bytes(other.read_bytes())
    result = run_cell(config, launch)
    assert "another cell" in result.retries[0]
    assert result.hashes["final"] == run_cell(config, small_launch(tmp_path / "straight")).hashes["final"]


def test_the_state_of_another_model_is_set_aside_in_one_line(tmp_path: Path) -> None:
    config, launch = small_config("method=bf16"), small_launch(tmp_path)
    state = stopped_at(2, config, launch)
    saved = load_state(state)
    del saved["trainer"]["model"]["model.norm.weight"]
    save_state(state, saved)
    result = run_cell(config, launch)
    (note,) = result.retries
    assert (result.status, result.num_steps) == ("ok", 4)
    assert note.endswith('the state is of another model: Error(s) in loading state_dict for Decoder: Missing key(s) in '
                         'state_dict: "model.norm.weight".')  # fmt: skip
    assert result.hashes["final"] == run_cell(config, small_launch(tmp_path / "straight")).hashes["final"]


@pytest.mark.parametrize("cut", [0, 1, 100, 0.3, 0.999])
def test_a_truncated_state_is_told(tmp_path: Path, cut: float) -> None:
    path = tmp_path / "state.pt"
    save_state(path, {"step": 3})
    data = path.read_bytes()
    path.write_bytes(data[: int(cut if cut >= 1 else cut * len(data))])
    with pytest.raises(ValueError, match=r"state\.pt: not a whole state: "):
        load_state(path)


def test_a_bit_that_flips_anywhere_is_told_or_does_no_harm(tmp_path: Path) -> None:
    path, dice = tmp_path / "state.pt", random.Random(0)
    state = {"step": 3, "series": [{"loss": 0.25}], "name": "x" * 64}
    save_state(path, state)
    data, told = path.read_bytes(), 0
    for _ in range(400):
        hit = bytearray(data)
        hit[dice.randrange(len(hit))] ^= 1 << dice.randrange(8)
        path.write_bytes(hit)
        try:
            assert load_state(path) == state  # padding
        except ValueError:
            told += 1
    assert told > 200


def test_a_disk_too_full_for_a_state_costs_only_the_state(tmp_path: Path) -> None:
    config, launch = small_config("method=bf16"), small_launch(tmp_path, checkpoint_every_s=0.0)
    limit = "import resource, signal, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)); "
    limit += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    work = work_folder(launch, run_id(config))
    work.mkdir(parents=True)
    (work / "cell.json").write_text(json.dumps({"config": to_json(config), "launch": to_json(launch)}))
    code = (
        limit + "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "from harness.run.cell import main; sys.exit(main(sys.argv[1]))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(work / "cell.json")], check=False).returncode == 0
    result = read_result(record_path(launch, run_id(config)))
    assert (result.status, result.num_steps) == ("ok", 4)
    (note,) = result.retries
    assert note.startswith("the state could not be saved at step 1: ")
    assert "File too large" in note
    assert sorted(path.name for path in work.iterdir()) == ["alive", "cell.json", "progress.json"]


def test_a_disk_too_full_for_progress_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, launch, real = small_config("method=bf16"), small_launch(tmp_path), Path.write_text

    def write_text(path: Path, data: str, encoding: str | None = None) -> int:
        if path.name == "progress.part":
            path.touch()
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, data, encoding)

    monkeypatch.setattr(Path, "write_text", write_text)
    assert run_cell(config, launch).status == "ok"
    assert list(work_folder(launch, run_id(config)).iterdir()) == []


def test_a_damaged_base_is_a_failure_that_names_it(tmp_path: Path) -> None:
    config, launch = small_config("method=bf16"), small_launch(tmp_path)
    (weights,) = (tmp_path / "bases").glob("xs-chain8-b0-*/model.safetensors")
    flipped(weights, 0.5)
    hit = weights.read_bytes()
    result = run_cell(config, launch)
    assert result.status == "failed"
    assert f"base folder {weights.parent} is damaged (its weights were changed): delete it" in (result.reason or "")
    assert weights.read_bytes() == hit


def test_what_a_part_prepared_is_made_again_when_damaged(tmp_path: Path) -> None:
    words = ("method=flashrl", "precision=int8")
    whole = {name: tensor.tolist() for name, tensor in small_run(tmp_path, words).composed.fixed.items()}
    assert whole
    (prepared,) = (tmp_path / "work" / "prepared").glob("*/fixed.safetensors")
    before = prepared.stat().st_ino
    small_run(tmp_path, words)
    assert prepared.stat().st_ino == before
    flipped(prepared, 0.95)
    again = small_run(tmp_path, words).composed.fixed
    assert {name: tensor.tolist() for name, tensor in again.items()} == whole
    assert prepared.stat().st_ino != before
    assert len(list((tmp_path / "work" / "prepared").glob("*.corrupt-*"))) == 1


def test_each_device_prepares_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are rounded otherwise on another device, and a run's id says on which it is."""
    config, launch, build_at = small_config("method=flashrl", "precision=int8"), small_launch(tmp_path), Start.build
    monkeypatch.setattr(Start, "build", lambda self, folder: build_at(replace(self, device="cpu"), folder))
    start, found = start_of(config, launch), list[set[str]]()
    for device in ("cpu", "cuda", "cpu", "cuda"):
        prepare(check(config), config, replace(start, device=device), launch)
        found.append({path.parent.name for path in (tmp_path / "work" / "prepared").glob("*/fixed.safetensors")})
    assert [len(names) for names in found] == [1, 2, 2, 2]


def test_an_edited_method_is_prepared_anew(tmp_path: Path) -> None:
    config, launch = small_config("method=flashrl", "precision=int8"), small_launch(tmp_path)
    for source in ("methods.mine 000000000000", "methods.mine 000000000001", "methods.mine 000000000000"):
        build(replace(config, outside=(source,)), launch)
    assert len(list((tmp_path / "work" / "prepared").glob("*/fixed.safetensors"))) == 2


def test_an_edited_file_whose_hash_is_in_no_record_prepares_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, launch, true = small_config("method=flashrl", "precision=int8"), small_launch(tmp_path), source_hash
    assert config.outside == ()
    for edited in ("", "methods.flashrl", "methods.naive", ""):  # the second is imported by the first
        monkeypatch.setattr(outside, "source_hash", lambda name, at=edited: "0" * 12 if name == at else true(name))
        build(config, launch)
    assert len(list((tmp_path / "work" / "prepared").glob("*/fixed.safetensors"))) == 3


def test_what_another_cell_prepared_anew_is_not_set_aside(tmp_path: Path) -> None:
    words = ("method=flashrl", "precision=int8")
    small_run(tmp_path, words)
    (prepared,) = (tmp_path / "work" / "prepared").glob("*/fixed.safetensors")
    whole, inode = prepared.read_bytes(), prepared.stat().st_ino
    flipped(prepared, 0.95)
    runs = list[Run]()
    waiting = threading.Thread(target=lambda: runs.append(small_run(tmp_path, words)))
    with held(prepared.parent.with_name(f".{prepared.parent.name}.lock"), lambda: None):
        waiting.start()
        time.sleep(2.0)
        assert runs == [] and prepared.stat().st_ino == inode
        prepared.write_bytes(whole)
    waiting.join(60.0)
    assert len(runs) == 1 and prepared.stat().st_ino == inode
    assert [path.name for path in prepared.parent.parent.iterdir()] == [prepared.parent.name]


def test_a_cell_that_waits_for_a_preparation_can_be_stopped(tmp_path: Path) -> None:
    config, launch = small_config("method=flashrl", "precision=int8"), small_launch(tmp_path)
    small_run(tmp_path, ("method=flashrl", "precision=int8"))
    (prepared,) = (tmp_path / "work" / "prepared").glob("*/fixed.safetensors")
    flipped(prepared, 0.95)
    with (
        held(prepared.parent.with_name(f".{prepared.parent.name}.lock"), lambda: None),
        pytest.raises(Cancelled),
    ):
        run_cell(config, launch, should_stop=lambda: True)
    assert list(work_folder(launch, run_id(config)).iterdir()) == []


def test_a_foreign_file_in_the_place_of_the_record_is_not_overwritten(tmp_path: Path) -> None:
    config, launch = small_config("method=bf16"), small_launch(tmp_path)
    path = record_path(launch, run_id(config))
    path.parent.mkdir(parents=True)
    path.write_text("notes of mine")
    with pytest.raises(ValueError, match="not a result file"):
        run_cell(config, launch)
    assert path.read_text() == "notes of mine"


def test_a_second_process_of_a_cell_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, launch = small_config(), small_launch(tmp_path)
    described = tmp_path / "cell.json"
    described.write_text(json.dumps({"config": to_json(config), "launch": to_json(launch), "parent": os.getpid()}))
    told: list[str] = []

    def fake_cell(config: RunConfig, launch: Launch, should_stop: object, stages: cell.Stages) -> None:
        told.append("ran")
        assert callable(should_stop)
        assert should_stop()  # the launcher that it names is not its parent
        raise ValueError("no room")

    monkeypatch.setattr(cell, "run_cell", fake_cell)
    monkeypatch.setattr(cell.signal, "signal", lambda *_: None)
    monkeypatch.setattr(cell.faulthandler, "register", lambda *_: None)
    monkeypatch.setattr(cell, "ORPHAN_S", 1e6)
    first = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(first, fcntl.LOCK_EX)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(cell.main(str(described))))
    thread.start()
    time.sleep(0.5)
    assert told == []
    os.close(first)
    thread.join(30)
    assert (told, codes) == (["ran"], [UNWRITTEN])


def test_a_cell_that_another_process_finished_meanwhile_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, launch = small_config(), small_launch(tmp_path)
    described = tmp_path / "cell.json"
    described.write_text(json.dumps({"config": to_json(config), "launch": to_json(launch), "parent": os.getpid()}))
    result = record(config, launch, None, {}, "ok", None, None)
    write_result(record_path(launch, run_id(config)).parent, result, None)
    monkeypatch.setattr(cell.signal, "signal", lambda *_: None)
    monkeypatch.setattr(cell.faulthandler, "register", lambda *_: None)
    monkeypatch.setattr(cell, "ORPHAN_S", 1e6)
    monkeypatch.setattr(cell, "run_cell", lambda *_, **__: pytest.fail("run again"))
    assert cell.main(str(described)) == 0
