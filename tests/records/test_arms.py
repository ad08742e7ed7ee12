"""Arms: grouped by everything but seeds, labelled by what varies."""

from __future__ import annotations

import itertools

from harness.records.arms import arm_labels, arm_names, control_of, group_arms, rank
from harness.records.run_result import RunResult
from tests import result_factory as factory


def run(*args, seed: int = 0, **changes) -> RunResult:
    return factory.result(*args, seed=seed, **changes)[0]


def labels(*runs: RunResult) -> list[str]:
    found = arm_labels(runs)
    return [found[r.run_id] for r in runs]


def test_seeds_share_an_arm_and_nothing_else_is_written() -> None:
    runs = [run("naive", "int4", seed=seed) for seed in range(3)] + [run()]
    assert labels(*runs) == ["naive int4"] * 3 + ["bf16 bf16"]
    arms = group_arms(runs[::-1])
    assert [(arm.label, len(arm.runs)) for arm in arms] == [("bf16 bf16", 1), ("naive int4", 3)]
    assert [r.seed for r in arms[1].runs] == [0, 1, 2]
    assert arms[0].axes == {}


def test_what_the_run_id_leaves_out_parts_no_arm() -> None:
    """Records from before `engine.gpu_memory` was written stand in one arm with later ones."""
    before, after = run(), run(seed=1, engine={"name": "embedded", "gpu_memory": 0.5, "sleep": False})
    assert [len(arm.runs) for arm in group_arms([before, after])] == [2]


def test_a_base_of_another_recipe_is_another_base_of_the_arm_and_a_base_for_another_size_another_context() -> None:
    """Field by field: how a base was trained sets nothing apart, what it was trained for does."""
    base = {"target_accuracy": 0.4, "max_steps": 400}
    recipes = [
        run(seed=i, base=base | change) for i, change in enumerate(({}, {"max_steps": 9}, {"optimizer": "muon"}))
    ]
    (arm,) = group_arms(recipes)
    assert arm.label == "bf16 bf16" and [r.seed for r in arm.runs] == [0, 1, 2] and arm.axes == {}
    assert {name for name in arm.fields if name.startswith("base.")} == {"base.target_accuracy"}
    assert labels(recipes[0], run(base=base | {"n": 3})) == ["bf16 bf16", "bf16 bf16 base.n=3"]


def test_the_usual_setting_is_not_written_and_a_context_always_is() -> None:
    runs = [run(), run("naive", "int4"), run("naive", "int4", "bypass_ppo")]
    assert labels(*runs) == ["bf16 bf16", "naive int4", "naive int4 bypass_ppo"]
    wide = [run(task__n=n) for n in (8, 16)]
    assert labels(*wide) == ["bf16 bf16 n=8", "bf16 bf16 n=16"]


def test_parts_of_an_arms_own_are_always_written() -> None:
    """Also where they are the most common ones, or all that the method has in the sweep, but for a knob that tells."""
    own = ["flashrl.TIS", "qurl.UAQ"]
    assert labels(run("naive", "int8", parts=own)) == ["naive int8 flashrl.TIS+qurl.UAQ"]
    many = [run("naive", precision, parts=own) for precision in ("int8", "int4")]
    assert labels(run(), run("naive", "int8"), *many) == [
        "bf16 bf16", "naive int8", "naive int8 flashrl.TIS+qurl.UAQ", "naive int4 flashrl.TIS+qurl.UAQ"
    ]  # fmt: skip
    knobs = [run("naive", "int8", parts=own, knobs={"UAQ": {"s": s}}) for s in (1.5, 2.0)]
    assert labels(*knobs) == ["naive int8 flashrl.TIS+qurl.UAQ", "naive int8 UAQ.s=2"]


def test_a_field_that_some_settings_lack_is_written_wherever_it_is_there() -> None:
    """A record leaves out a sparse field at its default: the label of such a run cannot name it, however rare it is."""
    fresh = run(seed=1)
    old = [run(method, "int8", algo__staleness=16) for method in ("naive", "flashrl", "m2po")]
    runs = [fresh, run("naive", "int8"), *old, run("naive", "int8", algo__staleness=4)]
    assert "staleness" not in fresh.config["algo"]
    assert labels(*runs) == [
        "bf16 bf16", "naive int8", "naive int8 staleness 16", "flashrl int8 staleness 16", "m2po int8 staleness 16",
        "naive int8 staleness 4",
    ]  # fmt: skip


def test_settings_that_differ_between_methods_alone_are_written() -> None:
    """Single runs at other rates or lengths are no arm and control, though method and precision tell them apart."""
    at_other_rate = run("naive", "int8", trainer__lr=2e-4)
    assert labels(run(), at_other_rate) == ["bf16 bf16", "naive int8 lr=0.0002"]
    assert labels(run(), run("naive", "int8", task__n=16)) == ["bf16 bf16 n=8", "naive int8 n=16"]
    impossible = run("mis", "int8", "bypass_ppo", trainer__lr=None)  # a cell that was skipped was never resolved
    assert labels(run(), run("naive", "int8"), impossible) == ["bf16 bf16", "naive int8", "mis int8"]
    other_mode = run("flashrl", "int8", "bypass_pg")  # which goes with the method
    assert labels(run(), at_other_rate, other_mode) == ["bf16 bf16", "naive int8 lr=0.0002", "flashrl int8"]
    assert labels(run(), run("naive", "int8", trainer__lr=2e-4, trainer__warmup_steps=9)) == [
        "bf16 bf16", "naive int8 lr=0.0002",
    ]  # fmt: skip


def test_fields_that_follow_another_are_not_written() -> None:
    """The learning rate and the hidden size follow the model here, so the model's name says it all."""
    large = {"model": {"name": "m", "hidden_size": 128, "spread": 0.5, "path": None}, "trainer__lr": 2e-4}
    assert labels(run(), run(**large)) == ["bf16 bf16 s", "bf16 bf16 m"]
    rates = [run(trainer__lr=lr) for lr in (1e-4, 3e-4, 3e-4)]
    assert labels(rates[0], rates[1]) == ["bf16 bf16", "bf16 bf16 lr=0.0003"]
    assert labels(run(seed=1), *rates[:2]) == ["bf16 bf16 lr=0.0003", "bf16 bf16", "bf16 bf16 lr=0.0003"]


def test_labels_follow_from_the_settings_and_not_from_the_order_of_the_runs() -> None:
    """Two rates are equally common: that of BF16 rollouts, the lower one, is the usual one in any order."""
    coarse = [run("naive", "int4", trainer__lr=lr) for lr in (1e-4, 1e-3)]
    runs = [run(trainer__lr=1e-3), run("flashrl", "int4", trainer__lr=3e-4), *coarse, run(seed=3, trainer__lr=3e-4)]
    told = ["bf16 bf16 lr=0.001", "flashrl int4", "naive int4 lr=0.0001", "naive int4 lr=0.001", "bf16 bf16"]
    for order in itertools.permutations(range(len(runs))):
        assert labels(*(runs[i] for i in order)) == [told[i] for i in order]


def test_a_rate_that_goes_with_other_updates_is_written_beside_them() -> None:
    """No arm has one of the two alone, so either would tell them apart; what both are, a reader must see."""
    usual = [run(method, "int8") for method in ("naive", "flashrl", "mis")]
    both = [run(m, "int8", algo__num_minibatches=2, trainer__lr=2e-4) for m in ("naive", "flashrl")]
    assert labels(*usual, *both)[2:] == ["mis int8", "naive int8 2 minibatches lr=0.0002",
                                         "flashrl int8 2 minibatches lr=0.0002"]  # fmt: skip
    follows = run("acrl", "int8", algo__mode="bypass_ppo")  # a mode that goes with the method
    assert labels(*usual, follows)[3] == "acrl int8"


def test_a_method_at_its_own_settings_needs_no_word_however_rare_they_are() -> None:
    runs = [run("flashrl", "int4", seed=i, knobs={"TIS": {"cap": cap}}) for i, cap in enumerate((8.0, 8.0, 2.0, 4.0))]
    eight = "flashrl int4 TIS.cap=8"
    assert labels(*runs) == [eight, eight, "flashrl int4", "flashrl int4 TIS.cap=4"]


def test_knobs_are_written_where_they_vary_within_a_method() -> None:
    runs = [run("flashrl", "int4", knobs={"TIS": {"cap": cap}}) for cap in (2.0, 4.0)]
    assert labels(run(), run("naive", "int4"), *runs) == [
        "bf16 bf16",
        "naive int4",
        "flashrl int4",
        "flashrl int4 TIS.cap=4",
    ]
    plain = run("mis", "int4", knobs={"TIS": {"cap": 9.0}})  # the only one of its method, so the name says it
    assert labels(run(), plain, *runs)[1] == "mis int4"


def test_a_field_of_the_precision_is_written_where_it_is_unusual_for_that_precision() -> None:
    weights = {"bf16": "bf16", "int8": "int8_channel", "int4": "int4_g32"}
    runs = [run("naive", name, precision__weights=w) for name, w in weights.items()]
    runs += [run("rilq", "int4", precision__weights=w) for w in ("int4_g32", "int4_g128")]
    assert labels(*runs) == ["naive bf16", "naive int8", "naive int4", "rilq int4", "rilq int4 int4_g128"]


def test_paths_make_no_arm() -> None:
    a, b = run(model__path="a"), run(model__path="b", seed=1)
    assert len(group_arms([a, b])) == 1


def test_the_same_run_from_two_sweeps_counts_once() -> None:
    assert len(group_arms([run(), run(sweep="standard")])[0].runs) == 1


def test_arms_go_from_fine_to_coarse_within_a_context() -> None:
    runs = [run("naive", p, task__n=n) for n in (16, 8) for p in ("int2x", "int3", "int8+kv8", "int8", "nvfp4")]
    assert [(arm.axes["task.n"], arm.precision) for arm in group_arms(runs)] == [
        (n, p) for n in (8, 16) for p in ("int8", "int8+kv8", "nvfp4", "int3", "int2x")
    ]
    assert rank("bf16") < rank("int8") < rank("nvfp4_w4a4") < rank("int3") < rank("unheard_of")


def test_the_control_has_the_settings_of_the_arm_but_for_those_of_the_method() -> None:
    runs = [
        run(),
        run(algo__num_minibatches=4),
        run("naive", "int4", algo__num_minibatches=4),
        run("naive", "int4", "bypass_ppo"),
        run("naive", "int4", task__n=16),
        run("trm", "int4", algo__agg="seq-mean-token-sum"),
        run("mis", "int4", trainer__lr=5e-4),
    ]
    arms = {arm.label: arm for arm in group_arms(runs)}

    def control(label: str) -> str | None:
        found = control_of(arms[label], list(arms.values()), "bf16")
        return found and found.label

    assert control("naive int4 4 minibatches n=8") == "bf16 bf16 4 minibatches n=8"
    assert control("naive int4 bypass_ppo n=8") == "bf16 bf16 n=8"
    assert control("naive int4 n=16") is None
    assert control("trm int4 n=8") == "bf16 bf16 n=8", "the aggregation is the method's"
    assert control("mis int4 lr=0.0005 n=8") is None, "no control has its rate"


def test_lists_of_anything_are_axes() -> None:
    entry = {"task": "chain", "num": 8, "k": 3}
    assert labels(run(), run(seed=1, trainer__betas=[0.9, 0.95]), run(seed=2, evaluations=[entry])) == [
        "bf16 bf16", "bf16 bf16 trainer.betas=0.9+0.95", f"bf16 bf16 evaluations={entry}",
    ]  # fmt: skip


def test_names_of_planned_arms_are_those_of_the_arms_of_their_runs() -> None:
    runs = [factory.result(*arm, seed=s)[0] for arm in factory.QUICK for s in range(2)]
    runs += [factory.result("naive", "int4", task__n=16)[0]]  # another context has the same name
    expected = {f"{arm.method} {arm.precision} {arm.variant}".strip() for arm in group_arms(runs)}
    names = arm_names([run.config for run in runs])
    assert set(names) == expected and len(names) == len(expected)
    assert {"bf16 bf16", "naive int4", "naive int4 bypass_ppo"} <= expected
