"""Version and source of the other packages whose methods a run uses: an edited method is another run.

Left out: what such a package imports in its turn.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from harness.api import Method, Part
from methods import registry


def sources_of(method: Method, parts: Iterable[Part]) -> tuple[str, ...]:
    """`package version hash` of every other package that offers the method or defines one of the parts, sorted."""
    entries = registry().entries
    by_module = {entry.module.partition(".")[0]: entry for entry in entries.values()}
    used = {type(part).__module__.partition(".")[0] for part in parts} & by_module.keys()
    if method.name in entries:
        used.add(entries[method.name].module.partition(".")[0])
    found = set[str]()
    for module in used:
        package = by_module[module].dist
        named = f"{package.name} {package.version}" if package is not None else module
        found.add(f"{named} {source_hash(module)}")
    return tuple(sorted(found))


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
