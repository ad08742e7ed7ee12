"""The trial that a cell belongs to, for MLflow's tags: read from the exported study, without Optuna."""

from __future__ import annotations

from pathlib import Path

from harness.foundation.json_object import read_json_object
from harness.records.paths import searches_folder


def trial_tags(results: Path, name: str) -> dict[str, dict[str, str]]:
    """Run id -> {"search.trial": ..., "search.state": ..., "search.confirms": ...}; empty where `name` is no search."""
    path = searches_folder(results) / f"{name}.json"
    if not path.exists():
        return {}
    study = read_json_object(path)
    tags: dict[str, dict[str, list[str]]] = {}

    def note(cell: str, tag: str, word: str) -> None:
        words = tags.setdefault(cell, {}).setdefault(tag, [])
        if word not in words:
            words.append(word)

    for trial in study["trials"]:
        for cell in trial["cells"].values():
            note(cell, "search.trial", f"{trial['share']} {trial['number']}".strip())
            note(cell, "search.state", trial["state"])
    for contender, cells in study["confirmation"].items():
        for cell in cells.values():
            note(cell, "search.confirms", contender)
    return {cell: {tag: ", ".join(words) for tag, words in of_cell.items()} for cell, of_cell in tags.items()}
