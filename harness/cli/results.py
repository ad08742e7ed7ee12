"""`lowbit results`: verify, import, track or pack result files."""

from __future__ import annotations

import argparse
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

from harness.cli.options import add_results, add_tracking, check_trackers
from harness.foundation.whole_folder import replacing
from harness.records.paths import (
    PURPOSE,
    base_folders,
    bases_folder,
    looks_path,
    packed_folder,
    packed_path,
    packed_paths,
    purpose_path,
    runs_folder,
    sweep_folders,
)

TOLD = 10
"""Files that are no results, of those that a refused import names."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("action", choices=("verify", "import", "pack", "unpack"),
                        help="verify files, import runs, pack a sweep into one file, unpack it")  # fmt: skip
    parser.add_argument("source", nargs="?", help="import: a results folder, its archive or a packed sweep (none: log "
                             "to trackers); "
                                                  "pack, unpack: a sweep")  # fmt: skip
    add_tracking(parser)
    add_results(parser, reads=lambda a: a.action != "import", writes=lambda a: a.action != "verify", check=_check)


def _check(a: argparse.Namespace) -> None:
    """Raises ValueError for a source that is missing, not there, or one that verify does not take, for a tracker where
    nothing is logged, and for none where nothing else is done."""
    is_logging = a.action == "import" and a.source is None
    if "wandb" in a.trackers and not is_logging:
        raise ValueError("results: --tracking goes with import without a source, which logs what is there")
    if is_logging and not a.trackers:
        raise ValueError("results import: --no-tracking leaves nothing to do; give a source, or a tracker")
    if a.action == "verify" and a.source is not None:
        raise ValueError(f"results verify: {a.source} is one word too many; it checks all of --results")
    if a.source == "":  # a shell's variable that is not set
        raise ValueError(f"results {a.action}: '': a name or a path is expected")
    if a.action == "import" and a.source is not None:
        _check_source(Path(a.source))
    if a.action == "unpack" and a.source is not None:
        from harness.records.folder import check_is_packed

        check_is_packed(a.results, a.source, "results unpack")
    if a.action == "pack":
        from harness.records.folder import check_sweep

        if a.source is None:
            raise ValueError("results pack: which sweep? give the name of a folder of results/runs")
        check_sweep(a.results, a.source)


def run(a: argparse.Namespace) -> int:
    """Verify, import, pack or unpack."""
    from harness.records.packed import pack, unpack

    _check(a)
    if a.action == "verify":
        return verify_all(a.results)
    if a.action == "pack":
        path = pack(a.results, a.source)
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    elif a.action == "unpack":
        print(f"{unpack(a.results, a.source)} results unpacked")
    elif a.source is not None:
        import_all(a.source, a.results)
    else:
        check_trackers(a.trackers)
        return log_all_runs(a.results, a.trackers)
    return 0


def verify_all(results: Path) -> int:
    """Every file that is corrupt, incomplete or in the wrong place; exit code 1 if there is one. Changes no file."""
    from harness.records.folder import readable
    from harness.records.packed import check_packed
    from harness.records.run_result import verify

    problems, count = list[str](), len(list(runs_folder(results).rglob("*.json")))
    for path in packed_paths(results):
        try:
            records = check_packed(path)
            count += 0 if runs_folder(results, path.stem).is_dir() else records
        except ValueError as error:
            problems.append(str(error))
    for folder in sweep_folders(results):
        problems += [*verify(folder), *readable(folder)[1]]
    problems = list(dict.fromkeys(problems))
    for problem in problems:
        print(f"FAIL  {problem}")
    head = "FAIL" if problems else "ok  "
    print(f"{head}  {count} results, {len(problems)} problems")
    return 1 if problems else 0


def unpack_all(results: Path) -> None:
    """Packed sweeps unpacked, those that cannot be named in a warning."""
    from harness.records.packed import make_available

    for path in packed_paths(results):
        try:
            make_available(results, path.stem)
        except ValueError as error:
            print(f"warning: left alone: {error}", file=sys.stderr)


def log_all_runs(results: Path, trackers: tuple[str, ...]) -> int:
    """Log every run to the trackers. Exit code 1 where one is off."""
    from harness.viewers.trackers import log_all

    unpack_all(results)
    code = 0
    for name in trackers:
        count, is_on = log_all(results, name)
        print(f"logged {count} runs to {name}")
        code = code if is_on else 1
    return code


def import_all(source: str, results: Path) -> None:
    """Merge runs, packed ones too, purposes, looks and bases of another results folder, of an archive of one or of a
    packed sweep into ours.

    Raises ValueError, one line, for what is no result or no base, where there is neither, and while a sweep or a search
    is at work in our folder; nothing is imported then.
    """
    with tempfile.TemporaryDirectory(prefix="lowbit-import-") as scratch:

        def named(text: str) -> str:
            return text.replace(f"{scratch}/archive", source).replace(f"{scratch}/unpacked", source)

        try:
            _merge(Path(source), Path(scratch), results, named)
        except ValueError as error:
            raise ValueError(named(str(error))) from error


def _folder(source: Path, scratch: Path) -> Path:
    """The results folder that `source` is, or that it holds as an archive or a packed sweep, then in `scratch`."""
    from harness.records.packed import RECORDS, read_packed

    _check_source(source)
    if source.resolve() in (packed_folder(source.resolve().parent), bases_folder(source.resolve().parent)):
        raise ValueError(f"results import: {source}: a part of a results folder; give the folder above it")
    if source.is_dir() or source.suffix == ".json":
        return source
    _extract(source, scratch)
    if (scratch / RECORDS).is_file():
        packed = packed_path(scratch, next((record.sweep for record in read_packed(source)), source.stem))
        packed.parent.mkdir()
        shutil.copyfile(source, packed)
        return scratch
    places = [path for name in ("runs", "packed", "bases") for path in scratch.rglob(name) if path.is_dir()]
    return min(places, key=lambda path: len(path.parts)).parent if places else scratch


def _check_source(source: Path) -> None:
    if not source.exists():
        raise ValueError(f"results import: {source}: no such file or folder")


def _merge(source: Path, scratch: Path, results: Path, named: Callable[[str], str]) -> None:
    """Import `source`, with room for copies in `scratch`; `named` turns their paths in a text into what the user gave.
    Of a run that a folder and a packed sweep have, that of the folder counts."""
    from harness.records.packed import make_available, unpack
    from harness.records.results_lock import results_lock
    from harness.records.run_result import import_results
    from harness.records.sweep_file import read_purpose
    from harness.start.base_model import read_record

    folder, unpacked = _folder(source, scratch / "archive"), scratch / "unpacked"
    bases = base_folders(folder)
    packed = packed_paths(folder)
    runs = runs_folder(folder) if bases or packed or runs_folder(folder).is_dir() else folder
    for base in bases:
        read_record(base)
    sweeps = _sweeps_of([*_records(runs).values(), *packed], source, named)
    if not sweeps and not bases:
        raise ValueError(f"results import: {source} holds no results: no runs, no packed sweeps, no bases")
    unpacked.mkdir()
    packed_folder(unpacked).symlink_to(packed_folder(folder).resolve())
    unpack(unpacked)
    roots = (runs_folder(unpacked), runs)
    purposes = {path.parent.name: path for root in roots for path in root.rglob(PURPOSE)}
    for path in purposes.values():
        read_purpose(path)
    records = {name: path for root in roots for name, path in _records(root).items()}
    with results_lock(results, who="an import"):
        for sweep in sweeps:
            make_available(results, sweep)  # else the folder that an import makes would hide what is packed
        purposes = {name: path for name, path in purposes.items() if not runs_folder(results, name).is_dir()}
        added, known = import_results(records.values(), runs_folder(results))
        print(f"{len(added)} runs imported, {len(known)} were there already")
        for name, path in purposes.items():
            if runs_folder(results, name).is_dir():
                shutil.copyfile(path, purpose_path(results, name))
        new = [base for base in bases if not (bases_folder(results) / base.name).exists()]
        for base in new:
            with replacing(bases_folder(results) / base.name) as part:
                shutil.copytree(base, part, dirs_exist_ok=True)
        _import_looks(folder, results)
    if bases:
        print(f"{len(new)} bases imported, {len(bases) - len(new)} were there already")


def _records(root: Path) -> dict[Path, Path]:
    """Path within `root` -> every record there, or `root` itself where it is one."""
    return {path.relative_to(root): path for path in ([root] if root.is_file() else sorted(root.rglob("*.json")))}


def _extract(source: Path, folder: Path) -> None:
    """The files of a tar or zip archive into `folder`. Raises ValueError for one that is no whole archive, and for a
    tar where Python is too old to unpack one safely."""
    from harness.records.packed import DAMAGES

    is_safe = hasattr(tarfile, "data_filter")
    try:
        is_tar = tarfile.is_tarfile(source)  # asked first: a tar that ends in a zip looks like a zip, too
        if not is_tar:
            with zipfile.ZipFile(source) as archive:
                archive.extractall(folder)
        elif is_safe:
            with tarfile.open(source) as archive:
                archive.extractall(folder, filter="data")
                stream = archive.fileobj
                assert stream is not None
                stream.seek(archive.offset)
                if stream.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # extractall stops at a damaged header
                    raise tarfile.ReadError("it ends early or is damaged")
                stream.read(-1)  # a compressed stream tells at its end whether it was damaged
    except (tarfile.TarError, *DAMAGES) as error:
        raise ValueError(f"results import: {source}: no whole zip or tar archive: {error}") from error
    if is_tar and not is_safe:
        raise ValueError(f"results import: {source}: Python 3.11.4 or newer unpacks a tar safely; give a zip here")


def _import_looks(source: Path, results: Path) -> None:
    """Bring the looks at sweeps along: of two records of one sweep that with the stricter level stays."""
    from harness.records.looks import read_looks, write_looks

    for path in sorted(looks_path(source, "").parent.glob("*.json")):
        new, known = read_looks(source, path.stem), read_looks(results, path.stem)
        if new is not None and (known is None or new.level < known.level):
            write_looks(results, new)


def _sweeps_of(paths: Iterable[Path], source: Path, named: Callable[[str], str]) -> set[str]:
    """Sweeps of these records and packed sweeps. Raises ValueError, with a line on standard error for each, where files
    are neither, or their series are missing or corrupt."""
    from harness.records.packed import check_packed
    from harness.records.run_result import check_series, read_result

    sweeps, foreign = set[str](), list[str]()
    for path in paths:
        try:
            if path.suffix == ".zip":
                check_packed(path)
                sweeps.add(path.stem)
                continue
            result = read_result(path)
            check_series(path, result)
            sweeps.add(result.sweep)
        except ValueError as error:
            foreign.append(str(error))
    for line in foreign[:TOLD]:
        print(named(line), file=sys.stderr)
    if foreign:
        which = "named above" if len(foreign) <= TOLD else f"the first {TOLD} are named above"
        raise ValueError(f"{source}: files that are no whole results: {len(foreign)} ({which}); nothing was imported")
    return sweeps
