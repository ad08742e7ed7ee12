"""`lowbit methods | metrics | doctor | passport | results | browse | site`: look, change nothing but on request."""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from harness.api import Method, knobs
from harness.config.compose import check_supported, compose
from harness.config.load import load
from harness.config.schema import RunConfig
from harness.engines.embedded.engine import EmbeddedEngine
from harness.engines.vllm import builds
from harness.records.folder import readable
from harness.records.metric_names import METRICS, translate
from harness.records.packed import make_available, pack, unpack
from harness.records.run_result import RunResult, import_results, read_result, verify
from harness.start.base_model import read_record
from harness.trainers.local.trainer import EXTRAS
from harness.trainers.verl import checks
from methods import METHODS, method_named


def table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Columns aligned by width, header underlined."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in (header, *rows)]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def methods(names: Sequence[str], *, is_json: bool) -> int:
    """Every method in a table; the named ones with their parts, knobs and what of them is reconstructed."""
    chosen = [method_named(name) for name in names] or list(METHODS.values())
    if is_json:
        values = {
            m.name: {
                "paper": m.paper,
                "summary": m.summary,
                "claim": m.claim,
                "status": status_of(m),
                "is_control": m.is_control,
                "parts": {type(p).__name__: knobs(p) for p in m.parts},
                "fixed": {k: v for k in ("mode", "agg", "denom") if (v := getattr(m, k)) is not None},
                "precisions": list(m.precisions),
                "engines": engines_of(m),
                "reconstructed": m.reconstructed,
            }
            for m in chosen
        }
        print(json.dumps(values, indent=2))
        return 0
    if not names:
        rows = [(m.name, status_of(m), m.paper or "-", "+".join(type(p).__name__ for p in m.parts) or "-",
                 _shortened(m.precisions), " ".join(engines_of(m)), m.claim or m.summary) for m in chosen]  # fmt: skip
        print(table(rows, ("method", "status", "paper", "parts", "formats", "engines", "claim of its authors")))
        print("\nlowbit methods NAME shows knobs and what is reconstructed.")
        return 0
    for m in chosen:
        fixed = "".join(
            f", {key}={value}" for key in ("mode", "agg", "denom") if (value := getattr(m, key)) is not None
        )
        print(f"{m.name}: {m.summary}{fixed}")
        for title, words in (("status", status_of(m)), ("paper", m.paper), ("claim", m.claim),
                             ("formats", " ".join(m.precisions)), ("engines", " ".join(engines_of(m)))):  # fmt: skip
            print(f"    {title:<14} {words or '-'}")
        for p in m.parts:
            settings = ", ".join(f"{name}={value}" for name, value in knobs(p).items())
            print(f"    part           {type(p).__name__}({settings})")
        if m.reconstructed:
            print(f"    reconstructed  {m.reconstructed}")
        for engine in ENGINES:
            if engine not in engines_of(m):
                print(f"    {f'not {engine}':<14} {refusal(engine, m, m.precisions[0])}")
    return 0


def status_of(method: Method) -> str:
    """control, exact, or reconstructed where part of the rule is ours."""
    return "control" if method.is_control else "reconstructed" if method.reconstructed else "exact"


ENGINES = ("embedded", "vllm", "verl")
"""What can run a method; vllm: the GPU's build, with the local trainer; verl: that build under trainer=verl."""


def engines_of(method: Method) -> list[str]:
    """The engines that can run the method at one of its precisions."""
    return [engine for engine in ENGINES if any(refusal(engine, method, name) is None for name in method.precisions)]


def refusal(engine: str, method: Method, precision: str) -> str | None:
    """Why an engine cannot run the method at a precision; None where it can."""
    config = replace(_at(precision), method=method.name)
    if engine == "verl":
        trainer, vllm = replace(config.trainer, name="verl"), replace(config.engine, name="vllm")
        config = replace(config, trainer=trainer, engine=vllm)
    supports = EmbeddedEngine.supports if engine == "embedded" else builds.supports(builds.CUDA)
    try:
        composed = compose(config)
        if engine == "verl":
            checks.check(config, composed)
        if engine != "embedded":
            builds.check_plan(builds.CUDA, composed.plan)
        check_supported(composed, supports, engine, EXTRAS)
    except ValueError as error:
        return str(error)
    return None


@cache
def _at(precision: str) -> RunConfig:
    return load([f"precision={precision}"])


def _shortened(precisions: Sequence[str]) -> str:
    """The default first, and how many more."""
    shown = " ".join(precisions[:3])
    return shown if len(precisions) <= 3 else f"{shown} +{len(precisions) - 3}"


def metrics(*, is_translated: bool) -> int:
    """What is logged at every step; with `is_translated` beside the names other frameworks use."""
    if is_translated:
        rows = translate()
        header = list(rows[0])
        print(table([[row[name] or "-" for name in header] for row in rows], header))
        return 0
    header = ("metric", "unit", "better", "definition")
    print(table([(m.name, m.unit, m.direction, m.definition) for m in METRICS.values()], header))
    return 0


def find_run(beginning: str, results: Path) -> RunResult:
    """The one result whose id starts with `beginning`. Raises ValueError for none or several."""
    _make_ready(results)
    folders = sorted(path for path in (results / "runs").glob("*") if path.is_dir())
    found = [r for folder in folders for r in readable(folder)[0] if r.run_id.startswith(beginning)]
    if len({r.run_id for r in found}) != 1:
        names = ", ".join(f"{r.run_id} ({r.name})" for r in found[:8]) or "none"
        raise ValueError(f"run {beginning!r} matches {len(found)} results in {results}/runs: {names}")
    return found[0]


def passport(beginning: str, results: Path) -> int:
    """Planned and realized formats of a run, and how it happened."""
    result = find_run(beginning, results)
    print(f"{result.run_id}  {result.name}  {result.status}")
    if result.launch:
        print("launch:   " + ", ".join(f"{name}={value}" for name, value in result.launch.items()))
    if result.memory_gib:
        known = {name: gib for name, gib in result.memory_gib.items() if gib is not None}
        print("memory:   " + ", ".join(f"{name} {gib:.2f} GiB" for name, gib in known.items()))
    for line in result.retries:
        print(f"retried:  {line}")
    print("planned:  " + ", ".join(f"{k}={v}" for k, v in result.planned.items() if v))
    if result.trainer:
        print("trainer:  " + ", ".join(f"{count} linear layers in {who}" for who, count in result.trainer.items()))
    if result.passport is None:
        print("realized: nothing was loaded")
        return 0
    realized = result.passport
    print(
        f"realized: engine={realized['engine']}, sampler={realized['sampler']}, kv={realized['kv'] or 'base precision'}"
    )
    rows = [
        (t["name"], t["format"], t["dtype"], "x".join(map(str, t["scale_shape"])) if t["scale_shape"] else "-",
         realized["acts"].get(t["name"]) or "-", t["hash"])
        for t in realized["weights"]
    ]  # fmt: skip
    print(table(rows, ("tensor", "format", "codes", "scales", "inputs", "crc-32")))
    return 0


def verify_all(results: Path) -> int:
    """Every file that is corrupt, incomplete or in the wrong place; exit code 1 if there is one. Changes no file."""
    problems = _unpacked(results)
    for folder in sorted(path for path in (results / "runs").glob("*") if path.is_dir()):
        problems += [*verify(folder), *readable(folder)[1]]
    problems = list(dict.fromkeys(problems))
    for problem in problems:
        print(problem)
    print(f"{len(list((results / 'runs').rglob('*.json')))} result files, {len(problems)} problems")
    return 1 if problems else 0


def _unpacked(results: Path) -> list[str]:
    """Make packed sweeps available, each on its own; a line per packed file that is none."""
    problems: list[str] = []
    for path in sorted((results / "packed").glob("*.zip")):
        try:
            make_available(results, path.stem)
        except ValueError as error:
            problems.append(str(error))
    return problems


def _make_ready(results: Path) -> None:
    """Packed sweeps unpacked, those that cannot be named in a warning."""
    for problem in _unpacked(results):
        print(f"warning: left alone: {problem}", file=sys.stderr)


def pack_one(sweep: str | None, results: Path, *, is_packing: bool) -> int:
    """A sweep's results into one file, or the missing results of packed sweeps (of one, where named) out of theirs."""
    if not is_packing:
        print(f"{unpack(results, sweep)} results unpacked")
    elif sweep is None:
        raise ValueError("results pack: which sweep? give the name of a folder of results/runs")
    else:
        path = pack(results, sweep)
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    return 0


def import_all(source: str | None, results: Path) -> int:
    """Merge runs and bases of another results folder, or of an archive of one, into ours; without a source, rebuild
    MLflow from ours. Raises ValueError, one line, for what is no result or no base; nothing is imported then."""
    if source is None:
        from harness.viewers.mlflow import rebuild

        _make_ready(results)
        print(f"logged {rebuild(results)} runs to MLflow")
        return 0
    if Path(source).is_file() and (zipfile.is_zipfile(source) or tarfile.is_tarfile(source)):
        with tempfile.TemporaryDirectory(prefix="lowbit-import-") as folder:
            shutil.unpack_archive(source, folder, filter="data")
            inner = next((path.parent for path in sorted(Path(folder).rglob("runs")) if path.is_dir()), Path(folder))
            return import_all(str(inner), results)
    bases = [path for path in sorted((Path(source) / "bases").glob("*")) if path.is_dir() and path.name[0] != "."]
    runs = Path(source) / "runs" if bases or (Path(source) / "runs").is_dir() else Path(source)
    for base in bases:
        read_record(base)
    foreign = _foreign(runs)
    for line in foreign:
        print(line, file=sys.stderr)
    if foreign:
        raise ValueError(f"{source}: {len(foreign)} files are no results (named above); nothing was imported")
    added, known = import_results(runs, results / "runs") if runs.exists() or not bases else ([], [])
    print(f"{len(added)} runs imported, {len(known)} were there already")
    new = [base for base in bases if not (results / "bases" / base.name).exists()]
    for base in new:
        part = results / "bases" / f".{base.name}.part"
        shutil.copytree(base, part, dirs_exist_ok=True)
        part.rename(results / "bases" / base.name)
    if bases:
        print(f"{len(new)} bases imported, {len(bases) - len(new)} were there already")
    return 0


def _foreign(source: Path) -> list[str]:
    """A line per JSON file under `source`, or for `source` itself, that is no result."""
    found: list[str] = []
    for path in sorted(source.rglob("*.json")) if source.is_dir() else [source] if source.is_file() else []:
        try:
            read_result(path)
        except ValueError as error:
            found.append(str(error))
    return found


def browse_all(results: Path, port: int, sweep: str | None, words: Sequence[str]) -> int:
    """MLflow's pages over the results, those of packed sweeps too."""
    from harness.viewers.mlflow import browse

    _make_ready(results)
    return browse(results, port, sweep, words)


def site(results: Path, sweeps: Sequence[str]) -> int:
    """Write `<results>/site/index.html` and its data files."""
    from harness.viewers.site import write_site

    _make_ready(results)
    written = write_site(results, sweeps)
    size = sum(path.stat().st_size for path in written)
    print(f"{written[0]}: {len(written)} files, {size / 1e6:.2f} MB; opens in a browser as it is")
    return 0
