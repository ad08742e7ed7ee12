"""Who may import whom: the layers, the pure modules, the libraries with one door, and what an import may load."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.source_tree import ROOT, Source, imported, sources

LAYERS = (
    "harness harness.metric_names harness.nearest harness.seeds harness.clock harness.provenance harness.setup_env "
    "harness.byte_code harness.last_words",
    "harness.numerics",
    "harness.api",
    "harness.loss harness.advantage harness.metrics methods harness.numerics.adapter_fit"
    " harness.numerics.fake_quant harness.numerics.low_bit_forward"
    " harness.numerics.low_bit_start",
    "harness.run_config harness.config harness.models harness.tasks harness.results harness.stats harness.states",
    "harness.chosen harness.compose",
    "harness.base harness.base_training harness.base_documents harness.base_step harness.base_text"
    " harness.collect harness.colocation harness.engines harness.loop"
    " harness.prepare harness.run harness.trainers harness.record",
    "harness.cell",
    "harness.launchers harness.sweep harness.search harness.replay harness.arms harness.report harness.figures"
    " harness.panels harness.packed harness.forest"
    " harness.claims harness.curves harness.findings harness.leaderboard harness.tracking harness.cost harness.retry"
    " harness.break_even harness.early_warning harness.profiles harness.paper_figures harness.site harness.comparisons"
    " harness.throughput harness.parity harness.main_table harness.stage_rates harness.capacity",
    "harness.bench harness.cli harness.commands harness.arguments harness.faults",
)
"""Bottom to top. A module imports from its own layer and from those below; the longest prefix places a module."""
PURE = ("harness/numerics/", "harness/loss.py", "harness/advantage.py")
PURE_MAY = ("torch", "harness.api", "harness.nearest", "harness.numerics")
IMPURE_STDLIB = ("logging", "os", "random")
"""Logging, the environment and global randomness: a pure module gets what it needs as arguments."""
DOORS = {
    "vllm": (
        "harness/engines/vllm",
        "harness/throughput/",
        "harness/bench/vllm_engine",
        "harness/bench/sync",
        "harness/trainers/verl",
    ),
    "verl": ("harness/trainers/verl", "harness/bench/peer_verl"),
    "ray": ("harness/trainers/verl", "harness/launchers/ray"),
    "mlflow": ("harness/tracking",),
    "optuna": ("harness/search",),
    "hydra": ("harness/config.py", "harness/trainers/verl"),
    "omegaconf": ("harness/config.py", "harness/trainers/verl"),
    "peft": ("harness/models/adapters.py",),
    "yaml": ("harness/config.py",),
}
"""Library -> the path prefixes that may import it, anywhere in the file."""
HEAVY = ("mlflow", "pandas", "peft", "ray", "transformers", "verl", "vllm")


def layer(module: str) -> int | None:
    """The number of the module's layer, None where LAYERS does not place it. A package places what is in it."""
    placed = {name: number for number, names in enumerate(LAYERS) for name in names.split()}
    parts = module.split(".")
    prefixes = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    inside = [prefix for prefix in prefixes if prefix != "harness" or module == "harness"]
    return next((placed[prefix] for prefix in inside if prefix in placed), None)


def is_ours(module: str) -> bool:
    """Is the module one of this repository's packages?"""
    return module.split(".")[0] in ("harness", "methods")


def upward(source: Source) -> Iterator[str]:
    """Imports against the direction of the layers, and modules that no layer names."""
    own = layer(source.module)
    if own is None:
        yield f"{source.path}: {source.module} has no layer; place it in LAYERS of tests/test_imports.py"
        return
    for line, module in imported(source):
        theirs = layer(module)
        if is_ours(module) and (theirs is None or theirs > own):
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


@pytest.mark.parametrize("rule", [upward, impure, through_the_wall])
def test_imports_point_down(rule):
    found = [line for source in sources("harness", "methods") for line in rule(source)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (upward, "harness/numerics/x.py", "from harness.api import Plan"),
        (upward, "harness/api.py", "def f():\n    from harness import loss"),
        (upward, "methods/x.py", "from harness.config import parse"),
        (upward, "methods/x.py", "from harness.trainers.local import LocalTrainer"),
        (upward, "harness/engines/x.py", "import harness.sweep"),
        (upward, "harness/nowhere.py", ""),
        (impure, "harness/loss.py", "import numpy"),
        (impure, "harness/advantage.py", "import os"),
        (impure, "harness/numerics/x.py", "from harness.seeds import stable_seed"),
        (through_the_wall, "harness/loop.py", "def f():\n    import mlflow.tracking"),
        (through_the_wall, "methods/x.py", "from vllm import LLM"),
        (through_the_wall, "harness/sweep.py", "import yaml"),
    ],
)
def test_a_wrong_import_is_found(rule, path, text):
    assert list(rule(Source(path, text)))


def test_a_right_import_passes():
    fine = Source(
        "methods/x.py", "import math\nfrom harness import loss\nfrom harness.api import Part\nfrom . import bf16"
    )
    assert not [*upward(fine), *impure(fine), *through_the_wall(fine)]
    assert layer("harness.trainers.local") == layer("harness.loop")
    assert layer("harness") == 0


@pytest.mark.parametrize(
    "modules",
    ["methods", "harness.compose, harness.loop, harness.engines.embedded, harness.trainers.local, harness.cell"],
    ids=["methods", "training path"],
)
def test_import_loads_no_heavy_library(modules):
    code = f"import sys, {modules}; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
