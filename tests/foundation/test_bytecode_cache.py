"""Byte code is kept where a package has none and nobody would write it, and only there."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.foundation import bytecode_cache

PROGRAM = """
import json, os, sys
from harness.foundation import bytecode_cache
folder = bytecode_cache.keep("json", "lacking")
import lacking
child = "import lacking, sys; print(lacking.__cached__, sys.dont_write_bytecode)"
import subprocess
said = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout
print(json.dumps([folder and str(folder), lacking.__cached__, said.split(), os.environ.get("PYTHONDONTWRITEBYTECODE")]))
"""


def told(tmp_path: Path, **environment: str) -> list[object]:
    (tmp_path / "site" / "lacking").mkdir(parents=True, exist_ok=True)
    (tmp_path / "site" / "lacking" / "__init__.py").write_text("X = 1\n")
    root = Path(__file__).parents[2]
    values = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    values |= {"PYTHONPATH": f"{tmp_path / 'site'}:{root}", "XDG_CACHE_HOME": str(tmp_path / "cache"), **environment}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=values, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_it_is_written_to_the_users_cache_and_read_by_children(tmp_path: Path) -> None:
    folder, cached, child, skip = told(tmp_path, PYTHONDONTWRITEBYTECODE="1")
    assert folder == str(tmp_path / "cache" / "lowbit" / "byte_code") and skip == ""
    assert isinstance(cached, str) and cached.startswith(str(folder)) and Path(cached).is_file()
    assert child == [cached, "False"]
    assert not (tmp_path / "site" / "lacking" / "__pycache__").exists()


@pytest.mark.parametrize("environment", [{}, {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": "elsewhere"}])
def test_where_python_writes_it_or_a_user_chose_a_place_nothing_changes(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    folder, _, _, skip = told(tmp_path, **environment)
    assert folder is None and skip == environment.get("PYTHONDONTWRITEBYTECODE")


def test_a_package_that_has_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    assert bytecode_cache.lacks_byte_code(spec) is not Path(importlib.util.cache_from_source(spec.origin)).exists()
    assert bytecode_cache.lacks_byte_code(None) is False
    assert bytecode_cache.keep("there_is_no_such_package") is None
