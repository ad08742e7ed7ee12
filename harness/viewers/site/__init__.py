"""The static site: `results/site/index.html` with a data file per sweep, readable from disk without a server.

    index.html      page, style and script in one: the question of `lowbit advise` as a form, leaderboards of all
                    sweeps, claims and searches as text
    data/<sweep>.js runs of a sweep: scores and curves per seed, settings, passports; a script element
                    loads it when asked for
    ../figures/     linked, not copied

    board.py      leaderboard rows, figures and comparisons of a sweep as JSON
    runs.py       the runs of a sweep as compact JSON
    markdown.py   generated Markdown to HTML

Everything but the line that says when it was made is derived from result files: equal results make equal files. No
request leaves the folder `results`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Template
from tqdm import tqdm

from harness.foundation.json_object import read_json_object
from harness.foundation.progress_bar import progress_bar
from harness.foundation.provenance import commit
from harness.foundation.whole_file import write_atomic
from harness.records.folder import all_sweeps, check_sweep, series_of
from harness.records.paths import figures_folder, site_folder, tables_folder
from harness.studies.advise import answers
from harness.studies.advise.accuracy import SWEEP as MAIN
from harness.viewers.site.board import short_problems, sweep_entry
from harness.viewers.site.markdown import to_html
from harness.viewers.site.runs import CURVES, run_entries

DOCUMENTS = (
    ("claims.md", "Published claims"),
    ("tables/search_*.md", "Search"),
    ("tables/break_even*.md", "Break-even"),
    ("tables/capacity*.md", "Capacity"),
)
"""(pattern under the results folder, title of the section)."""
STAMP = re.compile(r'<p id="made">(.*?)</p>')


def write_site(results: Path, sweeps: Sequence[str] = ()) -> list[Path]:
    """Write `<results>/site/index.html` and `data/*.js` of the named sweeps (default: all with results): the paths.

    Files of an older site that this one has not are removed. Raises ValueError for a sweep without results, or where a
    file cannot be written. Files that are no results are named in the page and left alone.
    """
    written = pages(results, sweeps, stamp())
    for path, text in written.items():
        write_atomic(path, text.encode())
    for path in {*_files(results)} - {*written}:
        path.unlink()
    return list(written)


def outdated(results: Path, sweeps: Sequence[str]) -> list[Path]:
    """Files of the site that are not what `write_site` would write of the named sweeps, missing and surplus ones too;
    who made them and when does not count. Writes nothing; raises ValueError as `write_site` does."""
    there = {path: path.read_text(encoding="utf-8") for path in _files(results)}
    said = STAMP.search(there.get(site_folder(results) / "index.html", ""))
    wanted = pages(results, sweeps, said[1] if said else "")
    return sorted(path for path in {*wanted, *there} if wanted.get(path) != there.get(path))


def pages(results: Path, sweeps: Sequence[str], made: str) -> dict[Path, str]:
    """Path -> text of every file of the site, the page first; `made` is its stamp. Raises ValueError for a sweep
    without results."""
    for sweep in sweeps:
        check_sweep(results, sweep)
    known = all_sweeps(results)
    folder = site_folder(results)
    entries: list[dict[str, Any]] = []
    data: dict[Path, str] = {}
    for sweep in progress_bar(sweeps or known, "sweep"):
        entry, runs = sweep_entry(results, sweep)
        if runs:
            entries.append(entry)
            series, problems = series_of(results, sweep, CURVES)
            entry["problems"] += short_problems(problems)
            body = compact(run_entries(runs, entry["labels"], series))
            data[folder / "data" / f"{sweep}.js"] = f"lowbitRuns({json.dumps(sweep)},{body});\n"
        else:
            for line in entry["problems"]:
                tqdm.write(f"warning: left out: {line}", file=sys.stderr)
    page = {
        "advice": _advice(results),
        "opening": opening(entries),
        "sweeps": [{key: value for key, value in entry.items() if key != "labels"} for entry in entries],
        "documents": _documents(results),
        "figures": _other_figures(results, known),
    }
    return {folder / "index.html": _page(page, made), **data}


def _files(results: Path) -> list[Path]:
    """The files of the site that is there."""
    folder = site_folder(results)
    return [path for path in (folder / "index.html", *sorted((folder / "data").glob("*.js"))) if path.is_file()]


def stamp() -> str:
    """Time at which the site is made, in UTC, and its commit where that is known."""
    head, is_changed = commit()
    code = f" from commit {head[:12]}{', with changes' if is_changed else ''}" if head else ""
    return f"Made on {datetime.now(UTC):%Y-%m-%d}{code}."


def opening(entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The comparison that the page opens at: of the main table, if it is there, else of all sweeps, the context where
    most arms of enough seeds are better, worse or equal; the first of equals. Empty without one."""
    count: dict[tuple[str, str], int] = {}
    for entry in entries:
        for values in entry["rows"]:
            row = dict(zip(entry["columns"], values, strict=True))
            is_decided = row["verdict"].startswith(("better", "worse", "equal")) and not row["is_preliminary"]
            place = (entry["name"], row["context"])
            count[place] = count.get(place, 0) + is_decided
    if not count:
        return {}
    sweep, context = max(count, key=lambda place: (place[0] == MAIN, count[place]))
    return {"sweep": sweep, "context": context}


def compact(value: Any) -> str:
    """JSON without spaces, safe inside a script element."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("</", "<\\/")


def _page(data: dict[str, Any], made: str) -> str:
    def part(name: str) -> str:
        return files("harness.viewers.site").joinpath(name).read_text(encoding="utf-8")

    page = Template(part("page.html"), keep_trailing_newline=True)
    scripts = "".join(map(part, ("table.js", "charts.js", "advise.js", "run.js")))
    return page.render(css=part("page.css"), made=made, data=compact(data), js=scripts)


def _documents(results: Path) -> list[dict[str, str]]:
    """Generated texts as HTML: the claims, the searches."""
    found: list[dict[str, str]] = []
    for pattern, title in DOCUMENTS:
        for path in sorted(results.glob(pattern)):
            name = title if "*" not in pattern else f"{title}: {path.stem.partition('_')[2] or path.stem}"
            found.append({"title": name, "html": to_html(path.read_text(encoding="utf-8"))})
    return found


def _advice(results: Path) -> dict[str, Any] | None:
    """The answers of `lowbit advise` to the questions of the form; None where nobody wrote them."""
    path = tables_folder(results) / answers.NAME
    return read_json_object(path) if path.is_file() else None


def _other_figures(results: Path, sweeps: Sequence[str]) -> list[str]:
    """Figures that belong to no sweep with results, as paths from the page."""
    paths = sorted(figures_folder(results).rglob("*.png"))
    return [f"../{p.relative_to(results).as_posix()}" for p in paths if p.relative_to(results).parts[1] not in sweeps]
