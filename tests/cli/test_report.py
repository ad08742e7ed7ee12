"""`lowbit report`: what it writes for a sweep over lengths, and for one without."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cli.main import main
from harness.cli.report import present, report
from harness.records.packed import pack
from harness.records.run_result import write_result
from harness.records.sweep_file import keep_purpose
from harness.sweep import read_sweep
from tests import result_factory as factory

FULL = {"vocab_size": 32, "hidden_size": 64, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
        "intermediate_size": 192, "name": "s", "spread": 0.5, "rl_lr": 3e-4}  # fmt: skip


def sweep(results: Path, lengths: tuple[int, ...], engine: str = "embedded") -> None:
    for method, precision in (("bf16", "bf16"), ("naive", "int4")):
        for n in lengths:
            for seed in range(3):
                changes = {"task__n": n, "model": FULL, "engine": {"name": engine, "gpu_memory": 0.9}}
                result, rows = factory.result(method, precision, seed=seed, sweep="lengths", **changes)
                time = {"generate": 1e-3 * n * (1 if precision == "bf16" else 2), "update": 5.0}
                tokens = 256 * 80 * n / time["generate"]
                result = result.model_copy(update={"time_s": time, "tokens_per_s": {"rollout": tokens}})
                write_result(results / "runs" / "lengths", result, rows)


@pytest.mark.parametrize("engine", ["vllm", "embedded"])
@pytest.mark.parametrize("only", [None, "tables", "figures"])
def test_a_sweep_over_lengths_has_profiles_and_where_its_kernels_are_real_a_break_even(
    tmp_path: Path, only: str | None, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep(tmp_path, (8, 16), engine)
    assert report("lengths", tmp_path, only=only) == 0
    text, figures = tmp_path / "tables" / "lengths_break_even.md", tmp_path / "figures" / "lengths"
    assert (figures / "profiles.png").exists() == (only != "tables")
    assert (figures / "break_even.png").exists() == (only != "tables" and engine == "vllm")
    assert text.exists() == (only != "figures" and engine == "vllm")
    if only is None and engine == "vllm":
        assert "naive int4: " in text.read_text() and str(text) in capsys.readouterr().out


def test_a_sweep_whose_runs_all_failed_has_its_table_and_figures(tmp_path: Path) -> None:
    """Nothing was measured, so the mismatch has no logarithmic axis."""
    for method, precision in (("bf16", "bf16"), ("naive", "int4")):
        result, _ = factory.result(method, precision, status="failed", sweep="lost")
        nothing = {"evals": [], "num_steps": 0, "summary": {}, "passport": None, "reason": "no memory"}
        write_result(tmp_path / "runs" / "lost", result.model_copy(update=nothing), None)
    assert report("lost", tmp_path) == 0
    assert "1 failed" in (tmp_path / "tables" / "lost.csv").read_text()
    assert any((tmp_path / "figures" / "lost").glob("*.png"))


def test_the_control_is_that_of_the_file_or_of_the_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name without either has the usual one."""
    path = tmp_path / "lengths.yaml"
    path.write_text("question: x\ncontrol: naive\narms: [{method: bf16}]\nseeds: [0]\n", encoding="utf-8")
    sweep(tmp_path / "results", (8,))
    for name, control in ((str(path), "naive int4"), ("lengths", "bf16 bf16")):
        assert report(name, tmp_path / "results", only="tables") == 0
        assert f"Control: {control}." in capsys.readouterr().out
    keep_purpose("lengths", read_sweep(str(path)).purpose, tmp_path / "results")  # as a run by the path does
    assert report("lengths", tmp_path / "results", only="tables") == 0
    assert "Control: naive int4." in capsys.readouterr().out
    for method, precision in (("bf16_train", "bf16"), ("naive", "fp8_block")):
        for seed in range(3):
            result, rows = factory.result(method, precision, seed=seed, sweep="paper_fp16")
            write_result(tmp_path / "results" / "runs" / "paper_fp16", result, rows)
    assert report("paper_fp16", tmp_path / "results", only="tables") == 0
    assert "Control: bf16_train bf16." in capsys.readouterr().out


def test_one_length_has_profiles_and_no_break_even(tmp_path: Path) -> None:
    sweep(tmp_path, (8,))
    assert report("lengths", tmp_path) == 0
    assert (tmp_path / "figures" / "lengths" / "profiles.png").exists()
    assert not (tmp_path / "tables" / "lengths_break_even.md").exists()


def test_a_record_without_its_series_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep(tmp_path, (8,))
    lost = min((tmp_path / "runs" / "lengths").glob("*.parquet"))
    lost.unlink()
    assert report("lengths", tmp_path) == 0
    said = capsys.readouterr().err
    assert said.startswith("warning: ") and f"no series of {lost.stem}: curves leave them out" in said


def test_options_of_a_report_are_heard_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep(tmp_path, (8,))
    made = list[Path]()
    monkeypatch.setattr("harness.cli.site.site", lambda results, names: made.append(results) or 0)
    for words in (["lengths", "--main", "--only", "figures"], ["--html", "--only", "tables"]):
        assert main(["report", *words, "--results", str(tmp_path)]) == 2
        assert f"only={words[-1]}: goes with the name of a sweep and without --main" in capsys.readouterr().err
    assert not made and not (tmp_path / "tables").exists()
    assert main(["report", "lengths", "--main", "--html", "--results", str(tmp_path)]) == 0
    assert made == [tmp_path] and (tmp_path / "tables" / "lengths_main.md").exists()


def test_a_mistyped_sweep_gets_the_nearest_of_all_packed_ones_too(tmp_path: Path) -> None:
    sweep(tmp_path, (8,))
    pack(tmp_path, "lengths")
    (tmp_path / "runs" / "lengths").rename(tmp_path / "runs" / "others")
    with pytest.raises(ValueError) as told:
        report("lengthz", tmp_path)
    assert str(told.value) == f"sweep 'lengthz' has no results in {tmp_path}; nearest: lengths; valid: lengths, others"
    with pytest.raises(ValueError, match=r"^sweep 'smoke' has no results in .*; lowbit sweep smoke runs it;"):
        report("smoke", tmp_path)
    assert report("lengths", tmp_path, only="tables") == 0
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"results in .*/empty; no sweep has any; lowbit sweep quick makes some"):
        report("lengths", tmp_path / "empty")


def test_no_results_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'smoke' has no results"):
        present(read_sweep("smoke"), tmp_path, ())
