"""Memory and time that a dry run predicts for Hugging Face folders, for this machine's GPU or a named one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.cli.main import main
from harness.config.decoder_config import decoder_config
from harness.config.load import load, run_id
from harness.config.resolve import resolve
from harness.config.schema import Launch, RunConfig
from harness.models.checkpoint import content_hash, save_decoder
from harness.models.decoder import Decoder, DecoderConfig
from harness.models.tokenizer import save_tokenizer
from harness.records.run_result import RunResult
from harness.run.record import record
from harness.start.prepare import base_folder
from harness.sweep import plan, preview
from harness.sweep.folder_time import HERE, Machine, folder_time
from harness.sweep.forecast import UNKNOWN, CostModel, Level, PastError, TimeForecast, fit
from harness.sweep.preview import (
    arm_tables,
    base_lines,
    dry_run,
    folder_lines,
    forecast_lines,
    forecast_of,
    memory_line,
    time_limit,
)
from tests.source_tree import ROOT
from tests.sweep.test_folder_time import PARAMETERS, config_folder, config_of
from tests.sweep.tiny import sweep_of
from tests.toy import small_config

DATA = ROOT / "tests" / "tasks" / "data" / "gsm8k"
GIB = 2**30
H100 = Machine(gpu="h100", memory_gib=80.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return config_folder(tmp_path_factory.mktemp("models"))


def test_memory_of_7b_by_hand(folder: Path) -> None:
    """16 bytes a parameter for the trainer, 2 for the engine, 57344 for the cache of a token."""
    state, held, cache = 16 * PARAMETERS / GIB, 2 * PARAMETERS / GIB, 1280 * 57344 / GIB
    line = memory_line(config_of(folder), Machine(gpus=4, gpu="h100", memory_gib=80.0))
    assert line.startswith(
        f"memory: hf (7.62 billion parameters) at bf16: trainer {state:.1f} GiB of masters, gradients and moments over "
        f"4 GPUs; engine {held:.1f} GiB, and {cache:.3f} GiB of cache for a response of 1280 tokens with its prompt"
    )
    assert f"; leaves {80 - state / 4 - held - cache:.1f} of 80 GiB a GPU for activations" in line
    lent = memory_line(config_of(folder, "engine.sleep=true"), Machine(gpus=4, gpu="h100", memory_gib=80.0))
    assert f"; leaves {80 - state / 4:.1f} of 80 GiB a GPU" in lent  # the engine's memory is lent to the trainer
    shared = memory_line(config_of(folder), Machine(gpus=4, gpu="h100", memory_gib=80.0, engine_gpus=2))
    assert f"; engine {held:.1f} GiB over 2, and" in shared
    assert f"; leaves {80 - state / 4 - (held + cache) / 2:.1f} of 80 GiB a GPU for activations" in shared
    asleep = memory_line(config_of(folder, "trainer=verl"), Machine(gpus=4, gpu="h100", memory_gib=80.0))
    assert f"; leaves {80 - state / 4:.1f} of 80 GiB a GPU" in asleep  # under verl always
    alone = memory_line(config_of(folder), H100)
    assert alone.endswith(
        f"; does not fit 80 GiB a GPU, {state + held + cache - 80:.1f} GiB too much before any activation"
    )
    assert "over 1 GPU;" in alone


def test_a_frozen_base_keeps_no_moments_and_low_bits_weigh_less(folder: Path) -> None:
    frozen = memory_line(config_of(folder, "method=bf16_lora", "knobs.LoRA.lr_scale=1"), H100)
    assert f"trainer {4 * PARAMETERS / GIB:.1f} GiB of frozen base, at most" in frozen
    low = memory_line(config_of(folder, "method=naive", "precision=int4"), H100)
    engine = float(low.partition("engine ")[2].partition(" GiB")[0])
    assert 0.25 * 2 * PARAMETERS / GIB < engine < 0.4 * 2 * PARAMETERS / GIB  # embedding and head stay in 16 bits


def test_without_a_gpu_nothing_is_said_of_what_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert memory_line(config_of(folder), HERE).endswith("for a response of 1280 tokens with its prompt")


def test_a_forecast_is_of_folders_alone_and_has_its_range(folder: Path, tmp_path: Path) -> None:
    assert forecast_of(small_config(), tmp_path, HERE) == {}
    assert folder_lines([small_config()], HERE) == []
    config = config_of(folder)
    found = forecast_of(config, tmp_path, H100)["forecast"]
    step, once = folder_time(config, gpu="h100")
    assert found["seconds"] == round(50 * step + once)
    assert (found["low"], found["high"]) == (
        pytest.approx(UNKNOWN.low * found["seconds"], abs=2), pytest.approx(UNKNOWN.high * found["seconds"], abs=2),
    )  # fmt: skip
    assert found["rests_on"] == "models known by their config.json alone"
    assert found["notes"][-1] == (
        "assumed: 1 x H100, 40% of its peak operations and 60% of its bandwidth, prompts of 256 tokens, every response "
        "as long as it may be: an upper bound"
    )
    assert found["notes"][0] == memory_line(config, H100)
    slower = forecast_of(config, tmp_path, Machine(gpu="a100"))["forecast"]["seconds"]
    faster = forecast_of(config, tmp_path, Machine(gpus=8, gpu="b200"))["forecast"]["seconds"]
    assert faster < found["seconds"] / 8 < found["seconds"] < slower


def test_a_time_limit_predicts_for_all_gpus_of_a_cell(folder: Path, tmp_path: Path) -> None:
    cell, machine = config_of(folder), Machine(gpus=8, gpu="h100")
    limit = time_limit([cell], tmp_path, 1.0, machine)
    assert limit is not None
    assert round(limit.predict(cell)) == forecast_of(cell, tmp_path, machine)["forecast"]["seconds"]
    assert limit.predict(cell) < fit([]).estimate(cell, machine=H100).seconds / 6


def test_a_line_for_every_size_and_format_of_a_sweep(folder: Path) -> None:
    cells = [config_of(folder, f"seed={seed}", *words) for seed in (0, 1)
             for words in ((), ("method=naive", "precision=int4"), ("method=flashrl", "precision=int4"))]  # fmt: skip
    lines = folder_lines([*cells, small_config()], H100)
    assert [line.split(" at ")[1].split(":")[0] for line in lines[:-2]] == ["bf16", "int4"]
    assert lines[-2] == f"missing: the weights of {folder}; a plan needs none, a run does"
    assert lines[-1].startswith("assumed: 1 x H100, ")


@pytest.fixture
def toy(tmp_path: Path) -> list[str]:
    """Words of a run on a folder that is whole, but tiny."""
    config = DecoderConfig(
        vocab_size=128, num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96,
        qk_norm=False, attention_bias=True, max_positions=2048, eos_id=1, pad_id=0, bos_id=2,
    )  # fmt: skip
    save_decoder(Decoder(config), tmp_path / "toy")
    save_tokenizer(tmp_path / "toy", 128)
    return ["model=hf", f"model.path={tmp_path / 'toy'}", "task=gsm8k", f"task.path={DATA}",
            "task.options.num_workers=1", "task.num_eval=3", "trainer.steps=3"]  # fmt: skip


def test_a_knob_that_follows_the_models_size_must_be_given(
    toy: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", *toy, "method=bf16_lora", "--dry-run", "--results", str(tmp_path / "results")]
    assert main(words) == 2
    name = "knobs.LoRA.lr_scale"
    said = capsys.readouterr().err
    assert said == f"lowbit: error: {name}=10.0 suits the models made here; give {name} for yours\n"
    assert main([*words, f"{name}=5"]) == 0


def test_a_dry_run_of_one_cell_is_json_with_its_forecast(
    toy: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    assert main(["run", *toy, "--dry-run", "--memory", "80", "--results", str(results)]) == 0
    shown = json.loads(capsys.readouterr().out)
    config = resolve(load(toy), lambda path: "0")
    step, once = folder_time(config)
    assert shown["forecast"]["seconds"] == round(3 * step + once)
    assert "of 80 GiB a GPU for activations" in shown["forecast"]["notes"][0]
    assert "assumed: 1 x cpu" in shown["forecast"]["notes"][-1]
    assert main(["run", "method=bf16", "--dry-run", "--results", str(results)]) == 0
    assert "forecast" not in json.loads(capsys.readouterr().out)  # a model made here
    for option in (["--gpu", "h100"], ["--memory", "80"]):  # which no forecast would rest on
        assert main(["run", "trainer.device=cuda", "--dry-run", *option, "--results", str(results)]) == 2
        assert "models made here are predicted from finished runs, whatever the GPU" in capsys.readouterr().err
    assert not results.exists()


def test_a_model_folders_forecast_learns_from_runs_of_folders_alone(
    toy: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fit to all committed runs, of models made here, takes seconds and says nothing of a folder."""
    samples, fitted = [SimpleNamespace(config={"model": {"path": path}}) for path in (None, "folder")], list[Any]()

    def learnt(given: list[Any]) -> CostModel:
        fitted.extend(given)
        return fit([])

    monkeypatch.setattr(preview, "read_samples", lambda results: samples)
    monkeypatch.setattr(preview, "fit", learnt)
    found = forecast_of(resolve(load(toy), lambda path: "0"), tmp_path, HERE)
    assert fitted == samples[1:] and found["forecast"]["seconds"] > 0


def test_a_dry_run_of_a_sweep_tells_memory_and_what_it_assumes(
    toy: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["sweep", "smoke", *toy, "--dry-run", "--memory", "0.0001", "--results", str(tmp_path / "r")]
    assert main(line) == 0
    said = capsys.readouterr().out
    assert said.count(" million parameters) at ") >= 1 and "(0.00 " not in said
    assert "does not fit 0.0001 GiB a GPU" in said and "assumed: 1 x cpu" in said
    assert main([*line, "--gpu", "h100"]) == 2
    assert "gpu=h100: the trainer is on the CPU (trainer.device=cpu); add trainer." in capsys.readouterr().err


def hours_of(cells: Sequence[RunConfig], level: Level, workers: int, machine: Machine) -> list[str]:
    """Lines about cells of an hour each."""
    hour = TimeForecast(seconds=3600.0, low=1800.0, high=7200.0, level=level)
    return forecast_lines(cells, [hour] * len(cells), fit([]), workers, machine)


@pytest.mark.parametrize("workers", [1, 4, 64])
def test_a_model_known_by_its_config_has_its_gpus_to_itself(
    folder: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six cells of an hour and of eight GPUs: 48 hours, whatever the workers, one at a time on eight GPUs."""
    cells = [config_of(folder, f"seed={seed}") for seed in range(6)]
    less = ", 4 were asked for" if workers == 4 else ", 6 were asked for" if workers == 64 else ""
    for visible, count in ((0, "8 assumed, as many as a cell needs"), (8, "8 here"), (15, "15 here")):
        monkeypatch.setattr(preview, "visible_gpus", lambda visible=visible: ["0"] * visible)
        monkeypatch.setattr("os.cpu_count", lambda: 128)
        assert hours_of(cells, "folder", workers, Machine(gpus=8)) == [
            f"time: about 6.0 h (3.0 h to 12 h), 1 at a time{less}",
            "cost: 48 (24 to 96) GPU-hours of 8 GPUs",
            f"GPUs: {count}; cells share one as far as engine.gpu_memory allows, models known by their config.json "
            "alone have theirs to themselves; a GPU costs while it has a cell",
            "forecast: 6 cells (models known by their config.json alone): a guess, for no such cell has finished; "
            "taken as right within a factor of 3",
        ]
    lines = hours_of(cells, "folder", workers, Machine(gpus=8, is_cluster=True))
    at_once = min(workers, 6)
    assert lines[0].endswith(f"{at_once} at a time") and lines[2].startswith("GPUs: those of a cluster; ")
    assert lines[1] == f"cost: 48 (24 to 96) GPU-hours of {8 * at_once} GPUs"


def test_small_cells_share_a_gpu_as_the_launcher_lets_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two halves of a GPU at a time; two hours of cells in one hour cost one."""
    monkeypatch.setattr(preview, "visible_gpus", lambda: ["0"])
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    cells = [config_of(folder, f"seed={seed}", "engine.gpu_memory=0.4") for seed in range(6)]
    half = "3.0 h (1.5 h to 6.0 h), 2 at a time"
    for workers, hours, said in (
        (1, 6, "6.0 h (3.0 h to 12 h), 1 at a time"), (2, 3, half), (64, 3, f"{half}, 6 were asked for"),
    ):  # fmt: skip
        lines = hours_of(cells, "like", workers, HERE)
        assert lines[0] == f"time: about {said}"
        assert lines[1] == f"cost: {hours} ({hours / 2:.2g} to {2 * hours}) GPU-hours of 1 GPU"
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert hours_of(cells, "like", 2, HERE)[0].endswith("1 at a time, 2 were asked for: there is 1 core")


def test_cells_on_a_cpu_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    lines = hours_of([small_config(f"seed={seed}") for seed in range(8)], "new", 64, HERE)
    assert lines[:2] == [
        "time: about 2.0 h (60 min to 4.0 h), 4 at a time, 8 were asked for: there are 4 cores",
        "cost: 8 (4 to 16) CPU core-hours",
    ]


def test_past_errors_are_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    error = PastError(median=0.14, p90=0.6, low=0.7, high=1.6, count=120)
    model = replace(fit([]), errors={"new": error})
    hour = TimeForecast(seconds=3600.0, low=1800.0, high=7200.0, level="new")
    assert forecast_lines([small_config()], [hour], model, 1)[-1] == (
        "forecast: 1 cell (new sizes, lengths or machines): past predictions of such cells were off by 14 % in the "
        "median, 60 % at the 90th percentile (120 cells)"
    )


def test_cells_are_counted_by_arm_and_by_setting() -> None:
    arms = (("method=bf16", "precision=bf16"), ("method=naive", "precision=int8"))
    cells = [small_config(*arm, f"task.n={n}", f"seed={seed}") for n in (4, 6) for arm in arms for seed in (0, 1)]
    known = TimeForecast(seconds=30.0, low=15.0, high=60.0, level="like")
    waiting = {run_id(cells[i]): replace(known, level=level) for i, level in ((0, "like"), (1, "like"), (7, "new"))}
    assert [line.split() for line in arm_tables(cells, waiting).splitlines() if line and "─" not in line] == [
        ["arm", "cells", "finished", "to", "run", "time,", "one", "by", "one"],
        ["bf16", "bf16", "4", "2", "2", "60", "s"],
        ["naive", "int8", "4", "3", "1", "30", "s?"],
        ["setting", "cells", "finished", "to", "run", "time,", "one", "by", "one"],
        ["n=4", "4", "2", "2", "60", "s"],
        ["n=6", "4", "3", "1", "30", "s?"],
    ]
    assert "setting" not in arm_tables(cells[:4], waiting)


def test_the_time_of_missing_bases_is_that_of_bases_which_differ_in_the_seed_alone(tmp_path: Path) -> None:
    launch = Launch(results=str(tmp_path), sweep="one")
    words = ["model=words_10m", "task=wordmath", "task.n=4", "trainer.device=cuda"]
    cells = [resolve(load([*words, "base=text_first", f"base_seed={seed}"])) for seed in (77, 78)]
    other, on_cpu = (resolve(load([*words, *more])) for more in (["base=text"], ["base=text_first", "base_seed=79",
                                                                               "trainer.device=cpu"]))  # fmt: skip
    every = [*cells, other, on_cpu]
    first, second, third, fourth = (folder.name for cell in every if (folder := base_folder(cell, launch)) is not None)
    untold = "bases to train first (their time is not predicted): "
    assert base_lines(every, every, {}, launch) == [f"{untold}{first}, {second}, {third}, {fourth}"]
    for base in (ROOT / "results" / "bases").glob("words_10m-wordmath*-b[025]-*"):  # of 4, 10 and 30 operations
        (tmp_path / "bases" / base.name).mkdir(parents=True)
        shutil.copy(base / "recipe.json", tmp_path / "bases" / base.name)
    (tmp_path / "bases" / "mine").mkdir()  # no base
    assert len(list((tmp_path / "bases").iterdir())) > 6
    assert base_lines(every, every, {}, launch) == [  # they took 38, 64.5 and 91 s
        f"bases to train first (about 64 s each, the median of 3 of the same recipe; no forecast counts it): {first}, "
        f"{second}",
        f"{untold}{third}, {fourth}",
    ]


def test_a_base_that_is_gone_or_was_made_anew_is_told_before_cells_run(tmp_path: Path) -> None:
    launch = Launch(results=str(tmp_path), sweep="one")
    cells = [
        resolve(load(["model=xs", "task=sort", "task.n=4", "trainer.device=cuda", f"seed={seed}"])) for seed in (0, 1)
    ]
    folder = base_folder(cells[0], launch)
    assert folder is not None and folder == base_folder(cells[1], launch)
    train = f"bases to train first (their time is not predicted): {folder.name}"
    assert base_lines(cells, cells, {}, launch) == [train]  # nothing rests on it yet
    done = record(cells[0], launch, None, {}, "ok", None, None)

    def known(digest: str) -> dict[str, RunResult]:
        return {run_id(cells[0]): done.model_copy(update={"hashes": {"model": digest}})}

    first, second = base_lines(cells[1:], cells, known("0" * 64), launch)
    assert first == train and second.startswith(f"note: 1 finished cell started from {folder.name}, which is gone. ")
    on_cpu = [replace(cell, trainer=replace(cell.trainer, device="cpu")) for cell in cells]
    on_one = {run_id(on_cpu[0]): known("0" * 64)[run_id(cells[0])]}
    assert base_lines(on_cpu[1:], on_cpu, on_one, launch) == [train]  # there the same weights come again
    torch.manual_seed(0)
    save_decoder(Decoder(decoder_config(small_config().model)), folder)
    digest = content_hash(folder)
    (folder / "recipe.json").write_text(json.dumps({"content_hash": digest}))
    assert base_lines(cells[1:], cells, known(digest), launch) == []
    (line,) = base_lines(cells[1:], cells, known("0" * 64), launch)
    assert line.startswith(f"note: 1 finished cell started from other weights of {folder.name} than are there now")
    assert base_lines([], cells, known("0" * 64), launch) == []


def test_the_listing_tells_arms_of_other_parts_or_another_setting_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = {"method": "flashrl", "precision": "int8"}
    sweep = sweep_of(plain, plain | {"parts": "[flashrl.Profile]"}, {"method": "bf16"}, **{"model.spread": [0, 0.5]})
    planned = plan(sweep)
    assert dry_run(planned, planned.cells, tmp_path, 1, is_listed=True) == 0
    assert [line.split(maxsplit=3)[3] for line in capsys.readouterr().out.splitlines() if "-b0-s0" in line] == [
        "flashrl-int8-xs-chain8-b0-s0  sigma=0",
        "flashrl-int8-xs-chain8-b0-s0  flashrl.Profile sigma=0",
        "bf16-bf16-xs-chain8-b0-s0  sigma=0",
        "flashrl-int8-xs-chain8-b0-s0  sigma=0.5",
        "flashrl-int8-xs-chain8-b0-s0  flashrl.Profile sigma=0.5",
        "bf16-bf16-xs-chain8-b0-s0  sigma=0.5",
    ]
