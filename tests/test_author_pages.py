"""Authors' pages against the code: every name in docs/add-a-method.md and docs/from-python.md is there, and the files
that docs/sweeps.md shows are read."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

import harness.api
from harness.api import Part
from harness.studies.search.spec import read_search
from harness.sweep import plan, read_sweep
from methods import METHODS
from tests.source_tree import ROOT

METHOD_PAGE = (ROOT / "docs" / "add-a-method.md").read_text(encoding="utf-8")
PYTHON_PAGE = (ROOT / "docs" / "from-python.md").read_text(encoding="utf-8")
SCRIPT = ROOT / "examples" / "from_python.py"
HOOKS = {name for name in vars(Part) if callable(getattr(Part, name)) and not name.startswith("_")} - {"idle"}


def quoted(text: str) -> list[str]:
    """Words in backticks, without code blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))


def cells(text: str) -> list[list[str]]:
    """Cells of every row of the tables of a page."""
    rows = [line.strip().strip("|") for line in text.splitlines() if line.strip().startswith("|")]
    return [[cell.strip() for cell in row.split(" | ")] for row in rows]


def rows_of(column: int, columns: int) -> list[str]:
    """Words in backticks of one column of the page's tables of so many columns."""
    found = [row for row in cells(METHOD_PAGE) if len(row) == columns]
    return [word for row in found for word in quoted(row[column])]


def called(words: str) -> tuple[str, str, ast.Call]:
    """Module and function of a call in words, such as `a.b.f(x, y=1)`, and the call."""
    call = ast.parse(words, mode="eval").body
    assert isinstance(call, ast.Call), words
    module, _, function = ast.unparse(call.func).rpartition(".")
    return module, function, call


def test_the_files_of_the_page_on_sweeps_are_read_as_they_stand(tmp_path: Path) -> None:
    """A sweep of two lengths, three arms and two seeds; a search of two knobs."""
    page = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
    sweep, search = re.findall(r"```yaml\n(.*?)```", page, flags=re.S)
    for name, text in (("mine", sweep), ("search_mine", search)):
        (tmp_path / f"{name}.yaml").write_text(text)
    assert len(plan(read_sweep(str(tmp_path / "mine.yaml"))).cells) == 12
    found = read_search(str(tmp_path / "search_mine.yaml"))
    assert len(found.space) == len(found.objectives) == 2 and found.budget.trials == 12


def test_every_hook_of_a_part_has_a_row_and_every_row_a_hook() -> None:
    listed = {word for word in rows_of(1, 3) if "." not in word}
    assert listed == HOOKS - {"needs"} and "`needs`" in METHOD_PAGE


def test_files_that_the_page_names_are_there() -> None:
    files = {word for word in quoted(METHOD_PAGE) if re.fullmatch(r"[\w/]+\.py", word)}
    assert len(files) > 20
    for name in files - {"methods/<name>.py"}:
        assert any((ROOT / folder / name).is_file() for folder in ("", "methods")), name
    folders = {word for word in quoted(METHOD_PAGE) if word.startswith("examples/")}
    assert folders == {f"examples/{p.name}" for p in (ROOT / "examples").iterdir() if (p / "pyproject.toml").is_file()}


@pytest.mark.parametrize("name", sorted({w for w in quoted(METHOD_PAGE) if re.fullmatch(r"[A-Z]\w+\.\w+", w)}))
def test_fields_of_the_contract_that_the_page_names_are_there(name: str) -> None:
    owner, _, attribute = name.partition(".")
    found = getattr(harness.api, owner)
    assert attribute in {*inspect.get_annotations(found), *vars(found)}, name


def test_a_file_of_the_table_uses_its_hook() -> None:
    for row in (row for row in cells(METHOD_PAGE) if len(row) == 3 and row[2].endswith(".py`")):
        hooks = {word for word in quoted(row[1]) if word in HOOKS}
        for file in quoted(row[2]):
            source = (ROOT / "methods" / file).read_text(encoding="utf-8")
            imported = "".join(
                (ROOT / "methods" / f"{name}.py").read_text(encoding="utf-8")
                for name in re.findall(r"^from methods\.(\w+) import", source, flags=re.M)
            )
            assert any(f"def {hook}(" in source + imported for hook in hooks), (row[0], file)


def test_what_a_part_declares_is_there() -> None:
    for name in ("modes", "losses", "needs_updates", "needs_steps", "needs"):
        assert f"`{name}`" in METHOD_PAGE and hasattr(Part, name)
    assert "`Method.reconstructed`" in METHOD_PAGE and any(method.reconstructed for method in METHODS.values())
    for room in ("api", "numerics", "objective", "fitting"):
        assert f"`harness.{room}`" in METHOD_PAGE and import_module(f"harness.{room}")


def test_an_example_imports_what_a_method_may_import() -> None:
    allowed = ("harness.api", "harness.numerics", "harness.objective", "harness.fitting", "methods", "torch")
    files = sorted((ROOT / "examples").glob("*/lowbit_*.py"))
    assert len(files) == 3
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module not in ("__future__", "dataclasses", "typing"):
                assert (node.module or "").startswith(allowed), (file.name, node.module)


CALLS = [word for row in cells(PYTHON_PAGE) if len(row) == 2 for word in quoted(row[1])]


@pytest.mark.parametrize("words", CALLS)
def test_a_call_of_the_python_page_is_there_with_its_arguments(words: str) -> None:
    module, function, call = called(words)
    if not module:  # a second function of the row: that of the module before
        module = called(CALLS[CALLS.index(words) - 1])[0]
    names = list(inspect.signature(getattr(import_module(module), function)).parameters)
    assert len(call.args) <= len(names)
    given = [(ast.unparse(value), name) for value, name in zip(call.args, names, strict=False)]
    shown = [(value, name) for value, name in given if value.isidentifier() and value in names]
    assert all(value == name for value, name in shown), words
    assert {keyword.arg for keyword in call.keywords} <= set(names), words


def test_the_script_uses_every_call_of_the_page() -> None:
    functions = {called(words)[1] for words in CALLS}
    assert {"load", "resolve", "run_cell", "read_results", "read_series", "leaderboard", "contrasts", "plan",
            "run_sweep"} <= functions  # fmt: skip
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    used = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert functions - used == {"run_id", "runs_of", "series_of"}  # the two of the script on the page
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    listed = {called(words)[0] for words in CALLS} - {""}
    assert modules - {"pathlib"} == listed - {"harness.records.folder"}


def test_the_script_with_pandas_prints_the_number_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PYTHON_PAGE, flags=re.S)
    (tmp_path / "results").symlink_to(ROOT / "results")
    monkeypatch.chdir(tmp_path)
    exec(script, {})
    plt.close("all")  # of the page's figure, which other tests of this process would find open
    said = capsys.readouterr().out
    assert said == "INT8 -0.030 on 23 bases\n" and f"`{said.strip()}`" in PYTHON_PAGE
    assert (tmp_path / "k3.png").stat().st_size > 10_000
