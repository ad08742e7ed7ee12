"""The static site: `results/site/index.html` with a data file per sweep, readable from disk without a server.

    index.html      page, style and script in one; the leaderboards of all sweeps; claims and searches as text
    data/<sweep>.js runs of a sweep: scores per seed, settings, passports; loaded by a script element when asked for
    ../figures/     linked, not copied

Everything is derived from result files: equal results make equal files. No request leaves the folder `results`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from harness.foundation.did_you_mean import nearest
from harness.records.folder import sweeps_in
from harness.records.paths import figures_folder, site_folder
from harness.records.run_result import write_atomic
from harness.viewers.site.board import sweep_entry
from harness.viewers.site.markdown import to_html
from harness.viewers.site.runs import run_entries

DOCUMENTS = (
    ("claims.md", "Published claims"),
    ("tables/search_*.md", "Search"),
    ("tables/break_even*.md", "Break-even"),
    ("tables/capacity*.md", "Capacity"),
)
"""(pattern under the results folder, title of the section)."""


def write_site(results: Path, sweeps: Sequence[str] = ()) -> list[Path]:
    """Write `<results>/site/index.html` and `data/*.js` of the named sweeps (default: all with results): the paths.

    Raises ValueError for a sweep without results, or where a file cannot be written. Files that are no results are
    named in the page and left alone.
    """
    known = sweeps_in(results)
    for sweep in sweeps:
        if sweep not in known:
            raise ValueError(f"sweep {sweep!r} has no results in {results}; {nearest(sweep, known)}")
    folder = site_folder(results)
    entries: list[dict[str, Any]] = []
    data: dict[Path, str] = {}
    for sweep in sweeps or known:
        entry, runs = sweep_entry(results, sweep)
        if runs:
            entries.append(entry)
            body = compact(run_entries(runs, entry["labels"]))
            data[folder / "data" / f"{sweep}.js"] = f"lowbitRuns({json.dumps(sweep)},{body});\n"
    page = {
        "sweeps": [{key: value for key, value in entry.items() if key != "labels"} for entry in entries],
        "documents": _documents(results),
        "figures": _other_figures(results, [entry["name"] for entry in entries]),
    }
    index = folder / "index.html"
    write_atomic(index, _page(page).encode())
    for path, text in data.items():
        write_atomic(path, text.encode())
    return [index, *data]


def compact(value: Any) -> str:
    """JSON without spaces, safe inside a script element."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("</", "<\\/")


def _page(data: dict[str, Any]) -> str:
    parts = {name: files("harness.viewers.site").joinpath(name).read_text(encoding="utf-8") for name in
             ("page.html", "page.css", "table.js", "run.js")}  # fmt: skip
    text = parts["page.html"].replace("/*css*/", parts["page.css"])
    text = text.replace("/*data*/", f"window.LOWBIT={compact(data)};")
    return text.replace("/*js*/", parts["table.js"] + parts["run.js"])


def _documents(results: Path) -> list[dict[str, str]]:
    """Generated texts as HTML: the claims, the searches."""
    found: list[dict[str, str]] = []
    for pattern, title in DOCUMENTS:
        for path in sorted(results.glob(pattern)):
            name = title if "*" not in pattern else f"{title}: {path.stem.partition('_')[2] or path.stem}"
            found.append({"title": name, "html": to_html(path.read_text(encoding="utf-8"))})
    return found


def _other_figures(results: Path, sweeps: Sequence[str]) -> list[str]:
    """Figures that belong to no sweep of the page, as paths from the page."""
    paths = sorted(figures_folder(results).rglob("*.png"))
    return [f"../{p.relative_to(results).as_posix()}" for p in paths if p.relative_to(results).parts[1] not in sweeps]
