"""The committed map is what the tree gives, and every name in docs/architecture.md exists."""

from __future__ import annotations

import re
import sys

import pytest

from harness.devtools import room_map
from harness.devtools.room_map import BEGIN, END, GROUPS, ROOMS, Room, picture, read_rooms, table, with_table
from tests.source_tree import ROOT, scopes, sources
from tests.test_imports import file_imports, room

PAGE = ROOT / "docs" / "architecture.md"
WALKS = ("From a log-prob of the sampler to the loss", "From a method's name to a running cell",
         "A push of weights into vLLM")  # fmt: skip
STEP = re.compile(r"^(\d+)\. \[`([\w/.]+)`\]\(\.\./([\w/.]+)\) `([\w.]+)`: .+[.;]$")
NAMED = re.compile(r"\[`([\w/.]+\.py)`\]\(\.\./([\w/.]+)\)((?:,? `[\w.]+`)*)")


@pytest.fixture(scope="module")
def rooms() -> tuple[Room, ...]:
    return read_rooms()


def defined(path: str) -> set[str]:
    """Functions, classes and methods of a file of ours, by qualified name."""
    (source,) = [s for s in sources("harness", "methods") if s.path == path]
    return {scope.name for scope in scopes(source.tree)}


def section(title: str) -> list[str]:
    """Lines of one section of the page."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = lines.index(f"## {title}") + 1
    return lines[start : next((i for i in range(start, len(lines)) if lines[i].startswith("## ")), len(lines))]


def test_the_committed_picture_and_table_are_those_of_the_tree(rooms):
    hint = "run: python -m harness.devtools.room_map"
    assert (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8") == picture(rooms), hint
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page, rooms) == page, hint


def test_imports_are_those_of_the_import_test(rooms):
    """Two readers of the tree agree: this one's names, and the syntax trees of tests/test_imports.py."""
    wanted: dict[str, set[str]] = {name: set() for name in ROOMS}
    for module, theirs in file_imports(sources("harness", "methods")).items():
        own = room(module)
        if own is not None and own >= 0:
            numbers = {n for m in theirs if (n := room(m)) is not None and n >= 0}
            wanted[ROOMS[own]] |= {ROOMS[n] for n in numbers - {own}}
    assert {r.name: set(r.imports) for r in rooms} == wanted


def test_rooms_are_the_folders_and_all_in_one_group():
    inside = {p.parent.name for p in (ROOT / "harness").glob("*/__init__.py")} | {"api", "methods"}
    assert set(ROOMS) == inside
    groups = [Room(name=name, sentence="", packages=(), imports=()).group for name in ROOMS]
    assert list(dict.fromkeys(groups)) == list(GROUPS) and groups == sorted(groups, key=list(GROUPS).index)


@pytest.mark.parametrize("title", WALKS)
def test_every_step_of_a_walk_names_a_function_that_exists(title):
    steps = [line for line in section(title) if re.match(r"\d+\.", line)]
    assert len(steps) >= 10
    lost: list[str] = []
    for number, line in enumerate(steps, start=1):
        found = STEP.match(line)
        assert found and int(found[1]) == number and found[2] == found[3], line
        if not (ROOT / found[2]).is_file() or found[4] not in defined(found[2]):
            lost.append(f"{found[2]} has no {found[4]}")
    assert not lost, "\n".join(lost)


def test_every_file_and_name_of_the_page_exists():
    found = NAMED.findall(PAGE.read_text(encoding="utf-8"))
    assert len(found) > 40
    lost = [path for path, target, _ in found if path != target or not (ROOT / target).is_file()]
    named = [(path, name) for path, _, names in found for name in re.findall(r"`([\w.]+)`", names)]
    lost += [f"{path} has no {name}" for path, name in named if path not in lost and name not in defined(path)]
    assert not lost, "\n".join(lost)


def test_a_page_needs_one_place_for_the_table(rooms):
    assert with_table(f"a\n{BEGIN}\nold\n{END}\nb", rooms) == f"a\n{table(rooms)}\nb"
    for page in ("a", BEGIN, f"{END} {BEGIN}", f"{BEGIN} {BEGIN} {END}"):
        with pytest.raises(ValueError, match=r"architecture\.md needs one line"):
            with_table(page, rooms)


def test_an_import_moves_a_dot(rooms):
    """One room more in `imports` is one circle more; the room's own square stays."""
    a = Room(name="foundation", sentence="A < B.", packages=(), imports=())
    b = Room(name="numerics", sentence="B.", packages=("x",), imports=())
    c = Room(name="numerics", sentence="B.", packages=("x",), imports=("foundation",))
    full = rooms[2:]
    before, after = picture((a, b, *full)), picture((a, c, *full))
    assert after.count("<circle") == before.count("<circle") + 1
    assert "A &lt; B" in before and "B (x)" in before


def test_nothing_is_written_for_other_words_or_without_a_place_for_the_table(monkeypatch, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "architecture.md").write_text("no marks")
    monkeypatch.setattr(room_map, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["room_map", "--check"])
    with pytest.raises(SystemExit, match="2"):
        room_map.main()
    monkeypatch.setattr(sys, "argv", ["room_map"])
    with pytest.raises(ValueError, match="needs one line"):
        room_map.main()
    assert [path.name for path in (tmp_path / "docs").iterdir()] == ["architecture.md"]
