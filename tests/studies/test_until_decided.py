"""Sweeps until decided: who gets which seeds, when they stop, and that nothing is run twice."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from harness.config.load import parse
from harness.config.schema import Launch
from harness.records import stats
from harness.records.looks import level_of, read_looks
from harness.records.run_result import RunResult, read_results
from harness.records.sweep_file import Until
from harness.report.leaderboard import leaderboard
from harness.studies import until_decided as study
from harness.sweep import Planned, Sweep, plan, read_sweep, run_sweep
from harness.sweep.retry import Limit
from tests.studies.until_toy import ToyRunner, toy_sweep
from tests.toy import small_launch


def start(
    launch: Launch, runner: ToyRunner, sweep: Sweep | None = None, limit: Limit | None = None
) -> tuple[study.Ending, list[str]]:
    """Run the toy sweep: (how it ended, what it said)."""
    said = list[str]()

    def run(planned: Planned) -> tuple[list[RunResult], bool]:
        return run_sweep(planned, launch, 1, lambda event: None, run=runner, limit=limit)

    return study.until_decided(plan(study.with_all_seeds(sweep or toy_sweep())), launch, run, said.append), said


def seeds_of(runner: ToyRunner) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for precision, seed in runner.names():
        found.setdefault(precision, []).append(seed)
    return found


def test_seeds_go_where_they_decide(tmp_path: Path) -> None:
    launch, runner = small_launch(tmp_path), ToyRunner()
    ending, said = start(launch, runner)
    seeds = seeds_of(runner)
    # The clear arms, the frozen one and the one that is far too noisy stop at the first look; the close pair goes on
    # until it is decided, and the control with it.
    assert [seeds[name] for name in ("int8", "int4", "int2", "nf4")] == [[0, 1, 2]] * 4
    assert seeds["bf16"] == seeds["nvfp4"] == list(range(len(seeds["nvfp4"]))) and 3 < len(seeds["nvfp4"]) < 9
    looks = read_looks(tmp_path, "test")
    assert looks is not None and len(looks.looks) == len(seeds["nvfp4"]) - 2
    last = {row.arm: row for row in looks.looks[-1]}
    assert {arm: row.verdict for arm, row in last.items()} == {
        "bf16 bf16": "control", "naive int8": "equal", "naive int4": "worse", "naive nvfp4": "worse",
        "naive int2": "cannot tell", "naive nf4": "no signal",
    }  # fmt: skip
    assert last["naive nf4"].next == "given up: no signal" and "chance with 9 seeds" in last["naive int2"].next
    assert ending.reason == looks.stopped == "no arm may get a further seed: 3 decided, 1 no signal, 1 hopeless"
    assert said[-1] == f"stopped: {ending.reason}"


def test_the_level_is_that_of_a_look_in_every_table(tmp_path: Path) -> None:
    launch = small_launch(tmp_path)
    assert level_of(tmp_path, "test") == stats.ALPHA
    start(launch, ToyRunner())
    level = level_of(tmp_path, "test")
    assert level == pytest.approx(stats.level_per_look((3, 4, 5, 6, 7, 8, 9), stats.ALPHA))
    assert 0.2 * stats.ALPHA < level < 0.5 * stats.ALPHA
    board = leaderboard(read_results(tmp_path / "runs" / "test"), alpha=level).set_index("arm")
    looks = read_looks(tmp_path, "test")
    assert looks is not None
    for row in looks.looks[-1]:
        assert board.loc[row.arm, "verdict"] == row.verdict and board.loc[row.arm, "seeds"] == row.seeds
        if row.low is not None:
            assert board.loc[row.arm, "difference_low"] == row.low


def test_a_second_start_runs_nothing_and_changes_nothing(tmp_path: Path) -> None:
    launch, runner = small_launch(tmp_path), ToyRunner()
    first, _ = start(launch, runner)
    path, count = tmp_path / "looks" / "test.json", len(runner.ran)
    before = path.read_bytes()
    again, said = start(launch, runner)
    assert len(runner.ran) == count and path.read_bytes() == before
    assert again.reason == first.reason and said[-1] == f"test: nothing to run: {first.reason}"


@pytest.mark.parametrize("stop_after", [0, 18, 21])
def test_an_interrupted_sweep_goes_on_where_it_was(tmp_path: Path, stop_after: int) -> None:
    whole, part = ToyRunner(), ToyRunner(stop_after=stop_after)
    start(small_launch(tmp_path / "whole"), whole)
    launch = small_launch(tmp_path / "part")
    ending, _ = start(launch, part)
    looks = read_looks(tmp_path / "part", "test")
    assert ending.reason is None and looks is not None and looks.stopped is None and len(part.ran) == stop_after
    part.stop_after = 10**6
    start(launch, part)
    assert sorted(part.names()) == sorted(whole.names())
    ends = [json.loads((tmp_path / name / "looks" / "test.json").read_text()) for name in ("whole", "part")]
    for found in ends:  # what is judged again after the interruption may stand twice
        found["looks"] = found["looks"][-1]
    assert ends[0] == ends[1]


def test_finished_cells_of_another_sweep_are_judged_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.sweep.queue.commit", lambda: ("c0ffee", False))
    launch, runner = small_launch(tmp_path), ToyRunner()
    other = replace(toy_sweep(), name="other", seeds=(0, 1, 2, 3))
    run_sweep(plan(other), replace(launch, sweep="other"), 1, lambda event: None, run=runner)
    assert len(runner.ran) == 24
    said = list[str]()
    planned = plan(study.with_all_seeds(toy_sweep()))
    upcoming = study.preview(planned, launch, said.append)
    assert not (tmp_path / "looks").exists() and not (tmp_path / "runs" / "test").exists()
    start(launch, runner)
    names = runner.names()[24:]
    assert names == [("bf16", 4), ("nvfp4", 4)]
    assert [(cell.precision.name, cell.seed) for cell in upcoming] == names[: len(upcoming)]
    looks = read_looks(tmp_path, "test")
    assert looks is not None and {row.seeds for row in looks.looks[0]} == {4}


def test_an_arm_with_a_failed_cell_ends_and_the_others_go_on(tmp_path: Path) -> None:
    def ending(config: object) -> tuple[str, str | None]:
        found = config.precision.name, config.seed  # type: ignore[attr-defined]
        return ("failed", "ValueError: x") if found == ("int4", 1) else ("ok", None)

    launch, runner = small_launch(tmp_path), ToyRunner(ending=ending)
    found, _ = start(launch, runner)
    assert [(r.config["precision"]["name"], r.seed) for r in found.failed] == [("int4", 1)]
    assert seeds_of(runner)["int4"] == [0, 1, 2] and len(seeds_of(runner)["nvfp4"]) > 3
    assert found.reason is not None and "1 failed" in found.reason


def test_a_failed_control_ends_its_arms(tmp_path: Path) -> None:
    def ending(config: object) -> tuple[str, str | None]:
        found = config.precision.name, config.seed  # type: ignore[attr-defined]
        return ("failed", "ValueError: x") if found == ("bf16", 3) else ("ok", None)

    found, _ = start(small_launch(tmp_path), runner := ToyRunner(ending=ending))
    assert Counter(name for name, _ in runner.names())["nvfp4"] == 4
    assert found.reason is not None and "5 failed" in found.reason


def test_a_time_limit_is_a_stopping_reason_and_the_next_start_goes_on(tmp_path: Path) -> None:
    launch, runner = small_launch(tmp_path), ToyRunner()
    limit = Limit(end=20.0, predict=lambda config: 0.0, clock=lambda: float(len(runner.ran)) + 0.5)
    found, _ = start(launch, runner, limit=limit)
    assert found.reason is not None and found.reason.startswith("time limit: ") and len(runner.ran) == 20
    looks = read_looks(tmp_path, "test")
    assert looks is not None and looks.stopped == found.reason
    found, _ = start(launch, runner)
    assert found.reason is not None and found.reason.startswith("no arm may get a further seed")


def test_out_of_seeds_and_batches(tmp_path: Path) -> None:
    sweep = toy_sweep(max_seeds=6, batch=2, hopeless=0)
    assert sweep.until is not None and sweep.until.sizes == (3, 5, 6)
    found, _ = start(small_launch(tmp_path), runner := ToyRunner(), sweep)
    assert seeds_of(runner)["int2"] == list(range(6)) and seeds_of(runner)["bf16"] == list(range(6))
    assert found.reason is not None and "out of seeds" in found.reason
    looks = read_looks(tmp_path, "test")
    assert looks is not None
    assert [{row.seeds for row in look if row.arm == "naive int2"} for look in looks.looks] == [{3}, {5}, {6}]


def test_an_arm_is_judged_at_the_sizes_of_the_rule_alone(tmp_path: Path) -> None:
    """Two of a batch of three seeds are there: the third runs before anything is looked at."""
    launch, runner = small_launch(tmp_path), ToyRunner()
    run_sweep(plan(replace(toy_sweep(), seeds=(0, 1, 2, 3, 4))), launch, 1, lambda event: None, run=runner)
    said = list[str]()
    upcoming = study.preview(plan(study.with_all_seeds(toy_sweep(batch=3))), launch, said.append)
    assert [cell.seed for cell in upcoming] == [5] * 6 and said[0].startswith("next: 6 cells before a look")


def test_a_rule_with_fewer_looks_does_not_lift_the_level(tmp_path: Path) -> None:
    launch, runner = small_launch(tmp_path), ToyRunner()
    start(launch, runner)
    level = level_of(tmp_path, "test")
    start(launch, runner, toy_sweep(max_seeds=4))
    assert level_of(tmp_path, "test") == level
    start(launch, runner, toy_sweep(max_seeds=20))
    assert level_of(tmp_path, "test") < level


def test_a_preview_judges_at_the_level_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = small_launch(tmp_path)
    start(launch, ToyRunner(), toy_sweep(max_seeds=20))
    judge, levels = study.current, list[float]()

    def spied(planned: Planned, results: list[RunResult], level: float) -> study.State:
        levels.append(level)
        return judge(planned, results, level)

    monkeypatch.setattr(study, "current", spied)
    study.preview(plan(study.with_all_seeds(toy_sweep(max_seeds=4))), launch, lambda line: None)
    assert levels == [level_of(tmp_path, "test")]


def test_an_arm_without_a_control_is_given_up(tmp_path: Path) -> None:
    sweep = replace(toy_sweep(), control="fp16")
    found, _ = start(small_launch(tmp_path), runner := ToyRunner(), sweep)
    assert found.reason == "no arm may get a further seed: 6 no control" and len(runner.ran) == 18


def test_seeds_follow_those_of_the_file() -> None:
    sweep = replace(toy_sweep(max_seeds=5), seeds=(7, 2))
    assert study.with_all_seeds(sweep).seeds == (7, 2, 8, 9, 10)
    with pytest.raises(ValueError, match=r"sweep test: its file has no `until`.*max_seeds: 6"):
        study.with_all_seeds(replace(sweep, until=None, seeds=(0, 1, 2)))
    for seeds in ((0,), (0, 1, 2)):  # what is proposed is accepted
        with pytest.raises(ValueError, match="such as until: ") as caught:
            study.with_all_seeds(replace(sweep, until=None, seeds=seeds))
        assert parse(Until, yaml.safe_load(str(caught.value).partition("until: ")[2])).max_seeds >= 2 * len(seeds)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("{max_seeds: 1}", "until.max_seeds=1: must be at least 2"),
        ("{}", "until.max_seeds is missing"),
        ("{max_seeds: 12, hopeles: 0.1}", "unknown key until.hopeles; nearest: until.hopeless"),
        ("{max_seeds: 12, hopeless: 1}", "until.hopeless=1: must be below 1"),
        ("{max_seeds: 12, batch: 0}", "until.batch=0: must be at least 1"),
        ("{max_seeds: 4, first: 5}", "first=5: more than max_seeds=4"),
        ("{max_seeds: 2, first: 2}", "until.max_seeds=2: fewer than the 3 of seeds"),
        ("12", "until=12: keys with values are expected"),
    ],
)
def test_a_wrong_block_is_one_line(tmp_path: Path, block: str, message: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(f"question: x\narms: [{{method: bf16}}]\nseeds: [0, 1, 2]\nuntil: {block}\n")
    with pytest.raises(ValueError, match=r"wrong\.yaml") as caught:
        read_sweep(str(path))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_sweep_like_another_has_its_rule(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("question: x\narms: [{method: bf16}]\nseeds: [0]\nuntil: {max_seeds: 7}\n")
    (tmp_path / "two.yaml").write_text("like: one\nquestion: y\n")
    assert read_sweep("two", tmp_path).until == parse(Sweep, vars(toy_sweep()) | {"until": {"max_seeds": 7}}).until


def test_a_file_that_is_no_record_of_looks_is_named(tmp_path: Path) -> None:
    (tmp_path / "looks").mkdir()
    for text, said in (("{}", "sweep is missing"), ("{", "invalid JSON: EOF")):
        (tmp_path / "looks" / "test.json").write_text(text)
        with pytest.raises(ValueError, match=rf"test\.json: no record of looks: {said}"):
            level_of(tmp_path, "test")


def test_the_table_fits_a_terminal(tmp_path: Path) -> None:
    launch = small_launch(tmp_path)
    _, said = start(launch, ToyRunner())
    text = "\n".join(said)
    assert max(map(len, text.splitlines())) <= 120
    line = next(line for line in text.splitlines() if line.startswith("naive nvfp4"))
    assert line.split() == ["naive", "nvfp4", "3", "-0.045", "[-0.16,", "+0.07]", "cannot", "tell", "goes", "on"]
