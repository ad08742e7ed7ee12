"""The project's own files that commands read: sweeps, `claims.yaml`, committed results. The one place that finds them.

    in a clone      the clone's folders, seen from its top folder or through an editable installation
    installed       `harness/shipped`, which a wheel carries (setup.py copies `tool.lowbit.shipped` of pyproject.toml)

Results go to `./results`. In a folder that is no clone the committed ones are copied there once, so that every command
finds what it would find in a clone. Left out: the presets of the configuration, which lie beside the code everywhere.
"""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

from harness.foundation.provenance import ROOT

SHIPPED = Path(__file__).parents[1] / "shipped"


def home(*places: Path) -> Path:
    """The first of `places` that holds the project's files, the last where none does. Default: the current folder, the
    clone that this code lies in, the installed package."""
    places = places or (Path(), ROOT, SHIPPED)
    return next((p for p in places if (p / "claims.yaml").is_file() and (p / "sweeps").is_dir()), places[-1])


HOME = home()
SWEEPS = HOME / "sweeps"
CLAIMS = HOME / "claims.yaml"
RESULTS = Path("results")
"""The folder of results where a command names no other."""


def shipped_files(source: Path) -> list[Path]:
    """Files under `source` that a wheel carries, as paths from there, sorted: all of an installed package, and of a
    clone those that `tool.lowbit.shipped` of its pyproject.toml names."""
    project, patterns = source / "pyproject.toml", ["**/*"]
    if project.is_file():
        patterns = tomllib.loads(project.read_text(encoding="utf-8"))["tool"]["lowbit"]["shipped"]
    found = {path for pattern in patterns for path in source.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(source) for path in found)


def committed_sweeps(source: Path = HOME) -> list[str]:
    """Sweeps whose results are committed, by name: those packed in one file, and those with a folder of runs."""
    files = [path.parts for path in shipped_files(source)]
    packed = {Path(parts[2]).stem for parts in files if parts[:2] == ("results", "packed")}
    return sorted(packed | {parts[2] for parts in files if parts[:2] == ("results", "runs")})


def bring_results(target: Path = RESULTS, source: Path = HOME) -> int:
    """Copy the committed results that `target` lacks into it; the number of files. None in a clone, whose own folder it
    is. Files that are there stay as they are."""
    if target.resolve() == (source / "results").resolve():
        return 0
    names = [path.relative_to("results") for path in shipped_files(source) if path.parts[0] == "results"]
    missing = [name for name in names if not (target / name).exists()]
    for name in missing:
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        shutil.copyfile(source / "results" / name, part)
        part.replace(path)
    return len(missing)
