"""The project's own files that commands read: sweeps, `claims.yaml`, committed results. The one place that finds them.

    in a clone      the clone's folders, seen from its top folder or through an editable installation
    installed       `harness/shipped`, which a wheel carries (setup.py copies `tool.lowbit.shipped` of pyproject.toml)

Results go to `./results`. Outside a clone, where no such folder is, commands read the committed ones as they lie, and
the first that writes copies them there, so that every command finds what it would find in a clone. Left out: the
presets of the configuration, which lie beside the code everywhere.
"""

from __future__ import annotations

import os
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
STARTS = {"search": "search_", "throughput": "throughput_"}
"""Command -> how the files of `sweeps/` begin that it runs; `lowbit sweep` runs all others."""
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
    """Copy the committed results to `target` where nothing is yet, all of them or none; the number of files. A folder
    that is there stays as it is, so that nothing comes back which was deleted. Raises ValueError where none can be."""
    if target.exists():
        return 0
    names = [path.relative_to("results") for path in shipped_files(source) if path.parts[0] == "results"]
    part = target.with_name(f".{target.name}.part-{os.getpid()}")
    try:
        for name in names:
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / "results" / name, part / name)
        if names:
            part.rename(target)
    except OSError as error:
        if not target.is_dir():
            raise ValueError(f"results={target}: cannot be written: {error.strerror}") from error
        return 0  # another process was faster
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return len(names)
