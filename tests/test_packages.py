"""Every package says in its docstring what its modules are for: one line per module, `name.py   what it is for`."""

from __future__ import annotations

import ast
import re

import pytest

from tests.source_tree import ROOT, Source, sources

LINE = re.compile(r"^ *([a-z0-9_]+(?:\.py|/)) {2,}\S")
"""A module (`name.py`) or a package (`name/`) at the start of a line, and what it is for."""
ROOMS = "harness/__init__.py"
"""The parts of `harness` are the rooms, which `docs/architecture.md` lists by their own first lines."""


def listed(source: Source) -> list[str]:
    """Names that a package's docstring has a line for, in its order."""
    text = ast.get_docstring(source.tree, clean=False) or ""
    return [found[1] for line in text.splitlines() if (found := LINE.match(line))]


def held(folder: str) -> list[str]:
    """Modules and packages in a folder, by the names that a docstring uses."""
    inside = (ROOT / folder).iterdir()
    return sorted(
        path.name if path.suffix == ".py" else f"{path.name}/"
        for path in inside
        if (path.suffix == ".py" and path.name != "__init__.py") or (path.is_dir() and any(path.glob("*.py")))
    )


@pytest.mark.parametrize(
    "source",
    [s for s in sources("harness", "methods") if s.path.endswith("/__init__.py") and s.path != ROOMS],
    ids=lambda source: source.module,
)
def test_docstring_names_every_module_once(source):
    assert sorted(listed(source)) == held(source.path.removesuffix("/__init__.py"))


def test_every_folder_of_modules_is_a_package():
    """A folder without `__init__.py` says nothing, and an installation leaves it out."""
    folders = {source.path.rpartition("/")[0] for source in sources("harness", "methods")}
    assert not sorted(folder for folder in folders if not (ROOT / folder / "__init__.py").is_file())


def test_a_docstring_is_read_line_by_line():
    text = '"""Doc.\n\n    a.py   first\n    b/     second, with a.py\n    c.py\n    ../d/   linked\n"""'
    assert listed(Source("harness/x/__init__.py", text)) == ["a.py", "b/"]
