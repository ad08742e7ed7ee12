"""The map of the rooms: docs/architecture.svg and the table of docs/architecture.md, drawn from the source tree.

    python -m harness.devtools.room_map        writes both; a test compares the committed ones with the tree

A room is a folder of `harness/` (or the file `api.py`, or `methods/`). What is drawn of it is the first line of its
docstring, its own packages, and the rooms that its files import. Left out: imports between the files of one room.
"""

from __future__ import annotations

import argparse
import ast
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from harness.foundation.markdown_table import markdown_table
from harness.foundation.provenance import ROOT

ROOMS = (
    "foundation", "numerics", "kernels", "api", "fitting", "objective", "models", "tasks", "methods", "config",
    "records", "engines", "start", "trainers", "run", "sweep", "report", "studies", "published", "viewers",
    "devtools", "cli",
)  # fmt: skip
"""Bottom to top: a room imports from itself and from the rooms before it, one room to a layer."""
GROUPS = {
    "core": ("foundation", "report", "#3b6ea5"),
    "studies": ("studies", "viewers", "#4d8a55"),
    "developer tools": ("devtools", "devtools", "#a8763e"),
    "command line": ("cli", "cli", "#7a5a94"),
}
"""Group -> its first and last room, its colour."""
BEGIN, END = "<!-- rooms: written by harness.devtools.room_map -->", "<!-- end of rooms -->"
ROW, CELL, LEFT, NAME, WORDS, HEAD = 40, 20, 34, 104, 440, 86
"""Pixels: height of a row, side of a dot's cell, widths of group, name and words, height of the head."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """One room as the tree has it."""

    name: str
    sentence: str
    """First line of its docstring."""
    packages: tuple[str, ...]
    """Packages inside, by name."""
    imports: tuple[str, ...]
    """Rooms that its files import, anywhere in them, in the order of ROOMS."""

    @property
    def group(self) -> str:
        """Name of its group."""
        place = ROOMS.index(self.name)
        return next(
            group for group, (first, last, _) in GROUPS.items() if ROOMS.index(first) <= place <= ROOMS.index(last)
        )


def source_of(name: str) -> str:
    """File whose docstring describes a room, from the root of the repository."""
    return {"methods": "methods/__init__.py", "api": "harness/api.py"}.get(name, f"harness/{name}/__init__.py")


def read_rooms(root: Path = ROOT) -> tuple[Room, ...]:
    """Every room of ROOMS as it is in the tree below `root`, bottom to top."""
    return tuple(_read(name, root) for name in ROOMS)


def _read(name: str, root: Path) -> Room:
    source = root / source_of(name)
    folder = source.parent
    files = [source] if name == "api" else sorted(folder.rglob("*.py"))
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}
    said = ast.get_docstring(trees[source]) or ""
    found = {room for tree in trees.values() for module in _imported(tree) if (room := _room_of(module)) is not None}
    return Room(
        name=name,
        sentence=said.partition("\n")[0],
        imports=tuple(r for r in ROOMS if r in found and r != name),
        packages=() if name == "api" else tuple(sorted(p.parent.name for p in folder.glob("*/__init__.py"))),
    )


def _imported(tree: ast.Module) -> Iterator[str]:
    """Dotted names that a file imports: `from a import b` is a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _room_of(module: str) -> str | None:
    """The room of an imported name; None for other packages and for names of `harness` itself."""
    top, *inside = module.split(".")
    if top == "methods":
        return top
    return inside[0] if top == "harness" and inside and inside[0] in ROOMS else None


def picture(rooms: tuple[Room, ...]) -> str:
    """The rooms as SVG, the first at the bottom: name, sentence, and a dot in the column of every room it imports."""
    edge = LEFT + NAME + WORDS
    width, height = edge + CELL * len(rooms) + 12, HEAD + ROW * len(rooms) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, '
        'sans-serif" font-size="12">',
        "<title>Rooms of the harness, bottom to top, and which of them each imports</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    columns = {room.name: edge + CELL * i + CELL // 2 for i, room in enumerate(rooms)}
    tops = {room.name: HEAD + ROW * (len(rooms) - 1 - i) for i, room in enumerate(rooms)}
    for group, (first, last, colour) in GROUPS.items():
        top, bottom = tops[last], tops[first] + ROW
        middle = (top + bottom) // 2
        parts.append(f'<rect x="2" y="{top + 1}" width="{LEFT - 8}" height="{bottom - top - 2}" fill="{colour}"/>')
        if bottom - top > 2 * ROW:
            parts.append(
                f'<text transform="translate({LEFT // 2 + 2} {middle}) rotate(-90)" text-anchor="middle" '
                f'fill="#ffffff" font-weight="bold">{group}</text>'
            )
    for room in rooms:
        parts += _row(room, tops[room.name], columns, width)
    parts += [
        f'<text transform="translate({x + 4} {HEAD - 6}) rotate(-60)" fill="#333333">{name}</text>'
        for name, x in columns.items()
    ]
    parts.append(
        f'<text x="{LEFT}" y="{height - 10}" fill="#333333">Dot: the room of the row imports the room of the column. '
        "Every dot lies left of the row's own square: imports point down. Orange: developer tools; "
        "violet: command line.</text>"
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _row(room: Room, top: int, columns: dict[str, int], width: int) -> Iterator[str]:
    """One room: a line above it, its words, its dots and its own square."""
    colour, middle, edge = GROUPS[room.group][2], top + ROW // 2, LEFT + NAME
    yield f'<path d="M{LEFT} {top}H{width - 8}" stroke="#dddddd"/>'
    yield f'<text x="{LEFT + 4}" y="{middle + 4}" font-weight="bold" font-size="14" fill="{colour}">{room.name}</text>'
    inside = f" ({', '.join(room.packages)})" if room.packages else ""
    lines = textwrap.wrap(room.sentence.rstrip(".") + inside, 78, max_lines=2, placeholder=" ...")
    for i, line in enumerate(lines):
        y = middle + 4 + 14 * i - 7 * (len(lines) - 1)
        yield f'<text x="{edge}" y="{y}" font-size="11" fill="#222222">{escape(line)}</text>'
    for name in room.imports:
        yield f'<circle cx="{columns[name]}" cy="{middle}" r="4.5" fill="{colour}"/>'
    yield f'<rect x="{columns[room.name] - 7}" y="{middle - 7}" width="14" height="14" fill="{colour}" opacity="0.3"/>'


def table(rooms: tuple[Room, ...]) -> str:
    """The rooms as a Markdown table, top to bottom as in the picture, between the two marks of the page."""
    rows = [
        (
            f"[`{room.name}`](../{source_of(room.name)})",
            room.sentence,
            ", ".join(room.imports) or "nothing of ours",
            room.group,
        )
        for room in reversed(rooms)
    ]
    drawn = markdown_table(("room", "what it is for", "imports today", "group"), rows)
    return "\n".join([BEGIN, "", drawn, "", END])


def with_table(page: str, rooms: tuple[Room, ...]) -> str:
    """The page with its table written anew. Raises ValueError where it has not exactly one place for it."""
    before, mark, rest = page.partition(BEGIN)
    _, other, after = rest.partition(END)
    if not mark or not other or BEGIN in rest:
        raise ValueError(f"docs/architecture.md needs one line {BEGIN} and, after it, one line {END}")
    return before + table(rooms) + after


def main() -> None:
    """Write the picture and the table. Raises ValueError where the page has no place for the table, and writes none."""
    argparse.ArgumentParser(prog="python -m harness.devtools.room_map", description=__doc__).parse_args()
    rooms, docs = read_rooms(), ROOT / "docs"
    page = docs / "architecture.md"
    text = with_table(page.read_text(encoding="utf-8"), rooms)
    page.write_text(text, encoding="utf-8")
    (docs / "architecture.svg").write_text(picture(rooms), encoding="utf-8")


if __name__ == "__main__":
    main()
