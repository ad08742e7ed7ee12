"""`lowbit figures [NAME...]`: paper figures into `<results>/figures/paper`, figures of sweeps, executed notebooks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.cli.options import add_results, always
from harness.cli.report import report
from harness.foundation.did_you_mean import nearest
from harness.foundation.whole_file import write_atomic
from harness.published.figures import FIGURES, draw, missing
from harness.records.folder import all_sweeps
from harness.records.paths import figures_folder

NOTEBOOKS = Path("notebooks")
TIMEOUT_S = 300
"""For one cell of a notebook."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="paper figures or sweeps (default: all paper figures)")
    parser.add_argument("--list", action="store_true", dest="is_listing", help="name the paper figures")
    parser.add_argument("--notebooks", action="store_true", dest="is_executing",
                        help="execute notebooks/*.py into their .ipynb as well (extra: notebooks)")  # fmt: skip
    add_results(parser, reads=always, writes=lambda a: not a.is_listing, check=lambda a: _check(a.names, a.results))


def _check(names: Sequence[str], results: Path) -> None:
    """Raises ValueError for a name that is neither a paper figure nor a sweep with results."""
    known = [*FIGURES, *all_sweeps(results)]
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise ValueError(f"{unknown!r} is no paper figure and no sweep with results; {nearest(unknown, known)}")


def run(a: argparse.Namespace) -> int:
    """List or draw. Raises ValueError for names or --notebooks beside --list, which lists all."""
    if a.is_listing and (a.names or a.is_executing):
        what = f"names, such as {a.names[0]}" if a.names else "--notebooks"
        raise ValueError(f"figures: --list does not go with {what}")
    return listing(a.results) if a.is_listing else figures(a.names, a.results, is_executing=a.is_executing)


def figures(names: Sequence[str], results: Path, *, is_executing: bool = False) -> int:
    """Draw what is named, or every paper figure. One without results is skipped, with the command that makes them.

    Raises ValueError for a name that is neither a paper figure nor a sweep with results.
    """
    from tqdm import tqdm

    _check(names, results)
    for name in tqdm(_chosen(names), unit="figure", disable=not sys.stderr.isatty()):
        if reason := missing(FIGURES[name], results):
            tqdm.write(f"skipped  {name}: {reason}", file=sys.stdout)
            continue
        tqdm.write(_drawn(name, results, is_asked=name in names), file=sys.stdout)
    for name in dict.fromkeys(name for name in names if name not in FIGURES):
        report(name, results, only="figures")
    return execute_all(names, results) if is_executing else 0


def _drawn(name: str, results: Path, is_asked: bool) -> str:
    """Draw and write one figure: a line for the terminal. Among many, one whose sweep lacks its arms is skipped."""
    from harness.published.figures.drawn import save

    try:
        written = save(draw(name, results), figures_folder(results, "paper"), name)
    except ValueError as error:
        if is_asked:
            raise
        return f"skipped  {name}: {error}"
    return f"written  {', '.join(map(str, written))}"


def _chosen(names: Sequence[str]) -> list[str]:
    """Paper figures in their order: those named, those of named sweeps, or all."""
    return [f.name for f in FIGURES.values() if not names or f.name in names or f.sweep in names]


def listing(results: Path) -> int:
    """One line per paper figure: name, paper, sweep, and whether it can be drawn now."""
    for figure in FIGURES.values():
        state = f"needs {reason}" if (reason := missing(figure, results)) else f"from {figure.sweep}"
        print(f"{figure.name:<20} {figure.paper:<15} {figure.title:<40} {state}")
    return 0


def execute_all(names: Sequence[str], results: Path, folder: Path = NOTEBOOKS) -> int:
    """Run every notebook whose results are there (of `names`, where given) and keep its outputs beside its source."""
    chosen = _chosen(names)
    for source in sorted(folder.glob("*.py")):
        if source.stem in FIGURES and (source.stem not in chosen or missing(FIGURES[source.stem], results)):
            continue
        target = source.with_suffix(".ipynb")
        write_atomic(target, executed(source).encode())
        print(f"written  {target}", flush=True)
    return 0


def executed(source: Path) -> str:
    """The notebook of a percent script with the outputs of running it, without times, ids at random and metadata that
    differs between machines. Raises ValueError where the packages for notebooks are missing."""
    try:
        import jupytext
        import nbformat
        from nbclient import NotebookClient
    except ImportError as error:
        raise ValueError(f"--notebooks needs {error.name}: make setup EXTRAS=dev, or the extra `notebooks`") from None
    notebook: Any = jupytext.read(source)
    client = NotebookClient(notebook, timeout=TIMEOUT_S, kernel_name="python3", record_timing=False)
    client.execute(cwd=str(source.parent.resolve()))
    notebook.metadata.pop("language_info", None)
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{index}"
        cell.metadata = nbformat.NotebookNode()
    return nbformat.writes(notebook) + "\n"
