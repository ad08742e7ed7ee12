import json
import math
from dataclasses import replace
from typing import Any

import matplotlib as mpl
import matplotlib.image as mpimg
import matplotlib.pyplot as plt
import pytest
from optuna.trial import TrialState
from scipy.stats import t as student

from harness.config.schema import Launch
from harness.records.stats import paired
from harness.studies.search.confirm import best_found, best_of, compared, confirmed, contenders, submit, values_of
from harness.studies.search.figures import draw_search
from harness.studies.search.run import run_search
from harness.studies.search.store import open_studies
from harness.studies.search.table import knobs_text, write_tables
from harness.studies.search.tags import trial_tags
from tests.studies.search.search_toy import FakeRunner, smooth_scores, toy_search
from tests.toy import SMALL

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
    assert compared(records["best tis"], records["tis default"], SEARCH.objectives[0]) == paired(arm, control)
    again = records["tis default"] | {5: records["tis default"][5].model_copy(update={"hashes": {"model": "another"}})}
    fewer = paired(arm, {seed: value for seed, value in control.items() if seed != 5})
    assert compared(records["best tis"], again, SEARCH.objectives[0]) == fewer and fewer.num_pairs == 3


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


def test_logarithms_are_confirmed_as_factors(tmp_path):
    """k3 is proportional to eps_high and grows 16 times from seed to seed, so differences would be those of one seed;
    the ratio to the default's 0.28 varies by 10 %."""
    luck = {5: 1.0, 6: 1.1, 7: 1 / 1.1}

    def scores(config):
        own = luck.get(config.seed, 1.0) if config.algo.eps_high != 0.28 else 1.0
        return {"auc": 0.5, "k3_median": config.algo.eps_high * own * 16.0 ** (config.seed - 5)}

    objectives = [{"metric": "k3_median", "direction": "minimize", "log": True}]
    search = toy_search(budget={"trials": 8}, confirm={"seeds": [5, 6, 7], "margin": 1.3}, sampler={"name": "random"},
                        pruner={"alpha": 0}, objectives=objectives, constraint=None)  # fmt: skip
    run_search(search, tmp_path, 1, lambda event: None, runner=FakeRunner(scores), afterwards=submit)
    best = best_found(search, read_trials(search, tmp_path)[""])
    assert best is not None
    factor = values_of(best)["algo.eps_high"] / 0.28
    spread = 1.1 ** (student.ppf(0.975, 2) / math.sqrt(3))
    shown = f"x{factor:.3g} [{factor / spread:.3g}, {factor * spread:.3g}]"
    lines = write_tables(search, tmp_path)[0].read_text(encoding="utf-8").splitlines()
    said, row, base = [next(x for x in lines if x.startswith(y)) for y in ("* ", "| best |", "| tis default |")]
    assert factor < 0.6 and said.endswith(
        f"On 3 fresh seeds its k3_median is {shown} against tis default: it is better. In the search it was "
        f"x{factor:.3g}."
    )
    assert row.endswith(f" | {shown} (better) | 3 of 3 |")
    wide = 16 ** (student.ppf(0.975, 2) / math.sqrt(3))  # the geometric mean of 1, 16 and 256 is 16
    assert base.startswith(f"| tis default | 0 | 4.48 [{4.48 / wide:.4g}, {4.48 * wide:.4g}] |")
    assert "|  | trial | k3_median, geometric | k3_median against its baseline | ended well |" in lines
    tight = replace(search, confirm=replace(search.confirm, margin=1 / (factor / spread) * 1.01))
    text = write_tables(tight, tmp_path)[0].read_text(encoding="utf-8")
    assert f"they do not differ by as much as a factor of {tight.confirm.margin:g}. " in text


def test_a_value_of_zero_has_a_logarithm(tmp_path):
    objectives = [{"metric": "k3_median", "direction": "minimize", "log": True}]
    search = toy_search(budget={"trials": 3}, confirm={"seeds": [5, 6], "margin": 1.1}, sampler={"name": "random"},
                        pruner={"alpha": 0}, objectives=objectives, constraint=None)  # fmt: skip
    runner = FakeRunner(lambda config: {"k3_median": 0.0 if config.seed == 5 else 0.1})
    run_search(search, tmp_path, 1, lambda event: None, runner=runner, afterwards=submit)
    text = write_tables(search, tmp_path)[0].read_text(encoding="utf-8")
    assert "Its k3_median against tis default is not confirmed." in text  # it is equal on both seeds
    assert "| tis default | 0 | 3.162e-151 [0, inf] |" in text


def test_a_share_without_a_baseline_is_compared_with_that_of_another(tmp_path):
    """Trial 0 of the second share has the number of the baseline, and is another."""
    default = {"tis default": {"correction": "tis", "algo.eps_low": 0.2, "algo.eps_high": 0.28, "cap": 2.0}}
    search = toy_search(budget={"trials": 4, "per": "correction"}, confirm={"seeds": [5, 6]},
                        sampler={"name": "random"}, pruner={"alpha": 0}, baselines=default)  # fmt: skip
    runner = FakeRunner(
        lambda config: {
            "auc": 0.7 + 0.002 * (config.seed - 5.5) * (config.seed > 4) if config.algo.mode == "bypass_ppo" else 0.5,
            "k3_median": 0.1 + 0.01 * config.seed,
        }
    )
    run_search(search, tmp_path, 1, lambda event: None, runner=runner, afterwards=submit)
    lines = write_tables(search, tmp_path)[0].read_text(encoding="utf-8").splitlines()
    said = next(line for line in lines if line.startswith("* ppo: "))
    assert said.endswith("+0.200 [+0.187, +0.213] against tis default: it is better. In the search it was +0.200.")


def test_the_lead_in_the_search_is_over_seeds_that_both_have(tmp_path):
    """The baseline diverges on the second of three seeds; its first had 0.5, where the best one's means are higher."""
    search = toy_search(budget={"trials": 3}, confirm={"seeds": [5]}, sampler={"name": "random"}, pruner={"alpha": 0})

    def scores(config) -> Any:
        if config.algo.eps_low == 0.2 and config.seed == 1:
            return {"status": "diverged"}
        return {"auc": (0.5 if config.algo.eps_low == 0.2 else 0.6) + 0.1 * config.seed, "k3_median": 0.1}

    run_search(search, tmp_path, 1, lambda event: None, runner=FakeRunner(scores))
    text = write_tables(search, tmp_path)[0].read_text(encoding="utf-8")
    assert "Its auc against tis default is not confirmed. In the search it was +0.100.\n" in text


def test_fresh_runs_that_did_not_end_well_are_named(tmp_path):
    """The best one diverges on one of three fresh seeds; the two that are left look good."""
    search = toy_search(budget={"trials": 4}, confirm={"seeds": [5, 6, 7]}, sampler={"name": "random"},
                        pruner={"alpha": 0})  # fmt: skip

    def scores(config) -> Any:
        is_default = config.algo.eps_low == 0.2
        if not is_default and config.seed == 6:
            return {"status": "diverged"}
        spread = 0.001 * (config.seed - 6) * (config.seed > 4)
        return {"auc": 0.5 if is_default else 0.6 + spread, "k3_median": 0.1}

    run_search(search, tmp_path, 1, lambda event: None, runner=FakeRunner(scores), afterwards=submit)
    lines = write_tables(search, tmp_path)[0].read_text(encoding="utf-8").splitlines()
    assert next(line for line in lines if line.startswith("* ")).endswith(
        "On 2 fresh seeds its auc is +0.100 [+0.087, +0.113] against tis default: it is better. In the search it was "
        "+0.100. 1 of 3 fresh runs of best did not end well."
    )
    assert next(line for line in lines if line.startswith("| best |")).endswith("| 2 of 3 |")


def test_trials_that_tie_for_the_best_are_counted(tmp_path):
    search = toy_search(budget={"trials": 4}, confirm={"seeds": [5]}, sampler={"name": "random"}, pruner={"alpha": 0})
    runner = FakeRunner(lambda config: {"auc": 0.5, "k3_median": 0.1})
    run_search(search, tmp_path, 1, lambda event: None, runner=runner)
    text = write_tables(search, tmp_path)[0].read_text(encoding="utf-8")
    said = "), one of 2 that tie. Its auc against tis default is not confirmed. In the search it was +0.000.\n"
    assert "* the best found is trial 2 (" in text and said in text


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


def test_few_trials_of_one_knob_have_neither_importance_nor_a_front(tmp_path):
    one = {"algo.eps_low": {"low": 0.05, "high": 0.8, "log": True}}
    overrides = [*SMALL, "precision=int4", "method=naive"]
    search = toy_search(overrides=overrides, space=one, baselines={}, budget={"trials": 3})
    run_search(search, tmp_path, 1, lambda event: None, runner=FakeRunner(smooth_scores))
    assert [path.stem for path in draw_search(search, tmp_path)] == ["history", "slice"]


def test_a_search_without_a_complete_trial_says_so(tmp_path):
    search = toy_search(budget={"trials": 3}, confirm={"seeds": [5]})
    run_search(search, tmp_path, 1, lambda event: None, runner=FakeRunner(lambda config: {"status": "diverged"}))
    assert {t.state for t in read_trials(search, tmp_path)[""]} == {TrialState.PRUNED}
    text = write_tables(search, tmp_path)[0].read_text(encoding="utf-8")
    assert "* none of 1 trials beside the baselines was complete" in text  # the other two are the baselines
    assert "3 because a cell diverged" in text
    assert draw_search(search, tmp_path) == []
