"""Early warning on series made by hand and on synthetic sweeps where it is known which signal moves first."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.cli.early_warning import early_warning
from harness.cli.main import parse
from harness.records.run_result import write_result
from harness.studies.early_warning import alarms, report, scores
from harness.studies.early_warning.collapse import drawdown, kind, onset, smoothed
from tests import result_factory as factory

STEPS, ONSET, WARNED = 80, 50, 38


def test_onset_by_hand() -> None:
    assert smoothed(np.arange(6.0)).tolist()[4:] == [2.0, 3.0] and np.isnan(smoothed(np.arange(6.0))[:4]).all()
    reward = np.array([0.8] * 20 + [0.0] * 20)
    assert drawdown(reward)[21] == pytest.approx(0.4) and drawdown(reward)[22] == pytest.approx(0.6)
    assert onset(reward) == 22  # the mean of five steps is at 0.32, below half of 0.8
    assert onset(np.array([0.8] * 20 + [0.0] * 4 + [0.8] * 20)) is None  # four means of five are low, 22 to 25
    assert onset(np.array([0.8] * 20 + [0.0] * 5 + [0.8] * 20)) == 22
    assert onset(np.zeros(30)) is None and onset(np.array([0.5, 0.5])) is None
    assert onset(np.array([0.5] * 12), "diverged") == 11 and onset(reward, "diverged") == 22


def test_kinds() -> None:
    rising, falling = np.linspace(0.4, 0.8, 40), np.linspace(0.6, 0.4, 40)
    assert kind(rising) == "healthy" and kind(falling) == "declining"
    assert kind(rising, "ok", (0.42, 0.6, 0.2)) == "hidden" and kind(rising, "ok", (0.42, 0.6, 0.4)) == "healthy"
    assert kind(np.array([0.8] * 20 + [0.0] * 20), "ok", (0.42, 0.9)) == "collapsed"
    assert kind(rising, "diverged") == "collapsed"


def test_statistics_by_hand() -> None:
    columns = {"reward/accuracy": np.full(12, 0.5), "mismatch/kl_k3": np.array([0.0] * 6 + [0.99] * 6),
               "train/clip_frac": np.zeros(12)}  # fmt: skip
    found = alarms.statistics(columns)
    assert set(found) == {"reward drop", "k3 (level)", "k3 (drift)"}  # a constant signal is none
    level, drift = found["k3 (level)"], found["k3 (drift)"]
    assert level[5] == pytest.approx(math.log(0.01)) and level[8] == pytest.approx(0.0)
    assert level[6] == pytest.approx(math.log(0.01) * 2 / 3)
    assert np.isnan(drift[:5]).all() and drift[5] == pytest.approx(0) and drift[8] == pytest.approx(-math.log(0.01))


def test_thresholds_let_a_tenth_of_the_healthy_alarm() -> None:
    runs = [trace(peak=float(k), fold=k % 5) for k in range(100)]
    assert scores.threshold(runs, "k3 (level)") == 90.0  # 91 to 99 are above it, and 9 of 100 is at most 10
    assert math.isinf(scores.threshold(runs[:9], "k3 (level)"))
    assert scores.first_above(np.array([math.nan, 1.0, 5.0, 2.0]), 1.0) == 2
    assert math.isinf(scores.first_above(np.array([1.0, 1.0]), 1.0))


def trace(peak: float, fold: int, kind: Any = "healthy", at: int | None = None) -> alarms.Trace:
    values = np.zeros(STEPS)
    values[10 if at is None else at :] = peak
    return alarms.Trace(context="a", arm=f"arm{fold}", precision="int4", fold=fold, kind=kind, reward_kind=kind,
                        onset=ONSET if kind == "collapsed" else None, statistics={"k3 (level)": values})  # fmt: skip


def test_thresholds_come_from_other_folds() -> None:
    """Fold 0 has the only large healthy peaks: they raise every threshold but its own."""
    runs = [trace(1.0 + 0.01 * k, fold) for fold in range(1, 5) for k in range(10)]
    runs += [trace(100.0, 0) for _ in range(10)] + [trace(5.0, 0, "collapsed"), trace(5.0, 1, "collapsed")]
    steps = scores.alarm_steps(runs, "k3 (level)")
    assert steps[-2] == 10 and math.isinf(steps[-1])
    assert scores.lead(runs[-2], steps[-2]) == ONSET - 10 and scores.lead(runs[-1], steps[-1]) == 0


def test_a_signal_that_never_alarms_has_no_precision() -> None:
    runs = [trace(1.0, fold) for fold in range(5) for _ in range(10)] + [trace(1.0, 0, "collapsed")]
    (found,) = scores.score_all(runs)
    assert (found.recall, found.false_alarms, found.num_collapsed) == (0, 0, 1) and math.isnan(found.precision)


def sweep(folder: Path, num_arms: int = 4, seeds: int = 5) -> list[Any]:
    """Healthy arms, and arms whose reward falls at ONSET while k3 rises at WARNED, entropy after it, ESS never."""
    results: list[Any] = []
    for index in range(num_arms * 3):
        is_bad = index < num_arms
        for seed in range(seeds):
            result, rows = factory.result(
                "naive", "int4", seed=seed, sweep="early", knobs={"TIS": {"cap": float(index)}}
            )
            rng = np.random.default_rng([index, seed])
            for step, row in enumerate(rows):
                fallen, warned = is_bad and step >= ONSET, is_bad and step >= WARNED
                row["reward/accuracy"] = (0.05 if fallen else 0.5 + 0.002 * step) + 0.01 * rng.standard_normal()
                row["mismatch/kl_k3"] = (0.5 if warned else 0.1) * math.exp(0.05 * rng.standard_normal())
                row["train/entropy"] = (1.0 if is_bad and step >= ONSET + 3 else 0.3) * math.exp(0.05 * rng.normal())
                row["mismatch/ess_token_raw"] = 0.8 + 0.01 * rng.standard_normal()
                row["mismatch/ess_token"] = 0.9 + 0.01 * rng.standard_normal()
            write_result(folder / "runs" / "early", result, rows)
            results.append(result)
    return results


def test_the_signal_that_moves_first_is_found(tmp_path: Path) -> None:
    runs = alarms.traces(tmp_path / "runs" / "early", sweep(tmp_path, num_arms=6, seeds=4))
    bad = [run for run in runs if run.kind == "collapsed"]
    assert len(bad) == 24 and all(run.onset in (ONSET + 2, ONSET + 3) for run in bad)
    found = {score.name: score for score in scores.score_all(runs)}
    k3, drop, late = found["k3 (level)"], found["reward drop"], found["entropy up (level)"]
    assert k3.recall == 1 and k3.lead == pytest.approx(ONSET + 2 - WARNED, abs=2) and k3.recall_low == 1
    assert drop.recall == 1 and drop.lead <= 3 and k3.gain >= 10 and k3.gain_low > 0
    assert late.recall < 0.4 and found["ESS raw (level)"].recall < 0.5
    firsts = {name: score.first for name, score in found.items() if name != "reward drop"}
    assert min(firsts["k3 (level)"], firsts["k3 (drift)"]) > max(v for k, v in firsts.items() if "k3" not in k)
    healthy_alarms = [s.false_alarms for s in found.values()]
    assert np.mean(healthy_alarms) <= 0.1 + 3 * math.sqrt(0.1 * 0.9 / 48)
    assert k3.num_collapsed == 24 and k3.num_healthy == 48
    assert k3.precision == pytest.approx(24 / (24 + 48 * k3.false_alarms))
    five = scores.score_all([run for run in runs if run.kind == "healthy" or run.arm != bad[0].arm])
    assert len(five) == len(found) and all(math.isnan(s.recall_low) and math.isnan(s.gain_high) for s in five)


def test_a_hidden_loss_is_counted_apart(tmp_path: Path) -> None:
    runs = alarms.traces(tmp_path / "runs" / "early", sweep(tmp_path, num_arms=2))
    hidden = [replace(run, kind="hidden", onset=None) for run in runs if run.kind == "collapsed"][:5]
    found = {score.name: score for score in scores.score_all([*runs, *hidden])}
    assert found["k3 (level)"].hidden == 1 and found["ESS raw (level)"].hidden < 1


def test_tables_figures_and_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep(tmp_path, num_arms=2)
    assert early_warning(["early"], tmp_path, is_written=False) == 0
    assert not (tmp_path / "tables").exists() and not (tmp_path / "figures").exists()
    assert early_warning(["early"], tmp_path, is_written=True) == 0
    said = capsys.readouterr().out
    assert "30 runs of early: 20 healthy, 10 collapsed (10 of them from step 15 on)" in said
    assert re.search(  # two arms give no interval
        r"k3 \(level\) warns of 100% of the collapses, \d+ steps before, not clearly before the reward's drop "
        r"\(\+\d+ steps\), at \d+% false alarms\.", said
    )  # fmt: skip
    assert re.search(r"The reward's own drop warns of 100% of the collapses, \d steps before \(median\), at ", said)
    text = (tmp_path / "tables" / "early_warning.md").read_text()
    assert text.count("| reward drop |") == 3 and "\\|d\\|" not in text  # a signal that was not recorded has no row
    for name in ("signals", "onset"):
        assert (tmp_path / "figures" / "early_warning" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_the_best_signal_says_how_firm_it_is() -> None:
    """A gain that one choice takes away is a hint; one that stays under all is not. Candidates are counted."""
    values: dict[str, Any] = dict.fromkeys(scores.Score.__dataclass_fields__, 0.5)
    values["name"] = "k3 (level)"
    best = scores.Score(**values)
    firm = replace(best, gain=8.0, gain_low=5.0, gain_high=10.0)
    weak = replace(firm, gain=3.0, gain_low=-1.0)
    other = replace(best, name="entropy up (level)", gain=0.0)
    (line,) = report.firmness([firm, other], {"within a format": [weak, other]})
    assert "8 [5, 10] steps here, 3 [-1, 10] within a format" in line and "a hint" in line
    assert "best of 2 statistics" in line
    assert "It holds under each choice" in report.firmness([firm, other], {"within a format": [firm]})[0]
    assert "a hint" in report.firmness([firm], {"within a format": []})[0]


def test_a_signal_is_told_with_its_intervals() -> None:
    values: dict[str, Any] = dict.fromkeys(scores.Score.__dataclass_fields__, 0.5)
    known = replace(
        scores.Score(**values), name="k3 (level)", recall_low=0.25, recall_high=0.75, lead=22.0, lead_low=4.0,
        lead_high=28.0, gain=8.0, gain_high=11.0,
    )  # fmt: skip
    start = "k3 (level) warns of 50% of the collapses (95 % 25% to 75%), 22 steps before (95 % 4 to 28), "
    said = {low: report._signal_words(replace(known, gain_low=low)) for low in (2, -2)}
    assert said[2] == f"{start}8 steps before the reward's drop (median, 95 % 2 to 11), at 50% false alarms."
    clear = "not clearly before the reward's drop (+8 steps, 95 % -2 to 11)"
    assert said[-2] == f"{start}{clear}, at 50% false alarms."


def test_every_sentence_ends() -> None:
    """Also the one that hidden losses get where no signal finds more of them than the reward does."""
    values: dict[str, Any] = dict.fromkeys(scores.Score.__dataclass_fields__, 0.5)
    found = [scores.Score(**values | {"name": name}) for name in ("reward drop", "k3 (level)")]
    said = report.sentences([replace(trace(1.0, 0), kind="hidden")], found)
    assert "Of the 1 hidden losses no signal finds more than the reward's drop: 50%." in said
    assert all(line.endswith(".") for line in said)


def test_sentences_name_signals_that_find_more_alone_and_a_threshold_that_serves() -> None:
    values: dict[str, Any] = dict.fromkeys(scores.Score.__dataclass_fields__, 0.5)
    shares = {"reward drop": 0.5, "k3 (level)": 0.6, "|d| p99 (level)": 0.7, "entropy up (level)": 0.4}
    found = [scores.Score(**values | {"name": name, "hidden": share}) for name, share in shares.items()]
    runs = [replace(trace(1.0, 0), kind="hidden")]
    said = report.sentences(runs, found)
    assert ("Of the 1 hidden losses the reward's drop alarms in 50%, the best signals in more: |d| p99 (level) in 70%, "
            "k3 (level) in 60%.") in said  # fmt: skip
    words = "A threshold taken from bf16 and int8 runs {}: the median signal then alarms in {} of their healthy runs."
    assert said[-1] == words.format("is no alarm for other formats", "50%")
    said = report.sentences(runs, [replace(s, reference_alarms=0.08) for s in found])
    assert said[-1] == words.format("serves other formats, too", "8%")


def test_hidden_losses_can_be_counted_by_their_reward() -> None:
    hidden = replace(trace(1.0, 0), kind="hidden", reward_kind="declining")
    assert [run.kind for run in scores.by_reward([hidden, trace(1.0, 1)])] == ["declining", "healthy"]


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "quick.zip").touch()
    with pytest.raises(ValueError, match=r"sweep 'quik' has no results in .*nearest: quick"):
        early_warning(["quik"], tmp_path, is_written=False)
    with pytest.raises(ValueError, match="0 collapsed and 0 healthy runs"):
        report.report([])
    results = sweep(tmp_path)
    folder = tmp_path / "runs" / "early"
    (folder / f"{results[0].run_id}.parquet").unlink()
    assert len(alarms.traces(folder, results)) == len(results) - 1
    (folder / f"{results[0].run_id}.parquet").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"\.parquet: not a Parquet file"):
        alarms.traces(folder, results)


def test_the_command_is_declared() -> None:
    parsed = parse(["early-warning", "a", "b"])
    assert parsed.sweeps == ["a", "b"] and parsed.results == Path("results")
