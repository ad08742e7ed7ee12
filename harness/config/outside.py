"""Version and source of methods that came later than the ids of runs: an edited method is another run. These are the
methods of other packages, and the files of `methods` that are not in its `RECORDED`.

Left out: what such a package or file imports in its turn.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
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
    found = {f"{module} {source_hash(module)}" for module in _own_files(method, parts)}
    for module in used:
        package = by_module[module].dist
        named = f"{package.name} {package.version}" if package is not None else module
        found.add(f"{named} {source_hash(module)}")
    return tuple(sorted(found))


def _own_files(method: Method, parts: Sequence[Part]) -> set[str]:
    """Modules of `methods` that the method and the parts come from, those of `RECORDED` left out."""
    dotted = [type(part).__module__ for part in parts]
    if method.name in OWN:
        dotted.append(f"methods.{OWN[method.name]}")
    names = {name.split(".")[1] for name in dotted if name.startswith("methods.")}
    return {f"methods.{name}" for name in names - RECORDED}


@cache
def source_hash(module: str) -> str:
    """12 hexadecimal digits of the SHA-256 of a module's Python files: the file, or all files of the package."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"{module}: its source is not to be found; methods come from Python files")
    origin = Path(spec.origin)
    files = sorted(origin.parent.rglob("*.py")) if spec.submodule_search_locations else [origin]
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.relative_to(origin.parent).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
