"""A cell's life: record, resume after being killed, cancel, divergence and failure as records."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness import cell
from harness.cell import CANCELLED, UNWRITTEN, Cancelled, record_path, run_cell, work_folder
from harness.config import run_id, to_json
from harness.prepare import load_state, save_state
from harness.provenance import peak_memory_gib
from harness.results import read_result, read_series
from harness.run_config import Launch, RunConfig
from harness.trainers.local import LocalTrainer
from tests.toy import small_config, small_launch, small_run


def spawn(config: RunConfig, launch: Launch) -> subprocess.Popen[bytes]:
    folder = work_folder(launch, run_id(config))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "cell.json"
    path.write_text(json.dumps({"config": to_json(config), "launch": to_json(launch)}))
    return subprocess.Popen(
        [sys.executable, "-m", "harness.cell", str(path)], env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def killed_until_done(config: RunConfig, launch: Launch, kills: int, first_s: float, span_s: float) -> int:
    """Start the cell, kill it at random moments, `kills` times; then let it finish. Returns the kills that hit."""
    moments, hits = random.Random(0), 0
    for _ in range(kills):
        process = spawn(config, launch)
        time.sleep(first_s + span_s * moments.random())
        hits += process.poll() is None
        process.kill()
        process.wait()
        if (Path(launch.results) / "runs" / "test" / f"{run_id(config)}.json").exists():
            break
    assert spawn(config, launch).wait() == 0
    return hits


def check_killed_equals_straight(tmp_path: Path, kills: int, steps: int, span_s: float) -> int:
    config = small_config("method=flashrl", "precision=int8", f"trainer.steps={steps}", "algo.num_minibatches=2")
    straight = run_cell(config, small_launch(tmp_path / "straight"))
    launch = small_launch(tmp_path / "killed", checkpoint_every_s=0.0)
    hits = killed_until_done(config, launch, kills, first_s=1.5, span_s=span_s)
    folders = [Path(x.results) / "runs" / "test" for x in (small_launch(tmp_path / "straight"), launch)]
    survivor = read_result(folders[1] / f"{run_id(config)}.json")
    assert survivor.hashes["final"] == straight.hashes["final"]
    assert survivor.evals == straight.evals
    series = [read_series(folder, run_id(config)) for folder in folders]
    for name in ("train/loss", "mismatch/kl_k3", "reward/accuracy", "train/grad_norm"):
        assert series[0][name] == series[1][name], name
    return hits


def test_a_killed_cell_resumes_bit_for_bit(tmp_path: Path) -> None:
    assert check_killed_equals_straight(tmp_path, kills=2, steps=12, span_s=1.0) >= 1


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_nothing(tmp_path: Path) -> None:
    assert check_killed_equals_straight(tmp_path, kills=20, steps=400, span_s=4.0) == 20


def test_a_record_holds_what_a_reader_needs(tmp_path: Path) -> None:
    config = small_config("method=flashrl", "precision=int8")
    result = run_cell(config, small_launch(tmp_path))
    assert (result.status, result.num_steps, result.run_id) == ("ok", 4, run_id(config))
    assert [(e.step, e.site) for e in result.evals] == [(s, w) for s in (0, 2, 4) for w in ("reference", "rollout")]
    assert result.planned["rollout_weights"] == "int8_channel"
    assert result.passport is not None
    formats = {t["name"]: t["format"] for t in result.passport["weights"]}
    assert formats["model.layers.0.self_attn.q_proj.weight"] == "int8_channel"
    assert formats["model.embed_tokens.weight"] == "bf16"
    assert result.method.parts["TIS"]["cap"] == 2.0
    stages = {"generate", "reward", "sync", "old_logp", "update", "eval", "other", "total"}
    assert set(result.time_s) == stages
    assert 0.05 < (result.peak_memory_gib or 0) <= peak_memory_gib("cpu")
    assert (result.tokens_per_s["rollout"] or 0) > 100


def test_divergence_is_a_status_and_the_series_stays(tmp_path: Path) -> None:
    config = small_config("method=bf16", "trainer.lr=3e38", "trainer.steps=6")
    result = run_cell(config, small_launch(tmp_path))
    assert result.status == "diverged"
    assert result.reason is not None and "finite" in result.reason
    assert result.num_steps >= 1
    assert len(read_series(tmp_path / "runs" / "test", result.run_id)["train/loss"]) == result.num_steps


def test_weights_that_are_not_finite_after_the_last_update_diverge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalTrainer.step

    def step(trainer: LocalTrainer) -> dict[str, float]:
        row = real(trainer)
        if trainer.num_updates == 4:
            with torch.no_grad():
                trainer.parameters[0].view(-1)[0] = torch.inf
        return row

    monkeypatch.setattr(LocalTrainer, "step", step)
    result = run_cell(small_config("method=naive", "precision=int8"), small_launch(tmp_path))
    assert (result.status, result.reason) == ("diverged", "step 4: a weight is not finite")
    assert (result.num_steps, [e.step for e in result.evals]) == (4, [0, 0, 2, 2])


def test_a_failure_is_a_record_with_its_traceback(tmp_path: Path) -> None:
    config = small_config("method=bf16")
    broken = replace(config, model=replace(config.model, path=str(tmp_path / "nowhere")))
    result = run_cell(broken, small_launch(tmp_path))
    assert result.status == "failed"
    assert result.reason is not None and "nowhere" in result.reason
    assert result.error is not None and "Traceback" in result.error


def test_a_stop_saves_a_state_and_writes_no_record(tmp_path: Path) -> None:
    config, launch = small_config("method=bf16"), small_launch(tmp_path)
    with pytest.raises(Cancelled):
        run_cell(config, launch, should_stop=lambda: True)
    assert (work_folder(launch, run_id(config)) / "state.pt").exists()
    assert not (tmp_path / "runs").exists()
    assert run_cell(config, launch).num_steps == 4


def test_sigterm_cancels_cleanly(tmp_path: Path) -> None:
    config, launch = small_config("method=bf16", "trainer.steps=100000"), small_launch(tmp_path)
    process = spawn(config, launch)
    progress = work_folder(launch, run_id(config)) / "progress.json"
    for _ in range(600):
        if progress.exists():
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == CANCELLED
    assert (progress.parent / "state.pt").exists()


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
    assert result.retries[1].startswith("state.pt was set aside as state.pt.corrupt and the cell started again")
    assert "checksum" in result.retries[1]
    assert read_result(record_path(launch, run_id(config))) == result
    assert (state.parent / "state.pt.corrupt").exists()


def test_the_state_of_another_cell_is_not_taken(tmp_path: Path) -> None:
    config, launch = small_config("method=bf16"), small_launch(tmp_path)
    other = stopped_at(3, small_config("method=bf16", "seed=7"), launch)
    here = work_folder(launch, run_id(config)) / "state.pt"
    here.parent.mkdir()
    here.write_bytes(other.read_bytes())
    result = run_cell(config, launch)
    assert "another cell" in result.retries[0]
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
        limit
        + "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); from harness.cell import main; sys.exit(main(sys.argv[1]))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(work / "cell.json")], check=False).returncode == 0
    result = read_result(record_path(launch, run_id(config)))
    assert (result.status, result.num_steps) == ("ok", 4)
    (note,) = result.retries
    assert note.startswith("the state could not be saved at step 1: ")
    assert "File too large" in note
    assert sorted(path.name for path in work.iterdir()) == ["cell.json", "progress.json"]


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

    def fake_cell(config: RunConfig, launch: Launch, should_stop: object) -> None:
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
