import json
from dataclasses import replace

import matplotlib as mpl
import matplotlib.image as mpimg
import matplotlib.pyplot as plt
import pytest
from optuna.trial import TrialState

from harness.config.schema import Launch
from harness.records.stats import paired
from harness.studies.search.confirm import best_found, best_of, compared, confirmed, contenders, submit, values_of
from harness.studies.search.figures import draw_search
from harness.studies.search.run import run_search
from harness.studies.search.store import open_studies
from harness.studies.search.table import knobs_text, write_tables
from harness.studies.search.tags import trial_tags
from tests.studies.search.search_toy import FakeRunner, toy_search

SEARCH = toy_search(
    budget={"trials": 30, "per": "correction"}, confirm={"seeds": [5, 6, 7, 8]}, sampler={"name": "random"},
    pruner={"alpha": 0}, references={"none": ["method=naive"]}, constraint={"metric": "k3_median", "at_most": 0.12},
)  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search")
    run_search(SEARCH, folder, 1, lambda event: None, runner=FakeRunner(), afterwards=submit)
    return folder


def read_trials(search, results):
    """Share -> its stored trials."""
    return {share: study.get_trials() for share, study in open_studies(search, results, is_writing=False).items()}


def test_the_best_is_feasible_and_is_confirmed_with_the_defaults(results):
    trials = read_trials(SEARCH, results)
    found = contenders(SEARCH, trials)
    assert [c.name for c in found] == ["tis default", "best tis", "ppo default", "best ppo", "none"]
    best = best_found(SEARCH, trials["tis"])
    own = [t for t in trials["tis"] if "baseline" not in t.user_attrs and t.constraints["k3_median"] <= 0]
    assert best is not None and best.values[0] == max(t.values[0] for t in own)
    whole = best_of(SEARCH, trials["tis"])
    assert whole is not None and whole.values[0] >= best.values[0]
    records = confirmed(SEARCH, found, Launch(results=str(results), sweep=SEARCH.name))
    assert all(sorted(of_one) == [5, 6, 7, 8] for of_one in records.values())
    arm, control = ({s: r.summary["auc"] for s, r in records[n].items()} for n in ("best tis", "tis default"))
    assert compared(records["best tis"], records["tis default"], "auc") == paired(arm, control)
    again = records["tis default"] | {5: records["tis default"][5].model_copy(update={"hashes": {"model": "another"}})}
    fewer = paired(arm, {seed: value for seed, value in control.items() if seed != 5})
    assert compared(records["best tis"], again, "auc") == fewer and fewer.num_pairs == 3


def test_the_table_says_what_was_found_in_a_sentence(results):
    paths = write_tables(SEARCH, results)
    text = paths[0].read_text(encoding="utf-8")
    trials = read_trials(SEARCH, results)
    best = best_found(SEARCH, trials["tis"])
    assert best is not None
    lines = [line for line in text.splitlines() if line.startswith("* ")]
    shown = f"* tis: the best found is trial {best.number} ({knobs_text(values_of(best), SEARCH)}). On 4 fresh seeds"
    assert len(lines) == 2 and lines[0].startswith(shown) and "against tis default" in lines[0]
    assert "| none |" in text and "## Spent" in text and "| tis | 15 | 0 | 0 | 45 | 0.12 |" in text
    study = json.loads(paths[1].read_text(encoding="utf-8"))
    assert len(study["trials"]) == 30 and len(study["confirmation"]["best tis"]) == 4


def test_of_a_metric_that_is_minimized_a_lower_value_is_better(tmp_path):
    """k3 grows with eps_high: 0.1 at the default of 0.28."""
    objectives = [{"metric": "k3_median", "direction": "minimize"}]
    search = toy_search(budget={"trials": 16}, confirm={"seeds": [5, 6, 7]}, sampler={"name": "random"},
                        pruner={"alpha": 0}, objectives=objectives, constraint=None)  # fmt: skip
    run_search(search, tmp_path, 1, lambda event: None, runner=FakeRunner(), afterwards=submit)

    def answer(margin):
        """The sentence, and the row of the best, where so small a difference is none."""
        judged = replace(search, confirm=replace(search.confirm, margin=margin))
        lines = write_tables(judged, tmp_path)[0].read_text(encoding="utf-8").splitlines()
        return [next(line for line in lines if line.startswith(start)) for start in ("* ", "| best |")]

    said, row = answer(0.001)
    assert "On 3 fresh seeds its k3_median is -0.0" in said and "against tis default: it is better. " in said
    assert row.endswith("] (better) | 3 of 3 |")
    said, row = answer(0.2)
    assert "is -0.079 [-0.0964, -0.0616] against tis default: they do not differ by as much as 0.2. " in said
    assert row.endswith("] (equal) | 3 of 3 |")


def test_trials_that_tie_for_the_best_are_counted(tmp_path):
    search = toy_search(budget={"trials": 4}, confirm={"seeds": [5]}, sampler={"name": "random"}, pruner={"alpha": 0})
    runner = FakeRunner(lambda config: {"auc": 0.5, "k3_median": 0.1})
    run_search(search, tmp_path, 1, lambda event: None, runner=runner)
    text = write_tables(search, tmp_path)[0].read_text(encoding="utf-8")
    assert "* the best found is trial 2 (" in text and "), one of 2 that tie, in the search +0.000 auc against " in text


def test_every_cell_has_its_trial_among_its_tags(results):
    write_tables(SEARCH, results)
    tags = trial_tags(results, SEARCH.name)
    cells = {path.stem for path in (results / "runs" / SEARCH.name).glob("*.json")}
    assert set(tags) == cells and len(cells) == 30 * 3 + 5 * 4
    first = read_trials(SEARCH, results)["ppo"][0]
    assert tags[first.user_attrs["cells"]["0"]] == {"search.trial": "ppo 0", "search.state": "complete"}
    assert sum("search.confirms" in of_cell for of_cell in tags.values()) == 20
    assert trial_tags(results, "quick") == {}


def test_the_table_marks_the_trials_that_no_other_beats(results):
    text = write_tables(SEARCH, results)[0].read_text(encoding="utf-8")
    for share, found in read_trials(SEARCH, results).items():
        feasible = [t for t in found if t.constraints["k3_median"] <= 0]
        assert 0 < len(feasible) < len(found)
        wanted = {
            t.number
            for t in feasible
            if not any(
                o.values[0] >= t.values[0] and o.values[1] <= t.values[1] and o.values != t.values for o in feasible
            )
        }
        section = text.split(f"## Best trials of {share}:")[1].split("##")[0]
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if "|" in line][2:]
        shown = {int(row[0]): row[5] for row in rows}
        assert {number for number, mark in shown.items() if mark == "yes"} == wanted & set(shown) != set()


def test_figures_are_drawn_from_the_stored_study_alone(results):
    style = dict(mpl.rcParams)
    paths = draw_search(SEARCH, results)
    names = ["history", *(f"{kind}_{share}" for share in ("tis", "ppo") for kind in ("importance", "slice", "pareto"))]
    assert [p.stem for p in paths] == names
    for path in paths:
        image = mpimg.imread(path)
        assert image.min() < 0.3 and image.max() == 1.0
    assert dict(mpl.rcParams) == style and plt.get_fignums() == []


def test_a_search_without_a_complete_trial_says_so(tmp_path):
    search = toy_search(budget={"trials": 3}, confirm={"seeds": [5]})
    run_search(search, tmp_path, 1, lambda event: None, runner=FakeRunner(lambda config: {"status": "diverged"}))
    assert {t.state for t in read_trials(search, tmp_path)[""]} == {TrialState.PRUNED}
    text = write_tables(search, tmp_path)[0].read_text(encoding="utf-8")
    assert "* none of 1 trials beside the baselines was complete" in text  # the other two are the baselines
    assert "3 because a cell diverged" in text
    assert draw_search(search, tmp_path) == []
