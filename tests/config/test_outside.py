"""An edited file of one's own in `methods` is another run; the methods that were there before keep their ids."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import methods
from harness.api import Method
from harness.config.load import load, run_id
from harness.config.outside import part_sources, source_hash, sources_of
from harness.config.resolve import resolve
from harness.sweep import plan, read_sweep
from methods import METHODS, OWN, RECORDED
from tests.source_tree import ROOT

FILE = """
from dataclasses import dataclass
from harness.api import Method, Part

@dataclass(frozen=True, kw_only=True)
class Mine(Part):
    cap: float = 2.0

METHOD = Method(name="mine_alone", parts=(Mine(),), precisions=("int4",))
"""


def test_an_edited_own_method_is_another_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "mine_alone.py"
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    monkeypatch.setitem(OWN, "mine_alone", "mine_alone.METHOD")
    monkeypatch.setattr(methods, "registry", methods.registry.__wrapped__)  # not the one that other tests read

    def found(text: str) -> tuple[tuple[str, ...], str]:
        """Sources and run id with this text in the file."""
        file.write_text(text)
        source_hash.cache_clear()
        config = resolve(load(["method=mine_alone", "precision=int4"]))
        return config.outside, run_id(config)

    (source,), first = found(FILE)
    assert source.startswith("methods.mine_alone ") and len(source.split()[1]) == 12
    (edited,), second = found(FILE + "# edited\n")
    assert edited != source and second != first
    assert found(FILE) == ((source,), first)
    taken = [*METHODS["flashrl"].parts, *methods.method_named("mine_alone").parts]
    assert sources_of(METHODS["flashrl"], taken) == (source,)  # a part of it in a method of ours
    del sys.modules["methods.mine_alone"]


@pytest.mark.parametrize(
    "line",
    [
        "from methods.cap_rule import CAP",
        "from methods import cap_rule",
        "import methods.cap_rule",
        "from . import cap_rule",
    ],
)
def test_a_file_that_an_own_method_imports_is_hashed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str
) -> None:
    (tmp_path / "imports_one.py").write_text(
        f"{line}\nfrom methods.flashrl import TIS\n{FILE.replace('mine_alone', 'imports_one')}"
    )
    (tmp_path / "cap_rule.py").write_text("import math\nimport methods.base_rule\nCAP = 2.0\n")
    (tmp_path / "base_rule.py").write_text("from methods.cap_rule import CAP\n")  # of a circle, each once
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    monkeypatch.setitem(OWN, "imports_one", "imports_one.METHOD")
    importlib.invalidate_caches()
    method = Method(name="imports_one", parts=(), precisions=("int4",))
    source_hash.cache_clear()
    before = sources_of(method, ())
    assert [said.split()[0] for said in before] == ["methods.base_rule", "methods.cap_rule", "methods.imports_one"]
    (tmp_path / "base_rule.py").write_text("CAP = 3.0\n")
    source_hash.cache_clear()
    after = sources_of(method, ())
    assert after[1:] == before[1:] and after[0] != before[0]


def test_methods_with_committed_records_are_not_hashed() -> None:
    recorded = [METHODS[name] for name, where in OWN.items() if where.partition(".")[0] in RECORDED]
    assert len(recorded) > 80 and {m.name for m in recorded if sources_of(m, m.parts)} == set()
    assert {path.stem for path in (ROOT / "methods").glob("*.py")} >= RECORDED


def test_the_sources_of_a_part_name_recorded_files_too() -> None:
    (refreshed,) = [part for part in METHODS["rilq_refresh"].parts if type(part).__module__ == "methods.rilq_refresh"]
    assert part_sources(refreshed) == tuple(
        f"methods.{name} {source_hash(f'methods.{name}')}" for name in ("flashrl", "naive", "rilq", "rilq_refresh")
    )


def test_the_committed_cells_of_the_quick_sweep_keep_their_ids() -> None:
    recorded = {path.stem for path in (ROOT / "results" / "runs").glob("*/*.json")}
    cells = plan(read_sweep("quick")).cells
    assert len(cells) == 40 and {run_id(cell) for cell in cells} <= recorded
