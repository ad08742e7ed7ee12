import json
import math

import pytest

from harness.config.load import run_id
from harness.foundation.provenance import ROOT
from harness.studies.search.space import cell_of, check_space, combinations, overrides_of, suggest
from harness.studies.search.spec import ACCURACIES, changes, check_search, identity, read_search
from harness.sweep import sweep_names
from tests.studies.search.search_toy import SPACE, toy_search


class Midway:
    """Suggests the middle of everything, and the first choice."""

    def suggest_float(self, name, low, high, *, step, log):
        return (low * high) ** 0.5 if log else (low + high) / 2

    def suggest_int(self, name, low, high, *, step, log):
        return (low + high) // 2

    def suggest_categorical(self, name, choices):
        return choices[0]


@pytest.mark.parametrize("name", sweep_names(ROOT / "sweeps", "search"))
def test_a_committed_search_can_start(name):
    search = read_search(name, ROOT / "sweeps")
    check_space(search)
    assert len(search.seeds) >= 3 and len(search.confirm.seeds) >= 5
    assert [o.metric for o in search.objectives][:2] == ["auc", "k3_median"]


def test_a_search_compares_with_defaults_or_tunes_every_arm_alike():
    """Searches of one method start from published settings; that of the rates holds BF16 and every correction."""
    of_methods = ["search_aqn", "search_aqn_words", "search_clip", "search_clip_words"]
    assert sweep_names(ROOT / "sweeps", "search") == [*of_methods, "search_rate"]
    for name in of_methods:
        search = read_search(name, ROOT / "sweeps")
        assert len(search.baselines) >= 2 and len(search.confirm.seeds) == 5
        assert search.budget.trials and search.budget.trials >= (24 if name.endswith("words") else 20)
    rate = read_search("search_rate", ROOT / "sweeps")
    shares = {name: [c for c in combinations(rate.space) if c["family"] == name] for name in rate.shares}
    assert {"bf16", "naive"} < set(shares) and {len(of_one) for of_one in shares.values()} == {5}
    assert rate.sampler.name == "grid" and rate.budget.trials == sum(map(len, shares.values())) == 50


@pytest.mark.parametrize("name", ["search_clip", "search_clip_words"])
def test_the_clip_search_gives_each_correction_its_share(name: str) -> None:
    clip = read_search(name, ROOT / "sweeps")
    assert clip.shares == ("tis", "tis_acr", "bypass_pg", "bypass_ppo")
    cells = {s: cell_of(overrides_of(clip, clip.baselines[f"{s} default"]), 0) for s in clip.shares}
    assert {s: c.algo.mode for s, c in cells.items()} == {
        "tis": "decoupled", "tis_acr": "decoupled", "bypass_pg": "bypass_pg", "bypass_ppo": "bypass_ppo",
    }  # fmt: skip
    assert cells["tis"].knobs["TIS"]["cap"] == cells["tis_acr"].knobs["ACR"]["cap"] == 2.0
    assert "TIS" not in cells["bypass_ppo"].knobs and all(c.algo.num_minibatches == 4 for c in cells.values())


BASELINE = {"correction": "tis", "algo.eps_low": 0.2, "algo.eps_high": 0.28, "cap": 2.0}


def test_knobs_become_overrides_and_a_cell():
    search = toy_search()
    values = suggest(Midway(), search.space, {})
    assert values == {"correction": "tis", "algo.eps_low": 0.2, "algo.eps_high": 0.2, "cap": 2.828}
    words = overrides_of(search, values)
    assert words[-4:] == ["method=flashrl", "knobs.TIS.cap=2.828", "algo.eps_low=0.2", "algo.eps_high=0.2"]
    cell = cell_of(words, 3)
    assert (cell.seed, cell.base_seed, cell.knobs["TIS"]["cap"], cell.algo.eps_low) == (3, 3, 2.828, 0.2)
    assert run_id(cell) == run_id(cell_of(words, 3)) != run_id(cell_of(words, 4))


def test_the_margin_is_that_of_an_accuracy_or_the_given_one():
    objectives = [{"metric": "k3_median", "direction": "minimize"}]
    named = toy_search(objectives=objectives, confirm={"seeds": [7], "margin": 0.002})
    check_search(named)
    check_search(toy_search(objectives=objectives))  # nothing is confirmed, so nothing is judged
    assert (named.margin, toy_search(confirm={"seeds": [7]}).margin) == (0.002, 0.03)
    factor = toy_search(objectives=[objectives[0] | {"log": True}], confirm={"seeds": [7], "margin": 1.1})
    check_search(factor)
    assert factor.margin == math.log(1.1)
    assert ACCURACIES == (
        "base_accuracy", "auc", "final_accuracy", "base_accuracy_rollout", "auc_rollout", "final_accuracy_rollout",
        "reward_accuracy_last",
    )  # fmt: skip


def test_a_conditional_knob_is_there_only_where_it_exists():
    search = toy_search()
    values = suggest(Midway(), search.space, {"correction": "ppo"})
    assert "cap" not in values and not any("cap" in word for word in overrides_of(search, values))
    assert [c["correction"] for c in combinations(search.space)] == ["tis", "ppo"]
    with pytest.raises(ValueError, match=r"\{cap\}, which does not exist beside correction=tis"):
        overrides_of(search, {"correction": "tis", "algo.eps_low": 0.2})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"objectives": [{"metric": "aucc", "direction": "maximize"}]}, "unknown metric aucc; nearest: auc"),
        ({"budget": {}}, "budget: at least one of trials, cells and core_seconds"),
        ({"budget": {"trials": 4, "per": "cap"}}, "budget.per=cap: not an unconditional knob with choices"),
        ({"confirm": {"seeds": [2, 7]}}, r"confirm.seeds=\[2\]: seeds of the search are not fresh"),
        (
            {"objectives": [{"metric": "time_s", "direction": "minimize"}], "confirm": {"seeds": [7]}},
            "confirm.margin=null: time_s is no accuracy, for which 0.03 is taken; give the difference in time_s below "
            "which two settings are equal$",
        ),
        ({"confirm": {"seeds": [7], "margin": 0.0}}, "confirm.margin=0.0: above 0 and finite"),
        (
            {"objectives": [{"metric": "auc", "direction": "maximize", "log": True}], "confirm": {"seeds": [7]}},
            "confirm.margin=null: logarithms of auc are compared; give the factor, above 1 and finite, below which two "
            "settings are equal$",
        ),
        (
            {"objectives": [{"metric": "time_s", "direction": "minimize", "log": True}], "confirm": {"margin": 0.5}},
            "confirm.margin=0.5: logarithms of time_s are compared; give the factor",
        ),
        ({"seeds": [0, 1, 0]}, r"seeds=\[0, 1, 0\]: the same seed twice$"),
        ({"confirm": {"seeds": [7, 7]}}, r"confirm.seeds=\[7, 7\]: the same seed twice$"),
        ({"pruner": {"alpha": 1.5}}, "pruner.alpha=1.5: must be below 1$"),
        ({"pruner": {"collapse_alpha": -0.1}}, "pruner.collapse_alpha=-0.1: must be at least 0$"),
        ({"pruner": {"reward_quantile": 1.0}}, "pruner.reward_quantile=1.0: must be below 1$"),
        ({"sampler": {"startup": -1}}, "sampler.startup=-1: must be at least 0$"),
        (
            {"objectives": [{"metric": "auc", "direction": "maximize", "resolution": -1}]},
            "objectives.0.resolution=-1: must be at least 0$",
        ),
        (
            {"references": {"tis default": ["method=naive"]}},
            "references.tis default: the best of a share or a baseline is called so; give another name$",
        ),
        ({"references": {"best": ["method=naive"]}}, "references.best: the best of a share or a baseline is called so"),
        (
            {"baselines": {"best tis": BASELINE}, "budget": {"trials": 4, "per": "correction"}},
            "baselines.best tis: the best of a share or a baseline is called so; give another name$",
        ),
        (
            {"space": SPACE | {"x": {"choices": [1, 2], "low": 1}}},
            "space.x.low=1: of a range, and does not go with choices$",
        ),
        (
            {"space": SPACE | {"x": {"choices": [1, 2], "log": True}}},
            "space.x.log=True: of a range, and does not go with choices$",
        ),
        (
            {"space": SPACE | {"x": {"low": 1, "high": 4, "step": 0.5}}},
            "space.x.step=0.5: a range of whole numbers; write low=1.0 for others$",
        ),
        (
            {"space": SPACE | {"x": {"low": 1, "high": 4}}, "baselines": {"a": BASELINE | {"x": 2.5}}},
            "baselines.a.x=2.5: the range is of whole numbers$",
        ),
        ({"space": SPACE | {"x": {"low": "a", "high": 2}}}, "space.x.low='a': a number is expected"),
        ({"space": SPACE | {"x": {"low": 1}}}, "space.x: either choices, or low and high"),
        ({"space": SPACE | {"x": {"low": 2, "high": 1}}}, "space.x: low=2 is not below high=1"),
        ({"space": SPACE | {"x": {"low": 0, "high": 1, "log": True}}}, "space.x.low=0: a logarithmic range"),
        ({"space": SPACE | {"x": {"low": 0, "high": 1, "when": {"corection": ["tis"]}}}}, "corection is not a knob"),
        ({"space": SPACE | {"x": {"low": 0, "high": 1, "when": {"correction": ["tiss"]}}}}, "valid: .'tis', 'ppo'"),
        (
            {"baselines": {"a": {"correction": "ppo", "algo.eps_low": 0.2, "algo.eps_high": 0.2, "cap": 2}}},
            "cap d",
        ),
        ({"baselines": {"a": {"correction": "tis", "algo.eps_low": 0.2, "algo.eps_high": 0.2}}}, "cap is missing"),
        ({"baselines": {"a": {"correction": "ppo", "algo.eps_low": 9.0, "algo.eps_high": 0.2}}}, "outside 0.05 to 0.8"),
    ],
)
def test_what_cannot_be_searched_is_refused_by_name(changes, words):
    with pytest.raises(ValueError, match=words) as raised:
        check_search(toy_search(**changes))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"space": SPACE | {"kap": {"low": 0.0, "high": 1.0}}},
            r"space.kap: not an override key, and no override",
        ),
        (
            {"space": SPACE | {"algo.mode": {"choices": ["decoupled", "bypass_ppo"]}}},
            "correction=tis algo.mode=bypass_ppo cannot work: algo.mode=bypass_ppo: the ratio",
        ),
        (
            {"space": SPACE | {"knobs.TIS.cap": {"low": -1.0, "high": 8.0, "when": {"correction": ["tis"]}}}},
            r"correction=tis cannot work: .*TIS.cap: -1.0 is not a positive weight",
        ),
        ({"space": SPACE | {"trainer.min_lr_ratio": {"low": 0.0, "high": 3.0}}}, "trainer.min_lr_ratio=3.0: must be"),
        ({"references": {"odd": ["method=naiv"]}}, "reference odd cannot work: .*naive"),
        (
            {"references": {"odd": ["method=naive", "seed=3"]}},
            "reference odd cannot work: seed=3: a search seeds base and run together; valid: seeds of its file",
        ),
    ],
)
def test_a_space_that_reaches_no_cell_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        check_space(toy_search(**changes))


def test_every_combination_is_checked_once_and_with_a_range_at_both_ends(monkeypatch):
    clip = {"algo.eps_low": {"choices": [0.2, 0.3]}, "algo.eps_high": {"choices": [0.3, 0.4, 0.5]}}
    checked = []
    monkeypatch.setattr("harness.studies.search.space.cell_of", lambda overrides, seed: checked.append(overrides))
    for space, number in ((clip, 6), (clip | {"trainer.min_lr_ratio": {"low": 0.0, "high": 1.0}}, 12)):
        checked.clear()
        check_space(toy_search(space=space, baselines={}))
        assert len(checked) == len(set(map(str, checked))) == number


def test_a_name_that_is_no_search_lists_those_that_are(tmp_path):
    with pytest.raises(ValueError, match="search 'search_aqm' not found; nearest: search_aqn, search_rate"):
        read_search("search_aqm", ROOT / "sweeps")
    with pytest.raises(ValueError, match="quick is run by another command: lowbit sweep quick"):
        read_search("quick", ROOT / "sweeps")
    bad = tmp_path / "search_bad.yaml"
    bad.write_text("question: x\nspce: {}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"search_bad.yaml: .*(space|spce)"):
        read_search(str(bad))


def test_changes_name_every_key_once():
    one = json.loads(json.dumps(identity(toy_search())))
    assert changes(one, one) == []
    assert changes(one, json.loads(json.dumps(identity(toy_search(budget={"trials": 99}))))) == []
    space = {**SPACE, "cap": SPACE["cap"] | {"high": 16.0}}
    other = json.loads(json.dumps(identity(toy_search(space=space, seeds=[0, 1]))))
    assert changes(one, other) == [
        "seeds: [0, 1, 2] in the study, [0, 1] in the file",
        "space.cap.high: 8.0 in the study, 16.0 in the file",
    ]
