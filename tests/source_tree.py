"""Our own Python files as syntax trees, for the tests that check rules of the code itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One Python file: its path from the repository root, with forward slashes, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.path)

    @property
    def module(self) -> str:
        """Dotted name: harness/api.py is harness.api, harness/tasks/__init__.py is harness.tasks."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@dataclass(frozen=True)
class Scope:
    """A function or class with the names around it."""

    name: str
    """Qualified within the file: `Class.method`, `function`, `function.inner`."""
    node: Function | ast.ClassDef
    outer: tuple[Function | ast.ClassDef, ...]
    """Functions and classes around it, outermost first."""

    @property
    def parent(self) -> Function | ast.ClassDef | None:
        """The innermost of `outer`, None at the top of the file."""
        return self.outer[-1] if self.outer else None


@cache
def sources(*folders: str) -> tuple[Source, ...]:
    """Every Python file below the given top-level folders, in path order. Read and parsed once per process."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return tuple(Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths)


def scopes(node: ast.AST, outer: tuple[Function | ast.ClassDef, ...] = ()) -> Iterator[Scope]:
    """All functions and classes below `node`, outer before inner."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield Scope(".".join([*(scope.name for scope in outer), child.name]), child, outer)
            yield from scopes(child, (*outer, child))
        else:
            yield from scopes(child, outer)


def dotted(node: ast.AST) -> str:
    """`torch.random.seed` for that expression; "" for anything that is not names joined by dots."""
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""


def imported(source: Source) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, wherever it stands. `from a import b` is a.b if that is a module of ours."""
    package = source.module if source.path.endswith("__init__.py") else source.module.rpartition(".")[0]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            inner = {alias.name: ROOT / base.replace(".", "/") / alias.name for alias in node.names}
            found = [
                f"{base}.{name}" if path.is_dir() or path.with_suffix(".py").is_file() else base
                for name, path in inner.items()
            ]
            yield from ((node.lineno, module) for module in dict.fromkeys(found))
