"""Version and source of methods that came later than the ids of runs: an edited method is another run. These are the
methods of other packages, and the files of `methods` that are not in its `RECORDED`, with those that they import.

Left out: what else such a package or file imports.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path

from harness.api import Method, Part
from methods import OWN, RECORDED, registry


def sources_of(method: Method, parts: Sequence[Part]) -> tuple[str, ...]:
    """`package version hash` of every other package that offers the method or defines one of the parts, and
    `methods.file hash` of such files of our own, sorted."""
    entries = registry().entries
    by_module = {entry.module.partition(".")[0]: entry for entry in entries.values()}
    used = {type(part).__module__.partition(".")[0] for part in parts} & by_module.keys()
    if method.name in entries:
        used.add(entries[method.name].module.partition(".")[0])
    own = [f"methods.{OWN[method.name]}"] if method.name in OWN else []
    found = _hashed([*own, *(type(part).__module__ for part in parts)], without=RECORDED)
    for module in used:
        package = by_module[module].dist
        named = f"{package.name} {package.version}" if package is not None else module
        found.add(f"{named} {source_hash(module)}")
    return tuple(sorted(found))


def part_sources(part: Part) -> tuple[str, ...]:
    """`methods.file hash` of the file of `methods` that defines a part and of those that it imports, files in
    `RECORDED` too, sorted: what the part prepares may change with each. None for a part of another package."""
    return tuple(sorted(_hashed([type(part).__module__])))


def _hashed(modules: Sequence[str], without: Collection[str] = ()) -> set[str]:
    """`methods.file hash` of these modules, of those of `methods` that they import, and so on."""
    found, left = set[str](), {name.split(".")[1] for name in modules if name.startswith("methods.")}
    while left := left - set(without) - found:
        found |= left
        left = {name for module in left for name in _imported(_file_of(f"methods.{module}"))}
    return {f"methods.{name} {source_hash(f'methods.{name}')}" for name in found}


def _imported(file: Path) -> set[str]:
    """Modules of `methods` that a file of it imports, by their last name."""
    dotted = set[str]()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            dotted |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, ["methods"] * (node.level == 1) + [node.module]))
            dotted |= {f"{base}.{alias.name}" for alias in node.names}
    names = {name.split(".")[1] for name in dotted if name.startswith("methods.")}
    return {name for name in names if importlib.util.find_spec(f"methods.{name}")}


@cache
def source_hash(module: str) -> str:
    """12 hexadecimal digits of the SHA-256 of a module's Python files: the file, or all files of the package."""
    origin = _file_of(module)
    files = sorted(origin.parent.rglob("*.py")) if origin.name == "__init__.py" else [origin]
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.relative_to(origin.parent).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _file_of(module: str) -> Path:
    """The file of a module, of a package its `__init__.py`. Raises ValueError where there is none."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"{module}: its source is not to be found; methods come from Python files")
    return Path(spec.origin)
