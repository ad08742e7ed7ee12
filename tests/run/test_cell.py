"""A cell's life: record, resume after being killed, cancel, divergence and failure as records."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.config.load import run_id, to_json
from harness.config.schema import Launch, RunConfig
from harness.foundation.provenance import peak_memory_gib
from harness.foundation.state_files import load_state, save_state
from harness.records.run_result import read_result, read_series
from harness.run.build import build
from harness.run.cell import CANCELLED, Cancelled, Stages, run_cell, work_folder
from harness.run.dump import dump
from harness.run.loop import train
from harness.run.run import Run
from harness.sweep.retry import MEMORY, failure_class
from harness.trainers.local.trainer import LocalTrainer
from tests.toy import small_config, small_launch


def spawn(config: RunConfig, launch: Launch) -> subprocess.Popen[bytes]:
    folder = work_folder(launch, run_id(config))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "cell.json"
    path.write_text(json.dumps({"config": to_json(config), "launch": to_json(launch)}))
    return subprocess.Popen(
        [sys.executable, "-m", "harness.run.cell", str(path)], env=os.environ | {"OMP_NUM_THREADS": "1"}
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


def test_rollouts_are_written_out_and_states_saved_by_step(tmp_path: Path) -> None:
    config = small_config("method=bf16", "trainer.steps=3")
    launch = small_launch(tmp_path, dump_rollouts=5, checkpoint_every_steps=2)
    saved: list[int] = []
    stages = Stages(save_state=lambda path, state: saved.append(state["step"]))
    assert run_cell(config, launch, stages=stages).status == "ok"
    assert saved == [2]
    path = tmp_path / "rollouts" / "test" / f"{run_id(config)}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row["row"]) for row in rows] == [(step, row) for step in range(3) for row in range(5)]
    assert {row["reward"] for row in rows} <= {0.0, 1.0}
    assert len({row["index"] for row in rows[:5]}) == 2  # groups of four
    with path.open("a") as file:
        file.write('{"step": 1, "row')  # a line that a kill cut short
    run, _ = build(config, launch)
    run.step = 2
    assert dump(launch, run) is not None
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0] * 5 + [1] * 5
    run.close()


def test_a_cell_that_trains_its_base_is_cancelled_and_goes_on(tmp_path: Path) -> None:
    config = small_config("method=bf16", "task.n=4", "base.target_accuracy=0.02", "trainer.steps=1")
    launch, polls = Launch(results=str(tmp_path), sweep="test"), itertools.count(1)
    with pytest.raises(Cancelled):
        run_cell(config, launch, should_stop=lambda: next(polls) == 7)
    (state,) = (tmp_path / "work" / "bases").glob("*.pt")
    assert load_state(state)["step"] == 7
    assert not list(tmp_path.glob("runs/**/*.json"))
    assert run_cell(config, launch).status == "ok"
    assert not state.exists()


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
    stages = {"generate", "reward", "sleep", "sync", "old_logp", "update", "eval", "other", "total"}
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


@pytest.mark.parametrize(("scale", "reason"), [
    ("1e30", "RuntimeError: nothing was trained: gradients overflowed in each of the 4 steps, at loss scales of 1e+30 "
     "to 1.25e+29; give a smaller trainer.loss_scale, or more steps: each overflow halves it"),
    ("65536", None),
])  # fmt: skip
def test_a_run_whose_every_update_overflows_has_failed(scale: str, reason: str | None, tmp_path: Path) -> None:
    result = run_cell(small_config("method=fp16", f"trainer.loss_scale={scale}"), small_launch(tmp_path))
    assert (result.status, result.reason) == ("ok" if reason is None else "failed", reason)
    assert (result.num_steps, failure_class(result)) == (4, None)


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


def test_a_results_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    launch = replace(small_launch(tmp_path), results=str(tmp_path / "file"))
    with pytest.raises(ValueError, match=rf"^results={launch.results}: cannot be written: Not a directory$"):
        run_cell(small_config("method=bf16"), launch)


def unclosable(closed: list[str], error: Exception | None = None) -> Stages:
    """Stages of a run whose sampler cannot be closed; training ends in `error`, where there is one."""

    def build_it(
        config: RunConfig, launch: Launch, should_stop: Callable[[], bool]
    ) -> tuple[Run, dict[str, str | None]]:
        run, hashes = build(config, launch, should_stop)

        def fail() -> None:
            closed.append("sampler")
            raise RuntimeError("the engine does not answer")

        run.engine.close = fail  # type: ignore[method-assign]
        run.reference.close = lambda: closed.append("reference")  # type: ignore[method-assign]
        return run, hashes

    def train_it(run: Run, after_step: Any) -> None:
        if error is not None:
            raise error
        train(run, after_step)

    return Stages(build=build_it, train=train_it)


def test_a_run_that_cannot_be_closed_keeps_its_record_and_its_first_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, launch, closed = small_config("method=bf16"), small_launch(tmp_path), list[str]()
    note = "the run could not be closed: RuntimeError: the engine does not answer"
    full = torch.OutOfMemoryError("CUDA out of memory")
    result = run_cell(config, launch, stages=unclosable(closed, full))
    assert (result.status, result.reason) == ("failed", "OutOfMemoryError: CUDA out of memory")
    assert failure_class(result) == MEMORY and "in train_it" in (result.error or "")
    assert result.retries == [note] and capsys.readouterr().err == f"{note}\n"
    assert closed == ["sampler", "reference"]
    with pytest.raises(Cancelled):
        run_cell(config, launch, should_stop=lambda: True, stages=unclosable(closed))
    assert run_cell(config, launch, stages=unclosable(closed)).status == "ok"
    stored = read_result(tmp_path / "runs" / "test" / f"{run_id(config)}.json")
    assert (stored.status, stored.num_steps, stored.retries) == ("ok", 4, [note])


def test_a_state_of_another_cell_is_set_aside_although_its_run_cannot_be_closed(tmp_path: Path) -> None:
    config, launch = small_config("method=bf16"), small_launch(tmp_path)
    work = work_folder(launch, run_id(config))
    work.mkdir(parents=True)
    save_state(work / "state.pt", {"run_id": "another"})
    result = run_cell(config, launch, stages=unclosable([]))
    assert (result.status, result.num_steps) == ("ok", 4) and (work / "state.pt.corrupt").exists()
    assert "the state of another cell" in result.retries[0]
    assert [note.split(":")[0] for note in result.retries[1:]] == ["the run could not be closed"] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_here_is_a_record_too(tmp_path: Path) -> None:
    result = run_cell(small_config("method=bf16", "trainer.device=cuda"), small_launch(tmp_path))
    assert (result.status, result.memory_gib) == ("failed", {})
    assert result.reason is not None and "no CUDA device is visible" in result.reason


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
