import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter

import numpy as np
import pytest
from optuna.trial import TrialState

from harness.config.load import run_id
from harness.foundation.lock_file import held
from harness.foundation.provenance import ROOT
from harness.foundation.seeds import stable_seed
from harness.records.paths import journal_path
from harness.records.run_result import read_result
from harness.studies.search.cells import GIVEN_UP
from harness.studies.search.confirm import submit
from harness.studies.search.run import run_search
from harness.studies.search.spec import check_search
from harness.studies.search.store import (
    is_alive,
    lock_folder,
    mend,
    open_studies,
    present,
    put_aside,
    take_back,
)
from harness.studies.search.table import write_tables
from harness.studies.search.trials import aggregate, evaluate
from tests.studies.search.search_toy import SPACE, FakeRunner, finished_cells, smooth_scores, toy_search


def run(search, tmp_path, runner=None, workers=1, **options):
    events = []
    cut_short = run_search(search, tmp_path, workers, events.append, runner=runner or FakeRunner(), **options)
    return events, cut_short


def stored(search, tmp_path):
    return {s: study.get_trials() for s, study in open_studies(search, tmp_path, is_writing=False).items()}


def test_trials_are_cells_and_baselines_come_first(tmp_path):
    search, runner = toy_search(budget={"trials": 6}), FakeRunner()
    events, cut_short = run(search, tmp_path, runner)
    assert not cut_short and [e.number for e in events] == list(range(6))
    assert events[0].values == search.baselines["tis default"] and events[1].values == search.baselines["ppo default"]
    assert "cap" not in events[1].values
    trials = stored(search, tmp_path)[""]
    cells = [cell for t in trials for cell in t.user_attrs["cells"].values()]
    assert sorted(cells) == finished_cells(tmp_path) == sorted(runner.ran) and len(cells) == 18
    first = trials[0]
    records = [read_result(tmp_path / "runs" / "search_toy" / f"{cell}.json") for cell in cells[:3]]
    assert [r.seed for r in records] == [0, 1, 2] and all(r.sweep == "search_toy" for r in records)
    assert first.values[0] == pytest.approx(sum(r.summary["auc"] for r in records) / 3)
    assert first.constraints == {"k3_median": pytest.approx(sum(r.summary["k3_median"] for r in records) / 3 - 0.5)}
    assert first.user_attrs["cost_s"] == 30.0 and events[-1].usage.seconds == 180.0


def test_a_search_goes_on_where_it_was_and_never_runs_a_cell_twice(tmp_path):
    search, runner = toy_search(), FakeRunner()
    run(toy_search(budget={"trials": 4}), tmp_path, runner)
    again, _ = run(toy_search(budget={"trials": 4}), tmp_path, runner)
    assert again == [] and len(runner.ran) == 12
    more, _ = run(search, tmp_path, runner)
    assert len(more) == 8 and max(Counter(runner.ran).values()) == 1
    params = [tuple(sorted(t.params.items())) for t in stored(search, tmp_path)[""]]
    assert len(set(params)) == len(params) == 12  # the sampler did not begin again


def test_equal_cells_of_different_trials_run_once(tmp_path):
    space = {"correction": SPACE["correction"], "cap": {"choices": [2.0, 4.0]}}
    options = {"sampler": {"name": "random"}, "pruner": {"alpha": 0}}
    search = toy_search(space=space, baselines={}, budget={"trials": 8}, **options)
    runner = FakeRunner()
    run(search, tmp_path, runner, workers=4)
    trials = stored(search, tmp_path)[""]
    assert sum(len(t.user_attrs["cells"]) for t in trials) == 24
    assert max(Counter(runner.ran).values()) == 1 and len(runner.ran) <= 9  # tis at two caps, ppo: 3 settings


def test_one_worker_is_reproducible(tmp_path):
    search = toy_search(budget={"trials": 9}, sampler={"startup": 4}, constraint=None)
    one, _ = run(search, tmp_path / "a")
    two, _ = run(search, tmp_path / "b")
    assert [e.values for e in one] == [e.values for e in two]
    other, _ = run(toy_search(budget={"trials": 4}, sampler={"seed": 1, "startup": 4}), tmp_path / "c")
    assert [e.values for e in one][2:4] != [e.values for e in other][2:]


def test_shares_of_the_budget_are_equal_and_searched_apart(tmp_path):
    search = toy_search(budget={"cells": 42, "per": "correction"}, pruner={"alpha": 0.05, "min_trials": 3})
    run(search, tmp_path, workers=3)
    trials = stored(search, tmp_path)
    spent = {s: sum(len(t.user_attrs["cells"]) for t in found) for s, found in trials.items()}
    assert set(spent) == {"tis", "ppo"} and 39 <= sum(spent.values()) <= 42
    assert abs(spent["tis"] - spent["ppo"]) <= 3
    assert all(t.user_attrs["values"]["correction"] == s for s, found in trials.items() for t in found)
    assert all("correction" not in t.params for found in trials.values() for t in found)
    assert all(("cap" in t.params) == (s == "tis") for s, found in trials.items() for t in found)


def test_bad_trials_are_given_up_and_reported(tmp_path):
    def scores(config):
        return {"auc": 0.6 if config.algo.eps_low > 0.1 else 0.2, "k3_median": 0.1 * (1 + 0.01 * config.seed)} | (
            {"status": "diverged"} if config.algo.eps_high > 0.6 else {}
        )

    def noisy(config):
        noise = np.random.default_rng(stable_seed("noise", run_id(config))).normal(0, 0.01)
        return scores(config) | {"auc": scores(config)["auc"] + noise}

    search = toy_search(budget={"trials": 24}, pruner={"alpha": 0.05, "min_trials": 3}, sampler={"name": "random"})
    events, _ = run(search, tmp_path, FakeRunner(noisy))
    ends = {"complete": [], "pruned": [], "failed": []}
    for event in events:
        ends[event.outcome.state].append(event)
    beaten = [e for e in ends["pruned"] if "behind the best trial" in e.outcome.reason]
    diverged = [e for e in ends["pruned"] if "seed 0: diverged at step 3" in e.outcome.reason]
    assert beaten and diverged and len(beaten) + len(diverged) == len(ends["pruned"]) and not ends["failed"]
    assert all(len(e.outcome.cells) < 3 for e in beaten) and all(len(e.outcome.cells) == 1 for e in diverged)
    assert all(e.values["algo.eps_low"] <= 0.1 for e in beaten)
    states = Counter(t.state for t in stored(search, tmp_path)[""])
    assert states == {TrialState.COMPLETE: len(ends["complete"]), TrialState.PRUNED: len(ends["pruned"])}


def test_a_cell_whose_reward_falls_is_stopped_and_its_record_says_so(tmp_path):
    def rewards(config, step):
        return 0.5 + 0.01 * (step % 3) - (0.4 if step > 30 and config.algo.eps_low < 0.15 else 0.0)

    steps = [*toy_search().overrides[:-1], "precision=int4", "trainer.steps=60"]
    search = toy_search(overrides=steps, budget={"trials": 6}, sampler={"name": "random"}, baselines={})
    events, _ = run(search, tmp_path, FakeRunner(rewards=rewards))
    fallen = [e for e in events if e.values["algo.eps_low"] < 0.15]
    assert fallen and all(e.outcome.state == "pruned" for e in fallen)
    assert all(e.outcome.state == "complete" for e in events if e not in fallen)
    record = read_result(tmp_path / "runs" / "search_toy" / f"{fallen[0].outcome.cells[0]}.json")
    assert record.status == "cancelled" and record.reason.startswith(GIVEN_UP + "its reward fell from 0.5")
    assert not (tmp_path / "work" / record.run_id).exists()
    runner = FakeRunner(rewards=rewards)
    run(toy_search(overrides=steps, budget={"trials": 6}, sampler={"name": "random"}, baselines={}), tmp_path, runner)
    assert runner.ran == []


def test_failing_trials_do_not_count_and_end_the_search(tmp_path):
    search = toy_search(budget={"trials": 12}, sampler={"name": "random"})
    few = FakeRunner(lambda c: smooth_scores(c) | ({"status": "failed"} if c.algo.eps_high > 0.5 else {}))
    events, _ = run(search, tmp_path / "few", few)
    assert sum(e.outcome.state != "failed" for e in events) == 12
    assert any(e.outcome.reason == "seed 0: failed at step 3" for e in events)
    with pytest.raises(ValueError, match=r"(9|10|11) trials failed, the first because of: seed 0: failed at step 3"):
        run(search, tmp_path / "all", FakeRunner(lambda c: {"status": "failed"}), workers=3)


def test_a_study_of_another_search_is_refused_with_every_difference(tmp_path):
    run(toy_search(budget={"trials": 2}), tmp_path)
    space = {**SPACE, "cap": SPACE["cap"] | {"high": 16.0}}
    with pytest.raises(ValueError) as raised:
        run(toy_search(space=space, seeds=[0, 1]), tmp_path)
    changed = "seeds: [0, 1, 2] in the study, [0, 1] in the file; space.cap.high: 8.0 in the study, 16.0 in the file. "
    assert changed in str(raised.value) and "--restart" in str(raised.value) and "\n" not in str(raised.value)
    old = journal_path(tmp_path, "search_toy").read_bytes()
    kept = put_aside(tmp_path, "search_toy")
    assert kept is not None and kept.name == "search_toy.1.journal" and kept.read_bytes() == old
    events, _ = run(toy_search(space=space, seeds=[0, 1], budget={"trials": 3}), tmp_path)
    assert len(events) == 3 and events[0].number == 0


def test_restart_waits_for_no_worker(tmp_path):
    with present(tmp_path, "search_toy") as worker:
        assert is_alive(tmp_path, "search_toy", worker)
        with pytest.raises(ValueError, match="1 worker processes are at work on it"):
            put_aside(tmp_path, "search_toy")
    assert not is_alive(tmp_path, "search_toy", worker) and not is_alive(tmp_path, "search_toy", None)


def test_a_trial_of_a_dead_worker_is_taken_back(tmp_path):
    search = toy_search(budget={"trials": 3})
    study = open_studies(search, tmp_path)[""]
    trial = study.ask()
    trial.set_user_attr("worker", "gone")
    trial.suggest_float("algo.eps_low", 0.05, 0.8, log=True)
    with present(tmp_path, search.name) as worker:
        other = study.ask()
        other.set_user_attr("worker", worker)
        take_back(study, study.get_trials(), tmp_path, search.name)
    states = [t.state for t in study.get_trials()]
    assert states == [TrialState.FAIL, TrialState.RUNNING, TrialState.WAITING]
    events, _ = run(search, tmp_path)
    trials = stored(search, tmp_path)[""]
    assert [t.user_attrs.get("again") for t in trials if "again" in t.user_attrs] == [0, 1]
    assert {e.values["correction"] for e in events[:2]} == {"tis", "ppo"} and len(events) == 3
    assert [t.user_attrs.get("baseline") for t in trials[2:4]] == ["tis default", "ppo default"]


def test_a_torn_line_is_cut_off_and_a_foreign_file_is_named(tmp_path):
    search = toy_search(budget={"trials": 2})
    run(search, tmp_path)
    path = journal_path(tmp_path, search.name)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"op_code":8,"worker')
    events, _ = run(toy_search(budget={"trials": 3}), tmp_path)
    assert len(events) == 1 and path.read_bytes().startswith(whole)
    assert all(json.loads(line) for line in path.read_bytes().splitlines())
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    mend(empty)
    mend(tmp_path / "absent")
    for text in ("a diary\nof something else\n", "a diary\n", "[1]\n", f"{whole.decode()}a diary\n"):
        path.write_text(text, encoding="utf-8")
        for is_writing in (False, True):
            with pytest.raises(ValueError, match=r"search_toy.journal: not a journal of trials .* with --restart"):
                open_studies(search, tmp_path, is_writing=is_writing)
        assert path.read_text(encoding="utf-8") == text


def test_a_worker_killed_while_another_works_loses_nothing(tmp_path):
    code = (
        "import sys; from pathlib import Path; from tests.studies.search.search_toy import FakeRunner, toy_search;"
        "from harness.studies.search.run import run_search;"
        "run_search(toy_search(budget={'trials': 12}), Path(sys.argv[1]), 2,"
        " lambda e: (sys.stdout.write(f'{e.number}\\n'), sys.stdout.flush()), runner=FakeRunner(delay_s=0.05))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    one, other = (subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2))
    assert one.stdout is not None
    mine = {int(one.stdout.readline()) for _ in range(2)}
    os.kill(one.pid, signal.SIGKILL)
    one.communicate()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs" / "search_toy").glob("*.json")}
    theirs = list(map(int, other.communicate(timeout=100)[0].split()))
    run(toy_search(budget={"trials": 12}), tmp_path)  # where the other had ended before the kill
    trials = stored(toy_search(budget={"trials": 12}), tmp_path)[""]
    states = Counter(t.state for t in trials)
    assert states[TrialState.COMPLETE] + states[TrialState.PRUNED] == 12 and states[TrialState.RUNNING] == 0
    assert len(set(theirs)) == len(theirs) and not mine & set(theirs) and other.returncode == 0
    assert len(before) >= 6 and {path: path.stat().st_mtime_ns for path in before} == before
    assert all(json.loads(line) for line in journal_path(tmp_path, "search_toy").read_bytes().splitlines())


def test_a_stop_leaves_a_search_that_goes_on(tmp_path):
    search, slow = toy_search(budget={"trials": 16}), FakeRunner(delay_s=0.15)
    events, cut_short = run(search, tmp_path, slow, workers=2, max_hours=1.0 / 3600, afterwards=submit)
    assert cut_short and 0 < len(events) < 16
    rest, cut_short = run(search, tmp_path, FakeRunner(), workers=2)
    assert not cut_short and len(events) + len(rest) == 16


def test_a_sweep_and_a_search_keep_out_of_each_others_folder(tmp_path):
    with held(tmp_path / ".lock"), pytest.raises(ValueError, match="a sweep is at work there"):
        run(toy_search(budget={"trials": 2}), tmp_path)
    assert not lock_folder(tmp_path, "search_toy").exists() or not list(lock_folder(tmp_path, "search_toy").glob("w*"))


def test_confirmation_is_on_seeds_that_no_trial_had(tmp_path):
    search, runner = toy_search(budget={"trials": 6}, confirm={"seeds": [8, 9]}), FakeRunner()
    run(search, tmp_path, runner, afterwards=submit)
    records = [read_result(tmp_path / "runs" / "search_toy" / f"{cell}.json") for cell in runner.ran[18:]]
    assert Counter(r.seed for r in records) == {8: 3, 9: 3}  # two baselines and the best of the search
    assert Counter(r.method.name for r in records)["flashrl"] >= 2


def test_values_are_means_over_seeds_rounded_to_what_counts():
    search = toy_search(
        objectives=[
            {"metric": "auc", "direction": "maximize"},
            {"metric": "time_s", "direction": "minimize", "resolution": 5},
            {"metric": "k3_median", "direction": "minimize", "log": True},
        ],
    )
    scores = {0: {"auc": 0.2, "time_s": 31.0, "k3_median": 0.1}, 1: {"auc": 0.4, "time_s": 33.0, "k3_median": 0.4}}
    assert [aggregate(scores, o) for o in search.objectives] == [pytest.approx(0.3), 30.0, pytest.approx(0.2)]


def test_a_trial_that_cannot_be_composed_fails_with_the_reason(tmp_path):
    from harness.config.schema import Launch
    from harness.studies.search.trials import Surroundings

    runner = FakeRunner()
    around = Surroundings(
        search=toy_search(), launch=Launch(results=str(tmp_path)), runner=runner, stop=threading.Event()
    )
    outcome = evaluate(around, {"correction": "tis", "algo.eps_low": 0.2}, list)
    assert outcome.state == "failed" and "{cap}" in outcome.reason and runner.ran == []


RATES = [0.4, 0.2, 0.8, 0.05, 0.1]


def rate_search(**changes):
    """Five rates for each of two corrections, halved after every seed."""
    space = {"correction": SPACE["correction"], "algo.eps_low": {"choices": RATES}, "cap": {"choices": [2.0]}}
    values = {
        "space": space, "baselines": {}, "budget": {"trials": 10, "per": "correction"}, "sampler": {"name": "grid"},
        "pruner": {"alpha": 0, "halving": 2}, "confirm": {"seeds": [5, 6, 7]},
    }  # fmt: skip
    return toy_search(**values | changes)


def test_a_grid_is_halved_with_equal_budgets_and_its_best_are_compared_on_fresh_seeds(tmp_path):
    search, runner = rate_search(), FakeRunner()
    check_search(search)
    run(search, tmp_path, runner, afterwards=submit)
    trials = stored(search, tmp_path)
    for share, found in trials.items():
        assert [t.user_attrs["values"]["algo.eps_low"] for t in found] == RATES
        seeds = [len(t.user_attrs["cells"]) for t in found]
        best = max(found, key=lambda t: t.values[0] if t.values else 0.0)
        assert best.user_attrs["values"]["algo.eps_low"] == 0.4 and seeds[0] == 3, share
        assert sum(seeds) < 15 and {t.state for t in found} == {TrialState.COMPLETE, TrialState.PRUNED}
    assert run(search, tmp_path, runner)[0] == []  # a second start proposes nothing
    table = write_tables(search, tmp_path)[0].read_text()
    assert "ppo: the best found is trial 0 (eps_low 0.4, cap 2.0). On 3 fresh seeds its auc is -0.1" in table
    assert "auc against best tis" in table and "tis: the best found is trial 0" in table
    pruned = sum(t.state == TrialState.PRUNED for found in trials.values() for t in found)
    assert f"Given up: {pruned} because other trials of their share did better on the same seeds." in table


def test_a_grid_takes_choices_alone_and_its_own_number_of_trials():
    for changes, words in (
        ({"space": SPACE}, "space.algo.eps_low is a range or conditional"),
        ({"budget": {"trials": 9}}, "budget.trials=10, the number of combinations"),
        ({"pruner": {"halving": 1}}, "pruner.halving=1: choose 0"),
    ):
        with pytest.raises(ValueError, match=words):
            check_search(rate_search(**changes))
