"""CUDA cells spread over the GPUs that are visible; processes are stand-ins that sleep."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.config.schema import Launch
from harness.start.prepare import base_folder
from harness.sweep.launchers import local
from harness.sweep.launchers.job import Job
from tests.sweep.launchers.stand_in import LEAVE_RECORD, jobs_of, made, play
from tests.toy import small_config


def test_each_cell_takes_the_gpu_with_the_fewest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    taken: list[list[str]] = []

    def spawn(cell: Path, log: int, threads: int, gpus: list[str], module: str) -> subprocess.Popen[bytes]:
        taken.append(gpus)
        return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])

    monkeypatch.setattr(local, "start_cell", spawn)
    config = small_config()
    on_gpu = replace(config, trainer=replace(config.trainer, device="cuda"))
    cells = [replace(on_gpu, base_seed=seed) for seed in range(7)] + [replace(config, base_seed=9)]
    events = local.run_cells([Job(config=cell, launch=Launch(results=str(tmp_path))) for cell in cells], workers=8)
    started = [next(events) for _ in cells]
    events.close()
    assert [event.kind for event in started] == ["started"] * 8
    assert taken == [["0"], ["1"], ["2"], ["0"], ["1"], ["2"], ["0"], []]


@pytest.mark.parametrize("is_there", [False, True])
def test_while_a_cell_trains_its_base_cells_of_other_bases_go_first(
    is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = zip(jobs_of(tmp_path, 3), (0, 0, 1), strict=True)
    jobs = [replace(job, config=replace(job.config, base_seed=base)) for job, base in cells]
    if is_there:
        folder = base_folder(jobs[0].config, jobs[0].launch)
        assert folder is not None
        folder.mkdir(parents=True)
    for job in jobs:
        made(job)
    play(monkeypatch, LEAVE_RECORD)
    told = [(event.kind, event.config.seed) for event in local.run_cells(jobs, workers=2) if event.kind != "progress"]
    first, *others = (0, 1, 2) if is_there else (0, 2, 1)
    assert [seed for kind, seed in told if kind == "started"] == [first, *others]
    assert told[:2] == [("started", first), ("started", others[0])]
    assert is_there or told.index(("started", 1)) > told.index(("finished", 0))


def test_vllm_engines_share_a_gpu_only_while_their_memory_fits() -> None:
    config = small_config()
    vllm = replace(config, engine=replace(config.engine, name="vllm", gpu_memory=0.4))
    assert (local.vllm_share(vllm), local.vllm_share(config)) == (0.4, 0.0)
    assert local.gpus_for(1, 0.4, [], ["0", "1"]) == ["0"]
    assert local.gpus_for(1, 0.4, [("0", 0.4)], ["0", "1"]) == ["1"]
    assert local.gpus_for(1, 0.4, [("0", 0.4), ("1", 0.4), ("1", 0.4)], ["0", "1"]) == ["0"]
    assert local.gpus_for(1, 0.4, [("0", 0.4), ("0", 0.4), ("1", 0.4), ("1", 0.4)], ["0", "1"]) == []
    assert local.gpus_for(1, 0.0, [("0", 0.4), ("0", 0.4)], ["0"]) == ["0"]
    assert local.gpus_for(1, 1.2, [], ["0"]) == ["0"]


def test_a_cell_of_several_gpus_takes_those_with_room() -> None:
    gpus = ["5", "2", "7", "0"]
    assert local.gpus_for(2, 0.4, [], gpus) == ["5", "2"]
    assert local.gpus_for(2, 0.4, [(["5", "2"], 0.4)], gpus) == ["7", "0"]
    assert local.gpus_for(2, 0.4, [(["5", "2"], 0.4), (["7"], 0.4)], gpus) == ["5", "0"]
    assert local.gpus_for(2, 0.4, [(["5", "2"], 0.4), (["5", "2"], 0.4)], ["5", "2", "7"]) == []


def test_a_cell_on_a_cluster_is_given_no_gpu() -> None:
    config = small_config()
    on_gpu = replace(config, trainer=replace(config.trainer, device="cuda"))
    assert local.is_placed(Job(config=on_gpu, launch=Launch()))
    assert not local.is_placed(Job(config=on_gpu, launch=Launch(ray_address="auto")))
    assert not local.is_placed(Job(config=config, launch=Launch()))
