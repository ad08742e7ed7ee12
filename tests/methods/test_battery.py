"""One battery over every method of the registry, and the registry itself."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import methods
from harness.api import Method, Part, Plan, knobs
from harness.config.compose import has_hook
from harness.config.load import parse
from harness.numerics.formats import format_named
from methods import METHODS, joined, method_named
from methods.naive import LOW_BIT

PRECISIONS = {f"{name}{suffix}" for name in (*LOW_BIT, "bf16", "fp16", "fp32") for suffix in ("", "+kv8")}
METHOD_NAMES = sorted(METHODS)


def own_loss(method: Method) -> bool:
    """True where a part replaces the objective."""
    return any(type(part).token_loss is not Part.token_loss for part in method.parts)


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_form(name: str) -> None:
    method = METHODS[name]
    assert method.name == name and method.summary and "\n" not in method.summary
    assert bool(method.claim) == bool(method.paper and not method.is_control) and "\n" not in method.claim
    assert method.precisions and set(method.precisions) <= PRECISIONS
    names = [type(part).__name__ for part in method.parts]
    assert len(set(names)) == len(names)
    assert sum(part.sets_weight for part in method.parts) <= 1
    assert sum(own_loss(replace(method, parts=(part,))) for part in method.parts) <= 1


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_idle_hooks_are_its_own_and_a_knob_idles_them(name: str) -> None:
    for part in METHODS[name].parts:
        own = {hook for hook in vars(Part) if callable(getattr(Part, hook)) and has_hook(part, hook)}
        assert part.idle(Plan(rollout_kv=format_named("e4m3_kv"))) <= own and set(part.idle_by) <= own
        for hook, words in part.idle_by.items():
            knob, _, value = words.partition("=")
            assert hook in replace(part, **{knob: None if value == "null" else value}).idle(
                Plan(rollout_kv=format_named("e4m3_kv"))
            )


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_parts_travel_and_survive_json(name: str) -> None:
    method = METHODS[name]
    assert pickle.loads(pickle.dumps(method)) == method
    for part in method.parts:
        assert parse(type(part), json.loads(json.dumps(knobs(part)))) == part


def test_plans() -> None:
    rollout = Plan(rollout_weights=format_named("fp16"), rollout_acts=format_named("fp16"))
    plans = {
        name: [part.plan(rollout) for part in METHODS[name].parts] for name in ("fp16", "zero_mismatch", "flashrl")
    }
    assert plans["fp16"] == [Plan(train_compute=format_named("fp16"))]
    assert plans["zero_mismatch"] == [Plan(sampler="trainer")]
    assert plans["flashrl"] == [Plan(), Plan()]


def test_controls() -> None:
    controls = {name for name, method in METHODS.items() if method.is_control}
    assert {"bf16", "naive", "zero_mismatch", "bf16_tis"} <= controls
    assert METHODS["bf16"].parts == METHODS["naive"].parts == ()
    assert METHODS["naive"].precisions == LOW_BIT and METHODS["bf16"].precisions == ("bf16", "fp32")
    assert METHODS["zero_mismatch"].precisions == ("fp32",) and METHODS["fp16"].precisions == ("fp16",)


def test_unknown_method_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"method=flash_rl: unknown; nearest: flashrl"):
        method_named("flash_rl")
    assert method_named("mis") is METHODS["mis"]


def test_a_file_that_the_list_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "OWN", {name: where for name, where in methods.OWN.items() if name != "icepop"})
    monkeypatch.setattr(methods, "entry_points", lambda group: ())  # else the names of the cached registry count
    with pytest.raises(
        ValueError, match=r"^method=icepop: methods/icepop\.py is there, but OWN of methods/__init__\.py lacks it$"
    ):
        methods.check_name("icepop")
    with pytest.raises(ValueError, match=r"^method=gptq_start: unknown; "):  # the file of another name
        methods.check_name("gptq_start")


def test_every_method_stands_where_the_list_says() -> None:
    found, broken = methods.own()
    assert [method.name for method in found] == list(methods.OWN) and broken == {}
    assert list(METHODS)[: len(methods.OWN)] == list(methods.OWN)


@pytest.mark.parametrize("where", ["icepop.METHOD", "verl_presets.METHODS"])
def test_a_name_in_the_list_that_is_not_the_methods_own_is_refused(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, attribute = where.partition(".")
    value = getattr(import_module(f"methods.{module}"), attribute)
    theirs = next(iter(value)) if isinstance(value, dict) else value.name
    monkeypatch.setattr(methods, "OWN", {"mine": where})
    found, broken = methods.own()
    assert found == []
    assert broken["mine"].startswith(f"OWN of methods: 'mine' is {where}, whose Method.name is {theirs}")


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("not_there.METHOD", "does not load: ModuleNotFoundError: No module named 'methods.not_there'"),
        ("icepop.NOTHING", "does not load: AttributeError: module 'methods.icepop' has no attribute 'NOTHING'"),
        ("naive.LOW_BIT", "is not a Method"),
    ],
)
def test_an_own_method_that_cannot_be_used_ends_only_what_asks_for_it(
    where: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(methods, "OWN", {"bf16": "bf16.METHOD", "mine": where})
    monkeypatch.setattr(methods, "registry", methods.registry.__wrapped__)  # not the one that other tests read
    assert method_named("bf16") is METHODS["bf16"] and "mine" not in methods.registry().methods
    assert methods.registry().broken["mine"] == f"OWN of methods: 'mine' is {where}, which {said}"
    with pytest.raises(ValueError, match=f"^method=mine: OWN of methods: 'mine' is {where}, which {said}$"):
        method_named("mine")


def test_entry_points_join_and_those_that_cannot_be_used_are_told() -> None:
    def offered(name: str, value: str) -> EntryPoint:
        return EntryPoint(name=name, value=value, group="lowbit.methods")

    entries = [
        offered("pop", "methods.icepop:METHOD"), offered("twice", "methods.bf16:METHOD"),
        offered("again", "methods.icepop:METHOD"), offered("lost", "methods.nothing_here:METHOD"),
        offered("list", "methods.naive:LOW_BIT"),
    ]  # fmt: skip
    found = joined([METHODS["bf16"]], entries)
    assert list(found.methods) == ["bf16", "icepop"] and list(found.entries) == ["icepop"]
    assert list(found.broken) == ["twice", "again", "lost", "list"]
    assert found.broken["twice"].endswith("offers bf16, which this package has")
    assert found.broken["again"].endswith("offers icepop, which methods.icepop:METHOD has")
    assert "does not load: ModuleNotFoundError: No module named" in found.broken["lost"]
    assert found.broken["list"].endswith("is not a Method")


def test_a_module_that_leaves_while_it_is_imported_ends_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit('bye')\n")
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    entry = EntryPoint(name="theirs", value="methods.leaves:METHOD", group="lowbit.methods")
    assert joined([], [entry]).broken["theirs"].endswith("does not load: SystemExit: bye")
    monkeypatch.setattr(methods, "OWN", {"mine": "leaves.METHOD"})
    assert methods.own()[1]["mine"].endswith("which does not load: SystemExit: bye")


def test_import_is_light() -> None:
    heavy = ("mlflow", "vllm", "ray", "verl", "pandas", "transformers")
    code = f"import sys; from methods import METHODS; print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
