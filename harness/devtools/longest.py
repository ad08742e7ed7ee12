"""The longest files and functions of the project, as a report: `python -m harness.devtools.longest`.

Length is a smell and no limit: a file is what one reads in one sitting, a function what one sees at once.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

from harness.foundation.provenance import ROOT

NUM_SHOWN = 10


def lengths(root: Path, folders: tuple[str, ...]) -> tuple[dict[str, int], dict[str, int]]:
    """(file -> lines, file::function -> lines) of the Python files in some folders, longest first."""
    files: dict[str, int] = {}
    functions: dict[str, int] = {}
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*.py")):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(root).as_posix()
        files[name] = len(text.splitlines())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions[f"{name}::{node.name}"] = (node.end_lineno or node.lineno) - node.lineno + 1
    return longest_first(files), longest_first(functions)


def longest_first(found: dict[str, int]) -> dict[str, int]:
    """Ordered by lines, then by name."""
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def main() -> None:
    """Print the longest NUM_SHOWN of each."""
    argparse.ArgumentParser(prog="python -m harness.devtools.longest", description=__doc__).parse_args()
    for what, found in zip(("files", "functions"), lengths(ROOT, ("harness", "methods", "tests")), strict=True):
        print(f"longest {what}:")
        for name, lines in list(found.items())[:NUM_SHOWN]:
            print(f"  {lines:5} {name}")


if __name__ == "__main__":
    main()
