"""Plans: cells from YAML, rules that leave out, impossible cells with their reason, and Hydra's own composition."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from omegaconf import OmegaConf

from harness.config import load as config
from harness.config.load import run_id
from harness.engines.vllm import settings
from harness.foundation.provenance import ROOT
from harness.records.sweep_file import Score
from harness.report.scores import SCORES
from harness.sweep import Planned, Sweep, check_possible, narrowed, plan, read_rule, read_sweep, sweep_names, with_seeds
from tests.sweep.tiny import TINY, sweep_of


def test_lists_and_axes_multiply_and_seeds_are_outermost() -> None:
    planned = plan(
        sweep_of(
            {"method": "bf16"},
            {"method": "naive", "precision": ["int8", "int4"]},
            seeds=(0, 1),
            **{"algo.eps_high": [0.2, 0.28]},
        )
    )
    cells = planned.cells
    assert len(cells) == 3 * 2 * 2
    assert [c.seed for c in cells] == [0] * 6 + [1] * 6
    assert all(c.base_seed == c.seed for c in cells)
    assert {(c.method, c.precision.name) for c in cells} == {("bf16", "bf16"), ("naive", "int8"), ("naive", "int4")}
    assert len({run_id(c) for c in cells}) == len(cells)


def test_bases_are_outermost_and_every_base_has_every_run_seed() -> None:
    """A control that names seeds of its own has them on every base; tied seeds stay what they were."""
    arms = ({"method": "bf16", "seeds": [0, 1, 2]}, {"method": "naive", "precision": ["int8", "int4"]})
    tied = replace(sweep_of(*arms), seeds=(0, 1))
    crossed = replace(tied, base_seeds=(5, 3))
    cells = plan(crossed).cells
    one_base = ["bf16", "naive", "naive", "bf16", "naive", "naive", "bf16"]
    assert [c.method for c in cells] == one_base * 2
    assert [(c.base_seed, c.seed) for c in cells] == [(b, s) for b in (5, 3) for s in (0, 0, 0, 1, 1, 1, 2)]
    assert len({run_id(c) for c in cells}) == len(cells) == 14
    assert [(c.base_seed, c.seed) for c in plan(tied).cells] == [(s, s) for s in (0, 0, 0, 1, 1, 1, 2)]
    plain = sweep_of({"method": "bf16"}, arms[1], seeds=(0, 1))
    assert plan(plain).cells == plan(tied).cells[:6]  # naming seeds moves no id
    assert [(c.method, c.base_seed, c.seed) for c in plan(with_seeds(crossed, (4,))).cells] == [
        (method, base, 4) for base in (5, 3) for method in ("bf16", "naive", "naive")
    ]


def test_an_arm_with_bases_of_its_own_runs_on_them_alone_behind_those_of_the_sweep() -> None:
    arms = ({"method": "bf16"}, {"method": "naive", "precision": "int8", "base_seeds": [3, 9], "seeds": [1]})
    sweep = replace(sweep_of(*arms), base_seeds=(5, 3))
    expected = [("bf16", 5, 0), ("bf16", 3, 0), ("naive", 3, 1), ("naive", 9, 1)]
    assert [(c.method, c.base_seed, c.seed) for c in plan(sweep).cells] == expected
    got = [(c.method, c.base_seed, c.seed) for c in plan(with_seeds(sweep, (4,))).cells]
    assert got == [(method, base, 4) for method, base, _ in expected], "--seeds leaves bases as they are"
    with pytest.raises(ValueError, match=r"^base_seeds=\[3, 9\] of an arm: valid where the sweep has base_seeds$"):
        plan(replace(sweep, base_seeds=()))


def test_a_rule_says_which_runs_of_a_base_it_leaves_out() -> None:
    sweep = replace(
        sweep_of({"method": "bf16"}, seeds=(0, 1)), base_seeds=(5, 3), exclude=({"seed": 1, "base_seed": 3},)
    )
    assert plan(sweep).excluded == (("method=bf16", "seed=1 base_seed=3, seeds b3-s1"),)
    assert plan(replace(sweep, exclude=({"method": "bf16"},))).excluded == (("method=bf16", "method=bf16"),)


def test_later_arms_run_once_every_seed_of_the_others_is_done() -> None:
    sweep = sweep_of({"method": "bf16"}, {"method": "naive", "precision": "int8"}, seeds=(0, 1))
    later = ({"method": "flashrl", "precision": "int8"}, {"method": "bf16"})
    sweep = replace(sweep, axes={"model": ["xs", "s"]}, later=later)
    cells = plan(sweep).cells
    assert [c.method for c in cells] == ["bf16", "naive"] * 4 + ["flashrl"] * 4
    assert [c.seed for c in cells] == [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1]
    assert [c.model.name for c in cells[-4:]] == ["xs", "s", "xs", "s"]
    assert {run_id(c) for c in cells[:8]} == {run_id(c) for c in plan(replace(sweep, later=())).cells}


def test_every_corrected_format_of_the_main_table_has_its_control() -> None:
    """Planned on any machine: what it lists can run on a GPU, and nothing of it is refused."""
    planned = plan(read_sweep("main_h200"))
    assert not planned.skipped and not planned.excluded
    assert {(c.engine.name, c.trainer.device) for c in planned.cells} == {("vllm", "cuda")}
    kinds = {(c.method, c.precision.name) for c in planned.cells}
    eight = {"flashrl", "qurl", "qerl", "jet_rl", "fp8_rl", "fp16", "qat_kd", "rilq"}
    assert {"bf16", "naive"} | eight <= {method for method, _ in kinds}
    corrected = {precision for method, precision in kinds if method in eight - {"fp16"}}
    assert corrected <= {precision for method, precision in kinds if method == "naive"}


def test_stale_arms_in_words_have_controls_of_their_age() -> None:
    stress = [c for c in plan(read_sweep("stress_wordmath")).cells if c.algo.num_minibatches == 1]
    ages = {(c.method, c.algo.staleness) for c in stress}
    assert {age for method, age in ages if method == "bf16"} == {0, 4, 16}
    assert {age for method, age in ages if method == "naive"} == {0, 4, 16}
    assert len({method for method, age in ages if age == 16}) == 8


@pytest.mark.parametrize(("name", "bases"), [("router", 5), ("router_wordmath", 3)])
def test_router_sweeps_have_every_rollout_with_and_without_replay(name: str, bases: int) -> None:
    planned = plan(read_sweep(name))
    assert not planned.skipped and {(c.engine.name, c.algo.num_minibatches) for c in planned.cells} == {("embedded", 4)}
    runs = Counter((c.method, c.precision.name, "Routing" in str(c.parts)) for c in planned.cells)
    for precision in ("fp8_block", "int8", "int4"):
        for method in ("naive", "router_replay", "flashrl", "rspo"):
            assert runs[method, precision, False] >= bases
        assert runs["flashrl", precision, True] >= bases
    assert runs["router_replay", "bf16", False] == runs["bf16", "bf16", False] == bases


def test_a_precision_that_all_cells_share_counts_and_a_method_alone_has_its_own() -> None:
    sweep = sweep_of({"method": ["naive", "qerl"]})
    assert [c.precision.name for c in plan(sweep).cells] == ["int8", "nvfp4"]
    shared = replace(sweep, overrides=(*TINY, "precision=nvfp4"))
    assert [c.precision.name for c in plan(shared).cells] == ["nvfp4", "nvfp4"]
    assert [c.precision.name for c in plan(sweep, ["precision=int4"]).cells] == ["int4", "int4"]
    assert [(c.method, c.precision.name) for c in plan(sweep, ["method=qerl"]).cells] == [("qerl", "nvfp4")]


def test_an_arm_takes_lists_and_mappings_as_yaml_has_them() -> None:
    asked = [{"task": "sort", "num": 4, "options": {"n": 4}, "greedy": True}]
    (cell,) = plan(sweep_of({"method": "bf16", "evaluations": [asked], "base.curriculum": [[2, 4]]})).cells
    (entry,) = cell.evaluations
    assert (entry.task, entry.num, entry.options, entry.greedy) == ("sort", 4, {"n": 4}, True)
    assert cell.base.curriculum == (2, 4)
    text = "[{task:sort,num:4,options:{n:4},greedy:true}]"
    assert plan(sweep_of({"method": "bf16", "evaluations": text, "base.curriculum": "[2,4]"})).cells == (cell,)


def test_impossible_cells_are_listed_with_the_reason() -> None:
    planned = plan(
        sweep_of({"method": "flashrl", "precision": "int4", "algo.mode": ["decoupled", "bypass_ppo"]}, seeds=(0, 1))
    )
    assert len(planned.cells) == 2
    ((words, reason),) = planned.skipped
    assert "bypass_ppo" in words
    assert "TIS" in reason
    assert [(cell.algo.mode, cell.seed, cell.base_seed) for cell, _ in planned.impossible] == [
        ("bypass_ppo", 0, 0),
        ("bypass_ppo", 1, 1),
    ]


@pytest.mark.parametrize(
    ("arm", "said"),
    [
        ({"knobs.TIS.cup": 3}, "arm method=flashrl precision=int8 knobs.TIS.cup=3: knobs.TIS.cup: unknown knob; near"),
        ({"knobs.TIS.cap": [2, -1]}, "arm method=flashrl precision=int8 knobs.TIS.cap=-1: knobs.TIS.cap: -1.0 is not"),
        ({"knobs.TIZ.cap": 3}, "knobs.TIZ: method=flashrl has no such part; nearest: TIS"),
        ({"knobs.MIS.low": 0.5}, "arm .* knobs.MIS.low=0.5: knobs.MIS: method=flashrl has no such part; it is in fp8_"),
        ({"parts": "[flashrl.TIZ]"}, "parts: unknown part flashrl.TIZ; nearest: flashrl.TIS"),
        ({"precision": "int5"}, "arm method=flashrl precision=int5: precision=int5: no such choice; nearest: int"),
        ({"algo.lr": 3}, "arm .* algo.lr=3: unknown key algo.lr; nearest: trainer.lr"),
        (
            {"model": "hf", "model.path": "folder", "base.n": 9},
            "^test: arm method=flashrl precision=int8 model=hf model.path=folder base.n=9: base.n=9: no base is "
            "trained here, the model is the folder; leave it out$",
        ),
        ({"task.n": 100000}, "arm .* task.n=100000: task 'chain': n=100000 is not an integer from"),
    ],
)
def test_a_mistake_in_one_arm_is_no_impossible_cell(arm: dict[str, object], said: str) -> None:
    sweep = sweep_of({"method": "bf16"}, {"method": "flashrl", "precision": "int8"} | arm)
    with pytest.raises(ValueError, match=said) as caught:
        plan(sweep)
    assert "\n" not in str(caught.value)


def test_a_mistake_in_the_overrides_is_one_and_a_knob_that_some_arms_lack_is_none(tmp_path: Path) -> None:
    sweep = sweep_of({"method": ["bf16", "flashrl"]})
    with pytest.raises(ValueError, match=r"arm method=bf16: knobs\.TIZ: method=bf16 has no such part; nearest: TIS"):
        plan(sweep, ["knobs.TIZ.cap=4"])
    planned = plan(sweep, ["knobs.TIS.cap=4"])
    assert [c.method for c in planned.cells] == ["flashrl"] and len(planned.skipped) == 1
    assert len(plan(sweep_of({"method": ["bf16", "flashrl"], "knobs.TIS.cap": 4})).cells) == 1
    (tmp_path / "bad.yaml").write_text("question: q\noverrides: [algo.lr=3]\narms: [{method: bf16}]\nseeds: [0]\n")
    with pytest.raises(ValueError, match=r"bad\.yaml: unknown key algo\.lr; nearest: trainer\.lr"):
        read_sweep(str(tmp_path / "bad.yaml"))
    (tmp_path / "bad.yaml").write_text("question: q\narms: [{method: bf16}]\nsedes: [0]\n")
    with pytest.raises(ValueError, match=r"bad\.yaml: unknown key sedes; nearest: seeds"):
        read_sweep(str(tmp_path / "bad.yaml"))
    (tmp_path / "bad.yaml").write_text("question: q\narms: [{method: bf16}]\n")
    with pytest.raises(ValueError, match=r"bad\.yaml: seeds is missing"):
        read_sweep(str(tmp_path / "bad.yaml"))


def test_a_sweep_without_a_possible_cell_says_why() -> None:
    bad = plan(sweep_of({"method": "bf16", "precision": ["int4", "int8"]}, {"method": "fp16", "precision": "int4"}))
    with pytest.raises(
        ValueError, match=r"^test: no cell can run, every arm is impossible: arm method=bf16 precis"
    ) as e:
        check_possible(bad)
    assert str(e.value).count("arm method=") == 3 and "fp16" in str(e.value)
    one = plan(sweep_of({"method": ["bf16", "naive"], "precision": "int4"}), ["algo.num_minibatches=1000"])
    with pytest.raises(ValueError, match=r"algo\.num_minibatches=1000: must be 1 to num_prompts") as e:
        check_possible(one)
    assert str(e.value).count("arm method=") == 2  # one for each reason
    out = plan(replace(sweep_of({"method": "bf16"}), exclude=({"method": "bf16"},)))
    with pytest.raises(
        ValueError, match=r"^test: no cell can run, every arm is excluded: arm method=bf16: method=bf16$"
    ):
        check_possible(out)
    check_possible(plan(sweep_of({"method": "bf16"})))


def test_a_sweep_takes_no_seed_as_an_override() -> None:
    whole = sweep_of({"method": "bf16"})
    with pytest.raises(ValueError, match=r"^seed=7: .* seeds: \[7\] in the sweep's file, or lowbit sweep --seeds 7$"):
        plan(whole, ["seed=7"])
    with pytest.raises(ValueError, match=r"^base_seed=7: a sweep .* valid: base_seeds: \[7\] in the sweep's file$"):
        plan(whole, ["base_seed=7"])
    for wrong in (
        replace(whole, overrides=(*whole.overrides, "seed=1")), replace(whole, axes={"seed": [0, 1]}),
        replace(whole, arms=({"method": "bf16", "seed": 1},)), replace(whole, later=({"method": "fp16", "seed": 1},)),
        replace(whole, include=({"method": "fp16", "seed": 1},)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^seed.*: a sweep gives every run its seeds; valid: seeds: "):
            plan(wrong)


def test_a_plan_is_narrowed_to_the_cells_that_agree_with_all_words() -> None:
    arms = ({"method": "bf16"}, {"method": ["naive", "flashrl"], "precision": ["int8", "int4"]})
    axes: dict[str, list[object]] = {"model": ["xs", "s"], "trainer.lr": [1e-4, 3e-4]}
    whole = plan(Sweep(name="test", question="", overrides=TINY[1:], arms=arms, seeds=(0, 1, 2), axes=axes))
    for words, count in (
        (("precision=int8",), 2 * 2 * 2 * 3), (("method=naive,bf16", "seed=0,2"), 3 * 2 * 2 * 2),
        (("trainer.lr=3e-4", "model=xs", "method=flashrl", "precision=int4", "base_seed=1"), 1),
    ):  # fmt: skip
        found = narrowed(whole, read_rule(words, "where"))
        assert len(found.cells) == count and set(map(run_id, found.cells)) < set(map(run_id, whole.cells))
    assert {c.trainer.lr for c in found.cells} == {3e-4} and {c.seed for c in found.cells} == {1}
    for words, said in (
        (("model=m",), "where: no cell of test has model=m; valid model: xs, s$"),
        (("method=bf16", "precision=int4"), "no cell of test has method=bf16 precision=int4; each alone agrees with"),
        (("modl=s",), "where: unknown key modl; nearest: mod"), (("method=nave",), "where: method=nave: unknown; nea"),
        (("method",), "where=method: KEY=VALUE or KEY=VALUE,VALUE is expected"),
        (("seed=0", "seed=1"), "where=seed=1: seed stands there twice; either of two values: seed=VALUE,VALUE"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            narrowed(whole, read_rule(words, "where"))


def test_exclude_rules_leave_out_what_agrees_with_all_of_one() -> None:
    arms = ({"method": "bf16"}, {"method": "naive", "precision": ["int8", "int4"]})
    axes: dict[str, list[object]] = {"model": ["xs", "s"], "algo.eps_high": [0.2, 0.28]}
    sweep = Sweep(
        name="test", question="", overrides=TINY[1:], arms=arms, seeds=(0, 1), axes=axes,
        exclude=(
            {"precision": "int4", "model": "s"},
            {"method": "bf16", "seed": 1, "algo.eps_high": [0.2, 0.5]},
            {"method": "naive", "trainer.steps": 99},
        ),
    )  # fmt: skip
    planned = plan(sweep)
    assert len(planned.cells) == 2 * 3 * 2 * 2 - 2 * 2 - 2
    assert not any(c.precision.name == "int4" and c.model.name == "s" for c in planned.cells)
    assert sum(c.method == "bf16" for c in planned.cells) == 6
    listed = dict(planned.excluded)
    assert listed["model=s algo.eps_high=0.2 method=naive precision=int4"] == "precision=int4 model=s"
    assert listed["model=xs algo.eps_high=0.2 method=bf16"] == "method=bf16 seed=1 algo.eps_high=0.2|0.5, seeds 1"
    assert len(listed) == 2 + 2
    assert planned.notes == (("exclude method=naive trainer.steps=99", "agrees with no cell"),)
    assert plan(sweep, ["model=xs"]).notes == ()
    plain = plan(replace(sweep, exclude=()))
    assert {run_id(c) for c in planned.cells} < {run_id(c) for c in plain.cells}
    assert plain.excluded == ()


def test_rules_see_resolved_knobs_lists_and_defaults() -> None:
    arms = (
        {"method": "flashrl", "precision": "int4", "knobs.TIS.cap": [2.0, 4.0]},
        {"method": "naive", "precision": ["int4", "int8+kv8"], "parts": ["[qurl.UAQ,flashrl.TIS]", "[flashrl.TIS]"]},
    )
    sweep = replace(
        sweep_of(*arms),
        exclude=({"knobs.TIS.cap": 4}, {"parts": "[qurl.UAQ,flashrl.TIS]"}, {"precision": "int8+kv8"}),
    )
    planned = plan(sweep)
    assert [(c.method, c.precision.name, c.parts) for c in planned.cells] == [
        ("flashrl", "int4", ()),
        ("naive", "int4", ("flashrl.TIS",)),
    ]


def test_an_impossible_arm_that_a_rule_leaves_out_is_excluded_and_an_included_arm_stays() -> None:
    arms = ({"method": "bf16"}, {"method": "flashrl", "precision": "int4", "algo.mode": "bypass_ppo"})
    sweep = replace(
        sweep_of(*arms, seeds=(0,), **{"task.n": [8, 9]}),
        exclude=({"algo.mode": "bypass_ppo"}, {"method": "bf16", "task.n": 9}),
        include=({"method": "bf16", "task.n": [9, 10]},),
    )
    planned = plan(sweep)
    assert planned.skipped == () and planned.impossible == ()
    assert len(planned.excluded) == 3
    assert [c.task.n for c in planned.cells] == [8, 9, 10]


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("{metod: bf16}", ["metod", "method"]),
        ("{precision: int5}", ["int5", "int4"]),
        ("{method: [bf16, naiv]}", ["naiv", "naive"]),
        ("{}", ["empty rule"]),
    ],
)
def test_a_bad_rule_is_one_line(tmp_path: Path, rule: str, words: list[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(f"question: q\narms: [{{method: bf16}}]\nseeds: [0]\nexclude: [{rule}]\n")
    with pytest.raises(ValueError) as caught:
        read_sweep(str(path))
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in ["bad.yaml", "exclude", *words]), str(caught.value)


def test_shipped_sweeps_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any machine, whatever engine is installed and whatever its processor can do."""
    monkeypatch.setattr(settings, "installed_build", lambda: pytest.fail("asked for what is installed here"))
    monkeypatch.setattr(settings, "cpu_flags", lambda: frozenset({"avx512f", "avx512_vnni"}))
    for name in sweep_names(ROOT / "sweeps"):
        sweep = read_sweep(name, ROOT / "sweeps")
        first = {key: values[:1] for key, values in sweep.axes.items()}
        planned = plan(replace(sweep, axes=first, seeds=sweep.seeds[:1], base_seeds=sweep.base_seeds[:1]))
        assert len(planned.cells) >= 3
        if name == "quick":
            assert (len(planned.cells), len(sweep.seeds)) == (8, 5)
        if name == "correction_modes":
            assert {cell.algo.mode for cell, _ in planned.impossible} == {"bypass_ppo"}
        else:
            assert planned.skipped == (), name


def test_cached_composition_is_hydras_own() -> None:
    """One arm of every sweep, and words of every kind: the same tree, key by key and type by type."""
    cases = [["precision=int8", "model=m", "model=l"], ["++knobs.TIS.cap=4", "algo.dual_clip=null", "trainer.steps=7"],
             ["trainer.betas=[0.5,0.75]", "task=sort", "task.n=9", "++task.options.a={b:1}"],
             ["parts=[qurl.UAQ,flashrl.TIS]", "seed=3", "algo=grpo", "algo.kl_coef=1e-3"]]  # fmt: skip
    for words in cases:
        ours, theirs = config._compose_cached(words), config._compose(words)  # pyright: ignore[reportPrivateUsage]
        assert ours is not None
        assert repr(OmegaConf.to_container(ours)) == repr(OmegaConf.to_container(theirs))
    for words in (["~algo.dual_clip"], ["+seed=1"], ["trainer.steps=1,2"], ["trainer.steps=many"]):
        assert config._compose_cached(words) is None  # pyright: ignore[reportPrivateUsage]


def test_a_plan_composes_once_per_set_of_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, ...]] = []
    compose = config._compose  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(config, "_compose", lambda words: calls.append(tuple(words)) or compose(words))
    arms = ({"method": "naive", "precision": ["mxfp4", "int2"], "algo.eps_high": [0.21, 0.22, 0.23, 0.24]},)
    assert len(plan(sweep_of(*arms, seeds=(0, 1, 2), **{"task.n": [8, 9]})).cells) == 48
    assert len(calls) == len(set(calls)) <= 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("question: q\narms: []\nseeds: [0]\ncolour: red\n", ["colour"]),
        ("question: q\nseeds: [0]\n", ["arms"]),
        ("question: q\narms: [{method: bf16}]\nseeds: [a]\n", ["seeds", "'a'"]),
        ("question: q\narms: [{method: bf16}]\nseeds: [0]\nbase_seeds: [-1]\n", ["base_seeds", "-1", "at least 0"]),
        ("question: q\narms: [{method: bf16, seeds: [a]}]\nseeds: [0]\n", ["seeds=['a'] of an arm", "such as [0, 1]"]),
        (
            "question: q\narms: [{method: bf16, base_seeds: []}]\nseeds: [0]\nbase_seeds: [1]\n",
            ["base_seeds=[] of an arm"],
        ),
        ("question: q\narms: [{method: bf16, seeds: 2}]\nseeds: [0]\n", ["seeds=2 of an arm: a list"]),
        ("question: [q\n", ["bad.yaml"]),
        (
            "question: q\narms: [{method: bf16}]\nseeds: [true]\n",
            ["bad.yaml", "seeds.0=true: a whole number is expected"],
        ),
        ("question: q\narms: [{method: bf16}]\nseeds: [0]\nname: ../up\n", ["bad.yaml", "name='../up'", "plain name"]),
        ("question: q\narms: [{method: bf16}]\nseeds: [0]\nname: ''\n", ["name=''", "plain name"]),
        ("question: q\narms: [{method: bf16}]\nseeds: [0]\ncontrol: nope\n", ["control: 'nope'", "nearest: opsm"]),
        ("question: q\narms: [{method: bf16}]\nseeds: [0]\nbaselines: [naiv]\n", ["baselines: 'naiv'", "naive"]),
        ("question: q\narms: [{method: []}]\nseeds: [0]\n", ["bad.yaml", "method=[]", "at least one value"]),
        ("question: q\narms: [{method: bf16}]\nseeds: [0]\naxes: {task.n: []}\n", ["task.n=[]", "at least one"]),
        ("question: q\narms: [{method: bf16}]\nseeds: [0]\nlater: [{task.n: []}]\n", ["task.n=[]", "at least one"]),
        ('question: q\narms: [{method: bf16}]\nseeds: [0]\nname: "a\\n"\n', ["name='a\\n'", "plain name"]),
        ("x: &a {b: *a}\n", ["bad.yaml", "contains itself"]),
        ("&a [*a]\n", ["bad.yaml", "contains itself"]),
        ("3\n", ["bad.yaml: a mapping of keys to values is expected"]),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        read_sweep(str(path))
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_every_base_of_a_sweep_is_checked_where_arms_share_a_task(tmp_path: Path) -> None:
    path = tmp_path / "bases.yaml"
    path.write_text("question: q\narms: [{method: bf16}, {method: bf16, base.average: 0.1}]\nseeds: [0]\n")
    with pytest.raises(ValueError, match=r"arm .*base.average=0.1: base.average=0.1: for tasks in words alone"):
        plan(read_sweep(str(path)))


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        ("score: aucc, low: naive int4, high: bf16 bf16", ["expectations.0.score='aucc'", "'auc'"]),
        ("score: auc, low: naive int5, high: bf16 bf16", ["expectations.0.low=naive int5", "nearest: naive int4"]),
        ("score: auc, low: naive int4, high: bf16", ["expectations.0.high=bf16", "nearest: bf16 bf16"]),
        (
            "score: auc, low: naive int4 bypass_pgg, high: bf16 bf16",
            [
                "expects: expectations.0.low=naive int4 bypass_pgg: no arm of the sweep, METHOD PRECISION with a "
                "variant where it has one; nearest: naive int4 bypass_ppo, naive int4; valid: naive int4, naive int4 "
                "bypass_ppo"
            ],
        ),
        (
            "score: auc, low: naive int4, high: bf16 bf16 bypass_ppo",
            ["0.high=bf16 bf16 bypass_ppo", "valid: bf16 bf16"],
        ),
    ],
)
def test_an_expectation_names_a_score_and_arms_of_its_sweep(tmp_path: Path, expected: str, words: list[str]) -> None:
    def planned(line: str, *extra: str) -> Planned:
        arms = "arms: [{method: bf16}, {method: naive, precision: int4, algo.mode: [decoupled, bypass_ppo]}]"
        path = tmp_path / "expects.yaml"
        path.write_text(f"question: q\n{arms}\nseeds: [0]\nexpectations: [{{text: t, {line}}}]\n")
        return plan(read_sweep(str(path)), extra)

    with pytest.raises(ValueError) as caught:
        planned(expected)
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words), str(caught.value)
    right = "score: auc, low: naive int4 bypass_ppo, high: bf16 bf16"
    assert len(planned(right).cells) == len(planned(right, "trainer.steps=3").cells) == 3
    for override in ("precision=int8", "algo.mode=bypass_pg"):
        assert planned(right, override).cells  # an override may rightly leave no such arm
    assert set(get_args(Score)) == set(SCORES)


@pytest.mark.parametrize("modes", ["[decoupled, bypass_ppo]", "[bypass_ppo, decoupled]"])
def test_an_expectation_names_arms_as_the_table_does_in_any_order_of_the_file(tmp_path: Path, modes: str) -> None:
    """Two modes are equally common: the default one needs no word."""
    path = tmp_path / "even.yaml"
    text = f"question: q\narms: [{{method: naive, precision: int4, algo.mode: {modes}}}]\nseeds: [0]\n"
    expected = "expectations: [{{text: t, score: auc, low: naive int4 bypass_ppo, high: {}}}]\n"
    path.write_text(text + expected.format("naive int4"))
    assert len(plan(read_sweep(str(path))).cells) == 2
    path.write_text(text + expected.format("naive int4 decoupled"))
    with pytest.raises(ValueError, match=r"high=naive int4 decoupled: .*naive int4 bypass_ppo"):
        plan(read_sweep(str(path)))


def test_a_file_with_the_name_of_a_shipped_sweep_must_say_that_it_means_it(tmp_path: Path) -> None:
    path, text = tmp_path / "corrections.yaml", "question: q\narms: [{method: bf16}]\nseeds: [0]\n"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"name is that of sweeps/corrections\.yaml, whose results it would join"):
        read_sweep(str(path))
    path.write_text(f"name: corrections\n{text}")
    assert read_sweep(str(path)).name == "corrections"


@pytest.mark.parametrize(("name", "command"), [("runs", "run"), ("paper_x", "paper"), ("search_x", "search")])
def test_a_sweep_has_no_name_that_another_command_fills(tmp_path: Path, name: str, command: str) -> None:
    text = "question: q\narms: [{method: bf16}]\nseeds: [0]\n"
    for path, own in ((tmp_path / "mine.yaml", f"name: {name}\n"), (tmp_path / f"{name}.yaml", "")):
        path.write_text(own + text)
        with pytest.raises(ValueError, match=rf"lowbit {command}\b"):
            read_sweep(str(path))


def test_an_unknown_sweep_lists_the_sweeps(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nearest: quick[^;]*; valid: ablate_aqn.*quick.*standard"):
        read_sweep("quik", ROOT / "sweeps")
    for i in range(50):
        (tmp_path / f"mine{i:02}.yaml").write_text("")
    (tmp_path / "search_mine.yaml").write_text("")
    with pytest.raises(ValueError, match=f"nearest: .*; valid: {', '.join(f'mine{i:02}' for i in range(50))}$"):
        read_sweep("mine", tmp_path)
    with pytest.raises(ValueError, match="lowbit search search_mine"):
        read_sweep("search_mine", tmp_path)
    with pytest.raises(ValueError, match=r"^'': a name of sweeps/ is expected, or a path to a .yaml file$"):
        read_sweep("")


def test_a_sweep_like_another_says_only_what_differs(tmp_path):
    (tmp_path / "one.yaml").write_text(
        "question: a?\noverrides: [model=xs, trainer.steps=3]\narms: [{method: bf16}]\nseeds: [0, 1]\n"
    )
    (tmp_path / "two.yaml").write_text("like: one\nquestion: b?\noverrides: [trainer.steps=5]\nseeds: [4]\n")
    one, two = read_sweep("one", tmp_path), read_sweep("two", tmp_path)
    assert (two.name, two.question, two.seeds, two.arms) == ("two", "b?", (4,), one.arms)
    assert two.overrides == ("model=xs", "trainer.steps=3", "trainer.steps=5")
    assert [cell.trainer.steps for cell in plan(two).cells] == [5]
    for text, said in (
        ("like: onne\n", "three.yaml: like=onne: neither beside it nor in sweeps/; nearest: one"),
        ("like: two\n", "like=two: is itself like another"),
        ("like: three\n", "like=three: is itself"),
        ("like: one\noverrides: 3\n", "overrides"),
    ):
        (tmp_path / "three.yaml").write_text(text)
        with pytest.raises(ValueError, match=said):
            read_sweep("three", tmp_path)
    (tmp_path / "four.yaml").write_text("like: quick\nseeds: [7]\n")
    four, quick = read_sweep(str(tmp_path / "four.yaml")), read_sweep("quick")
    assert (four.arms, four.overrides, four.seeds) == (quick.arms, quick.overrides, (7,))
