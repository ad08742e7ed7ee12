"""The command line: requests to end, overrides and options, sweeps, and commands that print what they promise."""

from __future__ import annotations

import errno
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import pytest

from harness.cli import main as cli
from harness.cli.run import resolved
from harness.published.recipes.twin import write_model, write_questions
from harness.records.packed import pack
from harness.records.run_result import read_results, write_result
from harness.run.cell import run_cell
from harness.sweep.launchers.deaths import REQUESTED
from harness.sweep.launchers.job import Admit, Event, Job
from tests.sweep.stand_in import Seen, launcher, result_of
from tests.toy import small_config, small_launch


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_end_is_heard_where_a_background_job_ignores_it(number: int) -> None:
    program = (
        "import signal, sys; from harness.cli import main as cli; "
        f"cli.parse = lambda words: signal.raise_signal({int(number)}); sys.argv = ['lowbit', 'methods']; "
        "sys.exit(cli.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False,
        preexec_fn=lambda: signal.signal(number, signal.SIG_IGN),
    )  # fmt: skip
    assert (done.returncode, done.stderr.strip()) == (130, "lowbit: interrupted")


def test_ctrl_c_after_the_end_of_a_command_is_not_told() -> None:
    program = (
        "import atexit, signal, sys; from harness.cli import main as cli; "
        "atexit.register(signal.raise_signal, signal.SIGINT); sys.argv = ['lowbit', 'metrics']; sys.exit(cli.main())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_overrides_may_follow_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "method=bf16", "--results", str(tmp_path), "--dry-run", "trainer.steps=7", "seed=3"]
    assert cli.main(words) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert (config["trainer"]["steps"], config["seed"]) == (7, 3)
    assert cli.main([*words, "--colour"]) == 2
    assert capsys.readouterr().err == "lowbit: error: run: unknown arguments --colour; see lowbit run --help\n"


@pytest.mark.parametrize(
    ("words", "name", "found"),
    [
        ("base smoke --minutes 1 task.n=4", "sweeps", ["smoke", "task.n=4"]),
        ("base --minutes 1 smoke quick", "sweeps", ["smoke", "quick"]),
        ("site smoke --results here quick", "sweeps", ["smoke", "quick"]),
        ("figures smoke --results here quick", "names", ["smoke", "quick"]),
    ],
)
def test_words_of_a_list_may_follow_options(words: str, name: str, found: list[str]) -> None:
    assert getattr(cli.parse(words.split()), name) == found
    with pytest.raises(ValueError, match="unknown arguments --colour; see lowbit"):
        cli.parse([*words.split(), "--colour"])
    with pytest.raises(ValueError, match="runs: unknown arguments quick; see lowbit runs --help"):
        cli.parse(["runs", "smoke", "--results", "here", "quick"])


SWEEP = """
question: Does it?
overrides: [model=xs, task=chain, model.spread=0, trainer.steps=10]
axes: {task.n: [8, 9]}
arms:
  - {method: bf16}
  - {method: flashrl, precision: int4, algo.mode: [decoupled, bypass_ppo]}
exclude: [{task.n: 9, algo.mode: decoupled, method: flashrl}]
include: [{method: naive, precision: int8, task.n: 10}]
seeds: [0, 1]
"""


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """A sweep of 8 cells, 4 impossible ones and an excluded arm, in a results folder of its own."""
    (tmp_path / "tiny.yaml").write_text(SWEEP)
    return ["sweep", str(tmp_path / "tiny.yaml"), "--no-tracking", "--results", str(tmp_path / "results")]


def launch_by(run: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps of this process go through a stand-in of the launcher, count as of a clean tree, and present nothing."""
    monkeypatch.setattr("harness.sweep.launchers.local.run_cells", lambda jobs, workers, admit: run(jobs, admit=admit))
    monkeypatch.setattr("harness.cli.report.present", lambda sweep, results, is_tracked: 0)
    monkeypatch.setattr("harness.sweep.queue.commit", lambda: ("0" * 40, False))


def packed(results: Path, sweep: str = "tiny") -> Path:
    """A sweep, packed as if each of its cells had taken a step."""
    for record in read_results(results / "runs" / sweep):
        write_result(results / "runs" / sweep, record.model_copy(update={"num_steps": 1}), [{"train/loss": 0.0}])
    return pack(results, sweep)


def test_a_dry_run_tells_cells_what_is_left_out_and_the_cost(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*tiny, "--dry-run", "--workers", "2", "--list"]) == 0
    out = capsys.readouterr().out
    assert sum(" s?  " in line for line in out.splitlines()) == 8
    assert out.count("\nskipped  task.n=") == 2 and "would count it twice" in out
    assert "excluded task.n=9 method=flashrl precision=int4 algo.mode=decoupled: task.n=9" in out
    assert "tiny: 8 of 8 cells to run, 4 skipped as impossible, 1 arm excluded" in out
    assert (
        "\n?: no run of the same arm has finished; the time is predicted from other cells, or from sizes alone" in out
    )
    bases, time, cost, error = out.splitlines()[-4:]
    assert re.fullmatch(
        r"bases to train first \([^)]+\): xs-chain8-b0-[0-9a-f]{12}(, xs-chain\d+-b\d-[0-9a-f]{12}){5}", bases
    )
    assert re.fullmatch(r"time: about [\d.]+ s \([\d.]+ s to [\d.]+ (s|min)\), 2 at a time", time)
    assert cost.endswith("CPU core-hours")
    assert error.startswith(
        "forecast: 8 cells (new sizes, lengths or machines): a guess, for no such cell has finished; "
    )
    assert not (tmp_path / "results").exists()
    assert cli.main([*tiny, "--dry-run", "--workers", "2", "trainer.device=cuda"]) == 0
    assert "GPU-hours of 1 GPU" in capsys.readouterr().out


def test_a_time_limit_ends_well_and_says_what_is_left(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*tiny, "--max-hours", "1e-6"]) == 0
    assert capsys.readouterr().out.endswith("time limit: 8 of 8 cells are left; the same command goes on from here\n")
    for hours in ("0", "-1", "inf", "soon"):
        assert cli.main([*tiny, "--max-hours", hours]) == 2
        assert f"'{hours}': a number of hours above 0 is expected" in capsys.readouterr().err


def test_a_time_limit_is_given_once_and_above_zero(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (("--minutes", "0"), "argument --minutes: '0': minutes above 0 are expected"),
        (("--minutes", "nan"), "argument --minutes: 'nan': minutes above 0 are expected"),
        (("--minutes", "3", "--max-hours", "2"), "argument --max-hours: not allowed with argument --minutes"),
        (("--max-hours", "2", "--minutes", "3"), "argument --minutes: not allowed with argument --max-hours"),
    ):
        assert cli.main([*tiny, *words]) == 2
        assert capsys.readouterr().err == f"lowbit: error: sweep: {said}; see lowbit sweep --help\n"
    assert cli.main([*tiny, "--minutes", "1e-5"]) == 0
    assert "time limit: 8 of 8 cells are left" in capsys.readouterr().out


def test_cells_that_somebody_else_stops_are_named_and_the_sweep_has_not_ended_well(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(jobs: Sequence[Job], *, admit: Admit) -> Generator[Event, None, None]:
        for job in jobs:
            yield Event(kind="finished", config=job.config, result=result_of(job, ("cancelled", REQUESTED)))

    for module in ("harness.sweep.launchers.local", "harness.sweep.queue"):
        monkeypatch.setattr(f"{module}.run_cells", lambda jobs, workers, admit: run(jobs, admit=admit))
    assert cli.main([*tiny, "--where", "task.n=10"]) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("cancelled  ")]
    assert [line.partition(" (")[0] for line in said] == [f"cancelled  naive-int8-xs-chain10-b{i}-s{i}" for i in (0, 1)]
    assert all(line.endswith("): stopped on request; run the sweep again to go on") for line in said)
    assert not (tmp_path / "results" / "tables").exists()
    assert cli.main(["run", "model=xs", "trainer.steps=1", *tiny[3:]]) == 1
    assert "\nresult: " not in capsys.readouterr().out


def test_a_sweep_runs_what_is_missing_and_names_files_that_are_not_its_own(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen()
    run = launcher(seen, ending=lambda job: ("failed", "ValueError: x") if job.config.task.n == 10 else ("ok", None))
    launch_by(run, monkeypatch)
    assert cli.main(tiny) == 1
    out, err = capsys.readouterr()
    assert "8 of 8 cells to run" in out and "[8/8]" in out
    assert err.count("failed  naive-int8") == 2
    assert len(seen.starts) == 8
    assert cli.main(tiny) == 1
    assert "2 of 8 cells to run" in capsys.readouterr().out
    assert len(seen.starts) == 10
    other = tmp_path / "other.yaml"
    other.write_text(SWEEP)
    assert cli.main(["sweep", str(other), *tiny[2:], "--dry-run", "--list"]) == 0
    out = capsys.readouterr().out
    assert "other: 2 of 8 cells to run, 6 taken over from other sweeps" in out and out.count("elsewhere  ") == 6
    assert cli.main([*tiny, "--again"]) == 1
    out = capsys.readouterr().out
    assert "8 of 8 cells to run" in out and len(seen.starts) == 18
    (aside,) = (tmp_path / "results" / "replaced" / "tiny").iterdir()
    assert f"tiny: what was there before is in {aside}" in out and len(list(aside.glob("*.json"))) == 8
    assert cli.main([*tiny, "--again", "--minutes", "1e-5"]) == 2
    assert "again: the time limit is too short for any cell (the shortest is predicted" in capsys.readouterr().err
    assert [*aside.parent.iterdir()] == [aside] and len(seen.starts) == 18
    assert cli.main([*tiny, "launch.save=hf"]) == 1
    assert "note: 6 finished cells kept no policy; --again trains every cell anew" in capsys.readouterr().out
    starts = len(seen.starts)
    folder = tmp_path / "results" / "runs" / "tiny"
    (folder / "notes.json").write_text("mine")
    (folder / f"{seen.starts[0][0].config.seed}.json").write_text("{}")
    for words in ([], ["--dry-run"]):
        assert cli.main([*tiny, *words]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "notes.json" in err and "0.json" in err and "left alone" in err
    assert (folder / "notes.json").read_text() == "mine"
    assert len(seen.starts) == starts


def test_cells_that_another_sweep_has_finished_are_taken_over_on_a_machine_that_could_not_run_them(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch_by(launcher(Seen()), monkeypatch)
    assert cli.main(tiny) == 0

    def refuse(config: object, launch: object) -> None:
        raise ValueError("no CUDA device")

    monkeypatch.setattr("harness.run.checks.check_place", refuse)
    other = tmp_path / "other.yaml"
    other.write_text(SWEEP)
    assert cli.main(["sweep", str(other), *tiny[2:]]) == 0
    assert "0 of 8 cells to run, 8 taken over from other sweeps" in capsys.readouterr().out
    assert [run.status for run in read_results(tmp_path / "results" / "runs" / "other")].count("ok") == 8
    assert cli.main(["sweep", str(other), *tiny[2:], "--again"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_cells_of_a_packed_sweep_are_taken_over(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results"
    launch_by(launcher(Seen()), monkeypatch)
    assert cli.main(tiny) == 0
    packed(results)
    shutil.rmtree(results / "runs" / "tiny")
    other = tmp_path / "other.yaml"
    other.write_text(SWEEP)
    words = ["sweep", str(other), *tiny[2:]]
    assert cli.main([*words, "--dry-run"]) == 0
    assert "other: 0 of 8 cells to run, 8 taken over from other sweeps" in capsys.readouterr().out
    assert not (results / "runs" / "tiny").exists(), "a dry run unpacks nothing"
    assert cli.main(words) == 0
    assert "0 of 8 cells to run, 8 taken over from other sweeps" in capsys.readouterr().out
    assert len([*(results / "runs" / "other").glob("*.parquet")]) == 8


def test_a_run_hides_no_packed_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = launcher(Seen())
    monkeypatch.setattr("harness.sweep.queue.run_cells", lambda jobs, workers, admit: run(jobs, admit=admit))
    results = tmp_path / "results"
    words = ["run", "model=xs", "trainer.steps=2", "--results", str(results)]
    assert cli.main(words) == 0
    assert re.match(r"bases to train first \([^)]+\): xs-sort8-b0-[0-9a-f]{12}\n", capsys.readouterr().out)
    packed(results, "runs")
    shutil.rmtree(results / "runs")
    assert cli.main([*words, "seed=1"]) == 0
    assert len(read_results(results / "runs" / "runs")) == 2
    capsys.readouterr()
    assert cli.main(words) == 0
    assert capsys.readouterr().out.startswith("finished before (--again runs it once more): ok  ")


def test_a_dry_run_reads_a_packed_sweep_where_it_lies(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results"
    launch_by(launcher(Seen()), monkeypatch)
    assert cli.main([*tiny, "--where", "seed=0"]) == 0
    shutil.copytree(packed(results).parent, tmp_path / "packed" / "packed")
    capsys.readouterr()
    words = [*tiny[:-1], str(tmp_path / "packed"), "--dry-run"]
    assert cli.main(words) == 0
    assert "tiny: 4 of 8 cells to run" in capsys.readouterr().out
    with (tmp_path / "tiny.yaml").open("a") as file:
        file.write("until: {max_seeds: 3}\n")
    assert cli.main([*words, "--until-decided"]) == 0
    assert "next: 8 cells before a look" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "packed").iterdir()] == ["packed"]


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "results/figures/x.png")

    monkeypatch.setattr("harness.cli.report.report", full)
    assert cli.main(["report", "quick"]) == 2
    assert capsys.readouterr().err == "lowbit: error: results/figures/x.png: No space left on device\n"


def test_methods_lists_parts_and_knobs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["methods", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["flashrl"]["parts"]["TIS"]["cap"] == 2.0
    assert found["bf16"]["is_control"]
    assert found["k3_rs_tis"]["reconstructed"]


def test_metrics_translate_has_verl_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["metrics", "--translate"]) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("mismatch/kl_k3 "))
    assert "rollout_corr/k3_kl" in line


def test_dry_run_prints_the_resolved_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["run", "method=flashrl", "--dry-run", "--results", str(tmp_path)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["config"]["precision"]["name"] == "int8"
    assert shown["config"]["trainer"]["lr"] == 3e-4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["method=flashrl", "parts=[icepop.IcePop]"], ["parts: method flashrl runs without its own Profile, TIS"]),
        (["method=flashrl", "parts=[flashrl.Profile,flashrl.TIS,qurl.UAQ]"], []),
        (["method=naive", "parts=[flashrl.TIS]"], []),
        (["method=flashrl"], []),
    ],
)
def test_a_run_tells_which_parts_of_its_method_it_lacks(words: list[str], told: list[str], tmp_path: Path) -> None:
    assert resolved([*words, "precision=int8"], tmp_path, is_dry=True)[2] == told


def test_a_dry_run_of_a_folder_tells_no_shape_that_is_not_the_folders(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_model(tmp_path / "model", "qwen2", "qwen2.5")
    write_questions(tmp_path / "data", "gsm8k")
    words = (
        "model=hf",
        f"model.path={tmp_path / 'model'}",
        "task=gsm8k",
        f"task.path={tmp_path / 'data'}",
        "engine.max_new_tokens=64",
    )
    assert cli.main(["run", "method=bf16", *words, "--dry-run", "--results", str(tmp_path / "results")]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert set(config["model"]) == {"name", "spread", "rl_lr", "path", "content_hash"} and "base" not in config
    assert config["trainer"]["lr"] == 1e-6


@pytest.mark.parametrize(("split", "doing"), [("train_split", "train"), ("eval_split", "evaluate")])
def test_a_run_without_questions_is_refused_before_it_starts(
    split: str, doing: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_model(tmp_path / "model", "qwen2", "qwen2.5")
    write_questions(tmp_path / "data", "gsm8k")
    words = ["model=hf", f"model.path={tmp_path / 'model'}", "task=gsm8k", f"task.path={tmp_path / 'data'}"]
    results = tmp_path / "results"
    assert cli.main(["run", *words, f"task.options.{split}=none", "--results", str(results)]) == 2
    assert capsys.readouterr().err == (
        f"lowbit: error: task=gsm8k: no questions to {doing} on; give a task.path that has some and "
        f"task.options.{split}=NAME, or another task\n"
    )
    assert not (results / "runs").exists()


def test_passport_and_report_read_a_finished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_cell(small_config("method=flashrl", "precision=int8"), small_launch(tmp_path))
    assert cli.main(["passport", result.run_id[:6], "--results", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "model.layers.0.self_attn.q_proj.weight" in out
    assert "int8_channel" in out and "int8_token" in out
    assert re.search(r"^parts:    Profile .*, TIS cap=2.0", out, re.MULTILINE)
    assert cli.main(["report", "test", "--only", "tables", "--results", str(tmp_path)]) == 0
    assert (tmp_path / "tables" / "test.md").read_text().count("flashrl int8") >= 1
    assert cli.main(["results", "verify", "--results", str(tmp_path)]) == 0


def test_a_missing_gpu_is_one_line_and_planning_needs_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words = ["trainer.device=cuda", "task=chain", "model=xs", "--results", str(tmp_path)]
    assert cli.main(["run", *words]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "lowbit: error: trainer.device=cuda: no CUDA device is visible; valid: trainer.device=cpu"
    ]
    assert cli.main(["run", "--dry-run", *words]) == 0
    assert '"device": "cuda"' in capsys.readouterr().out
