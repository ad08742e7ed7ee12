"""Rules of imports: the order of the rooms, circles, pure modules, libraries with one door, heavy imports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

import pytest

from harness.devtools.room_map import ROOMS
from tests.source_tree import ROOT, Source, imported, sources

PURE = ("harness/numerics/", "harness/objective/")
PURE_MAY = ("torch", "harness.api", "harness.foundation.did_you_mean", "harness.numerics", "harness.objective")
IMPURE_STDLIB = ("logging", "os", "random")
"""Logging, the environment and global randomness: a pure module gets what it needs as arguments."""
DOORS = {
    "vllm": (
        "harness/kernels/fp8_flow.py",
        "harness/engines/vllm",
        "harness/studies/throughput/",
        "harness/devtools/bench/vllm_engine",
        "harness/trainers/verl",
    ),
    "verl": ("harness/trainers/verl", "harness/devtools/bench/peer_verl"),
    "ray": ("harness/trainers/verl", "harness/sweep/launchers/ray"),
    "mkdocs": ("harness/cli/docs_site/docs_pages.py",),
    "mlflow": ("harness/viewers/mlflow",),
    "optuna": ("harness/studies/search",),
    "hydra": ("harness/config/load.py", "harness/trainers/verl"),
    "omegaconf": ("harness/config/load.py", "harness/trainers/verl"),
    "peft": ("harness/models/adapters.py",),
    "yaml": ("harness/config/load.py",),
}
"""Library -> the path prefixes that may import it, anywhere in the file."""
HEAVY = ("mlflow", "pandas", "peft", "ray", "transformers", "verl", "vllm")


def room(module: str) -> int | None:
    """The number of the module's room; -1 for the package `harness` itself, None where ROOMS has no such room."""
    top, *inside = module.split(".")
    if module == "harness":
        return -1
    name = top if top == "methods" else inside[0]
    return ROOMS.index(name) if name in ROOMS else None


def is_ours(module: str) -> bool:
    """Is the module one of this repository's packages?"""
    return module.split(".")[0] in ("harness", "methods")


def upward(source: Source) -> Iterator[str]:
    """Imports against the order of the rooms, and modules that are in no room."""
    own = room(source.module)
    if own is None:
        yield f"{source.path}: {source.module} has no room; ROOMS of harness/devtools/room_map.py lists them"
        return
    for line, module in imported(source):
        if is_ours(module) and ((theirs := room(module)) is None or theirs > own):
            yield f"{source.path}:{line}: imports {module}, which is not below {source.module}"


def impure(source: Source) -> Iterator[str]:
    """Imports of a pure module beyond torch, the standard library, the contract and the numerics."""
    for line, module in imported(source):
        top = module.split(".")[0]
        is_plain = top in sys.stdlib_module_names and top not in IMPURE_STDLIB
        allowed = is_plain or any(module == name or module.startswith(name + ".") for name in PURE_MAY)
        if source.path.startswith(PURE) and not allowed:
            yield f"{source.path}:{line}: a pure module imports {module}"


def through_the_wall(source: Source) -> Iterator[str]:
    """Imports of a library outside the files that are its door."""
    for line, module in imported(source):
        doors = DOORS.get(module.split(".")[0])
        if doors and not source.path.startswith(doors):
            yield f"{source.path}:{line}: imports {module}; only {' and '.join(doors)} may"


def circle(imports: Mapping[str, set[str]]) -> list[str]:
    """One circle of names, first and last the same; empty where there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def file_imports(found: tuple[Source, ...]) -> dict[str, set[str]]:
    """Module -> the modules of ours that it imports anywhere in its file."""
    return {s.module: {m for _, m in imported(s) if is_ours(m) and m != s.module} for s in found}


def folder_imports(found: tuple[Source, ...]) -> dict[str, set[str]]:
    """Folder -> the other folders whose files its files import."""
    places = {s.module: s.path.rpartition("/")[0] for s in found}
    graph: dict[str, set[str]] = {}
    for name, theirs in file_imports(found).items():
        graph.setdefault(places[name], set()).update(places[m] for m in theirs if m in places)
    return {folder: theirs - {folder} for folder, theirs in graph.items()}


@pytest.mark.parametrize("rule", [upward, impure, through_the_wall])
def test_imports_point_down(rule):
    found = [line for source in sources("harness", "methods") for line in rule(source)]
    assert not found, "\n" + "\n".join(found)


def test_no_file_is_in_a_circle():
    found = circle(file_imports(sources("harness", "methods")))
    assert not found, " -> ".join(found)


def test_a_circle_is_found():
    ring = (
        Source("harness/run/a.py", "from harness.run.b import f"),
        Source("harness/run/b.py", "def f():\n    import harness.run.a"),
    )
    assert set(circle(file_imports(ring))) == {"harness.run.a", "harness.run.b"}
    rooms = (
        Source("harness/run/a.py", "from harness.sweep.b import f"),
        Source("harness/sweep/b.py", ""),
        Source("harness/sweep/c.py", "from harness.run.a import g"),
    )
    assert not circle(file_imports(rooms))
    assert set(circle(folder_imports(rooms))) == {"harness/run", "harness/sweep"}


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (upward, "harness/numerics/x.py", "from harness.api import Plan"),
        (upward, "harness/api.py", "def f():\n    from harness.objective import loss"),
        (upward, "methods/x.py", "from harness.config.load import parse"),
        (upward, "methods/x.py", "from harness.trainers.local.trainer import LocalTrainer"),
        (upward, "harness/trainers/x.py", "import harness.run.loop"),
        (upward, "harness/engines/x.py", "import harness.sweep"),
        (upward, "harness/nowhere.py", ""),
        (impure, "harness/objective/loss.py", "import numpy"),
        (impure, "harness/objective/advantage.py", "import os"),
        (impure, "harness/numerics/x.py", "from harness.foundation.seeds import stable_seed"),
        (through_the_wall, "harness/run/loop.py", "def f():\n    import mlflow.tracking"),
        (through_the_wall, "methods/x.py", "from vllm import LLM"),
        (through_the_wall, "harness/sweep/x.py", "import yaml"),
    ],
)
def test_a_wrong_import_is_found(rule, path, text):
    assert list(rule(Source(path, text)))


def test_a_right_import_passes():
    fine = Source(
        "methods/x.py",
        "import math\nfrom harness.objective import loss\nfrom harness.api import Part\nfrom . import bf16",
    )
    assert not [*upward(fine), *impure(fine), *through_the_wall(fine)]
    assert room("harness.trainers.local.trainer") == room("harness.trainers.verl")
    assert room("harness") == -1


@pytest.mark.parametrize("modules", ["methods", "harness.run.cell"], ids=["methods", "training path"])
def test_import_loads_no_heavy_library(modules):
    code = f"import sys, {modules}; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
